"""Waiting claims on a server of their own: shutdown, clients that go away, a pooler, and what sixty-four sleepers cost."""

import os
import signal
import subprocess
import time

import psycopg
import pytest
from bouncer import Bouncer
from cluster import bindir, clean_environment
from stint import Queue, background, until, value, waiting

QUIET = {"autovacuum": "off", "stint.naptime": 60000, "stint.doorbell_interval": 60000, "max_connections": 120}


@pytest.fixture
def server(cluster):
    server = cluster(config=QUIET)
    server.create_database("app")
    return server


@pytest.fixture
def queue(server):
    with server.connect("app") as conn:
        yield Queue(conn)


SLEEPING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%wait =>%' AND state = 'active' AND wait_event_type = 'Extension' AND pid <> pg_backend_pid()"


def sleepers(queue, sessions, wait="50 s"):
    """Sessions that all wait in a claim."""
    claim = f"SELECT id FROM stint.claim('{queue.name}', 'w', wait => '{wait}')"
    claims = [background(lambda session=session: session.execute(claim).fetchall()) for session in sessions]
    until(queue.conn, f"SELECT ({SLEEPING}) = {len(sessions)}", 30)
    return claims


def test_a_fast_shutdown_ends_waiting_claims(server, queue):
    claims = sleepers(queue, [server.connect("app") for _ in range(8)])
    assert server.stop("fast", timeout=25) < 20  # the waits are of 50 s
    for claim in claims:
        with pytest.raises(psycopg.OperationalError, match="administrator command"):
            claim.join()


def test_a_client_that_is_gone_gets_no_task(server, queue):
    """Its session ends at once, or when a task wakes it before it has noticed, and the task goes to the next one."""
    command = [bindir() / "psql", "-XAtc", f"SELECT id FROM stint.claim('{queue.name}', 'gone', wait => '50 s')"]
    clients = [subprocess.Popen(command, env=clean_environment() | server.env("app"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)]
    until(queue.conn, f"SELECT ({SLEEPING}) = 3")
    session = server.connect("app")
    there = background(lambda: session.execute(f"SELECT id FROM stint.claim('{queue.name}', 'w', wait => '50 s')").fetchall())
    until(queue.conn, f"SELECT ({SLEEPING}) = 4", 30)
    for client in clients:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    id = queue.enqueue()
    assert [found for (found,) in there.join(20)] == [id]
    # They look by themselves only every ten seconds.
    until(queue.conn, f"SELECT ({SLEEPING}) = 0", 2)
    assert value(queue.conn, "SELECT array_agg(worker) FROM stint.place_running") == ["w"]
    assert value(queue.conn, "SELECT count(*) FROM stint.task_attempts") == 0


def naps(pids):
    """How often these processes went to sleep so far."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/status") as status:
            total += next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    return total


def test_each_committed_task_wakes_one_of_many_waiters_and_no_other(server, queue):
    sessions = [server.connect("app") for _ in range(32)]
    claims = sleepers(queue, sessions)
    tasks, others = 12, 20
    pids = [session.info.backend_pid for session in sessions]
    time.sleep(1.5)  # each has looked once by itself
    before, began = {pid: naps([pid]) for pid in pids}, time.monotonic()
    producers = [server.connect("app") for _ in range(4)]
    made = [background(lambda own=queue.by(producer): [own.enqueue() for _ in range(tasks // 4)]) for producer in producers]
    ids = {id for producer in made for id in producer.join()}
    until(queue.conn, f"SELECT count(*) = {tasks} FROM stint.place_running")
    until(queue.conn, f"SELECT ({SLEEPING}) = {others}")
    time.sleep(0.3)
    awake = [claim for claim in claims if claim.done()]
    asleep = [pid for pid, claim in zip(pids, claims) if not claim.done()]
    got = [id for claim in awake for (id,) in claim.join()]
    assert len(awake) == tasks and set(got) == ids and len(got) == tasks
    woken = naps(asleep) - sum(before[pid] for pid in asleep)
    # Each looks by itself once a second. Were all woken by each commit, it would be as many times again as there are tasks.
    seconds = time.monotonic() - began
    assert woken <= others * (seconds + 2) + tasks, f"{others} sleepers woke {woken} times in {seconds:.1f} s"
    with queue.conn.transaction():
        queue.fill(others)
    assert all(len(claim.join()) == 1 for claim in claims if claim not in awake)


def test_workers_that_wait_hardly_look(server, queue):
    sessions = [server.connect("app") for _ in range(24)]
    claims = sleepers(queue, sessions)
    pids = [session.info.backend_pid for session in sessions]
    before, began = naps(pids), time.monotonic()
    time.sleep(4)
    # Each may look once in ten seconds, and is woken now and then for PostgreSQL's own ends; one that looks each second goes to sleep four times.
    assert naps(pids) - before <= 24 * 2 * max(1, (time.monotonic() - began) / 10)
    queue.fill(24)
    assert sum(len(claim.join()) for claim in claims) == 24


def test_sixty_four_waiting_workers_write_nothing_and_hold_nothing(server, queue):
    conn = queue.conn
    conn.execute("CREATE EXTENSION pg_buffercache")
    for _ in range(3):
        queue.enqueue()
        queue.complete(queue.one())
    claims = sleepers(queue, [server.connect("app") for _ in range(64)], wait="20 s")
    # What the first look of a session may still write, a hint on a page, it has written; the rest goes with the checkpoint.
    time.sleep(1.2)
    conn.execute("CHECKPOINT")
    written = "SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot()), (SELECT count(*) FROM pg_buffercache WHERE isdirty)"
    for _ in range(5):
        before = conn.execute(written).fetchone()
        time.sleep(2.5)
        after = conn.execute(written).fetchone()
        if after == before:
            break
    # The checkpointer may note a running transaction in between; nobody does so five times in a row.
    assert after == before
    assert value(conn, f"SELECT ({SLEEPING})") == 64
    held = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%wait =>%' AND pid <> pg_backend_pid() AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)"
    # One that is looking just now has a snapshot for that moment.
    assert min(value(conn, held) for _ in range(50)) == 0
    conn.execute("CREATE TABLE junk AS SELECT 1 AS a; DELETE FROM junk")
    conn.execute("VACUUM junk")
    assert value(conn, "SELECT pg_relation_size('junk')") == 0
    with conn.transaction():
        queue.fill(64)
    assert sum(len(claim.join()) for claim in claims) == 64


def test_waiting_claims_work_through_pgbouncer_in_transaction_mode(server, queue):
    with Bouncer(server, "app") as pool:
        workers = [pool.connect() for _ in range(4)]
        for _ in range(5):
            claims = sleepers(queue, workers)
            # Committed through the pool as well, one after the other.
            own = queue.by(pool.connect())
            ids = {own.enqueue() for _ in range(4)}
            assert {id for claim in claims for (id,) in claim.join(5)} == ids
        # More clients than sessions behind the pool: who has its task makes room for the next.
        done = []

        def worker(conn):
            mine = queue.by(conn)
            while tasks := mine.claim(wait="2 s"):
                done.extend(task.id for task in tasks if mine.complete(task).first)

        queue.conn.execute("DELETE FROM stint.place_running")
        crowd = [background(worker, pool.connect()) for _ in range(40)]
        made = [queue.enqueue() for _ in range(200)]
        for one in crowd:
            one.join(60)
        assert sorted(done) == sorted(made)
        # A client that the pool cancels ends at once, and the session is free again.
        session = pool.connect()
        claim = background(lambda: session.execute(f"SELECT id FROM stint.claim('{queue.name}', 'w', wait => '50 s')").fetchall())
        until(queue.conn, f"SELECT ({SLEEPING}) = 1")
        session.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            claim.join(10)
