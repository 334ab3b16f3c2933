-- The queue's verbs. Each is a function of the library (src/queue, src/budget); its COMMENT is its reference. Those that workers call for each task return rows of
-- a type with a name: the columns of RETURNS TABLE are worked out anew at every execution.

CREATE FUNCTION stint.create_queue(
    queue text,
    lease_for interval DEFAULT '5 minutes',
    max_attempts int DEFAULT 5,
    backoff_base interval DEFAULT '10 seconds',
    backoff_factor double precision DEFAULT 2,
    backoff_max interval DEFAULT '1 hour',
    backoff_jitter double precision DEFAULT 0.2,
    budgets text[] DEFAULT '{}',
    key_retention interval DEFAULT '7 days',
    late_result text DEFAULT 'accept',
    notify boolean DEFAULT true,
    comment text DEFAULT NULL,
    max_run_time interval DEFAULT NULL,
    paused boolean DEFAULT false,
    strict_groups boolean DEFAULT false,
    fair boolean DEFAULT false,
    correct_predictions boolean DEFAULT false,
    history_retention interval DEFAULT NULL,
    history_archive text DEFAULT 'drop',
    events boolean DEFAULT false
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'create_queue_wrapper';
REVOKE ALL ON FUNCTION stint.create_queue FROM PUBLIC;
COMMENT ON FUNCTION stint.create_queue IS
'Makes a queue.
lease_for: how long a claim holds a task unless the task or the claim says otherwise; longer than the worker''s worst pause.
max_attempts: attempts that may fail or lapse before the task fails.
backoff_base, backoff_factor, backoff_max, backoff_jitter: the wait after the n-th failure is base * factor^(n-1), at most max, give or take the share jitter (0 to 1).
budgets: budgets every task of the queue draws on.
key_retention: how long an idempotency key is kept at least; never shorter than its task lives.
late_result: ''accept'' takes the result of a lapsed lease while nobody else has the task; ''reject'' does not.
notify: whether changes ring the channel stint_queue (a coalesced doorbell sent by the maintenance worker, never by your transaction).
max_run_time: the longest an attempt may run: no heartbeat keeps its lease longer, so the sweep takes it back (the attempt counts). paused: whether claims find nothing for now.
strict_groups: of the tasks with one group_key at most one runs at a time, and they run in the order of enqueueing whatever their priority; one that is scheduled,
backs off, waits for other tasks or awaits an event holds up those behind it. Without it group_key is a label.
fair: the queue is shared by the tasks'' group_keys in proportion to their weights (stint.set_weight, 1 by default), by tokens spent and not by tasks: the group that got least
has the next turn, and priority and order count within a group only. Tasks without a group_key are one group. Goes with strict_groups.
correct_predictions: claims reserve of budgets, and charge to groups, a task''s prediction times what its agent''s latest attempts used for each token predicted (see stint.prediction_advice).
events: whether every change of status of its tasks is kept for stint.task_events, for stint.task_event_retention; each costs one narrow row more in the transaction that makes it.
history_retention: how long a task, its attempts and its outcome are kept after it finished, from 1 hour on; null: for ever. They go with their partition, a thirtieth of that time at once, so some are
kept a little longer. A live task is never removed. Holds for tasks enqueued from now on. history_archive: ''drop'' removes partitions past it, ''detach'' moves them to the schema stint_archive, where they are yours to dump and drop.
Errors: 42710 the queue exists; 42704 unknown budget; 22023 a value out of its bounds.';

CREATE FUNCTION stint.create_budget(
    name text,
    max_running int DEFAULT NULL,
    max_tokens bigint DEFAULT NULL,
    max_requests bigint DEFAULT NULL,
    max_window_tokens bigint DEFAULT NULL,
    per interval DEFAULT NULL,
    default_tokens bigint DEFAULT NULL,
    max_cost numeric DEFAULT NULL,
    input_weight double precision DEFAULT 1,
    cached_weight double precision DEFAULT 1,
    output_weight double precision DEFAULT 1
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'create_budget_wrapper';
REVOKE ALL ON FUNCTION stint.create_budget(text, int, bigint, bigint, bigint, interval, bigint, numeric, double precision, double precision, double precision) FROM PUBLIC;
COMMENT ON FUNCTION stint.create_budget(text, int, bigint, bigint, bigint, interval, bigint, numeric, double precision, double precision, double precision) IS
'Makes a budget: a limit that tasks draw on, their queue''s budgets and their own together. All must have room for a task to be claimed, decided in one step.
Give at least one limit. max_running: most tasks running at once; 0 closes the budget. max_tokens: most predicted tokens of running tasks together.
per: a window of time; in no span of its length are more than max_requests attempts begun or more than max_window_tokens tokens admitted. An attempt is charged its prediction when it
begins and what it used when it ends: what it did not use is free again at once, what it used above is owed. max_cost: nothing starts while model_cost and compute_cost
reported within the window reach it. What leaves the window is forgotten in steps of a sixtieth of it.
default_tokens: what a task without a prediction counts as; without it such a task is refused where tokens are limited.
input_weight, cached_weight, output_weight: what a token of each kind counts when an attempt reports its usage; cached tokens are part of the input. Predictions and limits are in weighted tokens.
Errors: 42710 the budget exists; 22023 a value out of its bounds.';

CREATE FUNCTION stint.alter_budget(
    name text,
    max_running int DEFAULT NULL,
    max_tokens bigint DEFAULT NULL,
    max_requests bigint DEFAULT NULL,
    max_window_tokens bigint DEFAULT NULL,
    per interval DEFAULT NULL,
    default_tokens bigint DEFAULT NULL,
    max_cost numeric DEFAULT NULL,
    input_weight double precision DEFAULT NULL,
    cached_weight double precision DEFAULT NULL,
    output_weight double precision DEFAULT NULL,
    unset text[] DEFAULT NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'alter_budget_wrapper';
REVOKE ALL ON FUNCTION stint.alter_budget(text, int, bigint, bigint, bigint, interval, bigint, numeric, double precision, double precision, double precision, text[]) FROM PUBLIC;
COMMENT ON FUNCTION stint.alter_budget(text, int, bigint, bigint, bigint, interval, bigint, numeric, double precision, double precision, double precision, text[]) IS
'Changes limits of a budget that is in use, from the commit on: running work goes on, and nothing starts until there is room under the new limits. What is null stays as it is.
unset: names of limits to remove, such as ''{max_tokens,default_tokens}''. A task that can then never run is held, and stint.explain says so.
A changed per is filled from the attempts of that time before the next claim.
Waits for: another transaction that changes the budget. Errors: 42704 unknown budget; 22023 a value out of its bounds, or no limit left.';

CREATE FUNCTION stint.drop_budget(
    name text
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'drop_budget_wrapper';
REVOKE ALL ON FUNCTION stint.drop_budget(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.drop_budget(text) IS
'Removes a budget that nothing draws on. Call it in a transaction of its own.
Waits for: transactions that claimed, ended or enqueued tasks with budgets, and holds up others of them until it ends.
Errors: 42704 unknown budget; 2BP01 queues, or tasks that are alive, draw on it: the message names them.';

CREATE FUNCTION stint.throttle(
    budget text,
    duration interval
) RETURNS timestamptz
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'throttle_wrapper';
REVOKE ALL ON FUNCTION stint.throttle(text, interval) FROM PUBLIC;
COMMENT ON FUNCTION stint.throttle(text, interval) IS
'The answer of a whole fleet to a provider''s 429: nothing that draws on the budget is claimed for that long, from the commit on, whatever restarts meanwhile. Running work goes on.
Returns the instant it ends. A throttle in force is only ever made longer; ''0'' ends it (and returns null).
Waits for: another transaction that changes the budget. Errors: 42704 unknown budget; 22023 a negative duration; 54000 longer than stint.max_delay.';

CREATE FUNCTION stint.enqueue(
    queue text,
    payload jsonb,
    priority int DEFAULT 0,
    run_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL,
    key text DEFAULT NULL,
    agent text DEFAULT NULL,
    tokens bigint DEFAULT NULL,
    budgets text[] DEFAULT NULL,
    group_key text DEFAULT NULL,
    depends_on uuid[] DEFAULT NULL,
    on_dependency_failure text DEFAULT 'fail',
    max_attempts int DEFAULT NULL,
    lease_for interval DEFAULT NULL,
    labels jsonb DEFAULT NULL,
    max_run_time interval DEFAULT NULL
) RETURNS uuid
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'enqueue_wrapper';
REVOKE ALL ON FUNCTION stint.enqueue(text, jsonb, int, timestamptz, interval, text, text, bigint, text[], text, uuid[], text, int, interval, jsonb, interval) FROM PUBLIC;
COMMENT ON FUNCTION stint.enqueue(text, jsonb, int, timestamptz, interval, text, text, bigint, text[], text, uuid[], text, int, interval, jsonb, interval) IS
'Adds a task to a queue and returns its id, a UUIDv7. The payload reaches the worker byte for byte as jsonb keeps it.
priority: higher is claimed sooner, in a fair queue within its group. run_at or delay: not before that instant, or that long from now.
key: at most one task for each queue and key while the key is kept; a repeat returns the id of the first and changes nothing.
agent: who the work is for, for accounting. tokens: predicted tokens, reserved of every budget while the task runs.
budgets: budgets it draws on beside its queue''s. max_attempts, lease_for, max_run_time: in place of the queue''s. labels: anything you want to find it by.
group_key: what the task belongs with; in a queue with strict_groups it runs after those of the same key that were enqueued before, a fair queue is shared among keys.
depends_on: tasks of the same queue that must end first; until then it is blocked. Only tasks that exist can be named, so there are no cycles.
on_dependency_failure: what becomes of it at once when one of them fails or is cancelled: ''fail'', ''cancel'', or ''run'' it all the same once all have ended.
Waits for: another transaction that holds the same key, enqueues the first task of the same group of a strict or fair queue, or moves a task named in depends_on. Sends no NOTIFY.
Errors: 42704 unknown queue or budget; P0002 depends_on names a task that the queue does not have; 54000 over a limit, or a prediction above a budget''s capacity; 22023 a value out of its bounds.';

CREATE FUNCTION stint.enqueue_many(
    queue text,
    tasks jsonb
) RETURNS TABLE (ordinality int, id uuid, created boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'enqueue_many_wrapper';
REVOKE ALL ON FUNCTION stint.enqueue_many(text, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION stint.enqueue_many(text, jsonb) IS
'Adds a batch of tasks, all or none. tasks: an array of objects whose fields are the arguments of stint.enqueue; payload must be there.
Returns one row per element, in order; created is false where the element''s key was held, and id is then the first task''s.
Use in FROM. Errors: as stint.enqueue, naming the element; 54000 more elements than stint.max_batch.';

CREATE TYPE stint.claim_row AS (queue text, id uuid, attempt int, lease uuid, payload jsonb, priority int, agent text, tokens bigint, labels jsonb, enqueued_at timestamptz, expires_at timestamptz, expires_in_ms bigint);
REVOKE ALL ON TYPE stint.claim_row FROM PUBLIC;
COMMENT ON TYPE stint.claim_row IS
'What stint.claim returns: a task and the right to end its attempt.';
CREATE FUNCTION stint.claim(
    queue text,
    worker text,
    max int DEFAULT 1,
    lease_for interval DEFAULT NULL,
    wait interval DEFAULT NULL,
    agents text[] DEFAULT NULL
) RETURNS SETOF stint.claim_row
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'claim_wrapper';
REVOKE ALL ON FUNCTION stint.claim(text, text, int, interval, interval, text[]) FROM PUBLIC;
COMMENT ON FUNCTION stint.claim(text, text, int, interval, interval, text[]) IS
'Takes at most max tasks under a lease each, by priority (descending), then enqueue order; only tasks whose budgets all have room.
Returns queue, id, attempt, lease, payload, priority, agent, tokens, labels, enqueued_at, expires_at, expires_in_ms (type stint.claim_row).
In a fair queue the group that got the fewest tokens by weight has the next turn, task by task, and that order holds within each group; a group without room is passed by.
worker: who runs them, as shown in stint.tasks. lease_for: in place of the task''s or the queue''s.
wait: sleep in the server until a task is there, at most so long (and at most stint.max_wait); one waiter is woken for each task. Give waiters a connection pool of their own.
agents: only tasks for these agents, 1 to 100 of them; others are neither held up nor moved. A wait for some agents looks ten times a second, since no wake-up is meant for it.
A paused queue yields nothing.
lease is a secret: it is the right to end this attempt. expires_in_ms counts from the claim.
An empty claim writes nothing. Use in FROM. Never waits for other sessions'' rows.
Errors: 42704 unknown queue; 25001 wait under REPEATABLE READ; 40001 under REPEATABLE READ when another session took the row; 0A000 when a transaction that claimed tasks with budgets or of a fair queue is prepared.';

CREATE TYPE stint.extend_row AS (status text, expires_at timestamptz, expires_in_ms bigint);
REVOKE ALL ON TYPE stint.extend_row FROM PUBLIC;
COMMENT ON TYPE stint.extend_row IS
'What stint.extend returns: how the lease stands.';
CREATE FUNCTION stint.extend(
    queue text,
    id uuid,
    lease uuid,
    duration interval DEFAULT NULL,
    progress jsonb DEFAULT NULL,
    run_id text DEFAULT NULL,
    trace_id text DEFAULT NULL
) RETURNS SETOF stint.extend_row
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'extend_wrapper';
REVOKE ALL ON FUNCTION stint.extend(text, uuid, uuid, interval, jsonb, text, text) FROM PUBLIC;
COMMENT ON FUNCTION stint.extend(text, uuid, uuid, interval, jsonb, text, text) IS
'The heartbeat: the lease now ends duration from now (by default as long as it was granted for), but never after the attempt''s max_run_time.
Returns status, expires_at, expires_in_ms (type stint.extend_row).
status: ''held''; ''cancel_requested'' (still held: stop, then fail or release); ''lost'' (another attempt may run: stop).
progress, run_id, trace_id: kept and shown in stint.tasks and, for a worker that dies, in stint.attempts.
A lease past its time that was not swept yet is extended. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE TYPE stint.complete_row AS (outcome text, result jsonb, first boolean, status text);
REVOKE ALL ON TYPE stint.complete_row FROM PUBLIC;
COMMENT ON TYPE stint.complete_row IS
'What stint.complete returns: what became of the attempt and of its task.';
CREATE FUNCTION stint.complete(
    queue text,
    id uuid,
    lease uuid,
    result jsonb DEFAULT NULL,
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
) RETURNS SETOF stint.complete_row
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'complete_wrapper';
REVOKE ALL ON FUNCTION stint.complete(text, uuid, uuid, jsonb, text, text, text, bigint, bigint, bigint, numeric, numeric, real, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION stint.complete(text, uuid, uuid, jsonb, text, text, text, bigint, bigint, bigint, numeric, numeric, real, jsonb) IS
'Ends the attempt as completed, and the task with it. Call it again as often as you like: one call is accepted, and every caller learns whether it was the one (first).
Returns outcome, result, first, status (type stint.complete_row).
outcome: ''completed''; ''already_completed'' by this lease, with the stored result; ''already_failed'' by this lease; ''already_finished'' otherwise, status says how;
''superseded'': another attempt took over; ''unknown_lease'': never granted here, nothing was changed.
A lease that lapsed still completes its task while no other attempt has begun (unless the queue says late_result ''reject''). status: the task''s status now.
run_id, trace_id: the run on your job platform and its trace. model, input_tokens, cached_tokens (of the input), output_tokens, model_cost, compute_cost (any one currency), confidence (0 to 1), meta: what the attempt used; kept once for each attempt whatever became of it.
Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE TYPE stint.fail_row AS (outcome text, result jsonb, first boolean, status text, retry_at timestamptz, retry_in_ms bigint);
REVOKE ALL ON TYPE stint.fail_row FROM PUBLIC;
COMMENT ON TYPE stint.fail_row IS
'What stint.fail returns: what became of the attempt and of its task, and when it is tried again.';
CREATE FUNCTION stint.fail(
    queue text,
    id uuid,
    lease uuid,
    error text,
    retry_in interval DEFAULT NULL,
    retryable boolean DEFAULT true,
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
) RETURNS SETOF stint.fail_row
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'fail_wrapper';
REVOKE ALL ON FUNCTION stint.fail(text, uuid, uuid, text, interval, boolean, text, text, text, bigint, bigint, bigint, numeric, numeric, real, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION stint.fail(text, uuid, uuid, text, interval, boolean, text, text, text, bigint, bigint, bigint, numeric, numeric, real, jsonb) IS
'Ends the attempt as failed. The task is tried again after the queue''s back-off, or retry_in, until its attempts are used up; with retryable false it fails at once.
Returns outcome, result, first, status, retry_at, retry_in_ms (type stint.fail_row).
outcome: ''retrying'' (retry_at, retry_in_ms say when); ''failed''; ''cancelled'' where that had been asked; else as stint.complete answers.
A lapsed lease cannot fail a task that waits for or runs in another attempt: ''superseded''.
run_id, trace_id: the run on your job platform and its trace. model, input_tokens, cached_tokens (of the input), output_tokens, model_cost, compute_cost (any one currency), confidence (0 to 1), meta: what the attempt used; kept once for each attempt whatever became of it.
Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.release(
    queue text,
    id uuid,
    lease uuid
) RETURNS TABLE (outcome text, first boolean, status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'release_wrapper';
REVOKE ALL ON FUNCTION stint.release(text, uuid, uuid) FROM PUBLIC;
COMMENT ON FUNCTION stint.release(text, uuid, uuid) IS
'Gives a claimed task back to where it stood in line; the attempt does not count against max_attempts.
outcome: ''released''; ''cancelled'' where that had been asked; else as stint.complete answers. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.cancel(
    queue text,
    id uuid,
    reason text DEFAULT NULL
) RETURNS TABLE (outcome text, status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'cancel_wrapper';
REVOKE ALL ON FUNCTION stint.cancel(text, uuid, text) FROM PUBLIC;
COMMENT ON FUNCTION stint.cancel(text, uuid, text) IS
'Cancels a task. Tasks that depend on it fail, are cancelled or run as their on_dependency_failure says. outcome: ''cancelled'' (it was waiting); ''cancel_requested'' (it runs: its worker learns of it from stint.extend, and it is not retried; a completion
that comes first still counts); ''already_finished'', status says how. Use in FROM. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.sweep(
    max int DEFAULT 1000
) RETURNS TABLE (lapsed int, retried int, failed int, cancelled int)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'sweep_wrapper';
REVOKE ALL ON FUNCTION stint.sweep(int) FROM PUBLIC;
COMMENT ON FUNCTION stint.sweep(int) IS
'Takes back at most max tasks whose lease has lapsed, in the order of their times: the attempt counts, the task is claimable again at once, or fails when its attempts are used up.
The maintenance worker does this all the time; call it where none runs. Rows that another session holds are left for the next round.
A task that cannot be taken back (somebody''s trigger raises, say) is set aside for the round and told in a WARNING; those behind it are rescued all the same. Use in FROM.';

CREATE FUNCTION stint.promote(
    max int DEFAULT 1000
) RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'promote_wrapper';
REVOKE ALL ON FUNCTION stint.promote(int) FROM PUBLIC;
COMMENT ON FUNCTION stint.promote(int) IS
'Moves at most max scheduled tasks whose time has come to ready, in the order of their times, and returns how many.
The maintenance worker does this all the time; call it where none runs.';

CREATE FUNCTION stint.expire_keys(
    max int DEFAULT 1000
) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'expire_keys_wrapper';
REVOKE ALL ON FUNCTION stint.expire_keys(int) FROM PUBLIC;
COMMENT ON FUNCTION stint.expire_keys(int) IS
'Lets go of at most max idempotency keys that are past their retention and whose task has finished; returns how many. The maintenance worker does this all the time.';

CREATE FUNCTION stint.rescan() RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'rescan_wrapper';
REVOKE ALL ON FUNCTION stint.rescan() FROM PUBLIC;
COMMENT ON FUNCTION stint.rescan() IS
'Has claims, sweeps and promotions look from the beginning again. They remember where the live rows of their index begin; rows that somebody inserted or changed by hand before that point
are found after this call, or by themselves within ten minutes. Verbs never need it.';

CREATE FUNCTION stint.explain(
    queue text,
    id uuid
) RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'explain_wrapper';
REVOKE ALL ON FUNCTION stint.explain(text, uuid) FROM PUBLIC;
COMMENT ON FUNCTION stint.explain(text, uuid) IS
'Says in words where a task is and why it is not running: what it waits for, which budget has no room, whose lease holds it. Errors: P0002 unknown task; 42704 unknown queue.';

CREATE FUNCTION stint.budget_usage() RETURNS TABLE (budget text, running bigint, tokens bigint, derived boolean, requests bigint, window_tokens bigint, window_cost_micros bigint, refills_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'budget_usage_wrapper';
REVOKE ALL ON FUNCTION stint.budget_usage() FROM PUBLIC;
COMMENT ON FUNCTION stint.budget_usage() IS
'What is in use of each budget, as claims see it: tasks running and predicted tokens in flight. derived: whether that is also what the running rows visible here add up to; it may differ for the moment a claim takes.
requests, window_tokens, window_cost_micros (millionths): spent within the budget''s window, null where it has none. refills_at: when the oldest of that is forgotten. Use in FROM.';

CREATE VIEW stint.budgets AS
SELECT b.budget, b.max_running, u.running, b.max_running - u.running AS room_running,
       b.max_tokens, u.tokens AS tokens_in_flight, b.max_tokens - u.tokens AS room_tokens, b.default_tokens,
       b.per, b.max_requests, u.requests, b.max_requests - u.requests AS room_requests,
       b.max_window_tokens, u.window_tokens, b.max_window_tokens - u.window_tokens AS room_window_tokens,
       b.max_cost, round(u.window_cost_micros / 1000000.0, 6) AS window_cost, b.max_cost - round(u.window_cost_micros / 1000000.0, 6) AS room_cost,
       u.refills_at, CASE WHEN b.throttled_until > clock_timestamp() THEN b.throttled_until END AS throttled_until,
       b.input_weight, b.cached_weight, b.output_weight, b.created_at
FROM stint.budget_config b
JOIN stint.budget_usage() u ON u.budget = b.budget;
COMMENT ON VIEW stint.budgets IS 'Budgets: limits, what is in use, what was spent within the window, and the room left (below zero where a limit was lowered, or more was used than predicted); when the window next forgets something, and until when a throttle is in force. The figure shown is the figure enforced';
