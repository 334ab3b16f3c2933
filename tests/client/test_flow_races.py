"""Everything that waits for something else at once: no deadlock, nothing left behind."""

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
