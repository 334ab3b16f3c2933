"""A restored database works from its first minute on: rows that come from a dump are seen by whatever remembers where rows were."""

import subprocess

import cluster
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
        queue.claim(2)
        restore_slowly(server, processes, "app", "copy")
    with server.connect("copy") as conn:
        queue = Queue(conn, create=False)
        assert queue.claim(9) == [], "two of the budget's two run in the dump"
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
        got = "".join(queue.one().payload for _ in range(8))
        assert got.count("b") == 6, got
        queue.enqueue('"a"', group_key="a", tokens=10)
        assert sorted(task.payload for task in queue.claim(100)) == ["a"] * 10 + ["b"] * 6
        assert queue.claim() == [] and call(conn, "check") == []
