"""Both ends in batches: complete_many and finish_and_claim."""

import json
import uuid

import psycopg
import pytest
from stint import Queue, background, budget, call, parallel, value


@pytest.fixture
def queue(conn):
    return Queue(conn)


def many(queue, items):
    return call(queue.conn, "complete_many", queue=queue.name, items=items if isinstance(items, str) else json.dumps(items))


def item(task, **fields):
    return {"id": str(task.id), "lease": str(task.lease)} | fields


def test_each_completed_item_has_its_own_outcome_in_the_order_given(queue):
    queue.fill(4)
    done, live, old, gone = queue.claim(4)
    queue.complete(done, result='{"first": true}')
    queue.lapse(old)
    new = queue.one()
    usage = {"model": "m", "input_tokens": 5, "output_tokens": 2, "model_cost": "0.125", "confidence": 0.5, "meta": {"a": 1}, "run_id": "r"}
    answers = many(queue, [item(gone), item(old), item(live, result={"n": 1}, **usage), item(done), item(live, result={"n": 2})])
    assert [(a.ordinality, a.id, a.outcome, a.result, a.first) for a in answers] == [
        (1, gone.id, "completed", None, True),
        (2, old.id, "superseded", None, False),
        (3, live.id, "completed", {"n": 1}, True),
        (4, done.id, "already_completed", {"first": True}, False),
        (5, live.id, "already_completed", {"n": 1}, False),
    ]
    [attempt] = queue.attempts(live.id)
    assert (attempt.model, attempt.input_tokens, str(attempt.model_cost), attempt.meta, attempt.run_id) == ("m", 5, "0.125", {"a": 1}, "r")
    assert queue.complete(new).first
    assert many(queue, []) == []


def test_results_pass_through_a_batch_untouched(queue):
    queue.enqueue()
    task = queue.one()
    result = '{"a": 1.10, "b": 123456789012345678901234567890, "c": 1e400}'
    same = value(queue.conn, "SELECT %s::jsonb::text", result)
    [answer] = call(queue.conn, "complete_many", queue="q", items=f'[{{"id": "{task.id}", "lease": "{task.lease}", "result": {result}}}]')
    assert answer.first and queue.result(task.id) == same


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (7, psycopg.errors.InvalidParameterValue, "item 2 is not an object"),
        ({"id": str(uuid.uuid4())}, psycopg.errors.InvalidParameterValue, 'item 2 has no field "lease"'),
        ({"lease": str(uuid.uuid4())}, psycopg.errors.InvalidParameterValue, 'item 2 has no field "id"'),
        ({"id": "x", "lease": str(uuid.uuid4())}, psycopg.errors.InvalidTextRepresentation, 'item 2, field "id"'),
        ({"id": str(uuid.uuid4()), "lease": str(uuid.uuid4()), "reslt": 1}, psycopg.errors.InvalidParameterValue, 'unknown field "reslt"'),
        ({"id": str(uuid.uuid4()), "lease": str(uuid.uuid4()), "input_tokens": -1}, psycopg.errors.InvalidParameterValue, "item 2: "),
        ({"id": str(uuid.uuid4()), "lease": str(uuid.uuid4()), "model_cost": "NaN"}, psycopg.errors.InvalidParameterValue, "item 2: "),
        ({"id": str(uuid.uuid4()), "lease": str(uuid.uuid4())}, psycopg.errors.NoDataFound, "item 2: "),
    ],
)
def test_a_bad_item_is_named_and_nothing_is_changed(queue, bad, error, message):
    queue.enqueue()
    task = queue.one()
    with pytest.raises(error, match=message) as refused:
        many(queue, [item(task), bad])
    assert refused.value.diag.message_hint and queue.status(task.id) == "running"


def test_batches_that_share_tasks_in_any_order_do_not_deadlock(queue, connect):
    sessions = [connect() for _ in range(4)]
    for _ in range(10):
        queue.fill(40)
        items = [item(task) for task in queue.claim(40)]
        orders = [items, items[::-1], items[20:] + items[:20], items[::2] + items[1::2]]
        answers = parallel(4, lambda n: many(queue.by(sessions[n]), orders[n]))
        assert sum(answer.first for answered in answers for answer in answered) == 40


def go_on(queue, task, **options):
    return call(queue.conn, "finish_and_claim", queue=queue.name, id=task.id, lease=task.lease, **{"worker": "w"} | options)


def test_what_became_of_the_finished_task_is_told_also_when_nothing_is_claimed(queue):
    queue.enqueue()
    task = queue.one()
    [finished] = go_on(queue, task, result='{"a": 1}', model="m")
    assert (finished.kind, finished.id, finished.outcome, finished.result, finished.first, finished.status) == (
        "finished", task.id, "completed", {"a": 1}, True, "completed")  # fmt: skip
    assert finished.lease is None and queue.attempts(task.id)[0].model == "m"
    ids = [queue.enqueue(str(n), agent=agent) for n, agent in enumerate("aab")]
    finished, *claimed = go_on(queue, task, max=2, agents=["b", "a"])
    assert finished.outcome == "already_completed" and not finished.first
    assert [(c.kind, c.id, c.payload, c.attempt, c.status) for c in claimed] == [("claimed", id, n, 1, "running") for n, id in enumerate(ids[:2])]
    assert queue.extend(claimed[0]).status == "held"


def test_a_worker_hands_its_budget_on_to_the_task_it_claims_next(conn, connect):
    call(conn, "create_budget", name="b", max_running=1, max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    for _ in range(20):
        queue.enqueue(tokens=100)
    other = connect()
    task = queue.one()
    for n in range(19):
        with conn.transaction():
            finished, task = go_on(queue, task)
            assert finished.first and queue.by(other).claim() == []
        assert queue.by(other).claim() == [] and budget(conn, "b") == (1, 100)
    with pytest.raises(ZeroDivisionError), conn.transaction():
        assert len(go_on(queue, task)) == 1
        raise ZeroDivisionError
    assert budget(conn, "b") == (1, 100)
    with conn.transaction(), conn.transaction(force_rollback=True):
        go_on(queue, task)
    assert budget(conn, "b") == (1, 100)
    assert len(go_on(queue, task)) == 1 and budget(conn, "b") == (0, 0)


def test_a_limit_of_one_is_never_held_twice_by_workers_that_hand_on(conn, connect):
    call(conn, "create_budget", name="b", max_running=2)
    queue = Queue(conn, budgets=["b"])
    queue.fill(300)
    sessions = [connect() for _ in range(6)]

    def worker(number):
        mine, done, task = queue.by(sessions[number]), 0, None
        while done < 1000:
            if task is None:
                if not (found := mine.claim()):
                    if value(sessions[number], "SELECT NOT EXISTS (SELECT FROM stint.place_ready)"):
                        return done
                    continue
                [task] = found
            assert value(sessions[number], "SELECT count(*) FROM stint.place_running") <= 2
            _, *found = go_on(mine, task)
            done, task = done + 1, found[0] if found else None
        return done

    assert sum(parallel(6, worker)) == 300 and budget(conn, "b") == (0, 0)


def test_a_paused_queue_finishes_and_claims_nothing(queue):
    queue.fill(2)
    task = queue.one()
    value(queue.conn, "SELECT stint.pause_queue('q')")
    assert [row.kind for row in go_on(queue, task)] == ["finished"]


def test_an_unknown_task_is_an_error_and_claims_nothing(queue):
    id = queue.enqueue()
    with pytest.raises(psycopg.errors.NoDataFound):
        call(queue.conn, "finish_and_claim", queue="q", id=uuid.uuid4(), lease=uuid.uuid4(), worker="w")
    assert queue.status(id) == "ready" and background(lambda: 1).join() == 1
