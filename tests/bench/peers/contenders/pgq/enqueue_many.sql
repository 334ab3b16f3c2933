select pgq.insert_event('bench', 'bench', p::text) from unnest(:payloads::jsonb[]) as p;
