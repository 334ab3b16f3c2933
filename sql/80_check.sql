-- stint.check(): every violation of the storage rules, in plain SQL so that a DBA can read what is checked.

-- Without just-in-time compilation, as stint.verify_accounting, and for the same reason.
CREATE FUNCTION stint.check() RETURNS TABLE (rule text, queue text, id uuid, detail text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
    WITH places AS (
        SELECT w.queue, w.id, 'ready' AS place, w.lane, w.attempt, w.counted FROM stint.place_ready w
        UNION ALL SELECT s.queue, s.id, 'scheduled', s.lane, s.attempt, s.counted FROM stint.place_scheduled s
        UNION ALL SELECT b.queue, b.id, 'blocked', b.lane, b.attempt, b.counted FROM stint.place_blocked b
        UNION ALL SELECT r.queue, r.id, 'running', r.lane, r.attempt - 1, r.counted FROM stint.place_running r
    ), ended AS (
        SELECT a.queue, a.id, count(*) AS attempts, max(a.attempt) AS last,
               count(*) FILTER (WHERE a.ended IN ('failed', 'lapsed') AND a.attempt > coalesce(t.attempt, 0)) AS counted
        FROM stint.task_attempts a
        LEFT JOIN (SELECT r.queue, r.id, max(r.attempt) AS attempt FROM stint.task_retries r GROUP BY r.queue, r.id) t
               ON t.queue = a.queue AND t.id = a.id
        GROUP BY a.queue, a.id
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
          -- A key may outlive the history of its task, where that is not kept for ever.
          UNION ALL SELECT k.queue, k.id, 'key ' || k.key FROM stint.task_keys k WHERE get_byte(uuid_send(k.id), 15) = 0
          UNION ALL SELECT c.queue, c.id, 'checkpoint ' || c.step FROM stint.task_checkpoints c
          UNION ALL SELECT u.queue, u.id, 'late usage' FROM stint.usage_late u
          UNION ALL SELECT t.queue, t.id, 'retry ' || t.retry FROM stint.task_retries t) x
    WHERE NOT EXISTS (SELECT FROM stint.task_facts f WHERE f.queue = x.queue AND f.id = x.id)
    UNION ALL
    SELECT 'every task belongs to a queue', f.queue, f.id, 'unknown queue'
    FROM stint.task_facts f WHERE NOT EXISTS (SELECT FROM stint.queue_config q WHERE q.queue = f.queue)
    UNION ALL
    SELECT 'every waiting task stands in a lane of its queue', p.queue, p.id, p.place || ', lane ' || p.lane
    FROM places p WHERE NOT EXISTS (SELECT FROM stint.lanes l WHERE l.queue = p.queue AND l.lane = p.lane)
    UNION ALL
    SELECT 'a lane is of one queue', l.queue, NULL, 'lane ' || l.lane || ' is of "' || o.queue || '" too'
    FROM stint.lanes l JOIN stint.lanes o ON o.lane = l.lane AND o.queue <> l.queue
    UNION ALL
    SELECT 'no two ready tasks stand at one place', w.queue, w.id, 'lane ' || w.lane || ', priority ' || w.priority || ', number ' || w.seq
    FROM (SELECT r.*, count(*) OVER (PARTITION BY r.lane, r.priority, r.seq) AS there FROM stint.place_ready r) w WHERE w.there > 1
    UNION ALL
    SELECT 'what is kept of a watch belongs to one', NULL, NULL, x.what
    FROM (SELECT l.watch, 'log of "' || l.watch || '"' AS what FROM stint.watch_log l
          UNION SELECT d.watch, 'disarmed keys of "' || d.watch || '"' FROM stint.watch_disarmed d) x
    WHERE NOT EXISTS (SELECT FROM stint.watch_config c WHERE c.watch = x.watch)
    UNION ALL
    SELECT 'only watches with a rearm condition disarm keys', NULL, NULL, 'watch "' || c.watch || '"'
    FROM stint.watch_config c WHERE c.rearm IS NULL AND EXISTS (SELECT FROM stint.watch_disarmed d WHERE d.watch = c.watch)
    UNION ALL
    SELECT 'a lane of a group holds tasks of that group only', p.queue, p.id, p.place || ' in the lane of group "' || l.group_key || '"'
    FROM places p
    JOIN stint.lanes l ON l.queue = p.queue AND l.lane = p.lane
    JOIN stint.task_facts f ON f.queue = p.queue AND f.id = p.id
    WHERE l.group_key <> coalesce(f.group_key, '')
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
    SELECT 'accounting finds each finished task once', o.queue, o.id, o.outcome || CASE WHEN o.xact IS NULL THEN ', not at all' ELSE ', twice' END
    FROM stint.task_outcomes o
    LEFT JOIN stint.task_attempts a ON a.queue = o.queue AND a.id = o.id AND a.attempt = o.attempt AND a.ended = 'completed'
    WHERE (o.xact IS NULL) <> (a.id IS NOT NULL)
    UNION ALL
    SELECT 'an outcome and the end of an attempt are known words', x.queue, x.id, x.word
    FROM (SELECT o.queue, o.id, o.outcome AS word FROM stint.task_outcomes o WHERE o.outcome NOT IN ('completed', 'failed', 'cancelled')
          UNION ALL
          SELECT a.queue, a.id, a.ended FROM stint.task_attempts a
          WHERE a.ended NOT IN ('completed', 'failed', 'cancelled', 'released', 'snoozed', 'awaiting', 'lapsed')) x
    UNION ALL
    SELECT 'a ready row names the agent of its task', w.queue, w.id, coalesce(w.agent, 'none') || ' in place of ' || coalesce(f.agent, 'none')
    FROM stint.place_ready w JOIN stint.task_facts f ON f.queue = w.queue AND f.id = w.id
    WHERE w.agent IS DISTINCT FROM f.agent
    UNION ALL
    SELECT 'a lease ends by the deadline of its attempt', r.queue, r.id, coalesce(r.extended_until, r.expires_at) || ' is after ' || r.deadline
    FROM stint.place_running r WHERE coalesce(r.extended_until, r.expires_at) > r.deadline
    UNION ALL
    SELECT 'a blocked task waits for something', b.queue, b.id, 'for no task and no turn'
    FROM stint.place_blocked b
    WHERE b.group_key IS NULL AND NOT EXISTS (SELECT FROM stint.task_dependencies d WHERE d.queue = b.queue AND d.id = b.id)
    UNION ALL
    SELECT 'a dependency is of a blocked task on a live one', d.queue, d.id, 'on ' || d.on_id
    FROM stint.task_dependencies d
    WHERE NOT EXISTS (SELECT FROM stint.place_blocked b WHERE b.queue = d.queue AND b.id = d.id)
          OR NOT EXISTS (SELECT FROM places p WHERE p.queue = d.queue AND p.id = d.on_id
                         UNION ALL SELECT FROM stint.follow_ups u WHERE u.queue = d.queue AND u.id = d.on_id)
          OR d.on_failure NOT IN ('fail', 'cancel', 'run')
    UNION ALL
    SELECT 'one task of each strict group has its turn', g.queue, NULL, 'group "' || g.group_key || '": ' || g.turns || ' have'
    FROM (SELECT coalesce(t.queue, m.queue) AS queue, coalesce(t.group_key, m.group_key) AS group_key, coalesce(m.turns, 0) AS turns,
                 t.queue IS NOT NULL AS known
          FROM stint.group_turns t
          FULL JOIN (SELECT f.queue, f.group_key, count(*) FILTER (WHERE b.group_key IS NULL) AS turns
                     FROM stint.task_facts f
                     JOIN stint.queue_config q ON q.queue = f.queue AND q.strict_groups
                     JOIN places p ON p.queue = f.queue AND p.id = f.id
                     LEFT JOIN stint.place_blocked b ON b.queue = f.queue AND b.id = f.id
                     WHERE f.group_key IS NOT NULL
                     GROUP BY f.queue, f.group_key) m ON m.queue = t.queue AND m.group_key = t.group_key) g
    WHERE (g.turns <> 1 OR NOT g.known)
      AND NOT EXISTS (SELECT FROM stint.follow_ups u JOIN stint.task_facts f ON f.queue = u.queue AND f.id = u.id
                      WHERE u.queue = g.queue AND f.group_key = g.group_key)
    UNION ALL
    SELECT 'nobody awaits an event that was emitted', s.queue, s.id, 'event "' || s.event || '"'
    FROM stint.place_scheduled s JOIN stint.events e ON e.event = s.event AND e.emitted_at IS NOT NULL
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
    UNION ALL
    SELECT 'events and their ticks belong to the feed of a queue', x.queue, NULL, x.what
    FROM (SELECT e.queue, 'events' AS what FROM stint.task_event_log e
          UNION SELECT t.queue, 'ticks' FROM stint.task_event_ticks t
          UNION SELECT f.queue, 'feed' FROM stint.task_feeds f
          UNION SELECT q.queue, 'setting' FROM stint.queue_config q WHERE q.events) x
    WHERE NOT EXISTS (SELECT FROM stint.task_feeds f JOIN stint.queue_config q ON q.queue = f.queue WHERE f.queue = x.queue)
    UNION ALL
    SELECT 'a table with a changelog has a table of deleted keys', NULL, NULL, c.relation::text
    FROM stint.captures c
    WHERE EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation) AND NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.gone_keys)
    UNION ALL
    SELECT 'what is kept of a state table goes with it', NULL, NULL, x.what || ' of ' || x.relation
    FROM (SELECT s.relation, 'declaration' AS what FROM stint.state_config s
          UNION ALL SELECT c.relation, 'capture' FROM stint.captures c
          UNION ALL SELECT p.relation, 'projection "' || p.name || '"' FROM stint.projection_config p
          UNION ALL SELECT l.relation, 'lookup "' || l.name || '"' FROM stint.lookup_config l
          UNION ALL SELECT w.relation, 'watch "' || w.watch || '"' FROM stint.watch_config w
          UNION SELECT b.relation, 'base images' FROM stint.base_images b
          UNION SELECT k.relation, 'kept images' FROM stint.kept_images k) x
    WHERE NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = x.relation)
    UNION ALL
    SELECT 'a table of deleted keys belongs to a table with a changelog', NULL, NULL, t.oid::regclass::text
    FROM pg_class t
    WHERE t.relnamespace = 'stint'::regnamespace AND t.relkind = 'r' AND t.relname ~ '^gone_keys_[0-9]+$'
      AND NOT EXISTS (SELECT FROM stint.captures c WHERE c.gone_keys = t.oid)
    UNION ALL
    SELECT 'the columns of a table with a changelog are known', NULL, NULL, format('%s, column "%s"', coalesce(a.relation, k.relation), coalesce(a.attname, k.name))
    FROM (SELECT c.relation, a.attname FROM stint.captures c JOIN pg_attribute a ON a.attrelid = c.relation AND a.attnum > 0 AND NOT a.attisdropped) a
    FULL JOIN stint.captured_columns k ON k.relation = a.relation AND k.name = a.attname
    WHERE k.relation IS NULL OR a.relation IS NULL
    UNION ALL
    SELECT 'a change is of a known kind and has the images of its kind', NULL, NULL, l.relation::text || ', change ' || l.seq
    FROM stint.change_log l
    WHERE l.kind NOT IN ('I', 'U', 'D') OR (l.before IS NULL) <> (l.kind = 'I') OR (l.after IS NULL) <> (l.kind = 'D')
    UNION ALL
    SELECT 'an event is aside as poisoned or skipped', NULL, NULL, a.relation::text || ', event ' || a.seq || ': ' || a.state
    FROM stint.events_aside a WHERE a.state NOT IN ('poisoned', 'skipped')
    UNION ALL
    SELECT 'an image is kept for some tag, and belongs to a table with a changelog', NULL, NULL, k.relation::text || ', key ' || k.key
    FROM (SELECT i.relation, i.key, i.epoch, i.xid, lag(i.epoch) OVER w AS previous_epoch, lag(i.xid) OVER w AS previous
          FROM stint.kept_images i WINDOW w AS (PARTITION BY i.relation, i.key ORDER BY i.epoch, i.seq)) k
    WHERE NOT EXISTS (SELECT FROM stint.captures c WHERE c.relation = k.relation)
       OR NOT EXISTS (SELECT FROM stint.dropped_tags)
          AND NOT EXISTS (SELECT FROM stint.tag_list t JOIN stint.pins p USING (pin)
                          WHERE (p.epoch < k.epoch OR p.epoch = k.epoch AND NOT pg_visible_in_snapshot(k.xid, p.snapshot))
                            AND (k.previous IS NULL OR p.epoch > k.previous_epoch
                                 OR p.epoch = k.previous_epoch AND pg_visible_in_snapshot(k.previous, p.snapshot)))
    UNION ALL
    SELECT 'a tag names a pin', NULL, NULL, 'tag "' || t.tag || '", pin ' || t.pin
    FROM stint.tag_list t WHERE NOT EXISTS (SELECT FROM stint.pins p WHERE p.pin = t.pin)
    UNION ALL
    SELECT 'a committed position belongs to a consumer', NULL, NULL, 'consumer "' || m.consumer || '", position ' || m.pos
    FROM stint.consumer_commits m WHERE NOT EXISTS (SELECT FROM stint.consumer_config c WHERE c.consumer = m.consumer)
    UNION ALL
    SELECT 'what is gone of a table lies below its floor', NULL, NULL, r.relation::text || ' at position ' || t.end_pos
    FROM stint.ticks t CROSS JOIN LATERAL unnest(t.relations) r (relation) JOIN stint.captures c ON c.relation = r.relation
    WHERE t.expired <> (t.end_pos <= c.floor_pos) AND (c.epoch < t.epoch OR c.epoch = t.epoch AND pg_visible_in_snapshot(c.xid, t.snapshot))
    UNION ALL
    SELECT 'a slot belongs to a schedule and has a task or an error', s.queue_was, s.id, s.schedule || ' at ' || s.slot
    FROM stint.schedule_slots s LEFT JOIN stint.schedule_config c ON c.schedule = s.schedule
    WHERE c.schedule IS NULL OR (s.id IS NULL) = (s.error IS NULL)
    UNION ALL
    SELECT 'an event has known facts and a number that was drawn', NULL, NULL, 'event ' || e.seq
    FROM stint.event_log e
    WHERE e.source = '' OR e.type = '' OR e.seq > (SELECT q.last_value FROM stint.event_seq q) OR e.epoch > (SELECT coalesce(max(m.epoch), 0) FROM stint.meta m)
    UNION ALL
    SELECT 'a projected table is a state table of one freshness', NULL, NULL, c.relation || ': ' || string_agg(c.name, ', ')
    FROM stint.projection_config c
    WHERE EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)
    GROUP BY c.relation
    HAVING count(DISTINCT c.freshness) > 1 OR NOT EXISTS (SELECT FROM stint.state_config s WHERE s.relation = c.relation)
    UNION ALL
    SELECT 'what is set aside or folded belongs to a projected table', NULL, NULL, x.what || ' of ' || x.relation
    FROM (SELECT a.relation, 'event ' || a.seq AS what FROM stint.events_aside a
          UNION ALL SELECT p.relation, 'position ' || p.number FROM stint.projection_positions p) x
    WHERE EXISTS (SELECT FROM pg_class t WHERE t.oid = x.relation)
      AND NOT EXISTS (SELECT FROM stint.projection_config c WHERE c.relation = x.relation)
    UNION ALL
    SELECT 'sums of hours, days and months agree with the finer ones', l.queue, NULL,
           l.figure || ' of ' || l.since || ', level ' || l.level || ': ' || sum(l.amount) FILTER (WHERE NOT l.fine) || ', the finer ones ' || sum(l.amount) FILTER (WHERE l.fine)
    FROM (SELECT x.queue, x.figure, x.amount, b.level, b.since, b.fine
          FROM (SELECT u.queue, u.level, u.since, 'attempts' AS figure, u.attempts + u.input_tokens + u.output_tokens + u.model_cost + u.compute_cost AS amount FROM stint.usage_rollups u
                UNION ALL
                SELECT t.queue, t.level, t.since, 'tasks', t.tasks + t.attempts + t.input_tokens + t.output_tokens + t.model_cost + t.compute_cost FROM stint.task_rollups t) x
          CROSS JOIN stint.rollup_marks m
          CROSS JOIN LATERAL (
              SELECT x.level, x.since, false AS fine
              WHERE x.level = 2 AND x.since >= m.minutes_from OR x.level = 3 AND x.since >= m.hours_from OR x.level = 4
              UNION ALL
              SELECT 2, date_bin('1 hour', x.since, '2000-01-01 00:00:00+00'), true WHERE x.level = 1 AND x.since >= m.minutes_from AND x.since < m.hours_until
              UNION ALL
              SELECT 3, date_bin('1 day', x.since, '2000-01-01 00:00:00+00'), true WHERE x.level = 2 AND x.since >= m.hours_from AND x.since < m.days_until
              UNION ALL
              SELECT 4, date_trunc('month', x.since, 'UTC'), true WHERE x.level = 3 AND x.since < m.months_until) b) l
    GROUP BY l.queue, l.figure, l.level, l.since
    HAVING coalesce(sum(l.amount) FILTER (WHERE NOT l.fine), 0) <> coalesce(sum(l.amount) FILTER (WHERE l.fine), 0)
    UNION ALL
    SELECT 'every change of a state table is captured', NULL, NULL, u.detail FROM stint.uncaptured() u
$$;
REVOKE ALL ON FUNCTION stint.check() FROM PUBLIC;
COMMENT ON FUNCTION stint.check() IS
'Returns every violation of the storage rules; no row means all is well. Reads whole tables: for tests and for nights when you doubt. The budget rule may name a budget for the moment a claim takes. Use in FROM.';
