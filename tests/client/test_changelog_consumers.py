"""Consumers: waiting in the server, starting from rows, being told what is gone; and the changelog as text."""

import csv
import io
import json
import random
import threading
import time

import psycopg
import psycopg.errors
import pytest
from stint import background, value, waiting

# Less than the second after which every waiter looks by itself: a poll answered sooner was woken.
SOON = 0.85


@pytest.fixture
def goods(conn):
    conn.execute("CREATE TABLE goods (id int PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    conn.execute("SELECT stint.create_consumer('c', '{goods}')")
    return conn


def poll(conn, wait="30 s", consumer="c"):
    return conn.execute("SELECT pos, kind FROM stint.poll(%s, wait => %s)", (consumer, wait)).fetchall()


def sleeping(watch, session, **how):
    """A session that waits in a poll."""
    thread = background(lambda: poll(session, **how))
    waiting(watch, session.info.backend_pid, "Extension")
    return thread


def woken(thread):
    started = time.monotonic()
    got = thread.join()
    assert time.monotonic() - started < SOON, "found by looking, not woken"
    return got


def test_a_tick_wakes_all_who_wait(goods, connect):
    conn = goods
    conn.execute("SELECT stint.create_consumer('d', '{goods}')")
    for round in range(1, 6):
        threads = [sleeping(conn, connect(), consumer=name) for name in "ccd"]
        conn.execute("INSERT INTO goods VALUES (%s, 0)", (round,))
        conn.execute("SELECT stint.tick()")
        assert [woken(thread) for thread in threads] == [[(round, "+I")]] * 3
        for name in "cd":
            conn.execute("SELECT stint.commit(%s, %s)", (name, round))


def test_the_maintenance_worker_ticks_for_who_waits(goods, connect):
    for round in range(1, 4):
        thread = sleeping(goods, connect())
        goods.execute("INSERT INTO goods VALUES (%s, 0)", (round,))
        assert woken(thread) == [(round, "+I")]
        goods.execute("SELECT stint.commit('c', %s)", (round,))


def test_a_poll_sleeps_on_through_ticks_that_bring_it_nothing(goods, connect):
    goods.execute("CREATE TABLE other (id int PRIMARY KEY)")
    goods.execute("SELECT stint.create_state('other', 'deduplicate')")
    started = time.monotonic()
    thread = sleeping(goods, connect(), wait="1500 ms")
    goods.execute("INSERT INTO other VALUES (1)")
    with goods.transaction():
        goods.execute("INSERT INTO goods VALUES (1, 0)")
        goods.execute("DELETE FROM goods")
    goods.execute("SELECT stint.tick()")
    assert thread.join() == [] and 1.4 < time.monotonic() - started < 4


def test_a_wait_ends_by_cancel_timeout_and_its_bound(goods, connect):
    session = connect()
    thread = sleeping(goods, session)
    goods.execute("SELECT pg_cancel_backend(%s)", (session.info.backend_pid,))
    with pytest.raises(psycopg.errors.QueryCanceled):
        thread.join(2)
    session.execute("SET statement_timeout = 200")
    with pytest.raises(psycopg.errors.QueryCanceled):
        poll(session)
    session.execute("RESET statement_timeout")
    thread = sleeping(goods, session)
    goods.execute("SELECT pg_terminate_backend(%s)", (session.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        thread.join(2)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match='"wait"') as caught:
        poll(goods, wait="1 day")
    assert "stint.max_wait" in caught.value.diag.message_hint
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="poll cannot wait"), goods.transaction():
        goods.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert poll(goods, wait="0") == []
        poll(goods)
    # A session that was cancelled while it waited left nothing behind.
    thread = sleeping(goods, connect())
    goods.execute("INSERT INTO goods VALUES (1, 0)")
    goods.execute("SELECT stint.tick()")
    assert woken(thread) == [(1, "+I")]


def test_a_sleeping_poll_of_its_own_holds_back_no_vacuum(goods, connect):
    session = connect()
    thread = sleeping(goods, session)
    assert value(goods, "SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE pid = %s", session.info.backend_pid)
    goods.execute("INSERT INTO goods VALUES (1, 0)")
    assert thread.join() == [(1, "+I")]


def test_a_commit_without_a_position_passes_what_the_poll_looked_at(goods):
    goods.execute("CREATE TABLE other (id int PRIMARY KEY)")
    goods.execute("SELECT stint.create_state('other', 'deduplicate')")
    lag = "SELECT pos, lag FROM stint.consumers"
    goods.execute("INSERT INTO goods VALUES (1, 0), (2, 0)")
    goods.execute("INSERT INTO other SELECT generate_series(1, 5)")
    goods.execute("SELECT stint.tick()")
    for max, expected in (1, (1, 6)), (1, (2, 5)), (1, (7, 0)), (1, (7, 0)):
        with goods.transaction():
            goods.execute("SELECT FROM stint.poll('c', max => %s)", (max,))
            goods.execute("SELECT stint.commit('c')")
        assert goods.execute(lag).fetchone() == expected
    goods.execute("SELECT FROM stint.poll('c')")
    with pytest.raises(psycopg.errors.NullValueNotAllowed, match='"pos"'):
        goods.execute("SELECT stint.commit('c')")


def test_a_consumer_is_told_what_is_not_kept_and_starts_again(goods):
    goods.execute("CREATE TABLE other (id int PRIMARY KEY)")
    goods.execute("SELECT stint.create_state('other', 'deduplicate')")
    goods.execute("SELECT stint.create_consumer('both', '{goods,other}')")
    goods.execute("INSERT INTO goods VALUES (1, 0), (2, 0), (3, 0)")
    goods.execute("SELECT stint.tick()")
    goods.execute("SELECT stint.commit('c', 2)")
    goods.execute("SELECT stint.commit('both', 1)")
    goods.execute("UPDATE stint.captures SET floor_pos = 2 WHERE relation = 'goods'::regclass")
    told = "SELECT consumer, must_refetch FROM stint.consumers ORDER BY 1"
    assert goods.execute(told).fetchall() == [("both", True), ("c", False)]
    assert poll(goods, wait="0") == [(3, "+I")]
    for call, hint in (
        ("stint.poll('both')", "start => 'snapshot'"),
        ("stint.poll('both', wait => '10 s')", "start => 'snapshot'"),
        ("stint.changes('goods', since_pos => 1)", "Give 2 or a later"),
        ("stint.export_changes('goods')", "Give 2 or a later"),
    ):
        with pytest.raises(psycopg.errors.SnapshotTooOld, match="public.goods up to position 2 are not kept") as caught:
            goods.execute(f"SELECT * FROM {call}")
        assert hint in caught.value.diag.message_hint
    assert goods.execute("SELECT pos FROM stint.changes('goods', since_pos => 2)").fetchall() == [(3,)]
    assert goods.execute("SELECT count(*) FROM stint.changes('other')").fetchone() == (0,)
    doctor = "SELECT ok, detail FROM stint.doctor() WHERE \"check\" LIKE 'consumers%'"
    assert goods.execute(doctor).fetchone() == (False, "changes that they have not read are gone: 'both'")
    # As the hint says.
    with goods.transaction():
        goods.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        goods.execute("SELECT stint.drop_consumer('both')")
        goods.execute("SELECT stint.create_consumer('both', '{goods,other}', start => 'snapshot')")
        assert goods.execute("SELECT count(*) FROM goods").fetchone() == (3,)
    assert goods.execute(doctor).fetchone()[0]
    goods.execute("SELECT stint.create_consumer('late', '{goods}')")
    assert goods.execute("SELECT consumer, pos, must_refetch FROM stint.consumers ORDER BY 1").fetchall() == [
        ("both", 3, False), ("c", 2, False), ("late", 2, False),
    ]  # fmt: skip
    goods.execute("INSERT INTO other VALUES (1)")
    goods.execute("SELECT stint.tick()")
    assert poll(goods, wait="0", consumer="both") == [(4, "+I")]


def test_a_snapshot_needs_a_transaction_that_keeps_one(goods):
    start = "SELECT stint.create_consumer('s', '{goods}', start => 'snapshot')"
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="keeps one") as caught:
        goods.execute(start)
    assert "REPEATABLE READ" in caught.value.diag.message_hint
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="has changed a state table"), goods.transaction():
        goods.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        goods.execute("INSERT INTO goods VALUES (1, 0)")
        goods.execute(start)
    assert goods.execute("SELECT consumer FROM stint.consumers").fetchall() == [("c",)]


def test_rows_from_before_the_declaration_are_in_the_snapshot(conn):
    conn.execute("CREATE TABLE old (id int PRIMARY KEY)")
    conn.execute("INSERT INTO old VALUES (1), (2)")
    conn.execute("SELECT stint.create_state('old', 'deduplicate')")
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT stint.create_consumer('c', '{old}', start => 'snapshot')")
        assert conn.execute("SELECT count(*) FROM old").fetchone() == (2,)
    conn.execute("DELETE FROM old WHERE id = 1")
    conn.execute("SELECT stint.tick()")
    assert poll(conn, wait="0") == [(1, "-D")]


def churn(session, seed, stop):
    """Transactions that overlap whatever goes on: short and long ones, several changes of a key, some rolled back."""
    chance = random.Random(seed)
    while not stop.is_set():
        session.execute("BEGIN")
        try:
            for key in sorted(chance.choices(range(40), k=chance.randint(1, 5))):
                if chance.random() < 0.3:
                    session.execute("DELETE FROM goods WHERE id = %s", (key,))
                else:
                    session.execute(
                        "INSERT INTO goods VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET qty = excluded.qty", (key, chance.randint(0, 999))
                    )
                if chance.random() < 0.1:
                    time.sleep(chance.random() / 50)
            session.execute("ROLLBACK" if chance.random() < 0.1 else "COMMIT")
        except psycopg.errors.DeadlockDetected:
            session.execute("ROLLBACK")


def test_rows_of_a_snapshot_and_what_follows_make_the_live_table(goods, connect):
    stop, failed = threading.Event(), []

    def guarded(work, session, *args):
        try:
            work(session, *args)
        except Exception as error:  # noqa: BLE001
            failed.append(error)
            session.close()

    def tick(session):
        while not stop.wait(0.01):
            session.execute("SELECT stint.tick()")

    threads = [threading.Thread(target=guarded, args=(churn, connect(), seed, stop)) for seed in range(4)]
    threads.append(threading.Thread(target=guarded, args=(tick, connect())))
    for thread in threads:
        thread.start()
    copies = []
    reader = connect()
    for number in range(25):
        time.sleep(0.03)
        with reader.transaction():
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT stint.create_consumer(%s, '{goods}', start => 'snapshot')", (f"copy {number}",))
            copies.append(dict(reader.execute("SELECT id, qty FROM goods").fetchall()))
    time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    reader.execute("SELECT stint.tick()")
    live = dict(reader.execute("SELECT id, qty FROM goods").fetchall())
    overlapped = 0
    for number, copy in enumerate(copies):
        seen = set()
        while True:
            with reader.transaction():
                batch = reader.execute(
                    "SELECT pos, kind, (key ->> 'id')::int, (before ->> 'qty')::int, (after ->> 'qty')::int FROM stint.poll(%s)",
                    (f"copy {number}",),
                ).fetchall()
                reader.execute("SELECT stint.commit(%s)", (f"copy {number}",))
            if not batch:
                break
            for pos, kind, key, before, after in batch:
                assert (pos, kind) not in seen, "nothing twice"
                seen.add((pos, kind))
                if kind != "-U":
                    assert copy.pop(key, None) == before, "each change goes on from the row as it was copied"
                    if after is not None:
                        copy[key] = after
        assert copy == live, "nothing missing"
        skipped = "SELECT count(*) FROM stint.consumer_config c JOIN stint.change_log l ON pg_visible_in_snapshot(l.xid, c.start_snapshot) WHERE c.consumer = %s AND l.xid >= (SELECT pg_snapshot_xmax(snapshot) FROM stint.ticks WHERE end_pos = c.start_pos)"
        overlapped += value(reader, skipped, f"copy {number}") > 0
    assert overlapped > 0, "some snapshots lay between two ticks"


def test_a_follower_beside_retention_gets_every_change_or_is_told(goods, connect):
    goods.execute("SELECT stint.set_history('goods', '100 ms')")
    stop, failed = threading.Event(), []

    def guarded(work, session, *args):
        try:
            work(session, *args)
        except Exception as error:  # noqa: BLE001
            failed.append(error)
            session.close()

    def upkeep(session):
        while not stop.wait(0.01):
            session.execute("SELECT stint.tick()")
            session.execute("SELECT FROM stint.expire_changes()")

    threads = [threading.Thread(target=guarded, args=(churn, connect(), seed, stop)) for seed in range(3)]
    threads.append(threading.Thread(target=guarded, args=(upkeep, connect())))
    for thread in threads:
        thread.start()
    chance, reader, copy, told, followed, ends = random.Random(5), connect(), None, 0, 0, time.monotonic() + 6
    while True:
        if copy is None:
            with reader.transaction():
                reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                reader.execute("SELECT stint.drop_consumer('c')")
                reader.execute("SELECT stint.create_consumer('c', '{goods}', start => 'snapshot')")
                copy = dict(reader.execute("SELECT id, qty FROM goods").fetchall())
        over = not any(thread.is_alive() for thread in threads)
        try:
            with reader.transaction():
                batch = reader.execute(
                    "SELECT kind, (key ->> 'id')::int, (before ->> 'qty')::int, (after ->> 'qty')::int FROM stint.poll('c', max => %s)",
                    (chance.choice([1, 20, 1000]),),
                ).fetchall()
                reader.execute("SELECT stint.commit('c')")
        except psycopg.errors.SnapshotTooOld:
            assert value(reader, "SELECT must_refetch FROM stint.consumers")
            copy, told = None, told + 1
            continue
        for kind, key, before, after in batch:
            if kind != "-U":
                assert copy.pop(key, None) == before, "each change goes on from the one before"
                if after is not None:
                    copy[key] = after
                followed += 1
        if over and not batch:
            break
        if chance.random() < 0.02:
            time.sleep(0.3)
        if time.monotonic() > ends and not stop.is_set():
            stop.set()
            for thread in threads:
                thread.join()
            reader.execute("SELECT stint.tick()")
    assert failed == [] and told > 0 and followed > 100
    assert copy == dict(reader.execute("SELECT id, qty FROM goods").fetchall())


def test_an_export_is_the_text_of_every_change(conn):
    conn.execute("CREATE TABLE odd (id int, \"sp ace\" text, gone int, n numeric, f float8, b bytea, a text[], at timestamptz, PRIMARY KEY (n, id))")
    conn.execute("SELECT stint.create_state('odd', 'deduplicate')")
    odd = (1, 'tab\t"quote"\nline', 0, "1.10", "0.1", "\\x00ff", '{NULL,"a,b"}', "2024-05-06 05:08:09+00")
    conn.execute("INSERT INTO odd VALUES (%s, %s, %s, %s, %s, %s, %s, %s)", odd)
    conn.execute("ALTER TABLE odd DROP COLUMN gone")
    conn.execute("INSERT INTO odd (id, n) SELECT g, g FROM generate_series(2, 2500) g")
    with conn.transaction():
        conn.execute("UPDATE odd SET f = 'NaN' WHERE id = 1")
        conn.execute("UPDATE odd SET f = '-0', \"sp ace\" = NULL WHERE id = 1")
    conn.execute("DELETE FROM odd WHERE id = 2")
    conn.execute("SET timezone = 'Asia/Tokyo'; SET extra_float_digits = -15; SET bytea_output = 'escape'")
    last = value(conn, "SELECT stint.tick()")
    with conn.cursor().copy("COPY (SELECT pos, kind, key, to_json(columns), to_json(image), cause FROM stint.export_changes('odd')) TO STDOUT CSV") as copy:
        rows = list(csv.reader(io.StringIO(b"".join(copy).decode())))
    assert len(rows) == 2500 + 2 + 1
    names = ["id", "sp ace", "gone", "n", "f", "b", "a", "at"]
    before = dict(zip(names, ["1", odd[1], "0", *odd[3:]]))
    after = before | {"f": "-0", "sp ace": None}
    del before["gone"], after["gone"]
    shown = [(int(pos), kind, key, dict(zip(json.loads(columns), json.loads(image))), cause) for pos, kind, key, columns, image, cause in rows]
    assert shown[0] == (1, "+I", "{1.10,1}", before | {"gone": "0"}, "")
    assert shown[1][:3] == (2, "+I", "{2,2}")
    assert shown[-3:-1] == [(last - 1, "-U", "{1.10,1}", before, ""), (last - 1, "+U", "{1.10,1}", after, "")]
    assert shown[-1][:3] == (last, "-D", "{2,2}")
    some = conn.execute("SELECT min(pos), max(pos), count(*) FROM stint.export_changes('odd', since_pos => 999, until_pos => 1999)").fetchone()
    assert some == (1000, 1999, 1000)


def test_a_cause_reaches_the_reader_and_null_stays_null(goods):
    goods.execute("INSERT INTO goods VALUES (1, 0), (2, 0)")
    goods.execute("UPDATE stint.change_log SET cause = 7 WHERE key = '{2}'")
    goods.execute("SELECT stint.tick()")
    assert goods.execute("SELECT cause FROM stint.changes('goods')").fetchall() == [(None,), (7,)]
    assert goods.execute("SELECT cause FROM stint.poll('c')").fetchall() == [(None,), (7,)]


def test_a_consumer_that_is_dropped_leaves_no_position_behind(goods, connect):
    other = connect()
    goods.execute("INSERT INTO goods VALUES (1, 1)")
    goods.execute("SELECT stint.tick()")
    with goods.transaction():
        goods.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert value(goods, "SELECT pos FROM stint.consumers WHERE consumer = 'c'") == 0
        other.execute("SELECT stint.commit('c', 1)")
        goods.execute("SELECT stint.drop_consumer('c')")
    assert value(goods, "SELECT count(*) FROM stint.consumer_commits") == 0
