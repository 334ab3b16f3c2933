-- State tables: which tables are declared, and how their rows merge.

-- A declaration names its table by regclass, so a dump carries the name and a rename is followed.
CREATE TABLE stint.state_config (
    relation   regclass PRIMARY KEY,
    engine     text NOT NULL CHECK (engine IN ('deduplicate', 'partial-update')),
    sequence   text[],
    groups     jsonb,
    deletes    text NOT NULL CHECK (deletes IN ('refuse', 'ignore', 'remove')),
    tombstones regclass,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.state_config IS 'One row per state table: the declaration given to create_state';
COMMENT ON COLUMN stint.state_config.relation IS 'the state table';
COMMENT ON COLUMN stint.state_config.engine IS 'merge engine: deduplicate or partial-update';
COMMENT ON COLUMN stint.state_config.sequence IS 'deduplicate: columns whose value, compared in this order, says which of two rows is newer; null: the later arrival is';
COMMENT ON COLUMN stint.state_config.groups IS 'partial-update: sequence groups as given to create_state';
COMMENT ON COLUMN stint.state_config.deletes IS 'what merge does with kind => ''delete'': refuse, ignore or remove';
COMMENT ON COLUMN stint.state_config.tombstones IS 'the table beside the state table that remembers the sequence of deleted keys; null where none is needed';
REVOKE ALL ON stint.state_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.state_config', '');
