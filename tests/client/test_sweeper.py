"""The sweep: bounded, in order, past what it cannot rescue, and counting attempts exactly."""

import psycopg
import pytest
from stint import Queue, call, parallel, rows, value


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=3)


def lapse_all(queue, order=None):
    """Makes every lease run out, in the order given. Only inside a transaction, or the worker may sweep."""
    for age, id in enumerate(reversed(order or []), start=1):
        queue.conn.execute(
            "UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s' * %s, started_at = clock_timestamp() - interval '1 day'"
            " WHERE id = %s",
            (age, id),
        )  # fmt: skip
    if order is None:
        queue.conn.execute("UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s', extended_until = NULL")
    call(queue.conn, "rescan")


def poison(queue, ids):
    """A row that stands where the attempt's own must go."""
    queue.conn.execute(
        "INSERT INTO stint.task_attempts (queue, id, attempt, lease, started_at, ended_at, ended, worker)"
        " SELECT queue, id, attempt, lease, started_at, clock_timestamp(), 'lapsed', 'poison' FROM stint.place_running WHERE id = ANY (%s)",
        (ids,),
    )


def cure(queue):
    queue.conn.execute("DELETE FROM stint.task_attempts WHERE worker = 'poison'")


def test_a_round_takes_at_most_so_many_oldest_first(queue):
    queue.fill(5)
    ids = [task.id for task in queue.claim(5)]
    order = [ids[n] for n in (3, 0, 4, 1, 2)]
    with queue.conn.transaction():
        lapse_all(queue, order)
        swept = []
        for _ in range(4):
            assert call(queue.conn, "sweep", max=2)[0].lapsed == min(2, 5 - len(swept))
            now = [id for id in order if queue.status(id) == "ready" and id not in swept]
            assert now == order[len(swept) : len(swept) + 2]
            swept += now
    assert [task.id for task in queue.claim(9)] == ids


@pytest.mark.parametrize("budgeted", [False, True])
def test_a_task_that_cannot_be_taken_back_holds_up_no_other(conn, budgeted):
    call(conn, "create_budget", name="b", max_running=100, max_tokens=1000)
    queue = Queue(conn, max_attempts=3, budgets=["b"] if budgeted else [])
    for n in range(10):
        queue.enqueue(tokens=n + 1)
    tasks = queue.claim(10)
    ids = [task.id for task in tasks]
    bad = ids[:4] + ids[6:7]
    notices = []
    conn.add_notice_handler(lambda notice: notices.append((notice.severity, notice.message_primary, notice.message_detail)))
    with conn.transaction():
        poison(queue, bad)
        lapse_all(queue, ids)
        # Fewer than there are bad ones in front.
        assert call(conn, "sweep", max=2) == [(2, 2, 0, 0)] and call(conn, "sweep", max=2) == [(2, 2, 0, 0)]
        assert call(conn, "sweep") == [(1, 1, 0, 0)] and call(conn, "sweep") == [(0, 0, 0, 0)]
        assert {id for id in ids if queue.status(id) == "running"} == set(bad)
        severity, message, detail = notices[0]
        assert severity == "WARNING" and "4 lapsed tasks could not be taken back" in message and str(bad[0]) in detail and '"q"' in detail
        cure(queue)
        assert call(conn, "sweep") == [(5, 5, 0, 0)]
    assert all(queue.ended(id) == ["lapsed"] for id in ids) and [task.attempt for task in queue.claim(10)] == [2] * 10
    if budgeted:
        assert value(conn, "SELECT running FROM stint.budgets") == 10


def test_the_worker_goes_on_behind_a_task_it_cannot_take_back(queue, server):
    queue.fill(3)
    ids = [task.id for task in queue.claim(3)]
    with queue.conn.transaction():
        poison(queue, ids[:1])
        lapse_all(queue, ids)
    from stint import until

    until(queue.conn, f"SELECT count(*) = 2 FROM stint.tasks WHERE id IN ('{ids[1]}', '{ids[2]}') AND status = 'ready'")
    assert queue.status(ids[0]) == "running"
    with queue.conn.transaction():
        cure(queue)
        assert call(queue.conn, "sweep")[0].lapsed == 1


def test_rows_that_another_session_holds_are_left_and_those_behind_them_taken(queue, connect):
    queue.fill(3)
    first, *rest = queue.claim(3)
    holder = connect(autocommit=False)
    assert queue.by(holder).extend(first).status == "held"
    with queue.conn.transaction():
        queue.conn.execute("UPDATE stint.place_running SET expires_at = clock_timestamp() - interval '1 s' WHERE id <> %s", (first.id,))
        call(queue.conn, "rescan")
        assert call(queue.conn, "sweep")[0].lapsed == 2
    holder.rollback()
    assert queue.complete(first).first and {task.id for task in queue.claim(9)} == {task.id for task in rest}


def test_a_heartbeat_that_comes_while_the_sweep_looks_wins(queue, connect):
    """The row is looked at again once it is locked."""
    queue.fill(20)
    tasks = queue.claim(20)
    sessions = [connect() for _ in range(4)]

    def work(number):
        if number == 0:
            return sum(call(sessions[0], "sweep")[0].lapsed for _ in range(50))
        mine = queue.by(sessions[number])
        return [mine.extend(task, duration="1 hour").status for _ in range(3) for task in tasks[number::3]]

    queue.conn.execute("UPDATE stint.place_running SET expires_at = clock_timestamp() + interval '20 ms'")
    call(queue.conn, "rescan")
    parallel(4, work)
    for task in tasks:
        state = queue.extend(task).status
        assert (state, queue.status(task.id)) in [("held", "running"), ("lost", "ready")]


def test_attempts_are_counted_exactly_however_they_end(queue):
    id = queue.enqueue()
    queue.lapse(queue.one())
    queue.release(queue.one())
    queue.snooze(queue.one(), duration="0")
    queue.due(id) if queue.status(id) == "scheduled" else None
    queue.fail(queue.one(), retry_in="0")
    assert rows(queue.conn, "SELECT attempt, counted FROM stint.place_ready") == [(4, 2)]
    assert queue.lapse(queue.one()).failed == 1 and queue.ended(id) == ["lapsed", "released", "snoozed", "failed", "lapsed"]


def test_a_cancelled_sweep_is_not_mistaken_for_a_bad_row(queue):
    queue.enqueue()
    task = queue.one()
    with pytest.raises(psycopg.errors.QueryCanceled), queue.conn.transaction():
        queue.conn.execute("CREATE FUNCTION pg_temp.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$")
        queue.conn.execute("CREATE TRIGGER slow BEFORE INSERT ON stint.task_attempts FOR EACH ROW EXECUTE FUNCTION pg_temp.slow()")
        queue.expire(task)
        call(queue.conn, "rescan")
        queue.conn.execute("SET LOCAL statement_timeout = '200 ms'")
        call(queue.conn, "sweep")
    assert queue.complete(task).first
