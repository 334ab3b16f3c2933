"""A restored database works from its first minute on: rows that come from a dump are seen by whatever remembers where rows were."""

import subprocess

import cluster
import psycopg
import pytest
from stint import Queue, call, until, value


def restore_slowly(server, processes, source, target):
    """As a dump of many rows is restored: the worker is at work in the new database before its rows arrive."""
    env = cluster.clean_environment() | server.env(source)
    dump = subprocess.run(["pg_dump"], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    before, first, rest = dump.partition("COPY stint.")
    server.create_database(target, extension=False)
    for part in before, first + rest:
        subprocess.run(["psql", "-qX", "-d", target], env=env, input=part, check=True, stdout=subprocess.DEVNULL, text=True)
        processes.wait_for_worker(target)


def test_a_restored_queue_goes_on(started):
    server, processes = started()
    with server.connect("app") as conn:
        call(conn, "create_budget", name="b", max_running=2)
        queue = Queue(conn, budgets=["b"], lease_for="3 s")
        queue.fill(4)
        delayed = queue.enqueue('"delayed"', priority=9, delay="1 s", key="k")
        running = queue.claim(2)
        restore_slowly(server, processes, "app", "copy")
    with server.connect("copy") as conn:
        queue = Queue(conn, create=False)
        held = value(conn, "SELECT array_agg(lease) FROM stint.place_running")
        for verb in queue.claim, queue.enqueue, lambda: call(conn, "sweep"), lambda: call(conn, "promote"):
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="copy") as caught:
                verb()
            assert "stint.activate" in caught.value.diag.message_hint
        assert value(conn, "SELECT count(*) FROM stint.tasks WHERE status = 'running'") == 2
        copied = "SELECT ok FROM stint.doctor() WHERE \"check\" = 'the database is no copy'"
        assert not value(conn, copied)
        call(conn, "activate")
        assert value(conn, copied)
        assert [queue.complete(task).outcome for task in running] == ["unknown_lease"] * 2, "a restore ends leases"
        assert value(conn, "SELECT count(*) FROM stint.place_running WHERE lease = ANY (%s)", held) == 0
        assert call(conn, "check") == []
        assert queue.enqueue(key="k") == delayed and queue.enqueue() != delayed
        until(conn, f"SELECT status = 'ready' FROM stint.tasks WHERE id = '{delayed}'", 5)
        until(conn, "SELECT running = 0 FROM stint.queue_stats", 8)
        assert queue.claim(1)[0].id == delayed
        assert value(conn, "SELECT max(seq) < nextval('stint.task_seq') FROM stint.place_ready")
        assert call(conn, "check") == []


def test_a_restored_fair_queue_keeps_its_groups_and_weights(started):
    server, processes = started()
    with server.connect("app") as conn:
        queue = Queue(conn, fair=True)
        call(conn, "set_weight", queue="q", group_key="b", weight=3)
        for group in "ab":
            for _ in range(12):
                queue.enqueue(f'"{group}"', group_key=group, tokens=10)
        queue.complete(queue.one(), input_tokens=10)
        # Closed a moment before the dump, with tasks that came meanwhile.
        conn.execute("UPDATE stint.lanes SET closed = pg_current_xact_id() WHERE group_key = 'a'")
        restore_slowly(server, processes, "app", "copy")
    with server.connect("copy") as conn:
        queue = Queue(conn, create=False)
        call(conn, "activate")
        got = "".join(queue.one().payload for _ in range(8))
        assert got.count("b") == 6, got
        queue.enqueue('"a"', group_key="a", tokens=10)
        assert sorted(task.payload for task in queue.claim(100)) == ["a"] * 10 + ["b"] * 6
        assert queue.claim() == [] and call(conn, "check") == []


def test_a_database_made_from_a_template_rests_until_it_is_activated_and_pg_upgrade_keeps_leases(started):
    server, processes = started()
    with server.connect("app") as conn:
        queue = Queue(conn, lease_for="1 min")
        queue.fill(2)
        (task,) = queue.claim(1)
    server.sql("ALTER DATABASE app IS_TEMPLATE true")
    server.restart()
    server.sql("CREATE DATABASE copy TEMPLATE app")
    processes.wait_for_worker("copy", timeout=30)
    with server.connect("copy") as conn:
        queue = Queue(conn, create=False)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            queue.claim(1)
        call(conn, "activate", keep_leases=True)
        assert queue.complete(task).outcome == "completed"
        assert call(conn, "check") == []


def test_the_extension_is_not_dropped_with_tasks_in_it(started):
    server, _ = started()
    with server.connect("app") as conn:
        Queue(conn).fill(1)
        for drop in "DROP EXTENSION pg_stint", "DROP EXTENSION IF EXISTS pg_stint CASCADE", "DO $$BEGIN DROP EXTENSION pg_stint; END$$":
            with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="tasks") as caught:
                conn.execute(drop)
            assert "stint.allow_drop" in caught.value.diag.message_hint
        conn.execute("DROP EXTENSION IF EXISTS no_such_extension")
        conn.execute("SET stint.allow_drop = on")
        conn.execute("DROP EXTENSION pg_stint")
