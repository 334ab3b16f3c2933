"""What the operations do to tasks that wait for others, have others wait for them, or stand in a strict group."""

import json

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, value, waiting


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=1)


@pytest.fixture
def strict(conn):
    return Queue(conn, max_attempts=1, strict_groups=True)


def statuses(queue, *ids):
    return [queue.status(id) for id in ids]


def nothing_left(conn):
    tables = "place_blocked", "task_dependencies", "group_turns", "follow_ups"
    return all(value(conn, f"SELECT count(*) FROM stint.{table}") == 0 for table in tables)


def run_all(queue):
    """Completes everything; the payloads in the order in which they ran."""
    ran = []
    while batch := queue.claim(9):
        ran += [task.payload for task in batch]
        for task in batch:
            queue.complete(task)
    return ran


# retry


def test_a_retried_task_of_a_strict_group_stands_at_the_end_of_its_line(strict):
    ids = [strict.enqueue(json.dumps(n), group_key="a") for n in range(4)]
    strict.fail(strict.one())
    held = strict.one()
    assert held.payload == 1
    assert strict.retry(ids[0]) == ("retried", "blocked")
    assert strict.task(ids[0]).why == 'waits for its turn in group "a"' and strict.claim(9) == []
    strict.complete(held)
    assert run_all(strict) == [2, 3, 0] and nothing_left(strict.conn)


def test_a_retried_task_of_a_strict_group_that_is_done_has_its_turn_at_once(strict):
    id = strict.enqueue('"a"', group_key="a")
    strict.fail(strict.one())
    assert strict.retry(id) == ("retried", "ready")
    behind = strict.enqueue('"b"', group_key="a")
    assert statuses(strict, id, behind) == ["ready", "blocked"]
    strict.cancel(id)
    assert strict.retry(id) == ("retried", "blocked")
    assert run_all(strict) == ["b", "a"] and nothing_left(strict.conn)


def test_failed_tasks_of_a_strict_group_are_retried_in_their_order(strict):
    for n in range(4):
        strict.enqueue(json.dumps(n), group_key="a")
    while batch := strict.claim():
        strict.fail(batch[0])
    assert value(strict.conn, "SELECT stint.retry_failed('q')") == 4
    assert sorted(status for (status,) in rows(strict.conn, "SELECT status FROM stint.tasks")) == ["blocked"] * 3 + ["ready"]
    assert run_all(strict) == [0, 1, 2, 3] and nothing_left(strict.conn)


def test_a_chain_that_failed_is_retried_as_a_chain(queue):
    first = queue.enqueue('"first"')
    second = queue.enqueue('"second"', depends_on=[first])
    third = queue.enqueue('"third"', depends_on=[first, second])
    queue.fail(queue.one())
    assert statuses(queue, first, second, third) == ["failed"] * 3
    assert value(queue.conn, "SELECT stint.retry_failed('q')") == 3
    assert statuses(queue, first, second, third) == ["ready", "blocked", "blocked"]
    assert run_all(queue) == ["first", "second", "third"] and nothing_left(queue.conn)


@pytest.mark.parametrize("policy, status", [("fail", "failed"), ("cancel", "cancelled"), ("run", "ready")])
def test_a_retried_task_waits_for_what_is_live_again_by_its_old_policy(queue, policy, status):
    a, b = queue.enqueue(), queue.enqueue(priority=-1)
    id = queue.enqueue(depends_on=[a, b], on_dependency_failure=policy)
    queue.cancel(id)
    queue.fail(queue.one())
    queue.fail(queue.one())
    # How they ended holds it up no more; that one of them lives again does.
    assert queue.retry(id) == ("retried", "ready") and queue.cancel(id).outcome == "cancelled"
    assert queue.retry(a) == ("retried", "ready")
    assert queue.retry(id) == ("retried", "blocked") and queue.task(id).why == f"waits for task {a}"
    queue.fail(queue.one())
    assert queue.status(id) == status


def test_a_retry_waits_for_no_task_that_is_not_known_any_more(queue):
    a, b = queue.enqueue(), queue.enqueue(priority=-1)
    id = queue.enqueue(depends_on=[a, b])
    queue.fail(queue.one())
    for table in "task_attempts", "task_outcomes", "task_facts":
        queue.conn.execute(f"DELETE FROM stint.{table} WHERE id = %s", (a,))
    assert queue.retry(id) == ("retried", "blocked") and queue.task(id).why == f"waits for task {b}"


def test_a_late_result_ends_a_task_that_a_retry_blocked(conn):
    queue = Queue(conn, max_attempts=1, strict_groups=True)
    late, other, depends = queue.enqueue(group_key="a"), queue.enqueue(group_key="a"), None
    task = queue.one()
    queue.lapse(task)
    assert queue.status(late) == "failed"
    [held] = queue.claim()
    assert held.id == other and queue.retry(late) == ("retried", "blocked")
    depends = queue.enqueue(depends_on=[late])
    behind = queue.enqueue(group_key="a")
    assert queue.fail(task).outcome == "superseded" and queue.status(late) == "blocked"
    items = json.dumps([{"id": str(t.id), "lease": str(t.lease)} for t in (task, held)])
    assert [a.outcome for a in call(conn, "complete_many", queue="q", items=items)] == ["completed"] * 2
    assert queue.complete(task).outcome == "already_completed"
    assert statuses(queue, late, other, depends, behind) == ["completed", "completed", "ready", "ready"]


def test_retries_whose_tasks_share_keys_in_opposite_order_do_not_deadlock(conn, connect):
    """Where keys expire, several failed tasks may have had the same one."""
    queue = Queue(conn, max_attempts=1, key_retention="0")
    sessions = [connect() for _ in range(2)]
    for trial in range(10):
        for key in ["k", "l"] * 4 + ["l", "k"] * 4:
            queue.enqueue(key=f"{key}{trial}")
            queue.fail(queue.one())
            call(conn, "expire_keys")
        retried = parallel(2, lambda number: value(sessions[number], "SELECT stint.retry_failed('q', max => 8)"))
        assert sum(retried) == 2
        assert {queue.fail(task).outcome for task in queue.claim(9)} == {"failed"}
        conn.execute("SELECT stint.drop_queue('q', force => true)")
        Queue(conn, max_attempts=1, key_retention="0")


# reprioritize


def test_a_blocked_and_an_awaiting_task_keep_the_priority_given_meanwhile(queue):
    root = queue.enqueue('"root"')
    awaiting = queue.enqueue('"awaiting"')
    low, high = (queue.enqueue(json.dumps(name), depends_on=[root]) for name in ("low", "high"))
    task, waits = queue.claim(2)
    call(queue.conn, "await", queue="q", id=waits.id, lease=waits.lease, event="e")
    reprioritize = lambda id, priority: call(queue.conn, "reprioritize", queue="q", id=id, priority=priority)  # noqa: E731
    assert reprioritize(high, 5) == [("reprioritized", "blocked")]
    assert reprioritize(awaiting, 3) == [("reprioritized", "scheduled")]
    assert queue.task(high).priority == 5 and waits.id == awaiting
    call(queue.conn, "emit", event="e")
    queue.complete(task)
    assert [t.payload for t in queue.claim(9)] == ["high", "awaiting", "low"] and queue.task(low).priority == 0


# purge_queue and drop_queue


def test_a_purge_ends_all_that_waits_also_what_waits_for_others(strict):
    running, ready = strict.enqueue(group_key="a"), strict.enqueue(group_key="b")
    task = strict.one()
    behind, after = strict.enqueue(group_key="b"), strict.enqueue(depends_on=[running, ready])
    last = strict.enqueue(depends_on=[after], on_dependency_failure="run")
    assert value(strict.conn, "SELECT stint.purge_queue('q', reason => 'wrong')") == 4
    assert {strict.task(id).why for id in (ready, behind, after, last)} == {"wrong"}
    assert statuses(strict, running, ready, behind, after, last) == ["running"] + ["cancelled"] * 4
    assert strict.complete(task).first and nothing_left(strict.conn)


def test_a_purge_waits_for_nobody_and_what_it_left_follows(strict, connect):
    """Another session is about to add a task behind those that are purged."""
    first, second = strict.enqueue(), strict.enqueue(group_key="a")
    third = strict.enqueue(group_key="a", depends_on=[first])
    session = connect(autocommit=False)
    behind = strict.by(session).enqueue(depends_on=[third])
    strict.conn.execute("SET lock_timeout = '5 s'")
    assert value(strict.conn, "SELECT stint.purge_queue('q')") == 2
    assert statuses(strict, first, second, third) == ["cancelled", "cancelled", "blocked"]
    session.commit()
    strict.conn.execute("SELECT stint.sweep()")
    assert statuses(strict, third, behind) == ["failed", "failed"] and nothing_left(strict.conn)


def test_purges_beside_enqueues_and_ends_neither_deadlock_nor_leave_anything_behind(conn, connect):
    queue = Queue(conn, strict_groups=True, max_attempts=1)
    sessions = [connect() for _ in range(4)]
    known = [queue.enqueue() for _ in range(4)]

    def act(number):
        mine = queue.by(sessions[number])
        for n in range(40):
            if number == 0:
                mine.conn.execute("SELECT stint.purge_queue('q')")
            elif number == 1:
                for task in mine.claim(3):
                    mine.complete(task)
            else:
                known.append(mine.enqueue(depends_on=known[-3:], group_key="ab"[n % 2], on_dependency_failure="run"))

    parallel(4, act)
    conn.execute("SELECT stint.sweep()")
    run_all(queue)
    assert rows(conn, "SELECT status, why FROM stint.tasks WHERE finished_at IS NULL") == [] and nothing_left(conn)


def test_a_queue_dropped_while_its_flows_run_is_gone_and_others_go_on(conn, connect):
    other = Queue(conn, "other", strict_groups=True)
    sessions = [connect() for _ in range(4)]

    def work(mine, number, chance):
        try:
            on = [mine.enqueue(group_key="a"), mine.enqueue()]
            mine.enqueue(depends_on=on, group_key="b")
            for task in mine.claim(2):
                mine.complete(task)
        except psycopg.errors.Error as error:
            # Once it is gone, and where it went between two statements of a verb.
            assert mine.name == "q" and error.sqlstate in ("42704", "40001", "P0002"), error

    for trial in range(5):
        queue = Queue(conn, strict_groups=True)

        def act(number):
            mine = (queue if number % 2 else other).by(sessions[number])
            for n in range(15):
                if number == 1 and n == 7:
                    mine.conn.execute("SELECT stint.drop_queue('q', force => true)")
                work(mine, number, n)

        parallel(4, act)
        for table in "task_facts", "place_blocked", "task_dependencies", "group_turns", "follow_ups":
            assert value(conn, f"SELECT count(*) FROM stint.{table} WHERE queue = 'q'") == 0
    while batch := other.claim(9):
        for task in batch:
            other.complete(task)
    assert nothing_left(conn)


# cancel, the ends in batches, snooze


def test_a_cancelled_task_takes_those_with_it_that_depend_on_it_wherever_it_waits(strict):
    for options in {}, {"delay": "1 hour"}, {"depends_on": [strict.enqueue(priority=9)]}:
        id = strict.enqueue(group_key="a", **options)
        fails, runs, turn = strict.enqueue(depends_on=[id]), strict.enqueue(depends_on=[id], on_dependency_failure="run"), strict.enqueue(group_key="a")
        strict.cancel(id, reason="no more")
        assert statuses(strict, fails, runs, turn) == ["failed", "ready", "ready"]
        for task in strict.claim(9):
            strict.complete(task)
    assert nothing_left(strict.conn)


def test_a_batch_of_completions_moves_all_that_waited_for_them(strict):
    a, b, c = (strict.enqueue(group_key=key) for key in ("a", "b", None))
    last = strict.enqueue(depends_on=[a, b, c], group_key="a")
    behind = strict.enqueue(group_key="b")
    items = json.dumps([{"id": str(task.id), "lease": str(task.lease)} for task in reversed(strict.claim(3))])
    assert [answer.outcome for answer in call(strict.conn, "complete_many", queue="q", items=items)] == ["completed"] * 3
    assert statuses(strict, last, behind) == ["ready", "ready"]
    run_all(strict)
    assert nothing_left(strict.conn)


def test_a_worker_that_finishes_and_claims_gets_what_its_end_released(strict):
    first = strict.enqueue('"first"', group_key="a")
    strict.enqueue('"second"', group_key="a")
    strict.enqueue('"third"', depends_on=[first])
    task = strict.one()
    answers = call(strict.conn, "finish_and_claim", queue="q", id=task.id, lease=task.lease, worker="w", max=5)
    assert [(a.kind, a.payload) for a in answers] == [("finished", None), ("claimed", "third"), ("claimed", "second")]


def test_batches_of_completions_beside_enqueues_that_depend_on_them_do_not_deadlock(conn, connect):
    queue = Queue(conn, strict_groups=True)
    sessions = [connect() for _ in range(4)]
    for _ in range(25):
        ids = [queue.enqueue(group_key=f"g{n}") for n in range(6)]
        tasks = queue.claim(6)
        items = [json.dumps([{"id": str(t.id), "lease": str(t.lease)} for t in some]) for some in (tasks[::2], tasks[1::2])]

        def act(number):
            if number < 2:
                return call(sessions[number], "complete_many", queue="q", items=items[number])
            mine = queue.by(sessions[number])
            return [mine.enqueue(depends_on=ids[n : n + 3], group_key=f"g{n}") for n in (range(4) if number == 2 else reversed(range(4)))]

        parallel(4, act)
        run_all(queue)
        assert nothing_left(conn)


def test_a_snoozed_task_keeps_its_turn(strict):
    first, second = strict.enqueue(group_key="a"), strict.enqueue(group_key="a")
    depends = strict.enqueue(depends_on=[first])
    strict.snooze(strict.one())
    assert strict.claim(9) == [] and statuses(strict, first, second, depends) == ["scheduled", "blocked", "blocked"]
    strict.due(first)
    strict.complete(strict.one())
    assert statuses(strict, second, depends) == ["ready", "ready"]


# enqueue_once, enqueue_many and schedules


def test_a_task_that_is_made_once_may_wait_for_others(strict):
    root = strict.enqueue(group_key="a")
    once = lambda **more: call(strict.conn, "enqueue_once", queue="q", payload="1", key="k", **more)[0]  # noqa: E731
    id, created = once(depends_on=[root], group_key="b", on_dependency_failure="cancel")
    assert created and strict.status(id) == "blocked" and once(group_key="c") == (id, False)
    assert strict.status(strict.enqueue(group_key="b")) == "blocked" and strict.status(strict.enqueue(group_key="c")) == "ready"
    strict.cancel(root)
    assert strict.status(id) == "cancelled"


def test_a_batch_in_which_keys_are_held_leaves_no_turn_behind(strict):
    first = strict.enqueue(key="k", group_key="a")
    strict.complete(strict.one())
    tasks = [{"payload": 1, "key": "k", "group_key": "b"}, {"payload": 2, "group_key": "c", "depends_on": [str(first)]}]
    made = call(strict.conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    assert [row.created for row in made] == [False, True] and strict.status(made[1].id) == "ready"
    assert rows(strict.conn, "SELECT group_key FROM stint.group_turns") == [("c",)]


def test_runs_of_a_schedule_with_a_strict_group_do_not_overlap(strict):
    conn = strict.conn
    call(conn, "create_schedule", queue="q", name="s", cron="* * * * *", payload="{}", group_key="s", catch_up="all")
    conn.execute("UPDATE stint.schedule_config SET since = clock_timestamp() - interval '3 minutes'")
    conn.execute("SELECT stint.fire_schedules()")
    ran = 0
    while batch := strict.claim(9):
        assert len(batch) == 1
        strict.complete(batch[0])
        ran += 1
    assert ran >= 3 and nothing_left(conn)


# What a rollback undoes


def test_a_rolled_back_emit_wakes_nobody(queue, connect):
    id = queue.enqueue()
    task = queue.one()
    call(queue.conn, "await", queue="q", id=id, lease=task.lease, event="e")
    session = connect(autocommit=False)
    assert call(session, "emit", event="e", payload="1")[0][:2] == (True, 1)
    claimer = connect()
    claimed = background(lambda: queue.by(claimer).claim(wait="30 s"))
    waiting(queue.conn, claimer.info.backend_pid, "Extension")
    session.rollback()
    assert queue.status(id) == "scheduled" and not claimed.done()
    assert call(queue.conn, "emit", event="e", payload="2")[0][:2] == (True, 1)
    [again] = claimed.join()
    assert call(queue.conn, "await", queue="q", id=id, lease=again.lease, event="e")[0] == ("emitted", 2)


def test_a_cancelled_statement_that_waits_for_a_dependency_leaves_the_session_usable(queue, connect):
    """The savepoint in which an enqueue waits is undone with it."""
    id = queue.enqueue()
    session = connect(autocommit=False)
    queue.by(session).cancel(id)
    other = connect()
    other.execute("SET lock_timeout = '100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        queue.by(other).enqueue(depends_on=[id])
    other.execute("SET statement_timeout = '100 ms'; SET lock_timeout = 0")
    with pytest.raises(psycopg.errors.QueryCanceled):
        queue.by(other).enqueue(depends_on=[id])
    other.execute("SET statement_timeout = 0")
    session.rollback()
    assert queue.by(other).status(queue.by(other).enqueue(depends_on=[id])) == "blocked"
