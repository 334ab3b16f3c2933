"""Running a queue: settings changed while it works, pause, purge, drop, and single tasks moved by hand."""

import psycopg
import pytest
from stint import Queue, background, budget, call, rows, until, value, waiting


@pytest.fixture
def queue(conn):
    return Queue(conn, max_attempts=2, backoff_base="1 hour", backoff_jitter=0.0)


def settings(queue):
    [found] = rows(queue.conn, "SELECT * FROM stint.queues WHERE queue = %s", queue.name)
    return found


# alter_queue, pause_queue, resume_queue


def test_altering_a_queue_keeps_what_is_not_given(queue):
    before = settings(queue)
    call(queue.conn, "alter_queue", queue="q")
    assert settings(queue) == before
    call(queue.conn, "create_budget", name="b", max_running=1)
    call(queue.conn, "alter_queue", queue="q", lease_for="9 minutes", budgets=["b"], max_run_time="2 hours", comment="night work", max_attempts=3)
    after = settings(queue)
    assert (after.lease_for.total_seconds(), after.budgets, after.max_run_time.total_seconds(), after.comment) == (540, ["b"], 7200, "night work")
    assert after.max_attempts == 3 and after.backoff_base == before.backoff_base
    call(queue.conn, "alter_queue", queue="q", max_run_time="0", comment="", budgets=[])
    after = settings(queue)
    assert (after.max_run_time, after.comment, after.budgets) == (None, None, [])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"lease_for": "0"}, psycopg.errors.InvalidParameterValue),
        ({"max_attempts": 0}, psycopg.errors.InvalidParameterValue),
        ({"backoff_factor": float("nan")}, psycopg.errors.InvalidParameterValue),
        ({"late_result": "maybe"}, psycopg.errors.InvalidParameterValue),
        ({"max_run_time": "-1 s"}, psycopg.errors.InvalidParameterValue),
        ({"budgets": ["nowhere"]}, psycopg.errors.UndefinedObject),
        ({"queue": "nowhere"}, psycopg.errors.UndefinedObject),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(queue, given, error):
    before = settings(queue)
    with pytest.raises(error):
        call(queue.conn, "alter_queue", **{"queue": "q", "lease_for": "1 hour"} | given)
    assert settings(queue) == before


def test_a_budget_given_to_a_queue_holds_for_the_next_claim(queue):
    call(queue.conn, "create_budget", name="b", max_running=1)
    queue.fill(3)
    running = queue.one()
    call(queue.conn, "alter_queue", queue="q", budgets=["b"])
    assert len(queue.claim(3)) == 1 and budget(queue.conn, "b") == (1, 0)
    assert queue.complete(running).first and queue.claim() == []


def test_a_paused_queue_takes_tasks_in_and_hands_none_out(queue, connect):
    running, id = queue.enqueue(), queue.enqueue()
    task = queue.one()
    assert value(queue.conn, "SELECT stint.pause_queue('q')") is True
    assert value(queue.conn, "SELECT stint.pause_queue('q')") is False
    assert queue.claim() == [] and queue.by(connect()).claim(wait="50 ms") == []
    later = queue.enqueue(delay="1 hour")
    queue.due(later)
    assert queue.status(later) == "ready" and queue.task(id).why == "queue paused"
    assert "the queue is paused" in value(queue.conn, "SELECT stint.explain('q', %s)", id)
    assert value(queue.conn, "SELECT paused FROM stint.queue_stats") and settings(queue).paused
    assert queue.extend(task).status == "held" and queue.complete(task).first and queue.status(running) == "completed"
    assert value(queue.conn, "SELECT stint.resume_queue('q')") is True
    assert [t.id for t in queue.claim(9)] == [id, later] and not settings(queue).paused


def test_a_rolled_back_pause_pauses_nothing(queue):
    queue.enqueue()
    with queue.conn.transaction(force_rollback=True):
        value(queue.conn, "SELECT stint.pause_queue('q')")
        assert queue.claim() == []
    assert len(queue.claim()) == 1


def test_resuming_wakes_whoever_waits(queue, connect):
    call(queue.conn, "alter_queue", queue="q", paused=True)
    ids = {queue.enqueue() for _ in range(3)}
    sessions = [connect() for _ in range(3)]
    waits = [background(lambda s=s: queue.by(s).one(wait="30 s").id) for s in sessions]
    for session in sessions:
        waiting(queue.conn, session.info.backend_pid, "Extension")
    call(queue.conn, "resume_queue", queue="q")
    assert {wait.join(10) for wait in waits} == ids


# purge_queue, drop_queue


def test_a_purge_cancels_what_waits_and_nothing_else(queue):
    done = queue.enqueue()
    queue.complete(queue.one())
    running = queue.enqueue()
    task = queue.one()
    ready, scheduled = queue.enqueue(), queue.enqueue(delay="1 hour")
    other = Queue(queue.conn, "other")
    safe = other.enqueue()
    purge = "SELECT stint.purge_queue('q', max => %s, reason => 'wrong input')"
    assert value(queue.conn, purge, 1) == 1
    assert value(queue.conn, purge, None) == 1
    assert value(queue.conn, purge, None) == 0
    assert [queue.status(id) for id in (done, running, ready, scheduled)] == ["completed", "running", "cancelled", "cancelled"]
    assert queue.task(ready).why == "wrong input" and other.status(safe) == "ready"
    assert queue.complete(task).first


def test_a_purge_leaves_what_another_session_is_claiming(queue, connect):
    first, second = queue.enqueue(), queue.enqueue()
    claimer = connect(autocommit=False)
    assert queue.by(claimer).one().id == first
    assert value(queue.conn, "SELECT stint.purge_queue('q')") == 1
    claimer.rollback()
    assert [queue.status(id) for id in (first, second)] == ["ready", "cancelled"]


def test_a_queue_with_tasks_is_dropped_by_force_only_and_leaves_nothing(conn):
    call(conn, "create_budget", name="b", max_running=5)
    call(conn, "create_budget", name="c", max_running=5)
    queue, other = Queue(conn, budgets=["b"], events=True), Queue(conn, "other")
    kept = other.enqueue(key="k")
    for n in range(4):
        queue.enqueue(key=f"k{n}", budgets=["c"] if n % 2 else None)
    queue.enqueue(delay="1 hour")
    done, failed, running = queue.claim(3)
    queue.complete(done)
    queue.fail(failed, retryable=False)
    queue.retry(failed.id)
    with pytest.raises(psycopg.errors.DependentObjectsStillExist, match='"q"') as refused:
        call(conn, "drop_queue", queue="q")
    assert refused.value.diag.message_detail == "4 live and 1 finished tasks."
    conn.execute("SELECT stint.tick()")
    call(conn, "drop_queue", queue="q", force=True)
    tables = [t for (t,) in conn.execute("SELECT a.attrelid::regclass::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
              " WHERE c.relnamespace = 'stint'::regnamespace AND c.relkind = 'r' AND a.attname = 'queue'")]  # fmt: skip
    assert len(tables) >= 10
    assert {t: value(conn, f"SELECT count(*) FROM {t} WHERE queue = 'q'") for t in tables} == dict.fromkeys(tables, 0)
    assert budget(conn, "b") == (0, 0) and budget(conn, "c") == (0, 0) and other.status(kept) == "ready"
    with pytest.raises(psycopg.errors.UndefinedObject):
        queue.complete(running)
    # A new queue of the same name starts from nothing.
    again = Queue(conn)
    id = again.enqueue(key="k0")
    assert again.one().id == id


def test_an_empty_queue_is_dropped_without_force(queue):
    call(queue.conn, "drop_queue", queue="q")
    assert rows(queue.conn, "SELECT queue FROM stint.queues") == [] and value(queue.conn, "SELECT count(*) FROM stint.lanes") == 0


def test_a_task_enqueued_while_its_queue_is_dropped_is_removed_or_refused(queue, connect):
    """One that came before the drop is waited for and goes with the queue; one that comes after is refused."""
    for _ in range(3):
        early, dropper, late = connect(autocommit=False), connect(), connect()
        queue.by(early).enqueue()
        queue.by(late).enqueue()  # knows the queue from now on
        drop = background(lambda d=dropper: call(d, "drop_queue", queue="q", force=True))
        waiting(queue.conn, dropper.info.backend_pid, "Lock")
        refused = background(lambda s=late: queue.by(s).enqueue())
        waiting(queue.conn, late.info.backend_pid, "Lock")
        early.commit()
        drop.join()
        with pytest.raises(psycopg.errors.UndefinedObject):
            refused.join()
        assert value(queue.conn, "SELECT count(*) FROM stint.task_facts") == 0
        Queue(queue.conn)


def test_a_task_enqueued_while_its_queue_is_made_anew_is_refused_to_be_repeated(queue, connect):
    late, dropper = connect(), connect(autocommit=False)
    queue.by(late).enqueue()
    call(dropper, "drop_queue", queue="q", force=True)
    Queue(dropper)
    refused = background(lambda: queue.by(late).enqueue())
    waiting(queue.conn, late.info.backend_pid, "Lock")
    dropper.commit()
    with pytest.raises(psycopg.errors.SerializationFailure, match="made anew"):
        refused.join()
    id = queue.by(late).enqueue()
    assert queue.one().id == id


# enqueue_once


def once(queue, payload="{}", **options):
    [answer] = call(queue.conn, "enqueue_once", queue="q", payload=payload, **options)
    return answer


def test_enqueue_once_says_whether_it_made_the_task(queue):
    id, created = once(queue, '{"n": 1}', key="k", agent="a")
    assert created and once(queue, '{"n": 1}', key="k") == (id, False)
    assert once(queue, '{"n": 2}', key="k") == (id, False)
    assert once(queue, '{"n": 1}', key="k", conflict="error") == (id, False)
    with pytest.raises(psycopg.errors.UniqueViolation, match='"k" of queue "q"'):
        once(queue, '{"n": 2}', key="k", conflict="error")
    assert queue.enqueue('{"n": 3}', key="k") == id and value(queue.conn, "SELECT count(*) FROM stint.task_facts") == 1
    for bad, error in [({"key": None}, psycopg.errors.NullValueNotAllowed), ({"conflict": "x"}, psycopg.errors.InvalidParameterValue)]:
        with pytest.raises(error):
            once(queue, **{"key": "k"} | bad)


# claim(agents => …)


@pytest.mark.parametrize("budgeted", [False, True])
def test_a_claim_for_some_agents_takes_theirs_in_order_and_leaves_the_others(conn, budgeted):
    call(conn, "create_budget", name="b", max_running=100)
    queue = Queue(conn, budgets=["b"] if budgeted else [])
    for n in range(30):
        queue.enqueue(str(n), agent="abc"[n % 3], priority=n % 2)
    queue.enqueue("99")
    got = [task.payload for task in queue.claim(7, agents=["a", "c"])]
    assert got == [3, 5, 9, 11, 15, 17, 21]
    assert [task.payload for task in queue.claim(2, agents=["b"])] == [1, 7]
    assert queue.claim(5, agents=["nobody"]) == []
    assert [task.payload for task in queue.claim(99)] == [13, 19, 23, 25, 27, 29, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 99]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="agents"):
        queue.claim(agents=[])


def test_a_claim_for_one_agent_does_not_walk_the_tasks_of_others(queue):
    queue.fill(20000, agent="many")
    rare = queue.enqueue(agent="rare")

    def buffers(agent):
        with queue.conn.transaction(force_rollback=True):
            before = value(queue.conn, "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_xact_user_tables t JOIN pg_stat_user_indexes i"
                           " USING (relid) WHERE t.relname = 'place_ready'")  # fmt: skip
            found = queue.claim(agents=[agent])
            seen = value(queue.conn, "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'place_ready'")
            return before is not None and [task.id for task in found], seen

    for _ in range(2):  # never analysed, then analysed
        found, read = buffers("rare")
        assert found == [rare] and read < 50
        queue.conn.execute("ANALYZE stint.place_ready")


@pytest.mark.parametrize("budgeted", [False, True])
def test_a_claim_for_some_agents_turns_to_the_others_when_one_agents_tasks_are_held(conn, connect, budgeted):
    call(conn, "create_budget", name="b", max_running=100)
    queue = Queue(conn, budgets=["b"] if budgeted else [])
    for agent in "aaab":
        queue.enqueue(f'"{agent}"', agent=agent)
    other = connect(autocommit=False)
    assert len(queue.by(other).claim(3, agents=["a"])) == 3
    assert [task.payload for task in queue.claim(2, agents=["a", "b"])] == ["b"]
    other.rollback()
    assert [task.payload for task in queue.claim(9, agents=["a", "b"])] == ["a"] * 3


def test_claims_for_agents_beside_claims_for_all_find_every_task(conn, connect):
    from stint import parallel

    queue = Queue(conn)
    for agent in "abcd":
        queue.fill(100, agent=agent)
    sessions = [connect() for _ in range(8)]

    def claimer(number):
        mine, got = queue.by(sessions[number]), []
        options = {"agents": ["abcd"[number // 2]]} if number % 2 else {}
        while batch := mine.claim(3, **options):
            got += [task.id for task in batch]
        return got

    claimed = sum(parallel(8, claimer), [])
    assert len(claimed) == len(set(claimed)) == 400


def test_a_wait_for_some_agents_swallows_nobodys_wake_up(queue, connect):
    picky, any_task = connect(), connect()
    none = background(lambda: queue.by(picky).claim(wait="2 s", agents=["x"]))
    waiting(queue.conn, picky.info.backend_pid, "Extension")
    wait = background(lambda: queue.by(any_task).one(wait="10 s").id)
    waiting(queue.conn, any_task.info.backend_pid, "Extension")
    id = queue.enqueue(agent="y")
    assert wait.join(5) == id and none.join() == []
    mine = background(lambda: queue.by(picky).one(wait="10 s", agents=["x"]).id)
    assert queue.enqueue(agent="x") == mine.join(5)


# snooze


def test_a_snoozed_attempt_does_not_count_and_frees_its_budgets(conn):
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn, max_attempts=1, budgets=["b"])
    id = queue.enqueue()
    for n in range(3):
        task = queue.one()
        answer = queue.snooze(task, duration="1 hour")
        assert answer[:3] == ("snoozed", True, "scheduled") and answer.run_in_ms == 3600_000
        assert budget(conn, "b") == (0, 0) and queue.task(id).why == "snoozed" and queue.claim() == []
        queue.due(id)
    assert queue.ended(id) == ["snoozed"] * 3
    assert queue.fail(queue.one()).outcome == "failed"


@pytest.mark.parametrize("again", ["scheduled", "ready", "running", "completed"])
def test_a_late_worker_ends_nothing_after_its_snooze(queue, again):
    id = queue.enqueue()
    old = queue.one()
    queue.snooze(old)
    new = None
    if again != "scheduled":
        queue.due(id)
    if again in ("running", "completed"):
        new = queue.one()
    if again == "completed":
        queue.complete(new)
    before = queue.place(id)
    expected = "already_finished" if again == "completed" else "superseded"
    for verb in ("complete", "fail", "release", "snooze"):
        answer = getattr(queue, verb)(old)
        assert (answer.outcome, answer.first) == (expected, False), verb
    assert queue.extend(old).status == "lost"
    assert call(queue.conn, "annotate", queue="q", id=id, lease=old.lease, run_id="r")[0][0] == "lost"
    assert queue.place(id) == before
    if again == "running":
        assert queue.complete(new).first


def test_snoozing_a_task_that_was_cancelled_ends_it(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.cancel(id, reason="no longer wanted")
    assert queue.snooze(task)[:3] == ("cancelled", True, "cancelled") and queue.ended(id) == ["cancelled"]


# retry, retry_failed


def fail_for_good(queue, **options):
    id = queue.enqueue(**options)
    queue.fail(queue.one(), retryable=False)
    return id


def test_a_retried_task_keeps_its_attempts_and_has_all_of_them_again(queue):
    id = queue.enqueue(priority=3)
    for _ in range(2):
        queue.fail(queue.one(), retry_in="0")
    assert queue.status(id) == "failed"
    assert queue.retry(id) == ("retried", "ready") and queue.retry(id) == ("not_finished", "ready")
    assert queue.task(id).attempt == 2 and queue.ended(id) == ["failed"] * 2
    [kept] = rows(queue.conn, "SELECT * FROM stint.task_retries")
    assert (kept.id, kept.retry, kept.outcome, kept.attempt, kept.error) == (id, 1, "failed", 2, "it broke")
    task = queue.one()
    assert task.attempt == 3 and task.priority == 3
    assert queue.fail(task, retry_in="0").outcome == "retrying"
    assert queue.lapse(queue.one()).failed == 1 and queue.ended(id) == ["failed"] * 3 + ["lapsed"]
    assert queue.retry(id).outcome == "retried" and queue.complete(queue.one()).first
    assert queue.retry(id) == ("already_completed", "completed")


def test_a_worker_that_failed_its_task_is_told_so_also_after_a_retry(queue):
    id = queue.enqueue()
    task = queue.one()
    queue.fail(task, retryable=False)
    queue.retry(id)
    assert queue.complete(task).outcome == "already_failed" and queue.status(id) == "ready"


def test_a_cancelled_task_can_be_retried_before_and_after_its_first_attempt(queue):
    id = queue.enqueue()
    for n in range(2):
        queue.cancel(id)
        assert queue.retry(id).outcome == "retried"
    assert queue.one().id == id and value(queue.conn, "SELECT max(retry) FROM stint.task_retries") == 2


def test_a_retry_does_not_double_a_key_that_passed_to_another_task(queue):
    id = fail_for_good(queue, key="k")
    queue.conn.execute("UPDATE stint.task_keys SET kept_until = '-infinity'")
    until(queue.conn, "SELECT stint.expire_keys() IS NOT NULL AND NOT EXISTS (SELECT FROM stint.task_keys)")
    other = queue.enqueue(key="k")
    assert queue.retry(id) == ("key_taken", "failed") and value(queue.conn, "SELECT stint.retry_failed('q')") == 0
    queue.cancel(other)
    queue.conn.execute("UPDATE stint.task_keys SET kept_until = '-infinity'")
    until(queue.conn, "SELECT stint.expire_keys() IS NOT NULL AND NOT EXISTS (SELECT FROM stint.task_keys)")
    assert queue.retry(id).outcome == "retried" and queue.enqueue(key="k") == id


def test_failed_tasks_are_retried_by_time_and_agent_and_in_batches(queue):
    old = fail_for_good(queue, agent="a")
    queue.conn.execute("UPDATE stint.task_outcomes SET finished_at = finished_at - interval '1 day'")
    new = [fail_for_good(queue, agent=agent) for agent in "aab"]
    queue.cancel(queue.enqueue())
    retry = "SELECT stint.retry_failed('q', since => now() - interval '1 hour', agent => 'a', max => 1)"
    assert [value(queue.conn, retry) for _ in range(3)] == [1, 1, 0]
    assert [queue.status(id) for id in [old, *new]] == ["failed", "ready", "ready", "failed"]
    assert value(queue.conn, "SELECT stint.retry_failed('q')") == 2 and [t.id for t in queue.claim(9)] == [*new[:2], old, new[2]]


# reprioritize, annotate


def test_a_reprioritized_task_stands_where_its_age_puts_it(queue):
    low, first, second = queue.enqueue(), queue.enqueue(priority=5), queue.enqueue(priority=5)
    delayed = queue.enqueue(delay="1 hour")
    up = [call(queue.conn, "reprioritize", queue="q", id=id, priority=5)[0] for id in (low, delayed)]
    assert up == [("reprioritized", "ready"), ("reprioritized", "scheduled")]
    assert queue.task(low).priority == 5 and queue.task(delayed).priority == 5
    queue.due(delayed)
    tasks = queue.claim(9)
    assert [(task.id, task.priority) for task in tasks] == [(low, 5), (first, 5), (second, 5), (delayed, 5)]
    assert call(queue.conn, "reprioritize", queue="q", id=low, priority=1) == [("already_running", "running")]
    queue.complete(tasks[0])
    assert call(queue.conn, "reprioritize", queue="q", id=low, priority=1) == [("already_finished", "completed")]


def test_the_run_of_a_worker_that_dies_is_known_once_annotated(queue):
    id = queue.enqueue()
    task = queue.one()
    note = {"queue": "q", "id": id, "lease": task.lease}
    before = queue.task(id).expires_at
    assert call(queue.conn, "annotate", **note, run_id="run 7")[0][0] == "held"
    assert call(queue.conn, "annotate", **note, trace_id="trace 7")[0][0] == "held" and queue.task(id).expires_at == before
    queue.cancel(id)
    assert call(queue.conn, "annotate", **note)[0][0] == "cancel_requested"
    queue.lapse(task)
    [attempt] = queue.attempts(id)
    assert (attempt.ended, attempt.run_id, attempt.trace_id) == ("lapsed", "run 7", "trace 7")
    with pytest.raises(psycopg.errors.NoDataFound):
        call(queue.conn, "annotate", queue="q", id=task.lease, lease=task.lease)
