-- The queue's tables. The hot ones have no CHECK constraints: PostgreSQL reads a constraint's expression anew at every statement; stint.check() knows the rules.
--
-- A task's facts never change; its place does: a live task has one row in exactly one of place_ready, place_scheduled, place_blocked (15_flow_tables.sql)
-- and place_running, and moving it is a delete and an insert of a narrow row. A finished task has one row in task_outcomes, and each attempt leaves one in task_attempts when it
-- ends. Nobody but the verbs writes here; users read the views of 20_queue_views.sql.

-- Finished work is added up (60_accounting.sql) in the order in which it was committed, which its rows tell by their transaction. A transaction id means
-- something only in the database it was given out in: the incarnation tells that one's rows from those a dump brought along.
CREATE FUNCTION stint.incarnation() RETURNS int
    LANGUAGE c STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'incarnation_wrapper';
COMMENT ON FUNCTION stint.incarnation() IS
'A number for this database of this cluster. Rows that are added up carry it beside their transaction''s id, since those of a restored dump come from another database. Runs no SQL.';
REVOKE ALL ON FUNCTION stint.incarnation() FROM PUBLIC;

CREATE TABLE stint.queue_config (
    queue           text COLLATE "C" PRIMARY KEY,
    number          int NOT NULL GENERATED ALWAYS AS IDENTITY,
    lease_for       interval NOT NULL,
    max_attempts    int NOT NULL,
    backoff_base    interval NOT NULL,
    backoff_factor  double precision NOT NULL,
    backoff_max     interval NOT NULL,
    backoff_jitter  double precision NOT NULL,
    budgets         text[] COLLATE "C" NOT NULL,
    key_retention   interval NOT NULL,
    late_result     text NOT NULL CHECK (late_result IN ('accept', 'reject')),
    notify          boolean NOT NULL,
    max_run_time    interval,
    paused          boolean NOT NULL,
    strict_groups   boolean NOT NULL,
    fair            boolean NOT NULL DEFAULT false,
    correct_predictions boolean NOT NULL DEFAULT false,
    events          boolean NOT NULL,
    history_retention interval,
    history_archive text NOT NULL DEFAULT 'drop' CHECK (history_archive IN ('drop', 'detach')),
    history_class   smallint NOT NULL DEFAULT 0,
    comment         text,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.queue_config IS 'Queues and their settings; made by stint.create_queue. history_class: the class (stint.history_classes) of tasks enqueued from now on';

CREATE TABLE stint.budget_config (
    budget          text COLLATE "C" PRIMARY KEY,
    number          int GENERATED ALWAYS AS IDENTITY UNIQUE,
    max_running     int,
    max_tokens      bigint,
    max_requests    bigint,
    max_window_tokens bigint,
    per             interval,
    default_tokens  bigint,
    max_cost        numeric,
    input_weight    double precision NOT NULL DEFAULT 1,
    cached_weight   double precision NOT NULL DEFAULT 1,
    output_weight   double precision NOT NULL DEFAULT 1,
    throttled_until timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.budget_config IS 'Budgets and their limits; made by stint.create_budget. What is in use of them is derived from stint.place_running and stint.task_attempts';

-- One lane for each set of budgets that tasks of a queue name themselves; what the queue itself draws on is added at claim, so it can change. A fair queue has
-- lanes for each group of tasks beside those: they come with the group's tasks and go when no live task uses them (src/queue/shares.rs), so nothing but the row
-- of a live task may name one. task_facts names the lane of the budgets.
CREATE TABLE stint.lanes (
    queue           text COLLATE "C" NOT NULL,
    lane            int GENERATED ALWAYS AS IDENTITY,
    budgets         int[] NOT NULL,
    group_key       text COLLATE "C",
    closed          xid8,
    PRIMARY KEY (queue, lane)
);
CREATE UNIQUE INDEX lanes_budgets ON stint.lanes (queue, budgets) WHERE group_key IS NULL;
CREATE UNIQUE INDEX lanes_groups ON stint.lanes (queue, group_key, budgets) WHERE group_key IS NOT NULL AND closed IS NULL;
COMMENT ON TABLE stint.lanes IS 'The lines tasks wait in: one for each queue and set of budgets, and of a fair queue for each group. closed: no task enters any more, and the lane goes when the transactions before this one are over';

CREATE TABLE stint.group_weights (
    queue           text COLLATE "C" NOT NULL,
    group_key       text COLLATE "C" NOT NULL,
    weight          double precision NOT NULL,
    PRIMARY KEY (queue, group_key)
);
COMMENT ON TABLE stint.group_weights IS 'What groups of fair queues count, where that is not 1; made by stint.set_weight';

-- A row of a queue and agent; the agent of tasks without one is ''.
CREATE TABLE stint.prediction_factors (
    queue           text COLLATE "C" NOT NULL,
    agent           text COLLATE "C" NOT NULL,
    attempts        bigint NOT NULL,
    factor          double precision NOT NULL,
    refreshed_at    timestamptz NOT NULL,
    PRIMARY KEY (queue, agent)
);
COMMENT ON TABLE stint.prediction_factors IS 'By what claims multiply the predictions of an agent in queues that correct them: what its latest attempts used against what was predicted';

-- History: what every task was (task_facts), each of its ended attempts and how it ended. Partitioned by retention class, which is the last byte of a task's id, and
-- in each class by time, which are the first bytes of the id; so the id alone says the partition, and a query that has an id looks into one partition of each class,
-- or into one at all where it compares the class, get_byte(uuid_send(id), 15), too. The partitions of a class, stint.task_facts_c1, and of a period,
-- stint.task_facts_c1_20260131, are made at run time (src/history), so they are no members of the extension and a dump carries them as ordinary tables. Their
-- keys and indexes are their own (src/history/make.rs): an id belongs to one partition, so what is unique there is unique. An index of the tables here would be in the way of a
-- restore: CREATE EXTENSION makes it before the partitions are attached, which then get theirs before the dump makes them. There is no default partition.

CREATE TABLE stint.history_classes (
    class           smallint PRIMARY KEY,
    retention       interval,
    archive         text NOT NULL,
    width           interval NOT NULL
);
COMMENT ON TABLE stint.history_classes IS
'Retentions that queues have, or had: how long the history of a task is kept after it finished (null: for ever), whether partitions past it are dropped or detached, and how
much time one partition holds. A row never changes, since tasks carry their class in their id';
INSERT INTO stint.history_classes (class, retention, archive, width) VALUES (0, NULL, 'drop', '30 days');

CREATE TABLE stint.task_facts (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    lane            int NOT NULL,
    priority        int NOT NULL,
    max_attempts    int,
    tokens          bigint,
    enqueued_at     timestamptz NOT NULL,
    run_at          timestamptz,
    lease_for       interval,
    max_run_time    interval,
    agent           text COLLATE "C",
    key             text COLLATE "C",
    group_key       text COLLATE "C",
    group_seq       bigint,
    depends_on      uuid[],
    on_dependency_failure text COLLATE "C",
    labels          jsonb,
    payload         jsonb NOT NULL
) PARTITION BY LIST (get_byte(uuid_send(id), 15));
COMMENT ON TABLE stint.task_facts IS 'What a task was when it was enqueued; insert-only';

CREATE SEQUENCE stint.task_seq;
COMMENT ON SEQUENCE stint.task_seq IS 'The order in which tasks became ready';

CREATE TABLE stint.place_ready (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    lane            int NOT NULL,
    priority        int NOT NULL,
    seq             bigint NOT NULL,
    tokens          bigint,
    attempt         int NOT NULL,
    counted         int NOT NULL,
    agent           text COLLATE "C",
    PRIMARY KEY (queue, id)
);
-- A lane is of one queue, so its number says the queue: numbers alone are compared several times as fast as a name and numbers. Not unique, since what is unique in
-- a queue's table begins with the queue; stint.check() knows that no two tasks stand at one place.
CREATE INDEX place_ready_order ON stint.place_ready (lane, priority DESC, seq);
-- For claims that take the tasks of some agents only: each agent's tasks in their order, so that no other's is walked. Tasks without an agent cost nothing here.
CREATE INDEX place_ready_agent ON stint.place_ready (lane, agent, priority DESC, seq) WHERE agent IS NOT NULL;
COMMENT ON TABLE stint.place_ready IS 'Tasks that may be claimed. attempt: the number of the last attempt; counted: attempts that count against max_attempts';

CREATE TABLE stint.place_scheduled (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    lane            int NOT NULL,
    priority        int NOT NULL,
    run_at          timestamptz NOT NULL,
    tokens          bigint,
    attempt         int NOT NULL,
    counted         int NOT NULL,
    event           text COLLATE "C",
    PRIMARY KEY (queue, id)
);
CREATE INDEX place_scheduled_due ON stint.place_scheduled (run_at);
CREATE INDEX place_scheduled_event ON stint.place_scheduled (event) WHERE event IS NOT NULL;
COMMENT ON TABLE stint.place_scheduled IS 'Tasks that wait for a time: delayed ones, retries, and those that await an event until then';

-- extended_until is in no index, so that a heartbeat is a heap-only update; the sweep finds the row by expires_at and looks at both.
CREATE TABLE stint.place_running (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    lease           uuid NOT NULL,
    lane            int NOT NULL,
    priority        int NOT NULL,
    seq             bigint NOT NULL,
    tokens          bigint,
    attempt         int NOT NULL,
    counted         int NOT NULL,
    started_at      timestamptz NOT NULL,
    expires_at      timestamptz NOT NULL,
    deadline        timestamptz,
    extended_until  timestamptz,
    heartbeat_at    timestamptz,
    heartbeat_gap   interval,
    cancel_requested boolean NOT NULL DEFAULT false,
    budgets         int[],
    reserved        bigint[],
    share           bigint,
    worker          text COLLATE "C" NOT NULL,
    run_id          text COLLATE "C",
    trace_id        text COLLATE "C",
    reason          text,
    progress        jsonb,
    PRIMARY KEY (queue, id)
) WITH (fillfactor = 80);
CREATE INDEX place_running_expiry ON stint.place_running (expires_at);
COMMENT ON TABLE stint.place_running IS 'Tasks under a lease, with what they reserve of each budget. share: the tokens their group of a fair queue was charged; deadline: no heartbeat moves the lease past it; heartbeat_gap: the longest time between two heartbeats. Leases are secrets: no view shows this table''s lease column';

CREATE TABLE stint.task_attempts (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    attempt         int NOT NULL,
    lease           uuid NOT NULL,
    started_at      timestamptz NOT NULL,
    ended_at        timestamptz NOT NULL,
    ended           text COLLATE "C" NOT NULL,
    worker          text COLLATE "C" NOT NULL,
    heartbeat_gap   interval,
    error           text,
    run_id          text COLLATE "C",
    trace_id        text COLLATE "C",
    model           text COLLATE "C",
    input_tokens    bigint,
    cached_tokens   bigint,
    output_tokens   bigint,
    model_cost      numeric,
    compute_cost    numeric,
    confidence      real,
    meta            jsonb,
    budgets         int[],
    reserved        bigint[],
    charged         bigint[],
    incarnation     int NOT NULL DEFAULT stint.incarnation(),
    xact            xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id()
) PARTITION BY LIST (get_byte(uuid_send(id), 15));
COMMENT ON TABLE stint.task_attempts IS 'Every ended attempt, with how it ended, the usage its callback reported, and what it reserved and was charged of each budget; insert-only';

-- Usage that came by another way than the call that ended the attempt: a lapsed worker's callback, a bill. The key makes it once.
CREATE TABLE stint.usage_late (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    attempt         int NOT NULL,
    key             text COLLATE "C" NOT NULL,
    recorded_at     timestamptz NOT NULL,
    run_id          text COLLATE "C",
    trace_id        text COLLATE "C",
    model           text COLLATE "C",
    input_tokens    bigint,
    cached_tokens   bigint,
    output_tokens   bigint,
    model_cost      numeric,
    compute_cost    numeric,
    confidence      real,
    meta            jsonb,
    incarnation     int NOT NULL DEFAULT stint.incarnation(),
    xact            xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    PRIMARY KEY (queue, id, attempt, key)
);
CREATE INDEX usage_late_xact ON stint.usage_late (incarnation, xact);
COMMENT ON TABLE stint.usage_late IS 'Usage reported beside the end of its attempt (late callbacks, bills of stint.record_usage), once for each attempt and key; insert-only';

CREATE TABLE stint.task_outcomes (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    outcome         text COLLATE "C" NOT NULL,
    attempt         int NOT NULL,
    lease           uuid,
    finished_at     timestamptz NOT NULL,
    error           text,
    result          jsonb,
    incarnation     int DEFAULT stint.incarnation(),
    xact            xid8 DEFAULT pg_catalog.pg_current_xact_id()
) PARTITION BY LIST (get_byte(uuid_send(id), 15));
COMMENT ON COLUMN stint.task_outcomes.xact IS 'Null where an attempt that ended completed came with the outcome: accounting finds the task by that one';
COMMENT ON TABLE stint.task_outcomes IS 'How each finished task ended; insert-only, but for a retry, which moves the row to stint.task_retries';

-- What stint.retry took back. The attempts up to this one no longer count against max_attempts.
CREATE TABLE stint.task_retries (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    retry           int NOT NULL,
    retried_at      timestamptz NOT NULL,
    outcome         text COLLATE "C" NOT NULL,
    attempt         int NOT NULL,
    lease           uuid,
    finished_at     timestamptz NOT NULL,
    error           text,
    outcome_incarnation int NOT NULL,
    outcome_xact    xid8 NOT NULL,
    incarnation     int NOT NULL DEFAULT stint.incarnation(),
    xact            xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    PRIMARY KEY (queue, id, retry)
);
CREATE INDEX task_retries_xact ON stint.task_retries (incarnation, xact);
COMMENT ON TABLE stint.task_retries IS 'Outcomes that stint.retry and stint.retry_failed took back, numbered from 1 for each task; insert-only';

CREATE TABLE stint.task_keys (
    queue           text COLLATE "C" NOT NULL,
    key             text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    kept_until      timestamptz NOT NULL,
    PRIMARY KEY (queue, key)
);
CREATE INDEX task_keys_expiry ON stint.task_keys (kept_until);
COMMENT ON TABLE stint.task_keys IS 'Idempotency keys: at most one task for each queue and key while the key is kept';

-- Rows that come by other ways than the verbs, above all from a dump, are unknown to what shared memory holds of the places; verbs pass by. So are ready rows that
-- somebody takes away, and that are there again when that is undone.
CREATE FUNCTION stint.placed() RETURNS trigger
    LANGUAGE c AS 'MODULE_PATHNAME', 'placed_wrapper';
COMMENT ON FUNCTION stint.placed() IS
'Trigger of the tables of places: when rows come from a dump or by hand, claims, sweeps and promotions look from the beginning again and budgets are added up anew.';
REVOKE ALL ON FUNCTION stint.placed() FROM PUBLIC;
CREATE TRIGGER placed BEFORE INSERT OR UPDATE OR DELETE ON stint.place_ready EXECUTE FUNCTION stint.placed();
CREATE TRIGGER placed BEFORE INSERT ON stint.place_scheduled EXECUTE FUNCTION stint.placed();
CREATE TRIGGER placed BEFORE INSERT ON stint.place_running EXECUTE FUNCTION stint.placed();

-- Everything a dump must carry. One statement each: the catalogue row changes with every call.
SELECT pg_catalog.pg_extension_config_dump('stint.queue_config', '');
SELECT pg_catalog.pg_extension_config_dump('stint.queue_config_number_seq', '');
SELECT pg_catalog.pg_extension_config_dump('stint.budget_config', '');
SELECT pg_catalog.pg_extension_config_dump('stint.budget_config_number_seq', '');
SELECT pg_catalog.pg_extension_config_dump('stint.history_classes', 'WHERE class <> 0');
SELECT pg_catalog.pg_extension_config_dump('stint.lanes', '');
SELECT pg_catalog.pg_extension_config_dump('stint.lanes_lane_seq', '');
SELECT pg_catalog.pg_extension_config_dump('stint.group_weights', '');
SELECT pg_catalog.pg_extension_config_dump('stint.prediction_factors', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_facts', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_seq', '');
SELECT pg_catalog.pg_extension_config_dump('stint.place_ready', '');
SELECT pg_catalog.pg_extension_config_dump('stint.place_scheduled', '');
SELECT pg_catalog.pg_extension_config_dump('stint.place_running', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_attempts', '');
SELECT pg_catalog.pg_extension_config_dump('stint.usage_late', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_outcomes', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_retries', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_keys', '');
