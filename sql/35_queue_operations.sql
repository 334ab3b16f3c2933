-- Running a queue: its settings while it works, single tasks moved by hand, batches, and what shows how it does. The verbs are functions of the library (src/queue).

CREATE FUNCTION stint.alter_queue(
    queue text,
    lease_for interval DEFAULT NULL,
    max_attempts int DEFAULT NULL,
    backoff_base interval DEFAULT NULL,
    backoff_factor double precision DEFAULT NULL,
    backoff_max interval DEFAULT NULL,
    backoff_jitter double precision DEFAULT NULL,
    budgets text[] DEFAULT NULL,
    key_retention interval DEFAULT NULL,
    late_result text DEFAULT NULL,
    notify boolean DEFAULT NULL,
    comment text DEFAULT NULL,
    max_run_time interval DEFAULT NULL,
    paused boolean DEFAULT NULL,
    fair boolean DEFAULT NULL,
    correct_predictions boolean DEFAULT NULL,
    history_retention interval DEFAULT NULL,
    history_archive text DEFAULT NULL,
    events boolean DEFAULT NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'alter_queue_wrapper';
REVOKE ALL ON FUNCTION stint.alter_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.alter_queue IS
'Changes a queue''s settings; the arguments are those of stint.create_queue, and null keeps what is there. max_run_time => ''0'' and comment => '''' take theirs away.
history_retention => ''0'' keeps history for ever; it and history_archive hold for tasks enqueued from now on: those that are there keep what they were enqueued with.
What runs goes on under the lease, deadline and budgets it was claimed with. fair applies to tasks enqueued from then on: those that wait stand together as the group without
a key; taken away, the tasks of all groups are claimed by priority, then enqueue order. events => true begins a new feed for stint.task_events: transactions that began before
this commits may leave changes out of it, and positions of an earlier feed are refused. Waits for: another open transaction that changes the same queue.
Errors: 42704 unknown queue or budget; 22023 a value out of its bounds.';

CREATE FUNCTION stint.set_weight(queue text, group_key text, weight double precision DEFAULT NULL) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'set_weight_wrapper';
REVOKE ALL ON FUNCTION stint.set_weight FROM PUBLIC;
COMMENT ON FUNCTION stint.set_weight IS
'Says what a group of a fair queue counts, from the commit on: with twice the weight of another it gets twice the tokens while both have tasks waiting. From 0.001 to 1000; every group counts 1
unless told otherwise, as do tasks without a group_key. null, or left out, takes the weight away. Waits for: another open transaction that sets the same weight.
Errors: 42704 unknown queue; 22004 no group_key; 22023 a weight out of its bounds.';

CREATE FUNCTION stint.group_usage() RETURNS TABLE (queue text, group_key text, tokens bigint, virtual_time double precision)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'group_usage_wrapper';
REVOKE ALL ON FUNCTION stint.group_usage FROM PUBLIC;
COMMENT ON FUNCTION stint.group_usage IS
'What the groups of fair queues got, as claims see it: tokens charged and settled since the server started, and their time, which claims compare.
null where nothing is remembered. Read by stint.fair_shares. Use in FROM.';

CREATE VIEW stint.fair_shares AS
SELECT q.queue, u.group_key COLLATE "C" AS group_key, coalesce(w.weight, 1) AS weight, u.tokens, u.virtual_time,
       (SELECT count(*) FROM stint.lanes l JOIN stint.place_ready r ON r.lane = l.lane
        WHERE l.queue = q.queue AND l.group_key IS NOT DISTINCT FROM u.group_key) AS ready,
       (SELECT count(*) FROM stint.lanes l JOIN stint.place_running r ON r.queue = l.queue AND r.lane = l.lane
        WHERE l.queue = q.queue AND l.group_key IS NOT DISTINCT FROM u.group_key) AS running
FROM stint.group_usage() u
JOIN stint.queue_config q ON q.queue = u.queue
LEFT JOIN stint.group_weights w ON w.queue = u.queue AND w.group_key = u.group_key;
COMMENT ON VIEW stint.fair_shares IS
'Groups of fair queues that have live tasks or a weight: the tokens each got since the server started, its virtual time (tokens by weight; of the groups with tasks ready and room in
their budgets the one with the least has the next turn, and one that was idle goes on from the least of the others), and its tasks ready and running. The group without a key has none';

CREATE FUNCTION stint.tidy_lanes() RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'tidy_lanes_wrapper';
REVOKE ALL ON FUNCTION stint.tidy_lanes FROM PUBLIC;
COMMENT ON FUNCTION stint.tidy_lanes IS
'Removes the lanes of groups of fair queues that have no live task, a few calls after they had their last one: no transaction may still be open that began before. Returns how many.
The maintenance worker does this every minute; call it where none runs.';

CREATE FUNCTION stint.pause_queue(queue text) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'pause_queue_wrapper';
REVOKE ALL ON FUNCTION stint.pause_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.pause_queue IS
'Has claims of a queue find nothing, until stint.resume_queue, also after a restart. Tasks are still taken in, scheduled ones become ready, and what runs goes on
to its end. A claim that began before this commits may still take a task. Returns whether this call changed anything. Errors: 42704 unknown queue.';

CREATE FUNCTION stint.resume_queue(queue text) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'resume_queue_wrapper';
REVOKE ALL ON FUNCTION stint.resume_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.resume_queue IS
'Ends a pause; sessions that wait in claim look at once. Returns whether this call changed anything. Errors: 42704 unknown queue.';

CREATE FUNCTION stint.purge_queue(
    queue text,
    max bigint DEFAULT NULL,
    reason text DEFAULT NULL
) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'purge_queue_wrapper';
REVOKE ALL ON FUNCTION stint.purge_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.purge_queue IS
'Cancels waiting tasks (ready, scheduled and blocked ones): each gets the outcome ''cancelled'' with reason as its error, and keeps its history. Returns how many.
max: at most so many in this transaction; call it until it returns 0 to keep transactions short. Without it, all of them. Running and finished tasks stay as they are.
Rows that another session holds are left out. Pause the queue first if nothing more shall be claimed.
Waits for: enqueues that depend on blocked tasks or join their strict groups. What depends on a cancelled task ends as its on_dependency_failure says, uncounted. Errors: 42704 unknown queue.';

CREATE FUNCTION stint.drop_queue(
    queue text,
    force boolean DEFAULT false
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'drop_queue_wrapper';
REVOKE ALL ON FUNCTION stint.drop_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.drop_queue IS
'Removes a queue. One that has tasks, live or finished, is refused (2BP01) unless force is true: then they go with their keys, attempts, usage and outcomes, and a worker
that still runs one learns from its next call that the queue is unknown. Budgets stay. One in which schedules or watches make tasks is refused (2BP01) also then: drop those first.
Locks the tables of live tasks against writers for its last step: it waits for open transactions that wrote to them, and other queues wait
for it meanwhile; set lock_timeout. Errors: 42704 unknown queue; 2BP01 it has tasks, or schedules or watches make tasks in it; 25001 under REPEATABLE READ.';

CREATE FUNCTION stint.enqueue_once(
    queue text,
    payload jsonb,
    key text,
    conflict text DEFAULT 'return',
    priority int DEFAULT 0,
    run_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL,
    agent text DEFAULT NULL,
    tokens bigint DEFAULT NULL,
    budgets text[] DEFAULT NULL,
    max_attempts int DEFAULT NULL,
    lease_for interval DEFAULT NULL,
    labels jsonb DEFAULT NULL,
    max_run_time interval DEFAULT NULL,
    group_key text DEFAULT NULL,
    depends_on uuid[] DEFAULT NULL,
    on_dependency_failure text DEFAULT 'fail'
) RETURNS TABLE (id uuid, created boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'enqueue_once_wrapper';
REVOKE ALL ON FUNCTION stint.enqueue_once FROM PUBLIC;
COMMENT ON FUNCTION stint.enqueue_once IS
'Adds a task under a key, as stint.enqueue does, and says whether this call made it. Where the key is held, id is its task''s and nothing changes.
conflict: what a held key with another payload means: ''return'' answers with the task that is there, ''error'' refuses (23505, naming the key). Payloads are compared as jsonb.
Waits for: what stint.enqueue waits for. Use in FROM. Errors: as stint.enqueue; 22004 no key; 23505 as said.';

CREATE FUNCTION stint.snooze(
    queue text,
    id uuid,
    lease uuid,
    duration interval
) RETURNS TABLE (outcome text, first boolean, status text, run_at timestamptz, run_in_ms bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'snooze_wrapper';
REVOKE ALL ON FUNCTION stint.snooze FROM PUBLIC;
COMMENT ON FUNCTION stint.snooze IS
'Puts a claimed task off for duration; the attempt ends as ''snoozed'' and does not count against max_attempts, and its budgets are free.
outcome: ''snoozed'' (run_at, run_in_ms say until when); ''cancelled'' where that had been asked; else as stint.complete answers. A lease that was snoozed ends nothing any more.
Use in FROM. Errors: P0002 unknown task; 42704 unknown queue; 22023, 54000 a duration out of bounds.';

CREATE FUNCTION stint.annotate(
    queue text,
    id uuid,
    lease uuid,
    run_id text DEFAULT NULL,
    trace_id text DEFAULT NULL
) RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'annotate_wrapper';
REVOKE ALL ON FUNCTION stint.annotate FROM PUBLIC;
COMMENT ON FUNCTION stint.annotate IS
'Notes the run id on your job platform and its trace id as soon as they are known, so that the attempt of a worker that dies later has them too. The lease stays as long as it was.
Returns ''held'', ''cancel_requested'' or ''lost'' as stint.extend does; null keeps what was noted before. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.retry(
    queue text,
    id uuid
) RETURNS TABLE (outcome text, status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'retry_wrapper';
REVOKE ALL ON FUNCTION stint.retry FROM PUBLIC;
COMMENT ON FUNCTION stint.retry IS
'Makes a failed or cancelled task live again: ready at the end of its line with the priority it was enqueued with. Its attempts stay and count no more, so it has
max_attempts again; the outcome it had moves to stint.task_retries. A key it had is taken again. What depended on it has ended, or waits
for it if a sweep ended it a moment ago. Of the tasks it depended on it waits for those that are live again; however the others ended, they do not hold it up any more.
In a strict group it stands at the end of the line, since its turn has passed.
outcome: ''retried'', status ready or blocked; ''already_completed''; ''not_finished'', status says where it is; ''key_taken'': another task got its key meanwhile, nothing was changed.
Waits for: what stint.enqueue waits for, and another retry of the task. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.retry_failed(
    queue text,
    since timestamptz DEFAULT NULL,
    agent text DEFAULT NULL,
    max int DEFAULT 1000
) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'retry_failed_wrapper';
REVOKE ALL ON FUNCTION stint.retry_failed FROM PUBLIC;
COMMENT ON FUNCTION stint.retry_failed IS
'Retries at most max failed tasks as stint.retry does, in the order they were enqueued, and returns how many; call it until it returns 0. Cancelled tasks stay.
since: only those that failed at or after that instant. agent: only those for that agent. Those whose key another task got are left out, as are rows that another session holds.
Tasks that depended on one another wait for one another again, and those of a strict group stand in their old order at the end of its line.
Errors: 42704 unknown queue; 54000 max above stint.max_batch.';

CREATE FUNCTION stint.reprioritize(
    queue text,
    id uuid,
    priority int
) RETURNS TABLE (outcome text, status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'reprioritize_wrapper';
REVOKE ALL ON FUNCTION stint.reprioritize FROM PUBLIC;
COMMENT ON FUNCTION stint.reprioritize IS
'Gives a waiting task another priority. Among the tasks of that priority it stands where its age puts it. It keeps the priority through its attempts, until stint.retry.
outcome: ''reprioritized''; ''already_running'' and ''already_finished'' change nothing. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.complete_many(
    queue text,
    items jsonb
) RETURNS TABLE (ordinality int, id uuid, outcome text, result jsonb, first boolean, status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'complete_many_wrapper';
REVOKE ALL ON FUNCTION stint.complete_many FROM PUBLIC;
COMMENT ON FUNCTION stint.complete_many IS
'Ends a batch of attempts as completed. items: an array of objects whose fields are the arguments of stint.complete but the queue; id and lease must be there.
Returns one row per element, in order, with what stint.complete would answer: each element has an outcome of its own, and one that was superseded does not hold up the others.
Tasks are taken in the order of their ids. An element that is no item, or names an unknown task, is an error that names it, and then nothing is changed.
Use in FROM. Errors: as stint.complete, naming the element; 54000 more elements than stint.max_batch.';

CREATE TYPE stint.finish_and_claim_row AS (kind text, id uuid, outcome text, result jsonb, first boolean, status text, attempt int, lease uuid, payload jsonb, priority int, agent text, tokens bigint, labels jsonb, enqueued_at timestamptz, expires_at timestamptz, expires_in_ms bigint);
REVOKE ALL ON TYPE stint.finish_and_claim_row FROM PUBLIC;
COMMENT ON TYPE stint.finish_and_claim_row IS
'What stint.finish_and_claim returns: what became of the task that was to end (kind ''finished''), then the tasks claimed (kind ''claimed'').';
CREATE FUNCTION stint.finish_and_claim(
    queue text,
    id uuid,
    lease uuid,
    worker text,
    result jsonb DEFAULT NULL,
    max int DEFAULT 1,
    lease_for interval DEFAULT NULL,
    agents text[] DEFAULT NULL,
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
) RETURNS SETOF stint.finish_and_claim_row
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'finish_and_claim_wrapper';
REVOKE ALL ON FUNCTION stint.finish_and_claim FROM PUBLIC;
COMMENT ON FUNCTION stint.finish_and_claim IS
'Ends one attempt as completed and claims the next tasks, in one commit. What the finished task held of its budgets is there for the claimed ones.
Returns kind, id, outcome, result, first, status, attempt, lease, payload, priority, agent, tokens, labels, enqueued_at, expires_at, expires_in_ms (type stint.finish_and_claim_row).
One row of kind ''finished'', always and first, has id, outcome, result, first and status as stint.complete answers; then one row of kind ''claimed'' for each task
claimed, with stint.claim''s columns. The claim happens whatever became of the finished task. Never waits for tasks. The arguments are those of both.
Use in FROM. Errors: as stint.complete and stint.claim.';

CREATE VIEW stint.stuck AS
SELECT r.queue, r.id, s.problem, r.worker, f.agent, r.attempt, r.started_at, r.heartbeat_at,
       coalesce(r.extended_until, r.expires_at) AS expires_at, r.deadline, r.run_id, r.trace_id
FROM stint.place_running r
JOIN stint.task_facts f ON f.queue = r.queue AND f.id = r.id AND get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(r.id), 15)
CROSS JOIN LATERAL (
    SELECT CASE WHEN r.deadline <= n.at THEN 'past max_run_time'
                WHEN coalesce(r.extended_until, r.expires_at) <= n.at THEN 'lapsed'
                WHEN r.deadline - n.at < (n.at - r.started_at) / 9 THEN 'near max_run_time'
                WHEN coalesce(r.extended_until, r.expires_at) - n.at < (r.expires_at - r.started_at) / 5
                THEN CASE WHEN r.heartbeat_at IS NULL THEN 'near expiry, no heartbeat' ELSE 'near expiry, heartbeat overdue' END
           END AS problem
    FROM (SELECT clock_timestamp() AS at) n
) s
WHERE s.problem IS NOT NULL;
COMMENT ON VIEW stint.stuck IS
'Running attempts that look stuck: ''lapsed'' or ''past max_run_time'' and not swept yet; ''near max_run_time'', nine tenths are over; ''near expiry'', less than a fifth of the
lease is left, without a heartbeat or with one overdue';

CREATE FUNCTION stint.lease_advice(queue text) RETURNS TABLE (
    agent text, attempts bigint, lapsed bigint, run_time_p50 interval, run_time_p99 interval, heartbeat_gap_p50 interval, heartbeat_gap_p99 interval,
    lease_for interval, advice text
)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'lease_advice_wrapper';
REVOKE ALL ON FUNCTION stint.lease_advice FROM PUBLIC;
COMMENT ON FUNCTION stint.lease_advice IS
'For each agent of a queue: how long its attempts ran (median and 99th percentile) and the longest gap between two heartbeats of one attempt (likewise), against the
queue''s lease, and in words what follows. Lapsed attempts are counted, but not timed. Reads all attempts of the queue. Use in FROM. Errors: 42704 unknown queue.';

CREATE FUNCTION stint.prediction_advice(queue text) RETURNS TABLE (
    agent text, attempts bigint, predicted_tokens numeric, actual_tokens numeric, factor numeric, factor_p50 numeric, factor_p99 numeric, applied double precision, advice text
)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'prediction_advice_wrapper';
REVOKE ALL ON FUNCTION stint.prediction_advice FROM PUBLIC;
COMMENT ON FUNCTION stint.prediction_advice IS
'For each agent of a queue: the tokens predicted for its completed and failed attempts against those they reported (input and output), together and as the median and
99th percentile of the factor between the two, and in words what follows. Tasks without a prediction and attempts without reported tokens are left out.
applied: by what claims multiply the agent''s predictions where the queue has correct_predictions: actual by predicted tokens of its latest attempts, at least 20 and at
most 1,000 of them, from 0.25 to 4, found anew every minute. null where nothing is corrected. Reads all attempts of the queue. Use in FROM. Errors: 42704 unknown queue.';

CREATE FUNCTION stint.refresh_factors() RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'refresh_factors_wrapper';
REVOKE ALL ON FUNCTION stint.refresh_factors FROM PUBLIC;
COMMENT ON FUNCTION stint.refresh_factors IS
'Finds anew by what predictions are corrected, in every queue with correct_predictions, from the attempts of its latest 10,000 tasks that had one. Returns how many factors changed.
The maintenance worker does this every minute; call it where none runs.';
