"""claim(wait => …): sleeps in the server and is woken by the commit that makes a task claimable."""

import time

import psycopg
import pytest
from stint import Queue, background, call, until, value, waiting

# Less than the second after which a waiter looks by itself where its queue draws on a budget (ten where it does not): a claim answered sooner was woken.
SOON = 0.85


class Sleeper:
    """A session that waits in a claim."""

    def __init__(self, queue, conn, wait="30 s", max=1):
        self.pid = conn.info.backend_pid
        self._claim = background(lambda: queue.by(conn).claim(max, wait=wait))
        waiting(queue.conn, self.pid, "Extension")

    def done(self):
        return self._claim.done()

    def join(self, timeout=10):
        return self._claim.join(timeout)


def woken(sleeper):
    started = time.monotonic()
    got = sleeper.join()
    assert time.monotonic() - started < SOON, "found by looking, not woken"
    return got


@pytest.fixture
def queue(conn):
    return Queue(conn)


def test_a_committed_enqueue_wakes_a_waiter(queue, connect):
    for _ in range(20):
        sleeper = Sleeper(queue, connect())
        id = queue.enqueue()
        assert [task.id for task in woken(sleeper)] == [id]


def test_a_waiter_sleeps_through_a_rolled_back_enqueue(queue, connect):
    sleeper = Sleeper(queue, connect(), wait="1500 ms")
    started = time.monotonic()
    session = connect(autocommit=False)
    queue.by(session).enqueue()
    session.rollback()
    session.execute("SAVEPOINT s")
    queue.by(session).enqueue()
    session.execute("ROLLBACK TO s")
    session.commit()
    assert sleeper.join() == [] and 1.3 < time.monotonic() - started < 3


def test_each_task_wakes_one_waiter(queue, connect):
    sleepers = [Sleeper(queue, connect()) for _ in range(8)]
    with queue.conn.transaction():
        ids = {queue.enqueue() for _ in range(3)}
    until(queue.conn, "SELECT count(*) = 3 FROM stint.place_running")
    done = [sleeper for sleeper in sleepers if sleeper.done() or time.sleep(0.05) or sleeper.done()]
    assert {task.id for sleeper in done for task in sleeper.join()} == ids and len(done) == 3
    queue.fill(5)
    assert all(len(woken(sleeper)) == 1 for sleeper in sleepers if sleeper not in done)


def test_what_is_there_already_is_claimed_at_once(queue):
    queue.enqueue()
    started = time.monotonic()
    assert len(queue.claim(wait="10 s")) == 1 and time.monotonic() - started < SOON


@pytest.mark.parametrize("how", ["rollback", "terminate", "exception", "release", "fail", "lapse", "promote"])
def test_a_task_that_comes_back_wakes_a_waiter(queue, connect, how):
    id = queue.enqueue(**({"delay": "1 hour"} if how == "promote" else {}))
    session = connect(autocommit=False)
    mine = queue.by(session)
    if how in ("rollback", "terminate"):
        mine.one()
    elif how != "promote" and how != "exception":
        task = queue.one()
    elif how == "exception":
        session.execute("SAVEPOINT s")
        mine.one()
    sleeper = Sleeper(queue, connect())
    if how == "rollback":
        session.rollback()
    elif how == "terminate":
        queue.conn.execute("SELECT pg_terminate_backend(%s)", (session.info.backend_pid,))
    elif how == "exception":
        session.execute("ROLLBACK TO s")
    elif how == "release":
        queue.release(task)
    elif how == "fail":
        queue.fail(task, retry_in="0")
    elif how == "lapse":
        queue.lapse(task)
    else:
        queue.due(id)
    assert [task.id for task in woken(sleeper)] == [id]


@pytest.mark.parametrize("end", ["complete", "fail", "release", "cancelled", "rollback"])
def test_room_in_a_budget_wakes_a_waiter(conn, connect, end):
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn, budgets=["b"])
    queue.fill(2)
    session = connect(autocommit=False)
    task = queue.by(session).one()
    if end != "rollback":
        session.commit()
    sleeper = Sleeper(queue, connect())
    if end == "rollback":
        session.rollback()
    elif end == "cancelled":
        queue.cancel(task.id)
        queue.release(task)
    else:
        getattr(queue, end)(task)
    assert len(woken(sleeper)) == 1


@pytest.mark.parametrize("end", ["complete", "rollback", "alter_budget"])
def test_room_in_a_shared_budget_wakes_a_waiter_of_another_queue(conn, connect, end):
    call(conn, "create_budget", name="b", max_running=1)
    busy, other = Queue(conn, "busy", budgets=["b"]), Queue(conn, "other")
    busy.enqueue()
    other.enqueue(budgets=["b"])
    session = connect(autocommit=False)
    task = busy.by(session).one()
    if end != "rollback":
        session.commit()
    sleeper = Sleeper(other, connect())
    if end == "rollback":
        session.rollback()
    elif end == "complete":
        busy.complete(task)
    else:
        call(conn, "alter_budget", name="b", max_running=2)
    assert len(woken(sleeper)) == 1


def test_room_in_a_budget_that_came_with_a_task_wakes_a_waiter(conn, connect):
    """While they slept, a task came that draws on a budget of which their queue had no task before."""
    call(conn, "create_budget", name="b", max_running=1)
    busy, other = Queue(conn, "busy", budgets=["b"]), Queue(conn, "other")
    busy.enqueue()
    task = busy.one()
    sleepers = [Sleeper(other, connect()) for _ in range(3)]
    other.enqueue(budgets=["b"])
    # The one that was woken for it sleeps again.
    until(conn, "SELECT count(*) = 3 FROM pg_stat_activity WHERE query LIKE '%claim%' AND wait_event_type = 'Extension' AND backend_type = 'client backend'")
    busy.complete(task)
    started = time.monotonic()
    until(conn, "SELECT count(*) = 1 FROM stint.place_running WHERE queue = 'other'")
    assert time.monotonic() - started < SOON
    for _ in range(2):
        other.enqueue()
    assert sum(len(sleeper.join()) for sleeper in sleepers) == 3


def test_a_waiter_finds_what_was_committed_in_two_phases(queue, connect):
    """Nothing tells of COMMIT PREPARED."""
    sleeper = Sleeper(queue, connect())
    session = connect()
    session.execute("BEGIN")
    id = queue.by(session).enqueue()
    session.execute("PREPARE TRANSACTION 'two phases'")
    session.execute("COMMIT PREPARED 'two phases'")
    assert [task.id for task in sleeper.join(15)] == [id]


@pytest.mark.parametrize("how", ["statement_timeout", "cancel", "terminate"])
def test_a_waiter_can_be_stopped_at_once(queue, connect, how):
    session = connect()
    if how == "statement_timeout":
        session.execute("SET statement_timeout = '300 ms'")
    started = time.monotonic()
    sleeper = Sleeper(queue, session)
    if how == "cancel":
        queue.conn.execute("SELECT pg_cancel_backend(%s)", (sleeper.pid,))
    elif how == "terminate":
        queue.conn.execute("SELECT pg_terminate_backend(%s)", (sleeper.pid,))
    with pytest.raises((psycopg.errors.QueryCanceled, psycopg.OperationalError)):
        sleeper.join()
    assert time.monotonic() - started < 0.3 + SOON


@pytest.mark.parametrize("how", ["cancel", "terminate", "savepoint"])
def test_a_waiter_that_is_stopped_passes_its_signal_on(queue, connect, how):
    """The enqueue's signal and the stop reach the first waiter together; the second gets the task, and soon."""
    for _ in range(8):
        session = connect()
        if how == "savepoint":
            work = "DO $$ BEGIN PERFORM stint.claim('q', 'w', wait => '20 s'); EXCEPTION WHEN query_canceled THEN PERFORM pg_sleep(3); END $$"
            first = background(session.execute, work)
            waiting(queue.conn, session.info.backend_pid, "Extension")
        else:
            first = Sleeper(queue, session)
        second = Sleeper(queue, connect())
        with queue.conn.transaction():
            id = queue.enqueue()
            function = "pg_terminate_backend" if how == "terminate" else "pg_cancel_backend"
            queue.conn.execute(f"SELECT {function}(%s)", (session.info.backend_pid,))
        try:
            got = [] if how == "savepoint" and not first.done() else first.join()
        except (psycopg.errors.QueryCanceled, psycopg.OperationalError):
            got = []
        if how != "savepoint" and got:
            queue.complete(got[0])  # the signal was faster
            queue.enqueue()
            woken(second)
        else:
            assert [task.id for task in woken(second)] == [id]
        if how == "savepoint":
            queue.conn.execute("SELECT pg_terminate_backend(%s)", (session.info.backend_pid,))
            with pytest.raises(psycopg.OperationalError):
                first.join()


def test_every_queue_wakes_its_own_waiters_however_many_wait(conn, connect):
    """Sixty queues with a waiter each: no two share a place to sleep in a way that loses a signal."""
    queues = [Queue(conn, f"q{n}") for n in range(60)]
    sleepers = [Sleeper(queue, connect()) for queue in queues]
    slow = 0
    for queue, sleeper in reversed(list(zip(queues, sleepers))):
        queue.enqueue()
        started = time.monotonic()
        assert len(sleeper.join()) == 1
        slow += time.monotonic() - started > 0.3
    # A busy machine is excused once or twice; signals that went astray would be many.
    assert slow <= 2


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_transaction_with_one_snapshot_cannot_wait(queue, connect, level):
    session = connect(autocommit=False)
    session.isolation_level = level
    with pytest.raises(psycopg.errors.ActiveSqlTransaction) as raised:
        queue.by(session).claim(wait="1 s")
    assert raised.value.diag.message_hint
    session.rollback()
    assert queue.by(session).claim(wait="0") == []


def test_a_wait_is_bounded_by_its_setting(queue):
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match='"wait"') as raised:
        queue.claim(wait="61 s")
    assert "stint.max_wait" in raised.value.diag.message_hint
    queue.conn.execute("SET stint.max_wait = '1 s'")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        queue.claim(wait="2 s")
    started = time.monotonic()
    assert queue.claim(wait="1 s") == [] and 0.9 < time.monotonic() - started < 2


def test_waiting_and_enqueuing_many_times_loses_no_wake_up(queue, connect):
    """A producer and three waiters as fast as they can: were a signal lost, a round would take a second."""
    sessions = [connect() for _ in range(3)]
    total = 600

    def worker(number):
        mine, done = queue.by(sessions[number]), 0
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < total:
            for task in mine.claim(wait="100 ms"):
                mine.complete(task)
                done += 1
        return done

    workers = [background(worker, number) for number in range(3)]
    for n in range(total):
        queue.enqueue(str(n))
    assert sum(thread.join(30) for thread in workers) == total


def xmin(conn, pid):
    return value(conn, "SELECT backend_xmin FROM pg_stat_activity WHERE pid = %s", pid)


def vacuums(conn):
    """Whether VACUUM can remove a row that was deleted while the waiter slept."""
    conn.execute("CREATE TABLE IF NOT EXISTS junk (a int)")
    conn.execute("INSERT INTO junk VALUES (1)")
    conn.execute("DELETE FROM junk")
    conn.execute("VACUUM junk")
    return value(conn, "SELECT pg_relation_size('junk')") == 0


def statements(queue):
    name = queue.name
    return {
        "select": (f"SELECT * FROM stint.claim('{name}', 'w', wait => '20 s')", None),
        "target list": (f"SELECT stint.claim('{name}', 'w', wait => '20 s')", None),
        "bound": ("SELECT * FROM stint.claim(%s, %s, wait => %s)", (name, "w", "20 s")),
    }


@pytest.mark.parametrize("form", ["select", "target list", "bound"])
def test_a_waiting_claim_does_not_hold_back_vacuum(queue, connect, form):
    session = connect()
    sql, params = statements(queue)[form]
    claim = background(lambda: session.execute(sql, params).fetchall())
    waiting(queue.conn, session.info.backend_pid, "Extension")
    until(queue.conn, f"SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE pid = {session.info.backend_pid}", 3)
    assert vacuums(queue.conn)
    id = queue.enqueue('{"a": [1.10]}')
    [row] = claim.join()
    assert str(id) in str(row)


@pytest.mark.parametrize("form", ["transaction", "do", "join", "cursor", "subquery"])
def test_a_waiting_claim_keeps_the_snapshot_of_a_statement_that_still_reads_with_it(queue, connect, form):
    session = connect()
    queue.conn.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS a")
    claim = f"stint.claim('{queue.name}', 'w', wait => '20 s')"
    sql = {
        "transaction": f"SELECT count(*) FROM {claim}",
        "do": f"DO $$ DECLARE r record; n int := 0; BEGIN FOR r IN SELECT a FROM kept LOOP IF n = 0 THEN PERFORM {claim}; END IF; n := n + 1; END LOOP;"
              " IF n <> 1000 THEN RAISE 'read % rows', n; END IF; END $$",
        "join": f"SELECT count(*) FROM {claim} c CROSS JOIN LATERAL (SELECT a FROM kept WHERE c.id IS NOT NULL) k",
        "cursor": f"SELECT count(*) FROM {claim}",
        "subquery": f"SELECT count(*), (SELECT count(*) FROM kept) FROM {claim}",
    }[form]  # fmt: skip
    if form in ("transaction", "cursor"):
        session.execute("BEGIN")
    if form == "cursor":
        session.execute("DECLARE c CURSOR FOR SELECT a FROM kept")
        session.execute("FETCH 1 FROM c")
    work = background(lambda: session.execute(sql))
    waiting(queue.conn, session.info.backend_pid, "Extension")
    if form != "transaction":
        assert xmin(queue.conn, session.info.backend_pid) is not None
    queue.conn.execute("DELETE FROM kept")
    queue.conn.execute("VACUUM kept")
    queue.enqueue()
    cursor = work.join()
    if form == "join":
        assert cursor.fetchone() == (1000,)
    elif form == "subquery":
        assert cursor.fetchone() == (1, 1000)
    elif form == "cursor":
        assert len(session.execute("FETCH ALL FROM c").fetchall()) == 999
