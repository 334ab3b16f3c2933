"""Steps that survive a retry, and waits that hold nothing."""

import uuid

import psycopg
import pytest
from stint import Queue, budget, call, rows, value

ODD = '{"a": 1.10, "n": 123456789012345678901234567890, "big": 1e400}'


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=2, backoff_base="0")


def checkpoint(queue, task, step, value):
    [answer] = call(queue.conn, "checkpoint", queue=queue.name, id=task.id, lease=task.lease, step=step, value=value)
    return tuple(answer)


def steps(queue, id):
    return [(s.step, s.value, s.attempt) for s in call(queue.conn, "checkpoints", queue=queue.name, id=id)]


def await_(queue, task, event="e", **options):
    [answer] = call(queue.conn, "await", queue=queue.name, id=task.id, lease=task.lease, event=event, **options)
    return tuple(answer)


def emit(queue, payload='"p"', event="e"):
    [answer] = call(queue.conn, "emit", event=event, payload=payload)
    return tuple(answer)


# Checkpoints


def test_finished_steps_survive_a_retry_and_the_first_value_stays(queue):
    id = queue.enqueue()
    task = queue.one()
    assert checkpoint(queue, task, "plan", "1") == ("saved", 1)
    assert checkpoint(queue, task, "plan", "2") == ("kept", 1)
    queue.fail(task)
    again = queue.one()
    assert checkpoint(queue, again, "plan", "3") == ("kept", 1)
    assert checkpoint(queue, again, "call", '"x"') == ("saved", "x")
    assert steps(queue, id) == [("plan", 1, 1), ("call", "x", 2)]
    queue.complete(again)
    assert steps(queue, id) == [("plan", 1, 1), ("call", "x", 2)]


@pytest.mark.parametrize("how", ["lapsed", "claimed again", "completed", "forged"])
def test_a_late_worker_cannot_write_a_checkpoint(queue, how):
    id = queue.enqueue()
    task = queue.one()
    if how == "completed":
        queue.complete(task)
    elif how != "forged":
        queue.lapse(task)
        if how == "claimed again":
            queue.one()
    lease = str(uuid.uuid4()) if how == "forged" else task.lease
    assert tuple(call(queue.conn, "checkpoint", queue="q", id=id, lease=lease, step="s", value="1")[0]) == ("lost", None)
    assert steps(queue, id) == []


def test_values_are_kept_as_they_are(queue):
    id = queue.enqueue()
    task = queue.one()
    answers = [
        queue.conn.execute("SELECT value::text FROM stint.checkpoint('q', %s, %s, 's', %s)", (task.id, task.lease, ODD)).fetchone()[0]
        for _ in range(2)
    ] + [value(queue.conn, "SELECT value::text FROM stint.checkpoints('q', %s)", id)]
    assert set(answers) == {value(queue.conn, "SELECT %s::jsonb::text", ODD)}
    big = '"' + "x" * 100_000 + '"'
    assert checkpoint(queue, task, "big", big) == ("saved", "x" * 100_000) and checkpoint(queue, task, "big", "1")[1] == "x" * 100_000


@pytest.mark.parametrize("step, value, state", [(None, "1", "22004"), ("", "1", "22023"), ("s", None, "22004"), ("x" * 10_000, "1", "54000")])
def test_a_checkpoint_refuses_bad_input(queue, step, value, state):
    queue.enqueue()
    with pytest.raises(psycopg.Error) as error:
        checkpoint(queue, queue.one(), step, value)
    assert error.value.sqlstate == state


def test_unknown_tasks_and_queues_are_errors(queue):
    for verb, more in ("checkpoint", {"step": "s", "value": "1"}), ("await", {"event": "e"}), ("checkpoints", None):
        args = {"id": str(uuid.uuid4())} | ({"lease": str(uuid.uuid4())} | more if more else {})
        with pytest.raises(psycopg.errors.NoDataFound, match='queue "q" has no task'):
            call(queue.conn, verb, queue="q", **args)
        with pytest.raises(psycopg.errors.UndefinedObject):
            call(queue.conn, verb, queue="nosuch", **args)


# Awaiting


def test_a_waiting_task_holds_neither_lease_nor_budget(conn):
    call(conn, "create_budget", name="b", max_running=1, max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    id = queue.enqueue(tokens=60)
    queue.enqueue('"other"', tokens=50)
    task = queue.one()
    assert budget(conn, "b") == (1, 60)
    assert await_(queue, task) == ("waiting", None)
    assert budget(conn, "b") == (0, 0)
    found = queue.task(id)
    assert (found.status, found.why, found.worker) == ("scheduled", 'awaits event "e"', None)
    assert call(conn, "explain", queue="q", id=id)[0][0].startswith('scheduled: awaits event "e", at most for another ')
    assert queue.ended(id) == ["awaiting"] and queue.extend(task).status == "lost"
    other = queue.one()
    assert other.payload == "other"
    assert emit(queue) == (True, 1, "p")
    assert queue.status(id) == "ready" and queue.claim() == []
    queue.complete(other)
    assert queue.one().id == id


def test_the_payload_is_there_at_the_next_attempt_and_at_all_later_ones(queue):
    id = queue.enqueue()
    assert await_(queue, queue.one()) == ("waiting", None)
    assert emit(queue, '{"x": 1}') == (True, 1, {"x": 1})
    for attempt in 2, 3:  # neither waiting nor awaiting counts
        task = queue.one()
        assert task.attempt == attempt
        assert await_(queue, task) == ("emitted", {"x": 1}) == await_(queue, task)
        if attempt == 2:
            queue.fail(task)
    assert steps(queue, id) == [("e", {"x": 1}, 2)]
    assert queue.complete(task).first


def test_an_event_emitted_before_is_answered_at_once(queue):
    assert emit(queue, "1.10") == (True, 0, 1.1)
    id = queue.enqueue()
    task = queue.one()
    assert await_(queue, task)[0] == "emitted" and queue.status(id) == "running"
    assert value(queue.conn, "SELECT value::text FROM stint.checkpoints('q', %s)", id) == "1.10"


def test_the_first_payload_of_an_event_stays(queue):
    assert emit(queue, "1") == (True, 0, 1)
    assert emit(queue, "2") == (False, 0, 1)
    queue.enqueue()
    assert await_(queue, queue.one()) == ("emitted", 1)


def test_a_wait_that_times_out_says_so_for_good(queue):
    id = queue.enqueue()
    assert await_(queue, queue.one(), timeout="1 hour") == ("waiting", None)
    assert queue.claim() == []
    queue.due(id)
    task = queue.one()
    assert await_(queue, task) == ("timed_out", None)
    assert emit(queue) == (True, 0, "p")
    assert await_(queue, task) == ("timed_out", None)
    assert steps(queue, id) == [("e", None, 1)]


def test_a_timeout_comes_by_itself(queue):
    queue.enqueue()
    assert await_(queue, queue.one(), timeout="100 ms") == ("waiting", None)
    [task] = queue.claim(wait="10 s")
    assert await_(queue, task) == ("timed_out", None)


def test_emit_wakes_all_that_wait_in_all_queues(conn, queue):
    other = Queue(conn, "other")
    for each in queue, other:
        each.fill(3)
        for task in each.claim(3):
            assert await_(each, task) == ("waiting", None)
    queue.enqueue('"else"')
    await_(queue, queue.one(), event="f")
    assert emit(queue) == (True, 6, "p")
    assert [task.payload for task in queue.claim(9)] == [1, 2, 3] == [task.payload for task in other.claim(9)]
    assert rows(conn, "SELECT event FROM stint.place_scheduled") == [("f",)]


def test_a_late_worker_cannot_wait(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.lapse(task)
    assert await_(queue, task) == ("lost", None)
    assert queue.status(id) == "ready"


def test_a_task_asked_to_cancel_does_not_wait(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.cancel(id, reason="enough")
    assert await_(queue, task) == ("cancelled", None)
    assert queue.status(id) == "cancelled" and queue.task(id).why == "enough"


def test_a_waiting_task_can_be_cancelled_and_is_not_woken(queue):
    id = queue.enqueue()
    await_(queue, queue.one())
    assert queue.cancel(id) == ("cancelled", "cancelled")
    assert emit(queue) == (True, 0, "p")


def test_who_gave_the_lease_up_to_wait_may_complete_but_not_fail(queue):
    id = queue.enqueue()
    task = queue.one()
    await_(queue, task)
    assert queue.fail(task)[:4] == ("superseded", None, False, "scheduled")
    assert queue.release(task) == ("superseded", False, "scheduled")
    assert queue.complete(task, result="1", input_tokens=7).outcome == "completed"
    assert queue.complete(task).outcome == "already_completed"
    assert queue.status(id) == "completed" and queue.attempts(id)[0].input_tokens == 7
    assert emit(queue) == (True, 0, "p")


@pytest.mark.parametrize("event, timeout, state", [(None, None, "22004"), ("", None, "22023"), ("e", "-1 s", "22023"), ("e", "10000 years", "54000")])
def test_await_refuses_bad_input(queue, event, timeout, state):
    queue.enqueue()
    with pytest.raises(psycopg.Error) as error:
        await_(queue, queue.one(), event=event, **({"timeout": timeout} if timeout else {}))
    assert error.value.sqlstate == state


def test_no_wake_up_is_lost_between_many_that_wait_and_one_that_emits(conn, connect):
    from stint import parallel

    queue = Queue(conn)
    sessions = [connect() for _ in range(8)]
    for round in range(40):
        ids = [queue.enqueue() for _ in range(7)]
        tasks = queue.claim(7)

        def race(number):
            mine = queue.by(sessions[number])
            return emit(mine, event=f"e{round}")[:2] if number == 7 else await_(mine, tasks[number], event=f"e{round}")[0]

        *answers, (first, woken) = parallel(8, race)
        assert first and answers.count("waiting") == woken and set(answers) <= {"waiting", "emitted"}
        assert {queue.status(id) for id in ids} <= {"ready", "running"}
        for task in queue.claim(7):
            assert await_(queue, task, event=f"e{round}") == ("emitted", "p")
        conn.execute("SELECT c.outcome FROM stint.place_running r, stint.complete(r.queue, r.id, r.lease) c")
