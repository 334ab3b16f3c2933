"""Accounting through crashes, dumps and promotion: transaction ids that mean nothing any more neither lose nor double anything."""

import subprocess

import cluster
import psycopg.errors
import pytest
from stint import Queue, call, rows, value

SHOWN = "usage_by", "latency", "cost_of_failed", "task_counts"


def shown(conn):
    return [call(conn, verb) for verb in SHOWN]


def cost(conn):
    return value(conn, "SELECT coalesce(sum(cost), 0)::int FROM stint.usage_by()")


def some(conn, count=3):
    """Ends attempts in a queue: `count` that completed, one that failed."""
    queue = Queue(conn, create=False)
    queue.fill(count + 1, agent="a")
    for task in queue.claim(count):
        queue.complete(task, model_cost=1, model="m")
    queue.fail(queue.one(), retryable=False, model_cost=10)


def copy(server, source, target, there=None):
    """Dumps a database and restores it into a new one, there or in the same cluster."""
    there = there or server
    clean = cluster.clean_environment()
    dump = subprocess.run(["pg_dump"], env=clean | server.env(source), check=True, stdout=subprocess.PIPE, text=True).stdout
    there.create_database(target, extension=False)
    restore = ["psql", "-qX", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(restore, env=clean | there.env(target), input=dump, check=True, stdout=subprocess.DEVNULL, text=True)


def burn(conn, xids):
    """Has the cluster give out transaction ids."""
    conn.execute(f"DO $$ BEGIN FOR i IN 1 .. {xids} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")


# Without naps the worker rolls up at moments of its own; with long ones, never in the test.
@pytest.mark.parametrize("config", [{"stint.naptime": "60s"}, {"stint.naptime": "10ms"}], ids=["no worker", "eager worker"])
def test_a_dump_is_added_up_in_its_copy_once(cluster, config):
    """Rows that were added up before the dump and rows that were not; work in the copy once it is activated; ids below and above the old ones."""
    server = cluster(config=config)
    server.create_database("app")
    with server.connect("app") as conn:
        Queue(conn)
        some(conn)
        call(conn, "roll_up")
        burn(conn, 500)
        some(conn)
        kept = shown(conn)
        id = rows(conn, "SELECT id FROM stint.task_outcomes WHERE outcome = 'failed' ORDER BY id LIMIT 1")[0].id
    # In a younger cluster, ids below the stored ones are given out again.
    for at in server, cluster(config=config):
        copy(server, "app", "copy", at)
        with at.connect("copy") as conn:
            assert shown(conn) == kept
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="copy of another"):
                call(conn, "roll_up")
            call(conn, "activate")
            some(conn)
            assert cost(conn) == 39
            for _ in range(3):
                some(conn, 1)
                burn(conn, 300)  # passes by the ids of the rows that came with the dump
                call(conn, "roll_up")
            assert cost(conn) == 39 + 33
            assert call(conn, "record_usage", queue="q", id=id, attempt=1, key="late", model_cost=100)[0][0]
            assert cost(conn) == 172 and value(conn, "SELECT sum(cost)::int FROM stint.cost_of_failed()") == 160
            assert Queue(conn, create=False).retry(id).outcome == "retried"
            assert value(conn, "SELECT sum(cost)::int FROM stint.cost_of_failed()") == 50
            call(conn, "roll_up")
            assert cost(conn) == 172 and value(conn, "SELECT sum(cost)::int FROM stint.cost_of_failed()") == 50
            assert rows(conn, "SELECT * FROM stint.verify_accounting()") == rows(conn, "SELECT * FROM stint.check()") == []


def test_a_copy_whose_original_never_rolled_up_is_added_up_when_it_is_activated(cluster):
    server = cluster(config={"stint.naptime": "60s"})
    server.create_database("app")
    with server.connect("app") as conn:
        Queue(conn)
        some(conn)
        conn.execute("DELETE FROM stint.rollup_epochs; DELETE FROM stint.rollup_marks; DELETE FROM stint.usage_rollups; DELETE FROM stint.task_rollups")
    copy(server, "app", "copy")
    with server.connect("copy") as conn:
        call(conn, "activate")
        call(conn, "activate")
        assert cost(conn) == 13
        some(conn)
        call(conn, "roll_up")
        assert cost(conn) == 26 and rows(conn, "SELECT * FROM stint.verify_accounting()") == []


def test_a_crash_and_a_promotion_neither_lose_nor_double(cluster):
    """A transaction open over the crash is gone, a prepared one is counted when it commits; a standby answers, and goes on when promoted."""
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        Queue(conn)
        some(conn)
        Queue(conn, create=False).fill(2)
        conn.execute("BEGIN")
        prepared = rows(conn, "SELECT id, lease FROM stint.claim('q', worker => 'w')")[0]
        conn.execute("SELECT stint.complete('q', %s, %s, model_cost => 100)", (prepared.id, prepared.lease))
        conn.execute("PREPARE TRANSACTION 'later'")
        call(conn, "roll_up")
        other = server.connect("app")
        other.execute("BEGIN")
        some(other)
        call(conn, "roll_up")
        server.crash()
    server.start()
    with server.connect("app") as conn:
        assert cost(conn) == 13
        some(conn)
        conn.execute("COMMIT PREPARED 'later'")
        assert cost(conn) == 126
        with server.standby() as replica:
            replica.wait_for_replay(server)
            with replica.connect("app") as reader:
                assert shown(reader) == shown(conn)
            replica.promote()
            with replica.connect("app") as there:
                some(there)
                call(there, "roll_up")
                assert cost(there) == 139
                assert rows(there, "SELECT * FROM stint.verify_accounting()") == rows(there, "SELECT * FROM stint.check()") == []
        call(conn, "roll_up")
        assert cost(conn) == 126 and rows(conn, "SELECT * FROM stint.verify_accounting()") == []


def test_the_worker_rolls_up_by_itself(started):
    server, _ = started()
    with server.connect("app") as conn:
        Queue(conn)
        some(conn)
    server.wait_until("SELECT NOT EXISTS (SELECT FROM stint.usage_tail)", dbname="app", timeout=15)
    with server.connect("app") as conn:
        assert cost(conn) == 13 and rows(conn, "SELECT * FROM stint.verify_accounting()") == []
