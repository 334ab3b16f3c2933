-- Pins and tags: points in the past that stay readable.

CREATE TABLE stint.pins (
    pin        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    epoch      integer NOT NULL,
    snapshot   pg_snapshot NOT NULL,
    comment    text,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.pins IS 'Snapshots that were kept: what a pinning transaction saw of all state tables';
COMMENT ON COLUMN stint.pins.epoch IS 'the epoch whose transaction ids the snapshot holds';
REVOKE ALL ON stint.pins FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.pins', '');
SELECT pg_catalog.pg_extension_config_dump('stint.pins_pin_seq', '');

CREATE TABLE stint.tag_list (
    tag        text COLLATE "C" PRIMARY KEY,
    pin        bigint NOT NULL REFERENCES stint.pins,
    comment    text,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX tag_list_pin ON stint.tag_list (pin);
COMMENT ON TABLE stint.tag_list IS 'Names of pins; a row is inserted and deleted, never updated';
REVOKE ALL ON stint.tag_list FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.tag_list', '');

CREATE VIEW stint.tags AS
SELECT t.tag, t.pin, p.created_at AS pinned_at, t.comment, t.created_by, t.created_at
FROM stint.tag_list t JOIN stint.pins p USING (pin);
COMMENT ON VIEW stint.tags IS 'Tags: immutable names of points at which state tables stay readable through <table>_as_of(tag => …)';
COMMENT ON COLUMN stint.tags.pinned_at IS 'when the pin was made';
COMMENT ON COLUMN stint.tags.created_at IS 'when the pin was given this name';
REVOKE ALL ON stint.tags FROM PUBLIC;

CREATE FUNCTION stint.pin(comment text DEFAULT NULL) RETURNS bigint
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'pin_wrapper';
COMMENT ON FUNCTION stint.pin(text) IS
'Keeps what this transaction sees of all state tables and returns the pin''s number. Under REPEATABLE READ that is exactly the transaction''s view; under READ COMMITTED what is committed
at the call. Errors: 25001 in a transaction that has changed a state table; 55000 where there is no state table. Takes no locks.';
REVOKE ALL ON FUNCTION stint.pin(text) FROM PUBLIC;

CREATE FUNCTION stint.tag(name text, pin bigint DEFAULT NULL, comment text DEFAULT NULL) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'tag_wrapper';
COMMENT ON FUNCTION stint.tag(text, bigint, text) IS
'Names a pin, for good: a tag never comes to mean another point. name: at most stint.max_name_length bytes; pin: as stint.pin returned it, null pins what this transaction sees now.
Errors: 42710 the name is taken, 42704 no such pin, 25001 as for stint.pin. Locks: the pin''s row in share mode.';
REVOKE ALL ON FUNCTION stint.tag(text, bigint, text) FROM PUBLIC;

CREATE FUNCTION stint.drop_tag(name text) RETURNS void
    LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_tag_wrapper';
COMMENT ON FUNCTION stint.drop_tag(text) IS
'Forgets a tag; its pin stays. Errors: 42704 no such tag. Locks: the tag''s row.';
REVOKE ALL ON FUNCTION stint.drop_tag(text) FROM PUBLIC;

CREATE FUNCTION stint.images_after(relation regclass, tag text, pos bigint)
    RETURNS TABLE (key text, before text[])
    LANGUAGE c STABLE ROWS 1000 SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'images_after_wrapper';
COMMENT ON FUNCTION stint.images_after(regclass, text, bigint) IS
'What <table>_as_of is made of: for each key that changed after the point, the row''s image before its first change, null where the row was not there. Give tag or pos, not both.
Sees what the calling query sees. Errors: 42704 no such tag or state table, 22023 a position that no tick has reached, neither or both of tag and pos, or a point before the table
was declared; 42501 no SELECT on the table or row security in force. Takes no locks.';
REVOKE ALL ON FUNCTION stint.images_after(regclass, text, bigint) FROM PUBLIC;
