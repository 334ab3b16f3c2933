"""Tags and positions read back, column by column and as text, what a reader at that point saw."""

import random
import threading

import psycopg
import psycopg.errors
import pytest

ODD = '''
    CREATE TYPE mood AS ENUM ('sad', 'so so', 'it''s "fine"');
    CREATE DOMAIN percent AS numeric CHECK (VALUE BETWEEN 0 AND 100);
    CREATE TYPE part AS (a int, b text);
    CREATE TABLE "Odd ""things""" (
        "Key" timestamptz, sub text, f4 float4, f8 float8, num numeric, at timestamptz, d date, tod timetz, gap interval,
        js json, jb jsonb, many int[], words text[], raw bytea, feel mood, pct percent, span tstzrange, spans int4multirange, rec part, box box,
        padded char(5), bits varbit, net inet, id uuid, gen int GENERATED ALWAYS AS (length(sub)) STORED, tag text, pos text,
        PRIMARY KEY ("Key", sub)
    );
'''
NAME = '"Odd ""things"""'

VALUES = {
    "f4": ["0.1", "NaN", "1e-40", "-0", None],
    "f8": ["0.1", "1e300", "-Infinity", "3.141592653589793", "4.9e-324", None],
    "num": ["1.10", "NaN", "123456789012345678901234567890.000", "-0.00", "Infinity", None],
    "at": ["2024-03-31 01:30:00.123456+01", "infinity", "0044-03-15 12:00:00+00 BC", None],
    "d": ["2024-02-29", "-infinity", "0001-01-01 BC", None],
    "tod": ["12:34:56.789+05:30", None],
    "gap": ["-1 mons +2 days -03:00:00.5", "1 year -1 day", "-1 day -1 hour", "178000000 years", None],
    "js": ['{"b" : 1.10, "b": 2}', "null", "1e400", None],
    "jb": ['{"b": 1.10}', "null", '"text"', None],
    "many": ["{}", "[2:3]={1,NULL}", "{{1,2},{3,4}}", None],
    "words": ['{"NULL",NULL,"a,b","\\"q\\"",""}', "{}", None],
    "raw": ["\\x00ff", "\\x", None],
    "feel": ["sad", 'it\'s "fine"', None],
    "pct": ["99.50", "0", None],
    "span": ["[2024-01-01 00:00+02,)", "empty", None],
    "spans": ["{[1,3),[5,)}", "{}", None],
    "rec": ["(1,)", '(,"a ""b"",")', "(,)", None],
    "box": ["(1.5,2),(0.1,-0)", None],
    "padded": ["ab", "", None],
    "bits": ["10110", "", None],
    "net": ["10.0.0.0/8", "::1", None],
    "id": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None],
    "tag": ["", "NULL", "日本語 ☃ \\ ' \"", "line\nbreak\ttab", None],
    "pos": ["7", None],
}
KEYS = [(f"2024-01-0{day} 00:00:00.000001+0{day}", sub) for day in range(1, 5) for sub in ("", "x'y\\z", "ünï,{}")]
SETTINGS = [
    {},
    {"TimeZone": "America/St_Johns", "DateStyle": "German", "IntervalStyle": "sql_standard", "bytea_output": "escape", "extra_float_digits": "-5"},
    {"TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "array_nulls": "off"},
]


def use(conn, settings):
    conn.execute("RESET ALL")
    for name, value in settings.items():
        conn.execute("SELECT set_config(%s, %s, false)", (name, value))


def rows(conn, source):
    return sorted(row for (row,) in conn.execute(f"SELECT r::text FROM {source} r"))


def columns_differ(conn, source):
    """Rows of the table that are not in the source column by column as text, or the other way."""
    names = [name for (name,) in conn.execute("SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0", (NAME,))]
    texts = ", ".join(f"{name}::text" for name in names)
    return conn.execute(f"(SELECT {texts} FROM {source} EXCEPT SELECT {texts} FROM {NAME}) UNION ALL (SELECT {texts} FROM {NAME} EXCEPT SELECT {texts} FROM {source})").fetchall()


def scribble(conn, chance):
    key, sub = chance.choice(KEYS)
    picked = {column: chance.choice(values) for column, values in VALUES.items()}
    names, params = ", ".join(picked), ", ".join(f"%({column})s" for column in picked)
    sets = ", ".join(f"{column} = %({column})s" for column in chance.sample(list(picked), 4))
    given = picked | {"key": key, "sub": sub}
    what = chance.random()
    if what < 0.6:
        conn.execute(f'INSERT INTO {NAME} ("Key", sub, {names}) VALUES (%(key)s, %(sub)s, {params}) ON CONFLICT ("Key", sub) DO UPDATE SET {sets}', given)
    elif what < 0.8:
        conn.execute(f'DELETE FROM {NAME} WHERE "Key" = %(key)s AND sub = %(sub)s', given)
    elif what < 0.98:
        conn.execute(f"UPDATE {NAME} SET {sets} WHERE sub = %(sub)s", given)
    else:
        conn.execute(f"TRUNCATE {NAME}")


def test_tags_read_back_under_concurrent_writers_in_every_session_style(connect):
    conn = connect()
    conn.execute(ODD)
    conn.execute("SELECT stint.create_state(%s::regclass, 'deduplicate')", (NAME,))
    errors, stop = [], threading.Event()

    def write(session, seed):
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                use(session, chance.choice(SETTINGS) | {"array_nulls": "on", "deadlock_timeout": "5ms"})
                try:
                    with session.transaction():
                        for _ in range(chance.randint(1, 4)):
                            scribble(session, chance)
                        if chance.random() < 0.1:
                            raise psycopg.Rollback()
                except psycopg.errors.DeadlockDetected:
                    pass
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    def tick(session):
        while not stop.wait(0.01):
            session.execute("SELECT stint.tick()")

    threads = [threading.Thread(target=write, args=(connect(), seed)) for seed in range(3)] + [threading.Thread(target=tick, args=(connect(),))]
    for thread in threads:
        thread.start()
    seen = {}
    reader = connect()
    for number in range(24):
        settings = SETTINGS[number % len(SETTINGS)]
        use(reader, settings)
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        # PostgreSQL's TRUNCATE empties a table for older snapshots too; the lock comes before the snapshot, so none falls in between.
        reader.execute(f"LOCK TABLE {NAME} IN ACCESS SHARE MODE")
        first = rows(reader, NAME)
        stop.wait(0.02)
        reader.execute("SELECT stint.tag(%s, stint.pin())", (f"tag {number}",))
        assert rows(reader, NAME) == first
        reader.execute("COMMIT")
        seen[f"tag {number}"] = settings, first
        stop.wait(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({tuple(found) for _, found in seen.values()}) > 10, "the writers changed something between the tags"
    for tag, (settings, expected) in seen.items():
        use(reader, settings)
        assert rows(reader, f"\"Odd \"\"things\"\"_as_of\"(tag => '{tag}')") == expected, tag
    reader.execute("RESET ALL")
    reader.execute("SELECT stint.tag('end')")
    reader.execute("SELECT stint.tick()")
    last = reader.execute("SELECT max(end_pos) FROM stint.ticks").fetchone()[0]
    for source in (f"\"Odd \"\"things\"\"_as_of\"('end')", f"\"Odd \"\"things\"\"_as_of\"(pos => {last})"):
        assert columns_differ(reader, source) == []


def test_every_position_reads_back(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    for statement in (
        "INSERT INTO goods VALUES (1, 1), (2, 2), (3, 3)",
        "UPDATE goods SET qty = qty * 10",
        "DELETE FROM goods WHERE id = 2",
        "INSERT INTO goods VALUES (2, 22)",
    ):
        conn.execute(statement)
        conn.execute("SELECT stint.tick()")
    now = {}
    for pos, kind, key, after in [(0, None, None, None)] + conn.execute("SELECT pos, kind, key, after FROM stint.changes('goods') WHERE kind <> '-U'").fetchall():
        if kind:
            now[key["id"]] = after and after["qty"]
        then = dict(conn.execute("SELECT * FROM goods_as_of(pos => %s)", (pos,)).fetchall())
        assert then == {key: qty for key, qty in now.items() if qty is not None}, pos
    assert pos == 8


def test_a_lookup_by_key_uses_the_tables_index(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods SELECT n, n FROM generate_series(1, 5000) n")
    conn.execute("SELECT stint.tag('t')")
    plan = "\n".join(line for (line,) in conn.execute("EXPLAIN SELECT * FROM goods_as_of('t') WHERE id = 7"))
    assert "goods_pkey" in plan and "Seq Scan on goods" not in plan, plan


def test_a_pin_sees_nothing_of_its_own_transaction(connect):
    conn, other = connect(), connect()
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY); CREATE TABLE plain (id int)")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        conn.execute("SELECT stint.pin()")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("BEGIN")
    conn.execute("INSERT INTO plain VALUES (1)")  # takes the transaction's id
    for _ in range(3):
        other.execute("INSERT INTO plain VALUES (2)")  # later ids end before the pin
    conn.execute("SELECT stint.tag('t')")
    conn.execute("INSERT INTO goods VALUES (1)")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        with conn.transaction():
            conn.execute("SELECT stint.pin()")
    conn.execute("COMMIT")
    assert conn.execute("SELECT * FROM goods_as_of('t')").fetchall() == []
    assert conn.execute("SELECT tag, pin FROM stint.tags").fetchall() == [("t", 1)]
    conn.execute("SELECT stint.drop_tag('t')")
    conn.execute("SELECT stint.tag('t', pin => 1)")


def test_as_of_agrees_with_the_rows_its_query_sees(connect):
    """A REPEATABLE READ reader sees neither later changes nor their images."""
    conn, other = connect(), connect()
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 1)")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert conn.execute("SELECT * FROM goods_as_of('t')").fetchall() == [(1, 1)]
    other.execute("UPDATE goods SET qty = 2")
    other.execute("SELECT stint.tag('later')")
    assert conn.execute("SELECT * FROM goods_as_of('t')").fetchall() == [(1, 1)]
    with pytest.raises(psycopg.errors.UndefinedObject):
        conn.execute("SELECT * FROM goods_as_of('later')")
    conn.execute("ROLLBACK")


def test_as_of_is_made_for_the_owner_and_dropped_with_the_declaration(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    for points, says in ("'a', 1", "only one of the arguments"), ("", "one of the arguments .* must be given"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=says):
            conn.execute(f"SELECT * FROM goods_as_of({points})")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="only one of the arguments"):
        conn.execute("SELECT * FROM stint.diff('goods', since_tag => 'a', since_pos => 1)")
    conn.execute("SELECT stint.drop_state('goods')")
    with pytest.raises(psycopg.errors.UndefinedFunction):
        conn.execute("SELECT * FROM goods_as_of(pos => 0)")
    conn.execute("INSERT INTO goods VALUES (1)")
    assert conn.execute("SELECT count(*) FROM stint.change_log").fetchone() == (0,)
    conn.execute("CREATE FUNCTION goods_as_of() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    with pytest.raises(psycopg.errors.DuplicateObject, match="goods_as_of"):
        conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute(f"CREATE TABLE {'x' * 60} (id int PRIMARY KEY)")
    with pytest.raises(psycopg.errors.NameTooLong):
        conn.execute(f"SELECT stint.create_state('{'x' * 60}', 'deduplicate')")


def test_a_dropped_extension_leaves_nothing_in_the_way_of_the_next(conn):
    conn.execute("CREATE TABLE plain (id int PRIMARY KEY, v text)")
    conn.execute("SELECT stint.create_state('plain', 'deduplicate')")
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint CASCADE")
    assert conn.execute("SELECT to_regproc('plain_as_of'), count(*) FROM pg_trigger WHERE NOT tgisinternal").fetchone() == (None, 0)
    conn.execute("INSERT INTO plain VALUES (1, 'before')")
    conn.execute("CREATE EXTENSION pg_stint")
    conn.execute("SELECT stint.create_state('plain', 'deduplicate')")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE plain SET v = 'after'")
    assert conn.execute("SELECT v FROM plain_as_of('t')").fetchall() == [("before",)]


def plan(conn, query):
    return "\n".join(line for (line,) in conn.execute(f"EXPLAIN {query}"))


def test_conditions_on_the_key_are_index_conditions_on_live_and_on_deleted_rows(conn):
    """Also of joins, prepared statements, lists and ranges, for composite keys of several types."""
    conn.execute("CREATE TABLE goods (sku text, lot numeric, at timestamptz, qty int, PRIMARY KEY (sku, lot, at))")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods SELECT 's' || n, n, '2026-01-01', n FROM generate_series(1, 2000) n")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("DELETE FROM goods WHERE lot % 2 = 0")
    conn.execute("UPDATE goods SET qty = 0")
    conn.execute("CREATE TABLE wanted AS SELECT 's' || n AS sku, n::numeric AS lot FROM generate_series(7, 8) n")
    conn.execute("ANALYZE")
    conn.execute("PREPARE one AS SELECT qty FROM goods_as_of($1) WHERE sku = $2 AND lot = $3 AND at = $4")
    conn.execute("SET plan_cache_mode = force_generic_plan")
    for query, found in [
        ("SELECT qty FROM goods_as_of('t') WHERE sku = 's7' AND lot = 7", [(7,)]),
        ("SELECT qty FROM goods_as_of('t') WHERE sku = 's8' AND lot = 8.00 AND at = '2026-01-01'", [(8,)]),
        ("SELECT qty FROM goods_as_of('t') WHERE sku IN ('s7', 's8', 'none') ORDER BY 1", [(7,), (8,)]),
        ("SELECT qty FROM goods_as_of('t') WHERE sku > 's1998' AND sku <= 's2' ORDER BY 1", [(2,), (1999,)]),
        ("SELECT g.qty FROM wanted w JOIN goods_as_of('t') g ON g.sku = w.sku AND g.lot = w.lot ORDER BY 1", [(7,), (8,)]),
        ("SELECT g.qty FROM wanted w LEFT JOIN goods_as_of('t') g USING (sku, lot) ORDER BY 1", [(7,), (8,)]),
        ("EXECUTE one('t', 's8', 8, '2026-01-01')", [(8,)]),
    ]:
        shown = plan(conn, query)
        assert "goods_pkey" in shown and "gone_keys" in shown and "Seq Scan on goods" not in shown and "Seq Scan on gone" not in shown, shown
        assert conn.execute(query).fetchall() == found, query


def test_equal_keys_that_read_differently_are_told_apart(conn):
    conn.execute("CREATE TABLE goods (lot numeric PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1.0, 1)")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE goods SET lot = 1.00, qty = 2")
    conn.execute("SELECT stint.tag('u')")
    conn.execute("DELETE FROM goods")
    conn.execute("INSERT INTO goods VALUES (1.000, 3)")
    conn.execute("SELECT stint.tag('v')")
    for tag, text in ("t", "(1.0,1)"), ("u", "(1.00,2)"), ("v", "(1.000,3)"):
        assert rows(conn, f"goods_as_of('{tag}')") == rows(conn, f"(SELECT * FROM goods_as_of('{tag}') WHERE lot = 1)") == [text]
    conn.execute("UPDATE goods SET lot = 1.0")
    assert rows(conn, "goods_as_of('t')") == ["(1.0,1)"] and rows(conn, "goods_as_of('v')") == ["(1.000,3)"]


def test_a_hot_key_is_found_among_many_changes_before_within_and_after_the_pinned_transaction(connect):
    conn, other = connect(), connect()
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 0)")
    many = "DO $$BEGIN FOR i IN 1 .. 300 LOOP UPDATE goods SET qty = qty + 1; END LOOP; END$$"
    conn.execute(many)
    other.execute("BEGIN")
    other.execute(many)
    conn.execute("SELECT stint.tag('t')")
    other.execute(many)
    other.execute("COMMIT")
    conn.execute(many)
    assert conn.execute("SELECT qty FROM goods_as_of('t') WHERE id = 1").fetchall() == [(300,)]


def test_as_of_follows_the_columns_and_the_grants_of_its_table(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int, old text)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 1, 'x'), (2, 2, 'y')")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("DELETE FROM goods WHERE id = 2")
    conn.execute("ALTER TABLE goods DROP COLUMN old, ADD COLUMN extra int NOT NULL DEFAULT 5")
    conn.execute("ALTER TABLE goods RENAME COLUMN id TO number")
    conn.execute("ALTER TABLE goods RENAME COLUMN qty TO quantity")
    conn.execute("UPDATE goods SET quantity = 9")
    assert conn.execute("SELECT number, quantity FROM goods_as_of('t') ORDER BY number").fetchall() == [(1, 1), (2, 2)]
    assert conn.execute("SELECT extra FROM goods_as_of('t') WHERE number = 2").fetchone() == (None,), "the column did not exist when the row last did"
    assert conn.execute("SELECT extra FROM goods_as_of('t') WHERE number = 1").fetchone() == (None,), "nor when the row was as it still is"
    role = f"r_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA stint TO {role}")
        conn.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO {role}")
        for grant, allowed in ("GRANT SELECT ON goods TO", True), ("REVOKE SELECT ON goods FROM", False):
            conn.execute(f"{grant} {role}")
            conn.execute(f"SET ROLE {role}")
            if allowed:
                assert conn.execute("SELECT count(*) FROM goods_as_of('t')").fetchone() == (2,)
            else:
                for table in "goods_as_of('t')", "stint.gone_keys_1":
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        conn.execute(f"SELECT FROM {table}")
            conn.execute("RESET ROLE")
    finally:
        conn.execute("RESET ROLE")
        conn.execute(f"DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("rename", "schema", "table", "function"),
    [
        ("ALTER TABLE shop.goods RENAME TO \"Ware s\"", "shop", '"Ware s"', '"Ware s_as_of"'),
        ("ALTER SCHEMA shop RENAME TO \"Sto.re\"", '"Sto.re"', "goods", "goods_as_of"),
        ("ALTER TABLE shop.goods SET SCHEMA other", "other", "goods", "goods_as_of"),
        ("ALTER SCHEMA shop RENAME TO a; ALTER TABLE a.goods RENAME TO b; ALTER TABLE a.b SET SCHEMA other", "other", "b", "b_as_of"),
        # Where the new name is taken or too long, the function keeps its own; and one that was renamed on purpose keeps that.
        (f"ALTER TABLE shop.goods RENAME TO {'t' * 60}", "shop", "t" * 60, "goods_as_of"),
        ("CREATE FUNCTION shop.b_as_of() RETURNS int LANGUAGE sql AS 'SELECT 1'; ALTER TABLE shop.goods RENAME TO b", "shop", "b", "goods_as_of"),
        ("ALTER FUNCTION shop.goods_as_of RENAME TO past; ALTER TABLE shop.goods RENAME TO b", "shop", "b", "past"),
    ],
)
def test_as_of_follows_its_table_to_another_name_or_schema(conn, rename, schema, table, function):
    conn.execute("CREATE SCHEMA shop; CREATE SCHEMA other; CREATE TABLE shop.goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('shop.goods', 'deduplicate')")
    conn.execute("INSERT INTO shop.goods VALUES (1, 1), (2, 2)")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE shop.goods SET qty = 9 WHERE id = 1; DELETE FROM shop.goods WHERE id = 2")
    made = "SELECT count(*), min(d.deptype::text) FROM pg_proc p LEFT JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'x' WHERE p.proretset AND p.prosrc LIKE '%row_as_of(l.%'"
    for statement in rename.split("; "):
        conn.execute(statement)
    assert conn.execute(made).fetchone() == (1, "x")
    assert conn.execute(f"SELECT id, qty FROM {schema}.{function}('t') ORDER BY id").fetchall() == [(1, 1), (2, 2)]
    conn.execute(f"ALTER TABLE {schema}.{table} ADD COLUMN extra int")
    assert conn.execute(f"SELECT id, qty, extra FROM {schema}.{function}('t') ORDER BY id").fetchall() == [(1, 1, None), (2, 2, None)]
    conn.execute("SELECT stint.drop_state(%s)", (f"{schema}.{table}",))
    assert conn.execute(made).fetchone() == (0, None)


@pytest.mark.parametrize("table", ["", " PARTITION BY HASH (id); CREATE TABLE part PARTITION OF goods FOR VALUES WITH (MODULUS 1, REMAINDER 0)"])
def test_columns_that_came_later_read_null_before_they_came(conn, table):
    """Whether a row changed since, when it changed, and how often the column was renamed; PostgreSQL fills the default in where no change tells of it."""
    conn.execute(f"CREATE TABLE goods (id int PRIMARY KEY, qty int){table}")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods SELECT n, 0 FROM generate_series(1, 5) n")
    conn.execute("SELECT stint.tag('before')")
    conn.execute("UPDATE goods SET qty = 1 WHERE id = 2")
    with conn.transaction():
        conn.execute("UPDATE goods SET qty = 1 WHERE id = 3")
        conn.execute("ALTER TABLE goods ADD COLUMN colour text NOT NULL DEFAULT 'red'")
        conn.execute("UPDATE goods SET colour = 'blue' WHERE id = 3")
    conn.execute("SELECT stint.tag('after')")
    pos = conn.execute("SELECT stint.tick()").fetchone()[0]
    conn.execute("ALTER TABLE goods RENAME COLUMN colour TO paint; ALTER TABLE goods ADD COLUMN colour int DEFAULT 7")
    conn.execute("UPDATE goods SET qty = 2 WHERE id IN (3, 4)")
    conn.execute("DELETE FROM goods WHERE id = 5")
    seen = lambda point: conn.execute(f"SELECT id, qty, paint, colour FROM goods_as_of({point}) ORDER BY id").fetchall()
    assert seen("'before'") == [(n, 0, None, None) for n in range(1, 6)]
    after = [(1, 0, "red", None), (2, 1, "red", None), (3, 1, "blue", None), (4, 0, "red", None), (5, 0, "red", None)]
    assert seen("'after'") == after == seen(f"pos => {pos}")
    at_first = [seen(f"pos => {n}")[2] for n in range(5, pos + 1)]
    assert at_first == [(3, 0, None, None)] * 2 + [(3, 1, None, None), (3, 1, "blue", None)], "the column came between two changes of its transaction"
    assert conn.execute("SELECT id, qty, paint, colour FROM goods ORDER BY id").fetchall() == [(1, 0, "red", 7), (2, 1, "red", 7), (3, 2, "blue", 7), (4, 2, "red", 7)]
    differ = conn.execute("SELECT kind, key ->> 'id', before ->> 'paint', after ->> 'paint' FROM stint.diff('goods', 'before', 'after')").fetchall()
    assert sorted(differ) == [("+U", "2", None, "red"), ("+U", "3", None, "blue"), ("-U", "2", None, None), ("-U", "3", None, None)]
    conn.execute("UPDATE goods SET qty = 1, paint = 'blue' WHERE id = 3; UPDATE goods SET qty = 0 WHERE id = 4")
    differ = conn.execute("SELECT key ->> 'id', kind, (before ->> 'colour') IS NULL, after ->> 'colour' FROM stint.diff('goods', 'after')").fetchall()
    assert sorted(differ) == [("3", "+U", True, "7"), ("3", "-U", True, None), ("4", "+U", True, "7"), ("4", "-U", True, None), ("5", "-D", True, None)]
    conn.execute("ALTER TABLE goods DROP COLUMN colour, ADD COLUMN colour int DEFAULT 8")
    assert seen("'after'") == after


def test_the_owners_domains_are_not_checked_with_the_readers_rights(conn):
    """A column's own domain is passed over; inside an array its check runs as the owner."""
    role = f"r_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role}")
    conn.execute("CREATE TABLE seen (who text)")
    conn.execute("CREATE SCHEMA own")
    conn.execute(f"GRANT ALL ON SCHEMA own TO {role}")
    try:
        conn.execute(f"SET ROLE {role}")
        conn.execute("CREATE FUNCTION own.fine(int) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE NOTICE 'checked by %', current_user; RETURN true; END$$")
        conn.execute("CREATE DOMAIN own.number AS int CHECK (own.fine(VALUE))")
        conn.execute("CREATE TABLE own.goods (id int PRIMARY KEY, one own.number, many own.number[])")
        conn.execute("RESET ROLE")
        conn.execute("SELECT stint.create_state('own.goods', 'deduplicate')")
        conn.execute("INSERT INTO own.goods VALUES (1, 1, '{2}')")
        conn.execute("SELECT stint.tag('t')")
        conn.execute("DELETE FROM own.goods")
        notices = []
        conn.add_notice_handler(lambda diag: notices.append(diag.message_primary))
        assert rows(conn, "own.goods_as_of('t')") == ["(1,1,{2})"]
        assert set(notices) == {f"checked by {role}"}
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP SCHEMA own CASCADE")
        conn.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("deletes", ["DELETE FROM goods WHERE id = 1", "TRUNCATE goods"])
@pytest.mark.parametrize(
    "inserts",
    ["INSERT INTO goods VALUES (1, 9)", "SELECT stint.merge('goods', '[{\"id\": 1, \"qty\": 9}]')", "UPDATE goods SET id = 1 WHERE id = 2"],
)
def test_a_key_inserted_from_a_snapshot_older_than_its_deletion_is_read_back_once(connect, level, deletes, inserts):
    conn, late = connect(), connect()
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 1), (2, 2)")
    conn.execute("SELECT stint.tag('t')")
    late.execute(f"BEGIN ISOLATION LEVEL {level}")
    late.execute("SELECT count(*) FROM stint.change_log")
    conn.execute(deletes)
    late.execute(inserts)
    late.execute("COMMIT")
    assert conn.execute("SELECT id, qty FROM goods_as_of('t') ORDER BY id").fetchall() == [(1, 1), (2, 2)]


def test_columns_may_have_the_names_that_the_function_uses_itself(conn):
    names = ["l", "g", "x", "r", "k1", "key", "tag", "pos", "at"]
    columns = ", ".join(f'"{name}" int' for name in names)
    conn.execute(f"CREATE TABLE goods ({columns}, PRIMARY KEY (l, k1))")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods SELECT i, 2, 3, 4, 5, 6, 7, 8, 9 FROM generate_series(1, 3) i")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE goods SET r = 0, x = 0 WHERE l < 3")
    conn.execute("DELETE FROM goods WHERE l = 2")
    assert conn.execute("SELECT * FROM goods_as_of('t') ORDER BY l").fetchall() == [(i, 2, 3, 4, 5, 6, 7, 8, 9) for i in (1, 2, 3)]


def test_what_is_altered_elsewhere_writes_nothing_of_a_state_table(conn):
    role = f"clerk_{conn.info.backend_pid}"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(f"CREATE TABLE goods (id int PRIMARY KEY); ALTER TABLE goods OWNER TO {role}; CREATE TABLE other (id int)")
        conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
        written = "SELECT c.xmin::text FROM pg_class c JOIN stint.captures p ON p.gone_keys = c.oid"
        before = conn.execute(written).fetchall()
        conn.execute("ALTER TABLE other ADD COLUMN n int")
        conn.execute("GRANT SELECT ON other TO PUBLIC")
        assert conn.execute(written).fetchall() == before
    finally:
        conn.execute(f"DROP TABLE IF EXISTS goods CASCADE; DROP OWNED BY {role}; DROP ROLE {role}")


def test_time_travel_reads_the_last_tick_by_then(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 1)")
    conn.execute("SELECT stint.tick()")
    first = conn.execute("SELECT max(at) FROM stint.ticks").fetchone()[0]
    conn.execute("UPDATE goods SET qty = 2")
    conn.execute("SELECT stint.tick()")
    conn.execute("CREATE TABLE late (id int PRIMARY KEY)")
    conn.execute("SELECT stint.create_state('late', 'deduplicate')")
    for at, found in (first, [(1, 1)]), ("infinity", [(1, 2)]):
        assert conn.execute("SELECT * FROM goods_as_of(at => %s)", (at,)).fetchall() == found
    for table, at, says in ("goods", "-infinity", "before the first tick"), ("late", first, "not a state table yet"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=says):
            conn.execute(f"SELECT * FROM {table}_as_of(at => %s)", (at,))


def test_diff_shows_the_rows_that_differ_between_two_points(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty numeric)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("INSERT INTO goods VALUES (1, 1.10), (2, 2), (3, 3), (4, 4)")
    conn.execute("SELECT stint.tag('a')")
    conn.execute("UPDATE goods SET qty = 1.2 WHERE id = 1; DELETE FROM goods WHERE id = 2; INSERT INTO goods VALUES (5, 5), (6, 6)")
    conn.execute("UPDATE goods SET qty = 9 WHERE id = 3; UPDATE goods SET qty = 3 WHERE id = 3; DELETE FROM goods WHERE id = 6")
    conn.execute("SELECT stint.tag('b')")
    conn.execute("DELETE FROM goods WHERE id <> 4")

    def diff(*points):
        return conn.execute(f"SELECT kind, key->>'id', before->>'qty', after->>'qty' FROM stint.diff('goods', {', '.join(points)})").fetchall()

    expected = [("-U", "1", "1.10", None), ("+U", "1", "1.10", "1.2"), ("-D", "2", "2", None), ("+I", "5", None, "5")]
    assert diff("'a'", "'b'") == expected
    assert [(kind, key) for kind, key, *_ in diff("'a'")] == [("-D", "1"), ("-D", "2"), ("-D", "3")]
    assert diff("'b'", "'b'") == []
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="earlier"):
        diff("'b'", "'a'")


def test_a_table_without_a_changelog_costs_none_and_says_so(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY)")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='"history"'):
        conn.execute("SELECT stint.create_state('goods', 'deduplicate', changelog => false, history => '1 day')")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', changelog => false)")
    conn.execute("SELECT stint.merge('goods', '[{\"id\": 1}]')")
    assert conn.execute("SELECT to_regproc('goods_as_of'), (SELECT count(*) FROM stint.change_log), stint.tick()").fetchone() == (None, 0, 0)
    for call in "stint.changes('goods')", "stint.create_consumer('c', '{goods}')", "stint.diff('goods', 't')", "stint.set_history('goods', '1 day')":
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="goods keeps no changelog"):
            conn.execute(f"SELECT {call}")
    conn.execute("SELECT stint.drop_state('goods')")
