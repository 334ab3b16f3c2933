-- State tables: which tables are declared, and how their rows merge.

-- A declaration names its table by regclass, so a dump carries the name and a rename is followed.
CREATE TABLE stint.state_config (
    relation   regclass PRIMARY KEY,
    engine     text NOT NULL CHECK (engine IN ('deduplicate', 'first-row', 'aggregation', 'partial-update')),
    sequence   text[],
    groups     jsonb,
    deletes    text NOT NULL CHECK (deletes IN ('refuse', 'ignore', 'remove', 'retract')),
    tombstones regclass,
    fields     jsonb,
    rowkind    text,
    created_by name NOT NULL DEFAULT session_user,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE stint.state_config IS 'One row per state table: the declaration given to create_state';
COMMENT ON COLUMN stint.state_config.relation IS 'the state table';
COMMENT ON COLUMN stint.state_config.engine IS 'merge engine: deduplicate, first-row, aggregation or partial-update';
COMMENT ON COLUMN stint.state_config.sequence IS 'deduplicate and aggregation: columns whose value, compared in this order, says which of two rows is newer; null: the later arrival is';
COMMENT ON COLUMN stint.state_config.groups IS 'partial-update: sequence groups as given to create_state';
COMMENT ON COLUMN stint.state_config.deletes IS 'what merge does with kind => ''delete'': refuse, ignore, remove or retract';
COMMENT ON COLUMN stint.state_config.tombstones IS 'the table beside the state table that remembers the sequence of deleted keys; null where none is needed';
COMMENT ON COLUMN stint.state_config.fields IS 'aggregate functions, their options and defaults of single columns, as given to create_state';
COMMENT ON COLUMN stint.state_config.rowkind IS 'the field of the rows given to merge that says +I, +U, -U or -D; null: the argument kind of merge says it';
REVOKE ALL ON stint.state_config FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('stint.state_config', '');

CREATE VIEW stint.states AS
SELECT c.relation, c.engine, c.sequence, c.groups, c.deletes, c.fields, c.rowkind, c.tombstones, t.relowner::regrole AS owner, c.created_by, c.created_at
FROM stint.state_config c JOIN pg_catalog.pg_class t ON t.oid = c.relation;
COMMENT ON VIEW stint.states IS 'The state tables of this database and how their rows merge';
REVOKE ALL ON stint.states FROM PUBLIC;

CREATE FUNCTION stint.create_state(relation regclass, engine text, sequence text[] DEFAULT NULL, groups jsonb DEFAULT NULL, deletes text DEFAULT NULL,
                                   fields jsonb DEFAULT NULL, rowkind text DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'create_state_wrapper';
COMMENT ON FUNCTION stint.create_state(regclass, text, text[], jsonb, text, jsonb, text) IS
$$Declares an ordinary or partitioned table with a primary key as a state table; only its owner may.

relation  the table; not temporary, unlogged, a partition, inherited, or without an immediate primary key
engine    'deduplicate': the newest row replaces the whole row. 'first-row': the first row stays. 'aggregation': each column is merged by its function. 'partial-update': each row
          brings some columns; a null or a missing field leaves an ungrouped column as it is
sequence  deduplicate and aggregation: columns that say which row is newer, compared in order, null before everything; on a tie the later arrival wins. Null: the later arrival always wins
groups    partial-update: {"sequence columns": ["field", ...]}, several sequence columns parted by commas. A row that is not older than the group sets all its fields, also to null
          (a missing field is null); a row whose sequence columns are all null leaves the group alone. {"columns": {"fields": [...], "on_delete": "remove"}}: a delete that is not older
          than this group removes the row
deletes   what merge(kind => 'delete') does: 'remove' (default of deduplicate), 'retract' (default of aggregation and of groups where every field can be taken back: functions subtract
          the row, other fields of the groups it is not older than become null and the groups advance), 'ignore', or 'refuse' (default otherwise). Refused at once where a policy would
          reach a field that cannot be taken back
fields    aggregation and partial-update: {"column": "function"} or {"column": {"function": ..., "ignore_retract": true, "separator": ..., "distinct": true, "nested_key": [...],
          "nested_sequence": [...], "count_limit": n, "default": ...}}; "*" stands for all columns without a function. Functions: sum, product, count, max, min, first_value,
          first_non_null_value, last_value, last_non_null_value (default of aggregation), bool_and, bool_or, listagg, collect, merge_map, nested_update, hll_union. "default", with any
          engine, is what a null or missing value in a row stands for; {"null": "set"} has an ungrouped column of partial-update take an explicit null
rowkind   the field of the rows, a text column or none, that carries the kind of each row: +I and +U are upserts, -D a delete, -U a retraction

A table that remembers the sequences of deleted keys is made beside it, named <table>_tombstones, where the declaration needs one.
Errors: 42809 or 42P16 not a fit table, 42501 not its owner, 22023 unknown engine, policy, function or option, or options that contradict each other, 42703 unknown column,
42710 declared already.
Locks: SHARE ROW EXCLUSIVE on the table.$$;
REVOKE ALL ON FUNCTION stint.create_state(regclass, text, text[], jsonb, text, jsonb, text) FROM PUBLIC;

CREATE FUNCTION stint.alter_state(relation regclass, sequence text[] DEFAULT NULL, groups jsonb DEFAULT NULL, deletes text DEFAULT NULL, fields jsonb DEFAULT NULL,
                                  rowkind text DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp AS 'MODULE_PATHNAME', 'alter_state_wrapper';
COMMENT ON FUNCTION stint.alter_state(regclass, text[], jsonb, text, jsonb, text) IS
$$Changes the declaration of a state table; only its owner may. What is null stays as it is; '{}' and '' take a setting away. Merges from then on follow the new declaration.

relation  the table
sequence, groups, deletes, fields, rowkind  as for create_state; fields are replaced as a whole

While the table holds rows, its sequence, its groups, the function of a column, and whether sequences of deleted keys are remembered cannot change: the stored values would mean something else.
Errors: 42704 not a state table, 42501 not its owner, 55000 a change that its rows do not allow, and those of create_state. Locks: SHARE ROW EXCLUSIVE on the table.$$;
REVOKE ALL ON FUNCTION stint.alter_state(regclass, text[], jsonb, text, jsonb, text) FROM PUBLIC;

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
kind      'upsert', 'delete' or 'retract' (an older image is withdrawn, as -U in a changelog: functions take it back; for deduplicate the same as 'delete', and nothing for partial-update
          with deletes => 'remove' and no functions). Where the table is declared with rowkind, it is the kind of rows that name none

inserted, updated, deleted, unchanged  keys; a key whose row would read the same is not written. Where a batch goes in rounds (several kinds, or a function that cannot be folded), a key
          counts once in each round
late      rows that changed nothing because newer ones were there already

It runs as the table's owner; the caller needs INSERT and UPDATE on the table, for deletes DELETE, where they change fields UPDATE as well, and where they subtract from sums to come INSERT.
Errors: 42704 not a state table, 42501 a right is missing, 22023 rows or kind unfit, 42703 no such column, 23502 a key is missing, 428C9 a column PostgreSQL fills, 54000 too many
rows, 55000 deletes are refused, and what the table's own types and constraints raise. Under REPEATABLE READ and SERIALIZABLE a concurrent merge of the same key is 40001.
Locks: rows in key order, then tombstones in key order. Deletes judged by sequence go one after the other per table, and one of a key that has no row first takes SHARE ROW EXCLUSIVE
on the table.$$;
REVOKE ALL ON FUNCTION stint.merge(regclass, jsonb, text) FROM PUBLIC;
