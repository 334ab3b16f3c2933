"""Merges of whole rows and of sequence groups: batches equal their rows one by one, odd tables and values, rights."""

import itertools
import json
import random

import pytest


def merge(conn, table, rows, kind="upsert"):
    """(inserted, updated, deleted, unchanged, late)"""
    return conn.execute("SELECT * FROM stint.merge(%s::regclass, %s, %s)", (table, json.dumps(rows), kind)).fetchone()


def rows_of(conn, table):
    return sorted((list(row) for row in conn.execute(f"SELECT * FROM {table}").fetchall()), key=repr)


DECLARATIONS = {
    "newest arrival": ("deduplicate", None, None, None),
    "sequence": ("deduplicate", ["s"], None, None),
    "two sequences": ("deduplicate", ["s", "r"], None, None),
    "sequence, deletes ignored": ("deduplicate", ["s"], None, "ignore"),
    "partial": ("partial-update", None, None, "remove"),
    "partial, deletes ignored": ("partial-update", None, None, "ignore"),
    "group": ("partial-update", None, {"s": ["a", "b"]}, None),
    "two groups": ("partial-update", None, {"s": ["a"], "r": ["b"]}, None),
    "wide group": ("partial-update", None, {"s,r": ["a", "b"]}, None),
    "removing group": ("partial-update", None, {"s": {"fields": ["a", "b"], "on_delete": "remove"}}, None),
    "removing and other group": ("partial-update", None, {"s": {"fields": ["a"], "on_delete": "remove"}, "r": ["b"]}, None),
}


def random_event(rng):
    row = {"k": rng.choice([1, "1.0", 2, "2.00"]), "l": rng.choice(["x", "é\"'"])}
    for name, values in (
        ("s", [None, 1, 2, 3, "3.0", 4]),
        ("r", [None, 1, 2, 3]),
        ("a", [None, 1, 2]),
        ("b", [None, "1.10", "1.1", "u"]),
        ("c", [None, [1, 2], [3]]),
        ("d", [None, {"n": 1.10}, {"n": 1.1}, 12345678901234567890123]),
    ):
        if rng.random() < 0.8:
            row[name] = rng.choice(values)
    return rng.choices(["upsert", "delete", "retract"], [6, 2, 1])[0], row


@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_one_by_one_equals_any_batching(conn, declaration):
    engine, sequence, groups, deletes = DECLARATIONS[declaration]
    for table in "single", "batched":
        conn.execute(
            f"CREATE TABLE {table} (k numeric, l text, s numeric, r int, a int, b text, c int[], d jsonb, PRIMARY KEY (k, l))"
        )
        conn.execute(
            "SELECT stint.create_state(%s::regclass, %s, sequence => %s, groups => %s, deletes => %s)",
            (table, engine, sequence, json.dumps(groups) if groups else None, deletes),
        )

    def everything(table):
        rows = conn.execute(f"SELECT t::text FROM {table} t ORDER BY 1").fetchall()
        if conn.execute("SELECT to_regclass(%s)", (f"{table}_tombstones",)).fetchone()[0]:
            return rows, set(conn.execute(f"SELECT * FROM {table}_tombstones").fetchall())
        return rows

    for seed in range(60):
        rng = random.Random(f"{declaration} {seed}")
        events = [random_event(rng) for _ in range(rng.randint(1, 25))]
        conn.execute("BEGIN")
        totals = [0, 0]
        for kind, row in events:
            totals[0] += merge(conn, "single", [row], kind)[4]
        for kind, run in itertools.groupby(events, key=lambda event: event[0]):
            run = [row for _, row in run]
            while run:
                size = rng.randint(1, len(run))
                totals[1] += merge(conn, "batched", run[:size], kind)[4]
                run = run[size:]
        assert everything("single") == everything("batched"), (seed, events)
        if deletes == "ignore" or groups is None:
            assert totals[0] == totals[1], (seed, events)
        conn.execute("ROLLBACK")


def test_a_merge_that_changes_nothing_writes_nothing(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, name text, price numeric)")
    conn.execute("SELECT stint.create_state('goods', 'partial-update')")
    assert merge(conn, "goods", [{"id": 1, "name": "nut", "price": 1.50}, {"id": 2}]) == (2, 0, 0, 0, 0)
    before = conn.execute("SELECT id, ctid, xmin::text FROM goods").fetchall()
    assert merge(conn, "goods", [{"id": 1, "price": 1.5}, {"id": 2, "name": None}]) == (0, 0, 0, 2, 0)
    assert conn.execute("SELECT id, ctid, xmin::text FROM goods").fetchall() == before
    # Equal, yet it reads differently.
    assert conn.execute("""SELECT * FROM stint.merge('goods', '[{"id": 1, "price": 1.500}]')""").fetchone() == (0, 1, 0, 0, 0)


def test_values_arrive_exactly(conn):
    conn.execute("CREATE TABLE exact (id bigint PRIMARY KEY, n numeric, j jsonb, t timestamptz, b bytea, f float8, e text[])")
    conn.execute("SELECT stint.create_state('exact', 'deduplicate')")
    text = '[{"id": 9007199254740993, "n": 1.10, "j": {"x": 1e400, "y": 123456789012345678901234567890.10}, "t": "2024-02-29 12:00:00.000001+00", "b": "\\\\x00ff", "f": 0.1, "e": ["a", null]}]'
    conn.execute("SELECT * FROM stint.merge('exact', %s)", (text,))
    assert conn.execute("SELECT exact::text FROM exact").fetchone()[0] == (
        '(9007199254740993,1.10,"{""x"": ' + "1" + "0" * 400 + ', ""y"": 123456789012345678901234567890.10}",'
        '"2024-02-29 12:00:00.000001+00","\\\\x00ff",0.1,"{a,NULL}")'
    )


def test_counts_tell_what_became_of_keys_and_rows(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, at int, name text)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    rows = lambda *triples: [{"id": i, "at": at, "name": name} for i, at, name in triples]
    assert merge(conn, "goods", rows((1, 5, "a"), (2, 5, "a"), (2, 4, "b"), (3, 1, "a"))) == (3, 0, 0, 0, 1)
    assert merge(conn, "goods", rows((1, 4, "x"), (2, 6, "c"), (3, 1, "a"), (4, 1, "n"))) == (1, 1, 0, 1, 1)
    assert merge(conn, "goods", rows((1, 4, None), (2, 6, None), (9, 3, None)), "delete") == (0, 0, 1, 1, 1)
    assert merge(conn, "goods", rows((2, 5, "z"), (9, 2, "z"), (9, 3, "y"))) == (1, 0, 0, 0, 2)
    assert rows_of(conn, "goods") == [[1, 5, "a"], [3, 1, "a"], [4, 1, "n"], [9, 3, "y"]]


def test_odd_tables_merge_too(conn):
    conn.execute('''
        CREATE SCHEMA "Odd ""schema";
        CREATE TYPE mood AS ENUM ('bad', 'good');
        CREATE DOMAIN positive AS int CHECK (VALUE > 0);
        CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
        CREATE TABLE "Odd ""schema"."T 'é"" %s" (
            "a,b" text COLLATE ci, "c'd" int, serial int GENERATED ALWAYS AS IDENTITY, double int GENERATED ALWAYS AS ("c'd" * 2) STORED,
            "mood ""x" mood, "ord" positive, gone int, at timestamptz, PRIMARY KEY ("c'd", "a,b"));
    ''')
    table = '"Odd ""schema"."T \'é"" %s"'
    conn.execute(
        "SELECT stint.create_state(%s::regclass, 'partial-update', groups => %s)",
        (table, json.dumps({'mood "x,at': {"fields": ["ord"], "on_delete": "remove"}})),
    )
    row = lambda key, mood, value: {"a,b": key, "c'd": 1, 'mood "x': mood, "ord": value}
    assert merge(conn, table, [row("k", "bad", 1), row("K", "good", 2), row("k", "bad", 3)]) == (1, 0, 0, 0, 1)
    assert merge(conn, table, [row("k", "good", 5) | {"gone": 1}, row("z", "bad", 1) | {"c'd": 2}]) == (1, 1, 0, 0, 0)
    conn.execute(f"ALTER TABLE {table} DROP COLUMN gone, ADD COLUMN extra text")
    assert merge(conn, table, [row("k", None, None) | {"extra": "e"}]) == (0, 1, 0, 0, 0)
    assert merge(conn, table, [row("k", "good", None)], "delete") == (0, 0, 1, 0, 0)
    assert merge(conn, table, [row("K", "bad", 9)]) == (0, 0, 0, 0, 1)
    assert conn.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)


def test_user_code_on_the_table_runs_as_its_owner(conn):
    conn.execute("""
        CREATE ROLE state_owner; CREATE ROLE state_writer;
        GRANT USAGE ON SCHEMA stint TO state_owner, state_writer; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO state_owner, state_writer;
        GRANT CREATE ON SCHEMA public TO state_owner;
        SET ROLE state_owner;
        CREATE TABLE owned (id int PRIMARY KEY, who text, seq int);
        CREATE FUNCTION whoami() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.who := current_user; RETURN NEW; END $$;
        CREATE TRIGGER t BEFORE INSERT ON owned FOR EACH ROW EXECUTE FUNCTION whoami();
        SELECT stint.create_state('owned', 'deduplicate', sequence => ARRAY['seq']);
        RESET ROLE;
    """)
    try:
        conn.execute("SET ROLE state_writer")
        for grant, kind in (("INSERT", "upsert"), ("UPDATE", "upsert"), ("DELETE", "delete")):
            with pytest.raises(Exception, match=f"{grant} on public.owned is missing") as error:
                merge(conn, "owned", [{"id": 1, "seq": 1}], kind)
            assert error.value.sqlstate == "42501" and error.value.diag.message_hint
            conn.execute(f"SET ROLE state_owner; GRANT {grant} ON owned TO state_writer; SET ROLE state_writer")
        assert merge(conn, "owned", [{"id": 1, "seq": 1}]) == (1, 0, 0, 0, 0)
        assert merge(conn, "owned", [{"id": 1, "seq": 2}], "delete") == (0, 0, 1, 0, 0)
        with pytest.raises(Exception, match="must be owner of table public.owned"):
            conn.execute("SELECT stint.drop_state('owned')")
        conn.execute("RESET ROLE; SET ROLE state_owner")
        assert merge(conn, "owned", [{"id": 2, "seq": 1}]) == (1, 0, 0, 0, 0)
        assert conn.execute("SELECT who FROM owned").fetchone() == ("state_owner",)
    finally:
        conn.execute("RESET ROLE; DROP OWNED BY state_owner CASCADE; DROP OWNED BY state_writer CASCADE; DROP ROLE state_owner, state_writer")


def test_a_declaration_follows_its_table(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, at int, name text)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    with pytest.raises(Exception, match="already exists"):
        conn.execute("SELECT stint.create_state('goods', 'partial-update')")
    merge(conn, "goods", [{"id": 1, "at": 1}])
    conn.execute("ALTER TABLE goods RENAME COLUMN name TO label; CREATE SCHEMA shop; ALTER TABLE goods SET SCHEMA shop; ALTER SCHEMA shop RENAME TO store")
    merge(conn, "store.goods", [{"id": 1, "at": 2, "label": "x"}])
    conn.execute("ALTER TABLE store.goods ALTER at TYPE numeric")
    assert merge(conn, "store.goods", [{"id": 1, "at": 2.5}]) == (0, 1, 0, 0, 0)
    conn.execute("SELECT stint.drop_state('store.goods')")
    with pytest.raises(Exception, match="store.goods is not a state table"):
        merge(conn, "store.goods", [{"id": 1}])
    conn.execute("SELECT stint.create_state('store.goods', 'partial-update')")
    assert merge(conn, "store.goods", [{"id": 1, "label": "y"}]) == (0, 1, 0, 0, 0)
    conn.execute("SELECT stint.drop_state('store.goods'); SELECT stint.create_state('store.goods', 'deduplicate', sequence => ARRAY['at'])")
    conn.execute("ALTER TABLE store.goods DROP COLUMN at")
    with pytest.raises(Exception, match='column "at" of store.goods does not exist'):
        merge(conn, "store.goods", [{"id": 1}])
    conn.execute("ALTER TABLE store.goods DROP CONSTRAINT goods_pkey; SELECT stint.drop_state('store.goods')")
    conn.execute("ALTER TABLE store.goods ADD PRIMARY KEY (id); SELECT stint.create_state('store.goods', 'deduplicate', sequence => '{label}')")
    conn.execute("DROP TABLE store.goods CASCADE")
    assert conn.execute("SELECT to_regclass('store.goods_tombstones')").fetchone() == (None,)
    assert conn.execute("SELECT count(*) FROM stint.states").fetchone() == (0,)
