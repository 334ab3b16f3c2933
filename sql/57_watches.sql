-- Watches: conditions on the changes of state tables, each of which makes a task where it becomes true. What fires is evaluated as the transaction commits (src/watch); rows are only
-- added here, and removed when they are old: a watch's own row changes when somebody pauses it and when its old log is counted.

CREATE TABLE stint.watch_config (
    watch         text COLLATE "C" PRIMARY KEY,
    relation      regclass NOT NULL,
    condition     text NOT NULL,
    rearm         text,
    into_queue    text COLLATE "C" NOT NULL,
    payload       jsonb,
    priority      int NOT NULL,
    delay         interval,
    agent         text COLLATE "C",
    tokens        bigint,
    budgets       text[] COLLATE "C" NOT NULL,
    group_key     text COLLATE "C",
    max_attempts  int,
    lease_for     interval,
    labels        jsonb,
    paused        boolean NOT NULL,
    comment       text,
    fired_before  bigint NOT NULL DEFAULT 0,
    failed_before bigint NOT NULL DEFAULT 0,
    created_by    name NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX watch_config_relation ON stint.watch_config (relation);
COMMENT ON TABLE stint.watch_config IS 'Watches and the task each makes; made by stint.create_watch';
COMMENT ON COLUMN stint.watch_config.rearm IS 'once it has fired for a key, it fires for it again only after this was true of the row';
COMMENT ON COLUMN stint.watch_config.fired_before IS 'tasks it made whose rows of the log were removed, and likewise failed_before';
COMMENT ON COLUMN stint.watch_config.created_by IS 'the role that declared it: it fires as long as this role may read the table and enqueue';
REVOKE ALL ON stint.watch_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.watch_config', '');

CREATE TABLE stint.watch_log (
    watch     text COLLATE "C" NOT NULL,
    seq       bigint NOT NULL,
    key       text COLLATE "C",
    fired_at  timestamptz NOT NULL,
    queue_was text COLLATE "C" NOT NULL,
    id        uuid,
    error     text,
    PRIMARY KEY (watch, seq)
);
COMMENT ON TABLE stint.watch_log IS 'What each watch did of late: the task it made of a change, or the error that kept it from making one. Never updated; stint.trim_watches removes the oldest';
COMMENT ON COLUMN stint.watch_log.seq IS 'of the key''s last change in the transaction, as in stint.change_log';
COMMENT ON COLUMN stint.watch_log.key IS 'the primary key''s values, as the text of a text[]; null where the watch could not be evaluated at all';
REVOKE ALL ON stint.watch_log FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.watch_log', '');

CREATE TABLE stint.watch_disarmed (
    watch text COLLATE "C" NOT NULL,
    key   text COLLATE "C" NOT NULL,
    since timestamptz NOT NULL,
    PRIMARY KEY (watch, key)
);
COMMENT ON TABLE stint.watch_disarmed IS 'Keys for which a watch with a rearm condition has fired and not been armed again. Rows are added and removed, never updated';
REVOKE ALL ON stint.watch_disarmed FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.watch_disarmed', '');

CREATE VIEW stint.watches AS
SELECT c.watch, c.relation, c.condition, c.rearm, c.into_queue AS queue, c.paused,
       (SELECT count(*) FROM stint.watch_disarmed d WHERE d.watch = c.watch) AS disarmed,
       c.fired_before + coalesce(l.fired, 0) AS fired,
       c.failed_before + coalesce(l.failed, 0) AS failed,
       l.last_fired_at, e.error AS last_error, e.fired_at AS last_error_at,
       c.comment, c.created_by, c.created_at
FROM stint.watch_config c
LEFT JOIN LATERAL (SELECT count(l.id) AS fired, count(l.error) AS failed, max(l.fired_at) FILTER (WHERE l.id IS NOT NULL) AS last_fired_at
                   FROM stint.watch_log l WHERE l.watch = c.watch) l ON true
LEFT JOIN LATERAL (SELECT l.error, l.fired_at FROM stint.watch_log l WHERE l.watch = c.watch AND l.error IS NOT NULL ORDER BY l.seq DESC LIMIT 1) e ON true;
COMMENT ON VIEW stint.watches IS 'The watches of this database: what they wait for, how often they fired, and what last went wrong';
COMMENT ON COLUMN stint.watches.disarmed IS 'keys for which it has fired and waits for its rearm condition; all others are armed';
COMMENT ON COLUMN stint.watches.fired IS 'tasks it has made';
COMMENT ON COLUMN stint.watches.failed IS 'times it could not be evaluated or its task could not be made; the change was committed all the same';
REVOKE ALL ON stint.watches FROM PUBLIC;

CREATE VIEW stint.watch_history AS
SELECT l.watch, c.relation, l.key::text[] AS key, l.fired_at, l.queue_was AS queue, l.id, l.error
FROM stint.watch_log l JOIN stint.watch_config c USING (watch);
COMMENT ON VIEW stint.watch_history IS 'What watches did of late, one row for each task made or missed. At least the newest 1,000 of each watch are kept';
COMMENT ON COLUMN stint.watch_history.key IS 'the row''s primary key, as text';
COMMENT ON COLUMN stint.watch_history.id IS 'the task it made';
COMMENT ON COLUMN stint.watch_history.error IS 'why it made none';
REVOKE ALL ON stint.watch_history FROM PUBLIC;

CREATE FUNCTION stint.create_watch(
    name text,
    relation regclass,
    condition text,
    queue text,
    payload jsonb DEFAULT NULL,
    rearm text DEFAULT NULL,
    priority int DEFAULT 0,
    delay interval DEFAULT NULL,
    agent text DEFAULT NULL,
    tokens bigint DEFAULT NULL,
    budgets text[] DEFAULT '{}',
    group_key text DEFAULT NULL,
    max_attempts int DEFAULT NULL,
    lease_for interval DEFAULT NULL,
    labels jsonb DEFAULT NULL,
    paused boolean DEFAULT false,
    comment text DEFAULT NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'create_watch_wrapper';
REVOKE ALL ON FUNCTION stint.create_watch(text, regclass, text, text, jsonb, text, int, interval, text, bigint, text[], text, int, interval, jsonb, boolean, text) FROM PUBLIC;
COMMENT ON FUNCTION stint.create_watch(text, regclass, text, text, jsonb, text, int, interval, text, bigint, text[], text, int, interval, jsonb, boolean, text) IS
$$Has a task made, in the same transaction, whenever a committed change of a state table makes a condition true. docs/watches.md has the grammar.
name: of the watch, one in the database. relation: the state table, on which the caller needs SELECT.
condition: over the columns of the row after the change (qty, or after.qty) and before it (before.qty): = <> < <= > >=, + - * / %, IN, BETWEEN, IS [NOT] NULL, IS [NOT] DISTINCT FROM, AND, OR, NOT,
changed(column), inserted(), updated(), deleted(). Null is not true. What counts is the net change of the whole transaction for each key, as it commits. A condition on the row after alone
fires where it was not true before (or there was no row) and is true now; one that speaks of the change (before, changed, …) fires where it is true of a net change.
queue: where the task goes, with the key watch:<name>:<number of the change>. payload: an object, to which are added watch, relation, key, before and after (as stint.changes shows them).
rearm: after firing for a key, the watch does not fire for it again until this condition was true of its row, or the row was deleted.
priority, delay, agent, tokens, budgets, group_key, max_attempts, lease_for, labels: of each task, as stint.enqueue takes them.
What keeps a task from being made (no such queue any more, a budget too small, an overflow in the condition) never fails the transaction that changed the row: stint.watches shows it.
The watch acts for the role that declares it and fires as long as that role may read the table and call stint.enqueue. It counts for the whole of the transaction that declares it.
Errors: 42601 the condition is not understood, 42703 no such column, 42804 types that do not go together, 22P02 a constant its type does not take, 42704 no such state table, queue or budget,
42710 the name is taken, 42501 no SELECT on the table or no EXECUTE on stint.enqueue. Locks: SHARE ROW EXCLUSIVE on the table: it waits for open transactions that wrote to it.$$;

CREATE FUNCTION stint.pause_watch(name text) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'pause_watch_wrapper';
REVOKE ALL ON FUNCTION stint.pause_watch(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.pause_watch(text) IS
'Lets a watch make no tasks until it is resumed; what its condition meets meanwhile is not made up for. Its rearm condition goes on to arm keys again. Returns whether it was not paused before.
Only the role that declared it and the owner of its table may. Errors: 42704 no such watch, 42501 neither of them. Locks: SHARE ROW EXCLUSIVE on the table.';

CREATE FUNCTION stint.resume_watch(name text) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'resume_watch_wrapper';
REVOKE ALL ON FUNCTION stint.resume_watch(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.resume_watch(text) IS
'Lets a paused watch make tasks again, of what is committed from then on. Returns whether it was paused. Errors and locks: as stint.pause_watch.';

CREATE FUNCTION stint.drop_watch(name text) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_watch_wrapper';
REVOKE ALL ON FUNCTION stint.drop_watch(text) FROM PUBLIC;
COMMENT ON FUNCTION stint.drop_watch(text) IS
'Removes a watch and what it remembers of keys; the tasks it made stay. stint.drop_state removes those of its table. Errors and locks: as stint.pause_watch.';

CREATE FUNCTION stint.trim_watches() RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'trim_watches_wrapper';
REVOKE ALL ON FUNCTION stint.trim_watches() FROM PUBLIC;
COMMENT ON FUNCTION stint.trim_watches() IS
'Removes from the log of each watch all but its newest 1,000 rows, which stay counted in stint.watches, and what is left of watches whose table was dropped without stint.drop_state. Returns how many rows.
The maintenance worker calls it once a minute. Locks: the rows it removes, and those of the watches they are of.';
