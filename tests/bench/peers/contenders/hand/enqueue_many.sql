insert into tasks (kind, payload) select 'bench', unnest(:payloads::jsonb[]) returning id;
