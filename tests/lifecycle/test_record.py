"""The record and its projections through the worker, crashes and a dump."""

import json
import os
import signal
import subprocess
import time

import psycopg
from cluster import bindir, clean_environment

DECLARE = """
    CREATE TABLE goods (sku text PRIMARY KEY, qty numeric);
    SELECT stint.create_state('goods', 'deduplicate');
    SELECT stint.create_projection('p', 'goods', '{stock}', '{"sku": "payload.sku", "qty": "payload.qty"}', freshness => '200 ms');
"""
FRESH = "SELECT ok AND behind = 0 FROM stint.freshness"


def record(conn, count, start=0):
    events = [{"source": "s", "type": "stock", "event_id": str(n), "payload": {"sku": str(n % 10), "qty": n}} for n in range(start, start + count)]
    conn.execute("SELECT count(*) FROM stint.record_many(%s)", (json.dumps(events),))


def test_the_worker_folds_within_the_freshness_and_survives_being_killed(started):
    server, processes = started()
    with server.connect("app") as conn:
        conn.execute(DECLARE)
        record(conn, 500)
    server.wait_until(FRESH, dbname="app", timeout=10)
    with server.connect("app") as conn:
        assert conn.execute("SELECT max(qty), count(*) FROM goods").fetchone() == (499, 10)
        record(conn, 500, 500)
    os.kill(processes.worker("app"), signal.SIGKILL)
    # Until the postmaster has seen the death, the old server still answers; then it restarts.
    deadline = time.monotonic() + 30
    while True:
        try:
            server.wait_until(FRESH, dbname="app", timeout=30)
            break
        except psycopg.OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with server.connect("app") as conn:
        record(conn, 10, 995)
    server.wait_until(FRESH, dbname="app", timeout=10)
    with server.connect("app") as conn:
        assert conn.execute("SELECT max(qty), count(*) FROM goods").fetchone() == (1004, 10)
        assert conn.execute("SELECT count(*) FROM stint.verify('goods')").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM stint.record_events").fetchone() == (1005,)
        assert conn.execute("SELECT count(*) FROM stint.projection_positions").fetchone() == (1,), "positions are trimmed"


def test_a_restored_record_goes_on_where_it_was(cluster):
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        conn.execute(DECLARE.replace("200 ms", "1 hour"))
        record(conn, 50)
        conn.execute("SELECT stint.project('goods')")
        record(conn, 50, 50)
        pos = conn.execute("SELECT pos FROM stint.events_after(NULL, NULL, 30) ORDER BY seq DESC LIMIT 1").fetchone()[0]
    environment = clean_environment() | server.env("app")
    dump = subprocess.run([bindir() / "pg_dump"], env=environment, check=True, capture_output=True, text=True).stdout
    server.create_database("copy", extension=False)
    subprocess.run([bindir() / "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", "copy"], env=environment, input=dump, check=True, capture_output=True, text=True)
    with server.connect("copy") as conn:
        conn.execute("SELECT stint.activate()")
        assert conn.execute("SELECT behind FROM stint.freshness").fetchone() == (50,)
        assert conn.execute("SELECT count(*) FROM stint.verify('goods')").fetchone() == (0,)
        record(conn, 20, 90)
        assert conn.execute("SELECT behind FROM stint.freshness").fetchone() == (60,)
        while conn.execute("SELECT stint.project('goods')").fetchone()[0]:
            pass
        assert conn.execute("SELECT max(qty) FROM goods").fetchone() == (109,)
        assert conn.execute("SELECT count(*) FROM stint.verify('goods')").fetchone() == (0,)
        rest = conn.execute("SELECT event_id::int FROM stint.events_after(NULL, %s)", (pos,)).fetchall()
        assert [n for (n,) in rest] == list(range(30, 110))
