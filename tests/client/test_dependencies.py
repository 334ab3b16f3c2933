"""Tasks that wait for other tasks: blocked until all have ended, and what becomes of them when one does not complete."""

import json
import time
import uuid

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, value, waiting


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=1)


def test_a_task_is_blocked_until_all_it_depends_on_have_completed(queue):
    a, b = queue.enqueue('"a"'), queue.enqueue('"b"')
    c = queue.enqueue('"c"', depends_on=[b, a, b])
    found = queue.task(c)
    assert (found.status, found.depends_on) == ("blocked", sorted([a, b]))
    assert found.why.startswith("waits for task ") and found.why.endswith(" and 1 more")
    assert call(queue.conn, "explain", queue="q", id=c)[0][0].startswith("blocked: waits for 2 tasks to end: ")
    assert rows(queue.conn, "SELECT blocked, ready FROM stint.queue_stats WHERE queue = 'q'") == [(1, 2)]
    first, second = queue.claim(9)
    queue.complete(first)
    assert queue.task(c).why == f"waits for task {b}" and queue.claim() == []
    assert call(queue.conn, "explain", queue="q", id=c)[0][0] == f"blocked: waits for task {b} to end"
    queue.complete(second)
    assert queue.one().id == c and queue.task(c).status == "running"


def test_what_has_completed_before_counts_at_once(queue):
    done = queue.enqueue()
    queue.complete(queue.one())
    assert queue.status(queue.enqueue(depends_on=[done])) == "ready"
    later = queue.enqueue(depends_on=[done], delay="1 hour")
    assert queue.status(later) == "scheduled"


def test_a_delay_still_holds_once_the_dependencies_have_ended(queue):
    a = queue.enqueue()
    late = queue.enqueue(depends_on=[a], delay="1 hour")
    assert queue.status(late) == "blocked" and queue.task(late).run_at is not None
    queue.complete(queue.one())
    assert queue.status(late) == "scheduled"
    queue.due(late)
    assert queue.one().id == late


@pytest.mark.parametrize("policy, status", [("fail", "failed"), ("cancel", "cancelled"), ("run", "ready")])
@pytest.mark.parametrize("how", ["fail", "cancel", "lapse", "cancel running", "before"])
def test_a_dependency_that_does_not_complete_fails_cancels_or_runs_its_dependents(queue, policy, status, how):
    a = queue.enqueue()
    enqueue = lambda: queue.enqueue(depends_on=[a], on_dependency_failure=policy)  # noqa: E731
    id = None if how == "before" else enqueue()
    if how == "cancel":
        queue.cancel(a)
    else:
        task = queue.one()
        if how == "cancel running":
            queue.cancel(a)
        queue.lapse(task) if how == "lapse" else queue.release(task) if how == "cancel running" else queue.fail(task)
    id = id or enqueue()
    assert queue.status(id) == status
    if status != "ready":
        ended = "was cancelled" if "cancel" in how else "failed"
        assert queue.task(id).why == f"task {a}, on which it depends, {ended}"
        assert queue.claim() == []


def test_a_failure_reaches_all_that_depend_on_it_at_once_and_stops_at_those_that_run_all_the_same(queue):
    root, other = queue.enqueue(), queue.enqueue(priority=-1)
    child = queue.enqueue(depends_on=[root, other])
    grandchild = queue.enqueue(depends_on=[child], on_dependency_failure="cancel")
    anyway = queue.enqueue(depends_on=[grandchild], on_dependency_failure="run")
    behind = queue.enqueue(depends_on=[anyway])
    queue.fail(queue.one())
    assert [queue.status(id) for id in (child, grandchild, anyway, behind)] == ["failed", "cancelled", "ready", "blocked"]
    queue.complete(queue.one())
    assert queue.status(behind) == "ready" and queue.status(other) == "ready"


def test_a_retried_dependency_has_not_ended(conn):
    queue = Queue(conn, "r", max_attempts=2, backoff_base="1 hour")
    a = queue.enqueue()
    b = queue.enqueue(depends_on=[a])
    queue.fail(queue.one())
    assert queue.status(b) == "blocked"
    queue.due(a)
    queue.complete(queue.one())
    assert queue.status(b) == "ready"


def test_a_late_result_of_a_lapsed_lease_releases_dependents(conn):
    queue = Queue(conn, "r", max_attempts=2)
    a = queue.enqueue()
    b = queue.enqueue(depends_on=[a])
    task = queue.one()
    queue.lapse(task)
    assert queue.status(b) == "blocked"
    assert queue.complete(task).outcome == "completed"
    assert queue.status(b) == "ready"


def test_a_blocked_task_can_be_cancelled(queue):
    a = queue.enqueue()
    b = queue.enqueue(depends_on=[a])
    c = queue.enqueue(depends_on=[b])
    assert queue.cancel(b, reason="no more") == ("cancelled", "cancelled")
    assert queue.task(b).why == "no more" and queue.status(c) == "failed"
    assert queue.cancel(b) == ("already_finished", "cancelled")
    queue.complete(queue.one())
    assert queue.status(b) == "cancelled"


def test_a_blocked_task_answers_a_lease_it_never_granted(queue):
    a = queue.enqueue()
    b = queue.enqueue(depends_on=[a])
    [answer] = call(queue.conn, "complete", queue="q", id=b, lease=str(uuid.uuid4()))
    assert (answer.outcome, answer.status) == ("unknown_lease", "blocked")


def test_only_tasks_that_exist_can_be_named(conn, queue):
    other = Queue(conn, "other").enqueue()
    for stranger in other, uuid.uuid4():
        with pytest.raises(psycopg.errors.NoDataFound, match=f'queue "q" has no task {stranger}'):
            queue.enqueue(depends_on=[stranger])
    with pytest.raises(psycopg.errors.NullValueNotAllowed, match="depends_on"):
        queue.enqueue(depends_on=[None])
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="on_dependency_failure"):
        queue.enqueue(on_dependency_failure="ignore")
    assert value(conn, "SELECT count(*) FROM stint.task_facts WHERE queue = 'q'") == 0


def test_a_batch_takes_dependencies_and_names_the_element_that_is_wrong(queue):
    a = queue.enqueue()
    tasks = [{"payload": 1, "depends_on": [str(a)]}, {"payload": 2}, {"payload": 3, "depends_on": None, "group_key": "g"}]
    made = call(queue.conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    assert [queue.status(row.id) for row in made] == ["blocked", "ready", "ready"]
    assert queue.task(made[2].id).group_key == "g"
    for wrong, match in (
        ({"depends_on": ["x"]}, 'task 1, field "depends_on": invalid input syntax for type uuid'),
        ({"depends_on": "x"}, 'task 1 has a field "depends_on" that is not an array'),
        ({"on_dependency_failure": "x"}, "task 1: on_dependency_failure"),
    ):
        with pytest.raises(psycopg.Error, match=match):
            call(queue.conn, "enqueue_many", queue="q", tasks=json.dumps([{"payload": 1} | wrong]))


def test_everything_enqueued_in_one_transaction_is_a_workflow(conn, queue):
    with conn.transaction():
        a = queue.enqueue('"a"')
        bs = [queue.enqueue('"b"', depends_on=[a]) for _ in range(3)]
        c = queue.enqueue('"c"', depends_on=bs)
    order = []
    while batch := queue.claim(9):
        order.append("".join(task.payload for task in batch))
        for task in batch:
            queue.complete(task)
    assert order == ["a", "bbb", "c"] and queue.status(c) == "completed"


def test_an_enqueue_that_rolls_back_leaves_nothing_waiting(conn, connect, queue):
    a = queue.enqueue()
    session = connect(autocommit=False)
    queue.by(session).enqueue(depends_on=[a])
    # The claim steps over the row that is held, and finds it again.
    assert queue.claim() == []
    waiter = background(lambda: queue.by(connect()).claim(wait="20 s"))
    time.sleep(0.2)
    session.rollback()
    [task] = waiter.join()
    assert queue.complete(task).first


def test_an_end_waits_for_an_enqueue_that_depends_on_the_task(conn, connect, queue):
    a = queue.enqueue()
    task = queue.one()
    session, worker = connect(autocommit=False), connect()
    b = queue.by(session).enqueue(depends_on=[a])
    assert queue.extend(task).status == "held"
    done = background(lambda: queue.by(worker).complete(task))
    waiting(conn, worker.info.backend_pid, "Lock")
    session.commit()
    assert done.join().first and queue.status(b) == "ready"


def test_a_sweep_waits_for_nobody_and_the_dependents_follow(conn, connect, queue):
    """A producer that holds what a lapsed task would move does not keep the sweep from ending it."""
    a = queue.enqueue()
    b = queue.enqueue(depends_on=[a])
    task = queue.one()
    session = connect(autocommit=False)
    queue.by(session).enqueue(depends_on=[b])
    conn.execute("SET statement_timeout = '5 s'")
    assert queue.lapse(task).failed == 1
    assert queue.status(a) == "failed" and queue.status(b) == "blocked"
    session.commit()
    call(conn, "sweep")
    deadline = time.monotonic() + 10
    while queue.status(b) == "blocked":
        assert time.monotonic() < deadline
    assert queue.status(b) == "failed"


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_a_fan_in_of_ten_thousand_is_not_quadratic_even_under_an_old_snapshot(conn, connect, queue, order):
    old = connect(autocommit=False)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT 1")
    size, timed = 10_000, []
    tasks = json.dumps([{"payload": n, "priority": n % 2**31 if order.startswith("last") else 0} for n in range(size)])
    ids = [row.id for row in call(conn, "enqueue_many", queue="q", tasks=tasks)]
    last = queue.enqueue(depends_on=ids)
    if order.startswith("last"):
        ids.reverse()
    with conn.transaction():
        claimed = {task.id: task for task in queue.claim(size)}
    for start in range(0, size, 500):
        began = time.monotonic()
        with conn.transaction():
            for id in ids[start : start + 500]:
                queue.complete(claimed[id])
        timed.append(time.monotonic() - began)
    assert queue.status(last) == "ready"
    middle = len(timed) // 2
    # Were every end to walk the dead rows of those before it, the second half would take three times the first.
    assert sum(timed[middle:]) < 2 * sum(timed[:middle]) + 0.5, timed


def test_a_fan_out_of_thousands_moves_at_once(conn, queue):
    root = queue.enqueue()
    tasks = json.dumps([{"payload": n, "depends_on": [str(root)]} for n in range(5000)])
    call(conn, "enqueue_many", queue="q", tasks=tasks)
    queue.complete(queue.one())
    assert value(conn, "SELECT count(*) FROM stint.place_ready") == 5000
    assert [task.payload for task in queue.claim(5000)] == list(range(5000))


def test_many_workers_finishing_a_graph_lose_no_dependent(conn, connect):
    """Layers of tasks that each depend on all of the layer before, worked by eight sessions at once, some failing."""
    queue = Queue(conn, max_attempts=3, backoff_base="0")
    layer, count = [], 0
    for depth in range(5):
        layer = [queue.enqueue(str(depth), depends_on=layer) for _ in range(8)]
        count += 8
    sessions = [connect() for _ in range(8)]

    def worker(number):
        mine, done = queue.by(sessions[number]), 0
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < count:
            for task in mine.claim(2, worker=f"w{number}"):
                if task.attempt == 1 and number % 2:
                    mine.fail(task)
                else:
                    done += mine.complete(task).first
        return done

    assert sum(parallel(8, worker)) == count
    assert rows(conn, "SELECT outcome, count(*) AS n FROM stint.task_outcomes GROUP BY 1") == [("completed", count)]
    assert value(conn, "SELECT count(*) FROM stint.place_blocked") == 0
    started = rows(conn, "SELECT payload::int AS depth, min(started_at) AS begun, max(ended_at) AS ended FROM stint.task_attempts JOIN stint.task_facts USING (queue, id) GROUP BY 1 ORDER BY 1")  # fmt: skip
    assert all(before.ended <= after.begun for before, after in zip(started, started[1:]))
