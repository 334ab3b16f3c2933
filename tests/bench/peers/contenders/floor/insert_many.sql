insert into floor (payload) select unnest(:payloads::jsonb[]);
