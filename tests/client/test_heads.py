"""Claims begin where the live rows of a line begin; what comes to stand before that point is claimed all the same."""

import psycopg
import pytest
from stint import Queue, background, call, parallel, value


@pytest.fixture
def queue(conn):
    return Queue(conn)


def run_past(queue, count=300):
    """So many tasks done that every head has risen past them."""
    queue.fill(count)
    for _ in range(count // 25):
        for task in queue.claim(25):
            queue.complete(task)
    assert queue.claim() == []


def test_an_enqueue_that_commits_late_is_claimed(queue, connect):
    slow = connect(autocommit=False)
    id = queue.by(slow).enqueue('"late"')
    run_past(queue)
    queue.enqueue('"after"')
    slow.commit()
    assert queue.one().id == id and queue.one().payload == "after"


def test_an_enqueue_that_is_prepared_and_committed_late_is_claimed(queue, connect):
    slow = connect()
    slow.execute("BEGIN")
    id = queue.by(slow).enqueue('"late"')
    run_past(queue)
    slow.execute("PREPARE TRANSACTION 'late'")
    run_past(queue)
    slow.execute("COMMIT PREPARED 'late'")
    assert queue.one().id == id


@pytest.mark.parametrize("back", ["release", "rollback", "savepoint", "lapse", "terminate"])
def test_a_task_that_comes_back_to_its_old_place_is_claimed_first(queue, connect, back):
    id = queue.enqueue('"first"')
    session = connect(autocommit=False)
    mine = queue.by(session)
    if back == "savepoint":
        session.execute("SAVEPOINT s")
    task = mine.one()
    if back in ("release", "lapse"):
        session.commit()
    run_past(queue)
    queue.enqueue('"after"')
    if back == "release":
        queue.release(task)
    elif back == "rollback":
        session.rollback()
    elif back == "savepoint":
        session.execute("ROLLBACK TO s")
    elif back == "lapse":
        queue.lapse(task)
    else:
        queue.conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
    assert queue.one().id == id


@pytest.mark.parametrize("level", [None, psycopg.IsolationLevel.REPEATABLE_READ])
def test_a_transaction_claims_what_it_gave_back_or_enqueued_itself(queue, connect, level):
    queue.enqueue('"first"')
    task = queue.one()
    run_past(queue)
    session = connect(autocommit=False)
    session.isolation_level = level
    mine = queue.by(session)
    mine.enqueue('"own"')
    assert mine.one().payload == "own"
    assert mine.release(task).first
    again = mine.one()
    assert again.id == task.id and again.attempt == 2
    mine.enqueue('"low"', priority=-5)
    assert mine.one().payload == "low"
    session.rollback()
    assert queue.claim() == [] and queue.complete(task).first


def test_a_new_priority_is_found_at_once(queue, connect):
    run_past(queue)
    for priority in (7, -7, 2**31 - 1, -(2**31), *range(100, 140)):
        id = queue.by(connect()).enqueue(priority=priority)
        assert queue.one().id == id


def test_a_claim_under_an_old_snapshot_is_never_silently_wrong(queue, connect):
    session = connect(autocommit=False)
    session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    queue.fill(200)
    session.execute("SELECT 1 FROM stint.queues")
    for task in queue.claim(100) + queue.claim(50):
        queue.complete(task)
    # Of the 200 that it sees, 150 are gone: it may say so, or take some of the 50 that are left, but no other.
    try:
        got = queue.by(session).claim(10)
        assert {task.payload for task in got} <= set(range(151, 201))
    except psycopg.errors.SerializationFailure:
        pass
    session.rollback()
    assert [task.payload for task in queue.claim(10)] == list(range(151, 161))


def test_enqueuers_that_commit_in_any_order_lose_no_task_to_a_head(queue, connect):
    """Six producers hold their transactions open for a while each; claimers raise the heads as fast as they can."""
    sessions = [connect() for _ in range(9)]
    total = 6 * 60

    def producer(number):
        mine = queue.by(sessions[number])
        for n in range(60):
            with mine.conn.transaction():
                mine.enqueue(str(n), priority=n % 3)
                if n % 4 == number % 4:
                    mine.conn.execute("SELECT pg_sleep(0.01)")

    def claimer(number):
        mine, done, idle = queue.by(sessions[number]), 0, 0
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < total and idle < 3000:
            tasks = mine.claim(4)
            idle = 0 if tasks else idle + 1
            for n, task in enumerate(tasks):
                if n == 3:
                    mine.release(task)
                else:
                    mine.complete(task)
                    done += 1
        return done

    done = background(parallel, 9, lambda n: producer(n) if n < 6 else claimer(n)).join(90)
    assert sum(done[6:]) == total


def test_after_a_restart_heads_begin_anew(cluster):
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        queue = Queue(conn)
        id = queue.enqueue('"first"')
        task = queue.one()
        run_past(queue)
    server.restart("immediate")
    with server.connect("app") as conn:
        queue = Queue(conn, create=False)
        run_past(queue)
        queue.release(task)
        assert queue.one().id == id
        assert call(conn, "check") == []
