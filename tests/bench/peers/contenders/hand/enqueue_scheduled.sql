insert into tasks (kind, payload, run_at) select 'bench', unnest(:payloads::jsonb[]), now() + interval '1 day' returning id;
