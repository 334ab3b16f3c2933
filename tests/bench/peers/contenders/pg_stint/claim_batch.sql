select * from stint.claim('bench', 'w' || :client_id::text, 100) \gset
select * from stint.complete_many('bench', (select jsonb_agg(jsonb_build_object('id', i, 'lease', l)) from unnest(:id::uuid[], :lease::uuid[]) as held (i, l)));
