"""Calls that race on the same tasks from many sessions: one outcome, no deadlock, nothing lost and nothing doubled."""

import random
import threading
import time

import psycopg
import pytest
from stint import Queue, background, budget, call, parallel, rows, value


def test_cancel_complete_and_sweep_racing_on_one_task_end_in_one_outcome(conn, connect):
    """Three sessions fall on each of ten thousand tasks."""
    call(conn, "create_budget", name="b", max_running=100_000)
    queue = Queue(conn, budgets=["b"], max_attempts=1)
    total = 10_000
    queue.fill(total)
    tasks = queue.claim(total)
    # Only the sweep of this test may find them lapsed: it makes them so itself, one by one.
    order = random.Random(1).sample(tasks, total)
    sessions = [queue.by(connect()) for _ in range(3)]

    def race(number):
        mine, answers = sessions[number], []
        for task in order:
            if number == 0:
                answers.append(mine.cancel(task.id).outcome)
            elif number == 1:
                answers.append(mine.complete(task).outcome)
            else:
                answers.append(mine.lapse(task))
        return answers

    cancelled, completed, swept = parallel(3, race)
    assert set(cancelled) <= {"cancel_requested", "already_finished"}
    assert set(completed) <= {"completed", "already_finished"}
    outcomes = dict(conn.execute("SELECT id, outcome FROM stint.task_outcomes").fetchall())
    assert len(outcomes) == total
    for task, answer in zip(order, completed):
        assert (outcomes[task.id] == "completed") == (answer == "completed")
    assert sum(row.lapsed for row in swept) + completed.count("completed") == total
    assert budget(conn, "b") == (0, 0)


def test_claim_late_completion_and_cancel_racing_on_a_lapsed_task_end_in_one_outcome(conn, connect):
    queue = Queue(conn)
    total = 600
    queue.fill(total)
    tasks = queue.claim(total)
    with conn.transaction():
        conn.execute("UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s'; SELECT stint.rescan()")
        assert call(conn, "sweep", max=total)[0].retried == total
    sessions = [queue.by(connect()) for _ in range(3)]

    def race(number):
        mine, answers = sessions[number], []
        for task in tasks:
            if number == 0:
                answers.append(mine.complete(task))
            elif number == 1:
                answers.append(mine.cancel(task.id))
            else:
                for held in mine.claim():
                    answers.append(mine.complete(held))
        return answers

    late, cancelled, claimed = parallel(3, race)
    for held in queue.claim(total):
        queue.complete(held)
    firsts = sum(answer.first for answer in late + claimed)
    outcomes = dict(conn.execute("SELECT outcome, count(*) FROM stint.task_outcomes GROUP BY 1").fetchall())
    assert sum(outcomes.values()) == total
    assert sum(answer.outcome == "cancelled" for answer in cancelled) == outcomes.get("cancelled", 0)
    assert {answer.outcome for answer in late} <= {"completed", "superseded", "already_finished"}
    assert firsts <= outcomes.get("completed", 0)


def test_two_sweeps_and_two_promotes_at_once_take_each_task_once(conn, connect):
    queue = Queue(conn, max_attempts=1)
    queue.fill(500)
    queue.fill(500, delay="1 hour")
    queue.claim(500)
    conn.execute(
        """UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s';
           UPDATE stint.place_scheduled SET run_at = clock_timestamp() - interval '1 s';
           SELECT stint.rescan()"""
    )
    sessions = [connect() for _ in range(4)]

    def work(number):
        done = 0
        while value(conn2 := sessions[number], "SELECT (SELECT count(*) FROM stint.place_running) + (SELECT count(*) FROM stint.place_scheduled)"):
            done += call(conn2, "sweep", max=20)[0].lapsed if number < 2 else call(conn2, "promote", max=20)[0][0]
        return done

    done = parallel(4, work)
    assert done[0] + done[1] <= 500 and done[2] + done[3] <= 500  # the worker may have taken some
    assert rows(conn, "SELECT ready, running, scheduled, failed FROM stint.queue_stats") == [(500, 0, 0, 500)]


class History:
    """What clients saw, to be checked against what must hold of it."""

    def __init__(self):
        self.firsts, self.leases, self._lock = {}, {}, threading.Lock()

    def claimed(self, task):
        with self._lock:
            assert task.lease not in self.leases, "a lease was granted twice"
            self.leases[task.lease] = (task.id, task.attempt)

    def ended(self, id, outcome):
        if outcome in ("completed", "failed", "cancelled"):
            with self._lock:
                self.firsts.setdefault(id, []).append(outcome)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_history_of_clients_that_crash_and_roll_back_is_a_correct_one(conn, connect, server, seed):
    """Eight clients do anything, in any isolation, with savepoints and killed sessions; every commit point is looked at."""
    call(conn, "create_budget", name="b", max_running=7, max_tokens=300)
    queue = Queue(conn, max_attempts=3, backoff_base="0", budgets=["b"])
    other = ["b2"]
    call(conn, "create_budget", name="b2", max_running=2)
    total = 250
    for n in range(total):
        queue.enqueue(str(n), tokens=1 + n % 90, priority=n % 3, budgets=other if n % 4 == 0 else None)
    history, stop = History(), threading.Event()
    seen = []  # leases any client ever had, for late and doubled calls

    class Killed(Exception):
        pass

    def client(number):
        chance = random.Random(seed * 100 + number)
        session = server.connect(conn.info.dbname)
        mine, held = queue.by(session), []

        def act(held, events):
            what = chance.random()
            if what < 0.35:
                tasks = mine.claim(chance.randint(1, 3))
                held.extend(tasks)
                events += [("claim", task) for task in tasks]
            elif what < 0.42:
                call(session, "sweep", max=5)
            elif what < 0.46 and seen:
                id = chance.choice(seen).id
                if mine.cancel(id).outcome == "cancelled":
                    events.append(("end", id, "cancelled"))
            elif seen or held:
                late = chance.random() < 0.25 and seen
                task = chance.choice(seen) if late else (held.pop(chance.randrange(len(held))) if held else chance.choice(seen))
                verb = chance.choice(["complete", "complete", "fail", "release", "extend", "expire"])
                if verb == "extend":
                    mine.extend(task, duration="1 s")
                elif verb == "expire":
                    session.execute(
                        "UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s', extended_until = NULL"
                        " WHERE id = %s AND lease = %s", (task.id, task.lease))  # fmt: skip
                    call(session, "rescan")
                else:
                    answer = getattr(mine, verb)(task)
                    if answer.first:
                        events.append(("end", task.id, answer.outcome))

        while not stop.is_set():
            level = chance.choice([None, None, psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
            session.isolation_level = level
            events, kept = [], list(held)
            try:
                with session.transaction():
                    for _ in range(chance.randint(1, 3)):
                        inner, before = list(held), list(events)
                        try:
                            with session.transaction():
                                act(held, events)
                                if chance.random() < 0.2:
                                    raise ZeroDivisionError
                        except ZeroDivisionError:
                            held[:], events[:] = inner, before
                    if chance.random() < 0.1:
                        raise ZeroDivisionError
                    if chance.random() < 0.05:
                        raise Killed
            except Killed:
                held[:] = kept
                conn_kill = server.connect(conn.info.dbname)
                conn_kill.execute("SELECT pg_terminate_backend(%s, 5000)", (session.info.backend_pid,))
                conn_kill.close()
                session.close()
                session = server.connect(conn.info.dbname)
                mine = queue.by(session)
                continue
            # A transaction of several verbs locks tasks in the order of its calls, so two of them may meet in a ring.
            except (ZeroDivisionError, psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
                held[:] = kept
                continue
            for kind, *rest in events:
                if kind == "claim":
                    history.claimed(rest[0])
                    seen.append(rest[0])
                elif kind == "end":
                    history.ended(*rest)
        session.close()

    clients = background(parallel, 8, client)
    watch = connect()
    deadline = time.monotonic() + 12
    finished = 0
    while finished < total and time.monotonic() < deadline and not clients.done():
        # One snapshot: the storage rules, one live lease a task, the limits.
        violations = rows(watch, "SELECT * FROM stint.check() WHERE rule NOT LIKE 'the live usage%'")
        assert violations == []
        use = rows(watch, "SELECT count(*) AS n, coalesce(sum(r.reserved[1]), 0) AS t, count(*) FILTER (WHERE cardinality(budgets) = 2) AS b2 FROM stint.place_running r")
        assert use[0].n <= 7 and use[0].t <= 300 and use[0].b2 <= 2
        finished = value(watch, "SELECT count(*) FROM stint.task_outcomes")
    stop.set()
    clients.join()
    assert len(history.leases) > 100 and finished > 50
    for id, outcomes in history.firsts.items():
        assert len(outcomes) == 1, f"{id} ended {outcomes}"
        assert value(conn, "SELECT outcome FROM stint.task_outcomes WHERE id = %s", id) == outcomes[0]
    # Attempts are dense, and each lease that a client was given is the one of its attempt.
    stored = {row.lease: (row.id, row.attempt) for row in rows(
        conn, "SELECT lease, id, attempt FROM stint.task_attempts UNION ALL SELECT lease, id, attempt FROM stint.place_running")}  # fmt: skip
    assert stored == history.leases
    assert value(conn, "SELECT count(*) FROM (SELECT id FROM stint.task_attempts GROUP BY id HAVING max(attempt) <> count(*)) x") == 0
    for name in "b", "b2":
        budget(conn, name)
