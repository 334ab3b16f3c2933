-- The feed of tasks' changes of status: a log that verbs add to, and ticks that give its rows their positions (src/changelog/feed.rs). Only queues made or altered
-- with events => true have one; the others cost nothing.

CREATE TABLE stint.task_feeds (
    queue           text COLLATE "C" PRIMARY KEY,
    start_pos       bigint NOT NULL
);
COMMENT ON TABLE stint.task_feeds IS 'Queues that keep, or kept, events of their tasks. start_pos: what lies up to there is not kept, or belongs to an earlier feed of that queue name';
SELECT pg_catalog.pg_extension_config_dump('stint.task_feeds', '');

-- Never cached: an event draws its number while its transaction holds the task's row, so per task the numbers rise in commit order.
CREATE SEQUENCE stint.task_event_seq CACHE 1;
COMMENT ON SEQUENCE stint.task_event_seq IS 'Numbers of task events. A new feed begins behind the number of the moment, so no position of an earlier one lies in it';
SELECT pg_catalog.pg_extension_config_dump('stint.task_event_seq', '');

CREATE TABLE stint.task_event_log (
    queue           text COLLATE "C" NOT NULL,
    epoch           int NOT NULL,
    xid             xid8 NOT NULL,
    seq             bigint NOT NULL,
    at              timestamptz NOT NULL,
    id              uuid NOT NULL,
    status          text COLLATE "C" NOT NULL,
    attempt         int NOT NULL,
    worker          text COLLATE "C",
    why             text,
    PRIMARY KEY (queue, epoch, xid, seq)
);
COMMENT ON TABLE stint.task_event_log IS 'Changes of status of the tasks of queues with events, with the transaction of each; insert-only, old rows are removed by stint.trim_task_events. Read it through stint.task_events';
SELECT pg_catalog.pg_extension_config_dump('stint.task_event_log', '');

CREATE TABLE stint.task_event_ticks (
    queue           text COLLATE "C" NOT NULL,
    end_pos         bigint NOT NULL,
    events          bigint NOT NULL,
    epoch           int NOT NULL,
    snapshot        pg_snapshot NOT NULL,
    xid             xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    at              timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    removed         boolean NOT NULL DEFAULT false,
    PRIMARY KEY (queue, end_pos)
);
COMMENT ON TABLE stint.task_event_ticks IS 'Batches of each feed: the events of a tick are those visible in its snapshot and not in that of the queue''s tick before, ordered by seq; their positions end at end_pos. xid: the transaction that made the tick; removed: its events are not kept any more';
SELECT pg_catalog.pg_extension_config_dump('stint.task_event_ticks', '');

CREATE FUNCTION stint.task_events(
    queue text,
    after bigint DEFAULT 0,
    max int DEFAULT 1000,
    wait interval DEFAULT NULL
) RETURNS TABLE (pos bigint, id uuid, status text, attempt int, worker text, why text, changed_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'task_events_wrapper';
REVOKE ALL ON FUNCTION stint.task_events(text, bigint, int, interval) FROM PUBLIC;
COMMENT ON FUNCTION stint.task_events(text, bigint, int, interval) IS
'The feed of a queue made or altered with events => true: every committed change of status of its tasks, once, those of one task in the order in which they happened.
after: the pos of the last row you dealt with; 0 begins with the oldest that is kept. max: most rows. wait: how long to sleep in the server while there is none, up to stint.max_wait.
pos rises from row to row. status: scheduled, blocked, ready, running, completed, failed, cancelled, as in stint.tasks; a task that is reprioritized or asked to cancel changes none.
attempt: the number of the last attempt, of the running one while it runs; worker: who runs it; why: the error or reason of an outcome, the event that is awaited.
Shows what was committed before the last tick; the maintenance worker ticks at every doorbell and every stint.naptime, stint.tick() at once. Kept for stint.task_event_retention.
Writes nothing, takes no locks. Use in FROM. Errors: 72000 what lies after that position is not kept any more (begin again with 0 and look at stint.tasks);
55000 the queue keeps no events; 42704 unknown queue; 22023 a position that was never given; 25001 wait under REPEATABLE READ; 54000 max above stint.max_batch, wait above stint.max_wait.';

CREATE FUNCTION stint.trim_task_events(max int DEFAULT 1000) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'trim_task_events_wrapper';
REVOKE ALL ON FUNCTION stint.trim_task_events(int) FROM PUBLIC;
COMMENT ON FUNCTION stint.trim_task_events(int) IS
'Removes at most max task events that are older than stint.task_event_retention, whole ticks at a time for readers: one who asks for a position before is told. Returns how many rows
went. The maintenance worker does this all the time; call it where none runs. Leaves a feed alone that another session trims. Errors: 54000 max above stint.max_batch.';
