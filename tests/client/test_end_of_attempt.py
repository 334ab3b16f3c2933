"""What a call that ends an attempt does: every row of the table in docs/guarantees.md, and that usage counts once."""

import uuid

import psycopg
import pytest
from stint import USAGE, Queue, call, rows, usage_of, value

ENDS = ["complete", "fail", "release"]


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=5, backoff_base="1 hour", backoff_jitter=0.0)


def end(queue, verb, task, **usage):
    """Ends an attempt by any of the verbs; release reports no usage."""
    return getattr(queue, verb)(task, **({} if verb == "release" else usage))


def used(queue, id):
    """The usage of all attempts of a task together."""
    sums = rows(
        queue.conn,
        "SELECT count(input_tokens), coalesce(sum(input_tokens), 0) AS input, coalesce(sum(output_tokens), 0) AS output,"
        " coalesce(sum(model_cost), 0) AS cost FROM stint.attempts WHERE id = %s",
        id,
    )
    return tuple(map(str, sums[0]))


ONCE = ("1", "100", "7", "0.50")
NOTHING = ("0", "0", "0", "0")


def unchanged(queue):
    """Everything that is stored, to compare with later."""
    tables = [name for (name,) in queue.conn.execute(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'stint'::regnamespace AND relkind = 'r' ORDER BY 1")]  # fmt: skip
    # The maintenance worker keeps notes of its own.
    return {t: value(queue.conn, f"SELECT jsonb_agg(to_jsonb(t) ORDER BY to_jsonb(t)) FROM {t} t")
            for t in tables if t.startswith(("stint.place", "stint.task", "stint.usage")) and "rollup" not in t}  # fmt: skip


# Running under its live lease


def test_a_live_lease_completes_its_task(queue):
    id = queue.enqueue()
    task = queue.one()
    assert queue.complete(task, result='{"a": 1}', **USAGE) == ("completed", {"a": 1}, True, "completed")
    assert queue.status(id) == "completed" and queue.ended(id) == ["completed"]
    assert usage_of(queue.attempts(id)[0]) == USAGE and used(queue, id) == ONCE


def test_a_live_lease_fails_its_attempt_and_the_task_is_retried(queue):
    id = queue.enqueue()
    answer = queue.fail(queue.one(), **USAGE)
    assert answer[:4] == ("retrying", None, True, "scheduled")
    assert abs(answer.retry_in_ms - 3_600_000) < 1000
    assert queue.task(id).run_at == answer.retry_at
    assert queue.ended(id) == ["failed"] and used(queue, id) == ONCE


def test_a_lease_past_its_time_is_live_until_it_is_swept(queue):
    for verb, outcome in ("complete", "completed"), ("fail", "retrying"), ("release", "released"), ("extend", "held"):
        queue.enqueue()
        task = queue.one()
        with queue.conn.transaction():
            queue.expire(task)
            answer = end(queue, verb, task)
        assert answer[0] == outcome
        if verb == "extend":
            assert 299_000 < answer.expires_in_ms <= 300_000
            assert call(queue.conn, "sweep")[0].lapsed == 0
            assert queue.complete(task).first
        elif verb == "release":
            queue.cancel(task.id)


def test_the_last_attempt_that_fails_fails_the_task(queue):
    id = queue.enqueue(max_attempts=2)
    assert queue.fail(queue.one(), retry_in="0").status == "ready"
    answer = queue.fail(queue.one(), error="again", **USAGE)
    assert answer == ("failed", None, True, "failed", None, None)
    assert queue.status(id) == "failed" and queue.task(id).why == "again" and queue.ended(id) == ["failed", "failed"]


def test_what_cannot_be_retried_fails_at_once(queue):
    id = queue.enqueue()
    assert queue.fail(queue.one(), retryable=False).outcome == "failed"
    assert queue.status(id) == "failed"


def test_a_released_attempt_does_not_count(queue):
    id = queue.enqueue(max_attempts=1)
    for _ in range(3):
        assert queue.release(queue.one()) == ("released", True, "ready")
    assert queue.fail(queue.one()).outcome == "failed"
    assert queue.ended(id) == ["released"] * 3 + ["failed"]


def test_a_lapsed_attempt_counts(queue):
    id = queue.enqueue(max_attempts=2)
    assert queue.lapse(queue.one()) == (1, 1, 0, 0)
    assert queue.lapse(queue.one()) == (1, 0, 1, 0)
    assert queue.status(id) == "failed" and queue.ended(id) == ["lapsed", "lapsed"]


# Waiting again after this lease lapsed


@pytest.mark.parametrize("place", ["ready", "scheduled"])
def test_a_lapsed_lease_completes_a_task_that_nobody_took_since(queue, place):
    id = queue.enqueue()
    task = queue.one()
    queue.lapse(task)
    if place == "scheduled":  # where a snooze or an operator may have put it
        queue.conn.execute(
            """WITH w AS (DELETE FROM stint.place_ready RETURNING *)
               INSERT INTO stint.place_scheduled SELECT queue, id, lane, priority, now() + interval '1 h', tokens, attempt, counted FROM w"""
        )
    assert queue.status(id) == place
    assert queue.complete(task, result='"late"', **USAGE) == ("completed", "late", True, "completed")
    assert queue.status(id) == "completed" and queue.claim() == []
    assert queue.complete(task, result='"again"', **USAGE) == ("already_completed", "late", False, "completed")
    assert used(queue, id) == ONCE and queue.attempts(id)[0].usage_came_late_at is not None
    assert queue.ended(id) == ["lapsed"]


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_a_lapsed_lease_cannot_fail_or_release_a_waiting_task(queue, verb):
    id = queue.enqueue()
    task = queue.one()
    queue.lapse(task)
    before = queue.place(id)
    answer = end(queue, verb, task, **USAGE)
    assert (answer.outcome, answer.first, answer.status) == ("superseded", False, "ready")
    end(queue, verb, task, **USAGE)
    assert queue.place(id) == before
    assert used(queue, id) == (NOTHING if verb == "release" else ONCE)
    assert queue.complete(queue.one()).first


def test_a_queue_may_reject_late_results(conn):
    queue = Queue(conn, late_result="reject")
    id = queue.enqueue()
    task = queue.one()
    queue.lapse(task)
    assert queue.complete(task, result="1", **USAGE) == ("superseded", None, False, "ready")
    assert queue.status(id) == "ready" and used(queue, id) == ONCE
    again = queue.one()
    assert queue.complete(again, result="2").first and queue.result(id) == "2"


def test_only_the_last_lapsed_lease_may_complete_a_waiting_task(queue):
    id = queue.enqueue()
    first = queue.one()
    queue.lapse(first)
    second = queue.one()
    queue.lapse(second)
    assert queue.complete(first, result="1", **USAGE).outcome == "superseded"
    assert queue.complete(second, result="2").outcome == "completed"
    assert queue.complete(first, result="1", **USAGE).outcome == "already_finished"
    assert queue.result(id) == "2" and used(queue, id) == ONCE


def test_a_lapsed_lease_is_not_the_last_once_a_later_attempt_failed(queue):
    id = queue.enqueue()
    lapsed = queue.one()
    queue.lapse(lapsed)
    failed = queue.one()
    queue.fail(failed)
    assert queue.complete(lapsed).outcome == "superseded"
    assert queue.complete(failed).outcome == "already_failed"
    assert queue.status(id) == "scheduled"


def test_who_gave_a_task_back_cannot_complete_it(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.release(task)
    assert queue.complete(task, result="1", **USAGE).outcome == "superseded"
    assert queue.release(task).outcome == "superseded"
    assert queue.status(id) == "ready"


def test_a_failed_attempt_cannot_be_completed(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.fail(task, **USAGE)
    for verb in ENDS:
        answer = end(queue, verb, task, **USAGE)
        assert (answer.outcome, answer.first, answer.status) == ("already_failed", False, "scheduled")
    assert used(queue, id) == ONCE


# Running under another lease


@pytest.mark.parametrize("verb", [*ENDS, "extend"])
def test_a_late_worker_cannot_touch_anothers_attempt(queue, verb):
    id = queue.enqueue()
    late = queue.one(worker="late")
    queue.lapse(late)
    held = queue.one(worker="next")
    before = queue.place(id)
    for _ in range(2):
        if verb == "extend":
            assert queue.extend(late, duration="1 hour", progress='"mine"', run_id="r") == ("lost", None, None)
            continue
        answer = end(queue, verb, late, **USAGE)
        assert (answer.outcome, answer.first, answer.status) == ("superseded", False, "running")
    assert queue.place(id) == before
    assert used(queue, id) == (ONCE if verb in ("complete", "fail") else NOTHING)
    assert queue.complete(held, result="2", **USAGE).first
    assert queue.result(id) == "2"
    # Both attempts spent their tokens.
    assert used(queue, id)[:2] == (("2", "200") if verb in ("complete", "fail") else ("1", "100"))


# Finished


def test_a_repeated_complete_returns_the_stored_result_and_changes_nothing(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.complete(task, result='{"v": 1.10}', **USAGE)
    before = unchanged(queue)
    for _ in range(2):
        assert queue.complete(task, result="2", **USAGE) == ("already_completed", {"v": 1.1}, False, "completed")
        assert queue.fail(task, **USAGE)[:4] == ("already_completed", {"v": 1.1}, False, "completed")
        assert queue.release(task) == ("already_completed", False, "completed")
        assert queue.extend(task).status == "lost"
        assert queue.cancel(id) == ("already_finished", "completed")
    assert unchanged(queue) == before and queue.result(id) == '{"v": 1.10}'


def test_a_repeated_fail_is_told_so_and_changes_nothing(queue):
    queue.enqueue()
    task = queue.one()
    queue.fail(task, retryable=False, **USAGE)
    before = unchanged(queue)
    for verb in ENDS:
        answer = end(queue, verb, task, **USAGE)
        assert (answer.outcome, answer.first, answer.status) == ("already_failed", False, "failed")
    assert unchanged(queue) == before


@pytest.mark.parametrize("finish", ["completed", "failed", "cancelled", "lapsed"])
def test_a_task_finished_otherwise_says_how_and_keeps_the_usage_once(queue, finish):
    id = queue.enqueue(max_attempts=2)
    late = queue.one()
    queue.lapse(late)
    if finish == "cancelled":
        queue.cancel(id)
    else:
        held = queue.one()
        if finish == "completed":
            queue.complete(held)
        elif finish == "failed":
            queue.fail(held)
        else:
            queue.lapse(held)
    status = "failed" if finish == "lapsed" else finish
    for verb in ENDS * 2:
        answer = end(queue, verb, late, **USAGE)
        assert (answer.outcome, answer.first, answer.status) == ("already_finished", False, status)
    assert used(queue, id) == ONCE


# Leases that were never granted


@pytest.mark.parametrize("place", ["ready", "scheduled", "running", "finished"])
def test_a_lease_never_granted_changes_nothing(queue, place):
    id = queue.enqueue(**({"delay": "1 hour"} if place == "scheduled" else {}))
    if place in ("running", "finished"):
        task = queue.one()
    if place == "finished":
        queue.complete(task)
    other = queue.enqueue()
    anothers = queue.one()  # a real lease, of another task
    assert anothers.id == other or place == "ready"
    before = unchanged(queue)
    for lease in uuid.uuid4(), uuid.UUID(int=0), id, *([anothers.lease] if anothers.id != id else []):
        forged = anothers._replace(id=id, lease=lease)
        for verb in ENDS:
            if anothers.id == id:
                continue
            answer = end(queue, verb, forged, **USAGE)
            assert answer.outcome == ("already_finished" if place == "finished" else "unknown_lease") and not answer.first
        if anothers.id != id:
            assert queue.extend(forged).status == "lost"
    assert unchanged(queue) == before


@pytest.mark.parametrize("verb", [*ENDS, "extend", "cancel", "explain"])
def test_an_unknown_task_is_an_error_that_names_it(queue, verb):
    id = uuid.uuid4()
    lease = {} if verb in ("cancel", "explain") else {"lease": uuid.uuid4()}
    error = {"error": "x"} if verb == "fail" else {}
    with pytest.raises(psycopg.Error) as raised:
        call(queue.conn, verb, queue="q", id=id, **lease, **error)
    assert raised.value.sqlstate == "P0002"
    assert str(id) in str(raised.value) and '"q"' in str(raised.value)
    with pytest.raises(psycopg.errors.UndefinedObject, match='"qq" does not exist') as raised:
        call(queue.conn, verb, queue="qq", id=id, **lease, **error)
    assert 'Did you mean "q"?' in raised.value.diag.message_hint


def test_a_lease_of_one_queue_is_unknown_in_another(queue):
    other = Queue(queue.conn, "other")
    queue.enqueue()
    task = queue.one()
    with pytest.raises(psycopg.Error) as raised:
        other.complete(task)
    assert raised.value.sqlstate == "P0002"
    assert queue.complete(task).first


# Cancelling


def test_a_waiting_task_is_cancelled_at_once(queue):
    for id in queue.enqueue(), queue.enqueue(delay="1 hour"):
        assert queue.cancel(id, reason="no need") == ("cancelled", "cancelled")
        assert queue.cancel(id) == ("already_finished", "cancelled")
        assert (queue.task(id).status, queue.task(id).why) == ("cancelled", "no need")
    assert queue.claim() == []


@pytest.mark.parametrize("end_by", ["fail", "release", "lapse"])
def test_a_running_task_asked_to_cancel_is_cancelled_by_whatever_ends_it_but_completion(queue, end_by):
    id = queue.enqueue()
    task = queue.one()
    assert queue.cancel(id, reason="no need") == ("cancel_requested", "running")
    assert queue.cancel(id) == ("cancel_requested", "running")
    assert queue.task(id).why == "cancel requested"
    assert queue.extend(task).status == "cancel_requested"
    if end_by == "lapse":
        assert queue.lapse(task) == (1, 0, 0, 1)
    else:
        answer = getattr(queue, end_by)(task)
        assert (answer.outcome, answer.first, answer.status) == ("cancelled", True, "cancelled")
        again = getattr(queue, end_by)(task)
        assert (again.outcome, again.first, again.status) == ("already_finished", False, "cancelled")
    assert queue.status(id) == "cancelled"
    assert queue.claim() == []


def test_a_completion_that_comes_before_the_cancelling_ends_wins(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.cancel(id)
    assert queue.complete(task, result="1").outcome == "completed"
    assert queue.status(id) == "completed" and queue.cancel(id) == ("already_finished", "completed")


def test_a_cancelled_task_refuses_the_result_of_its_lapsed_worker(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.lapse(task)
    assert queue.cancel(id).outcome == "cancelled"
    assert queue.complete(task, result="1", **USAGE)[:1] == ("already_finished",)
    assert queue.status(id) == "cancelled" and used(queue, id) == ONCE


# Heartbeats


def test_a_heartbeat_moves_the_expiry_and_the_sweep_respects_it(queue):
    id = queue.enqueue(lease_for="100 ms")
    task = queue.one()
    answer = queue.extend(task, duration="1 hour", progress='{"pages": 3}', run_id="run-1", trace_id="trace-1")
    assert answer.status == "held" and 3_599_000 < answer.expires_in_ms <= 3_600_000
    queue.conn.execute("SELECT pg_sleep(0.15)")
    assert call(queue.conn, "sweep")[0].lapsed == 0
    found = queue.task(id)
    assert (found.status, found.progress, found.expires_at) == ("running", {"pages": 3}, answer.expires_at)
    # What a heartbeat told is known of a worker that dies, and a callback may add to it.
    queue.lapse(task)
    assert queue.attempts(id)[0].run_id == "run-1" and queue.attempts(id)[0].trace_id == "trace-1"


def test_a_heartbeat_without_a_duration_renews_what_was_granted(queue):
    queue.enqueue(lease_for="90 s")
    task = queue.one()
    assert 89_000 < task.expires_in_ms <= 90_000
    assert 89_000 < queue.extend(task).expires_in_ms <= 90_000
    queue.extend(task, duration="1 hour")
    assert 89_000 < queue.extend(task).expires_in_ms <= 90_000


def test_a_lease_is_as_long_as_the_claim_the_task_or_the_queue_says(queue):
    for _ in range(2):
        queue.enqueue(lease_for="90 s")
    queue.enqueue()
    assert [queue.one(lease_for="40 s").expires_in_ms, queue.one().expires_in_ms, queue.one().expires_in_ms] == [40_000, 90_000, 300_000]


def test_a_heartbeat_across_a_change_of_the_clocks_is_as_long_as_ever(queue):
    """A day in an interval is 23 hours where the session's time zone loses one; a lease is not."""
    queue.enqueue(lease_for="24 hours")
    task = queue.one()
    # In twelve hours, so that now is not an hour that the clocks leave out tomorrow.
    day, hour, later = rows(
        queue.conn,
        "SELECT extract(doy FROM at)::int AS day, extract(hour FROM at)::int AS hour, extract(doy FROM at + interval '20 d')::int AS later"
        " FROM (SELECT now() + interval '12 hours') n (at)",
    )[0]
    queue.conn.execute(f"SET timezone = 'AAA0BBB,{day - 1}/{hour},{later - 1}/1'")
    assert value(queue.conn, "SELECT extract(epoch FROM now() + interval '1 day' - now()) <> 86400")
    for duration in None, "1 day", "24:00:00":
        until = queue.extend(task, **({"duration": duration} if duration else {}))
        assert abs(until.expires_in_ms - 86_400_000) < 1000
    queue.complete(task)
