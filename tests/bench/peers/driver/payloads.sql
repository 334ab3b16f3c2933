-- A thousand payloads as a client would send them, made once: the text of an array of jsonb.
select array_agg(:payload::jsonb)::text as payloads from generate_series(1, 1000) \gset
