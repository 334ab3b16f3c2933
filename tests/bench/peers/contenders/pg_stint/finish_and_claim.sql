select * from stint.finish_and_claim('bench', :id::uuid, :lease::uuid, 'w' || :client_id::text) where kind = 'claimed' \gset
