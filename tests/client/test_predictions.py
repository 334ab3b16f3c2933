"""Predictions corrected at the claim by what an agent's latest attempts used."""

import pytest
from stint import Queue, budget, call, rows, value


@pytest.fixture
def queue(conn):
    call(conn, "create_budget", name="b", max_tokens=1000)
    return Queue(conn, budgets=["b"])


def learn(queue, agent, predicted, actual, count=20):
    """So many attempts of an agent that used another number of tokens than predicted."""
    for _ in range(count):
        queue.enqueue(tokens=predicted, **({"agent": agent} if agent else {}))
        queue.complete(queue.one(), input_tokens=actual - 1, output_tokens=1)


def factors(queue):
    return dict(queue.conn.execute("SELECT agent, factor FROM stint.prediction_factors").fetchall())


def correct(queue):
    call(queue.conn, "alter_queue", queue="q", correct_predictions=True)


def reserved(queue, tokens, **options):
    """What a claim reserves for a task that predicts so many tokens."""
    queue.enqueue(tokens=tokens, **options)
    task = queue.one()
    assert task.tokens == tokens
    in_use = budget(queue.conn, "b")[1]
    assert value(queue.conn, "SELECT reserved FROM stint.place_running") == [in_use]
    queue.release(task)
    queue.cancel(task.id)
    return in_use


def test_a_claim_reserves_what_the_agents_attempts_used_for_each_token_predicted(queue):
    learn(queue, "x", 100, 250)
    learn(queue, "y", 3, 5)
    learn(queue, None, 100, 50)
    assert reserved(queue, 100, agent="x") == 100
    correct(queue)
    assert factors(queue) == {"x": 2.5, "y": 1.667, "": 0.5}
    assert reserved(queue, 100, agent="x") == 250
    assert reserved(queue, 3, agent="y") == 6  # 5.001, rounded up
    assert reserved(queue, 100) == 50
    assert reserved(queue, 100, agent="new") == 100
    call(queue.conn, "alter_queue", queue="q", correct_predictions=False)
    assert reserved(queue, 100, agent="x") == 100


def test_a_factor_is_bounded_and_needs_twenty_attempts(queue):
    learn(queue, "low", 100, 2)
    learn(queue, "high", 10, 900)
    learn(queue, "few", 100, 200, count=19)
    correct(queue)
    assert factors(queue) == {"low": 0.25, "high": 4}
    learn(queue, "few", 100, 600, count=1)
    assert call(queue.conn, "refresh_factors")[0][0] == 1
    assert factors(queue)["few"] == 2.2
    assert call(queue.conn, "refresh_factors")[0][0] == 0


def test_only_attempts_that_ended_with_tokens_reported_count(queue):
    learn(queue, "x", 100, 200)
    for end in ("complete", "release", "lapse", "cancelled"):
        queue.enqueue(tokens=100, agent="x")
        task = queue.one()
        if end == "lapse":
            queue.lapse(task)
        elif end == "cancelled":
            queue.cancel(task.id)
            queue.fail(task, input_tokens=900)
        else:
            getattr(queue, end)(task)
        queue.cancel(task.id)
    call(queue.conn, "alter_budget", name="b", default_tokens=10)
    queue.enqueue(tokens=0, agent="x")
    queue.complete(queue.one(), input_tokens=9000)
    correct(queue)
    assert factors(queue) == {"x": 2}


def test_of_an_agent_the_last_thousand_attempts_count(queue):
    learn(queue, "x", 100, 100)
    # Rows as attempts leave them, before those: of the same time and class of history.
    queue.conn.execute(
        """WITH first AS (SELECT id::text FROM stint.task_facts WHERE queue = 'q' ORDER BY task_facts.id LIMIT 1),
                old AS (INSERT INTO stint.task_facts (queue, id, lane, priority, tokens, enqueued_at, agent, payload)
                        SELECT 'q', (left(first.id, 13) || '-7000-8000-' || lpad(n::text, 10, '0') || right(first.id, 2))::uuid, (SELECT min(lane) FROM stint.lanes WHERE queue = 'q'), 0, 100,
                               clock_timestamp() - interval '1 day', 'x', '1' FROM generate_series(1, 2000) AS n, first RETURNING id),
                ended AS (INSERT INTO stint.task_attempts (queue, id, attempt, lease, started_at, ended_at, ended, worker, input_tokens)
                          SELECT 'q', id, 1, gen_random_uuid(), clock_timestamp() - interval '1 day', clock_timestamp() - interval '1 day', 'completed', 'w', 200 FROM old)
           INSERT INTO stint.task_outcomes (queue, id, outcome, attempt, finished_at, incarnation, xact)
           SELECT 'q', id, 'completed', 1, clock_timestamp() - interval '1 day', NULL, NULL FROM old"""
    )
    correct(queue)
    # 20 of 100 tokens and 980 of 200.
    assert rows(queue.conn, "SELECT attempts, factor FROM stint.prediction_factors") == [(1000, 1.98)]


def test_a_task_is_admitted_by_its_corrected_prediction(queue):
    learn(queue, "x", 100, 250)
    correct(queue)
    for _ in range(3):
        id = queue.enqueue(tokens=200, agent="x")
    assert [task.tokens for task in queue.claim(3)] == [200, 200]
    assert budget(queue.conn, "b") == (2, 1000)
    assert "1000 of 1000 tokens in flight, the task needs 500" in call(queue.conn, "explain", queue="q", id=id)[0][0]
    assert queue.claim() == []


def test_a_task_that_could_run_can_run_when_it_is_corrected(queue):
    learn(queue, "x", 100, 400)
    correct(queue)
    assert reserved(queue, 900, agent="x") == 1000
    # One that a lowered limit left without a chance gets one where it is thought too large.
    learn(queue, "y", 100, 50)
    call(queue.conn, "refresh_factors")
    queue.enqueue(tokens=900, agent="y")
    call(queue.conn, "alter_budget", name="b", max_tokens=500)
    assert queue.one().tokens == 900 and budget(queue.conn, "b") == (1, 450)


def test_what_a_corrected_attempt_used_is_settled(conn):
    call(conn, "create_budget", name="w", max_window_tokens=10_000, per="1 hour")
    queue = Queue(conn, budgets=["w"], fair=True, correct_predictions=True)
    learn(queue, "x", 100, 250)
    call(conn, "refresh_factors")
    spent = "SELECT window_tokens FROM stint.budgets WHERE budget = 'w'"
    got = "SELECT tokens FROM stint.fair_shares WHERE queue = 'q' AND group_key IS NULL"
    before = (value(conn, spent), value(conn, got))
    assert before == (5000, 5000)
    queue.enqueue(tokens=100, agent="x")
    task = queue.one()
    assert (value(conn, spent), value(conn, got)) == (5250, 5250)
    queue.complete(task, output_tokens=40)
    assert (value(conn, spent), value(conn, got)) == (5040, 5040)
    assert queue.attempts(task.id)[0].predicted_tokens == 100


def test_the_advice_shows_the_factor_that_is_applied(queue):
    learn(queue, "x", 100, 250)
    assert call(queue.conn, "prediction_advice", queue="q")[0].applied is None
    correct(queue)
    [row] = call(queue.conn, "prediction_advice", queue="q")
    assert (row.agent, row.attempts, row.factor, row.applied) == ("x", 20, 2.5, 2.5)


def test_a_dropped_queue_leaves_no_factor_behind(queue):
    learn(queue, "x", 100, 250)
    correct(queue)
    call(queue.conn, "drop_queue", queue="q", force=True)
    assert factors(queue) == {}
