select * from stint.claim('bench', 'w' || :client_id::text, wait => '20 s') \gset
