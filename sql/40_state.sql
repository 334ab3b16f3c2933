-- State tables: which tables are declared, and how their rows merge.

-- A declaration names its table by regclass, so a dump carries the name and a rename is followed.
CREATE TABLE stint.state_config (
    relation   regclass PRIMARY KEY,
    engine     text NOT NULL CHECK (engine IN ('deduplicate', 'partial-update')),
    sequence   text[],
    groups     jsonb,
    deletes    text NOT NULL CHECK (deletes IN ('refuse', 'ignore', 'remove', 'retract')),
    tombstones regclass,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.state_config IS 'One row per state table: the declaration given to create_state';
COMMENT ON COLUMN stint.state_config.relation IS 'the state table';
COMMENT ON COLUMN stint.state_config.engine IS 'merge engine: deduplicate or partial-update';
COMMENT ON COLUMN stint.state_config.sequence IS 'deduplicate: columns whose value, compared in this order, says which of two rows is newer; null: the later arrival is';
COMMENT ON COLUMN stint.state_config.groups IS 'partial-update: sequence groups as given to create_state';
COMMENT ON COLUMN stint.state_config.deletes IS 'what merge does with kind => ''delete'': refuse, ignore, remove or retract';
COMMENT ON COLUMN stint.state_config.tombstones IS 'the table beside the state table that remembers the sequence of deleted keys; null where none is needed';
REVOKE ALL ON stint.state_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.state_config', '');

CREATE VIEW stint.states AS
SELECT c.relation, c.engine, c.sequence, c.groups, c.deletes, c.tombstones, t.relowner::regrole AS owner, c.created_by, c.created_at
FROM stint.state_config c JOIN pg_catalog.pg_class t ON t.oid = c.relation;
COMMENT ON VIEW stint.states IS 'The state tables of this database and how their rows merge';
REVOKE ALL ON stint.states FROM PUBLIC;

CREATE FUNCTION stint.create_state(relation regclass, engine text, sequence text[] DEFAULT NULL, groups jsonb DEFAULT NULL, deletes text DEFAULT NULL,
    changelog boolean DEFAULT true, history interval DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'create_state_wrapper';
COMMENT ON FUNCTION stint.create_state(regclass, text, text[], jsonb, text, boolean, interval) IS
$$Declares an ordinary or partitioned table with a primary key as a state table; only its owner may.

relation  the table; not temporary, unlogged, a partition, inherited, or without an immediate primary key
engine    'deduplicate': the newest row replaces the whole row. 'partial-update': each row brings some columns; a null or a missing field leaves an ungrouped column as it is
sequence  deduplicate: columns that say which row is newer, compared in order, null before everything; on a tie the later arrival wins. Null: the later arrival always wins
groups    partial-update: {"sequence columns": ["field", ...]}, several sequence columns parted by commas. A row that is not older than the group sets all its fields, also to null
          (a missing field is null); a row whose sequence columns are all null leaves the group alone. {"columns": {"fields": [...], "on_delete": "remove"}}: a delete that is not older
          than this group removes the row
deletes   what merge(kind => 'delete') does: 'remove' (default of deduplicate), 'refuse' (default of partial-update without groups), 'ignore', or 'retract' (default with groups: the
          fields of each group that the delete is not older than become null and the group advances)
changelog whether its changes are captured. Without, there is no <table>_as_of for it, and consumers, watches and tags cannot use it
history   how long its changes are kept beyond what tags need; null: for ever

A table that remembers the sequences of deleted keys is made beside it, named <table>_tombstones, where the declaration needs one.
Errors: 42809 or 42P16 not a fit table, 42501 not its owner, 22023 unknown engine, policy or option, or options that contradict each other, 42703 unknown column, 42710 declared already.
Locks: SHARE ROW EXCLUSIVE on the table.$$;
REVOKE ALL ON FUNCTION stint.create_state(regclass, text, text[], jsonb, text, boolean, interval) FROM PUBLIC;

CREATE FUNCTION stint.drop_state(relation regclass)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'drop_state_wrapper';
COMMENT ON FUNCTION stint.drop_state(regclass) IS
$$Makes a state table an ordinary table again; only its owner may. Its rows stay, the sequences of its deleted keys are forgotten.

relation  the table
Errors: 42704 not a state table, 42501 not its owner. Locks: SHARE ROW EXCLUSIVE on the table, ACCESS EXCLUSIVE on its tombstones.$$;
REVOKE ALL ON FUNCTION stint.drop_state(regclass) FROM PUBLIC;

CREATE FUNCTION stint.merge(relation regclass, rows jsonb, kind text DEFAULT 'upsert')
RETURNS TABLE (inserted bigint, updated bigint, deleted bigint, unchanged bigint, late bigint)
LANGUAGE c VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'merge_wrapper';
COMMENT ON FUNCTION stint.merge(regclass, jsonb, text) IS
$$Merges rows into a state table as its declaration says. A batch in which a key comes many times does what its rows one by one, in order, would do. Call it in FROM.

relation  the state table
rows      array of objects whose fields are column names, the whole primary key among them; at most stint.max_batch. PostgreSQL reads the values by the columns' types; JSON null is null.
          Leave generated and identity columns out. A NOT NULL column must be in every row; defaults are not applied
kind      'upsert', 'delete' or 'retract' (an older image is withdrawn, as -U in a changelog; for deduplicate the same as 'delete', ignored where deletes is 'remove' without a sequence group)

inserted, updated, deleted, unchanged  keys; a key whose row would read the same is not written
late      rows that changed nothing because newer ones were there already

It runs as the table's owner; the caller needs INSERT and UPDATE on the table, for deletes DELETE, where they empty groups UPDATE as well.
Errors: 42704 not a state table, 42501 a right is missing, 22023 rows or kind unfit, 42703 no such column, 23502 a key is missing, 428C9 a column PostgreSQL fills, 54000 too many
rows, 55000 deletes are refused, and what the table's own types and constraints raise. Under REPEATABLE READ and SERIALIZABLE a concurrent merge of the same key is 40001.
Locks: rows in key order, then tombstones in key order. Deletes judged by sequence go one after the other per table, and one of a key that has no row first takes SHARE ROW EXCLUSIVE
on the table.$$;
REVOKE ALL ON FUNCTION stint.merge(regclass, jsonb, text) FROM PUBLIC;
