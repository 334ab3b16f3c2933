-- The product has no call for many: its own function once for each task, in one transaction.
select s.task_id from unnest(:payloads::jsonb[]) as p, lateral absurd.spawn_task('bench', 'bench', p, '{"max_attempts": 5}'::jsonb) as s;
