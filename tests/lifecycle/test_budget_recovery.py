"""Live usage of budgets is shared memory: after whatever empties it, it is what the running rows reserve before a budgeted claim is answered."""

import os
import signal
import time

import psycopg
import pytest
from stint import Queue, background, budget, call, parallel, value


@pytest.fixture
def server(cluster):
    made = cluster()
    made.create_database("app")
    return made


def prepare(conn, **settings):
    """Two tasks running under a budget of three and 100 tokens, six waiting."""
    call(conn, "create_budget", name="b", max_running=3, max_tokens=100)
    queue = Queue(conn, budgets=["b"], **settings)
    queue.fill(8, tokens=30)
    assert len(queue.claim(2)) == 2
    return queue


def kill(server, victim):
    """SIGKILL to the session, and the server's restart that follows it."""
    restarts = server.log().count("reinitializing")
    os.kill(victim.info.backend_pid, signal.SIGKILL)
    # The session's socket closes before the postmaster knows: asked at once, it would still let others in.
    deadline = time.monotonic() + 30
    while server.log().count("reinitializing") == restarts:
        assert time.monotonic() < deadline, "the server did not notice"
        time.sleep(0.01)
    server.wait_ready()


def stop_immediate(server):
    server.restart("immediate")


def kill_a_backend(server):
    victim = server.connect("app")
    kill(server, victim)


def kill_a_claiming_backend(server):
    victim = server.connect("app", autocommit=False)
    assert len(Queue(victim, create=False).claim()) == 1
    kill(server, victim)


def restart(server):
    server.restart()


@pytest.mark.parametrize("crash", [stop_immediate, kill_a_backend, kill_a_claiming_backend, restart])
def test_usage_is_rebuilt_before_the_first_budgeted_claim_is_answered(server, crash):
    with server.connect("app") as conn:
        prepare(conn)
    crash(server)
    # Claimers race to be the first; one slot and 40 tokens are left.
    sessions = [server.connect("app") for _ in range(8)]
    claimed = parallel(8, lambda n: Queue(sessions[n], create=False).claim(2))
    assert sorted(map(len, claimed)) == [0] * 7 + [1]
    assert budget(sessions[0], "b") == (3, 90)
    [task] = sum(claimed, [])
    assert Queue(sessions[0], create=False).complete(task).first
    assert budget(sessions[0], "b") == (2, 60)


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
def test_the_first_claim_after_a_restart_is_right_under_every_isolation_level(server, level):
    with server.connect("app") as conn:
        prepare(conn)
    server.restart()
    with server.connect("app", autocommit=False) as conn:
        conn.isolation_level = level
        queue = Queue(conn, create=False)
        conn.execute("SELECT 1")
        assert len(queue.claim(9)) == 1
        conn.commit()
        assert budget(conn, "b") == (3, 90)


@pytest.mark.parametrize("end", ["commit", "rollback", "savepoint"])
def test_a_first_claim_after_an_end_of_attempt_in_the_same_transaction_counts_both(server, end):
    with server.connect("app") as conn:
        prepare(conn)
        queue = Queue(conn, create=False)
        task = queue.one()
        assert budget(conn, "b") == (3, 90)
    server.restart()
    with server.connect("app") as conn:
        queue = Queue(conn, create=False)
        try:
            with conn.transaction():
                try:
                    with conn.transaction():
                        assert queue.complete(task).first
                        assert queue.claim() == []
                        if end != "commit":
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    if end == "rollback":
                        raise
        except ZeroDivisionError:
            pass
        assert budget(conn, "b") == ((2, 60) if end == "commit" else (3, 90))
        assert len(queue.claim(9)) == (1 if end == "commit" else 0)


def test_a_first_claim_waits_for_an_end_of_attempt_under_way(server):
    """Until it commits nobody can say whether its slot is free."""
    with server.connect("app") as conn:
        prepare(conn)
        task = Queue(conn, create=False).one()
    server.restart()
    with server.connect("app", autocommit=False) as ending, server.connect("app") as conn:
        assert Queue(ending, create=False).complete(task).first
        queue = Queue(conn, create=False)
        claim = background(queue.claim, 9)
        time.sleep(0.3)
        # The maintenance worker may have been faster than both; then the claim is answered: no room.
        assert not claim.done() or claim.join() == []
        ending.commit()
        assert len(claim.join() + queue.claim(9)) == 1
        assert budget(conn, "b") == (3, 90)


def test_a_limit_of_one_survives_crashes_of_server_and_worker(server):
    with server.connect("app") as conn:
        call(conn, "create_budget", name="one", max_running=1)
        queue = Queue(conn, budgets=["one"], max_attempts=9)
        queue.fill(3)
        first = queue.one()
    for crash in stop_immediate, kill_a_claiming_if_room, restart:
        crash(server)
        with server.connect("app") as conn:
            queue = Queue(conn, create=False)
            assert queue.claim(3) == []
            queue.lapse(first)
            again = queue.one()
            assert again.id == first.id and queue.claim(3) == []
            assert queue.complete(first).outcome == "superseded" and queue.claim(3) == []
            first = again
    with server.connect("app") as conn:
        assert Queue(conn, create=False).complete(first).first and budget(conn, "one") == (0, 0)


def kill_a_claiming_if_room(server):
    victim = server.connect("app", autocommit=False)
    assert Queue(victim, create=False).claim() == []
    kill(server, victim)


def test_usage_is_right_after_promotion(server):
    with server.connect("app") as conn:
        prepare(conn)
    replica = server.standby()
    try:
        replica.wait_for_replay(server)
        with replica.connect("app") as conn:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                Queue(conn, create=False).claim()
            assert budget(conn, "b") == (2, 60)
        server.stop()
        replica.promote()
        with replica.connect("app") as conn:
            assert len(Queue(conn, create=False).claim(9)) == 1
            assert budget(conn, "b") == (3, 90)
    finally:
        replica.destroy()


def test_databases_and_extensions_that_are_gone_leave_room_for_the_usage_of_others(cluster):
    server = cluster(config={"stint.max_budgets": 16})
    for n in range(12):
        server.create_database("app")
        with server.connect("app") as conn:
            for _ in range(2):
                for name in "abc":
                    call(conn, "create_budget", name=name, max_running=1)
                queue = Queue(conn, budgets=["a", "b", "c"])
                queue.fill(2)
                [task] = queue.claim(9)
                queue.complete(task)
                conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint; CREATE EXTENSION pg_stint")
        server.drop_database("app")


def test_a_full_table_refuses_and_names_its_setting(cluster):
    server = cluster(config={"stint.max_budgets": 16})
    server.create_database("other")
    with server.connect("other") as conn:
        call(conn, "create_budget", name="b", max_running=5)
        Queue(conn, budgets=["b"]).enqueue()
        assert len(Queue(conn, create=False).claim()) == 1
    server.create_database("app")
    with server.connect("app") as conn:
        names = [f"b{n}" for n in range(15)]
        for name in names:
            call(conn, "create_budget", name=name, max_running=5)
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match='budget "one too many" cannot be made: there is room for 15') as raised:
            call(conn, "create_budget", name="one too many", max_running=5)
        assert "stint.max_budgets" in raised.value.diag.message_hint
        assert value(conn, "SELECT count(*) FROM stint.budgets") == 15
        queue = Queue(conn)
        for name in names:
            queue.enqueue(budgets=[name])
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded) as raised:
            queue.claim(99)
        assert "stint.max_budgets" in raised.value.diag.message_hint
        assert value(conn, "SELECT count(*) FROM stint.place_ready") == 15
        plain = Queue(conn, "plain")
        plain.enqueue()
        assert len(plain.claim()) == 1
        narrow = Queue(conn, "narrow", budgets=["b0"])
        narrow.enqueue()
        assert len(narrow.claim()) == 1 and budget(conn, "b0") == (1, 0)


def spent(conn):
    [row] = conn.execute("SELECT requests, window_tokens, window_cost, throttled_until FROM stint.budgets WHERE budget = 'w'").fetchall()
    return row


@pytest.mark.parametrize("crash", [stop_immediate, kill_a_backend, kill_a_claiming_backend, restart])
def test_windows_are_rebuilt_exactly(server, crash):
    """From what runs and from what ended, whichever way: reserved, refunded, owed, released, lapsed, paid."""
    with server.connect("app") as conn:
        call(conn, "create_budget", name="w", max_requests=100, max_window_tokens=1000, max_cost="5", per="1 hour", output_weight=2)
        queue = Queue(conn, budgets=["w"], max_attempts=9)
        queue.fill(12, tokens=30)
        tasks = queue.claim(8)
        queue.complete(tasks[0], input_tokens=5, output_tokens=2, model_cost="0.5")
        queue.complete(tasks[1], input_tokens=50, compute_cost="0.0000001")
        queue.fail(tasks[2], retry_in="1 hour")
        queue.release(tasks[3])
        queue.lapse(tasks[4])
        queue.cancel(tasks[5].id)
        queue.release(tasks[5])
        call(conn, "throttle", budget="w", duration="0")
        before = spent(conn)
        assert before[:2] == (7, 9 + 50 + 5 * 30) and float(before[2]) == 0.500001
    crash(server)
    sessions = [server.connect("app") for _ in range(4)]
    assert spent(sessions[0]) == before
    claimed = sum(parallel(4, lambda n: Queue(sessions[n], create=False).claim(1)), [])
    assert spent(sessions[0])[:2] == (before[0] + len(claimed), before[1] + 30 * len(claimed)) and len(claimed) == 4
    queue = Queue(sessions[0], create=False)
    # An attempt from before the crash is settled where it began.
    assert queue.complete(tasks[6], output_tokens=1).first
    assert spent(sessions[0])[:2] == (before[0] + 4, before[1] + 120 - 28)


def test_a_full_window_stays_full_and_a_throttle_in_force_after_a_crash(server):
    with server.connect("app") as conn:
        call(conn, "create_budget", name="w", max_requests=2, per="1 hour")
        call(conn, "create_budget", name="t", max_running=5)
        queue = Queue(conn, budgets=["w"])
        queue.fill(4)
        for task in queue.claim(9):
            queue.complete(task)
        throttled = Queue(conn, "throttled", budgets=["t"])
        throttled.fill(1)
        until = call(conn, "throttle", budget="t", duration="1 hour")[0][0]
    for crash in stop_immediate, kill_a_backend, restart:
        crash(server)
        with server.connect("app") as conn:
            assert Queue(conn, create=False).claim(9) == [] and Queue(conn, "throttled", create=False).claim(9) == []
            assert spent(conn)[0] == 2
            assert value(conn, "SELECT throttled_until FROM stint.budgets WHERE budget = 't'") == until


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_ended_attempts_rebuilds_what_was_before_it(server, end):
    with server.connect("app") as conn:
        call(conn, "create_budget", name="w", max_window_tokens=1000, per="1 hour")
        queue = Queue(conn, budgets=["w"])
        queue.fill(4, tokens=30)
        tasks = queue.claim(3)
    server.restart()
    with server.connect("app") as conn:
        queue = Queue(conn, create=False)
        try:
            with conn.transaction():
                queue.complete(tasks[0], output_tokens=1)
                queue.complete(tasks[1], output_tokens=100)
                queue.release(tasks[2])
                queue.claim(1)
                if end == "rollback":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert spent(conn)[:2] == ((3, 131) if end == "commit" else (3, 90))
