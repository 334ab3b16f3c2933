-- What tasks wait for beside time and budgets: other tasks, their turn in a group, events. And what they keep from one attempt to the next.
--
-- A blocked task waits for the tasks that task_dependencies names, and, where group_key is set, for its turn in that group. Nothing counts them: whoever ends
-- the last of them sees, with the blocked row locked, that none is left (src/queue/flow).

CREATE TABLE stint.place_blocked (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    lane            int NOT NULL,
    priority        int NOT NULL,
    tokens          bigint,
    attempt         int NOT NULL,
    counted         int NOT NULL,
    run_at          timestamptz,
    group_key       text COLLATE "C",
    group_seq       bigint,
    PRIMARY KEY (queue, id)
);
CREATE INDEX place_blocked_turn ON stint.place_blocked (queue, group_key, group_seq) WHERE group_key IS NOT NULL;
COMMENT ON TABLE stint.place_blocked IS 'Tasks that wait for other tasks; group_key is set while that is for their turn in a group of a queue with strict groups';

-- spot is drawn from the random part of on_id. Rows of one task are scattered by it, so that the next one left is near, in whatever order dependencies end
-- and however many dead rows an old snapshot keeps about: a scan from one end would walk them all, each time.
CREATE TABLE stint.task_dependencies (
    queue           text COLLATE "C" NOT NULL,
    on_id           uuid NOT NULL,
    id              uuid NOT NULL,
    spot            int NOT NULL,
    on_failure      text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, on_id, id)
);
CREATE INDEX task_dependencies_left ON stint.task_dependencies (queue, id, spot);
COMMENT ON TABLE stint.task_dependencies IS 'The unfinished tasks (on_id) that a blocked task (id) waits for, and what becomes of it when one fails or is cancelled; a row goes when its on_id ends';

-- One row for each group of a queue with strict groups that has a live task; locked, not changed, to hand the turn on.
CREATE TABLE stint.group_turns (
    queue           text COLLATE "C" NOT NULL,
    group_key       text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, group_key)
);
COMMENT ON TABLE stint.group_turns IS 'Groups of queues with strict groups in which a task has its turn; the other live tasks of the group are blocked';

CREATE TABLE stint.follow_ups (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    PRIMARY KEY (queue, id)
);
COMMENT ON TABLE stint.follow_ups IS 'Tasks that a sweep ended and that others wait for: the maintenance worker moves those on, so that no sweep waits for anybody';

CREATE TABLE stint.task_checkpoints (
    queue           text COLLATE "C" NOT NULL,
    id              uuid NOT NULL,
    step            text COLLATE "C" NOT NULL,
    value           jsonb,
    attempt         int NOT NULL,
    saved_at        timestamptz NOT NULL,
    PRIMARY KEY (queue, id, step)
);
COMMENT ON TABLE stint.task_checkpoints IS 'Steps a task has finished, in whatever attempt; insert-only. An event it awaited is a step of that name, without a value where the wait timed out';

-- A row that was awaited before it was emitted has no emitted_at yet: awaiting and emitting meet on its lock.
CREATE TABLE stint.events (
    event           text COLLATE "C" PRIMARY KEY,
    payload         jsonb,
    emitted_at      timestamptz
);
CREATE INDEX events_emitted ON stint.events (emitted_at);
COMMENT ON TABLE stint.events IS 'Events by name, each emitted at most once: the first committed payload stays, as long as stint.event_retention says';

SELECT pg_catalog.pg_extension_config_dump('stint.place_blocked', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_dependencies', '');
SELECT pg_catalog.pg_extension_config_dump('stint.group_turns', '');
SELECT pg_catalog.pg_extension_config_dump('stint.follow_ups', '');
SELECT pg_catalog.pg_extension_config_dump('stint.task_checkpoints', '');
SELECT pg_catalog.pg_extension_config_dump('stint.events', '');
