"""The example workers, in Python and in Node, hold what their heads promise. Run scripts/setup first: it installs Node's driver."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import psycopg
import pytest
from cluster import ROOT, bindir, clean_environment
from stint import Queue, call, rows, until, value

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def programs():
    """How each worker is started. Node looks for its driver beside the file that imports it, so the file is copied there."""
    home = pathlib.Path(bindir()).parents[3].parent / "node"
    assert (home / "node_modules/pg").is_dir(), "Node's driver is missing: run scripts/setup"
    shutil.copy(EXAMPLES / "node/worker.mjs", home)
    return {"python": [sys.executable, EXAMPLES / "python/worker.py"], "node": ["node", home / "worker.mjs"]}


@pytest.fixture(params=["python", "node"])
def start(request, programs, server, database, tmp_path):
    """Starts a worker of queue q; all are killed when the test ends."""
    started = []

    def one(*options):
        log = open(tmp_path / f"worker{len(started)}", "w+")
        command = [*programs[request.param], "q", "--name", f"runner{len(started)}", *map(str, options)]
        env = clean_environment() | server.env(database)
        worker = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        worker.log = log.name
        started.append(worker)
        return worker

    yield one
    for worker in started:
        worker.kill()
        worker.wait()
        print(open(worker.log).read())


def stop(worker, timeout=15):
    worker.send_signal(signal.SIGTERM)
    return worker.wait(timeout)


def reports(worker):
    return [json.loads(line) for line in open(worker.log) if line.startswith("{")]


def running(conn, count):
    until(conn, f"SELECT count(*) = {count} FROM stint.tasks WHERE status = 'running'", 20)


def finished(conn, count):
    until(conn, f"SELECT count(*) = {count} FROM stint.tasks WHERE status IN ('completed', 'failed', 'cancelled')", 30)


def test_a_worker_reports_results_usage_and_errors_once_and_stops_while_it_waits(conn, start):
    queue = Queue(conn, max_attempts=1)
    worker = start()
    good = [queue.enqueue(json.dumps({"n": n})) for n in range(5)]
    bad = queue.enqueue('{"error": "no such page"}')
    finished(conn, 6)
    until(conn, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'runner0' AND state = 'active'")
    asked = time.monotonic()
    assert stop(worker) == 0 and time.monotonic() - asked < 5
    for n, id in enumerate(good):
        assert json.loads(queue.result(id)) == {"echo": {"n": n}}
        [attempt] = queue.attempts(id)
        assert (attempt.ended, attempt.input_tokens, attempt.output_tokens, str(attempt.model_cost)) == ("completed", 100, 20, "0.0012")
        assert attempt.run_id == f"runner0/{id}.1"
    assert queue.status(bad) == "failed" and "no such page" in queue.task(bad).why
    assert [report["first"] for report in reports(worker)] == [True] * 6


def test_a_stopped_worker_finishes_what_runs_and_releases_what_it_has_not_begun(conn, start):
    queue = Queue(conn)
    ids = [queue.enqueue('{"seconds": 3}') for _ in range(3)]
    worker = start("--ahead", 2)
    running(conn, 3)
    time.sleep(1)  # claimed is not begun
    assert stop(worker) == 0
    assert [queue.status(id) for id in ids] == ["completed", "ready", "ready"]
    assert [queue.ended(id) for id in ids] == [["completed"], ["released"], ["released"]]
    assert rows(conn, "SELECT DISTINCT counted FROM stint.place_ready") == [(0,)]


def test_a_worker_claims_nothing_ahead_of_budgets(conn, start):
    call(conn, "create_budget", name="b", max_running=5)
    queue = Queue(conn, budgets=["b"])
    for _ in range(3):
        queue.enqueue('{"seconds": 0.5}')
    worker = start("--ahead", 2)
    most = 0
    deadline = time.monotonic() + 30
    while value(conn, "SELECT count(*) FROM stint.task_outcomes") < 3:
        most = max(most, value(conn, "SELECT running FROM stint.budgets"))
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert most == 1
    assert stop(worker) == 0


def test_a_long_task_keeps_its_lease(conn, start):
    queue = Queue(conn)
    id = queue.enqueue('{"seconds": 4}')
    worker = start("--lease", 1.5)
    finished(conn, 1)
    assert queue.ended(id) == ["completed"]
    assert stop(worker) == 0


def test_a_cancelled_task_stops_its_work(conn, start):
    queue = Queue(conn)
    id = queue.enqueue('{"seconds": 60}')
    worker = start("--lease", 1.5)
    running(conn, 1)
    queue.cancel(id)
    finished(conn, 1)
    assert queue.status(id) == "cancelled"
    assert stop(worker) == 0


def test_a_worker_whose_connections_are_lost_reports_once_and_goes_on(conn, start):
    queue = Queue(conn)
    first = queue.enqueue('{"seconds": 1.5}')
    worker = start("--lease", 3)
    running(conn, 1)
    kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'runner%%'"
    assert value(conn, kill) >= 1
    finished(conn, 1)
    assert queue.ended(first) == ["completed"]
    until(conn, "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'runner0' AND state = 'active'")
    value(conn, kill)  # while it waits for a task
    second = queue.enqueue("{}")
    finished(conn, 2)
    assert queue.ended(second) == ["completed"]
    assert stop(worker) == 0


def test_a_worker_that_asks_again_learns_that_it_was_done(conn, start):
    """As if the answer to its complete had been lost: the same call has been made under its lease before."""
    queue = Queue(conn)
    id = queue.enqueue('{"seconds": 1}')
    worker = start()
    running(conn, 1)
    lease = value(conn, "SELECT lease FROM stint.place_running")
    call(conn, "complete", queue="q", id=id, lease=lease, result='"first"', input_tokens=1)
    until(conn, f"SELECT count(*) = 0 FROM stint.place_running WHERE id = '{id}'")
    deadline = time.monotonic() + 20
    while not reports(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert reports(worker) == [{"id": str(id), "attempt": 1, "outcome": "already_completed", "first": False}]
    assert queue.result(id) == '"first"' and queue.attempts(id)[0].input_tokens == 1
    assert stop(worker) == 0


def test_a_worker_waits_for_a_server_that_is_not_there_yet(conn, connect, start, server, database):
    queue = Queue(conn)
    name = psycopg.sql.Identifier(database)
    with server.connect() as other:
        other.execute(psycopg.sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        worker = start()
        time.sleep(1.5)
        assert worker.poll() is None
        other.execute(psycopg.sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
    queue.enqueue("{}")
    finished(conn, 1)
    assert stop(worker) == 0
