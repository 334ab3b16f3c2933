"""Everything that waits for something else at once: no deadlock, nothing left behind."""

import json
import random
import time

import psycopg
from stint import Queue, call, parallel, rows, value


def test_enqueues_ends_and_cancels_of_one_tangle_neither_deadlock_nor_leave_anything_behind(conn, connect):
    """Eight sessions grow, work and cancel a graph in few strict groups. Each verb is a transaction of its own, so none may fail."""
    queue = Queue(conn, strict_groups=True, max_attempts=2, backoff_base="0")
    sessions = [connect() for _ in range(8)]
    known = [queue.enqueue() for _ in range(5)]

    def work(mine, chance, number):
        for task in mine.claim(3, worker=f"w{number}"):
            match chance.randrange(8):
                case 0:
                    mine.fail(task, retryable=False)
                case 1:
                    mine.release(task)
                case 2:
                    call(mine.conn, "await", queue="q", id=task.id, lease=task.lease, event=f"e{chance.randrange(4)}")
                case _:
                    mine.complete(task)

    def session(number):
        chance, mine = random.Random(number), queue.by(sessions[number])
        for _ in range(150):
            match chance.randrange(6):
                case 0 | 1 | 2:
                    on = chance.sample(known[-12:], chance.randrange(4))
                    options = {"depends_on": on, "on_dependency_failure": chance.choice(["fail", "cancel", "run"])}
                    key = chance.choice([None, "a", "b"])
                    known.append(mine.enqueue(**options, **({"group_key": key} if key else {})))
                case 3:
                    mine.cancel(chance.choice(known))
                case _:
                    work(mine, chance, number)

    parallel(8, session)
    for number in range(4):
        call(conn, "emit", event=f"e{number}")
    deadline = time.monotonic() + 60
    while value(conn, "SELECT count(*) FROM stint.task_outcomes") < len(known):
        assert time.monotonic() < deadline, rows(conn, "SELECT status, why FROM stint.tasks WHERE finished_at IS NULL")
        call(conn, "sweep")
        with conn.transaction():
            for task in queue.claim(100):
                queue.complete(task)
    for table in "place_blocked", "task_dependencies", "group_turns", "follow_ups":
        assert value(conn, f"SELECT count(*) FROM stint.{table}") == 0


def test_every_verb_of_a_queue_at_once_neither_deadlocks_nor_leaves_anything_behind(conn, connect):
    """As before, with the verbs that end, move or revive many tasks at a time. No call may be refused for want of a lock."""
    queue = Queue(conn, strict_groups=True, max_attempts=2, backoff_base="0", lease_for="1 s")
    sessions = [connect() for _ in range(8)]
    known = [queue.enqueue() for _ in range(5)]

    def end(mine, chance, tasks):
        items = [{"id": str(task.id), "lease": str(task.lease)} for task in tasks]
        chance.shuffle(items)
        match chance.randrange(6):
            case 0:
                call(mine.conn, "complete_many", queue="q", items=json.dumps(items))
            case 1:
                for task in tasks:
                    call(mine.conn, "finish_and_claim", queue="q", id=task.id, lease=task.lease, worker="w")
            case 2:
                for task in tasks:
                    mine.snooze(task, duration="0")
            case 3:
                for task in tasks:
                    call(mine.conn, "await", queue="q", id=task.id, lease=task.lease, event=f"e{chance.randrange(40)}", timeout="1 s")
            case _:
                for task in tasks:
                    mine.fail(task, retryable=False)

    def session(number):
        chance, mine = random.Random(number), queue.by(sessions[number])
        for step in range(120):
            id = chance.choice(known[-20:])
            match chance.randrange(12):
                case 0 | 1 | 2:
                    on = chance.sample(known[-8:], min(len(known), chance.randrange(5)))
                    options = {"depends_on": on, "on_dependency_failure": chance.choice(["fail", "cancel", "run"])}
                    known.append(mine.enqueue(group_key=chance.choice("abc"), **options))
                case 3:
                    tasks = [{"payload": n, "group_key": chance.choice("abc"), "depends_on": [str(id)], "on_dependency_failure": "run"} for n in range(3)]
                    known.extend(row.id for row in call(mine.conn, "enqueue_many", queue="q", tasks=json.dumps(tasks)))
                case 4:
                    mine.retry(id)
                case 5:
                    call(mine.conn, "retry_failed", queue="q", max=3)
                case 6:
                    mine.cancel(id)
                case 7:
                    call(mine.conn, "reprioritize", queue="q", id=id, priority=chance.randrange(3))
                case 8:
                    call(mine.conn, "emit", event=f"e{chance.randrange(40)}")
                case 9 if step % 4 == 0:
                    call(mine.conn, "purge_queue", queue="q", max=3)
                case _:
                    end(mine, chance, mine.claim(3, worker=f"w{number}"))

    parallel(8, session)
    for number in range(40):
        call(conn, "emit", event=f"e{number}")
    deadline = time.monotonic() + 60
    while value(conn, "SELECT count(*) FROM stint.task_outcomes") < value(conn, "SELECT count(*) FROM stint.task_facts"):
        assert time.monotonic() < deadline, rows(conn, "SELECT status, why FROM stint.tasks WHERE finished_at IS NULL")
        call(conn, "sweep"), call(conn, "promote")
        with conn.transaction():
            for task in queue.claim(100):
                queue.complete(task)
    for table in "place_blocked", "task_dependencies", "group_turns", "follow_ups":
        assert value(conn, f"SELECT count(*) FROM stint.{table}") == 0


def test_batches_that_make_the_same_new_lanes_in_opposite_order_do_not_deadlock(conn, connect):
    for name in "abcdef":
        call(conn, "create_budget", name=name, max_running=100)
    sessions = [connect() for _ in range(2)]
    sets = [[a, b] for a in "abcdef" for b in "abcdef" if a < b]
    for trial in range(8):
        Queue(conn, f"q{trial}")

        def batch(number):
            tasks = [{"payload": 1, "budgets": budgets} for budgets in (sets if number else reversed(sets))]
            return call(sessions[number], "enqueue_many", queue=f"q{trial}", tasks=json.dumps(tasks))

        assert [len(made) for made in parallel(2, batch)] == [len(sets)] * 2
        assert value(conn, "SELECT count(*) FROM stint.lanes WHERE queue = %s", f"q{trial}") == len(sets) + 1


def test_a_cancel_and_an_end_of_what_a_chain_depends_on_meet_without_a_deadlock(conn, connect):
    queue = Queue(conn, max_attempts=1)
    sessions = [connect() for _ in range(3)]
    for _ in range(60):
        root, other = queue.enqueue(), queue.enqueue()
        middle = queue.enqueue(depends_on=[root, other])
        last = queue.enqueue(depends_on=[middle, other])
        first, second = queue.claim(2)

        def act(number):
            mine = queue.by(sessions[number])
            return [lambda: mine.fail(first), lambda: mine.complete(second), lambda: mine.cancel(middle)][number]()

        try:
            parallel(3, act)
        except psycopg.errors.DeadlockDetected:
            raise AssertionError("a deadlock") from None
        assert {queue.status(middle), queue.status(last)} <= {"failed", "cancelled"}
        assert rows(conn, "SELECT status FROM stint.tasks WHERE finished_at IS NULL") == []


def test_a_task_that_is_retried_before_its_turn_was_handed_on_loses_it_for_nobody(conn, connect):
    """A sweep that meets a held turn leaves it to be handed on later; the task that had it may be retried by then, or retried and cancelled."""
    for cancelled in False, True:
        queue = Queue(conn, f"q{cancelled}", strict_groups=True, max_attempts=1)
        first, second = queue.enqueue(group_key="g"), queue.enqueue(group_key="g")
        (task,) = queue.claim()
        other = connect(autocommit=False)
        third = queue.by(other).enqueue(group_key="g")  # holds the turn until it commits
        queue.lapse(task)
        assert queue.status(first) == "failed"
        assert value(conn, "SELECT count(*) FROM stint.follow_ups") == 1
        assert call(conn, "retry", queue=queue.name, id=first)[0].status == "blocked"
        other.commit()
        if cancelled:
            queue.cancel(first)
        call(conn, "sweep")
        for id in (second, third) if cancelled else (second, third, first):
            (task,) = queue.claim()
            assert task.id == id
            queue.complete(task)
        for table in "place_blocked", "group_turns", "follow_ups":
            assert value(conn, f"SELECT count(*) FROM stint.{table}") == 0
