"""What an operator set stays set."""

import pytest
from stint import Queue, call, until, value


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


def test_the_worker_removes_lanes_that_nothing_uses_and_corrects_predictions(cluster):
    """Each minute, and when it starts."""
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        queue = Queue(conn, fair=True, correct_predictions=True)
        for n in range(20):
            queue.enqueue(group_key=f"g{n}", tokens=100, agent="x")
            queue.complete(queue.one(), input_tokens=300)
        left = queue.enqueue(group_key="left")
    server.restart()
    with server.connect("app") as conn:
        until(conn, "SELECT factor = 3 FROM stint.prediction_factors WHERE queue = 'q' AND agent = 'x'", 20)
        until(conn, "SELECT array_agg(group_key) = '{left}' FROM stint.lanes WHERE group_key IS NOT NULL", 20)
        queue = Queue(conn, create=False)
        assert queue.one().id == left and call(conn, "check") == []
