-- The changelog: what was captured, the ticks that give it positions, and who has read how far.

-- Which incarnation of the database this is. Made with the first queue or state table; a restore brings the row of the database it came from.
CREATE TABLE stint.meta (
    one               boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch             integer NOT NULL,
    system_identifier bigint NOT NULL,
    database          oid NOT NULL,
    since             timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.meta IS 'One row: the epoch that transaction ids in the changelog, in ticks and in pins belong to, and the cluster and database it was opened in';
COMMENT ON COLUMN stint.meta.epoch IS 'transaction ids are compared within one epoch only';
COMMENT ON COLUMN stint.meta.system_identifier IS 'of the cluster, as pg_control_system() gives it';
COMMENT ON COLUMN stint.meta.database IS 'oid of the database';
COMMENT ON COLUMN stint.meta.since IS 'when the epoch was opened';
REVOKE ALL ON stint.meta FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.meta', '');

CREATE TABLE stint.captures (
    relation    regclass PRIMARY KEY,
    epoch       integer NOT NULL,
    xid         xid8 NOT NULL,
    captured_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    floor_pos   bigint NOT NULL DEFAULT 0,
    history     interval,
    floor_epoch integer,
    floor_seen  pg_snapshot,
    floor_xid   xid8,
    gone_keys   regclass
);
COMMENT ON TABLE stint.captures IS 'Tables whose changes are captured, and since when: earlier points cannot be read as of';
COMMENT ON COLUMN stint.captures.xid IS 'the transaction that installed the triggers; writers before it had ended';
COMMENT ON COLUMN stint.captures.floor_pos IS 'changes at this position and below may be gone';
COMMENT ON COLUMN stint.captures.history IS 'how long changes are kept beyond what tags need, null for ever';
COMMENT ON COLUMN stint.captures.floor_epoch IS 'epoch of the tick that ends at the floor, null where nothing is gone';
COMMENT ON COLUMN stint.captures.floor_seen IS 'snapshot of that tick: a pin that does not see what of it had changes can no longer be read whole';
COMMENT ON COLUMN stint.captures.floor_xid IS 'the last transaction whose changes went with that tick';
COMMENT ON COLUMN stint.captures.gone_keys IS 'the table that holds the keys of deleted rows, typed, so that as-of reads find them by index';
REVOKE ALL ON stint.captures FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.captures', '');

CREATE TABLE stint.image_layouts (
    layout   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation regclass NOT NULL,
    columns  text[] NOT NULL
);
COMMENT ON TABLE stint.image_layouts IS 'What the places of an image are called: a table has one row per set of column names it had. Column numbers do not survive dump and restore, names do';
COMMENT ON COLUMN stint.image_layouts.columns IS 'name of the column with that number, null where it was dropped';
REVOKE ALL ON stint.image_layouts FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.image_layouts', '');
SELECT pg_catalog.pg_extension_config_dump('stint.image_layouts_layout_seq', '');

CREATE TABLE stint.captured_columns (
    relation regclass NOT NULL,
    name     name NOT NULL,
    attnum   smallint NOT NULL,
    epoch    integer NOT NULL,
    xid      xid8 NOT NULL,
    seq      bigint NOT NULL,
    PRIMARY KEY (relation, name)
);
COMMENT ON TABLE stint.captured_columns IS 'The columns of captured tables, and the change that each came with: reads as of earlier points show null in it, and not the default that PostgreSQL filled in';
COMMENT ON COLUMN stint.captured_columns.attnum IS 'its number, by which a rename is noticed; in a restored database that of the original until stint.activate()';
COMMENT ON COLUMN stint.captured_columns.xid IS 'the transaction that declared the state table or added the column';
COMMENT ON COLUMN stint.captured_columns.seq IS 'drawn from the same sequence as those of changes; 0 for columns that the table was declared with';
REVOKE ALL ON stint.captured_columns FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.captured_columns', '');

-- One sequence for all tables, never cached: a change draws its number while it holds its row locks, so per key the numbers rise in commit order.
CREATE SEQUENCE stint.change_seq CACHE 1;
REVOKE ALL ON SEQUENCE stint.change_seq FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.change_seq', '');

CREATE TABLE stint.change_log (
    epoch    integer NOT NULL,
    relation regclass NOT NULL,
    xid      xid8 NOT NULL,
    seq      bigint NOT NULL,
    at       timestamptz NOT NULL,
    layout   integer NOT NULL,
    kind     "char" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    before   text[],
    after    text[],
    cause    bigint
);
-- Serves ticks and as-of reads, which ask for ranges of transactions.
CREATE INDEX change_log_xid ON stint.change_log (epoch, xid);
-- Serves readers of large ticks, which go on where the page before ended.
CREATE INDEX change_log_seq ON stint.change_log (epoch, seq);
-- Serves as-of reads by key, and netting, which asks for a key's neighbouring changes. Of the key its hash, since a key may be longer as text than an index takes.
CREATE INDEX change_log_key ON stint.change_log (relation, hashtextextended(key, 0), epoch, seq);
COMMENT ON TABLE stint.change_log IS 'Every change of every state table, written by the capture triggers alone and never changed. Read it through stint.changes, stint.poll and the <table>_as_of functions';
COMMENT ON COLUMN stint.change_log.xid IS 'top-level transaction';
COMMENT ON COLUMN stint.change_log.seq IS 'drawn while the row locks were held: per key it rises in commit order';
COMMENT ON COLUMN stint.change_log.at IS 'when the statement ended';
COMMENT ON COLUMN stint.change_log.kind IS 'I inserted, U updated, D deleted';
COMMENT ON COLUMN stint.change_log.key IS 'the primary key''s values, as the text of a text[]';
COMMENT ON COLUMN stint.change_log.before IS 'the row before: each column''s text in the place of its number';
COMMENT ON COLUMN stint.change_log.after IS 'the row after, likewise';
COMMENT ON COLUMN stint.change_log.cause IS 'event of the record that was folded into the row, null for changes made otherwise';
REVOKE ALL ON stint.change_log FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.change_log', '');

CREATE TABLE stint.ticks (
    epoch     integer NOT NULL,
    number    bigint NOT NULL,
    snapshot  pg_snapshot NOT NULL,
    end_pos   bigint NOT NULL,
    relations regclass[] NOT NULL,
    first_seq bigint NOT NULL,
    last_seq  bigint NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    high      bigint NOT NULL,
    expired   boolean NOT NULL DEFAULT false,
    PRIMARY KEY (epoch, number)
);
CREATE UNIQUE INDEX ticks_end_pos ON stint.ticks (end_pos);
CREATE INDEX ticks_at ON stint.ticks (at, end_pos);
CREATE INDEX ticks_expired ON stint.ticks (end_pos) WHERE expired;
COMMENT ON TABLE stint.ticks IS 'Batches of the changelog: the changes of a tick are those visible in its snapshot and not in the one before, ordered by seq; their positions end at end_pos';
COMMENT ON COLUMN stint.ticks.relations IS 'tables that changed in it';
COMMENT ON COLUMN stint.ticks.first_seq IS 'the least seq of its changes; others'' lie between it and last_seq too';
COMMENT ON COLUMN stint.ticks.last_seq IS 'the greatest seq of its changes';
COMMENT ON COLUMN stint.ticks.high IS 'changes with a higher seq were not visible in the snapshot';
COMMENT ON COLUMN stint.ticks.expired IS 'its changes are gone; it stays while the next tick begins where it ends';
REVOKE ALL ON stint.ticks FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.ticks', '');

CREATE TABLE stint.consumer_config (
    consumer   text COLLATE "C" PRIMARY KEY,
    relations  regclass[] NOT NULL,
    start_pos  bigint NOT NULL,
    start_epoch    integer,
    start_snapshot pg_snapshot,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.consumer_config IS 'Named readers of the changelog';
COMMENT ON COLUMN stint.consumer_config.start_pos IS 'it reads what lies after this position';
COMMENT ON COLUMN stint.consumer_config.start_epoch IS 'the epoch whose transaction ids start_snapshot holds';
COMMENT ON COLUMN stint.consumer_config.start_snapshot IS 'it started with what this snapshot sees, which it is not given again; null for one that started at a position';
REVOKE ALL ON stint.consumer_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.consumer_config', '');

-- No foreign key: the tables of an extension are there with their keys before a parallel restore fills them in any order.
CREATE TABLE stint.consumer_commits (
    consumer     text COLLATE "C" NOT NULL,
    pos          bigint NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, pos)
);
COMMENT ON TABLE stint.consumer_commits IS 'How far each consumer has come: the highest position is valid, lower ones wait for stint.trim_consumers()';
REVOKE ALL ON stint.consumer_commits FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.consumer_commits', '');

CREATE VIEW stint.consumers AS
SELECT c.consumer, c.relations, coalesce(p.pos, c.start_pos) AS pos,
       coalesce(t.end_pos, 0) - coalesce(p.pos, c.start_pos) AS lag,
       EXISTS (SELECT FROM stint.captures f WHERE f.relation = ANY (c.relations) AND f.floor_pos > coalesce(p.pos, c.start_pos)) AS must_refetch,
       p.committed_at, c.created_by, c.created_at
FROM stint.consumer_config c
LEFT JOIN LATERAL (SELECT m.pos, m.committed_at FROM stint.consumer_commits m WHERE m.consumer = c.consumer ORDER BY m.pos DESC LIMIT 1) p ON true
LEFT JOIN (SELECT max(end_pos) AS end_pos FROM stint.ticks) t ON true;
COMMENT ON VIEW stint.consumers IS 'Consumers of the changelog and how far they have come';
COMMENT ON COLUMN stint.consumers.consumer IS 'its name';
COMMENT ON COLUMN stint.consumers.relations IS 'the state tables it reads';
COMMENT ON COLUMN stint.consumers.pos IS 'position it has committed; it reads on after it';
COMMENT ON COLUMN stint.consumers.lag IS 'positions between it and the last tick, those of other tables included';
COMMENT ON COLUMN stint.consumers.must_refetch IS 'whether changes it has not read are gone: poll refuses it (72000)';
COMMENT ON COLUMN stint.consumers.committed_at IS 'time of its last commit, null before the first';
REVOKE ALL ON stint.consumers FROM PUBLIC;

CREATE FUNCTION stint.image(VARIADIC parts "any") RETURNS text[]
    LANGUAGE c STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'image_wrapper';
COMMENT ON FUNCTION stint.image("any") IS
'The text of each value, by its type''s output function under fixed settings (DateStyle, TimeZone, IntervalStyle, extra_float_digits, bytea_output), so that the text is the same
in every session and reads back as the same value. Null stays null. Used by the capture triggers and by <table>_as_of. Runs no user code; takes no locks.';
REVOKE ALL ON FUNCTION stint.image("any") FROM PUBLIC;

CREATE FUNCTION stint.image_row(kind anyelement, image text[]) RETURNS anyelement
    LANGUAGE c STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'image_row_wrapper';
COMMENT ON FUNCTION stint.image_row(anyelement, text[]) IS
'The row that an image was made of. kind: null of the table''s row type, for its type only; image: the text of each column in the place of its number; places that are missing are null.
Runs the types'' input functions and the checks of domains inside other types, with the rights of the table''s owner. Errors: 42804 if kind is not of a table''s row type. Takes no locks.';
REVOKE ALL ON FUNCTION stint.image_row(anyelement, text[]) FROM PUBLIC;

CREATE FUNCTION stint.capture() RETURNS trigger
    LANGUAGE c SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'capture_wrapper';
COMMENT ON FUNCTION stint.capture() IS
'The trigger function on state tables: writes what a statement changed into the changelog, with the rights of the extension''s owner, reading nothing but the statement''s
own transition tables (TRUNCATE: the table). On a partition, whose triggers have an argument, it writes for the state table at the root. An update that leaves a row''s text as it was writes nothing; one that changes the key is a deletion and an insertion.';
REVOKE ALL ON FUNCTION stint.capture() FROM PUBLIC;

CREATE FUNCTION stint.uncaptured() RETURNS TABLE (relation regclass, detail text)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH tables AS (
        SELECT c.relation, m.oid AS member, t.oid IS NOT NULL AS partition, m.relkind, m.relpersistence, format('%I.%I', n.nspname, m.relname) AS name
        FROM stint.captures c
        LEFT JOIN LATERAL (SELECT p.relid AS oid FROM pg_partition_tree(c.relation) p WHERE p.relid <> c.relation
                           UNION ALL SELECT NULL) t ON true
        JOIN pg_class m ON m.oid = coalesce(t.oid, c.relation)
        JOIN pg_namespace n ON n.oid = m.relnamespace
    )
    SELECT t.relation, format('trigger %s of %s is %s', w.name, t.name, CASE WHEN g.oid IS NULL THEN 'missing' ELSE 'disabled' END)
    FROM tables t
    CROSS JOIN (VALUES ('_stint_capture_insert'), ('_stint_capture_update'), ('_stint_capture_delete'), ('_stint_capture_truncate')) w (name)
    LEFT JOIN pg_trigger g ON g.tgrelid = t.member AND g.tgname = w.name AND g.tgfoid = 'stint.capture'::regproc
    WHERE g.oid IS NULL OR g.tgenabled NOT IN ('O', 'A')
    UNION ALL
    SELECT t.relation, format('the subscription "%s" writes to %s, which fires no statement-level triggers', s.subname, t.name)
    FROM tables t JOIN pg_subscription_rel r ON r.srrelid = t.member JOIN pg_subscription s ON s.oid = r.srsubid
    UNION ALL
    SELECT t.relation, format('%s is %s', t.name, CASE WHEN t.relkind = 'f' THEN 'a foreign table' ELSE 'unlogged' END)
    FROM tables t WHERE t.relkind = 'f' OR t.relpersistence = 'u'
    UNION ALL
    SELECT t.relation, format('%s has become a partition', t.name) FROM tables t JOIN pg_class c ON c.oid = t.relation WHERE NOT t.partition AND c.relispartition
$$;
COMMENT ON FUNCTION stint.uncaptured() IS
'What keeps changes of state tables out of the changelog: a capture trigger of the table or of one of its partitions that is missing or disabled, a subscription that writes to it, a table
that was made unlogged or a partition. One row for each; no row means that every change is captured. Used by stint.check() and stint.doctor(). Takes no locks.';
REVOKE ALL ON FUNCTION stint.uncaptured() FROM PUBLIC;

CREATE FUNCTION stint.tick() RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'tick_wrapper';
COMMENT ON FUNCTION stint.tick() IS
'Gives the changes committed since the last tick their positions, and returns the last position there is. Writes nothing when nothing changed. The worker calls it; call it
to make changes readable at once. Errors: 25001 in a transaction that has written something or runs under REPEATABLE READ or SERIALIZABLE.
Locks: the tick lock (an object lock on the schema stint) until the transaction ends; readers and writers never wait for it.';
REVOKE ALL ON FUNCTION stint.tick() FROM PUBLIC;

CREATE FUNCTION stint.activate(keep_leases boolean DEFAULT false) RETURNS integer
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'activate_wrapper';
COMMENT ON FUNCTION stint.activate(boolean) IS
'Lets a restored or cloned database work on its own: ends the leases the other one gave, so that the next sweep takes those tasks back and no old worker''s call matches; gives the changes it
was restored with their last positions, adds up what its original had not, opens a new epoch and returns its number. Until then the verbs of queues and state tables there are refused (55000) and the maintenance worker does
nothing; views, positions and tags made before stay readable and keep their meaning. Where the database is no copy it changes nothing.
keep_leases: after pg_upgrade, whose workers go on with what they hold.
Errors: 25001 in a copy, in a transaction that has written something. Locks: the tick lock and the roll-up lock until the transaction ends.';
REVOKE ALL ON FUNCTION stint.activate(boolean) FROM PUBLIC;

CREATE FUNCTION stint.changes(relation regclass, since_pos bigint DEFAULT 0, max integer DEFAULT 1000)
    RETURNS TABLE (pos bigint, kind text, key jsonb, before jsonb, after jsonb, changed_at timestamptz, cause bigint)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'changes_wrapper';
COMMENT ON FUNCTION stint.changes(regclass, bigint, integer) IS
'Changes of a state table after a position, in order. What a transaction did to a key is one change, at the position of the last: a key born and dead in it, or put back as it
was, gives nothing. relation: the table, on which the caller needs SELECT; since_pos: give the last pos you have; max: most changes to return, an update being one.
Result: pos, the same for the two rows of an update; kind: +I inserted, -U and +U the row before and after an update, -D deleted; key; before: null for +I; after: null for -U and -D;
changed_at: when the last statement ended; cause: the event of the record it comes from, null for other changes. In jsonb numbers are exact, NaN and the infinities are strings,
json is embedded, arrays are arrays, and everything else is a string: PostgreSQL''s text under DateStyle ISO and TimeZone UTC. Shows ticked changes only. Meant for FROM.
Errors: 42704 no such state table, 22023 a position that no tick has reached, 72000 changes after the position are not kept any more, 42501 no SELECT on the table or row security
in force, 54000 max over stint.max_batch. Takes no locks.';
REVOKE ALL ON FUNCTION stint.changes(regclass, bigint, integer) FROM PUBLIC;

CREATE FUNCTION stint.export_changes(relation regclass, since_pos bigint DEFAULT 0, until_pos bigint DEFAULT NULL)
    RETURNS TABLE (pos bigint, kind text, key text[], columns text[], image text[], changed_at timestamptz, cause bigint)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'export_changes_wrapper';
COMMENT ON FUNCTION stint.export_changes(regclass, bigint, bigint) IS
'Changes of a state table as text, for COPY (SELECT * FROM stint.export_changes(…)) TO …: what stint.changes returns, any number of them, with the very text of each value. since_pos and
until_pos: changes after the first up to the second; null until_pos: up to the last there is. Result: pos and kind as in stint.changes; key: the primary key''s values; columns and
image: names and values, of the row before for -U and -D, after for +I and +U, as the table''s columns were then; changed_at, cause. Read in pages, each under its own snapshot.
Meant for FROM.
Errors: 42704 no such state table, 22023 a position that no tick has reached, or until_pos before since_pos, 72000 changes after since_pos are not kept any more, 42501 no SELECT on the
table or row security in force. Takes no locks.';
REVOKE ALL ON FUNCTION stint.export_changes(regclass, bigint, bigint) FROM PUBLIC;

CREATE FUNCTION stint.create_consumer(consumer text, relations regclass[], start text DEFAULT 'earliest') RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'create_consumer_wrapper';
COMMENT ON FUNCTION stint.create_consumer(text, regclass[], text) IS
'Declares a named reader of the changelog. relations: the state tables it reads, on which the caller needs SELECT; start: ''earliest'' reads every change that is kept, ''latest''
what is ticked from now on, ''snapshot'' exactly what the calling transaction does not see: in a REPEATABLE READ transaction create the consumer and read the tables, and its polls
go on from those rows, with nothing missing and nothing twice.
Errors: 42710 the name is taken, 42704 no such state table, 42501 no SELECT, 25001 start => ''snapshot'' under READ COMMITTED or after changing a state table.
Locks: none beyond its own row.';
REVOKE ALL ON FUNCTION stint.create_consumer(text, regclass[], text) FROM PUBLIC;

CREATE FUNCTION stint.drop_consumer(consumer text) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_consumer_wrapper';
COMMENT ON FUNCTION stint.drop_consumer(text) IS
'Forgets a consumer and how far it had come. Errors: 42704 no such consumer, 42501 no SELECT on a table it reads. Locks: the consumer''s row.';
REVOKE ALL ON FUNCTION stint.drop_consumer(text) FROM PUBLIC;

CREATE FUNCTION stint.poll(consumer text, max integer DEFAULT 100, wait interval DEFAULT '0')
    RETURNS TABLE (pos bigint, relation regclass, kind text, key jsonb, before jsonb, after jsonb, changed_at timestamptz, cause bigint)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'poll_wrapper';
COMMENT ON FUNCTION stint.poll(text, integer, interval) IS
'The next changes for a consumer, after the position it has committed; columns as in stint.changes. Writes nothing and takes no locks: the same changes come again until stint.commit.
max: most changes to return; an update is one change and two rows. wait: where there is nothing, sleep in the server up to this long (at most stint.max_wait) and answer as soon as
a tick brings something; no row then means that the time ran out. Cancel, statement_timeout and shutdown end it at once. Meant for FROM.
Errors: 42704 no such consumer, 72000 changes it has not read are not kept any more (must_refetch in stint.consumers), 25001 a wait under REPEATABLE READ or SERIALIZABLE,
42501 no SELECT on a table it reads or row security in force, 54000 max over stint.max_batch or wait over stint.max_wait.';
REVOKE ALL ON FUNCTION stint.poll(text, integer, interval) FROM PUBLIC;

CREATE FUNCTION stint.commit(consumer text, pos bigint DEFAULT NULL) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'commit_wrapper';
COMMENT ON FUNCTION stint.commit(text, bigint) IS
'Advances a consumer to the last pos it has dealt with, as part of the calling transaction: what the consumer wrote and its position become visible together or not at all.
Without pos: past everything that the poll of this transaction returned and, where it returned all there is, past what it found to be none of the consumer''s, so that a reader of
quiet tables does not seem to lag. Committing the present position again changes nothing.
Errors: 42704 no such consumer, 22023 a position below the committed one or beyond the last tick, 22004 no pos and no poll in this transaction,
40001 another session advanced the consumer since this transaction polled it (roll back and poll again), 42501 no SELECT on a table it reads.
Locks: the consumer''s row until the transaction ends.';
REVOKE ALL ON FUNCTION stint.commit(text, bigint) FROM PUBLIC;

CREATE FUNCTION stint.trim_consumers() RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'trim_consumers_wrapper';
COMMENT ON FUNCTION stint.trim_consumers() IS
'Deletes the positions that consumers have passed and returns how many; the newest of each stays. The worker calls it. Locks: the rows it deletes.';
REVOKE ALL ON FUNCTION stint.trim_consumers() FROM PUBLIC;
