"""max_run_time: an attempt that runs longer lapses, whatever its heartbeats; and what shows attempts that look stuck."""

import pytest
from stint import Queue, call, rows, value


def overrun(queue, task):
    """Makes the attempt's deadline pass, and its worker send a heartbeat all the same."""
    queue.expire(task)
    queue.conn.execute("UPDATE stint.place_running SET deadline = expires_at WHERE id = %s", (task.id,))
    return queue.extend(task, duration="1 hour")


def test_no_heartbeat_keeps_an_attempt_beyond_its_deadline(conn):
    queue = Queue(conn, max_run_time="1 minute", max_attempts=2)
    id = queue.enqueue()
    task = queue.one()
    assert 59_000 < task.expires_in_ms <= 60_000
    answer = queue.extend(task, duration="1 hour")
    assert answer.status == "held" and answer.expires_in_ms <= 60_000 and answer.expires_at == task.expires_at
    for n in range(2):
        with conn.transaction():
            assert overrun(queue, task).expires_in_ms < 0
            assert value(conn, "SELECT problem FROM stint.stuck WHERE id = %s", id) == "past max_run_time"
            call(conn, "rescan")
            assert call(conn, "sweep")[0].lapsed == 1
        task = queue.one() if n == 0 else None
    assert queue.status(id) == "failed" and queue.task(id).why == "the attempt ran longer than its max_run_time"
    assert [attempt.error for attempt in queue.attempts(id)] == ["the attempt ran longer than its max_run_time"] * 2


def test_a_task_has_its_own_deadline_or_its_queues(conn):
    queue = Queue(conn)
    [many] = call(conn, "enqueue_many", queue="q", tasks='[{"payload": 1, "max_run_time": "30 s"}]')
    once = call(conn, "enqueue_once", queue="q", payload="2", key="k", max_run_time="20 s")[0].id
    own, free = queue.enqueue(max_run_time="10 s"), queue.enqueue()
    assert [round(task.expires_in_ms / 1000) for task in queue.claim(3)] == [30, 20, 10]
    call(conn, "alter_queue", queue="q", max_run_time="2 minutes")
    assert queue.one().expires_in_ms == 120_000
    deadlines = dict(conn.execute("SELECT id, round(extract(epoch FROM deadline - started_at))::int FROM stint.place_running").fetchall())
    assert deadlines == {many.id: 30, once: 20, own: 10, free: 120}


def test_a_task_without_a_deadline_runs_as_long_as_its_heartbeats_come(conn):
    queue = Queue(conn, lease_for="1 minute")
    queue.enqueue()
    task = queue.one()
    assert queue.extend(task, duration="3 hours").expires_in_ms == 3 * 3600_000
    assert value(conn, "SELECT deadline FROM stint.place_running") is None


@pytest.mark.parametrize(
    ("aged", "problem"),
    [
        ("started_at = started_at - interval '10 s', expires_at = expires_at - interval '10 s'", None),
        ("started_at = started_at - interval '70 s', expires_at = expires_at - interval '70 s'", "lapsed"),
        ("started_at = started_at - interval '55 s', expires_at = expires_at - interval '55 s'", "near expiry, no heartbeat"),
        ("started_at = started_at - interval '55 s', expires_at = expires_at - interval '55 s', heartbeat_at = started_at", "near expiry, heartbeat overdue"),
        ("deadline = clock_timestamp() + interval '5 s', started_at = started_at - interval '1 hour', expires_at = clock_timestamp() + interval '4 s'",
         "near max_run_time"),
    ],
)  # fmt: skip
def test_attempts_that_look_stuck_are_shown_with_what_is_wrong(conn, aged, problem):
    queue = Queue(conn, lease_for="1 minute")
    queue.enqueue(agent="a")
    with conn.transaction(force_rollback=True):
        queue.one()
        conn.execute(f"UPDATE stint.place_running SET {aged}")
        assert [row.problem for row in rows(conn, "SELECT * FROM stint.stuck")] == ([problem] if problem else [])


# Advice


def test_the_longest_gap_between_heartbeats_is_kept_with_the_attempt(conn):
    queue = Queue(conn)
    id = queue.enqueue()
    task = queue.one()
    for _ in range(2):
        conn.execute("UPDATE stint.place_running SET started_at = started_at - interval '30 s', heartbeat_at = heartbeat_at - interval '10 s'")
        queue.extend(task)
    queue.complete(task)
    assert 30 <= queue.attempts(id)[0].heartbeat_gap.total_seconds() < 32
    queue.enqueue()
    quiet = queue.one()
    queue.complete(quiet)
    assert queue.attempts(quiet.id)[0].heartbeat_gap is None


def history(queue, agent, ran, gap=None, ended="completed", count=100, tokens=None, used=None):
    """Attempts as if they had run so long."""
    queue.conn.execute(
        """WITH t AS (SELECT stint.enqueue('q', '{}', agent => %(agent)s, tokens => %(tokens)s) AS id FROM generate_series(1, %(n)s)),
                c AS (SELECT count(*) FROM t)
           SELECT count FROM c""",
        {"agent": agent, "n": count, "tokens": tokens},
    )
    for task in queue.claim(count, agents=[agent]):
        queue.complete(task, **({"input_tokens": used - 10, "output_tokens": 10} if used else {}))
    queue.conn.execute(
        "UPDATE stint.task_attempts a SET started_at = a.ended_at - %s::interval, heartbeat_gap = %s::interval, ended = %s"
        " FROM stint.task_facts f WHERE f.id = a.id AND f.agent = %s",
        (ran, gap, ended, agent),
    )


def test_lease_advice_compares_what_was_observed_with_the_lease(conn):
    queue = Queue(conn, lease_for="60 s")
    history(queue, "slow", "10 minutes")
    history(queue, "quick", "1 s")
    history(queue, "fits", "30 s")
    history(queue, "beats", "1 hour", gap="20 s")
    history(queue, "late", "1 hour", gap="50 s")
    history(queue, "few", "1 s", count=3)
    advice = {row.agent: row for row in call(conn, "lease_advice", queue="q")}
    said = {agent: row.advice.split(":")[0] for agent, row in advice.items()}
    assert said == {
        "slow": "attempts run longer than the lease without heartbeats",
        "quick": "a dead worker is noticed late",
        "fits": "the lease fits",
        "beats": "the lease fits",
        "late": "heartbeats come up to 00",
        "few": "too few attempts to tell",
    }
    slow = advice["slow"]
    assert (slow.attempts, slow.lapsed, slow.run_time_p50.total_seconds(), slow.lease_for.total_seconds()) == (100, 0, 600, 60)
    assert advice["late"].heartbeat_gap_p99.total_seconds() == 50 and slow.heartbeat_gap_p99 is None
    assert call(conn, "lease_advice", queue=Queue(conn, "empty").name) == []


def test_prediction_advice_compares_predicted_with_actual_tokens(conn):
    queue = Queue(conn)
    history(queue, "low", "1 s", tokens=1000, used=2500, count=30)
    history(queue, "high", "1 s", tokens=1000, used=100, count=30)
    history(queue, "right", "1 s", tokens=1000, used=1010, count=30)
    history(queue, "silent", "1 s", tokens=1000, count=30)
    history(queue, "blind", "1 s", used=100, count=30)
    advice = {row.agent: row for row in call(conn, "prediction_advice", queue="q")}
    assert {agent: (float(row.factor), row.advice.split(",")[0]) for agent, row in advice.items()} == {
        "low": (2.5, "predicts too little"), "high": (0.1, "predicts too much"), "right": (1.01, "the predictions fit")}  # fmt: skip
    assert (advice["low"].attempts, advice["low"].predicted_tokens, advice["low"].actual_tokens) == (30, 30000, 75000)
