-- Pins and tags: points in the past that stay readable, and what is kept for them when changes go.

CREATE TABLE stint.pins (
    pin        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    epoch      integer NOT NULL,
    snapshot   pg_snapshot NOT NULL,
    comment    text,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    pos        bigint NOT NULL,
    high       bigint NOT NULL
);
COMMENT ON TABLE stint.pins IS 'Snapshots that were kept: what a pinning transaction saw of all state tables';
COMMENT ON COLUMN stint.pins.epoch IS 'the epoch whose transaction ids the snapshot holds';
COMMENT ON COLUMN stint.pins.pos IS 'end of the last tick in the snapshot: all up to there is seen, and perhaps changes that no tick had reached';
COMMENT ON COLUMN stint.pins.high IS 'changes with a higher seq were not visible in the snapshot';
REVOKE ALL ON stint.pins FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.pins', '');
SELECT pg_catalog.pg_extension_config_dump('stint.pins_pin_seq', '');

-- No foreign key, for the reason that stint.consumer_commits has none; pins stay.
CREATE TABLE stint.tag_list (
    tag        text COLLATE "C" PRIMARY KEY,
    pin        bigint NOT NULL,
    comment    text,
    hold       boolean NOT NULL DEFAULT false,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX tag_list_pin ON stint.tag_list (pin);
COMMENT ON TABLE stint.tag_list IS 'Names of pins; of a row only hold ever changes, from true to false';
COMMENT ON COLUMN stint.tag_list.hold IS 'it cannot be dropped';
REVOKE ALL ON stint.tag_list FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.tag_list', '');

CREATE TABLE stint.dropped_tags (
    pin        bigint NOT NULL,
    dropped_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.dropped_tags IS 'Pins that lost a tag since stint.expire_changes() last looked for images that no tag needs any more';
REVOKE ALL ON stint.dropped_tags FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.dropped_tags', '');

-- A tag needs of each key the first change after it. When changes go, those that some tag needs stay here; tags between the same two changes share one.
CREATE TABLE stint.kept_images (
    relation regclass NOT NULL,
    key      text COLLATE "C" NOT NULL,
    epoch    integer NOT NULL,
    xid      xid8 NOT NULL,
    seq      bigint NOT NULL,
    layout   integer NOT NULL,
    before   text[]
);
CREATE INDEX kept_images_key ON stint.kept_images (relation, hashtextextended(key, 0), epoch, seq);
COMMENT ON TABLE stint.kept_images IS 'Changes that are gone from stint.change_log but the first of their key after some tag: what the row was before';
COMMENT ON COLUMN stint.kept_images.before IS 'the row before the change, null where it was not there';
REVOKE ALL ON stint.kept_images FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.kept_images', '');

CREATE VIEW stint.tags AS
SELECT t.tag, t.pin, p.created_at AS pinned_at, p.pos, t.hold,
       (SELECT count(DISTINCT (k.relation, k.key)) FROM stint.kept_images k
        WHERE k.epoch > p.epoch OR k.epoch = p.epoch AND NOT pg_visible_in_snapshot(k.xid, p.snapshot)) AS rows_kept,
       t.comment, t.created_by, t.created_at
FROM stint.tag_list t JOIN stint.pins p USING (pin);
COMMENT ON VIEW stint.tags IS 'Tags: immutable names of points at which state tables stay readable through <table>_as_of(tag => …)';
COMMENT ON COLUMN stint.tags.pinned_at IS 'when the pin was made';
COMMENT ON COLUMN stint.tags.pos IS 'position that it has seen everything up to';
COMMENT ON COLUMN stint.tags.hold IS 'whether stint.drop_tag refuses it';
COMMENT ON COLUMN stint.tags.rows_kept IS 'images that are kept for it beyond the changelog; tags share them';
COMMENT ON COLUMN stint.tags.created_at IS 'when the pin was given this name';
REVOKE ALL ON stint.tags FROM PUBLIC;

CREATE FUNCTION stint.pin(comment text DEFAULT NULL) RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'pin_wrapper';
COMMENT ON FUNCTION stint.pin(text) IS
'Keeps what this transaction sees of all state tables and returns the pin''s number. Under REPEATABLE READ that is exactly the transaction''s view; under READ COMMITTED what is committed
at the call. A pin keeps no rows from retention; the tag that names it does.
Errors: 25001 in a transaction that has changed a state table; 55000 where there is no state table. Takes no locks.';
REVOKE ALL ON FUNCTION stint.pin(text) FROM PUBLIC;

CREATE FUNCTION stint.tag(name text, pin bigint DEFAULT NULL, comment text DEFAULT NULL, hold boolean DEFAULT false) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'tag_wrapper';
COMMENT ON FUNCTION stint.tag(text, bigint, text, boolean) IS
'Names a pin, for good: a tag never comes to mean another point, and what it needs is kept until it is dropped. name: at most stint.max_name_length bytes; pin: as stint.pin returned
it, null pins what this transaction sees now; hold: stint.drop_tag refuses it until stint.release_hold.
Errors: 42710 the name is taken, 42704 no such pin, 25001 as for stint.pin, 72000 changes after the pin are gone already.
Locks: the retention lock, shared, until the transaction ends; the pin''s row in share mode.';
REVOKE ALL ON FUNCTION stint.tag(text, bigint, text, boolean) FROM PUBLIC;

CREATE FUNCTION stint.drop_tag(name text) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_tag_wrapper';
COMMENT ON FUNCTION stint.drop_tag(text) IS
'Forgets a tag; its pin stays. What was kept for it alone goes with the next stint.expire_changes(). Errors: 42704 no such tag, 55000 it is held. Locks: the tag''s row.';
REVOKE ALL ON FUNCTION stint.drop_tag(text) FROM PUBLIC;

CREATE FUNCTION stint.release_hold(name text) RETURNS boolean
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'release_hold_wrapper';
COMMENT ON FUNCTION stint.release_hold(text) IS
'Lets a held tag be dropped; true if it was held. A hold is given with the tag and not taken later. Errors: 42704 no such tag. Locks: the tag''s row.';
REVOKE ALL ON FUNCTION stint.release_hold(text) FROM PUBLIC;

CREATE FUNCTION stint.row_as_of(live anyelement, key text, tag text, pos bigint, at timestamptz) RETURNS anyelement
    LANGUAGE c STABLE COST 50 SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'row_as_of_wrapper';
COMMENT ON FUNCTION stint.row_as_of(anyelement, text, text, bigint, timestamptz) IS
'What <table>_as_of is made of: the row of a state table with this key at a point, null where there was none. live: the row as it is now, or null of the table''s row type;
key: its key as stint.image(…)::text; tag, pos, at: the point, one of them. Sees what the calling query sees; reads values as the table''s owner.
Errors: 42704 no such tag or state table, 22023 a position that no tick has reached, a time before the first tick, not one of tag, pos and at, or a point before the table was declared;
72000 the changes after the point are no longer kept; 55000 the table keeps no changelog; 42501 no SELECT on the table or row security in force. Takes no locks.';
REVOKE ALL ON FUNCTION stint.row_as_of(anyelement, text, text, bigint, timestamptz) FROM PUBLIC;

CREATE FUNCTION stint.point_is_kept(kind anyelement, tag text, pos bigint, at timestamptz) RETURNS boolean
    LANGUAGE c STABLE COST 10 SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'point_is_kept_wrapper';
COMMENT ON FUNCTION stint.point_is_kept(anyelement, text, bigint, timestamptz) IS
'True where a state table can be read as of a point, else the error that says why not. kind: null of the table''s row type; tag, pos, at: the point, one of them.
Errors: as stint.row_as_of. Takes no locks.';
REVOKE ALL ON FUNCTION stint.point_is_kept(anyelement, text, bigint, timestamptz) FROM PUBLIC;

CREATE FUNCTION stint.diff(relation regclass, since_tag text DEFAULT NULL, until_tag text DEFAULT NULL, since_pos bigint DEFAULT NULL, until_pos bigint DEFAULT NULL)
    RETURNS TABLE (kind text, key jsonb, before jsonb, after jsonb)
    LANGUAGE c STABLE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'diff_wrapper';
COMMENT ON FUNCTION stint.diff(regclass, text, text, bigint, bigint) IS
'The rows of a state table that differ between two points, by key. relation: the table, on which the caller needs SELECT; since_tag or since_pos: the earlier point;
until_tag or until_pos: the later one, neither: now. Kinds and jsonb as in stint.changes: +I rows that are only there at the later point, -U and +U those that differ, -D those that
are only there at the earlier one. Looks at keys that changed in between only; a row that changed and changed back is none. Meant for FROM.
Errors: 42704 no such tag or state table, 22023 no earlier point or two, the later point before the earlier one; else as <table>_as_of. Takes no locks.';
REVOKE ALL ON FUNCTION stint.diff(regclass, text, text, bigint, bigint) FROM PUBLIC;

CREATE FUNCTION stint.expire_changes(max integer DEFAULT 10000) RETURNS TABLE (removed bigint, kept bigint, images bigint, more boolean)
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'expire_changes_wrapper';
COMMENT ON FUNCTION stint.expire_changes(integer) IS
'Lets go of changes past the history of their tables (create_state, set_history), after keeping of them what tags need, and of kept images that no tag needs any more. A tick goes whole:
when every table that changed in it is past its history, and with it the earlier ticks of those tables. max: stop after so many changes; a tick is not divided.
Result: changes removed; how many of them were kept as images; kept images removed; whether there is more. The worker calls it.
Errors: 25001 in a transaction that has written something or runs under REPEATABLE READ or SERIALIZABLE.
Locks: the retention lock until the transaction ends: making a tag waits for it.';
REVOKE ALL ON FUNCTION stint.expire_changes(integer) FROM PUBLIC;

CREATE FUNCTION stint.set_history(relation regclass, history interval) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'set_history_wrapper';
COMMENT ON FUNCTION stint.set_history(regclass, interval) IS
'Says how long the changes of a state table are kept beyond what tags need; only its owner may. relation: the table; history: null for ever.
Errors: 42704 not a state table, 42501 not its owner, 55000 it keeps no changelog, 22023 history not positive. Locks: the table''s row among the captured ones.';
REVOKE ALL ON FUNCTION stint.set_history(regclass, interval) FROM PUBLIC;

CREATE FUNCTION stint.follow_ddl() RETURNS event_trigger
    LANGUAGE c SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'follow_ddl_wrapper';
COMMENT ON FUNCTION stint.follow_ddl() IS
'The event trigger function: notes which columns altered state tables have, makes their as-of functions anew and renames them along with their tables, and grants the tables of deleted keys as the state tables are. With the rights of the extension''s owner.';
REVOKE ALL ON FUNCTION stint.follow_ddl() FROM PUBLIC;
CREATE EVENT TRIGGER stint_follow_ddl ON ddl_command_end WHEN TAG IN ('ALTER TABLE', 'ALTER SCHEMA', 'ALTER TYPE', 'GRANT', 'REVOKE', 'DROP TYPE', 'DROP DOMAIN')
    EXECUTE FUNCTION stint.follow_ddl();
COMMENT ON EVENT TRIGGER stint_follow_ddl IS 'Has the as-of functions follow their state tables';
