"""Claims: disjoint, never more than asked, nothing left of one that aborts, and nothing written by one that finds nothing."""

import psycopg
import pytest
from psycopg import IsolationLevel
from stint import Queue, budget, call, parallel, rows, value


def test_thirty_two_claimers_with_batches_of_seven_get_disjoint_sets(conn, connect):
    queue = Queue(conn)
    queue.fill(1000)
    sessions = [connect() for _ in range(32)]

    def claimer(number):
        mine, got = queue.by(sessions[number]), []
        while batch := mine.claim(7, worker=f"w{number}"):
            assert len(batch) <= 7
            assert [t.payload for t in batch] == sorted(t.payload for t in batch)
            got += batch
        return got

    claimed = sum(parallel(32, claimer), [])
    assert sorted(task.payload for task in claimed) == list(range(1, 1001))
    assert len({task.lease for task in claimed}) == 1000
    assert rows(conn, "SELECT count(*) AS n, count(DISTINCT id) AS ids FROM stint.place_running") == [(1000, 1000)]


def test_a_claim_never_waits_for_another(conn, connect):
    queue = Queue(conn)
    queue.fill(3)
    open_claim = connect(autocommit=False)
    assert queue.by(open_claim).one().payload == 1
    conn.execute("SET statement_timeout = '2 s'")
    assert [task.payload for task in queue.claim(9)] == [2, 3]
    open_claim.rollback()
    assert queue.one().payload == 1


@pytest.mark.parametrize("how", ["rollback", "savepoint", "exception", "error", "terminate", "disconnect"])
def test_an_aborted_claim_leaves_no_trace(conn, connect, how):
    call(conn, "create_budget", name="b", max_running=5, max_tokens=1000)
    queue = Queue(conn)
    for n in range(8):
        queue.enqueue(str(n), tokens=10 + n, **({"budgets": ["b"]} if n % 2 else {}))
    stored = """SELECT (SELECT jsonb_agg(to_jsonb(w) ORDER BY seq) FROM stint.place_ready w) AS ready,
                       (SELECT count(*) FROM stint.place_running) AS running, (SELECT count(*) FROM stint.task_attempts) AS ended"""
    before = rows(conn, stored)
    session = connect(autocommit=False)
    mine = queue.by(session)
    if how == "savepoint":
        session.execute("SAVEPOINT s")
        assert len(mine.claim(6)) == 6 and budget(session, "b") == (3, 11 + 13 + 15)
        session.execute("ROLLBACK TO s")
        assert budget(session, "b") == (0, 0)
        session.commit()
    elif how == "exception":
        session.execute(
            """DO $$ BEGIN
                   BEGIN
                       IF (SELECT count(*) FROM stint.claim('q', 'w', 6)) <> 6 THEN RAISE 'not 6'; END IF;
                       PERFORM 1 / 0;
                   EXCEPTION WHEN division_by_zero THEN NULL;
                   END;
               END $$"""
        )
        session.commit()
    else:
        assert len(mine.claim(6)) == 6
        if how == "rollback":
            session.rollback()
        elif how == "error":
            with pytest.raises(psycopg.errors.DivisionByZero):
                session.execute("SELECT 1 / 0")
            # Given back at the error, not only when the client says ROLLBACK.
            assert value(conn, "SELECT running FROM stint.budgets") == 0
            session.rollback()
        elif how == "terminate":
            conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
        else:
            pid = session.info.backend_pid
            session.close()
            while value(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid):
                pass
    assert rows(conn, stored) == before
    assert budget(conn, "b") == (0, 0)
    assert {(task.payload, task.attempt) for task in queue.claim(9)} == {(n, 1) for n in range(8)}


def test_a_claim_rolled_back_to_a_savepoint_can_be_made_again_in_the_same_transaction(conn):
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue()
    with conn.transaction():
        with pytest.raises(ZeroDivisionError), conn.transaction():
            first = queue.one()
            assert queue.claim() == []
            raise ZeroDivisionError
        second = queue.one()
        assert second.id == first.id and second.lease != first.lease and second.attempt == 1
        assert queue.complete(first).outcome == "unknown_lease"
        with conn.transaction():
            assert queue.complete(second).first
    assert budget(conn, "b") == (0, 0) and queue.ended(second.id) == ["completed"]


def test_a_task_enqueued_claimed_and_completed_in_one_transaction_is_done(conn):
    call(conn, "create_budget", name="b", max_running=1, max_tokens=10)
    queue = Queue(conn, budgets=["b"])
    with conn.transaction():
        id = queue.enqueue(tokens=10)
        task = queue.one()
        assert queue.complete(task).first
        # What is released becomes free when it is committed, not before.
        queue.enqueue(tokens=10)
        assert queue.claim() == []
    assert queue.status(id) == "completed" and budget(conn, "b") == (0, 0)
    with pytest.raises(ZeroDivisionError), conn.transaction():
        assert queue.complete(queue.one()).first
        raise ZeroDivisionError
    assert budget(conn, "b") == (0, 0)
    assert queue.one().attempt == 1


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_under_a_kept_snapshot_a_claim_works_or_fails_with_40001(conn, connect, level):
    call(conn, "create_budget", name="b", max_running=3)
    queue = Queue(conn, budgets=["b"])
    queue.fill(2)
    session = connect(autocommit=False)
    session.isolation_level = level
    mine = queue.by(session)
    # Works alone, with everything that follows.
    [task] = mine.claim()
    assert mine.extend(task).status == "held" and mine.complete(task).first
    session.commit()
    # A row that another session takes after the snapshot.
    session.execute("SELECT 1 FROM stint.queues")
    taken = queue.one()
    with pytest.raises(psycopg.errors.SerializationFailure):
        mine.claim()
    session.rollback()
    # A lease that another session ends after the snapshot.
    session.execute("SELECT 1 FROM stint.queues")
    assert queue.complete(taken).first
    for verb in "complete", "fail", "release", "extend":
        with pytest.raises(psycopg.errors.SerializationFailure):
            getattr(mine, verb)(taken)
        session.rollback()
        session.execute("SELECT 1 FROM stint.queues")
        if verb != "extend":
            queue.enqueue()
            taken = queue.one()
            session.rollback()
            session.execute("SELECT 1 FROM stint.queues")
            queue.complete(taken)
    session.rollback()
    assert budget(conn, "b") == (0, 0)


def test_serializable_workers_do_each_task_once(conn, connect):
    call(conn, "create_budget", name="b", max_running=3)
    queue = Queue(conn, budgets=["b"])
    queue.fill(40)
    sessions = [connect() for _ in range(4)]
    for session in sessions:
        session.isolation_level = IsolationLevel.SERIALIZABLE

    def worker(number):
        mine, firsts, retries = queue.by(sessions[number]), 0, 0
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < 40 and retries < 5000:
            try:
                with mine.conn.transaction():
                    tasks = mine.claim(2)
                for task in tasks:
                    while True:
                        try:
                            with mine.conn.transaction():
                                firsts += mine.complete(task).first
                            break
                        except psycopg.errors.SerializationFailure:
                            retries += 1
            except psycopg.errors.SerializationFailure:
                retries += 1
        return firsts

    assert sum(parallel(4, worker)) == 40
    assert budget(conn, "b") == (0, 0)


@pytest.mark.parametrize("what", ["empty", "all budgets exhausted", "tokens exhausted"])
def test_an_empty_claim_writes_nothing_and_takes_no_transaction_id(cluster, what):
    server = cluster(config={"autovacuum": "off", "stint.naptime": 60000})
    server.create_database("app")
    with server.connect("app") as conn:
        limits = {"max_running": 1} if what == "all budgets exhausted" else {"max_tokens": 100}
        call(conn, "create_budget", name="b", **limits)
        queue = Queue(conn, budgets=[] if what == "empty" else ["b"])
        if what != "empty":
            queue.enqueue("0", tokens=99)
            assert len(queue.claim()) == 1
            queue.fill(10_000, tokens=2)
        conn.execute("VACUUM")  # hint bits, and pages that a read would prune, are written once
        queue.claim()
        conn.execute("SELECT count(*) FROM stint.place_ready")
        conn.execute("CHECKPOINT")
        for attempt in range(5):
            # A checkpointer or statistics process may write in between; nobody does so five times in a row.
            before = value(conn, "SELECT pg_current_wal_insert_lsn()")
            with conn.transaction():
                for _ in range(20):
                    assert queue.claim(7) == []
                assert queue.claim(wait="10 ms") == []
                assert value(conn, "SELECT pg_current_xact_id_if_assigned()") is None
            if value(conn, "SELECT pg_current_wal_insert_lsn()") == before:
                break
        else:
            pytest.fail("every round of empty claims wrote to the log")


def test_held_tasks_do_not_slow_the_claim_of_those_behind_them(conn):
    """Ten thousand tasks of a budget without room stand before one that draws on none."""
    call(conn, "create_budget", name="full", max_running=0)
    queue, alone = Queue(conn), Queue(conn, "alone")
    queue.fill(10_000, budgets=["full"], priority=5)

    def best(of):
        times = []
        for _ in range(30):
            of.enqueue()
            times.append(value(conn, "EXPLAIN (ANALYZE, FORMAT json) SELECT * FROM stint.claim(%s, 'w')", of.name)[0]["Execution Time"])
        return sorted(times)[len(times) // 4]

    best(alone), best(queue)
    assert best(queue) < 2 * best(alone) + 0.2


def test_a_claim_reads_no_more_after_many_tasks_done_in_its_session_and_under_an_old_snapshot(conn, connect):
    """What a session planned while the tables were empty it keeps, and an old snapshot lets nothing be cleaned up."""
    queue = Queue(conn)
    tables = "SELECT relname FROM pg_class WHERE relnamespace = 'stint'::regnamespace AND relkind = 'r' AND relname ~ '^(place|task)_'"
    for (table,) in conn.execute(tables).fetchall():
        conn.execute(f"ALTER TABLE stint.{table} SET (autovacuum_enabled = off)")
    old = connect(autocommit=False)
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")

    def pages():
        counts = []
        for _ in range(9):
            queue.enqueue()
            counts.append(value(conn, "EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT * FROM stint.claim(%s, 'w')", queue.name)[0]["Plan"])
        return sorted(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in counts)[4]

    pages()
    at_first = pages()
    for _ in range(20):
        queue.fill(1000)
        conn.execute(
            "SELECT count(*) FROM stint.claim(%(q)s, 'w', max => 1000) c CROSS JOIN LATERAL stint.complete(%(q)s, c.id, c.lease)",
            {"q": queue.name},
        )
    assert pages() <= 3 * at_first + 5


def test_settings_of_another_transaction_are_seen_at_the_next_call(conn, connect):
    """Each session keeps what it knows of a queue; a committed change reaches all of them, an aborted one none."""
    queue = Queue(conn)
    other = queue.by(connect())
    assert other.claim() == []
    call(conn, "create_budget", name="b", max_running=1)
    with pytest.raises(ZeroDivisionError), conn.transaction():
        queue.enqueue(budgets=["b"])
        raise ZeroDivisionError
    assert other.claim() == []
    for _ in range(2):
        queue.enqueue(budgets=["b"])
    assert len(other.claim(9)) == 1


def test_an_extension_dropped_and_made_again_forgets_the_queues_of_before(conn, connect):
    queue = Queue(conn)
    other = queue.by(connect())
    queue.enqueue()
    assert len(other.claim()) == 1
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint; CREATE EXTENSION pg_stint")
    for each in queue, other:
        for use in each.enqueue, each.claim:
            with pytest.raises(psycopg.errors.UndefinedObject):
                use()
    call(conn, "create_budget", name="b", max_running=1)
    Queue(conn, budgets=["b"])
    queue.fill(2)
    assert len(other.claim(9)) == 1 and queue.claim() == []
    assert budget(conn, "b") == (1, 0)
