-- stint.check(): every violation of the storage rules, in plain SQL so that a DBA can read what is checked.

CREATE FUNCTION stint.check() RETURNS TABLE (rule text, queue text, id uuid, detail text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH places AS (
        SELECT w.queue, w.id, 'ready' AS place, w.lane, w.attempt, w.counted FROM stint.place_ready w
        UNION ALL SELECT s.queue, s.id, 'scheduled', s.lane, s.attempt, s.counted FROM stint.place_scheduled s
        UNION ALL SELECT r.queue, r.id, 'running', r.lane, r.attempt - 1, r.counted FROM stint.place_running r
    ), ended AS (
        SELECT a.queue, a.id, count(*) AS attempts, max(a.attempt) AS last,
               count(*) FILTER (WHERE a.ended IN ('failed', 'lapsed')) AS counted
        FROM stint.task_attempts a GROUP BY a.queue, a.id
    )
    SELECT 'a live task is in exactly one place, a finished one in none', f.queue, f.id,
           coalesce('in ' || string_agg(p.place, ', '), 'in no place') || coalesce(', outcome ' || o.outcome, ', no outcome')
    FROM stint.task_facts f
    LEFT JOIN places p ON p.queue = f.queue AND p.id = f.id
    LEFT JOIN stint.task_outcomes o ON o.queue = f.queue AND o.id = f.id
    GROUP BY f.queue, f.id, o.outcome
    HAVING count(p.place) + (o.outcome IS NOT NULL)::int <> 1
    UNION ALL
    SELECT 'every row belongs to a task', x.queue, x.id, x.what
    FROM (SELECT p.queue, p.id, p.place AS what FROM places p
          UNION ALL SELECT o.queue, o.id, 'outcome' FROM stint.task_outcomes o
          UNION ALL SELECT e.queue, e.id, 'attempts' FROM ended e
          UNION ALL SELECT k.queue, k.id, 'key ' || k.key FROM stint.task_keys k
          UNION ALL SELECT u.queue, u.id, 'late usage' FROM stint.usage_late u) x
    WHERE NOT EXISTS (SELECT FROM stint.task_facts f WHERE f.queue = x.queue AND f.id = x.id)
    UNION ALL
    SELECT 'every task belongs to a queue', f.queue, f.id, 'unknown queue'
    FROM stint.task_facts f WHERE NOT EXISTS (SELECT FROM stint.queue_config q WHERE q.queue = f.queue)
    UNION ALL
    SELECT 'every waiting task stands in a lane of its queue', p.queue, p.id, p.place || ', lane ' || p.lane
    FROM places p WHERE NOT EXISTS (SELECT FROM stint.lanes l WHERE l.queue = p.queue AND l.lane = p.lane)
    UNION ALL
    SELECT 'every ended attempt has its row, numbered from 1', p.queue, p.id,
           p.place || ' after attempt ' || p.attempt || ', ' || coalesce(e.attempts, 0) || ' rows up to ' || coalesce(e.last, 0)
    FROM places p LEFT JOIN ended e ON e.queue = p.queue AND e.id = p.id
    WHERE p.attempt <> coalesce(e.attempts, 0) OR p.attempt <> coalesce(e.last, 0)
    UNION ALL
    SELECT 'attempts are counted exactly', p.queue, p.id, p.place || ' counts ' || p.counted || ', rows ' || coalesce(e.counted, 0)
    FROM places p LEFT JOIN ended e ON e.queue = p.queue AND e.id = p.id
    WHERE p.counted <> coalesce(e.counted, 0)
    UNION ALL
    SELECT 'an outcome names the last attempt', o.queue, o.id, o.outcome || ' by attempt ' || o.attempt || ' of ' || coalesce(e.last, 0)
    FROM stint.task_outcomes o LEFT JOIN ended e ON e.queue = o.queue AND e.id = o.id
    WHERE o.attempt <> coalesce(e.last, 0)
    UNION ALL
    SELECT 'an outcome and the end of an attempt are known words', x.queue, x.id, x.word
    FROM (SELECT o.queue, o.id, o.outcome AS word FROM stint.task_outcomes o WHERE o.outcome NOT IN ('completed', 'failed', 'cancelled')
          UNION ALL
          SELECT a.queue, a.id, a.ended FROM stint.task_attempts a
          WHERE a.ended NOT IN ('completed', 'failed', 'cancelled', 'released', 'lapsed')) x
    UNION ALL
    SELECT 'no lease is granted twice', r.queue, r.id, 'running under the lease of attempt ' || a.attempt
    FROM stint.place_running r JOIN stint.task_attempts a ON a.queue = r.queue AND a.id = r.id AND a.lease = r.lease
    UNION ALL
    SELECT 'a running task reserves what its lane draws on', r.queue, r.id, coalesce(r.budgets::text, 'nothing')
    FROM stint.place_running r
    WHERE coalesce(cardinality(r.budgets), 0) <> coalesce(cardinality(r.reserved), 0)
    UNION ALL
    SELECT 'an attempt is charged to the budgets it reserved', a.queue, a.id, 'attempt ' || a.attempt || ', ' || a.ended
    FROM stint.task_attempts a
    WHERE coalesce(cardinality(a.budgets), 0) <> coalesce(cardinality(a.reserved), 0)
       OR coalesce(cardinality(a.budgets), 0) <> coalesce(cardinality(a.charged), 0)
       OR a.ended = 'released' AND a.budgets IS NOT NULL
    UNION ALL
    SELECT 'the live usage of a budget is what its running tasks reserve', NULL, NULL, u.budget || ': ' || u.running || ' running, ' || u.tokens || ' tokens'
    FROM stint.budget_usage() u WHERE NOT u.derived
$$;
REVOKE ALL ON FUNCTION stint.check() FROM PUBLIC;
COMMENT ON FUNCTION stint.check() IS
'Returns every violation of the storage rules; no row means all is well. Reads whole tables: for tests and for nights when you doubt. The budget rule may name a budget for the moment a claim takes. Use in FROM.';
