"""Merges of several sessions at once."""

import json
import random
import threading
import time

from test_state_merge import merge, rows_of


def in_thread(work, *args):
    """Runs work in a thread; the returned function waits for it and gives its result or raises its error."""
    outcome = {}

    def run():
        try:
            outcome["value"] = work(*args)
        except Exception as error:  # noqa: BLE001
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    return join


def wait_until_blocked(conn, backend):
    deadline = time.monotonic() + 20
    while not conn.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", (backend.info.backend_pid,)).fetchone()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_eight_writers_of_one_key_lose_nothing(connect):
    conn = connect()
    groups = {f"s{n}": [f"v{n}"] for n in range(8)}
    conn.execute(f"CREATE TABLE hot (id int PRIMARY KEY, {', '.join(f's{n} int, v{n} text' for n in range(8))})")
    conn.execute("SELECT stint.create_state('hot', 'partial-update', groups => %s)", (json.dumps(groups),))

    def write(n, connection):
        inserted = 0
        for i in range(1, 61):
            inserted += merge(connection, "hot", [{"id": 1, f"s{n}": i, f"v{n}": str(i)}])[0]
        return inserted

    joins = [in_thread(write, n, connect()) for n in range(8)]
    assert sum(join() for join in joins) == 1
    assert rows_of(conn, "hot") == [[1] + [60, "60"] * 8]


def test_overlapping_batches_neither_deadlock_nor_lose_the_newest(connect):
    conn = connect()
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, at int, deleted_at int)")
    conn.execute("SELECT stint.create_state('hot', 'deduplicate', sequence => ARRAY['at'])")
    sequences = iter(range(1, 1 << 30))
    newest, lock = {}, threading.Lock()

    def write(seed, connection):
        rng = random.Random(seed)
        for _ in range(60):
            batch = []
            with lock:
                for key in rng.sample(range(30), 12):
                    batch.append({"id": key, "at": next(sequences)})
                    newest[key] = batch[-1]["at"]
            rng.shuffle(batch)
            merge(connection, "hot", batch)

    for join in [in_thread(write, seed, connect()) for seed in range(6)]:
        join()
    assert dict(conn.execute("SELECT id, at FROM hot").fetchall()) == newest


def test_an_older_row_that_waited_behind_a_delete_stays_dead(connect):
    one, two = connect(), connect()
    one.execute("CREATE TABLE goods (id int PRIMARY KEY, at int)")
    one.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    merge(one, "goods", [{"id": 1, "at": 1}])
    merge(two, "goods", [{"id": 7, "at": 1}])
    one.execute("BEGIN")
    assert merge(one, "goods", [{"id": 1, "at": 5}], "delete") == (0, 0, 1, 0, 0)
    waiting = in_thread(merge, two, "goods", [{"id": 1, "at": 3}])
    wait_until_blocked(one, two)
    one.execute("COMMIT")
    assert waiting() == (0, 0, 0, 0, 1)
    assert rows_of(one, "goods") == [[7, 1]]
    assert merge(two, "goods", [{"id": 1, "at": 4}]) == (0, 0, 0, 0, 1)
    assert merge(two, "goods", [{"id": 1, "at": 5}]) == (1, 0, 0, 0, 0)


def test_a_newer_row_that_waited_behind_a_delete_lives(connect):
    one, two = connect(), connect()
    one.execute("CREATE TABLE goods (id int PRIMARY KEY, s int, a text, r int, b text)")
    groups = {"s": {"fields": ["a"], "on_delete": "remove"}, "r": ["b"]}
    one.execute("SELECT stint.create_state('goods', 'partial-update', groups => %s)", (json.dumps(groups),))
    merge(one, "goods", [{"id": 1, "s": 1, "a": "old", "r": 9, "b": "kept?"}])
    one.execute("BEGIN")
    merge(one, "goods", [{"id": 1, "s": 5, "r": 9}], "delete")
    waiting = in_thread(merge, two, "goods", [{"id": 1, "s": 6, "a": "new", "r": 8, "b": "older"}])
    wait_until_blocked(one, two)
    one.execute("COMMIT")
    assert waiting()[0] == 1
    assert rows_of(one, "goods") == [[1, 6, "new", 9, None]]
    assert one.execute("SELECT count(*) FROM goods_tombstones").fetchone() == (0,)


def test_a_delete_meets_the_row_somebody_is_still_inserting(connect):
    one, two = connect(), connect()
    one.execute("CREATE TABLE goods (id int PRIMARY KEY, at int)")
    one.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    one.execute("BEGIN")
    merge(one, "goods", [{"id": 1, "at": 3}])
    waiting = in_thread(merge, two, "goods", [{"id": 1, "at": 5}], "delete")
    wait_until_blocked(one, two)
    one.execute("COMMIT")
    assert waiting() == (0, 0, 1, 0, 0)
    assert merge(one, "goods", [{"id": 1, "at": 4}]) == (0, 0, 0, 0, 1)
    assert rows_of(one, "goods") == []


def test_deletes_and_upserts_at_once_end_as_the_newest_of_each_key(connect):
    conn = connect()
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, at int)")
    conn.execute("SELECT stint.create_state('hot', 'deduplicate', sequence => ARRAY['at'])")
    rng = random.Random(5)
    events = [(key, at, rng.random() < 0.4) for at in range(1, 240) for key in [rng.randrange(6)]]
    newest = {key: (at, gone) for key, at, gone in events}

    def write(part, connection):
        for key, at, gone in part:
            merge(connection, "hot", [{"id": key, "at": at}], "delete" if gone else "upsert")

    parts = [[] for _ in range(6)]
    for event in events:
        rng.choice(parts).append(event)
    for join in [in_thread(write, part, connect()) for part in parts]:
        join()
    assert dict(conn.execute("SELECT id, at FROM hot").fetchall()) == {key: at for key, (at, gone) in newest.items() if not gone}


def test_a_fixed_snapshot_that_cannot_see_the_tombstone_or_the_row_fails(connect):
    one, two = connect(), connect()
    one.execute("CREATE TABLE goods (id int PRIMARY KEY, at int)")
    one.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    merge(one, "goods", [{"id": 1, "at": 1}])
    for other, other_kind, ours, our_kind in (
        ({"id": 1, "at": 5}, "delete", {"id": 1, "at": 3}, "upsert"),
        ({"id": 1, "at": 6}, "upsert", {"id": 1, "at": 7}, "delete"),
        ({"id": 2, "at": 6}, "upsert", {"id": 2, "at": 7}, "delete"),
    ):
        two.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM goods")
        merge(one, "goods", [other], other_kind)
        try:
            merge(two, "goods", [ours], our_kind)
        except Exception as error:  # noqa: BLE001
            assert error.sqlstate == "40001", error
        else:
            raise AssertionError("not refused")
        finally:
            two.execute("ROLLBACK")
    two.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
    assert merge(two, "goods", [{"id": 1, "at": 7}]) == (0, 1, 0, 0, 0)
    assert merge(two, "goods", [{"id": 1, "at": 8}, {"id": 3, "at": 8}], "delete") == (0, 0, 1, 1, 0)
    assert merge(two, "goods", [{"id": 3, "at": 7}, {"id": 1, "at": 9}]) == (1, 0, 0, 0, 1)
    two.execute("COMMIT")
    assert rows_of(one, "goods") == [[1, 9], [2, 6]]


def mixed(rng, batch):
    """The rows of a batch of several kinds, each with its kind, as often as not shuffled."""
    if rng.random() < 0.5:
        rng.shuffle(batch)
    return [{**row, "op": op} for op, row in batch]


def test_batches_of_several_kinds_at_once_end_as_the_newest_of_each_key(connect):
    conn = connect()
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, at int)")
    conn.execute("SELECT stint.create_state('hot', 'deduplicate', sequence => ARRAY['at'], rowkind => 'op')")
    rng = random.Random(6)
    events = [(rng.randrange(10), at, rng.random() < 0.4) for at in range(1, 1200)]
    newest = {key: (at, gone) for key, at, gone in events}

    def write(seed, part, connection):
        rng = random.Random(seed)
        while part:
            batch, part = part[:4], part[4:]
            if rng.random() < 0.3:
                for key, at, gone in batch:
                    merge(connection, "hot", [{"id": key, "at": at}], "delete" if gone else "upsert")
            else:
                rows = mixed(rng, [("-D" if gone else "+I", {"id": key, "at": at}) for key, at, gone in batch])
                merge(connection, "hot", rows, rng.choice(["upsert", "delete"]))

    parts = [[] for _ in range(6)]
    for event in events:
        rng.choice(parts).append(event)
    for join in [in_thread(write, seed, part, connect()) for seed, part in enumerate(parts)]:
        join()
    assert dict(conn.execute("SELECT id, at FROM hot").fetchall()) == {key: at for key, (at, gone) in newest.items() if not gone}


def test_batches_of_several_kinds_at_once_are_seen_one_after_the_other(connect):
    """Every batch writes all keys, or deletes all, so whoever looks finds all of one batch or none; without a sequence nothing else puts them in order."""
    conn = connect()
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, stamp text)")
    conn.execute("SELECT stint.create_state('hot', 'deduplicate', rowkind => 'op')")
    keys = range(6)

    def look(connection):
        found = connection.execute("SELECT count(*), count(DISTINCT stamp) FROM hot").fetchone()
        assert found in ((0, 0), (6, 1)), found

    def write(seed, connection):
        rng = random.Random(seed)
        for i in range(60):
            written = [("+I", {"id": key, "stamp": f"{seed}/{i}"}) for key in keys]
            what = rng.choice(["replace", "replace", "write", "delete"])
            if what == "replace":
                rows = mixed(rng, [("-D", {"id": key}) for key in keys if rng.random() < 0.5]) + mixed(rng, written)
            elif what == "write":
                rows = mixed(rng, written)
            else:
                rows = mixed(rng, [("-D", {"id": key}) for key in keys])
            merge(connection, "hot", rows)
            look(connection)

    for join in [in_thread(write, seed, connect()) for seed in range(6)]:
        join()
    look(conn)


def test_what_is_added_and_taken_back_at_once_adds_up(connect):
    """Retractions make the rows that they come before: nothing is lost whoever is first."""
    conn = connect()
    conn.execute("CREATE TABLE hot (id int PRIMARY KEY, n int)")
    conn.execute("""SELECT stint.create_state('hot', 'aggregation', fields => '{"n": "sum"}', deletes => 'retract', rowkind => 'op')""")
    total, lock = {}, threading.Lock()

    def write(seed, connection):
        rng = random.Random(seed)
        for i in range(50):
            first = i // 5 * 4
            batch = [(rng.choice(["+U", "-U"]), {"id": first + rng.randrange(8), "n": rng.randrange(1, 100)}) for _ in range(rng.choice([1, 2, 5]))]
            with lock:
                for op, row in batch:
                    total[row["id"]] = total.get(row["id"], 0) + (row["n"] if op == "+U" else -row["n"])
            merge(connection, "hot", mixed(rng, batch))

    for join in [in_thread(write, seed, connect()) for seed in range(6)]:
        join()
    assert dict(conn.execute("SELECT id, n FROM hot").fetchall()) == total


def test_a_merge_that_waited_for_another_feed_of_the_table_is_refused(connect):
    one, two = connect(), connect()
    one.execute("CREATE TABLE goods (id int PRIMARY KEY, at int)")
    one.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['at'])")
    for kind in "upsert", "delete":
        assert merge(two, "goods", [{"id": 1, "at": 1}])[0] == 1
        one.execute("BEGIN")
        one.execute("""SELECT stint.create_projection('p', 'goods', '{stock}', '{"id": "payload.id", "at": "seq"}', replace_rows => true)""")
        waiting = in_thread(merge, two, "goods", [{"id": 1, "at": 2}], kind)
        wait_until_blocked(one, two)
        one.execute("COMMIT")
        try:
            waiting()
        except Exception as error:  # noqa: BLE001
            assert error.sqlstate == "55000" and "projected" in str(error), error
        else:
            raise AssertionError("not refused")
        assert rows_of(one, "goods") == []
        one.execute("SELECT stint.drop_projection('p')")
        one.execute("TRUNCATE goods, goods_tombstones")
