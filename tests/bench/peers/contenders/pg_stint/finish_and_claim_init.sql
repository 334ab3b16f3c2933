select id, lease from stint.claim('bench', 'w' || :client_id::text) \gset
