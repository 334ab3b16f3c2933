"""Watches: one task for each committed edge, in the transaction that made it, whatever that transaction did on the way; and nothing that a watch meets fails it."""

import json
import random

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, value, waiting

GOODS = "CREATE TABLE goods (sku text PRIMARY KEY, qty int, price numeric, at timestamptz, note text)"


@pytest.fixture
def goods(conn):
    """A state table of goods and a queue; the function declares a watch."""
    conn.execute(GOODS)
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    queue = Queue(conn, "buy")

    def watch(condition, name="low", **more):
        call(conn, "create_watch", name=name, relation="goods", condition=condition, queue="buy", **more)
        return queue

    return watch


def merge(conn, *goods, **options):
    call(conn, "merge", relation="goods", rows=json.dumps(goods), **options)


def fired(conn, watch="low"):
    """Keys of the tasks that a watch made, in order."""
    return [key for (key,) in conn.execute(
        "SELECT p.payload -> 'key' ->> 'sku' FROM stint.task_payloads p JOIN stint.tasks t USING (queue, id)"
        " WHERE p.payload ->> 'watch' = %s ORDER BY t.enqueued_at, t.id", (watch,))]  # fmt: skip


def watch_row(conn, name="low"):
    [row] = rows(conn, "SELECT * FROM stint.watches WHERE watch = %s", name)
    return row


def test_an_edge_makes_one_task_and_what_stays_true_none(conn, goods):
    queue = goods("qty < 10", payload='{"team": "eu"}', priority=7, labels='{"kind": "reorder"}')
    merge(conn, {"sku": "a", "qty": 12, "price": "1.10"}, {"sku": "b", "qty": 3})
    assert fired(conn) == ["b"], "a row that is born below the point fires, one above does not"
    merge(conn, {"sku": "a", "qty": 9, "price": "1.10", "note": "x"})
    merge(conn, {"sku": "a", "qty": 8, "price": "1.10"})
    merge(conn, {"sku": "b", "qty": None})
    assert fired(conn) == ["b", "a"]
    merge(conn, {"sku": "b", "qty": 5})
    assert fired(conn) == ["b", "a", "b"], "null is not true, so what follows it is an edge"
    tasks = rows(conn, "SELECT t.priority, t.key, t.labels, p.payload::text FROM stint.tasks t JOIN stint.task_payloads p USING (queue, id) ORDER BY t.enqueued_at, t.id")
    assert tasks[1].payload == (
        '{"key": {"sku": "a"}, "team": "eu", "after": {"at": null, "qty": 9, "sku": "a", "note": "x", "price": 1.10},'
        ' "watch": "low", "before": {"at": null, "qty": 12, "sku": "a", "note": null, "price": 1.10}, "relation": "public.goods"}'
    )
    assert (tasks[1].priority, tasks[1].labels) == (7, {"kind": "reorder"})
    assert len({t.key for t in tasks}) == 3 and all(t.key.startswith("watch:low:") for t in tasks)
    assert json.loads(tasks[0].payload)["before"] is None
    row = watch_row(conn)
    assert (row.fired, row.failed, row.disarmed, row.last_error) == (3, 0, 0, None) and row.last_fired_at is not None
    history = rows(conn, "SELECT * FROM stint.watch_history ORDER BY fired_at")
    assert [h.key for h in history] == [["b"], ["a"], ["b"]] and {h.id for h in history} == {t.id for t in queue.claim(max=9)}


@pytest.mark.parametrize(
    "statements, keys",
    [
        (["UPDATE goods SET qty = 5 WHERE sku = 'a'", "UPDATE goods SET qty = 50 WHERE sku = 'a'"], []),
        (["UPDATE goods SET qty = 5 WHERE sku = 'a'", "UPDATE goods SET qty = 4 WHERE sku = 'a'"], ["a"]),
        (["DELETE FROM goods WHERE sku = 'a'", "INSERT INTO goods VALUES ('a', 5)"], ["a"]),
        (["DELETE FROM goods WHERE sku = 'low'", "INSERT INTO goods VALUES ('low', 5)"], []),
        (["INSERT INTO goods VALUES ('new', 5)", "DELETE FROM goods WHERE sku = 'new'"], []),
        (["SAVEPOINT s", "UPDATE goods SET qty = 5", "ROLLBACK TO s"], []),
        (["SAVEPOINT s", "UPDATE goods SET qty = 5 WHERE sku = 'a'", "ROLLBACK TO s", "UPDATE goods SET note = 'x' WHERE sku = 'a'"], []),
        (["SAVEPOINT s", "UPDATE goods SET qty = 5 WHERE sku = 'a'", "RELEASE s"], ["a"]),
        (["UPDATE goods SET qty = 5 WHERE sku = 'a'", "SAVEPOINT s", "UPDATE goods SET qty = 50 WHERE sku = 'a'", "ROLLBACK TO s"], ["a"]),
        (["SET CONSTRAINTS ALL IMMEDIATE", "UPDATE goods SET qty = 5 WHERE sku = 'a'", "UPDATE goods SET qty = 50 WHERE sku = 'a'"], []),
        (["UPDATE goods SET sku = 'c', qty = 5 WHERE sku = 'a'"], ["c"]),
        (["TRUNCATE goods", "INSERT INTO goods VALUES ('a', 5), ('low', 4)"], ["a"]),
        (["SET LOCAL TRANSACTION ISOLATION LEVEL SERIALIZABLE"], []),
    ],
)  # fmt: skip
def test_what_counts_is_the_net_change_of_the_transaction(conn, goods, statements, keys):
    conn.execute("INSERT INTO goods VALUES ('a', 20), ('low', 5)")
    goods("qty < 10")
    with conn.transaction():
        for statement in statements:
            conn.execute(statement)
    assert fired(conn) == keys


def test_a_transaction_that_is_rolled_back_makes_nothing(conn, goods):
    goods("qty < 10")
    with conn.transaction(force_rollback=True):
        conn.execute("INSERT INTO goods VALUES ('a', 5)")
    assert fired(conn) == [] and watch_row(conn).fired == 0


def test_copy_and_a_procedure_that_commits_count(conn, goods):
    goods("qty < 10")
    with conn.cursor().copy("COPY goods (sku, qty) FROM STDIN") as copy:
        copy.write("a\t5\nb\t50\n")
    conn.execute("DO $$BEGIN INSERT INTO goods VALUES ('c', 1); COMMIT; UPDATE goods SET qty = 50 WHERE sku = 'c'; UPDATE goods SET qty = 1 WHERE sku = 'c'; END$$")
    assert sorted(fired(conn)) == ["a", "c"]


def test_what_the_users_own_deferred_triggers_change_counts(conn, goods):
    conn.execute("""CREATE FUNCTION refill() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN UPDATE goods SET qty = 100 WHERE sku = new.sku; RETURN NULL; END$$""")
    conn.execute("CREATE CONSTRAINT TRIGGER refill AFTER INSERT ON goods DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refill()")
    goods("qty < 10")
    conn.execute("INSERT INTO goods VALUES ('a', 5)")
    assert fired(conn) == []


@pytest.mark.parametrize(
    "condition, keys",
    [
        ("before.qty - after.qty >= 10", ["down"]),
        ("before.qty < after.qty", ["up"]),
        ("changed(note)", ["down", "new"]),
        ("inserted()", ["new"]),
        ("deleted() and before.qty > 5", ["gone"]),
        ("updated() and note is not null", ["down"]),
        ("before.qty is distinct from qty", ["down", "gone", "new", "up"]),
        ("after.qty is null and before.qty is not null", ["gone"]),
        ("qty is null", ["null"]),
        ("price / (qty - 7) > 0 and updated()", ["down"]),
    ],
)  # fmt: skip
def test_a_condition_on_the_change_fires_for_each_change_of_which_it_is_true(conn, goods, condition, keys):
    conn.execute("INSERT INTO goods VALUES ('down', 20, 1), ('up', 5, 1), ('gone', 9, 1), ('same', 9, 1), ('null', 9, 1)")
    goods(condition)
    with conn.transaction():
        conn.execute("INSERT INTO goods VALUES ('new', 1, 1, NULL, 'n')")
        conn.execute("UPDATE goods SET qty = 10, note = 'x' WHERE sku = 'down'")
        conn.execute("UPDATE goods SET qty = 7 WHERE sku = 'up'")
        conn.execute("UPDATE goods SET qty = 9 WHERE sku = 'same'")
        conn.execute("DELETE FROM goods WHERE sku = 'gone'")
    if condition == "qty is null":
        conn.execute("UPDATE goods SET qty = NULL WHERE sku = 'null'")
        conn.execute("DELETE FROM goods WHERE sku = 'null'")
    assert sorted(fired(conn)) == keys
    assert watch_row(conn).failed == 0, "a division by zero is null"


def test_types_are_compared_as_postgresql_compares_them(conn):
    conn.execute("""
        CREATE TYPE risk AS ENUM ('low', 'middle', 'high');
        CREATE DOMAIN grams AS numeric CHECK (value >= 0);
        CREATE TYPE spot AS (x int, y int);
        CREATE TABLE t (id int PRIMARY KEY, risk risk, weight grams, at timestamptz, day date, tags text[], doc jsonb, "Odd ""Name" text COLLATE "C", code char(4), f float8,
                        spot spot, span int4range, small smallint);
        SELECT stint.create_queue('q'), stint.create_state('t', 'deduplicate');
    """)
    true = [
        "risk >= 'middle'", "risk <> 'low'", "risk in ('high', 'low')", "risk between 'middle' and 'high'", "weight = 0.30", "weight * 2 = '0.6'", "at > '2026-01-01'",
        "at - '1 day' < '2026-03-01 01:00+01'", "day < at", "day = '2026-01-03'", "tags = '{a,b}'", "doc = '{\"a\": 1.0}'", "\"Odd \"\"Name\" > 'Z'", "code = 'ab'", "f > 0.1",
        "f = 'Infinity'", "spot is not null", "changed(spot)", "span = '[1,5)'", "id % 2 = 1", "- small = 7 and small < 9999999999", "id not in (2, 3)",
        "risk is distinct from null", "(id + 1) * 2 = 4 and 7 / 2 = 3", "id is not null and true",
    ]  # fmt: skip
    for number, condition in enumerate(true):
        call(conn, "create_watch", name=f"true {number}", relation="t", condition=condition, queue="q")
        call(conn, "create_watch", name=f"false {number}", relation="t", condition=f"inserted() and not ({condition})", queue="q")
    with conn.transaction():
        # What a session sets changes nothing.
        conn.execute("SET LOCAL TimeZone = 'Asia/Tokyo'; SET LOCAL DateStyle = 'SQL, DMY'; SET LOCAL IntervalStyle = 'sql_standard'; SET LOCAL standard_conforming_strings = off")
        conn.execute("""INSERT INTO t VALUES (1, 'high', 0.3, '2026-03-01 00:00+00', '2026-01-03', '{a,b}', '{"a": 1}', 'a', 'ab', 'Infinity', '(1,)', '[1,4]', -7)""")
    made = {name for (name,) in conn.execute("SELECT payload ->> 'watch' FROM stint.task_payloads")}
    assert made == {f"true {n}" for n in range(len(true))}, [true[int(name.split()[1])] for name in made ^ {f"true {n}" for n in range(len(true))}]


@pytest.mark.parametrize(
    "condition, state, says",
    [
        ("qty <", "42601", "at its end: a column, a constant or"), ("qyt < 1", "42703", 'no column "qyt"'), ("qty < 'x'", "22P02", "invalid input syntax for type integer"),
        ("qty < note", "42804", "no operator integer < text"), ("qty", "42804", "of type integer"), ("at > 'now'", "22P02", "another time whenever"),
        ("lower(note) = 'x'", "42601", "no function lower"), ("note = 'x'; select 1", "42601", "at character 11"), ("qty < 2147483647 + 1", "22003", "integer out of range"),
        ("(" * 60 + "qty" + ")" * 60, "54000", "nested"), ("sku = 'x' collate \"C\"", "42601", "collate"), ("spot = spot", "42804", "spot"), ("spot > '(1,2)'", "42804", "spot"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_work_is_refused_with_its_place(conn, goods, condition, state, says):
    conn.execute("CREATE TYPE spot AS (x int, y int); ALTER TABLE goods ADD spot spot")
    for argument in "condition", "rearm":
        with pytest.raises(psycopg.Error) as error:
            goods(**{"condition": "qty < 10"} | {argument: condition})
        assert error.value.sqlstate == state and says in str(error.value), str(error.value)
        assert state == "22003" or argument in str(error.value) and error.value.diag.message_hint
    assert value(conn, "SELECT count(*) FROM stint.watches") == 0


def test_a_watch_that_rearms_fires_again_only_when_it_was_armed(conn, goods):
    goods("qty < 10", rearm="qty > 20")
    steps = [(8, 1), (12, 1), (7, 1), (20, 1), (5, 1), (21, 1), (15, 1), (9, 2), (30, 2), (2, 3), (None, 3), (3, 3), (25, 3), (1, 4)]
    for qty, count in steps:
        merge(conn, {"sku": "a", "qty": qty})
        assert len(fired(conn)) == count, qty
    assert watch_row(conn).disarmed == 1
    merge(conn, {"sku": "b", "qty": 1})
    assert fired(conn).count("b") == 1, "keys have nothing to do with each other"
    conn.execute("DELETE FROM goods WHERE sku = 'a'")
    assert watch_row(conn).disarmed == 1, "a row that goes takes what is remembered of it along"
    merge(conn, {"sku": "a", "qty": 1})
    assert fired(conn).count("a") == 5


def test_the_change_that_arms_a_key_does_not_fire_for_it(conn, goods):
    goods("qty < 10", rearm="note = 'seen'")
    for qty, note, count in (5, None, 1), (50, None, 1), (5, "seen", 1), (50, None, 1), (4, None, 2):
        merge(conn, {"sku": "a", "qty": qty, "note": note})
        assert (qty, len(fired(conn))) == (qty, count)


def test_a_paused_watch_makes_nothing_but_goes_on_arming(conn, goods):
    goods("qty < 10", rearm="qty > 20")
    merge(conn, {"sku": "a", "qty": 5})
    assert call(conn, "pause_watch", name="low")[0][0] and not call(conn, "pause_watch", name="low")[0][0]
    for qty in 30, 4, 30:
        merge(conn, {"sku": "a", "qty": qty})
    assert fired(conn) == ["a"] and watch_row(conn).disarmed == 0
    assert call(conn, "resume_watch", name="low")[0][0] and not call(conn, "resume_watch", name="low")[0][0]
    merge(conn, {"sku": "a", "qty": 3})
    assert fired(conn) == ["a", "a"]
    call(conn, "drop_watch", name="low")
    merge(conn, {"sku": "b", "qty": 3})
    assert fired(conn) == ["a", "a"] and value(conn, "SELECT count(*) FROM stint.watch_disarmed") == 0


def test_a_watch_counts_for_the_whole_of_the_transaction_that_declares_it(conn, goods):
    with conn.transaction():
        conn.execute("INSERT INTO goods VALUES ('a', 5)")
        goods("qty < 10")
        conn.execute("INSERT INTO goods VALUES ('b', 5)")
    assert sorted(fired(conn)) == ["a", "b"]
    with conn.transaction(force_rollback=True):
        goods("qty > 0", "any")
    conn.execute("INSERT INTO goods VALUES ('c', 50)")
    assert fired(conn, "any") == []


def test_what_another_session_declares_counts_for_the_next_change(conn, connect, goods):
    other = connect()

    def declare(session, name):
        call(session, "create_watch", name=name, relation="goods", condition="qty < 10", queue="buy")

    conn.execute("INSERT INTO goods VALUES ('before', 5)")
    declare(conn, "mine")
    declare(other, "first")
    conn.execute("INSERT INTO goods VALUES ('a', 5)")
    declare(other, "second")
    conn.execute("INSERT INTO goods VALUES ('b', 5)")
    call(other, "drop_watch", name="mine")
    conn.execute("INSERT INTO goods VALUES ('c', 5)")
    assert [fired(conn, name) for name in ("mine", "first", "second")] == [["a", "b"], ["a", "b", "c"], ["b", "c"]]


def set_aside(conn, change, says):
    """The change is made, no task is, and the watch says why."""
    before = watch_row(conn)
    change()
    after = watch_row(conn)
    assert (after.fired, after.failed) == (before.fired, before.failed + 1)
    assert says in after.last_error and after.last_error_at is not None


def test_what_keeps_a_watch_from_its_task_never_fails_the_change(conn, goods):
    call(conn, "create_budget", name="small", max_tokens=10)
    goods("qty * 1000000 < 10000000 and price > 0", budgets=["small"], tokens=5)
    merge(conn, {"sku": "a", "qty": 5, "price": 1, "note": "fits"})
    assert fired(conn) == ["a"]
    set_aside(conn, lambda: conn.execute("INSERT INTO goods VALUES ('big', 5, 1, NULL, repeat('x', 2000000)), ('b', 50, 1, NULL, NULL)"), '"payload"')
    set_aside(conn, lambda: merge(conn, {"sku": "over", "qty": 2_000_000, "price": 1}), "integer out of range")
    with conn.transaction():
        conn.execute("INSERT INTO goods SELECT 'r' || n, CASE WHEN n = 71 THEN 2000000 ELSE 5 END, 1 FROM generate_series(1, 100) n")
    assert len(fired(conn)) == 100 and watch_row(conn).failed == 3, "the one at fault is set aside alone"
    call(conn, "alter_budget", name="small", max_tokens=4)
    set_aside(conn, lambda: merge(conn, {"sku": "c", "qty": 5, "price": 1}), 'budget "small"')
    call(conn, "alter_budget", name="small", max_tokens=5)
    conn.execute("ALTER TABLE goods RENAME price TO cost")
    set_aside(conn, lambda: merge(conn, {"sku": "d", "qty": 5, "cost": 1}), 'no column "price"')
    conn.execute("ALTER TABLE goods RENAME cost TO price")
    merge(conn, {"sku": "e", "qty": 5, "price": 1})
    assert fired(conn)[-1] == "e"
    assert value(conn, "SELECT count(*) FROM goods") == 107
    assert [(r.ok, "low" in r.detail) for r in rows(conn, "SELECT * FROM stint.doctor() WHERE \"check\" = 'watches can make their tasks'")] == [(True, False)]
    conn.execute("ALTER TABLE goods DROP price")
    set_aside(conn, lambda: merge(conn, {"sku": "f", "qty": 5}), 'no column "price"')
    assert [(r.ok, "low" in r.detail) for r in rows(conn, "SELECT * FROM stint.doctor() WHERE \"check\" = 'watches can make their tasks'")] == [(False, True)]


def test_a_watch_does_no_more_than_its_declarer_may(conn, connect, goods):
    conn.execute("DROP ROLE IF EXISTS watcher; DROP ROLE IF EXISTS stranger; CREATE ROLE watcher; CREATE ROLE stranger")
    conn.execute("GRANT USAGE ON SCHEMA stint TO watcher, stranger; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO watcher, stranger")
    conn.execute("REVOKE EXECUTE ON FUNCTION stint.enqueue FROM watcher")
    try:
        other = connect()
        other.execute("SET ROLE watcher")
        declare = {"name": "w", "relation": "goods", "condition": "qty < 10", "queue": "buy"}
        for right in "SELECT ON goods", "EXECUTE ON FUNCTION stint.enqueue":
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                call(other, "create_watch", **declare)
            conn.execute(f"GRANT {right} TO watcher")
        call(other, "create_watch", **declare)
        assert watch_row(conn, "w").created_by == "watcher"
        merge(conn, {"sku": "a", "qty": 5})
        conn.execute("REVOKE SELECT ON goods FROM watcher")
        merge(conn, {"sku": "b", "qty": 5})
        conn.execute("GRANT SELECT ON goods TO watcher; REVOKE EXECUTE ON FUNCTION stint.enqueue FROM watcher")
        merge(conn, {"sku": "c", "qty": 5})
        assert fired(conn, "w") == ["a"] and watch_row(conn, "w").failed == 2
        other.execute("RESET ROLE; SET ROLE stranger")
        for verb in "drop_watch", "pause_watch", "resume_watch":
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match='watch "w"'):
                call(other, verb, name="w")
        other.execute("RESET ROLE; SET ROLE watcher")
        call(other, "drop_watch", name="w")
    finally:
        conn.execute("DROP OWNED BY watcher; DROP OWNED BY stranger; DROP ROLE watcher; DROP ROLE stranger")


def test_no_code_of_a_writer_runs_with_the_extensions_rights(conn, goods):
    """Operators and functions that come first in the writer's search path, and a temporary table in place of ours, are not used."""
    goods("qty is distinct from 50 and qty / 2 < 10 and sku in ('a', 'b')", rearm="qty > 20")
    conn.execute("""
        CREATE TABLE caught (who text);
        CREATE SCHEMA evil;
        CREATE FUNCTION evil.eq(int, int) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN INSERT INTO caught VALUES (current_user); RETURN true; END$$;
        CREATE FUNCTION evil.eqt(text, text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN INSERT INTO caught VALUES (current_user); RETURN true; END$$;
        CREATE FUNCTION evil.pg_current_xact_id() RETURNS xid8 LANGUAGE plpgsql AS $$BEGIN INSERT INTO caught VALUES (current_user); RETURN pg_catalog.pg_current_xact_id(); END$$;
        CREATE OPERATOR evil.= (LEFTARG = int, RIGHTARG = int, PROCEDURE = evil.eq);
        CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, PROCEDURE = evil.eqt);
        CREATE OPERATOR evil./ (LEFTARG = int, RIGHTARG = int, PROCEDURE = int4larger);
    """)
    conn.execute("SET search_path = evil, pg_temp, pg_catalog, public")
    conn.execute("INSERT INTO goods VALUES ('a', 5)")
    conn.execute("UPDATE goods SET qty = 25 WHERE sku OPERATOR(pg_catalog.=) 'a'")
    conn.execute("RESET search_path")
    assert fired(conn) == ["a"] and watch_row(conn).disarmed == 0 and value(conn, "SELECT count(*) FROM caught") == 0


def test_a_claim_that_waits_is_woken_by_the_commit_of_the_change(conn, connect, goods):
    queue = goods("qty < 10")
    other, pid = connect(), None
    pid = other.info.backend_pid
    claim = background(lambda: queue.by(other).claim(wait="20 s"))
    waiting(conn, pid, "Extension")
    with conn.transaction():
        merge(conn, {"sku": "a", "qty": 5})
        assert not claim.done()
    [task] = claim.join(10)
    assert task.payload["key"] == {"sku": "a"}


def test_a_prepared_transaction_is_evaluated_when_it_is_prepared(cluster):
    own = cluster(config={"max_prepared_transactions": 5})
    own.create_database("prepared")
    with own.connect("prepared") as conn:
        conn.execute(GOODS)
        conn.execute("SELECT stint.create_state('goods', 'deduplicate'), stint.create_queue('buy')")
        conn.execute("SELECT stint.create_watch('low', 'goods', 'qty < 10', 'buy')")
        conn.execute("SELECT stint.enqueue('buy', '{}')")  # the lane is there
        for end, count in ("ROLLBACK", 0), ("COMMIT", 1):
            conn.execute("BEGIN; INSERT INTO goods VALUES ('a', 5); PREPARE TRANSACTION 'p'")
            assert fired(conn) == []
            conn.execute(f"{end} PREPARED 'p'")
            assert len(fired(conn)) == count
        assert [t.payload.get("watch") for t in Queue(conn, "buy", create=False).claim(max=5)] == [None, "low"]


def test_dropping_a_state_drops_its_watches_and_a_dropped_table_leaves_none_behind(conn, goods):
    goods("qty < 10", rearm="qty > 20")
    merge(conn, {"sku": "a", "qty": 5})
    conn.execute("SELECT stint.drop_state('goods')")
    left = "SELECT (SELECT count(*) FROM stint.watches) + (SELECT count(*) FROM stint.watch_log) + (SELECT count(*) FROM stint.watch_disarmed)"
    assert value(conn, left) == 0
    conn.execute("INSERT INTO goods VALUES ('b', 5)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    goods("qty < 10", rearm="qty > 20")
    merge(conn, {"sku": "c", "qty": 5})
    conn.execute("DROP TABLE goods CASCADE")
    call(conn, "trim_watches")
    assert value(conn, left) == 0


def test_a_queue_in_which_schedules_or_watches_make_tasks_is_not_dropped(conn, goods):
    goods("qty < 10")
    call(conn, "create_schedule", queue="buy", name="nightly", cron="@daily", payload="{}")
    for force in False, True:
        with pytest.raises(psycopg.errors.DependentObjectsStillExist) as error:
            call(conn, "drop_queue", queue="buy", force=force)
        assert error.value.diag.message_detail == "They come from schedule nightly, watch low." and "drop_watch" in error.value.diag.message_hint
    call(conn, "drop_watch", name="low")
    call(conn, "drop_schedule", name="nightly")
    call(conn, "drop_queue", queue="buy")


def test_ten_thousand_edges_of_one_transaction_make_ten_thousand_tasks_and_a_queue_that_is_gone_none(conn, goods):
    goods("qty < 10", rearm="qty > 20")
    conn.execute("INSERT INTO goods SELECT n, 1 FROM generate_series(1, 10000) n")
    assert (watch_row(conn).fired, watch_row(conn).disarmed) == (10000, 10000)
    conn.execute("UPDATE goods SET qty = 30")
    assert watch_row(conn).disarmed == 0
    # As it is in a database that was put together by hand.
    conn.execute("UPDATE stint.watch_config SET into_queue = 'gone'")
    conn.execute("ANALYZE goods")
    conn.execute("UPDATE goods SET qty = 1")
    row = watch_row(conn)
    assert (row.fired, row.failed, row.disarmed) == (10000, 10000, 0) and 'queue "gone" does not exist' in row.last_error


def test_the_log_is_trimmed_and_still_counted(conn, goods):
    goods("qty < 10")
    conn.execute("INSERT INTO goods SELECT n, 1 FROM generate_series(1, 1500) n")
    assert watch_row(conn).fired == 1500
    assert call(conn, "trim_watches")[0][0] in (500, 0), "the maintenance worker may have been faster"
    assert watch_row(conn).fired == 1500 and value(conn, "SELECT count(*) FROM stint.watch_history") == 1000


def model(history, low, high):
    """How often a watch fires for a key that had these values in turn, and with hysteresis."""
    edges, again, armed, before = 0, 0, True, None
    for qty in history:
        edge = qty is not None and qty < low and not (before is not None and before < low)
        edges += edge
        if not armed:
            armed = qty is None or qty > high
        elif edge:
            again += 1
            armed = False
        before = qty
    return edges, again


def write(conn, seed):
    """Random transactions on few keys, with several statements, savepoints that are rolled back, and transactions that are."""
    chance = random.Random(seed)
    for _ in range(60):
        try:
            conn.execute(f"BEGIN ISOLATION LEVEL {chance.choice(['READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE'])}")
            for key in sorted(chance.sample("abcdef", chance.randint(1, 3))):
                for _ in range(chance.randint(1, 2)):
                    if chance.random() < 0.15:
                        conn.execute("DELETE FROM goods WHERE sku = %s", (key,))
                    else:
                        conn.execute(
                            "INSERT INTO goods VALUES (%s, %s) ON CONFLICT (sku) DO UPDATE SET qty = excluded.qty", (key, chance.randint(0, 30))
                        )
                if chance.random() < 0.2:
                    conn.execute("SAVEPOINT s")
                    conn.execute("UPDATE goods SET qty = 31 - qty WHERE sku = %s", (key,))
                    conn.execute("ROLLBACK TO s")
            conn.execute("ROLLBACK" if chance.random() < 0.1 else "COMMIT")
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            conn.execute("ROLLBACK")


def test_parallel_writers_make_one_task_for_each_edge_of_the_committed_history(conn, connect, goods):
    goods("qty < 10", "edge")
    goods("qty < 10", "again", rearm="qty > 20")
    writers = [connect() for _ in range(6)]
    parallel(6, lambda number: write(writers[number], number))
    history = {}
    # Per key the numbers rise in commit order; of each transaction its last change counts.
    for key, qty in conn.execute("""
            SELECT (c.key::text[])[1], c.after[2] FROM (SELECT *, lead(seq) OVER (PARTITION BY key, xid ORDER BY seq) AS next FROM stint.change_log) c
            WHERE c.next IS NULL ORDER BY c.seq"""):  # fmt: skip
        history.setdefault(key, []).append(None if qty is None else int(qty))
    expected = {key: model(changes, 10, 20) for key, changes in history.items()}
    made = [fired(conn, "edge"), fired(conn, "again")]
    assert {key: (made[0].count(key), made[1].count(key)) for key in expected} == expected
    assert sum(edges for edges, _ in expected.values()) > 50 and sum(again for _, again in expected.values()) > 20
    assert value(conn, "SELECT sum(failed) FROM stint.watches") == 0
