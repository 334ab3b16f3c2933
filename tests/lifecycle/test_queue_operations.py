"""What an operator set stays set."""

import pytest
from stint import Queue, call, value


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_queues_pause_outlives_a_restart(cluster, how):
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        queue, other = Queue(conn), Queue(conn, "other")
        queue.enqueue()
        other.enqueue()
        conn.execute("SET synchronous_commit = on")
        assert value(conn, "SELECT stint.pause_queue('q')")
    server.restart(how)
    with server.connect("app") as conn:
        queue, other = Queue(conn, create=False), Queue(conn, "other", create=False)
        assert queue.claim() == [] and len(other.claim()) == 1
        assert value(conn, "SELECT paused FROM stint.queues WHERE queue = 'q'")
        call(conn, "resume_queue", queue="q")
        assert len(queue.claim()) == 1
