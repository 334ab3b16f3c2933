"""The changelog under concurrent writers, and what its verbs refuse."""

import random
import threading
import time

import psycopg
import psycopg.errors
import pytest

WRITERS, TRANSACTIONS, KEYS = 4, 120, 12


def state(conn, ddl, name):
    conn.execute(ddl)
    conn.execute("SELECT stint.create_state(%s::regclass, 'deduplicate')", (name,))


def changes(conn, name, since=0):
    conn.execute("SELECT stint.tick()")
    return conn.execute(
        "SELECT kind, key, before, after FROM stint.changes(%s::regclass, since_pos => %s, max => 10000)", (name, since)
    ).fetchall()


def write(conn, seed, counts, errors):
    """Random transactions on few keys: several statements, savepoints rolled back, some given up."""
    chance = random.Random(seed)
    try:
        for _ in range(TRANSACTIONS):
            done = 0
            conn.execute("BEGIN")
            try:
                # Keys in order, so that writers do not deadlock.
                for key in sorted(chance.sample(range(KEYS), chance.randint(1, 3))):
                    what = chance.random()
                    if what < 0.2:
                        done += conn.execute("DELETE FROM ledger WHERE id = %s", (key,)).rowcount
                    elif what < 0.3:
                        conn.execute("SAVEPOINT s")
                        conn.execute("UPDATE ledger SET n = -1 WHERE id = %s", (key,))
                        conn.execute("ROLLBACK TO s")
                    else:
                        done += conn.execute(
                            "INSERT INTO ledger VALUES (%s, 1) ON CONFLICT (id) DO UPDATE SET n = ledger.n + 1", (key,)
                        ).rowcount
                    if chance.random() < 0.2:
                        time.sleep(chance.random() / 200)
                if chance.random() < 0.15:
                    conn.execute("ROLLBACK")
                else:
                    conn.execute("COMMIT")
                    counts.append(done)
            except psycopg.errors.DeadlockDetected:
                conn.execute("ROLLBACK")
    except Exception as error:  # noqa: BLE001
        errors.append(error)


def test_a_consumer_gets_every_committed_change_once_in_key_order(connect):
    conn = connect()
    state(conn, "CREATE TABLE ledger (id int PRIMARY KEY, n int)", "ledger")
    conn.execute("SELECT stint.create_consumer('reader', ARRAY['ledger']::regclass[])")
    counts, errors, stop = [], [], threading.Event()

    def tick(session):
        while not stop.is_set():
            session.execute("SELECT stint.tick()")
            time.sleep(0.003)

    threads = [threading.Thread(target=write, args=(connect(), seed, counts, errors)) for seed in range(WRITERS)]
    ticker = threading.Thread(target=tick, args=(connect(),))
    for thread in [*threads, ticker]:
        thread.start()

    chance = random.Random(99)
    got = []
    reader = connect()
    last_round = False
    while True:
        reader.execute("BEGIN")
        batch = reader.execute(
            "SELECT pos, kind, (key ->> 'id')::int, (before ->> 'n')::int, (after ->> 'n')::int FROM stint.poll('reader', max => 17)"
        ).fetchall()
        if batch:
            reader.execute("SELECT stint.commit('reader', %s)", (batch[-1][0],))
        if chance.random() < 0.2:
            reader.execute("ROLLBACK")
            continue
        reader.execute("COMMIT")
        got += batch
        if not batch and last_round:
            break
        if not any(thread.is_alive() for thread in threads) and not last_round:
            stop.set()
            ticker.join()
            conn.execute("SELECT stint.tick()")
            last_round = True
    assert errors == []

    positions = [pos for pos, kind, *_ in got if kind != "-U"]
    assert positions == list(range(1, sum(counts) + 1)), "dense, each once, none skipped"
    now = {}
    for _, kind, key, before, after in got:
        if kind != "-U":
            assert now.get(key) == before, "per key, each change begins where the last one ended"
            now[key] = after
    live = dict(conn.execute("SELECT id, n FROM ledger").fetchall())
    assert {key: n for key, n in now.items() if n is not None} == live
    again = changes(conn, "ledger")
    assert [(k, b and b["n"], a and a["n"]) for k, _, b, a in again] == [(k, b, a) for _, k, _, b, a in got], "positions never change"


def test_images_of_an_update_key_change_noop_and_truncate(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY, qty int, note text)", "goods")
    conn.execute("INSERT INTO goods VALUES (1, 5, 'a'), (2, 6, NULL)")
    conn.execute("UPDATE goods SET qty = qty")
    conn.execute("UPDATE goods SET qty = 7 WHERE id = 1")
    conn.execute("UPDATE goods SET id = 3 WHERE id = 2")
    conn.execute("DELETE FROM goods WHERE id = 99")
    conn.execute("TRUNCATE goods")
    one, two = {"id": 1, "qty": 5, "note": "a"}, {"id": 2, "qty": 6, "note": None}
    one_later, three = one | {"qty": 7}, two | {"id": 3}
    assert changes(conn, "goods") == [
        ("+I", {"id": 1}, None, one),
        ("+I", {"id": 2}, None, two),
        ("-U", {"id": 1}, one, None),
        ("+U", {"id": 1}, one, one_later),
        ("-D", {"id": 2}, two, None),
        ("+I", {"id": 3}, None, three),
        ("-D", {"id": 1}, one_later, None),
        ("-D", {"id": 3}, three, None),
    ]


def test_truncate_under_repeatable_read_misses_no_row(connect):
    conn, other = connect(), connect()
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY)", "goods")
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT count(*) FROM pg_class")
    other.execute("INSERT INTO goods VALUES (1)")
    conn.execute("TRUNCATE goods")
    conn.execute("COMMIT")
    assert [kind for kind, *_ in changes(conn, "goods")] == ["+I", "-D"]


def test_all_ways_to_write_are_captured(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY, qty int)", "goods")
    with conn.cursor().copy("COPY goods FROM STDIN") as copy:
        copy.write("1\t1\n2\t2\n")
    conn.execute("MERGE INTO goods g USING (VALUES (1, 10), (3, 30)) s (id, qty) ON g.id = s.id "
                 "WHEN MATCHED THEN UPDATE SET qty = s.qty WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.qty)")  # fmt: skip
    conn.execute("WITH gone AS (DELETE FROM goods WHERE id = 2 RETURNING qty) INSERT INTO goods SELECT 4, qty FROM gone")
    found = [(kind, key["id"]) for kind, key, *_ in changes(conn, "goods") if kind != "-U"]
    assert found[:2] == [("+I", 1), ("+I", 2)]
    assert sorted(found[2:4]) == [("+I", 3), ("+U", 1)]
    assert sorted(found[4:]) == [("+I", 4), ("-D", 2)]


def test_columns_may_come_and_go(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY, old text, qty int)", "goods")
    conn.execute("INSERT INTO goods VALUES (1, 'x', 1)")
    conn.execute("SELECT stint.tag('before')")
    conn.execute("ALTER TABLE goods ADD COLUMN added numeric DEFAULT 1.50")
    conn.execute("ALTER TABLE goods DROP COLUMN old")
    conn.execute("ALTER TABLE goods RENAME COLUMN qty TO amount")
    conn.execute("UPDATE goods SET amount = 2, added = 2.50")
    assert changes(conn, "goods", since=1) == [
        ("-U", {"id": 1}, {"id": 1, "amount": 1, "added": 1.5}, None),
        ("+U", {"id": 1}, {"id": 1, "amount": 1, "added": 1.5}, {"id": 1, "amount": 2, "added": 2.5}),
    ]
    assert conn.execute("SELECT id, amount, added::text FROM goods_as_of('before')").fetchall() == [(1, 1, None)], "the column was not there"


def test_a_wide_table_is_captured(conn):
    state(conn, f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{n} int DEFAULT {n}' for n in range(250))})", "wide")
    conn.execute("INSERT INTO wide VALUES (1)")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE wide SET c249 = 0")
    [_, _, (_, _, before, after)] = changes(conn, "wide")
    assert (before["c249"], after["c249"], len(after)) == (249, 0, 251)
    assert conn.execute("SELECT c0, c248, c249 FROM wide_as_of('t')").fetchone() == (0, 248, 249)


def test_numbers_are_exact_and_json_is_embedded(conn):
    state(
        conn,
        "CREATE TABLE odd (id numeric PRIMARY KEY, j jsonb, f float8, many numeric[], words text[], flag bool, big numeric, at timestamptz)",
        "odd",
    )
    conn.execute(
        "INSERT INTO odd VALUES (1.10, '{\"a\": 1.10}', 'NaN', '{1.0,NULL}', '{a,NULL}', true, 123456789012345678901234567890.10, '2024-05-06 07:08:09+02')"
    )
    conn.execute("SELECT stint.tick()")
    text = conn.execute("SELECT after::text FROM stint.changes('odd')").fetchone()[0]
    for part in (
        '"id": 1.10', '"j": {"a": 1.10}', '"f": "NaN"', '"many": [1.0, null]', '"words": ["a", null]', '"flag": true',
        '"big": 123456789012345678901234567890.10', '"at": "2024-05-06 05:08:09+00"',
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("kind", ["money", "regclass", "xid", "tid", "xml", '"char"', "regtype[]", "holder"])
def test_types_that_do_not_come_back_are_refused(conn, kind):
    conn.execute("CREATE TYPE holder AS (a int, b money)")
    conn.execute(f"CREATE TABLE bad (id int PRIMARY KEY, x {kind})")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match='column "x" holds') as caught:
        conn.execute("SELECT stint.create_state('bad', 'deduplicate')")
    assert caught.value.diag.message_hint


def test_a_hostile_cast_or_search_path_is_not_run(conn):
    conn.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    conn.execute("CREATE FUNCTION evil(mood) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
    conn.execute("CREATE FUNCTION evil(text) RETURNS mood LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
    conn.execute("CREATE CAST (mood AS text) WITH FUNCTION evil(mood) AS IMPLICIT")
    conn.execute("CREATE CAST (text AS mood) WITH FUNCTION evil(text) AS IMPLICIT")
    conn.execute("CREATE SCHEMA trap")
    conn.execute("CREATE FUNCTION trap.eq(text, text) RETURNS bool LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
    conn.execute("CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.eq)")
    state(conn, "CREATE TABLE m (id mood PRIMARY KEY, x mood)", "m")
    conn.execute("SET search_path = trap, public, pg_catalog")
    conn.execute("INSERT INTO m VALUES ('sad', 'happy')")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("UPDATE m SET x = 'sad'")
    assert [kind for kind, *_ in changes(conn, "m")] == ["+I", "-U", "+U"]
    assert conn.execute("SELECT * FROM m_as_of('t')").fetchall() == [("sad", "happy")]


def test_concurrent_commits_of_one_consumer_are_told(connect):
    conn, one, two = connect(), connect(), connect()
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY)", "goods")
    conn.execute("INSERT INTO goods SELECT generate_series(1, 10)")
    conn.execute("SELECT stint.tick()")
    conn.execute("SELECT stint.create_consumer('c', ARRAY['goods']::regclass[])")
    for level in ("READ COMMITTED", "REPEATABLE READ"):
        start = conn.execute("SELECT pos FROM stint.consumers").fetchone()[0]
        for session in (one, two):
            session.execute(f"BEGIN ISOLATION LEVEL {level}")
            assert session.execute("SELECT min(pos) FROM stint.poll('c', max => 2)").fetchone()[0] == start + 1
        one.execute("SELECT stint.commit('c', %s)", (start + 2,))
        one.execute("COMMIT")
        with pytest.raises(psycopg.errors.SerializationFailure, match='"c" was advanced'):
            two.execute("SELECT stint.commit('c', %s)", (start + 3,))
        two.execute("ROLLBACK")
        assert conn.execute("SELECT pos FROM stint.consumers").fetchone()[0] == start + 2
    assert conn.execute("SELECT stint.trim_consumers()").fetchone()[0] == 1
    assert conn.execute("SELECT pos, lag FROM stint.consumers").fetchone() == (4, 6)


def test_a_tick_needs_a_transaction_of_its_own(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY)", "goods")
    conn.execute("BEGIN")
    conn.execute("INSERT INTO goods VALUES (1)")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        conn.execute("SELECT stint.tick()")
    conn.execute("ROLLBACK")
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        conn.execute("SELECT stint.tick()")
    conn.execute("ROLLBACK")


def test_only_readers_of_the_table_read_its_changes(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY)", "goods")
    conn.execute("INSERT INTO goods VALUES (1)")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("SELECT stint.tick()")
    conn.execute("SELECT stint.create_consumer('c', ARRAY['goods']::regclass[])")
    role = f"r_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA stint TO {role}")
        conn.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO {role}")
        reads = [
            "SELECT count(*) FROM stint.changes('goods')",
            "SELECT count(*) FROM stint.poll('c')",
            "SELECT count(*) FROM stint.export_changes('goods')",
            "SELECT count(*) FROM goods_as_of('t')",
            "SELECT count(stint.row_as_of(NULL::goods, '{1}', 't', NULL, NULL))",
        ]
        conn.execute(f"SET ROLE {role}")
        for read in [*reads, "SELECT stint.commit('c', 1)", "SELECT stint.drop_consumer('c')", "INSERT INTO stint.change_log DEFAULT VALUES"]:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(read)
        conn.execute("RESET ROLE")
        conn.execute(f"GRANT SELECT ON goods TO {role}")
        conn.execute(f"SET ROLE {role}")
        assert [conn.execute(read).fetchone()[0] for read in reads] == [1, 1, 1, 1, 0]
        conn.execute("RESET ROLE")
        conn.execute("ALTER TABLE goods ENABLE ROW LEVEL SECURITY")
        conn.execute(f"SET ROLE {role}")
        for read in reads:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row security"):
                conn.execute(read)
    finally:
        conn.execute("RESET ROLE")
        conn.execute(f"DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")


BAD = [
    ("stint.changes(NULL)", "22004", '"relation"'),
    ("stint.changes('other')", "42704", 'state table "public.other"'),
    ("stint.changes('goods', since_pos => -1)", "22023", "-1"),
    ("stint.changes('goods', since_pos => 99)", "22023", "99"),
    ("stint.changes('goods', since_pos => NULL)", "22004", '"since_pos"'),
    ("stint.changes('goods', max => 0)", "22023", '"max" is 0'),
    ("stint.changes('goods', max => 2147483647)", "54000", "2147483647"),
    ("stint.changes('goods', max => NULL)", "22004", '"max"'),
    ("stint.export_changes(NULL)", "22004", '"relation"'),
    ("stint.export_changes('other')", "42704", 'state table "public.other"'),
    ("stint.export_changes('goods', since_pos => 99)", "22023", "99"),
    ("stint.export_changes('goods', until_pos => -1)", "22023", '"until_pos" is -1'),
    ("stint.export_changes('goods', 1, 0)", "22023", '"until_pos" is 0, before'),
    ("stint.create_consumer(NULL, '{goods}')", "22004", '"consumer"'),
    ("stint.create_consumer('', '{goods}')", "22023", '"consumer"'),
    ("stint.create_consumer(repeat('x', 99), '{goods}')", "54000", "99"),
    ("stint.create_consumer('x', NULL)", "22004", '"relations"'),
    ("stint.create_consumer('x', '{}')", "22023", '"relations"'),
    ("stint.create_consumer('x', '{goods,NULL}')", "22023", '"relations" contains a null'),
    ("stint.create_consumer('x', '{other}')", "42704", "public.other"),
    ("stint.create_consumer('x', '{goods}', start => 'first')", "22023", '"first"'),
    ("stint.create_consumer('x', '{goods}', start => NULL)", "22004", '"start"'),
    ("stint.create_consumer('known', '{goods}')", "42710", '"known"'),
    ("stint.drop_consumer('knwn')", "42704", '"knwn"'),
    ("stint.poll(NULL)", "22004", '"consumer"'),
    ("stint.poll('knwn')", "42704", '"knwn"'),
    ("stint.poll('known', max => -1)", "22023", '"max" is -1'),
    ("stint.poll('known', wait => '-1 s')", "22023", '"wait"'),
    ("stint.poll('known', wait => '1 day')", "54000", '"wait"'),
    ("stint.commit('knwn', 1)", "42704", '"knwn"'),
    ("stint.commit('known', NULL)", "22004", '"pos"'),
    ("stint.commit('known', -1)", "22023", "-1"),
    ("stint.commit('known', 99)", "22023", "99"),
    ("stint.commit('known', 0)", "22023", "has committed position 1"),
    ("stint.tag(NULL)", "22004", '"name"'),
    ("stint.tag('')", "22023", '"name"'),
    ("stint.tag(repeat('é', 99))", "54000", "198"),
    ("stint.tag('made')", "42710", '"made"'),
    ("stint.tag('x', pin => 99)", "42704", 'pin "99"'),
    ("stint.drop_tag('mde')", "42704", '"mde"'),
    ("stint.drop_tag(NULL)", "22004", '"name"'),
    ("goods_as_of('mde')", "42704", 'tag "mde"'),
    ("goods_as_of(pos => -1)", "22023", "-1"),
    ("goods_as_of(pos => 99)", "22023", "99"),
    ("goods_as_of()", "22023", '"tag", "pos" and "at"'),
    ("goods_as_of('made', 1)", "22023", '"tag", "pos" and "at"'),
    ("late_as_of('made')", "22023", "public.late was not a state table yet"),
    ("stint.row_as_of(NULL::other, '{1}', 'made', NULL, NULL)", "42704", "public.other"),
    ("stint.row_as_of(NULL::goods, NULL, 'made', NULL, NULL)", "22004", '"key"'),
    ("goods_as_of(at => '1999-01-01')", "22023", '"at" lies before the first tick'),
    ("stint.diff('goods')", "22023", '"since_tag" and "since_pos"'),
    ("stint.diff('goods', 'made', 'made', until_pos => 1)", "22023", '"until_tag" and "until_pos"'),
    ("stint.diff('goods', 'mde')", "42704", 'tag "mde"'),
    ("stint.set_history('goods', '0')", "22023", '"history"'),
    ("stint.set_history('other', '1 day')", "42704", "public.other"),
    ("stint.release_hold('mde')", "42704", '"mde"'),
    ("stint.image_row(NULL::int, '{1}')", "42804", '"kind"'),
]


def test_bad_input_gives_an_error_that_names_it_and_changes_nothing(conn):
    state(conn, "CREATE TABLE goods (id int PRIMARY KEY)", "goods")
    conn.execute("CREATE TABLE other (id int PRIMARY KEY)")
    conn.execute("INSERT INTO goods VALUES (1)")
    conn.execute("SELECT stint.tick()")
    conn.execute("SELECT stint.create_consumer('known', '{goods}')")
    conn.execute("SELECT stint.commit('known', 1)")
    conn.execute("SELECT stint.tag('made')")
    state(conn, "CREATE TABLE late (id int PRIMARY KEY)", "late")
    kept = "SELECT (SELECT array_agg(c) FROM stint.consumers c)::text, (SELECT array_agg(t) FROM stint.tags t)::text, (SELECT count(*) FROM stint.pins)"
    before = conn.execute(kept).fetchone()
    for call, code, part in BAD:
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(f"SELECT * FROM {call}")
        assert (caught.value.sqlstate, part in str(caught.value)) == (code, True), (call, str(caught.value))
        assert caught.value.diag.message_hint, call
    assert conn.execute(kept).fetchone() == before


def test_rules_that_no_constraint_holds_are_checked(conn):
    """PostgreSQL would read the expression of a CHECK anew at every captured statement."""
    hot = "SELECT conrelid::regclass::text FROM pg_constraint WHERE contype = 'c' AND conrelid::regclass::text ~ '^stint.(change_log|event_log|events_aside|kept_images|ticks|captured_columns)$'"
    assert conn.execute(hot).fetchall() == []
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY); SELECT stint.create_state('goods', 'deduplicate'); INSERT INTO goods VALUES (1), (2), (3)")
    found = "SELECT rule, detail FROM stint.check()"
    assert conn.execute(found).fetchall() == []
    conn.execute("BEGIN")
    conn.execute("UPDATE stint.change_log SET kind = 'X' WHERE key = '{1}'")
    conn.execute("UPDATE stint.change_log SET after = NULL WHERE key = '{2}'")
    conn.execute("INSERT INTO stint.projection_config (name, relation, types, columns, kind, freshness, on_error) VALUES ('p', 'goods', '{t}', '{}', 'upsert', '0', 'refuse')")
    conn.execute("INSERT INTO stint.events_aside (relation, seq, state, sqlstate, reason) VALUES ('goods', 7, 'odd', '22023', 'why')")
    kind, aside = "a change is of a known kind and has the images of its kind", "an event is aside as poisoned or skipped"
    assert sorted(conn.execute(found).fetchall()) == [(kind, "public.goods, change 2"), (kind, "public.goods, change 3"), (aside, "public.goods, event 7: odd")]
    conn.execute("ROLLBACK")
