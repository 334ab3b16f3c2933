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
