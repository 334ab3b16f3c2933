-- Schedules: cron text in a time zone, and the slots that fired. A slot is one row, in the transaction of its task, and its key makes it fire once. Rows of
-- schedule_slots are only added and, when they are old, removed; a schedule's own row changes when somebody pauses or resumes it.

CREATE TABLE stint.schedule_config (
    schedule        text COLLATE "C" PRIMARY KEY,
    cron            text NOT NULL,
    time_zone       text NOT NULL,
    into_queue      text COLLATE "C" NOT NULL,
    payload         jsonb NOT NULL,
    priority        int NOT NULL,
    delay           interval,
    key             text COLLATE "C",
    group_key       text COLLATE "C",
    agent           text COLLATE "C",
    tokens          bigint,
    budgets         text[] COLLATE "C" NOT NULL,
    max_attempts    int,
    lease_for       interval,
    labels          jsonb,
    catch_up        text NOT NULL CHECK (catch_up IN ('none', 'last', 'all')),
    paused          boolean NOT NULL,
    since           timestamptz NOT NULL,
    comment         text,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.schedule_config IS 'Schedules and the task each makes; made by stint.create_schedule. since: slots up to then are not due (when it was created or resumed)';

CREATE TABLE stint.schedule_slots (
    schedule        text COLLATE "C" NOT NULL,
    slot            timestamptz NOT NULL,
    fired_at        timestamptz NOT NULL,
    queue_was       text COLLATE "C" NOT NULL,
    id              uuid,
    error           text,
    PRIMARY KEY (schedule, slot)
);
COMMENT ON TABLE stint.schedule_slots IS 'The latest slots of each schedule: the task each made, or the error that kept it from making one';

SELECT pg_catalog.pg_extension_config_dump('stint.schedule_config', '');
SELECT pg_catalog.pg_extension_config_dump('stint.schedule_slots', '');

CREATE FUNCTION stint.create_schedule(
    queue text,
    name text,
    cron text,
    payload jsonb,
    time_zone text DEFAULT 'UTC',
    priority int DEFAULT 0,
    delay interval DEFAULT NULL,
    key text DEFAULT NULL,
    agent text DEFAULT NULL,
    tokens bigint DEFAULT NULL,
    budgets text[] DEFAULT '{}',
    max_attempts int DEFAULT NULL,
    lease_for interval DEFAULT NULL,
    labels jsonb DEFAULT NULL,
    catch_up text DEFAULT 'last',
    paused boolean DEFAULT false,
    comment text DEFAULT NULL,
    group_key text DEFAULT NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'create_schedule_wrapper';
REVOKE ALL ON FUNCTION stint.create_schedule(text, text, text, jsonb, text, int, interval, text, text, bigint, text[], int, interval, jsonb, text, boolean, text, text) FROM PUBLIC;
COMMENT ON FUNCTION stint.create_schedule(text, text, text, jsonb, text, int, interval, text, text, bigint, text[], int, interval, jsonb, text, boolean, text, text) IS
'Has a task made in the queue at every time that the cron text names. name: of the schedule, one in the database.
cron: minute, hour, day of month, month, day of week, as cron reads them: *, lists, ranges, steps (*/15), names (MON, JAN), L (the last day), 15W (the weekday nearest to the 15th), FRI#2
(the second Friday), +MON (and a Monday, not or); or @hourly, @daily, @weekly, @monthly, @yearly. Where days of month and of week are both given, either is enough.
time_zone: a name of the IANA database; the text is read on the wall clock there. Where that clock is set, a text that names hours fires once for each time it names: one that is
skipped, at the first instant after the gap (02:30 becomes 03:00); one that comes twice, the first time. A text that matches every hour follows real time: it fires at every matching
minute that comes, and makes up none that does not.
payload, priority, delay, key, agent, tokens, budgets, max_attempts, lease_for, labels, group_key: of each task, as stint.enqueue takes them. In a queue with strict
groups a group_key keeps two runs from overlapping, and makes each. With a key, a slot that comes while the key is held
makes no task of its own; in a queue with key_retention 0 that is while the last one is not finished.
catch_up: what becomes of slots missed by more than a minute, because the server was down or its clock was set forward: ''none'' leaves them out; ''last'' fires once, for the latest; ''all''
fires each, the earliest first. A clock set back fires nothing twice: the schedule goes on when the clock is past the last slot.
Slots up to now, or in a pause, are never due. Errors: 22023 cron, time_zone or catch_up that means nothing; 42710 the name is taken; 42704 unknown queue or budget; else as stint.enqueue.';

CREATE FUNCTION stint.pause_schedule(name text) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'pause_schedule_wrapper';
REVOKE ALL ON FUNCTION stint.pause_schedule(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.pause_schedule(text) IS
'Has a schedule make no tasks until stint.resume_schedule. Once this has committed, none comes any more. Nothing changes where it is paused. Errors: 42704 unknown schedule.';

CREATE FUNCTION stint.resume_schedule(name text) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'resume_schedule_wrapper';
REVOKE ALL ON FUNCTION stint.resume_schedule(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.resume_schedule(text) IS
'Has a paused schedule go on with the next slot; those that fell into the pause are not made up, whatever its catch_up. Nothing changes where it is not paused. Errors: 42704 unknown schedule.';

CREATE FUNCTION stint.drop_schedule(name text) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'drop_schedule_wrapper';
REVOKE ALL ON FUNCTION stint.drop_schedule(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.drop_schedule(text) IS 'Removes a schedule and what is kept of its slots. Tasks it made stay. Errors: 42704 unknown schedule.';

CREATE FUNCTION stint.fire_schedules(max int DEFAULT 1000) RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'fire_schedules_wrapper';
REVOKE ALL ON FUNCTION stint.fire_schedules(int) FROM PUBLIC;
COMMENT ON FUNCTION stint.fire_schedules(int) IS
'Fires at most max slots that are due, schedule by schedule, and returns how many. Each slot and its task are made together, and no slot fires twice whoever calls this.
A task that is refused (its queue was dropped, a budget has no room for it ever) leaves its error at the slot, shown in stint.schedules; the other schedules go on. What may pass by
itself (a lock that was waited for in vain, a full disk) is a WARNING, and the slot is tried again. A schedule that another session fires is left to it.
The maintenance worker does this all the time; call it where none runs. Errors: 55000 in a copy of another database, before stint.activate().';

CREATE FUNCTION stint.next_fire(
    cron text,
    time_zone text DEFAULT 'UTC',
    since timestamptz DEFAULT clock_timestamp()
) RETURNS timestamptz
LANGUAGE c STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'next_fire_wrapper';
REVOKE ALL ON FUNCTION stint.next_fire(text, text, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION stint.next_fire(text, text, timestamptz) IS
'When a schedule with this cron text and time zone would fire first, strictly after since: for trying a text before stint.create_schedule. Errors: 22023 cron or time_zone that means nothing.';

CREATE VIEW stint.schedules AS
SELECT c.schedule, c.cron, c.time_zone, c.into_queue AS queue,
       CASE WHEN NOT c.paused
            THEN stint.next_fire(c.cron, c.time_zone,
                                 greatest(c.since, s.slot, CASE WHEN c.catch_up = 'none' THEN clock_timestamp() - interval '1 minute' END)) END AS next_fire,
       f.slot AS last_fire, f.id AS last_task, c.paused, e.error AS last_error, e.slot AS last_error_slot, c.catch_up, c.comment, c.created_at
FROM stint.schedule_config c
LEFT JOIN LATERAL (SELECT l.slot FROM stint.schedule_slots l WHERE l.schedule = c.schedule ORDER BY l.slot DESC LIMIT 1) s ON true
LEFT JOIN LATERAL (SELECT l.slot, l.id FROM stint.schedule_slots l WHERE l.schedule = c.schedule AND l.id IS NOT NULL ORDER BY l.slot DESC LIMIT 1) f ON true
LEFT JOIN LATERAL (SELECT l.slot, l.error FROM stint.schedule_slots l WHERE l.schedule = c.schedule AND l.error IS NOT NULL ORDER BY l.slot DESC LIMIT 1) e ON true;
COMMENT ON VIEW stint.schedules IS
'Schedules: when each fires next (in the past: it is due; null: paused), the last slot that made a task and that task, and the last slot whose task was refused and why';

CREATE VIEW stint.schedule_fires AS
SELECT l.schedule, l.slot, l.fired_at, l.queue_was AS queue, l.id, l.error
FROM stint.schedule_slots l;
COMMENT ON VIEW stint.schedule_fires IS 'The last hundred slots of each schedule: when each was due and when it fired, and its task or why there is none';
