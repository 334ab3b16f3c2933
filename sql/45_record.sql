-- The record: events that happened, in the order they were recorded, and the projections that make state of them.

-- Never cached: an event draws its number while it holds the order of the keys it touches, so per key of a projected table numbers rise in commit order.
CREATE SEQUENCE stint.event_seq CACHE 1;
REVOKE ALL ON SEQUENCE stint.event_seq FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.event_seq', '');

CREATE TABLE stint.event_log (
    seq         bigint PRIMARY KEY,
    epoch       integer NOT NULL,
    xid         xid8 NOT NULL,
    source      text COLLATE "C" NOT NULL,
    type        text COLLATE "C" NOT NULL,
    event_id    text COLLATE "C",
    occurred_at timestamptz NOT NULL,
    recorded_at timestamptz NOT NULL,
    recorded_by name NOT NULL,
    payload     jsonb NOT NULL,
    lookups     jsonb
);
CREATE UNIQUE INDEX event_log_id ON stint.event_log (source, event_id) WHERE event_id IS NOT NULL;
CREATE INDEX event_log_type ON stint.event_log (type, seq);
CREATE INDEX event_log_occurred ON stint.event_log (type, occurred_at);
CREATE INDEX event_log_recorded ON stint.event_log (recorded_at);
-- Serves positions and projections, which ask for the transactions that a snapshot did not see.
CREATE INDEX event_log_xid ON stint.event_log (epoch, xid);
COMMENT ON TABLE stint.event_log IS 'Every event that was recorded. Written by stint.record and stint.record_many alone, never changed, removed by stint.expire_record only. Read it through stint.record_events and stint.events_after';
COMMENT ON COLUMN stint.event_log.seq IS 'number of the event; numbers of events that failed or were repeats are missing';
COMMENT ON COLUMN stint.event_log.xid IS 'top-level transaction, within the epoch';
COMMENT ON COLUMN stint.event_log.occurred_at IS 'when it happened, as its source says; the time of recording where it does not';
COMMENT ON COLUMN stint.event_log.recorded_by IS 'role in force when it was recorded';
COMMENT ON COLUMN stint.event_log.lookups IS 'what was looked up when it was recorded, by the names of the lookups';
REVOKE ALL ON stint.event_log FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.event_log', '');

CREATE FUNCTION stint.keep_events() RETURNS trigger
    LANGUAGE c SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'keep_events_wrapper';
COMMENT ON FUNCTION stint.keep_events() IS
'Trigger of the record: an event is neither changed nor removed by hand, whoever asks (55000); stint.expire_record removes old ones.';
REVOKE ALL ON FUNCTION stint.keep_events() FROM PUBLIC;
CREATE TRIGGER keep_events BEFORE UPDATE OR DELETE OR TRUNCATE ON stint.event_log FOR EACH STATEMENT EXECUTE FUNCTION stint.keep_events();

CREATE VIEW stint.record_events AS
SELECT e.seq, e.source, e.type, e.event_id, e.occurred_at, e.recorded_at, e.recorded_by, e.payload, e.lookups
FROM stint.event_log e;
COMMENT ON VIEW stint.record_events IS 'The record: every event with its payload. Quick by seq, by (source, event_id), by type with seq or occurred_at, and by recorded_at';
COMMENT ON COLUMN stint.record_events.seq IS 'number of the event; to follow the record use stint.events_after, since numbers become visible out of order';
COMMENT ON COLUMN stint.record_events.occurred_at IS 'when it happened, as its source says';
COMMENT ON COLUMN stint.record_events.recorded_at IS 'when it was recorded';
COMMENT ON COLUMN stint.record_events.recorded_by IS 'role that recorded it';
COMMENT ON COLUMN stint.record_events.lookups IS 'what was looked up when it was recorded, by the names of the lookups';
REVOKE ALL ON stint.record_events FROM PUBLIC;

CREATE FUNCTION stint.utc_text(at timestamptz) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN (to_jsonb(at AT TIME ZONE 'UTC') #>> '{}') || '+00:00';
COMMENT ON FUNCTION stint.utc_text(timestamptz) IS 'A finite instant as projections see it: ISO 8601 in UTC, whatever the session''s settings.';
REVOKE ALL ON FUNCTION stint.utc_text(timestamptz) FROM PUBLIC;

CREATE VIEW stint.event_documents AS
SELECT e.seq, e.epoch, e.xid, e.type, e.recorded_at,
       jsonb_build_object('seq', e.seq, 'source', e.source, 'type', e.type, 'event_id', e.event_id, 'occurred_at', stint.utc_text(e.occurred_at),
                          'recorded_at', stint.utc_text(e.recorded_at), 'payload', e.payload, 'lookups', e.lookups) AS document
FROM stint.event_log e;
COMMENT ON VIEW stint.event_documents IS 'Each event as one document: what the paths of a projection lead into';
REVOKE ALL ON stint.event_documents FROM PUBLIC;

CREATE FUNCTION stint.looked_up(found jsonb, ord bigint) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (SELECT jsonb_object_agg(l.key, l.value -> ord::text) FROM jsonb_each(found) l WHERE l.value ? ord::text);
COMMENT ON FUNCTION stint.looked_up(jsonb, bigint) IS 'What lookups found for one event of a batch, by their names; null where none is for it. found: for each lookup what it found by the place of the event.';
REVOKE ALL ON FUNCTION stint.looked_up(jsonb, bigint) FROM PUBLIC;

CREATE TABLE stint.lookup_config (
    name       text COLLATE "C" PRIMARY KEY,
    relation   regclass NOT NULL,
    types      text[] NOT NULL,
    key        jsonb NOT NULL,
    columns    text[] NOT NULL,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.lookup_config IS 'Which row of which state table is read and kept with events of which types';
COMMENT ON COLUMN stint.lookup_config.key IS 'for each column of the primary key where its value stands in the event';
COMMENT ON COLUMN stint.lookup_config.columns IS 'what is kept of the row';
REVOKE ALL ON stint.lookup_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.lookup_config', '');

CREATE VIEW stint.lookups AS
SELECT c.name, c.relation, c.types, c.key, c.columns, c.created_by, c.created_at FROM stint.lookup_config c;
COMMENT ON VIEW stint.lookups IS 'The lookups of this database: which row of which state table is kept with an event';
REVOKE ALL ON stint.lookups FROM PUBLIC;

CREATE FUNCTION stint.create_lookup(name text, relation regclass, types text[], key jsonb, columns text[]) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'create_lookup_wrapper';
COMMENT ON FUNCTION stint.create_lookup(text, regclass, text[], jsonb, text[]) IS
'Declares that events of some types are recorded together with the present row of a state table, on which the caller needs SELECT. key: for each column of the primary key where its value stands
in the event, as columns of stint.create_projection; columns: what is kept of the row. It is kept with the event under the lookup''s name (null where there is no such row), never changes, and
projections reach it as "lookups.name.column". Errors: 42704 no state table or column, 42501 no SELECT, 42703 and 22023 an unfit key, 42710 the name is taken.
Locks: SHARE ROW EXCLUSIVE on the record: recorders wait until the transaction ends.';
REVOKE ALL ON FUNCTION stint.create_lookup(text, regclass, text[], jsonb, text[]) FROM PUBLIC;

CREATE FUNCTION stint.drop_lookup(name text) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_lookup_wrapper';
COMMENT ON FUNCTION stint.drop_lookup(text) IS
'Ends a lookup; what was kept with events stays. Errors: 42704 no such lookup, 42501 no SELECT on its table. Locks: as stint.create_lookup.';
REVOKE ALL ON FUNCTION stint.drop_lookup(text) FROM PUBLIC;

CREATE TABLE stint.projection_config (
    name       text COLLATE "C" PRIMARY KEY,
    relation   regclass NOT NULL,
    types      text[] NOT NULL,
    columns    jsonb NOT NULL,
    kind       text NOT NULL CHECK (kind IN ('upsert', 'delete', 'retract')),
    freshness  interval NOT NULL,
    on_error   text NOT NULL CHECK (on_error IN ('set_aside', 'refuse')),
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.projection_config IS 'Which events become rows of which state table, and how';
COMMENT ON COLUMN stint.projection_config.types IS 'types of events it takes';
COMMENT ON COLUMN stint.projection_config.columns IS 'for each column where its value stands in the event';
COMMENT ON COLUMN stint.projection_config.kind IS 'what its rows do in the table: upsert, delete or retract';
COMMENT ON COLUMN stint.projection_config.freshness IS 'how far the table may lag behind the record; zero: not at all. The same for all projections of a table';
COMMENT ON COLUMN stint.projection_config.on_error IS 'an event that does not fit is set aside, or, with freshness zero, refused';
REVOKE ALL ON stint.projection_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.projection_config', '');

CREATE VIEW stint.projections AS
SELECT c.name, c.relation, c.types, c.columns, c.kind, c.freshness, c.on_error, c.created_by, c.created_at
FROM stint.projection_config c;
COMMENT ON VIEW stint.projections IS 'The projections of this database: which events become rows of which state table, and how';
REVOKE ALL ON stint.projections FROM PUBLIC;

-- Insert-only but for trimming, so that an old snapshot held open makes the newest row no slower to find.
CREATE TABLE stint.projection_positions (
    relation       regclass NOT NULL,
    number         bigint NOT NULL,
    epoch          integer NOT NULL,
    base           pg_snapshot NOT NULL,
    target_epoch   integer,
    target         pg_snapshot,
    seq            bigint NOT NULL,
    behind         bigint NOT NULL,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (relation, number)
);
COMMENT ON TABLE stint.projection_positions IS 'How far each table with a freshness above zero is folded; the row with the highest number is valid. Done is every event of an earlier epoch, every event that base sees, and up to seq those that target sees';
COMMENT ON COLUMN stint.projection_positions.epoch IS 'the epoch base belongs to';
COMMENT ON COLUMN stint.projection_positions.target IS 'what the present pass folds up to; null between two passes';
COMMENT ON COLUMN stint.projection_positions.behind IS 'events of the pass that were left when this was written';
REVOKE ALL ON stint.projection_positions FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.projection_positions', '');

CREATE TABLE stint.events_aside (
    relation regclass NOT NULL,
    seq      bigint NOT NULL,
    state    text NOT NULL,
    sqlstate text NOT NULL,
    reason   text NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (relation, seq)
);
COMMENT ON TABLE stint.events_aside IS 'Events that are recorded but not part of a table: poisoned ones, whose values do not fit it, and those skipped by hand';
REVOKE ALL ON stint.events_aside FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.events_aside', '');

CREATE VIEW stint.poisoned_events AS
SELECT a.relation, a.seq, e.source, e.type, e.event_id, a.state, a.sqlstate, a.reason, a.at AS set_aside_at
FROM stint.events_aside a LEFT JOIN stint.event_log e ON e.seq = a.seq;
COMMENT ON VIEW stint.poisoned_events IS 'Events set aside because they do not fit a table they are projected into, with the reason. stint.rebuild(relation) tries them again, stint.skip_event(relation, seq) gives them up';
REVOKE ALL ON stint.poisoned_events FROM PUBLIC;

CREATE FUNCTION stint.record(source text, type text, payload jsonb, event_id text DEFAULT NULL, occurred_at timestamptz DEFAULT NULL) RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'record_wrapper';
COMMENT ON FUNCTION stint.record(text, text, jsonb, text, timestamptz) IS
'Appends an event to the record and returns its number (seq). source: who tells of it; type: what kind of event it is; payload: kept as it is; event_id: the source''s own id of the event:
the same (source, event_id) again is the same event and returns the same number, also while the first call is still under way; occurred_at: when it happened, now if not given.
Tables with a projection on the type and freshness zero change in the same transaction. stint.record_many also tells whether the event was new.
Errors: 23505 another type, payload or time is recorded under this id, 22004, 22023, 54000 unfit arguments; what a projection with on_error ''refuse'' raises.
Locks: the order of the keys it touches in each projected table (docs/locks.md), then the id, until the transaction ends.';
REVOKE ALL ON FUNCTION stint.record(text, text, jsonb, text, timestamptz) FROM PUBLIC;

CREATE FUNCTION stint.record_many(events jsonb) RETURNS TABLE (ordinality integer, seq bigint, created boolean)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'record_many_wrapper';
COMMENT ON FUNCTION stint.record_many(jsonb) IS
'Appends a batch of events, all or none: an array of objects with the arguments of stint.record, of which source, type and payload must be there. Returns one row for each element, in order.
seq: its number; created: false where the event was recorded before, also earlier in the batch. Each projected table is changed once, by the events in their order.
Errors and locks as stint.record; an error names the element. At most stint.max_batch elements. Use in FROM.';
REVOKE ALL ON FUNCTION stint.record_many(jsonb) FROM PUBLIC;

CREATE FUNCTION stint.create_projection(name text, relation regclass, types text[], columns jsonb, kind text DEFAULT 'upsert', freshness interval DEFAULT '0',
                                        on_error text DEFAULT 'set_aside', replace_rows boolean DEFAULT false) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres' AS 'MODULE_PATHNAME', 'create_projection_wrapper';
COMMENT ON FUNCTION stint.create_projection(text, regclass, text[], jsonb, text, interval, text, boolean) IS
$$Makes events of the record into rows of a state table; only the table's owner may. From then on the table has no other feed: stint.merge refuses it.

types         the types of events it takes
columns       for each column where its value stands: "payload.path.to.value" (a name with dots: ["payload", "a.b"]), "lookups.name.column", "seq", "source", "type", "event_id",
              "occurred_at", "recorded_at", or {"const": value}. The primary key must be there. What an event does not have is left out of the row, a JSON null is null
kind          what the rows do: 'upsert', 'delete' or 'retract', as in stint.merge. Several projections may feed one table; their rows fold together, in the order of the events
freshness     how far the table may lag behind the record. Zero: it changes in the transaction that records. Else the maintenance worker folds many events into one write. One for a table
on_error      'set_aside': an event whose values do not fit is recorded, and set aside for this table (stint.poisoned_events). 'refuse': with freshness zero, recording it fails
replace_rows  a table that has rows already gets its first projection only with true: its rows become what the record says

Events that are in the record already are folded: with freshness zero at once, else by the worker.
Errors: 42704 no state table, 42501 not its owner, 42710 the name is taken, 42703 and 22023 an unfit map, 55000 the table has rows, or does not take the kind.
Locks: SHARE ROW EXCLUSIVE on the table and on the record: recorders wait until the transaction ends.$$;
REVOKE ALL ON FUNCTION stint.create_projection(text, regclass, text[], jsonb, text, interval, text, boolean) FROM PUBLIC;

CREATE FUNCTION stint.drop_projection(name text) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_projection_wrapper';
COMMENT ON FUNCTION stint.drop_projection(text) IS
'Ends a projection; only the table''s owner may. The rows stay as they are; a table without projections takes merges again. Errors: 42704 no such projection, 42501 not the owner.
Locks: as stint.create_projection.';
REVOKE ALL ON FUNCTION stint.drop_projection(text) FROM PUBLIC;

CREATE FUNCTION stint.rebuild(relation regclass, retry boolean DEFAULT true) RETURNS TABLE (events bigint, inserted bigint, updated bigint, deleted bigint, set_aside bigint)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres' AS 'MODULE_PATHNAME', 'rebuild_wrapper';
COMMENT ON FUNCTION stint.rebuild(regclass, boolean) IS
'Folds the record anew and writes what differs into the table, so that the changelog shows true differences only; only the owner may. It goes on while events arrive: those are held up
only while the last of them are folded and the difference is written. retry: poisoned events are tried again, each in its place in the order; false: they stay aside.
events: how many were folded; inserted, updated, deleted: rows that differed; set_aside: events that do not fit. Use in FROM.
Errors: 42704 the table has no projection, 42501 not its owner, and what writing the rows raises. Locks: the order of all keys of the table, at the end, until the transaction ends.';
REVOKE ALL ON FUNCTION stint.rebuild(regclass, boolean) FROM PUBLIC;

CREATE FUNCTION stint.verify(relation regclass) RETURNS TABLE (key jsonb, what text, expected jsonb, actual jsonb)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres' AS 'MODULE_PATHNAME', 'verify_wrapper';
COMMENT ON FUNCTION stint.verify(regclass) IS
'The keys in which a table is not what the record says, at one point and as far as the table is folded; no row where all is well. what: missing, extra or different; expected: the row as the
record gives it; actual: the row there is. Changes nothing, waits for nobody and holds up nobody. Only the owner may. Use in FROM.
Errors: 42704 the table has no projection, 42501 not its owner.';
REVOKE ALL ON FUNCTION stint.verify(regclass) FROM PUBLIC;

CREATE FUNCTION stint.skip_event(relation regclass, seq bigint) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'skip_event_wrapper';
COMMENT ON FUNCTION stint.skip_event(regclass, bigint) IS
'Gives up a poisoned event for a table: it stays in the record, is not tried again, and no longer counts against the table''s freshness. Only the table''s owner may.
Errors: 42704 the event is not set aside for the table, 42501 not its owner.';
REVOKE ALL ON FUNCTION stint.skip_event(regclass, bigint) FROM PUBLIC;

CREATE FUNCTION stint.project(relation regclass, max integer DEFAULT 10000) RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'project_now_wrapper';
COMMENT ON FUNCTION stint.project(regclass, integer) IS
'Folds events that wait into a table whose freshness is above zero, in one write, without waiting for them to be due, and returns how many; 0 when it is up to date, or always is. The worker calls
it when events are due. max: most events to fold. Errors: 42704 the table has no projection, 25001 in a transaction that has written something or runs under REPEATABLE READ or SERIALIZABLE.
Locks: the fold of the table until the transaction ends, then rows as stint.merge.';
REVOKE ALL ON FUNCTION stint.project(regclass, integer) FROM PUBLIC;

CREATE FUNCTION stint.events_after(types text[] DEFAULT NULL, after text DEFAULT NULL, max integer DEFAULT 1000)
    RETURNS TABLE (pos text, seq bigint, source text, type text, event_id text, occurred_at timestamptz, recorded_at timestamptz, payload jsonb, lookups jsonb)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'events_after_wrapper';
COMMENT ON FUNCTION stint.events_after(text[], text, integer) IS
'The next events of the record after a position, each once and none skipped, also where transactions overlap and commit out of order. types: only these, the same in every call of a reader; null: all;
after: the pos of the last event that was dealt with, null for the beginning; max: most events to return; none: ask again later with the same pos.
pos: keep it as it is. Events come in passes, each in the order of seq: what a later pass brings may have a lower seq, but of one key of a projected table they come in the order of commits.
Writes nothing, takes no locks. Errors: 22023 no position. Use in FROM.';
REVOKE ALL ON FUNCTION stint.events_after(text[], text, integer) FROM PUBLIC;

CREATE TABLE stint.base_images (
    relation   regclass NOT NULL,
    tombstones boolean NOT NULL,
    part       integer NOT NULL,
    rows       jsonb NOT NULL,
    PRIMARY KEY (relation, tombstones, part)
);
COMMENT ON TABLE stint.base_images IS 'What projected tables were after the events that stint.expire_record removed: rebuild and verify begin here';
COMMENT ON COLUMN stint.base_images.tombstones IS 'whether these are rows of the table of tombstones';
COMMENT ON COLUMN stint.base_images.rows IS 'an array of rows';
REVOKE ALL ON stint.base_images FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.base_images', '');

CREATE FUNCTION stint.expire_record(before timestamptz, max bigint DEFAULT NULL) RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres' AS 'MODULE_PATHNAME', 'expire_record_wrapper';
COMMENT ON FUNCTION stint.expire_record(timestamptz, bigint) IS
'Removes the events that come before the first one recorded at or after a time, and returns how many; max: the most to remove at once, null all. For each projected table what they amount to is stored first; rebuild and verify begin there.
Events stay that a table has not folded yet or that are poisoned, and all after them. An id that was removed can be recorded anew.
The worker calls it where stint.set_record_retention says how long events are kept.
Errors: 22004, 22023, 25001 in a transaction that has written something or runs under REPEATABLE READ or SERIALIZABLE. Locks: the fold of each projected table until the transaction ends; recorders do not wait.';
REVOKE ALL ON FUNCTION stint.expire_record(timestamptz, bigint) FROM PUBLIC;

CREATE TABLE stint.record_retention (
    one  boolean PRIMARY KEY DEFAULT true CHECK (one),
    keep interval NOT NULL
);
COMMENT ON TABLE stint.record_retention IS 'At most one row: how long events are kept; no row: for ever';
COMMENT ON COLUMN stint.record_retention.keep IS 'since they were recorded';
REVOKE ALL ON stint.record_retention FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.record_retention', '');

CREATE FUNCTION stint.set_record_retention(keep interval) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'set_record_retention_wrapper';
COMMENT ON FUNCTION stint.set_record_retention(interval) IS
'Says how long events are kept after they were recorded; stint.record_retention shows it. keep: null for ever, which is the default. From then on the worker lets older ones go as stint.expire_record
does: up to 100,000 at once, when the oldest is older by an eighth than it need be, so that what tables amounted to is not stored anew for every few events.
One for all types: what a table amounts to up to a point is made of all of its types. Errors: 22023 not positive. Locks: the setting''s row.';
REVOKE ALL ON FUNCTION stint.set_record_retention(interval) FROM PUBLIC;
