insert into job (args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states)
select unnest(:payloads::jsonb[]), 'bench', 25, '{}', 1, 'default', now() + interval '1 day', 'scheduled', '{}', null, null
on conflict (unique_key) where unique_key is not null and unique_states is not null and in_bitmask(unique_states, state)
do update set kind = excluded.kind
returning *, xmax <> 0 as skipped;
