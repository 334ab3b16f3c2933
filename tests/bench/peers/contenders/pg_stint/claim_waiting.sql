select * from stint.claim('bench', 'w' || :client_id::text, wait => '1 s') \gset
select * from stint.complete('bench', :id::uuid, :lease::uuid);
