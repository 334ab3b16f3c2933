"""Groups: a label, or in a queue with strict groups one task at a time and in order."""

import json
import time

import pytest
from stint import Queue, background, call, parallel, rows, value, waiting


@pytest.fixture
def strict(conn):
    return Queue(conn, strict_groups=True, max_attempts=3, backoff_base="1 hour")


def test_without_strict_groups_a_key_is_a_label(conn):
    queue = Queue(conn)
    ids = [queue.enqueue(str(n), group_key="a") for n in range(3)]
    assert [task.payload for task in queue.claim(9)] == [0, 1, 2]
    assert queue.task(ids[0]).group_key == "a"


def test_one_of_a_key_runs_at_a_time_in_the_order_of_enqueueing(strict):
    for n in range(4):
        strict.enqueue(json.dumps(f"a{n}"), group_key="a", priority=n)
        strict.enqueue(json.dumps(f"b{n}"), group_key="b")
    strict.enqueue('"alone"')
    got = []
    while batch := strict.claim(9):
        got.append({task.payload for task in batch})
        for task in batch:
            strict.complete(task)
    assert got == [{"a0", "b0", "alone"}, {"a1", "b1"}, {"a2", "b2"}, {"a3", "b3"}]
    assert value(strict.conn, "SELECT count(*) FROM stint.group_turns") == 0


def test_a_blocked_task_says_whose_turn_it_waits_for(strict):
    strict.enqueue(group_key="a")
    second = strict.enqueue(group_key="a")
    third = strict.enqueue(group_key="a", depends_on=[second])
    assert strict.task(second).why == 'waits for its turn in group "a"'
    assert strict.task(third).why == f'waits for task {second}; waits for its turn in group "a"'
    assert call(strict.conn, "explain", queue="q", id=third)[0][0] == (
        f'blocked: waits for task {second} to end; waits for its turn in group "a", 2 before it'
    )


@pytest.mark.parametrize("barrier", ["delayed", "retrying", "released", "lapsed", "dependent", "awaiting"])
def test_a_task_that_waits_holds_up_those_behind_it_and_nobody_else(strict, barrier):
    blocker = strict.enqueue('"blocker"') if barrier == "dependent" else None
    options = {"delayed": {"delay": "1 hour"}, "dependent": {"depends_on": [blocker]}}.get(barrier, {})
    first = strict.enqueue('"first"', group_key="a", **options)
    second = strict.enqueue('"second"', group_key="a")
    if barrier not in ("delayed", "dependent"):
        task = strict.one()
        if barrier == "awaiting":
            assert call(strict.conn, "await", queue="q", id=task.id, lease=task.lease, event="e")[0].status == "waiting"
        else:
            {"retrying": strict.fail, "released": strict.release, "lapsed": strict.lapse}[barrier](task)
    other = strict.enqueue('"other"', group_key="b")
    expected = {"released": ["first", "other"], "lapsed": ["first", "other"], "dependent": ["blocker", "other"]}
    claimed = strict.claim(9)
    assert sorted(task.payload for task in claimed) == expected.get(barrier, ["other"])
    for task in claimed:
        strict.complete(task)
    if barrier == "awaiting":
        call(strict.conn, "emit", event="e")
    elif barrier in ("delayed", "retrying"):
        strict.due(first)
    if barrier not in ("released", "lapsed"):
        task = strict.one()
        assert task.id == first
        strict.complete(task)
    assert strict.one().id == second and strict.status(other) == "completed"


@pytest.mark.parametrize("how", ["complete", "fail", "cancel", "cancel running", "late", "lapse"])
def test_every_end_hands_the_turn_on(conn, how):
    queue = Queue(conn, strict_groups=True, max_attempts=2 if how == "late" else 1)
    first, second, third = (queue.enqueue(group_key="a") for _ in range(3))
    queue.cancel(second)  # not its turn: changes nothing for the others
    assert queue.status(third) == "blocked"
    if how == "cancel":
        queue.cancel(first)
    else:
        task = queue.one()
        if how == "cancel running":
            queue.cancel(first)
            queue.release(task)
        elif how == "late":
            queue.lapse(task)
            assert queue.status(third) == "blocked"
            assert queue.complete(task).outcome == "completed"
        else:
            getattr(queue, how)(task)
    assert queue.one().id == third


def test_a_turn_goes_on_past_tasks_that_fail_with_what_they_depend_on(conn):
    queue = Queue(conn, strict_groups=True, max_attempts=1)
    root = queue.enqueue()
    first = queue.enqueue(group_key="a", depends_on=[root])
    second = queue.enqueue(group_key="a", depends_on=[root])
    third = queue.enqueue(group_key="a", depends_on=[first], on_dependency_failure="run")
    queue.fail(queue.one())
    assert [queue.status(id) for id in (first, second, third)] == ["failed", "failed", "ready"]
    # One that is over before it begins takes no turn.
    queue.complete(queue.one())
    dead = queue.enqueue(group_key="a", depends_on=[root])
    assert queue.status(dead) == "failed" and queue.status(queue.enqueue(group_key="a")) == "ready"


def test_a_batch_keeps_the_order_within_its_groups(strict):
    tasks = [{"payload": n, "group_key": f"g{n % 3}"} for n in range(30)]
    call(strict.conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    got = []
    while batch := strict.claim(9):
        assert len(batch) == 3
        got += [task.payload for task in batch]
        for task in batch:
            strict.complete(task)
    assert got == list(range(30))


def test_an_enqueue_that_rolls_back_takes_no_turn(strict, connect):
    session = connect(autocommit=False)
    strict.by(session).enqueue('"gone"', group_key="a")
    other = connect()
    mine = background(lambda: strict.by(other).enqueue('"mine"', group_key="a"))
    waiting(strict.conn, other.info.backend_pid, "Lock")
    session.rollback()
    assert strict.status(mine.join()) == "ready"


def test_thirty_two_claimers_never_run_two_of_a_key(conn, connect):
    queue = Queue(conn, strict_groups=True, max_attempts=50, backoff_base="0")
    tasks = [{"payload": n, "group_key": f"g{n % 5}"} for n in range(400)]
    call(conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    sessions = [connect() for _ in range(32)]
    watching = connect()

    def claimer(number):
        mine, done = queue.by(sessions[number]), []
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < 400:
            for task in mine.claim(3, worker=f"w{number}"):
                if task.attempt == 1 and task.payload % 7 == 0:
                    mine.fail(task, retry_in="0")
                elif task.attempt == 1 and task.payload % 11 == 0:
                    mine.release(task)
                else:
                    mine.complete(task)
                    done.append(task.payload)
        return done

    def watch():
        most = 0
        while value(watching, "SELECT count(*) FROM stint.task_outcomes") < 400:
            most = max([most] + [n for (n,) in rows(watching, "SELECT count(*) AS n FROM stint.place_running r JOIN stint.task_facts f USING (queue, id) GROUP BY f.group_key")])  # fmt: skip
        return most

    watcher = background(watch)
    assert sorted(sum(parallel(32, claimer), [])) == list(range(400))
    assert watcher.join() <= 1
    for key in range(5):
        order = [n for (n,) in rows(conn, "SELECT payload::int AS n FROM stint.task_outcomes JOIN stint.task_facts USING (queue, id) WHERE group_key = %s ORDER BY finished_at", f"g{key}")]  # fmt: skip
        assert order == sorted(order)
    overlaps = value(conn, """
        SELECT count(*) FROM (
            SELECT started_at < lag(ended_at) OVER (PARTITION BY group_key ORDER BY attempt_order) AS over
            FROM (SELECT f.group_key, a.started_at, a.ended_at, row_number() OVER (ORDER BY f.group_seq, a.attempt) AS attempt_order
                  FROM stint.task_attempts a JOIN stint.task_facts f USING (queue, id)) x) y WHERE over""")  # fmt: skip
    assert overlaps == 0


def test_ten_thousand_tasks_of_a_busy_key_do_not_slow_the_claim_of_another(conn):
    queue, alone = Queue(conn, strict_groups=True), Queue(conn, "alone", strict_groups=True)
    tasks = json.dumps([{"payload": n, "group_key": "busy"} for n in range(10_000)])
    call(conn, "enqueue_many", queue="q", tasks=tasks)
    assert queue.one().payload == 0

    def best(of):
        times = []
        for n in range(30):
            of.enqueue(group_key=f"{n}")
            times.append(value(conn, "EXPLAIN (ANALYZE, FORMAT json) SELECT * FROM stint.claim(%s, 'w')", of.name)[0]["Execution Time"])
            of.conn.execute("SELECT c.outcome FROM stint.place_running r, stint.complete(r.queue, r.id, r.lease) c WHERE r.queue = %s AND (SELECT group_key FROM stint.task_facts f WHERE f.queue = r.queue AND f.id = r.id) <> 'busy'", (of.name,))  # fmt: skip
        return sorted(times)[len(times) // 4]

    best(alone), best(queue)
    assert best(queue) < 2 * best(alone) + 0.2


def test_a_busy_key_takes_turns_with_others(strict):
    for n in range(50):
        strict.enqueue(json.dumps("busy"), group_key="busy")
    strict.enqueue(json.dumps("other"), group_key="other")
    order = []
    for _ in range(3):
        task = strict.one()
        order.append(task.payload)
        strict.complete(task)
    assert order == ["busy", "other", "busy"]


def test_a_long_line_moves_at_the_same_pace_under_an_old_snapshot(conn, connect):
    queue = Queue(conn, strict_groups=True)
    old = connect(autocommit=False)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT 1")
    call(conn, "enqueue_many", queue="q", tasks=json.dumps([{"payload": n, "group_key": "a"} for n in range(4000)]))
    timed = []
    for _ in range(8):
        began = time.monotonic()
        with conn.transaction():
            for _ in range(500):
                assert queue.complete(queue.one()).first
        timed.append(time.monotonic() - began)
    assert sum(timed[4:]) < 2 * sum(timed[:4]) + 0.5, timed
