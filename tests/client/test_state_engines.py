"""Aggregate functions, retraction, defaults and row kinds of the engines; batches equal their rows one by one."""

import itertools
import json
import random
import threading

import pytest

TABLE = """
CREATE TABLE {name} (k numeric, l text, s int, r int, i int, n numeric(12,2), m numeric, f float8, b bool, t text, v varchar(200), a int[], e numeric[],
                     j jsonb, rows jsonb, span interval, PRIMARY KEY (k, l))
"""
COLUMNS = ["s", "r", "i", "n", "m", "f", "b", "t", "v", "a", "e", "j", "rows", "span"]


def declare(conn, table, engine, **told):
    told = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in told.items() if value is not None}
    named = "".join(f", {name} => %({name})s" for name in told)
    conn.execute(f"SELECT stint.create_state(%(table)s::regclass, %(engine)s{named})", told | {"table": table, "engine": engine})


def merge(conn, table, rows, kind="upsert"):
    return conn.execute("SELECT * FROM stint.merge(%s::regclass, %s, %s)", (table, json.dumps(rows), kind)).fetchone()


def everything(conn, table):
    rows = conn.execute(f"SELECT t::text FROM {table} t ORDER BY 1").fetchall()
    if conn.execute("SELECT to_regclass(%s)", (f"{table}_tombstones",)).fetchone()[0]:
        return rows, set(conn.execute(f"SELECT * FROM {table}_tombstones").fetchall())
    return rows


# function and options, type, the values that arrive, what is stored in the end
FUNCTIONS = [
    ("sum", "int", [1, None, 2, -5], -2),
    ("sum", "numeric(10,2)", ["1.10", "2.2", None], "3.30"),
    ("sum", "interval", ["1 day", "1 hour"], "1 day 01:00:00"),
    ("sum", "float8", [1e16, 1, 1], "1e+16"),
    ("product", "int", [2, None, 3], 6),
    ("product", "numeric", ["1.10", "1.10", "3"], "3.6300"),
    ("product", "numeric(10,2)", ["0.15", "0.15", "10"], "0.20"),
    ("count", "bigint", [5, None, 5, 7], 3),
    ("count", "bigint", [None], 0),
    ("max", "numeric", ["1.0", None, "1.00", "0.5"], "1.0"),
    ("max", "text", ["a", "c", "b"], "c"),
    ("max", "int[]", [[1, 2], [1, 3], [0, 9]], "{1,3}"),
    ("min", "timestamptz", ["2024-01-02T00:00:00Z", "2024-01-01T00:00:00Z", None], "2024-01-01 00:00:00+00"),
    ("first_value", "int", [None, 1, 2], None),
    ("first_non_null_value", "int", [None, 1, 2], 1),
    ("last_value", "int", [1, 2, None], None),
    ("last_non_null_value", "jsonb", [{"x": 1}, {"x": 1.10}, None], '{"x": 1.1}'),
    ("bool_and", "bool", [True, None, True], "true"),
    ("bool_and", "bool", [True, False, True], "false"),
    ("bool_or", "bool", [False, None, True], "true"),
    ("bool_or", "bool", [None, None], None),
    ("listagg", "text", ["a", None, " ", "b", "a"], "a,b,a"),
    ({"function": "listagg", "separator": "'\\"}, "text", ["a", "b"], "a'\\b"),
    ({"function": "listagg", "distinct": True, "separator": ";"}, "text", ["a;b", "b;c;;c", None, "a"], "a;b;c"),
    ("collect", "int[]", [[3, 1], None, [], [None, 1], [[2, 2], [4, 4]]], "{3,1,NULL,1,2,2,4,4}"),
    ("collect", "int[]", [None, []], "{}"),
    ({"function": "collect", "distinct": True}, "numeric[]", [["1.0", "2"], ["1.00", None, "3"], None, [None, "2.0"]], "{1.0,2,NULL,3}"),
    ("merge_map", "jsonb", [{"a": 1, "b": 1}, None, {"b": {"c": 2.50}}, {}], '{"a": 1, "b": {"c": 2.5}}'),
    ("nested_update", "jsonb", [[{"x": 1}], None, [{"x": 1}, None], [{"y": 2}]], '[{"x": 1}, {"x": 1}, {"y": 2}]'),
    ({"function": "nested_update", "count_limit": 2}, "jsonb", [[{"x": 1}], [{"x": 2}, {"x": 3}], [{"x": 4}]], '[{"x": 1}, {"x": 2}]'),
    (
        {"function": "nested_update", "nested_key": ["id", "it's"]},
        "jsonb",
        [[{"id": 1, "it's": "a", "v": 1}, {"id": 2, "v": 1}], [{"id": 2, "v": 2}, {"id": 3}], [{"id": 1.0, "it's": "a", "v": 9}]],
        '[{"v": 9, "id": 1.0, "it\'s": "a"}, {"v": 2, "id": 2}, {"id": 3}]',
    ),
    (
        {"function": "nested_update", "nested_key": ["id"], "nested_sequence": ["at"]},
        "jsonb",
        [[{"id": 1, "at": 5, "v": "new"}], [{"id": 1, "at": 4, "v": "old"}, {"id": 2}], [{"id": 1, "at": 5, "v": "tie"}], [{"id": 1, "v": "none"}]],
        '[{"v": "tie", "at": 5, "id": 1}, {"id": 2}]',
    ),
    (
        {"function": "nested_update", "nested_key": ["id"], "count_limit": 2},
        "jsonb",
        [[{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 3, "v": 1}, {"id": 1, "v": 1}]],
        '[{"v": 1, "id": 1}, {"id": 2}]',
    ),
]


@pytest.mark.parametrize("engine", ["aggregation", "partial-update"])
def test_each_function_gives_its_value_in_every_split(conn, engine):
    conn.execute("SET timezone = 'UTC'")
    for n, (function, kind, values, expected) in enumerate(FUNCTIONS):
        conn.execute(f"CREATE TABLE f{n} (id int PRIMARY KEY, x {kind})")
        declare(conn, f"f{n}", engine, fields={"x": function})
        key = itertools.count(1)
        for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, len(values)), size) for size in range(len(values))):
            edges = [0, *cuts, len(values)]
            number = next(key)
            for start, end in zip(edges, edges[1:]):
                merge(conn, f"f{n}", [{"id": number, "x": value} for value in values[start:end]])
        answers = {row[0] for row in conn.execute(f"SELECT x::text FROM f{n}").fetchall()}
        assert answers == {None if expected is None else str(expected)}, (function, kind)


# Declarations over the columns of TABLE, each with whatever it can hold.
EACH = {
    "i": "sum",
    "n": "max",
    "m": "min",
    "f": "last_value",
    "b": "bool_or",
    "t": "listagg",
    "v": {"function": "listagg", "distinct": True, "separator": "-"},
    "a": "collect",
    "e": {"function": "collect", "distinct": True},
    "j": "merge_map",
    "rows": {"function": "nested_update", "nested_key": ["id"]},
    "span": "first_value",
}
FOLDED = {name: told for name, told in EACH.items() if name != "v"}
RETRACTABLE = {
    "i": "sum",
    "n": "sum",
    "m": "count",
    "a": "collect",
    "span": "sum",
    "f": "last_value",
    "rows": "nested_update",
    "j": {"function": "merge_map", "ignore_retract": True},
}
COMMUTING = {"i": "sum", "n": "sum", "m": "max", "f": "min", "b": "bool_and"}
DECLARATIONS = {
    "first row": dict(engine="first-row", deletes="ignore"),
    "aggregation": dict(engine="aggregation", fields=EACH, deletes="ignore"),
    "aggregation, folded": dict(engine="aggregation", fields=FOLDED, deletes="ignore"),
    "aggregation by default": dict(engine="aggregation"),
    "aggregation, retracted": dict(engine="aggregation", fields=RETRACTABLE),
    "aggregation, removed": dict(engine="aggregation", fields=RETRACTABLE, deletes="remove"),
    "aggregation, ordered": dict(engine="aggregation", sequence=["s"], fields=EACH, deletes="ignore"),
    "aggregation, ordered and folded": dict(engine="aggregation", sequence=["s", "r"], fields=COMMUTING | {"*": "last_value"}, deletes="ignore"),
    "aggregation, ordered and retracted": dict(engine="aggregation", sequence=["s"], fields=RETRACTABLE),
    "aggregation, ordered and removed": dict(engine="aggregation", sequence=["s"], fields=RETRACTABLE, deletes="remove"),
    "aggregation, ordered, nothing to subtract": dict(engine="aggregation", sequence=["s"], fields={"*": "last_value"}),
    "partial, functions outside groups": dict(engine="partial-update", fields=RETRACTABLE, deletes="retract"),
    "partial, functions and removal": dict(engine="partial-update", fields=RETRACTABLE, deletes="remove"),
    "groups with functions": dict(
        engine="partial-update", groups={"s": ["i", "n", "t", "a"], "r": ["f", "b", "j"]}, fields=EACH | {"n": "first_value", "e": "collect"}, deletes="ignore"
    ),
    "groups, folded": dict(engine="partial-update", groups={"s": ["i", "n", "t"], "r": ["m", "f", "b"]}, fields=COMMUTING | {"a": "collect"}, deletes="ignore"),
    "groups, retracted": dict(engine="partial-update", groups={"s": ["i", "a", "t"], "r": ["m", "f"]}, fields=RETRACTABLE),
    "groups, retracted in rounds": dict(
        engine="partial-update", groups={"s": ["i", "a", "t"], "r": ["m", "f"]}, fields=RETRACTABLE | {"f": "last_non_null_value"}
    ),
    "groups, removing": dict(
        engine="partial-update", groups={"s": {"fields": ["i", "a", "t"], "on_delete": "remove"}, "r": ["m", "f"]}, fields=RETRACTABLE
    ),
    "groups, nothing to subtract": dict(
        engine="partial-update", groups={"s": ["i", "t"], "r": ["m", "f"]}, fields={"f": "last_non_null_value", "t": "last_value"}
    ),
    "nulls that are set": dict(engine="partial-update", groups={"s": ["i"]}, fields={"t": {"null": "set"}, "j": {"null": "set"}, "n": "sum"}, deletes="ignore"),
    "defaults": dict(
        engine="partial-update", groups={"s": ["i", "t"]}, fields={"t": {"default": "it's"}, "s": {"default": 2}, "i": {"function": "sum", "default": 1}}
    ),
}


def random_row(rng):
    row = {"k": rng.choice([1, "1.0", 2]), "l": rng.choice(["x", "é\"'"])}
    for name, values in (
        ("s", [None, 1, 2, 3, 4]),
        ("r", [None, 1, 2, 3]),
        ("i", [None, 1, 2, -3]),
        ("n", [None, "1.10", "1.1", "2"]),
        ("m", [None, "1.0", "1.00", "2"]),
        ("f", [None, 0.1, 0.2, 0.3]),
        ("b", [None, True, False]),
        ("t", [None, "", "a", "b,c", "A"]),
        ("v", [None, "a-b", "b", "-", "c-c"]),
        ("a", [None, [], [1], [2, 1, None]]),
        ("e", [None, ["1.0"], ["1.00", "2"], [None]]),
        ("j", [None, {"a": 1}, {"a": {"b": 1.50}, "c": None}, {}]),
        ("rows", [None, [], [{"id": 1, "v": 1}], [{"id": 1, "v": 2}, {"id": 2}, None], [{"id": 1.0}]]),
        ("span", [None, "1 day", "1 mon -3 h"]),
    ):
        if rng.random() < 0.8:
            row[name] = rng.choice(values)
    return row | {"op": rng.choices(["+I", "+U", "-D", "-U"], [4, 2, 2, 2])[0]}


@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_one_by_one_equals_any_batching(conn, declaration):
    told = DECLARATIONS[declaration]
    for table in "single", "batched":
        conn.execute(TABLE.format(name=table))
        declare(conn, table, rowkind="op", **told)
    refuses = conn.execute("SELECT deletes = 'refuse' FROM stint.states LIMIT 1").fetchone()[0]
    changed = 0
    for seed in range(25):
        rng = random.Random(f"{declaration} {seed}")
        events = [random_row(rng) for _ in range(rng.randint(2, 25))]
        if refuses:
            events = [event | {"op": "+I"} for event in events]
        with conn.transaction(force_rollback=True):
            for event in events:
                merge(conn, "single", [event])
            rest = list(events)
            while rest:
                size = rng.randint(1, len(rest))
                merge(conn, "batched", rest[:size])
                rest = rest[size:]
            single = everything(conn, "single")
            assert single == everything(conn, "batched"), (seed, events)
            changed += single != []
    assert changed > 15


@pytest.mark.parametrize(
    "told",
    [
        dict(engine="aggregation", fields=COMMUTING | {"*": "max", "j": "max", "rows": "max", "t": "max", "v": "max"}, deletes="ignore"),
        dict(engine="aggregation", fields={"i": "sum", "n": "sum", "m": "count", "span": "sum", "*": {"function": "max", "ignore_retract": True}}),
        dict(engine="partial-update", groups={"s,r": ["i", "n", "t"]}, fields={"i": "sum", "n": {"function": "min", "ignore_retract": True}}, deletes="retract"),
        dict(engine="deduplicate", sequence=["s", "r"], deletes="ignore"),
    ],
    ids=["sums and extremes", "retracted sums", "ordered group", "newest row"],
)
def test_where_the_result_is_a_function_of_the_set_every_order_gives_the_same_row(conn, told):
    conn.execute(TABLE.format(name="shuffled"))
    declare(conn, "shuffled", rowkind="op", **told)
    for seed in range(25):
        rng = random.Random(seed)
        # Sequences differ, keys and values read the same wherever they are equal, so no tie is left to the order of arrival.
        events = [
            {"k": 1, "l": "x", "s": n, "r": n % 3, "i": rng.randint(-5, 5), "n": rng.choice(["1.10", "2.25"]), "m": rng.choice([None, "1", "2"]),
             "f": rng.choice([None, 0.5, 1.5]), "b": rng.choice([True, False, None]), "t": f"t{n}", "span": rng.choice(["1 day", "1 hour"]),
             "op": rng.choice(["+I", "+I", "-U"])}
            for n in range(1, rng.randint(2, 7))
        ]
        if told.get("groups"):
            # What a retraction empties is the newest image's; the sum is anyone's.
            events = [event | {"op": "+I"} for event in events]
        answers = set()
        for order in itertools.islice(itertools.permutations(events), 60):
            with conn.transaction(force_rollback=True):
                order = list(order)
                cut = rng.randint(0, len(order))
                for part in order[:cut], order[cut:]:
                    merge(conn, "shuffled", part)
                answers.add(repr(everything(conn, "shuffled")))
        assert len(answers) == 1, (seed, events, answers)


def test_an_explicit_null_can_be_told_from_a_missing_field(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, name text, price numeric, note text, seq int, stock int)")
    declare(conn, "goods", "partial-update", groups={"seq": {"fields": ["stock"], "on_delete": "remove"}},
            fields={"name": {"null": "set"}, "price": {"null": "set"}})
    whole = {"id": 1, "name": "nut", "price": "1.10", "note": "n", "seq": 1, "stock": 5}
    for rows, expected in [
        ([{"id": 1, "name": None}], (None, "1.10", "n")),
        ([{"id": 1}], ("nut", "1.10", "n")),
        ([{"id": 1, "note": None}], ("nut", "1.10", "n")),
        ([{"id": 1, "name": None}, {"id": 1, "price": None}], (None, None, "n")),
        ([{"id": 1, "name": None}, {"id": 1, "name": "bolt"}, {"id": 1}], ("bolt", "1.10", "n")),
        ([{"id": 1, "name": "bolt"}, {"id": 1, "name": None}, {"id": 1, "note": "m"}], (None, "1.10", "m")),
        ([{"id": 1, "seq": 0, "stock": 1, "name": None}], (None, "1.10", "n")),
    ]:
        for batches in [rows], [[row] for row in rows]:
            with conn.transaction(force_rollback=True):
                merge(conn, "goods", [whole, {"id": 2, "name": "other", "price": 2}])
                for batch in batches:
                    assert merge(conn, "goods", batch)[4] == 0
                assert conn.execute("SELECT name, price::text, note FROM goods WHERE id = 1").fetchone() == expected, batches
                assert conn.execute("SELECT name FROM goods WHERE id = 2").fetchone() == ("other",)
    for told, part in (
        (dict(engine="deduplicate", fields={"name": {"null": "set"}}), "ungrouped"),
        (dict(engine="partial-update", fields={"name": {"null": "set", "function": "last_value"}}), "ungrouped"),
        (dict(engine="partial-update", fields={"name": {"null": "keep"}}), 'neither "ignore" nor "set"'),
        (dict(engine="partial-update", fields={"*": {"null": "set"}}), "belong to a column"),
    ):
        conn.execute("DROP TABLE IF EXISTS other; CREATE TABLE other (id int PRIMARY KEY, name text)")
        with pytest.raises(Exception, match=part) as error:
            declare(conn, "other", **told)
        assert error.value.sqlstate == "22023" and error.value.diag.message_hint


def test_a_hot_key_is_one_statement(conn):
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, total bigint, top int, newest text, n bigint, seq int)")
    declare(conn, "hot", "aggregation", sequence=["seq"], fields={"total": "sum", "top": "max", "n": "count", "newest": "last_value"})
    rows = [{"id": 1, "total": n, "top": n % 7777, "newest": f"v{n}", "n": 1, "seq": n} for n in range(10_000)]
    conn.execute("CREATE TABLE fired (n int); CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.fired SELECT 1 WHERE EXISTS (SELECT FROM came); RETURN NULL; END $$")
    conn.execute("CREATE TRIGGER fire AFTER INSERT ON hot REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION fire()")
    random.Random(1).shuffle(rows)
    assert merge(conn, "hot", rows)[:4] == (1, 0, 0, 0)
    assert conn.execute("SELECT * FROM hot").fetchone() == (1, sum(range(10_000)), 7776, "v9999", 10_000, 9999)
    assert conn.execute("SELECT count(*) FROM fired").fetchone() == (1,)


def test_writers_of_one_key_lose_nothing_of_its_sums(conn, connect):
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, total bigint, n int, newest text, parts text, seq int)")
    declare(conn, "hot", "partial-update", groups={"seq": ["total", "newest", "parts"]}, rowkind="op", deletes="retract",
            fields={"total": "sum", "n": "count", "parts": {"function": "listagg", "ignore_retract": True}})
    writers, failed = 6, []
    plans = []
    for w in range(writers):
        rng = random.Random(w)
        plans.append([
            [{"id": rng.randint(1, 3), "total": rng.randint(1, 9), "n": 1, "newest": f"{w}.{b}", "parts": f"{w}.{b}.{i}", "seq": rng.randint(1, 10**6),
              "op": "-D" if b % 4 == 3 else "+I"} for i in range(rng.randint(1, 6))]
            for b in range(25)])

    def write(w):
        try:
            session = connect()
            for batch in plans[w]:
                merge(session, "hot", batch)
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=write, args=(w,)) for w in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    rows = [row for plan in plans for batch in plan for row in batch]
    sign = lambda row: 1 if row["op"] == "+I" else -1
    for key, total, n, newest, parts, seq in conn.execute("SELECT * FROM hot").fetchall():
        own = [row for row in rows if row["id"] == key]
        assert total == sum(sign(row) * row["total"] for row in own) and n == sum(map(sign, own))
        assert sorted(parts.split(",")) == sorted(row["parts"] for row in own if row["op"] == "+I")
        newest_row = max(own, key=lambda row: row["seq"])
        assert seq == newest_row["seq"] and newest == (newest_row["newest"] if newest_row["op"] == "+I" else None)
    assert conn.execute("SELECT count(*) FROM hot").fetchone() == (3,)


def test_what_is_retracted_first_is_owed(conn):
    conn.execute("CREATE TABLE sums (id int PRIMARY KEY, total numeric, n int, name text)")
    declare(conn, "sums", "aggregation", fields={"total": "sum", "n": "count"})
    assert merge(conn, "sums", [{"id": 1, "total": "1.10", "n": 1, "name": "x"}, {"id": 1, "total": 2, "n": 1}], "retract") == (0, 1, 0, 0, 0)
    assert conn.execute("SELECT total::text, n, name FROM sums").fetchone() == ("-3.10", -2, None)
    merge(conn, "sums", [{"id": 1, "total": 2, "n": 1}, {"id": 1, "total": "1.10", "n": 1}])
    assert conn.execute("SELECT total::text, n FROM sums").fetchone() == ("0.00", 0)


def test_overflow_is_an_error_and_changes_nothing(conn):
    conn.execute("CREATE TABLE small (id int PRIMARY KEY, x smallint, p int)")
    declare(conn, "small", "aggregation", fields={"x": "sum", "p": "product"})
    merge(conn, "small", [{"id": 1, "x": 32767, "p": 65536}])
    for row in {"x": 1}, {"p": 65536}:
        for rows in ([{"id": 1} | row], [{"id": 2} | row, {"id": 1} | row], [{"id": 1} | row, {"id": 1} | row]):
            with pytest.raises(Exception, match="out of range") as error:
                merge(conn, "small", rows)
            assert error.value.sqlstate == "22003"
    assert conn.execute("SELECT * FROM small").fetchall() == [(1, 32767, 65536)]


def test_a_map_or_a_nested_table_of_another_shape_is_refused(conn):
    conn.execute("CREATE TABLE shapes (id int PRIMARY KEY, m jsonb, n jsonb)")
    declare(conn, "shapes", "aggregation", fields={"m": "merge_map", "n": "nested_update"})
    for row in {"m": [1]}, {"m": 5}, {"n": {"a": 1}}, {"n": "x"}:
        for rows in ([{"id": 1} | row], [{"id": 1} | row, {"id": 1} | row]):
            with pytest.raises(Exception) as error:
                merge(conn, "shapes", rows)
            assert error.value.sqlstate == "22023", (row, error.value)
            assert "public.shapes" in error.value.diag.message_detail


def test_a_row_may_carry_its_kind(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, at int, name text)")
    declare(conn, "goods", "deduplicate", sequence=["at"], rowkind="__op")
    rows = [{"id": 1, "at": 1, "name": "a"}, {"id": 1, "at": 2, "__op": "-D"}, {"id": 2, "at": 1, "name": "b", "__op": "+I"}, {"id": 1, "at": 1, "name": "old"}]
    assert merge(conn, "goods", rows) == (2, 0, 1, 0, 1)
    assert conn.execute("SELECT * FROM goods").fetchall() == [(2, 1, "b")]
    with pytest.raises(Exception, match='row 2 for public.goods has the kind "D" in field "__op"') as error:
        merge(conn, "goods", [{"id": 5, "at": 1}, {"id": 2, "at": 3, "__op": "D"}])
    assert error.value.sqlstate == "22023" and "-D" in error.value.diag.message_hint
    # Rows that do not say get the argument's kind.
    assert merge(conn, "goods", [{"id": 2, "at": 2}], "delete") == (0, 0, 1, 0, 0)
    with pytest.raises(Exception, match='column "__opp"'):
        merge(conn, "goods", [{"id": 1, "__opp": "+I"}])


def test_the_rights_that_a_row_kind_asks_for_are_checked(conn):
    conn.execute("""
        CREATE ROLE kind_writer; GRANT USAGE ON SCHEMA stint TO kind_writer; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO kind_writer;
        CREATE TABLE goods (id int PRIMARY KEY, n int); GRANT INSERT, UPDATE ON goods TO kind_writer
    """)
    declare(conn, "goods", "deduplicate", rowkind="op")
    try:
        conn.execute("SET ROLE kind_writer")
        merge(conn, "goods", [{"id": 1, "n": 1, "op": "+U"}])
        with pytest.raises(Exception, match="DELETE on public.goods is missing") as error:
            merge(conn, "goods", [{"id": 2, "n": 1}, {"id": 1, "op": "-D"}])
        assert error.value.sqlstate == "42501"
    finally:
        conn.execute("RESET ROLE; DROP OWNED BY kind_writer; DROP ROLE kind_writer")
    assert conn.execute("SELECT * FROM goods").fetchall() == [(1, 1)]


def test_a_default_stands_for_what_a_row_does_not_say(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, at date, name varchar(5))")
    declare(conn, "goods", "deduplicate", fields={"name": {"default": "it's\\"}, "at": {"default": "2024-02-29"}})
    merge(conn, "goods", [{"id": 1}, {"id": 2, "name": None, "at": "2020-01-01"}, {"id": 3, "name": "x"}])
    assert conn.execute("SELECT id, at::text, name FROM goods ORDER BY id").fetchall() == [
        (1, "2024-02-29", "it's\\"), (2, "2020-01-01", "it's\\"), (3, "2024-02-29", "x")]
    with pytest.raises(Exception, match="date") as error:
        conn.execute("""SELECT stint.alter_state('goods', fields => '{"at": {"default": "2023-02-29"}}')""")
    assert error.value.sqlstate == "22008"
    merge(conn, "goods", [{"id": 4}])
    assert conn.execute("SELECT at::text FROM goods WHERE id = 4").fetchone() == ("2024-02-29",)


def test_a_declaration_can_be_altered_as_far_as_its_rows_allow(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, at int, n int, tags text)")
    declare(conn, "goods", "aggregation", sequence=["at"], fields={"n": "sum", "tags": {"function": "listagg", "ignore_retract": True}})
    alter = lambda **told: conn.execute(
        f"SELECT stint.alter_state('goods'{''.join(f', {name} => %({name})s' for name in told)})",
        {name: json.dumps(value) if isinstance(value, dict) else value for name, value in told.items()})
    # Empty, it can become anything.
    alter(sequence=[], fields={"n": "max", "tags": "listagg"}, deletes="ignore")
    merge(conn, "goods", [{"id": 1, "at": 1, "n": 5, "tags": "a"}, {"id": 1, "at": 1, "n": 3, "tags": "b"}])
    assert conn.execute("SELECT * FROM goods").fetchall() == [(1, 1, 5, "a,b")]
    # What changes how later rows merge is free.
    alter(fields={"n": {"function": "max", "ignore_retract": True}, "tags": {"function": "listagg", "separator": "/", "ignore_retract": True}}, rowkind="op")
    alter(deletes="retract")
    merge(conn, "goods", [{"id": 1, "tags": "c"}, {"id": 1, "op": "-D", "n": 9}])
    assert conn.execute("SELECT n, tags FROM goods").fetchall() == [(5, "a,b/c")]
    alter(rowkind="")
    # What would change the meaning of stored values is refused.
    for told, what in (
        (dict(fields={"n": {"function": "sum"}}), 'function of column "n"'),
        (dict(sequence=["at"]), "sequence or the groups"),
    ):
        with pytest.raises(Exception, match=what) as error:
            alter(**told)
        assert error.value.sqlstate == "55000" and error.value.diag.message_hint
    with pytest.raises(Exception, match="max of column \"n\" cannot be retracted"):
        alter(fields={"n": "max", "tags": {"function": "listagg", "ignore_retract": True}})
    with pytest.raises(Exception, match="is not a state table"):
        conn.execute("CREATE TABLE plain (id int PRIMARY KEY); SELECT stint.alter_state('plain', deletes => 'ignore')")
    conn.execute("DELETE FROM goods")
    alter(sequence=["at"], deletes="remove")
    assert conn.execute("SELECT to_regclass('goods_tombstones') IS NOT NULL").fetchone() == (True,)
    merge(conn, "goods", [{"id": 1, "at": 5, "n": 1}])
    merge(conn, "goods", [{"id": 1, "at": 6}], "delete")
    assert merge(conn, "goods", [{"id": 1, "at": 5, "n": 1}]) == (0, 0, 0, 0, 1)
    with pytest.raises(Exception, match="deletes policy"):
        alter(deletes="ignore")


def test_sketches_need_their_extension_and_then_unite(conn):
    conn.execute("CREATE TABLE visits (id int PRIMARY KEY, visitors bytea)")
    with pytest.raises(Exception, match="hll_union needs type hll") as error:
        declare(conn, "visits", "aggregation", fields={"visitors": "hll_union"})
    assert error.value.sqlstate == "22023" and "CREATE EXTENSION hll" in error.value.diag.message_hint
    if not conn.execute("SELECT count(*) FROM pg_available_extensions WHERE name = 'hll'").fetchone()[0]:
        pytest.skip("the extension hll is not installed")
    conn.execute("CREATE SCHEMA sketches; CREATE EXTENSION hll SCHEMA sketches; DROP TABLE visits; CREATE TABLE visits (id int PRIMARY KEY, visitors sketches.hll)")
    declare(conn, "visits", "aggregation", fields={"visitors": "hll_union"})
    sketch = lambda *names: conn.execute(
        "SELECT sketches.hll_add_agg(sketches.hll_hash_text(n))::text FROM unnest(%s::text[]) n", (list(names),)).fetchone()[0]
    merge(conn, "visits", [{"id": 1, "visitors": sketch("a", "b")}, {"id": 1, "visitors": sketch("b", "c")}])
    merge(conn, "visits", [{"id": 1, "visitors": sketch("c", "d")}])
    assert conn.execute("SELECT sketches.hll_cardinality(visitors)::int FROM visits").fetchone() == (4,)


def test_maps_of_the_extension_hstore_merge(conn):
    if not conn.execute("SELECT count(*) FROM pg_available_extensions WHERE name = 'hstore'").fetchone()[0]:
        pytest.skip("the extension hstore is not installed")
    conn.execute("CREATE SCHEMA maps; CREATE EXTENSION hstore SCHEMA maps; CREATE TABLE m (id int PRIMARY KEY, x maps.hstore)")
    declare(conn, "m", "aggregation", fields={"x": "merge_map"})
    merge(conn, "m", [{"id": 1, "x": "a=>1, b=>1"}, {"id": 1, "x": None}, {"id": 1, "x": "b=>2"}])
    assert conn.execute("SELECT x::text FROM m").fetchone() == ('"a"=>"1", "b"=>"2"',)
