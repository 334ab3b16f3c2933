select * from stint.claim('bench', 'w' || :client_id::text, 100) \gset
-- As clients do it: they send JSON.
\json items id,lease
select * from stint.complete_many('bench', :items::jsonb);
