"""Retention is a vacuum of history: what no tag needs goes, what one needs stays, and reads the same."""

import random
import threading

import psycopg.errors
import pytest
from stint import background, call, rows, until, value, waiting


@pytest.fixture
def goods(conn):
    conn.execute("CREATE TABLE goods (sku text, lot numeric, qty int, PRIMARY KEY (sku, lot))")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', history => '1 hour')")
    return conn


def age(conn, table="goods"):
    """Makes every change that is ticked older than its table's history."""
    conn.execute("SELECT stint.tick()")
    conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")


def expire(conn):
    """Lets go of all there is, whoever does it."""
    total = 0
    while True:
        [done] = call(conn, "expire_changes")
        total += done.removed
        if not done.more:
            return total


def kept(conn):
    return value(conn, "SELECT count(*) FROM stint.kept_images")


def texts(conn, source):
    return sorted(row for (row,) in conn.execute(f"SELECT r::text FROM {source} r"))


def test_each_tag_keeps_the_rows_it_sees_and_tags_share_them(goods):
    conn, seen = goods, {}
    conn.execute("INSERT INTO goods SELECT 's' || n, n, 0 FROM generate_series(1, 100) n")
    for number in range(4):
        seen[f"t{number}"] = texts(conn, "goods")
        conn.execute("SELECT stint.tag(%s)", (f"t{number}",))
        if number == 1:
            continue  # t1 and t2 see the same
        for _ in range(5):
            conn.execute("UPDATE goods SET qty = qty + 1 WHERE lot <= 10")
        conn.execute("DELETE FROM goods WHERE lot = %s", (50 + number,))
        conn.execute("INSERT INTO goods VALUES (%s, 99.50, 7)", (f"new{number}",))
    changes = value(conn, "SELECT count(*) FROM stint.change_log")
    age(conn)
    expire(conn)
    assert value(conn, "SELECT count(*) FROM stint.change_log") == 0 < changes
    assert kept(conn) == 3 * 12, "for each of three points ten rows as they were, one that was deleted, one that was not there yet"
    assert dict(conn.execute("SELECT tag, rows_kept FROM stint.tags").fetchall()) == {"t0": 16, "t1": 14, "t2": 14, "t3": 12}
    for tag, expected in seen.items():
        assert texts(conn, f"goods_as_of('{tag}')") == expected, tag
    conn.execute("SELECT stint.drop_tag('t1')")
    expire(conn)
    assert kept(conn) == 36, "t2 needs what t1 did"
    conn.execute("SELECT stint.drop_tag('t2')")
    expire(conn)
    assert kept(conn) == 26
    for tag in "t0", "t3":
        assert texts(conn, f"goods_as_of('{tag}')") == seen[tag], tag
    assert value(conn, "SELECT count(*) FROM stint.gone_keys_1") == 3
    for tag in "t0", "t3":
        conn.execute("SELECT stint.drop_tag(%s)", (tag,))
    expire(conn)
    assert kept(conn) == 0 and value(conn, "SELECT count(*) FROM stint.gone_keys_1") == 0
    assert value(conn, "SELECT count(*) FROM stint.ticks") == 1


def test_a_key_born_and_dead_since_a_tag_leaves_nothing(goods):
    conn = goods
    conn.execute("SELECT stint.tag('t')")
    conn.execute("INSERT INTO goods VALUES ('a', 1, 1)")
    age(conn)
    expire(conn)
    assert kept(conn) == 1 and texts(conn, "goods_as_of('t')") == []
    conn.execute("DELETE FROM goods")
    age(conn)
    expire(conn)
    assert kept(conn) == 0 and value(conn, "SELECT count(*) FROM stint.gone_keys_1") == 0
    conn.execute("INSERT INTO goods VALUES ('a', 1, 2)")
    age(conn)
    expire(conn)
    assert texts(conn, "goods_as_of('t')") == [] and kept(conn) == 1


def test_a_tick_goes_when_all_its_tables_are_past_their_history_and_never_before_an_earlier_one(goods):
    conn = goods
    conn.execute("CREATE TABLE ever (id int PRIMARY KEY)")
    conn.execute("SELECT stint.create_state('ever', 'deduplicate')")
    steps = ["INSERT INTO goods VALUES ('a', 1, 1)", "INSERT INTO ever VALUES (1)", "INSERT INTO goods VALUES ('b', 1, 1)",
             "WITH e AS (INSERT INTO ever VALUES (2)) INSERT INTO goods VALUES ('c', 1, 1)", "INSERT INTO goods VALUES ('d', 1, 1)"]  # fmt: skip
    for step in steps:
        conn.execute(step)
        conn.execute("SELECT stint.tick()")
    before = rows(conn, "SELECT pos, kind, key FROM stint.changes('ever')")
    conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")
    expire(conn)
    assert rows(conn, "SELECT relation::text, floor_pos FROM stint.captures ORDER BY 1") == [("ever", 0), ("goods", 3)]
    assert rows(conn, "SELECT pos, kind, key FROM stint.changes('ever')") == before, "positions never shift"
    assert value(conn, "SELECT count(*) FROM stint.change_log WHERE relation = 'goods'::regclass") == 2
    conn.execute("SELECT stint.set_history('ever', '1 hour')")
    expire(conn)
    assert rows(conn, "SELECT relation::text, floor_pos FROM stint.captures ORDER BY 1") == [("ever", 5), ("goods", 6)]


def test_what_lies_below_the_floor_is_an_error_that_names_the_earliest_point(goods):
    conn = goods
    early = value(conn, "SELECT stint.pin()")
    conn.execute("INSERT INTO goods VALUES ('a', 1, 1)")
    late = value(conn, "SELECT stint.pin()")
    age(conn)
    expire(conn)
    assert call(conn, "expire_changes") == [(0, 0, 0, False)]
    for read in ("goods_as_of(pos => 0)", "stint.diff('goods', since_pos => 0)"):
        with pytest.raises(psycopg.errors.SnapshotTooOld, match="earliest that can be read is position 1") as caught:
            conn.execute(f"SELECT * FROM {read}")
        assert "stint.set_history" in caught.value.diag.message_hint
    with pytest.raises(psycopg.errors.SnapshotTooOld, match=f"pin {early} .* public.goods|pin {early} .* goods"):
        conn.execute("SELECT stint.tag('early', %s)", (early,))
    conn.execute("SELECT stint.tag('late', %s)", (late,))
    assert texts(conn, "goods_as_of('late')") == texts(conn, "goods_as_of(pos => 1)") == ["(a,1,1)"]


def test_a_hold_keeps_a_tag_from_being_dropped(goods):
    conn = goods
    conn.execute("SELECT stint.tag('audit', hold => true)")
    assert rows(conn, "SELECT tag, hold FROM stint.tags") == [("audit", True)]
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="audit") as caught:
        conn.execute("SELECT stint.drop_tag('audit')")
    assert "stint.release_hold" in caught.value.diag.message_hint
    assert [value(conn, "SELECT stint.release_hold('audit')") for _ in range(2)] == [True, False]
    conn.execute("SELECT stint.drop_tag('audit')")
    assert rows(conn, "SELECT * FROM stint.tags") == []


def test_a_tag_waits_for_retention_and_then_sees_the_floor(goods, connect):
    conn, other = goods, connect()
    conn.execute("INSERT INTO goods VALUES ('a', 1, 1)")
    pin = value(conn, "SELECT stint.pin()")
    conn.execute("UPDATE goods SET qty = 2")
    conn.execute("SELECT stint.tag('other')")
    conn.execute("SELECT stint.tick()")
    with conn.transaction():
        conn.execute("SELECT stint.tag('open', %s)", (pin,))
        expiring = background(lambda: expire(other))
        waiting(conn, other.info.backend_pid, "Lock")
    expiring.join()
    age(conn)
    conn.execute("BEGIN")
    conn.execute("SELECT removed FROM stint.expire_changes()")
    late = connect()
    tagging = background(lambda: late.execute("SELECT stint.tag('late', %s)", (pin,)))
    waiting(conn, late.info.backend_pid, "Lock")
    conn.execute("COMMIT")
    with pytest.raises(psycopg.errors.SnapshotTooOld):
        tagging.join()
    assert texts(conn, "goods_as_of('open')") == ["(a,1,1)"]


def test_tags_made_while_changes_go_read_what_their_reader_saw(goods, connect):
    conn, errors, stop, seen = goods, [], threading.Event(), {}
    conn.execute("SELECT stint.set_history('goods', '50 ms')")

    def repeat(work):
        session = connect()

        def run():
            try:
                while not stop.is_set():
                    work(session)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        return threading.Thread(target=run)

    def write(session):
        key = random.choice("abcdefgh"), random.choice(["1", "1.0", "2"])
        what = random.random()
        try:
            if what < 0.5:
                session.execute("INSERT INTO goods VALUES (%s, %s, 1) ON CONFLICT (sku, lot) DO UPDATE SET qty = goods.qty + 1", key)
            elif what < 0.8:
                session.execute("DELETE FROM goods WHERE sku = %s AND lot = %s", key)
            else:
                session.execute("UPDATE goods SET lot = lot * 1.0 WHERE sku = %s", key[:1])
        except psycopg.errors.DeadlockDetected:
            pass

    def let_go(session):
        session.execute("SELECT stint.tick()")
        session.execute("SELECT stint.expire_changes()")

    threads = [repeat(write) for _ in range(3)] + [repeat(let_go)]
    for thread in threads:
        thread.start()
    reader = connect()
    for number in range(40):
        with reader.transaction():
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            # Held from before the snapshot: nothing goes that it does not see gone.
            first = texts(reader, "goods")
            try:
                with reader.transaction():
                    reader.execute("SELECT stint.tag(%s)", (f"t{number}",))
                    seen[f"t{number}"] = first
            except psycopg.errors.SnapshotTooOld:
                pass  # told, in place of a tag that lacks rows
        if number % 5 == 4 and f"t{number - 4}" in seen:
            reader.execute("SELECT stint.drop_tag(%s)", (f"t{number - 4}",))
            del seen[f"t{number - 4}"]
        for tag, expected in seen.items():
            assert texts(reader, f"goods_as_of('{tag}')") == expected, tag
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == [] and len(seen) > 5
    let_go(reader)
    assert value(reader, "SELECT count(*) FROM stint.kept_images") > 0
    for tag, expected in seen.items():
        assert texts(reader, f"goods_as_of('{tag}')") == expected, tag
        for row in expected[:3]:
            sku, lot, _ = row.strip("()").split(",")
            assert [text for text in texts(reader, f"(SELECT * FROM goods_as_of('{tag}') WHERE sku = '{sku}' AND lot = {lot})")] == [row]
