"""Positions of the task feed outlive crashes, failovers and restores."""

import subprocess

import cluster
from stint import Queue, call, rows


def events(conn, after=0):
    return call(conn, "task_events", queue="q", after=after)


def restore(server, source, target):
    env = cluster.clean_environment() | server.env(source)
    dump = subprocess.run(["pg_dump"], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    server.create_database(target, extension=False)
    subprocess.run(["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", target], env=env, input=dump, check=True, stdout=subprocess.DEVNULL, text=True)


def test_a_reader_goes_on_in_a_restored_database_where_it_was(started):
    server, _ = started()
    with server.connect("app") as conn:
        queue = Queue(conn, events=True)
        ids = [queue.enqueue() for _ in range(3)]
        conn.execute("SELECT stint.tick()")
        told = events(conn)
        assert [event.id for event in told] == ids
        with server.connect("app", autocommit=False) as ticking:
            ticking.execute("SELECT stint.tick()")  # keeps the worker from it: the dump has events without positions
            unticked = queue.enqueue()
            restore(server, "app", "copy")
    with server.connect("copy") as conn:
        queue = Queue(conn, create=False)
        assert events(conn) == told
        conn.execute("SELECT stint.activate()")
        late = queue.enqueue()
        conn.execute("SELECT stint.tick()")
        assert [event.id for event in events(conn, after=told[1].pos)] == [ids[2], unticked, late]
        assert [event.pos for event in events(conn)] == list(range(told[0].pos, told[0].pos + 5))
        assert call(conn, "check") == []


def test_a_reader_goes_on_after_a_crash_and_a_failover(started):
    server, _ = started()
    with server.connect("app") as conn:
        queue = Queue(conn, events=True)
        queue.enqueue()
        conn.execute("SELECT stint.tick()")
        [first] = events(conn)
        queue.one()
    server.crash()
    server.start()
    with server.connect("app") as conn:
        conn.execute("SELECT stint.tick()")
        assert [event.status for event in events(conn, after=first.pos)] == ["running"]
        replica = server.standby()
        try:
            replica.wait_for_replay(server)
            server.stop("immediate")
            replica.promote()
            with replica.connect("app") as other:
                Queue(other, create=False).enqueue()
                other.execute("SELECT stint.tick()")
                assert [(event.pos - first.pos, event.status) for event in events(other)] == [(0, "ready"), (1, "running"), (2, "ready")]
        finally:
            replica.destroy()


def test_feeds_in_which_nothing_happens_are_not_written_to(started):
    server, processes = started(config={"stint.task_event_retention": "1 s"})
    with server.connect("app") as conn:
        queue = Queue(conn, events=True)
        queue.enqueue()
        server.wait_until("SELECT count(*) = 0 FROM stint.task_event_log", dbname="app")
        server.wait_until("SELECT bool_and(removed) FROM stint.task_event_ticks", dbname="app")
        before = rows(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())")
        processes.wait_for_worker("app")
        conn.execute("SELECT pg_sleep(1.5)")
        assert rows(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())") == before
