-- What users and psql see of the queue. No view shows a lease: it is the right to end an attempt.
-- Joins on an id compare its class too, so that they look into one partition of the history.

CREATE VIEW stint.queues AS
SELECT q.queue, q.lease_for, q.max_attempts, q.backoff_base, q.backoff_factor, q.backoff_max, q.backoff_jitter,
       q.budgets, q.key_retention, q.late_result, q.notify, q.max_run_time, q.paused, q.strict_groups, q.fair, q.correct_predictions, q.events, q.comment, q.created_at,
       q.history_retention, q.history_archive
FROM stint.queue_config q;
COMMENT ON VIEW stint.queues IS 'Queues and their settings';

CREATE VIEW stint.tasks AS
SELECT f.queue, f.id,
       p.status,
       p.why,
       coalesce(p.priority, f.priority) AS priority, f.agent, f.tokens, p.attempt, p.worker,
       f.enqueued_at, p.run_at, p.started_at, p.expires_at, p.finished_at,
       f.key, f.group_key, f.depends_on, f.labels, p.progress
FROM stint.task_facts f
CROSS JOIN LATERAL (
    SELECT 'ready' AS status,
           (SELECT 'queue paused'::text FROM stint.queue_config q WHERE q.queue = w.queue AND q.paused) AS why, w.priority, w.attempt, NULL::text AS worker, NULL::timestamptz AS run_at,
           NULL::timestamptz AS started_at, NULL::timestamptz AS expires_at, NULL::timestamptz AS finished_at, NULL::jsonb AS progress
    FROM stint.place_ready w WHERE w.queue = f.queue AND w.id = f.id
    UNION ALL
    SELECT 'scheduled', CASE WHEN s.event IS NOT NULL THEN 'awaits event "' || s.event || '"'
                                WHEN s.attempt = 0 THEN 'delayed'
                                WHEN (SELECT a.ended FROM stint.task_attempts a WHERE a.queue = s.queue AND a.id = s.id AND get_byte(uuid_send(a.id), 15) = get_byte(uuid_send(s.id), 15) AND a.attempt = s.attempt) = 'snoozed'
                                THEN 'snoozed' ELSE 'retry' END, s.priority, s.attempt, NULL, s.run_at, NULL, NULL, NULL, NULL
    FROM stint.place_scheduled s WHERE s.queue = f.queue AND s.id = f.id
    UNION ALL
    SELECT 'blocked', concat_ws('; ', d.why, 'waits for its turn in group "' || b.group_key || '"'), b.priority, b.attempt, NULL, b.run_at, NULL, NULL, NULL, NULL
    FROM stint.place_blocked b
    CROSS JOIN LATERAL (
        SELECT 'waits for task ' || min(x.on_id::text) || CASE WHEN count(*) > 100 THEN ' and at least 100 more'
                                                                WHEN count(*) > 1 THEN ' and ' || count(*) - 1 || ' more' ELSE '' END AS why
        FROM (SELECT t.on_id FROM stint.task_dependencies t WHERE t.queue = b.queue AND t.id = b.id LIMIT 101) x
    ) d
    WHERE b.queue = f.queue AND b.id = f.id
    UNION ALL
    SELECT 'running', CASE WHEN r.cancel_requested THEN 'cancel requested' END, r.priority, r.attempt, r.worker, NULL, r.started_at,
           coalesce(r.extended_until, r.expires_at), NULL, r.progress
    FROM stint.place_running r WHERE r.queue = f.queue AND r.id = f.id
    UNION ALL
    SELECT o.outcome, o.error, NULL, o.attempt, NULL, NULL, NULL, NULL, o.finished_at, NULL
    FROM stint.task_outcomes o WHERE o.queue = f.queue AND o.id = f.id AND get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(f.id), 15)
) p;
COMMENT ON VIEW stint.tasks IS
'Every task with its status: scheduled, blocked, ready, running, completed, failed or cancelled, and why. priority: as stint.reprioritize left it, while the task lives.
Find tasks by label with labels @> ''{"customer": 7}'': with a queue and a time or status beside it, since no index is kept on labels. Payloads are in stint.task_payloads';

CREATE VIEW stint.task_payloads AS
SELECT f.queue, f.id, f.payload, o.result
FROM stint.task_facts f
LEFT JOIN stint.task_outcomes o ON o.queue = f.queue AND o.id = f.id AND get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(f.id), 15);
COMMENT ON VIEW stint.task_payloads IS 'What each task was given and, once completed, what came of it; granted apart from stint.tasks';

CREATE VIEW stint.attempts AS
SELECT a.queue, a.id, a.attempt, a.ended, a.worker, f.agent, a.started_at, a.ended_at, a.ended_at - a.started_at AS run_time, a.heartbeat_gap, a.error,
       coalesce(a.run_id, u.run_id) AS run_id, coalesce(a.trace_id, u.trace_id) AS trace_id, coalesce(a.model, u.model) AS model,
       f.tokens AS predicted_tokens,
       CASE WHEN u.bills = 0 THEN a.input_tokens ELSE coalesce(a.input_tokens, 0) + coalesce(u.input_tokens, 0)::bigint END AS input_tokens,
       CASE WHEN u.bills = 0 THEN a.cached_tokens ELSE coalesce(a.cached_tokens, 0) + coalesce(u.cached_tokens, 0)::bigint END AS cached_tokens,
       CASE WHEN u.bills = 0 THEN a.output_tokens ELSE coalesce(a.output_tokens, 0) + coalesce(u.output_tokens, 0)::bigint END AS output_tokens,
       CASE WHEN u.bills = 0 THEN a.model_cost ELSE coalesce(a.model_cost, 0) + coalesce(u.model_cost, 0) END AS model_cost,
       CASE WHEN u.bills = 0 THEN a.compute_cost ELSE coalesce(a.compute_cost, 0) + coalesce(u.compute_cost, 0) END AS compute_cost,
       coalesce(a.confidence, u.confidence) AS confidence,
       coalesce(a.meta, u.meta) AS meta,
       u.recorded_at AS usage_came_late_at
FROM stint.task_attempts a
JOIN stint.task_facts f ON f.queue = a.queue AND f.id = a.id AND get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(a.id), 15)
CROSS JOIN LATERAL (
    SELECT count(*) AS bills, max(l.recorded_at) AS recorded_at,
           (array_agg(l.run_id ORDER BY l.recorded_at, l.key) FILTER (WHERE l.run_id IS NOT NULL))[1] AS run_id,
           (array_agg(l.trace_id ORDER BY l.recorded_at, l.key) FILTER (WHERE l.trace_id IS NOT NULL))[1] AS trace_id,
           (array_agg(l.model ORDER BY l.recorded_at, l.key) FILTER (WHERE l.model IS NOT NULL))[1] AS model,
           sum(l.input_tokens) AS input_tokens, sum(l.cached_tokens) AS cached_tokens, sum(l.output_tokens) AS output_tokens,
           sum(l.model_cost) AS model_cost, sum(l.compute_cost) AS compute_cost,
           (array_agg(l.confidence ORDER BY l.recorded_at, l.key) FILTER (WHERE l.confidence IS NOT NULL))[1] AS confidence,
           (array_agg(l.meta ORDER BY l.recorded_at, l.key) FILTER (WHERE l.meta IS NOT NULL))[1] AS meta
    FROM stint.usage_late l WHERE l.queue = a.queue AND l.id = a.id AND l.attempt = a.attempt
) u;
COMMENT ON VIEW stint.attempts IS 'Every ended attempt: how it ended (completed, failed, cancelled, released, snoozed, awaiting, lapsed), its run and trace id, tokens and cost, late callbacks and bills included';

CREATE VIEW stint.queue_stats AS
SELECT q.queue, q.paused,
       (SELECT count(*) FROM stint.place_scheduled s WHERE s.queue = q.queue) AS scheduled,
       (SELECT count(*) FROM stint.place_blocked b WHERE b.queue = q.queue) AS blocked,
       (SELECT count(*) FROM stint.place_ready w WHERE w.queue = q.queue) AS ready,
       (SELECT count(*) FROM stint.place_running r WHERE r.queue = q.queue) AS running,
       coalesce(o.completed, 0) AS completed, coalesce(o.failed, 0) AS failed, coalesce(o.cancelled, 0) AS cancelled,
       (SELECT min(f.enqueued_at) FROM stint.place_ready w JOIN stint.task_facts f ON f.queue = w.queue AND f.id = w.id AND get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(w.id), 15)
        WHERE w.queue = q.queue) AS oldest_ready
FROM stint.queue_config q
LEFT JOIN (
    SELECT t.queue,
           count(*) FILTER (WHERE t.outcome = 'completed') AS completed,
           count(*) FILTER (WHERE t.outcome = 'failed') AS failed,
           count(*) FILTER (WHERE t.outcome = 'cancelled') AS cancelled
    FROM stint.task_outcomes t GROUP BY t.queue
) o ON o.queue = q.queue;
COMMENT ON VIEW stint.queue_stats IS 'Tasks of each queue by status, whether it is paused, and since when the oldest ready one waits';
