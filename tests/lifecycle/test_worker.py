"""The maintenance worker is there whenever the extension is, and in nobody's way."""

import os
import signal
import time

import psycopg
import pytest


def kill_worker(server, pid, signum):
    assert server.sql("SELECT backend_type FROM pg_stat_activity WHERE pid = %s", pid) == "pg_stint worker"
    os.kill(pid, signum)


def verdict(server, dbname="app"):
    with server.connect(dbname) as conn:
        return dict(conn.execute('SELECT "check", ok FROM stint.doctor()').fetchall())


def test_only_databases_with_the_extension_have_a_worker(started):
    server, processes = started()
    server.create_database("second")
    server.create_database("plain", extension=False)
    processes.wait_for_worker("second")
    assert processes.worker("plain") is None
    databases = server.psql("SELECT database FROM stint.maintenance ORDER BY 1", "app").split()
    assert databases == ["app", "second"]


def test_the_worker_is_there_within_half_a_second_of_create_extension(processes, database, conn):
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
    processes.wait_for_no_worker(database)
    conn.execute("CREATE EXTENSION pg_stint")
    created = time.monotonic()
    processes.wait_for_worker(database)
    assert time.monotonic() - created < 1.5  # half a second, and room for a busy machine


def test_a_terminated_worker_comes_back(started):
    server, processes = started()
    for _ in range(2):
        old, launcher = processes.worker("app"), processes.launcher()
        assert server.sql("SELECT pg_terminate_backend(%s)", old)
        processes.wait_for_worker("app", other_than=old)
        assert processes.launcher() == launcher
    processes.prove_at_work("app")


def test_a_cancelled_worker_stays(server, processes, database):
    pid = processes.worker(database)
    for _ in range(20):
        server.sql("SELECT pg_cancel_backend(%s)", pid)
    processes.prove_at_work(database)
    assert processes.worker(database) == pid


def test_a_killed_worker_comes_back_with_the_restarted_server(started):
    server, processes = started()
    old = processes.worker("app")
    kill_worker(server, old, signal.SIGKILL)
    server.wait_ready()
    # Until the postmaster has seen the death, the old server still answers.
    deadline = time.monotonic() + 30
    while True:
        try:
            processes.wait_for_worker("app", other_than=old)
            processes.prove_at_work("app")
            break
        except psycopg.OperationalError:
            assert time.monotonic() < deadline
    assert server.psql("SELECT * FROM stint.check()", "app") == ""


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_worker_comes_back_after_a_restart(started, mode):
    server, processes = started()
    server.restart(mode)
    processes.wait_for_worker("app")
    processes.prove_at_work("app")
    assert server.psql("SELECT * FROM stint.check()", "app") == ""


def test_a_new_launcher_supervises_the_old_workers(started):
    server, processes = started()
    worker, launcher = processes.worker("app"), processes.launcher()
    server.sql("SELECT pg_terminate_backend(%s)", launcher)
    server.wait_until("SELECT pid IS NOT NULL AND pid <> %s FROM stint.launcher_state()", launcher, dbname="app")
    assert processes.worker("app") == worker
    server.sql("SELECT pg_terminate_backend(%s)", worker)
    processes.wait_for_worker("app", other_than=worker)
    server.create_database("second")
    processes.wait_for_worker("second")


def test_launcher_and_worker_terminated_together_come_back(started):
    server, processes = started()
    worker, launcher = processes.worker("app"), processes.launcher()
    server.sql("SELECT pg_terminate_backend(%s), pg_terminate_backend(%s)", worker, launcher)
    processes.wait_for_worker("app", other_than=worker)
    assert processes.launcher() != launcher


def test_the_worker_follows_drop_and_create_extension(processes, database, conn):
    for _ in range(3):
        conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
        processes.wait_for_no_worker(database)
        conn.execute("CREATE EXTENSION pg_stint")
        processes.wait_for_worker(database)
    processes.prove_at_work(database)


def test_the_worker_is_unmoved_by_what_rolls_back(server, processes, database, connect):
    plain = f"{database}_plain"
    server.create_database(plain, extension=False)
    with server.connect(plain, autocommit=False) as conn:
        conn.execute("CREATE EXTENSION pg_stint")
        conn.rollback()
    conn = connect(autocommit=False)
    pid = processes.worker(database)
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
    conn.rollback()
    processes.prove_at_work(database)
    assert processes.worker(database) == pid
    assert processes.worker(plain) is None
    server.drop_database(plain)


def test_drop_and_create_in_one_transaction_gives_the_new_extension_a_worker(processes, database, connect):
    conn = connect(autocommit=False)
    conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
    conn.execute("CREATE EXTENSION pg_stint")
    conn.commit()
    processes.prove_at_work(database)


def test_drop_extension_meets_neither_a_deadlock_nor_a_failing_step(started):
    server, processes = started(config={"stint.naptime": "10ms", "deadlock_timeout": "10ms"})
    with server.connect("app") as conn:
        for _ in range(30):
            conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint")
            conn.execute("CREATE EXTENSION pg_stint")
    processes.prove_at_work("app")
    assert [line for line in server.log().splitlines() if "WARNING" in line or "deadlock" in line] == []


def test_a_fast_shutdown_does_not_wait_for_the_worker(started):
    server, processes = started()
    assert server.stop("fast") < 5


def test_a_worker_that_waits_for_a_lock_stops_no_shutdown(started):
    server, processes = started()
    conn = server.connect("app", autocommit=False)
    conn.execute("LOCK TABLE stint.follow_ups IN ACCESS EXCLUSIVE MODE")
    server.wait_until("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE backend_type = 'pg_stint worker'")
    assert server.stop("fast") < 5


def test_drop_database_with_force_does_not_wait_for_the_worker(server, processes, database):
    other = f"{database}_other"
    for _ in range(2):
        server.create_database(other)
        processes.wait_for_worker(other)
        started_at = time.monotonic()
        server.drop_database(other)
        assert time.monotonic() - started_at < 5
        # The launcher has forgotten it: no worker is tried for a database that is not there.
        orphans = "SELECT NOT EXISTS (SELECT FROM stint.worker_state() WHERE database NOT IN (SELECT oid FROM pg_database))"
        server.wait_until(orphans, dbname=database)


def test_a_template_with_the_extension_can_be_copied(started):
    server, processes = started()
    server.create_database("mould")
    processes.wait_for_worker("mould")
    server.sql("ALTER DATABASE mould IS_TEMPLATE true")
    server.restart()
    processes.wait_for_worker("app")
    assert processes.worker("mould") is None
    # Nobody tells the launcher of it; it looks every ten seconds.
    server.sql("CREATE DATABASE made TEMPLATE mould")
    processes.wait_for_worker("made", timeout=30)


def test_a_quiet_database_costs_the_worker_few_transactions(started):
    """It looks once in each round whether any of its two dozen steps has something to do, and runs those that have."""
    server, _ = started(config={"stint.naptime": "100ms"})
    with server.connect("app") as conn:
        conn.execute("SELECT stint.create_queue('q')")
        conn.execute("SELECT stint.enqueue('q', '{}', key => 'k'), stint.enqueue('q', '{}', delay => '1 hour'), stint.enqueue('q', '{}')")
        conn.execute("SELECT stint.complete('q', c.id, c.lease) FROM stint.claim('q', 'w') c")
        conn.execute("SELECT * FROM stint.claim('q', 'w')")

        def transactions():
            return conn.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()[0]

        # A process reports its transactions at most once a second.
        before, began = transactions(), time.monotonic()
        time.sleep(4)
        rounds = (time.monotonic() - began + 1) / 0.1
        assert transactions() - before < 2 * rounds


def test_the_worker_writes_nothing_while_idle(started):
    quiet = {"autovacuum_naptime": "1h", "checkpoint_timeout": "1h"}
    server, processes = started(config=quiet)
    with server.connect("app") as conn:
        conn.execute("SELECT stint.create_queue('q', lease_for => '1 s')")
        conn.execute("SELECT stint.create_budget('b', max_running => 4)")
        conn.execute("SELECT stint.enqueue('q', '{}', budgets => '{b}', key => 'k')")
        conn.execute("SELECT stint.enqueue('q', '{}', delay => '1 day')")
        conn.execute("CREATE TABLE items (id int PRIMARY KEY, name text)")
        conn.execute("SELECT stint.create_state('items', 'deduplicate')")
        conn.execute("SELECT * FROM stint.merge('items', '[{\"id\": 1, \"name\": \"one\"}]')")
        (task,) = conn.execute("SELECT id FROM stint.claim('q', 'w')").fetchone()
        processes.prove_at_work("app")
        server.wait_until("SELECT status = 'ready' FROM stint.tasks WHERE id = %s", task, dbname="app")
        server.wait_until("SELECT count(*) = 1 FROM stint.changes('items')", dbname="app")

        position = "SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())"
        rounds = "SELECT last_clean_round FROM stint.maintenance WHERE database = 'app'"
        # What went before may still be settling: the background writer notes the running transactions once after any activity.
        deadline = time.monotonic() + 60
        before, since, round_before = conn.execute(position).fetchone(), time.monotonic(), conn.execute(rounds).fetchone()
        while time.monotonic() - since < 10:
            assert time.monotonic() < deadline, "no 10 s without WAL in a minute"
            time.sleep(0.1)
            now = conn.execute(position).fetchone()
            if now != before:
                before, since, round_before = now, time.monotonic(), conn.execute(rounds).fetchone()
        assert conn.execute(rounds).fetchone() > round_before, "the worker kept its rounds"


def test_a_standby_has_no_worker_until_it_is_promoted(started):
    server, processes = started()
    server.sql("SELECT stint.create_queue('q')", dbname="app")
    with server.standby() as replica:
        on_replica = type(processes)(replica)
        replica.wait_for_replay(server)
        verdicts = verdict(replica)
        assert verdicts["server takes writes"] is False
        assert verdicts["launcher runs"] and verdicts["maintenance worker runs here"]
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            replica.sql("SELECT stint.enqueue('q', '{}')", dbname="app")
        assert on_replica.launcher() is None
        assert on_replica.worker("app") is None
        replica.promote()
        on_replica.wait_for_worker("app")
        on_replica.prove_at_work("app")
        assert replica.psql("SELECT * FROM stint.check()", "app") == ""
    processes.prove_at_work("app")


def test_more_databases_than_slots_are_told_by_the_doctor(started):
    server, processes = started(config={"stint.max_databases": 1})
    server.create_database("second")
    assert verdict(server, "second")["maintenance worker runs here"] is False
    assert verdict(server)["room for databases"] is False
    with server.connect("second") as conn:
        row = conn.execute("SELECT hint FROM stint.doctor() WHERE \"check\" = 'maintenance worker runs here'").fetchone()
    assert "stint.max_databases" in row[0]


def test_too_few_worker_processes_are_told_by_the_doctor(started):
    server, processes = started()
    server.restart(max_worker_processes=2)  # the launcher, and PostgreSQL's own of logical replication
    server.wait_until("SELECT refused_at IS NOT NULL FROM stint.launcher_state()", dbname="app")
    with server.connect("app") as conn:
        row = conn.execute("SELECT ok, hint FROM stint.doctor() WHERE \"check\" = 'maintenance worker runs here'").fetchone()
    assert row[0] is False and "max_worker_processes" in row[1]
    assert server.log().count("there is no room for another background worker") == 1
    server.restart(max_worker_processes=20)
    processes.wait_for_worker("app")


def test_settings_of_the_database_do_not_stop_the_worker(started):
    server, processes = started()
    server.sql("ALTER DATABASE app SET default_transaction_isolation = 'serializable'")
    server.sql("ALTER DATABASE app SET default_transaction_read_only = on")
    server.sql("ALTER DATABASE app SET search_path = ''")
    server.restart()
    processes.wait_for_worker("app")
    with server.connect("app") as conn:
        conn.execute("SET default_transaction_read_only = off")
        conn.execute("SET default_transaction_isolation = 'read committed'")
        conn.execute("SELECT stint.create_queue('q')")
        conn.execute("SELECT stint.enqueue('q', '{}', delay => '50 ms')")
    server.wait_until("SELECT status = 'ready' FROM stint.tasks", dbname="app", timeout=15)


def test_the_worker_obeys_a_reload(started):
    server, processes = started(config={"stint.naptime": "60s"})
    pid = processes.worker("app")
    server.configure(**{"stint.naptime": "20ms"})
    server.reload()
    processes.prove_at_work("app")
    assert processes.worker("app") == pid


def test_a_failing_step_is_told_once_and_stops_no_other(started):
    server, processes = started(config={"stint.naptime": "20ms"})
    with server.connect("app") as conn:
        conn.execute("CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no promotion at %', clock_timestamp(); END$$")
        conn.execute("CREATE TRIGGER broken BEFORE DELETE ON stint.place_scheduled EXECUTE FUNCTION public.fail()")
        conn.execute("SELECT stint.create_queue('q')")
        conn.execute("SELECT stint.enqueue('q', '{}', delay => '1 ms')")
        server.wait_until("SELECT last_error LIKE 'promote: no promotion at %' FROM stint.maintenance", dbname="app")
        assert verdict(server)["maintenance steps succeed"] is False
        # The sweep stands before it and the doorbells after it.
        conn.execute("SELECT stint.enqueue('q', '{}')")
        heard = []
        conn.add_notify_handler(heard.append)
        conn.execute("LISTEN stint_queue")
        assert conn.execute("SELECT attempt FROM stint.claim('q', 'dies', lease_for => '1 s')").fetchone() == (1,)
        assert conn.execute("SELECT attempt FROM stint.claim('q', 'next', wait => '20 s')").fetchone() == (2,)
        deadline = time.monotonic() + 10
        while not heard and time.monotonic() < deadline:
            conn.execute("SELECT 1")
        assert {(note.channel, note.payload) for note in heard} == {("stint_queue", "q")}
        told = [line for line in server.log().splitlines() if 'the step "promote"' in line]
        assert len(told) == 1 and "WARNING" in told[0]
        conn.execute("DROP TRIGGER broken ON stint.place_scheduled")
    server.wait_until("SELECT ok FROM stint.doctor() WHERE \"check\" = 'maintenance steps succeed'", dbname="app")
    processes.prove_at_work("app")


def test_pg_stat_activity_names_the_processes(processes, database, conn):
    rows = conn.execute("SELECT backend_type, application_name, query, datname FROM pg_stat_activity WHERE backend_type LIKE 'pg_stint%'").fetchall()
    assert ("pg_stint launcher", "pg_stint launcher", "", None) in rows
    (step,) = [query for kind, name, query, datname in rows if kind == name == "pg_stint worker" and datname == database]
    assert step in ("load budgets", "sweep", "promote", "expire keys", "tick", "trim consumers", "doorbells")


def test_a_lapsed_lease_is_claimable_within_two_seconds(processes, conn):
    conn.execute("SELECT stint.create_queue('q')")
    conn.execute("SELECT stint.enqueue('q', '{}')")
    conn.execute("SELECT * FROM stint.claim('q', 'dies', lease_for => '1 s')").fetchone()
    expires = time.monotonic() + 1
    row = conn.execute("SELECT attempt FROM stint.claim('q', 'next', wait => '20 s')").fetchone()
    assert row == (2,)
    assert time.monotonic() - expires < 2
