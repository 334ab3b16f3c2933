-- A thousand tasks as a client would send them, made once: the text of a JSON array.
select jsonb_agg(jsonb_build_object('payload', :payload::jsonb, 'tokens', 100))::text as tasks,
       jsonb_agg(jsonb_build_object('payload', :payload::jsonb, 'tokens', 100, 'delay', '1 day'))::text as later,
       jsonb_agg(jsonb_build_object('payload', :payload::jsonb, 'tokens', 100, 'priority', 9, 'budgets', '["exhausted"]'::jsonb))::text as withheld
from generate_series(1, 1000) \gset
