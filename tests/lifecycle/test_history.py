"""The maintenance worker keeps the history up; a dump carries it, and a copy loses none of it."""

import subprocess

import cluster
import pytest
from aged import Aged, maintain, partition
from stint import Queue, call, rows, until, value


def dump(server, source):
    env = cluster.clean_environment() | server.env(source)
    return subprocess.run(["pg_dump"], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def restore(server, text, target):
    server.create_database(target, extension=False)
    env = cluster.clean_environment() | server.env(target)
    subprocess.run(["psql", "-qX", "-v", "ON_ERROR_STOP=1"], env=env, input=text, check=True, stdout=subprocess.DEVNULL, text=True)


HISTORY = "SELECT queue, id, status, attempt, finished_at FROM stint.tasks ORDER BY id"


def test_the_worker_makes_partitions_ahead(started):
    server, _ = started()
    with server.connect("app") as conn:
        Queue(conn, history_retention="1 day")
        Queue(conn, "forever")
        ahead = "SELECT count(*) FROM stint.history WHERE attached AND retention IS NOT DISTINCT FROM %s::interval AND ends_at > now()"
        server.wait_until(ahead.replace("count(*)", "count(*) = 2"), "1 day", dbname="app", timeout=15)
        server.wait_until(ahead.replace("count(*)", "count(*) = 2"), None, dbname="app", timeout=15)
        assert value(conn, "SELECT count(*) FROM stint.history WHERE starts_at > now()") == 2


def test_the_worker_attaches_what_an_enqueue_could_not(started):
    server, _ = started()
    with server.connect("app") as conn:
        queue = Queue(conn)
        queue.enqueue()
        until(conn, "SELECT count(*) = 2 FROM stint.history")
        with conn.transaction():
            # The worker does not know of the queue yet.
            Queue(conn, "new", history_retention="1 day")
            for (name,) in rows(conn, "SELECT relname FROM pg_class WHERE relname ~ '^task_.*_c204_' AND relkind = 'r'"):
                conn.execute(f"DROP TABLE stint.{name}")
            made = value(conn, "SELECT stint.enqueue('new', '{}') FROM stint.tasks")
        until(conn, f"SELECT count(*) = 1 FROM stint.tasks WHERE id = '{made}'", timeout=15)
        until(conn, "SELECT bool_and(attached) FROM stint.history")


def test_the_worker_applies_retention(started):
    server, _ = started(config={"stint.event_retention": "1 s"})
    with server.connect("app") as conn:
        queue = Queue(conn, history_retention="2 days")
        old = Aged(conn, "q")
        with conn.transaction():
            gone = [old.finished(days) for days in (9, 8, 7, 6) for _ in range(4)]
            live = old.scheduled(9)
        call(conn, "emit", event="old", payload="1")
        until(conn, "SELECT count(*) = 1 FROM stint.tasks", timeout=25)
        until(conn, "SELECT count(*) = 0 FROM stint.events", timeout=25)
        assert {partition(conn, id) for id in gone} == {None, partition(conn, live)}
        assert [id for (id,) in rows(conn, "SELECT id FROM stint.tasks")] == [live]
        assert call(conn, "emit", event="old", payload="2")[0].first
        assert call(conn, "check") == []
        assert "failed" not in server.log() and queue.enqueue()


def test_awaited_events_are_kept_and_wake_whoever_waits(started):
    server, _ = started(config={"stint.event_retention": "1 s"})
    with server.connect("app") as conn:
        queue = Queue(conn)
        id = queue.enqueue()
        held = queue.one()
        assert call(conn, "await", queue="q", id=id, lease=held.lease, event="e")[0].status == "waiting"
        call(conn, "emit", event="other", payload="1")
        until(conn, "SELECT count(*) = 1 FROM stint.events", timeout=25)
        assert call(conn, "emit", event="e", payload="7")[0].woken == 1
        until(conn, "SELECT count(*) = 0 FROM stint.events", timeout=25)
        held = queue.one()
        assert call(conn, "await", queue="q", id=id, lease=held.lease, event="e")[0] == ("emitted", 7)


def test_a_dump_carries_history_and_a_copy_removes_none_before_it_is_activated(started):
    server, processes = started()
    with server.connect("app") as conn:
        queue = Queue(conn, history_retention="2 days", history_archive="detach")
        forever = Queue(conn, "forever")
        old = Aged(conn, "q")
        # Nobody but us keeps history up in the original.
        with conn.transaction():
            gone = [old.finished(9) for _ in range(4)]
        maintain(conn)
        archive = value(conn, "SELECT 'stint_archive.' || stint.history_partition(%s)", gone[0])
        with conn.transaction():
            for _ in range(8):
                old.finished(1)
            live = old.scheduled(9)
            for one in queue, forever:
                one.enqueue()
                one.complete(one.one())
        before = rows(conn, HISTORY)
        text = dump(server, "app")
    assert len(before) == 11
    restore(server, text, "copy")
    processes.wait_for_worker("copy")
    with server.connect("copy") as conn:
        assert rows(conn, HISTORY) == before and call(conn, "check") == []
        assert value(conn, f"SELECT count(*) FROM {archive}") == 4
        assert value(conn, "SELECT bool_and(attached) FROM stint.history")
        queue = Queue(conn, create=False)
        # As if a week had passed.
        conn.execute("UPDATE stint.task_outcomes SET finished_at = finished_at - interval '9 days'")
        with conn.transaction():
            expired = [Aged(conn, "q").finished(12) for _ in range(4)]
        assert maintain(conn) == (0, 0, 0, 0, 0, 0, False)
        assert {partition(conn, id) for id in expired} != {None}
        queue.enqueue()
        assert queue.complete(queue.one()).first
        conn.execute("SELECT stint.activate()")
        maintain(conn)
        until(conn, f"SELECT to_regclass('stint.' || stint.history_partition('{expired[0]}')) IS NULL", timeout=25)
        assert queue.status(live) == "scheduled"
        assert call(conn, "check") == []
    # A dump of the copy restores as well.
    restore(server, dump(server, "copy"), "second")


def test_drop_extension_takes_the_partitions_and_leaves_the_archive(server, processes, database, conn):
    queue = Queue(conn, history_retention="2 days", history_archive="detach")
    queue.enqueue()
    with conn.transaction():
        old = Aged(conn, "q")
        gone = [old.finished(9) for _ in range(4)]
    maintain(conn)
    until(conn, f"SELECT to_regclass('stint.' || stint.history_partition('{gone[0]}')) IS NULL", timeout=25)
    conn.execute("DROP EXTENSION pg_stint")
    processes.wait_for_no_worker(database)
    assert [name for (name,) in rows(conn, "SELECT relname FROM pg_class WHERE relname ~ '^task_facts' AND relkind = 'r'")] != []
    assert rows(conn, "SELECT DISTINCT relnamespace::regnamespace::text AS schema FROM pg_class WHERE relname ~ '^task_'") == [("stint_archive",)]
    conn.execute("CREATE EXTENSION pg_stint")
    processes.wait_for_worker(database)
    again = Queue(conn, history_retention="2 days")
    id = again.enqueue()
    assert again.one().id == id


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_history_survives_a_restart(started, mode):
    server, processes = started()
    with server.connect("app") as conn:
        queue = Queue(conn, history_retention="2 days")
        with conn.transaction():
            old = Aged(conn, "q")
            for _ in range(40):
                old.finished(9)
            live = old.ready(9, '"' + "x" * 50_000 + '"')
        maintain(conn)
        until(conn, "SELECT count(*) = 1 FROM stint.tasks", timeout=25)
    server.restart(mode)
    processes.wait_for_worker("app")
    with server.connect("app") as conn:
        queue = Queue(conn, create=False)
        task = queue.one()
        assert task.id == live and len(task.payload) == 50_000 and queue.complete(task).first
        assert call(conn, "check") == []
