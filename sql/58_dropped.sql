-- What is kept of a state table goes with it.

CREATE FUNCTION stint.follow_drop() RETURNS event_trigger
    LANGUAGE c SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'follow_drop_wrapper';
COMMENT ON FUNCTION stint.follow_drop() IS
'The event trigger function: forgets the declarations, projections, lookups, watches and kept images of dropped state tables, and drops the tables of their deleted keys.
What changed stays in the changelog, where positions count it. With the rights of the extension''s owner.';
REVOKE ALL ON FUNCTION stint.follow_drop() FROM PUBLIC;
CREATE EVENT TRIGGER stint_follow_drop ON sql_drop
    WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED', 'DROP EXTENSION', 'DROP TYPE', 'DROP ACCESS METHOD')
    EXECUTE FUNCTION stint.follow_drop();
COMMENT ON EVENT TRIGGER stint_follow_drop IS 'Has what is kept of a state table go with it';
