-- Accounting: what finished tasks and ended attempts used, added up by minute, hour, day and month, and the functions of a dashboard.
--
-- A roll-up adds what was committed since the one before: the rows visible in its snapshot and not in the one before, whatever order transactions commit in.
-- Both snapshots and the sums are written in one transaction, so that sums + what is not in them yet is exact for every reader (docs/accounting.md).

-- Where roll-ups stand in each database this one's rows come from: its own and, after a restore, those before. Each roll-up writes a row and removes the one
-- before, so that the newest is found first however many removed ones an old snapshot keeps about; of one that is updated all versions would be read, each time.
CREATE TABLE stint.rollup_epochs (
    incarnation       int NOT NULL,
    number            bigint NOT NULL DEFAULT 1,
    snapshot          pg_snapshot,
    rolled_up_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (incarnation, number)
);
COMMENT ON TABLE stint.rollup_epochs IS 'For each incarnation of the database, the snapshot of the last roll-up (that of the highest number): what it sees is added up. No snapshot: everything is, since a restored copy was activated';

CREATE VIEW stint.last_rollups AS
WITH RECURSIVE last AS (
    (SELECT e.incarnation, e.number, e.snapshot, e.rolled_up_at FROM stint.rollup_epochs e ORDER BY e.incarnation DESC, e.number DESC LIMIT 1)
    UNION ALL
    SELECT n.*
    FROM last
    CROSS JOIN LATERAL (
        SELECT e.incarnation, e.number, e.snapshot, e.rolled_up_at
        FROM stint.rollup_epochs e
        WHERE e.incarnation < last.incarnation
        ORDER BY e.incarnation DESC, e.number DESC
        LIMIT 1) AS n
)
SELECT last.incarnation, last.number, last.snapshot, last.rolled_up_at FROM last;
COMMENT ON VIEW stint.last_rollups IS 'For accounting: the last roll-up of each incarnation of the database';

-- Minutes hold everything from minutes_from on; hours what lies before hours_until, days and months likewise. One row, from the first roll-up on.
CREATE TABLE stint.rollup_marks (
    one               boolean PRIMARY KEY DEFAULT true,
    hours_until       timestamptz NOT NULL,
    days_until        timestamptz NOT NULL,
    months_until      timestamptz NOT NULL,
    minutes_from      timestamptz NOT NULL,
    hours_from        timestamptz NOT NULL
);
COMMENT ON TABLE stint.rollup_marks IS 'Up to where hours, days and months are made of the finer sums, and since when those are kept';

-- No agent and no model are empty texts here, so that they can be part of the key.
CREATE TABLE stint.usage_rollups (
    queue             text COLLATE "C" NOT NULL,
    level             int NOT NULL,
    since             timestamptz NOT NULL,
    agent             text COLLATE "C" NOT NULL,
    model             text COLLATE "C" NOT NULL,
    ended             text COLLATE "C" NOT NULL,
    attempts          bigint NOT NULL,
    input_tokens      numeric NOT NULL,
    cached_tokens     numeric NOT NULL,
    output_tokens     numeric NOT NULL,
    model_cost        numeric NOT NULL,
    compute_cost      numeric NOT NULL,
    predicted_tokens  numeric NOT NULL,
    measured_tokens   numeric NOT NULL,
    wait              bytea,
    run               bytea,
    confidence        bytea,
    PRIMARY KEY (queue, level, since, agent, model, ended)
) WITH (fillfactor = 80);
CREATE INDEX usage_rollups_since ON stint.usage_rollups (level, since);
COMMENT ON TABLE stint.usage_rollups IS
'What ended attempts used, by the minute (level 1), hour (2), day (3) or month (4, all in UTC) in which they ended. predicted_tokens, measured_tokens: of attempts that have both. wait, run, confidence: histograms (stint.histogram)';

CREATE TABLE stint.task_rollups (
    queue             text COLLATE "C" NOT NULL,
    level             int NOT NULL,
    since             timestamptz NOT NULL,
    agent             text COLLATE "C" NOT NULL,
    model             text COLLATE "C" NOT NULL,
    outcome           text COLLATE "C" NOT NULL,
    tasks             bigint NOT NULL,
    attempts          bigint NOT NULL,
    input_tokens      numeric NOT NULL,
    cached_tokens     numeric NOT NULL,
    output_tokens     numeric NOT NULL,
    model_cost        numeric NOT NULL,
    compute_cost      numeric NOT NULL,
    retried_attempts  bigint NOT NULL,
    retried_cost      numeric NOT NULL,
    PRIMARY KEY (queue, level, since, agent, model, outcome)
) WITH (fillfactor = 80);
CREATE INDEX task_rollups_since ON stint.task_rollups (level, since);
COMMENT ON TABLE stint.task_rollups IS
'Finished tasks, by the minute, hour, day or month in which they finished, with what all their attempts used. model: of the last attempt. retried_…: of a completed task''s failed and lapsed attempts';

SELECT pg_catalog.pg_extension_config_dump('stint.rollup_epochs', '');
SELECT pg_catalog.pg_extension_config_dump('stint.rollup_marks', '');
SELECT pg_catalog.pg_extension_config_dump('stint.usage_rollups', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_rollups', '');

CREATE FUNCTION stint.histogram(scale text, parts bytea[] DEFAULT NULL, measures double precision[] DEFAULT NULL) RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'histogram_wrapper';
REVOKE ALL ON FUNCTION stint.histogram FROM PUBLIC;
COMMENT ON FUNCTION stint.histogram IS
'A histogram of measures and of what histograms (parts) hold, from which stint.quantile reads; nulls are left out, null where nothing is left. scale: ''duration'' (microseconds, read back
within 2.5 % of the value) or ''share'' (0 to 1, within 0.005). The bytes are pairs of a gap to the bucket before and a count, in groups of seven bits. Errors: 22023 no such scale, no histogram.';

CREATE FUNCTION stint.quantile(scale text, histogram bytea DEFAULT NULL, share double precision DEFAULT 0.5) RETURNS double precision
LANGUAGE c IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'quantile_wrapper';
REVOKE ALL ON FUNCTION stint.quantile FROM PUBLIC;
COMMENT ON FUNCTION stint.quantile IS
'The value that share (0.5: the median) of what a histogram counted does not exceed, within the error of its scale; null of none. Errors: 22023 no such scale, no histogram, a share not from 0 to 1.';

-- The epochs that have something not added up: this database's own, and that of a copy's original until stint.activate(). A first epoch begins with nothing
-- seen. The upper bound is true for every visible row; it tells the planner that the range is narrow.
CREATE VIEW stint.open_epochs AS
SELECT e.incarnation, e.snapshot, pg_catalog.pg_snapshot_xmax(e.snapshot) AS low,
       CASE WHEN e.incarnation = stint.incarnation()
            THEN greatest(pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()), pg_catalog.pg_current_xact_id_if_assigned())
            ELSE '18446744073709551615'::xid8 END AS high
FROM (SELECT r.incarnation, r.snapshot FROM stint.last_rollups r WHERE r.snapshot IS NOT NULL
      UNION ALL
      SELECT stint.incarnation(), '1:1:'::pg_snapshot
      WHERE NOT EXISTS (SELECT FROM stint.last_rollups r WHERE r.incarnation = stint.incarnation())) e;
COMMENT ON VIEW stint.open_epochs IS 'For accounting: the incarnations whose rows are not all added up, and the snapshot of what is. Rows of their transactions from low on, or running in the snapshot, are not';

-- Rows that no roll-up has seen, found by their transactions: those that came after the last snapshot and those that were running in it. A transaction that is
-- held open for hours costs one look each.
CREATE VIEW stint.new_attempts AS
SELECT a.queue, a.id, a.attempt, a.started_at, a.ended_at, a.ended, a.model, a.input_tokens, a.cached_tokens, a.output_tokens, a.model_cost, a.compute_cost, a.confidence
FROM stint.open_epochs e
CROSS JOIN LATERAL (
    SELECT t.* FROM stint.task_attempts t WHERE t.incarnation = e.incarnation AND t.xact >= e.low AND t.xact <= e.high
    UNION ALL
    SELECT r.* FROM pg_catalog.pg_snapshot_xip(e.snapshot) x
    CROSS JOIN LATERAL (SELECT t.* FROM stint.task_attempts t WHERE t.incarnation = e.incarnation AND t.xact = x OFFSET 0) r
) a;
COMMENT ON VIEW stint.new_attempts IS 'For accounting: attempts that are not added up yet';

CREATE VIEW stint.new_outcomes AS
SELECT o.queue, o.id, o.outcome, o.attempt, o.finished_at, false AS by_first
FROM stint.open_epochs e
CROSS JOIN LATERAL (
    SELECT t.* FROM stint.task_outcomes t WHERE t.incarnation = e.incarnation AND t.xact >= e.low AND t.xact <= e.high
    UNION ALL
    SELECT r.* FROM pg_catalog.pg_snapshot_xip(e.snapshot) x
    CROSS JOIN LATERAL (SELECT t.* FROM stint.task_outcomes t WHERE t.incarnation = e.incarnation AND t.xact = x OFFSET 0) r
) o
UNION ALL
-- A completed attempt is the last of its task and stands for the outcome that came with it, which so needs no index entry of its own.
SELECT a.queue, a.id, a.ended, a.attempt, a.ended_at, a.attempt = 1 FROM stint.new_attempts a WHERE a.ended = 'completed';
COMMENT ON VIEW stint.new_outcomes IS 'For accounting: outcomes that are not added up yet. by_first: the first attempt completed, and is all that the task used';

CREATE VIEW stint.new_bills AS
SELECT u.queue, u.id, u.attempt, u.key, u.model, u.input_tokens, u.cached_tokens, u.output_tokens, u.model_cost, u.compute_cost, u.confidence
FROM stint.open_epochs e
CROSS JOIN LATERAL (
    SELECT t.* FROM stint.usage_late t WHERE t.incarnation = e.incarnation AND t.xact >= e.low AND t.xact <= e.high
    UNION ALL
    SELECT r.* FROM pg_catalog.pg_snapshot_xip(e.snapshot) x
    CROSS JOIN LATERAL (SELECT t.* FROM stint.usage_late t WHERE t.incarnation = e.incarnation AND t.xact = x OFFSET 0) r
) u;
COMMENT ON VIEW stint.new_bills IS 'For accounting: late usage that is not added up yet';

-- An outcome that was taken back before a roll-up saw it was never added, and is not taken away.
CREATE VIEW stint.new_retries AS
SELECT y.queue, y.id, y.outcome, y.attempt, y.finished_at
FROM stint.open_epochs e
CROSS JOIN LATERAL (
    SELECT t.* FROM stint.task_retries t WHERE t.incarnation = e.incarnation AND t.xact >= e.low AND t.xact <= e.high
    UNION ALL
    SELECT r.* FROM pg_catalog.pg_snapshot_xip(e.snapshot) x
    CROSS JOIN LATERAL (SELECT t.* FROM stint.task_retries t WHERE t.incarnation = e.incarnation AND t.xact = x OFFSET 0) r
) y
WHERE NOT EXISTS (SELECT FROM stint.open_epochs p WHERE p.incarnation = y.outcome_incarnation AND NOT pg_catalog.pg_visible_in_snapshot(y.outcome_xact, p.snapshot));
COMMENT ON VIEW stint.new_retries IS 'For accounting: outcomes that were added up and taken back since';

-- Most tasks complete at their first attempt, so what is added for both is made of the same rows, which are read once.
CREATE VIEW stint.attempt_tail AS
SELECT pg_catalog.date_bin('1 minute', a.ended_at, '2000-01-01 00:00:00+00') AS since, a.queue, coalesce(f.agent, '') AS agent, coalesce(w.model, '') AS model, a.ended,
       w.attempts, coalesce(w.input_tokens, 0)::numeric AS input_tokens, coalesce(w.cached_tokens, 0)::numeric AS cached_tokens,
       coalesce(w.output_tokens, 0)::numeric AS output_tokens, coalesce(w.model_cost, 0) AS model_cost, coalesce(w.compute_cost, 0) AS compute_cost,
       CASE WHEN m.measured THEN f.tokens ELSE 0 END::numeric AS predicted_tokens,
       CASE WHEN m.measured THEN coalesce(w.input_tokens, 0) + coalesce(w.output_tokens, 0) ELSE 0 END::numeric AS measured_tokens,
       CASE WHEN w.attempts = 1 AND a.attempt = 1
            THEN greatest(extract(epoch FROM a.started_at - greatest(f.enqueued_at, f.run_at)), 0)::double precision * 1e6 END AS wait,
       CASE WHEN w.attempts = 1 THEN greatest(extract(epoch FROM a.ended_at - a.started_at), 0)::double precision * 1e6 END AS run,
       w.confidence::numeric::double precision AS confidence,
       coalesce(a.model, '') AS model_of_attempt, a.ended = 'completed' AND a.attempt = 1 AS by_first
FROM stint.new_attempts a
CROSS JOIN LATERAL (SELECT t.agent, t.tokens, t.enqueued_at, t.run_at FROM stint.task_facts t WHERE t.queue = a.queue AND t.id = a.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(a.id), 15) LIMIT 1) f
CROSS JOIN LATERAL (
    SELECT 1 AS attempts, a.model, a.input_tokens, a.cached_tokens, a.output_tokens, a.model_cost, a.compute_cost, a.confidence
    UNION ALL
    SELECT 0, coalesce(u.model, a.model), u.input_tokens, u.cached_tokens, u.output_tokens, u.model_cost, u.compute_cost, u.confidence
    FROM stint.usage_late u WHERE u.queue = a.queue AND u.id = a.id AND u.attempt = a.attempt
) w
CROSS JOIN LATERAL (
    SELECT w.attempts = 1 AND f.tokens > 0 AND a.ended IN ('completed', 'failed') AND (w.input_tokens IS NOT NULL OR w.output_tokens IS NOT NULL) AS measured
) m;
COMMENT ON VIEW stint.attempt_tail IS
'For accounting: what the next roll-up adds for attempts, one row for each and for each late usage that came before it was added. wait and run are in microseconds. by_first: the same for its task';

-- A bill counts from the moment at which both it and its attempt are there: with the attempt where that is new, alone where the attempt was added up before.
CREATE VIEW stint.bill_tail AS
SELECT pg_catalog.date_bin('1 minute', a.ended_at, '2000-01-01 00:00:00+00') AS since, u.queue, coalesce(f.agent, '') AS agent, coalesce(u.model, a.model, '') AS model, a.ended,
       0 AS attempts, coalesce(u.input_tokens, 0)::numeric AS input_tokens, coalesce(u.cached_tokens, 0)::numeric AS cached_tokens,
       coalesce(u.output_tokens, 0)::numeric AS output_tokens, coalesce(u.model_cost, 0) AS model_cost, coalesce(u.compute_cost, 0) AS compute_cost,
       0::numeric AS predicted_tokens, 0::numeric AS measured_tokens, NULL::double precision AS wait, NULL::double precision AS run,
       u.confidence::numeric::double precision AS confidence
FROM stint.new_bills u
CROSS JOIN LATERAL (SELECT t.* FROM stint.task_attempts t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) AND t.attempt = u.attempt LIMIT 1) a
CROSS JOIN LATERAL (SELECT t.agent FROM stint.task_facts t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) LIMIT 1) f
WHERE NOT EXISTS (SELECT FROM stint.open_epochs p WHERE p.incarnation = a.incarnation AND NOT pg_catalog.pg_visible_in_snapshot(a.xact, p.snapshot));
COMMENT ON VIEW stint.bill_tail IS 'For accounting: what the next roll-up adds for late usage of attempts that were added before';

CREATE VIEW stint.usage_tail AS
SELECT a.since, a.queue, a.agent, a.model, a.ended, a.attempts, a.input_tokens, a.cached_tokens, a.output_tokens, a.model_cost, a.compute_cost,
       a.predicted_tokens, a.measured_tokens, a.wait, a.run, a.confidence
FROM stint.attempt_tail a
UNION ALL
SELECT b.* FROM stint.bill_tail b;
COMMENT ON VIEW stint.usage_tail IS 'For accounting: what the next roll-up adds to usage_rollups, one row for each attempt and each late usage. wait and run are in microseconds';

-- What a task used that did not complete at its first attempt is read from all its attempts when it finishes. Where that is taken back, it is what had been added: bills that came since are left out.
CREATE VIEW stint.other_task_tail AS
SELECT pg_catalog.date_bin('1 minute', o.finished_at, '2000-01-01 00:00:00+00') AS since, o.queue, coalesce(f.agent, '') AS agent, coalesce(s.model, '') AS model, o.outcome,
       o.sign AS tasks, o.sign * s.attempts AS attempts, o.sign * s.input_tokens AS input_tokens, o.sign * s.cached_tokens AS cached_tokens,
       o.sign * s.output_tokens AS output_tokens, o.sign * s.model_cost AS model_cost, o.sign * s.compute_cost AS compute_cost,
       o.sign * s.retried_attempts AS retried_attempts, o.sign * s.retried_cost AS retried_cost
FROM (
    SELECT 1 AS sign, n.queue, n.id, n.outcome, n.attempt, n.finished_at FROM stint.new_outcomes n WHERE NOT n.by_first
    UNION ALL
    SELECT -1, y.queue, y.id, y.outcome, y.attempt, y.finished_at FROM stint.new_retries y
) o
CROSS JOIN LATERAL (SELECT t.agent FROM stint.task_facts t WHERE t.queue = o.queue AND t.id = o.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(o.id), 15) LIMIT 1) f
CROSS JOIN LATERAL (
    SELECT coalesce(sum(v.attempts), 0) AS attempts, coalesce(sum(v.input_tokens), 0) AS input_tokens, coalesce(sum(v.cached_tokens), 0) AS cached_tokens,
           coalesce(sum(v.output_tokens), 0) AS output_tokens, coalesce(sum(v.model_cost), 0) AS model_cost, coalesce(sum(v.compute_cost), 0) AS compute_cost,
           coalesce(sum(v.attempts) FILTER (WHERE v.retried), 0) AS retried_attempts,
           coalesce(sum(coalesce(v.model_cost, 0) + coalesce(v.compute_cost, 0)) FILTER (WHERE v.retried), 0) AS retried_cost,
           max(v.model) AS model
    FROM (
        SELECT w.*, o.outcome = 'completed' AND a.ended IN ('failed', 'lapsed') AND a.attempt <> o.attempt AS retried
        FROM stint.task_attempts a
        CROSS JOIN LATERAL (
            SELECT 1 AS attempts, CASE WHEN a.attempt = o.attempt THEN a.model END AS model,
                   a.input_tokens, a.cached_tokens, a.output_tokens, a.model_cost, a.compute_cost
            UNION ALL
            SELECT 0, NULL, u.input_tokens, u.cached_tokens, u.output_tokens, u.model_cost, u.compute_cost
            FROM stint.usage_late u
            WHERE u.queue = a.queue AND u.id = a.id AND u.attempt = a.attempt
              AND (o.sign = 1
                   OR NOT EXISTS (SELECT FROM stint.open_epochs p WHERE p.incarnation = u.incarnation AND NOT pg_catalog.pg_visible_in_snapshot(u.xact, p.snapshot)))
        ) w
        WHERE a.queue = o.queue AND a.id = o.id AND get_byte(uuid_send(a.id), 15) = get_byte(uuid_send(o.id), 15) AND a.attempt <= o.attempt
    ) v
) s
UNION ALL
SELECT pg_catalog.date_bin('1 minute', o.finished_at, '2000-01-01 00:00:00+00'), u.queue, coalesce(f.agent, ''), coalesce(l.model, ''), o.outcome,
       0, 0, coalesce(u.input_tokens, 0)::numeric, coalesce(u.cached_tokens, 0)::numeric, coalesce(u.output_tokens, 0)::numeric,
       coalesce(u.model_cost, 0), coalesce(u.compute_cost, 0), 0,
       CASE WHEN o.outcome = 'completed' AND a.ended IN ('failed', 'lapsed') AND u.attempt <> o.attempt
            THEN coalesce(u.model_cost, 0) + coalesce(u.compute_cost, 0) ELSE 0 END
FROM stint.new_bills u
CROSS JOIN LATERAL (SELECT t.* FROM stint.task_outcomes t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) LIMIT 1) o
CROSS JOIN LATERAL (SELECT t.ended FROM stint.task_attempts t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) AND t.attempt = u.attempt LIMIT 1) a
CROSS JOIN LATERAL (SELECT t.agent FROM stint.task_facts t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) LIMIT 1) f
LEFT JOIN LATERAL (SELECT t.model, t.incarnation, t.xact FROM stint.task_attempts t WHERE t.queue = u.queue AND t.id = u.id AND get_byte(uuid_send(t.id), 15) = get_byte(uuid_send(u.id), 15) AND t.attempt = o.attempt LIMIT 1) l ON true
WHERE NOT EXISTS (SELECT FROM stint.open_epochs p
                  WHERE p.incarnation = coalesce(o.incarnation, l.incarnation) AND NOT pg_catalog.pg_visible_in_snapshot(coalesce(o.xact, l.xact), p.snapshot));
COMMENT ON VIEW stint.other_task_tail IS
'For accounting: what the next roll-up adds for tasks that did not complete at their first attempt, for late usage of tasks that were added before, and, below zero, for tasks taken back';

CREATE VIEW stint.task_tail AS
SELECT a.since, a.queue, a.agent, a.model_of_attempt AS model, a.ended AS outcome, a.attempts AS tasks, a.attempts, a.input_tokens, a.cached_tokens, a.output_tokens,
       a.model_cost, a.compute_cost, 0 AS retried_attempts, 0::numeric AS retried_cost
FROM stint.attempt_tail a
WHERE a.by_first
UNION ALL
SELECT o.* FROM stint.other_task_tail o;
COMMENT ON VIEW stint.task_tail IS 'For accounting: what the next roll-up adds to task_rollups, one row for each finished task, each late usage of one, and, below zero, each one taken back';

CREATE FUNCTION stint.roll_up() RETURNS TABLE (attempts bigint, tasks bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'roll_up_wrapper';
REVOKE ALL ON FUNCTION stint.roll_up FROM PUBLIC;
COMMENT ON FUNCTION stint.roll_up IS
'Adds up what was committed since the last roll-up, and makes hours, days and months of what is old enough. Returns how many attempts and finished tasks it added (a task taken
back counts -1); nothing that a dashboard shows changes by it. Writes nothing when nothing came. The worker calls it. Use in FROM.
Errors: 25001 in a transaction that has written something or runs under REPEATABLE READ or SERIALIZABLE; 55000 in a copy that stint.activate() was not called in.
Locks: the roll-up lock (an object lock on the schema stint) until the transaction ends; verbs and readers never wait for it, stint.drop_queue does.';

CREATE FUNCTION stint.record_usage(
    queue text,
    id uuid,
    attempt int,
    key text,
    run_id text DEFAULT NULL,
    trace_id text DEFAULT NULL,
    model text DEFAULT NULL,
    input_tokens bigint DEFAULT NULL,
    cached_tokens bigint DEFAULT NULL,
    output_tokens bigint DEFAULT NULL,
    model_cost numeric DEFAULT NULL,
    compute_cost numeric DEFAULT NULL,
    confidence real DEFAULT NULL,
    meta jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'record_usage_wrapper';
REVOKE ALL ON FUNCTION stint.record_usage FROM PUBLIC;
COMMENT ON FUNCTION stint.record_usage IS
'Records usage that was not reported by the call that ended the attempt, such as a provider''s bill. It is added to what the attempt reported, in stint.attempts and in every sum,
at the time the attempt ended; budgets are not changed by it. key: names the bill, once for each attempt. Returns true, and false where the same bill is there already: repeat it
as often as you like. The attempt may still run, and may belong to a task that has finished long ago. Waits for: another transaction that records the same key.
Errors: P0002 the queue has no such task, or the task no such attempt; 23505 the key has another bill; 22023 nothing but the key was given, or the key is ''callback'', under which
late callbacks are kept; 42704 unknown queue.';

-- The dashboard. STABLE: all functions of one statement see one snapshot.

CREATE FUNCTION stint.task_counts(
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    status text DEFAULT NULL,
    agent text DEFAULT NULL,
    queue text DEFAULT NULL
) RETURNS TABLE (queue text, status text, tasks bigint)
LANGUAGE c STABLE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'task_counts_wrapper';
REVOKE ALL ON FUNCTION stint.task_counts FROM PUBLIC;
COMMENT ON FUNCTION stint.task_counts IS
'How many tasks finished from since to until as ''completed'', ''failed'' and ''cancelled'', and how many are ''scheduled'', ''blocked'', ''ready'' and ''running'' now where that span
includes now, by queue. Null filters take everything. since and until are widened to whole minutes, of what is older than three days to whole hours, older than a hundred days to whole days (UTC).
Use in FROM. Errors: 42704 unknown queue; 22023 unknown status.';

CREATE FUNCTION stint.usage_by(
    by text DEFAULT 'agent',
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    status text DEFAULT NULL,
    agent text DEFAULT NULL,
    queue text DEFAULT NULL,
    model text DEFAULT NULL,
    time_zone text DEFAULT 'UTC'
) RETURNS TABLE (key text, tasks bigint, attempts bigint, input_tokens numeric, cached_tokens numeric, output_tokens numeric, model_cost numeric, compute_cost numeric, cost numeric,
    median_confidence double precision, confidence_error double precision)
LANGUAGE c STABLE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'usage_by_wrapper';
REVOKE ALL ON FUNCTION stint.usage_by FROM PUBLIC;
COMMENT ON FUNCTION stint.usage_by IS
'What attempts that ended from since to until used, late usage included, by ''agent'', ''model'', ''queue'', ''status'', ''hour'', ''day'' or ''month''; null makes one row of everything. Sums are exact.
key: null for tasks without an agent, attempts without a model. tasks: tasks that finished in that span (by model: of their last attempt). status: how the attempts ended (completed,
failed, cancelled, released, snoozed, awaiting, lapsed) and the tasks finished. median_confidence: of the confidences reported, within confidence_error.
since and until are widened as in stint.task_counts. time_zone: whose hours, days and months; other than in UTC they are made of hours, so days older than a hundred days are days in UTC, and
where the zone''s offset is no whole number of hours, the hour that a day begins in counts with the day before. Use in FROM. Errors: 42704 unknown queue; 22023 unknown by, status or time_zone.';

CREATE FUNCTION stint.latency(
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    status text DEFAULT NULL,
    agent text DEFAULT NULL,
    queue text DEFAULT NULL,
    model text DEFAULT NULL,
    by text DEFAULT NULL,
    time_zone text DEFAULT 'UTC'
) RETURNS TABLE (key text, measure text, attempts bigint, median interval, p95 interval, p99 interval, median_ms double precision, p95_ms double precision, p99_ms double precision, error double precision)
LANGUAGE c STABLE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'latency_wrapper';
REVOKE ALL ON FUNCTION stint.latency FROM PUBLIC;
COMMENT ON FUNCTION stint.latency IS
'Median, 95th and 99th percentile of how long tasks waited and attempts ran, for attempts that ended from since to until. measure: ''wait'', from when a task was enqueued, or was due if
that was later, to the start of its first attempt (time blocked by other tasks included); ''run'', from an attempt''s start to its end. attempts: how many were measured.
Each percentile is within the share error (0.025: 2.5 %) of the exact one. by, time_zone and the filters: as in stint.usage_by. Use in FROM. Errors: as stint.usage_by.';

CREATE FUNCTION stint.cost_of_failed(
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    status text DEFAULT 'failed',
    agent text DEFAULT NULL,
    queue text DEFAULT NULL
) RETURNS TABLE (queue text, agent text, tasks bigint, attempts bigint, input_tokens numeric, cached_tokens numeric, output_tokens numeric, model_cost numeric, compute_cost numeric, cost numeric,
    retried_attempts bigint, retried_cost numeric)
LANGUAGE c STABLE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'cost_of_failed_wrapper';
REVOKE ALL ON FUNCTION stint.cost_of_failed FROM PUBLIC;
COMMENT ON FUNCTION stint.cost_of_failed IS
'What tasks that failed from since to until cost, by queue and agent, the dearest first: all their attempts, whenever those ran, with late usage. A task that stint.retry took back counts no
more, until it fails again, then with all its attempts. cost: model_cost + compute_cost. retried_attempts, retried_cost: beside that, the failed and lapsed attempts of tasks that
completed in the end in that span. status: ''failed'', ''cancelled'', or null for both. since and until are widened as in stint.task_counts.
Last week: SELECT sum(cost) FROM stint.cost_of_failed(since => now() - interval ''7 days''). Use in FROM. Errors: 42704 unknown queue; 22023 unknown status.';

CREATE FUNCTION stint.dashboard(
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    status text DEFAULT NULL,
    agent text DEFAULT NULL,
    queue text DEFAULT NULL
) RETURNS jsonb
LANGUAGE c STABLE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'dashboard_wrapper';
REVOKE ALL ON FUNCTION stint.dashboard FROM PUBLIC;
COMMENT ON FUNCTION stint.dashboard IS
'One page: since and until as widened; tasks by status, and by queue and status; usage of everything, and by queues, agents and models (the 50 dearest), with medians and percentiles in
milliseconds; failed, what failed tasks cost; series by hour for up to three days, by day for up to a hundred, else by month, in UTC; error, that of latencies (relative) and of confidences.
The filters are those of stint.usage_by. Errors: 42704 unknown queue; 22023 unknown status.';

-- Without just-in-time compilation, which takes seconds where what it compiles takes milliseconds: the plan is long, and partitions that were never analysed look large.
CREATE FUNCTION stint.verify_accounting(since timestamptz DEFAULT NULL) RETURNS TABLE (queue text, day timestamptz, figure text, summed numeric, counted numeric)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
    WITH usage AS (
        SELECT r.queue, date_bin('1 day', r.since, '2000-01-01 00:00:00+00') AS day, r.attempts, r.input_tokens, r.cached_tokens, r.output_tokens, r.model_cost, r.compute_cost
        FROM stint.usage_rollups r CROSS JOIN stint.rollup_marks m
        WHERE r.level = 3 AND r.since < m.days_until OR r.level = 2 AND r.since >= m.days_until AND r.since < m.hours_until OR r.level = 1 AND r.since >= m.hours_until
        UNION ALL
        SELECT t.queue, date_bin('1 day', t.since, '2000-01-01 00:00:00+00'), t.attempts, t.input_tokens, t.cached_tokens, t.output_tokens, t.model_cost, t.compute_cost
        FROM stint.usage_tail t
    ), tasks AS (
        SELECT r.queue, date_bin('1 day', r.since, '2000-01-01 00:00:00+00') AS day, r.outcome, r.tasks, r.attempts, r.model_cost + r.compute_cost AS cost
        FROM stint.task_rollups r CROSS JOIN stint.rollup_marks m
        WHERE r.level = 3 AND r.since < m.days_until OR r.level = 2 AND r.since >= m.days_until AND r.since < m.hours_until OR r.level = 1 AND r.since >= m.hours_until
        UNION ALL
        SELECT t.queue, date_bin('1 day', t.since, '2000-01-01 00:00:00+00'), t.outcome, t.tasks, t.attempts, t.model_cost + t.compute_cost
        FROM stint.task_tail t
    ), sums AS (
        SELECT u.queue, u.day, f.figure, sum(f.value) AS value
        FROM usage u
        CROSS JOIN LATERAL (VALUES ('attempts', u.attempts), ('input_tokens', u.input_tokens), ('cached_tokens', u.cached_tokens), ('output_tokens', u.output_tokens),
                                   ('model_cost', u.model_cost), ('compute_cost', u.compute_cost)) f (figure, value)
        GROUP BY u.queue, u.day, f.figure
        UNION ALL
        SELECT t.queue, t.day, t.outcome || f.figure, sum(f.value)
        FROM tasks t
        CROSS JOIN LATERAL (VALUES (' tasks', t.tasks), (' tasks'' attempts', t.attempts), (' tasks'' cost', t.cost)) f (figure, value)
        GROUP BY t.queue, t.day, t.outcome || f.figure
    ), spent AS (
        SELECT a.queue, a.id, a.ended_at, coalesce(a.input_tokens, 0) AS input_tokens, coalesce(a.cached_tokens, 0) AS cached_tokens, coalesce(a.output_tokens, 0) AS output_tokens,
               coalesce(a.model_cost, 0) AS model_cost, coalesce(a.compute_cost, 0) AS compute_cost
        FROM stint.attempts a
    ), rows AS (
        SELECT s.queue, date_bin('1 day', s.ended_at, '2000-01-01 00:00:00+00') AS day, f.figure, sum(f.value) AS value
        FROM spent s
        CROSS JOIN LATERAL (VALUES ('attempts', 1), ('input_tokens', s.input_tokens), ('cached_tokens', s.cached_tokens), ('output_tokens', s.output_tokens),
                                   ('model_cost', s.model_cost), ('compute_cost', s.compute_cost)) f (figure, value)
        GROUP BY 1, 2, 3
        UNION ALL
        SELECT o.queue, date_bin('1 day', o.finished_at, '2000-01-01 00:00:00+00'), o.outcome || f.figure, sum(f.value)
        FROM stint.task_outcomes o
        LEFT JOIN (SELECT s.queue, s.id, count(*) AS attempts, sum(s.model_cost + s.compute_cost) AS cost FROM spent s GROUP BY s.queue, s.id) c
               ON c.queue = o.queue AND c.id = o.id
        CROSS JOIN LATERAL (VALUES (' tasks', 1), (' tasks'' attempts', coalesce(c.attempts, 0)), (' tasks'' cost', coalesce(c.cost, 0))) f (figure, value)
        GROUP BY 1, 2, 3
    )
    SELECT coalesce(s.queue, r.queue), coalesce(s.day, r.day), coalesce(s.figure, r.figure), coalesce(s.value, 0), coalesce(r.value, 0)
    FROM sums s
    FULL JOIN rows r ON r.queue = s.queue AND r.day = s.day AND r.figure = s.figure
    WHERE coalesce(s.value, 0) <> coalesce(r.value, 0) AND coalesce(s.day, r.day) >= coalesce($1, '-infinity')
    ORDER BY 1, 2, 3
$$;
REVOKE ALL ON FUNCTION stint.verify_accounting FROM PUBLIC;
COMMENT ON FUNCTION stint.verify_accounting IS
'Compares the sums that the dashboard is made of with the attempts and tasks themselves, by queue and day (UTC); no row means they agree. since: days before it are left out; give the time
from which history is still whole, since sums outlive it. Reads all history: for tests and for nights when you doubt. Use in FROM.';
