"""Bad input to create_state and merge: an error that names the thing, a hint, and nothing changed."""

import json

import pytest

SETUP = """
    CREATE TABLE goods (id int PRIMARY KEY, name text, price numeric, at timestamptz, twice int GENERATED ALWAYS AS (id * 2) STORED, shape point);
    CREATE TABLE nokey (id int);
    CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE);
    CREATE TABLE always (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
    CREATE UNLOGGED TABLE light (id int PRIMARY KEY);
    CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
    CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY LIST (id); CREATE TABLE part PARTITION OF parted DEFAULT;
    CREATE VIEW seen AS SELECT 1 AS id;
    CREATE TABLE guarded (id int PRIMARY KEY); ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
    CREATE TABLE plain (id int PRIMARY KEY);
    CREATE TABLE taken (id int PRIMARY KEY, at int); CREATE TABLE taken_tombstones ();
"""

# call, SQLSTATE, part of the message, part of the hint
DECLARATIONS = [
    ("NULL, 'deduplicate'", "22004", '"relation" must not be null', "Name the table"),
    ("'goods', NULL", "22004", '"engine" must not be null', "deduplicate"),
    ("999999::oid::regclass, 'deduplicate'", "42P01", "999999", "name"),
    ("'seen', 'deduplicate'", "42809", "public.seen cannot be a state table: it is a view", "table"),
    ("'nokey', 'deduplicate'", "42P16", "public.nokey cannot be a state table: it has no primary key", "PRIMARY KEY"),
    ("'deferred', 'deduplicate'", "42P16", "deferrable", "NOT DEFERRABLE"),
    ("'always', 'deduplicate'", "42P16", 'key column "id"', "GENERATED"),
    ("'light', 'deduplicate'", "42809", "unlogged", "SET LOGGED"),
    ("'short', 'deduplicate'", "42809", "temporary", "TEMPORARY"),
    ("'parent', 'deduplicate'", "42809", "inheritance", "partitioned"),
    ("'child', 'deduplicate'", "42809", "inheritance", "partitioned"),
    ("'part', 'deduplicate'", "42809", "partition", "root"),
    ("'pg_class', 'deduplicate'", "42501", "pg_catalog.pg_class", "own"),
    ("'stint.state_config', 'deduplicate'", "42501", "stint.state_config", "own"),
    ("'guarded', 'deduplicate'", "42809", "row-level security", "DISABLE"),
    ("'taken', 'deduplicate', sequence => '{at}'", "42710", "public.taken_tombstones", "Rename"),
    ("'goods', 'deduplicat'", "22023", 'engine "deduplicat"', '"deduplicate"'),
    ("'goods', ''", "22023", 'engine ""', "deduplicate"),
    ("'goods', 'deduplicate', sequence => '{att}'", "42703", 'column "att" of public.goods', "Did you mean"),
    ("'goods', 'deduplicate', sequence => ARRAY[NULL]", "22004", '"sequence"', "null"),
    ("'goods', 'deduplicate', sequence => '{id}'", "22023", '"id"', "key"),
    ("'goods', 'deduplicate', sequence => '{shape}'", "22023", '"shape"', "sorted"),
    ("'goods', 'deduplicate', sequence => '{twice}'", "22023", '"twice"', "generated"),
    ("'goods', 'deduplicate', deletes => 'keep'", "22023", 'deletes policy "keep"', "remove"),
    ("'goods', 'deduplicate', groups => '{\"at\": [\"name\"]}'", "22023", "takes no groups", "sequence"),
    ("'goods', 'partial-update', sequence => '{at}'", "22023", "takes no sequence", "groups"),
    ("'goods', 'partial-update', groups => '[]'", "22023", "groups", "Write"),
    ("'goods', 'partial-update', groups => '{\"at\": [\"nam\"]}'", "42703", 'column "nam"', '"name"'),
    ("'goods', 'partial-update', groups => '{\"at\": {\"fields\": [\"name\"], \"on_delte\": \"remove\"}}'", "22023", '"on_delte"', '"on_delete"'),
    ("'goods', 'first-row', sequence => '{at}'", "22023", "takes no sequence", "aggregation"),
    ("'goods', 'first-row', deletes => 'remove'", "22023", "keeps the first row", "ignore"),
    ("'goods', 'aggregation', fields => '[]'", "22023", "fields is not a JSON object", "Write"),
    ("'goods', 'aggregation', fields => '{\"prise\": \"sum\"}'", "42703", 'column "prise"', '"price"'),
    ("'goods', 'aggregation', fields => '{\"price\": \"avg\"}'", "22023", 'function "avg"', "The functions are sum"),
    ("'goods', 'aggregation', fields => '{\"name\": \"sum\"}'", "22023", 'column "name" has type text', "number"),
    ("'goods', 'aggregation', fields => '{\"shape\": \"max\"}'", "22023", 'column "shape" has type point', "order"),
    ("'goods', 'aggregation', fields => '{\"price\": {\"function\": \"sum\", \"distinct\": true}}'", "22023", "sum does not take", "distinct is for"),
    ("'goods', 'aggregation', fields => '{\"price\": {\"default\": \"dear\"}}'", "22P02", '"dear"', "default in fields"),
    ("'goods', 'aggregation', fields => '{\"price\": \"max\"}', deletes => 'remove'", "22023", 'max of column "price"', "ignore_retract"),
    ("'goods', 'deduplicate', fields => '{\"price\": \"sum\"}'", "22023", "keeps whole rows", "aggregation"),
    ("'goods', 'deduplicate', rowkind => ''", "22023", "rowkind is empty", "+I"),
    ("'goods', 'deduplicate', rowkind => 'price'", "22023", 'column "price" cannot hold the kind', "text column"),
    ("'goods', 'partial-update', groups => '{\"at\": [\"name\"]}', deletes => 'remove'", "22023", "cannot be combined", "on_delete"),
]

OBJECT = {"id": 1, "name": "n"}
MERGES = [
    (None, "upsert", "22004", '"rows" must not be null', "array"),
    ([OBJECT], None, "22004", '"kind" must not be null', "upsert"),
    ([OBJECT], "upset", "22023", 'merge kind "upset"', '"upsert"'),
    (OBJECT, "upsert", "22023", "rows for public.goods is a JSON object", "array"),
    (7, "upsert", "22023", "rows for public.goods is a JSON number", "array"),
    ([OBJECT, 3], "upsert", "22023", "row 2 for public.goods is a JSON number", "object"),
    ([None], "upsert", "22023", "row 1 for public.goods is a JSON null", "object"),
    ([[OBJECT]], "upsert", "22023", "row 1 for public.goods is a JSON array", "object"),
    ([OBJECT, {"id": 2, "nmae": 1}], "upsert", "42703", 'column "nmae" of public.goods, named in row 2', '"name"'),
    ([{"id": 1, "é\"'": 1}], "upsert", "42703", "é\"'", "columns are"),
    ([OBJECT, {"name": "x"}], "upsert", "23502", 'row 2 for public.goods has no value for key column "id"', "id"),
    ([OBJECT, {"id": None}], "upsert", "23502", 'row 2 for public.goods has no value for key column "id"', "id"),
    ([{"name": "x"}], "delete", "23502", 'row 1 for public.goods has no value for key column "id"', "id"),
    ([{"id": None}], "delete", "23502", "row 1", "id"),
    ([OBJECT, {"id": 2, "twice": 4}], "upsert", "428C9", 'row 2 names column "twice"', "Leave"),
    ([{"id": n} for n in range(10_001)], "upsert", "54000", "10001 elements", "stint.max_batch"),
    ([OBJECT, {"id": 2, "price": "abc"}], "upsert", "22P02", "abc", "type reads"),
    ([OBJECT, {"id": 2, "at": "infinityy"}], "upsert", "22007", "infinityy", "type reads"),
    ([OBJECT, {"id": 99999999999}], "upsert", "22003", "99999999999", "type reads"),
]


def refused(conn, call, sqlstate, message, hint):
    with pytest.raises(Exception) as error:
        conn.execute(*call)
    assert error.value.sqlstate == sqlstate, error.value
    assert message in error.value.diag.message_primary
    if hint is not None:
        assert hint in error.value.diag.message_hint


def test_a_declaration_that_cannot_work_is_refused(conn):
    conn.execute(SETUP + "CREATE TEMP TABLE short (id int PRIMARY KEY)")
    for arguments, sqlstate, message, hint in DECLARATIONS:
        refused(conn, (f"SELECT stint.create_state({arguments})",), sqlstate, message, hint)
    assert conn.execute("SELECT count(*) FROM stint.states").fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM pg_class WHERE relname LIKE '%tombstones'").fetchone() == (1,)


def test_rows_that_do_not_fit_are_refused_whole(conn):
    conn.execute(SETUP + "SELECT stint.create_state('goods', 'deduplicate', sequence => '{at}')")
    for rows, kind, sqlstate, message, hint in MERGES:
        text = None if rows is None else json.dumps(rows)
        refused(conn, ("SELECT * FROM stint.merge('goods', %s::jsonb, %s)", (text, kind)), sqlstate, message, hint)
    refused(conn, ("SELECT * FROM stint.merge('plain', '[]')",), "42704", "public.plain is not a state table", "create_state")
    refused(conn, ("SELECT stint.drop_state('plain')",), "42704", "public.plain is not a state table", "create_state")
    refused(conn, ("SELECT stint.drop_state(NULL)",), "22004", '"relation" must not be null', "Name")
    refused(conn, ("SELECT * FROM stint.merge(NULL, '[]')",), "22004", '"relation" must not be null', "Name")
    assert conn.execute("SELECT count(*) FROM goods").fetchone() == (0,)
    assert conn.execute("SELECT * FROM stint.merge('goods', '[]')").fetchone() == (0, 0, 0, 0, 0)
