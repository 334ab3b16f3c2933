"""Budgets over time: requests, tokens and money within a sliding window, throttles, and limits that change while work runs.

Windows here are an hour long, so nothing depends on how fast a test runs; the arithmetic of time is tested in crates/core.
"""

import decimal
import threading

import psycopg
import pytest
from stint import Queue, background, budget, call, parallel, rows, value, waiting

HOUR = "1 hour"


def window(conn, name="b"):
    """(requests, tokens, cost) spent within the window, as the view shows it."""
    [row] = rows(conn, "SELECT requests, window_tokens, window_cost FROM stint.budgets WHERE budget = %s", name)
    return row.requests, row.window_tokens, float(row.window_cost)


def make(conn, name="b", **settings):
    call(conn, "create_budget", name=name, **{"per": HOUR} | settings)
    return name


def explain(conn, id):
    return value(conn, "SELECT stint.explain('q', %s)", id)


# Admission


def test_no_more_requests_begin_within_the_window_than_allowed(conn):
    make(conn, max_requests=3)
    queue = Queue(conn, budgets=["b"])
    queue.fill(5)
    held = queue.claim(9)
    assert len(held) == 3 and window(conn) == (3, 0, 0)
    # Ended attempts stay begun.
    for task in held:
        queue.complete(task)
    assert queue.claim(9) == [] and window(conn) == (3, 0, 0) and budget(conn, "b") == (0, 0)
    [last] = rows(conn, "SELECT id FROM stint.place_ready ORDER BY seq LIMIT 1")
    assert explain(conn, last.id).startswith('ready: budget "b" has no room: 3 of 3 requests within the last 3600.0 s, room again at ')


def test_no_more_tokens_are_admitted_within_the_window_than_allowed(conn):
    make(conn, max_window_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue(tokens=60)
    later = queue.enqueue(tokens=50)
    queue.enqueue(tokens=1)
    [first] = queue.claim(9)
    queue.complete(first)
    assert queue.claim(9) == [] and window(conn) == (1, 60, 0)
    assert "60 of 100 tokens, the task needs 50 within the last 3600.0 s" in explain(conn, later)
    shown = rows(conn, "SELECT * FROM stint.budgets")[0]
    assert (shown.room_window_tokens, shown.max_window_tokens, shown.window_tokens) == (40, 100, 60)
    assert value(conn, "SELECT refills_at BETWEEN now() + '59 min' AND now() + '62 min' FROM stint.budgets")


def test_what_left_the_window_makes_room(conn):
    """Each figure is what it is an hour later, with the rows an hour older and read again."""
    make(conn, max_requests=1)
    queue = Queue(conn, budgets=["b"])
    queue.fill(2)
    queue.complete(queue.one())
    assert queue.claim() == []
    conn.execute("UPDATE stint.task_attempts SET started_at = started_at - interval '64 min', ended_at = ended_at - interval '64 min'")
    call(conn, "alter_budget", name="b", per="61 min")
    assert window(conn) == (0, 0, 0)
    queue.one()
    call(conn, "alter_budget", name="b", per="2 hours")
    assert window(conn) == (2, 0, 0)


def test_a_short_window_lets_its_limit_through_again_and_again(conn):
    make(conn, max_requests=2, per="1 s")
    queue = Queue(conn, budgets=["b"])
    queue.fill(6)
    claimed = []
    while len(claimed) < 6:
        got = queue.claim(9, wait="5 s")
        assert len(got) <= 2
        claimed += got
    began = [at for (at,) in rows(conn, "SELECT extract(epoch FROM started_at)::float8 FROM stint.place_running ORDER BY started_at")]
    assert all(later - first >= 1 for first, later in zip(began, began[2:]))


def test_thirty_two_claimers_never_pass_the_limits_of_a_window(conn, connect):
    make(conn, "requests", max_requests=40)
    make(conn, "tokens", max_window_tokens=500)
    queue = Queue(conn, max_attempts=100)
    for n in range(150):
        queue.enqueue(str(n), budgets=[["requests"], ["tokens"], ["requests", "tokens"]][n % 3], tokens=5 + n % 17)
    sessions = [connect() for _ in range(32)]

    def worker(number):
        mine, taken = queue.by(sessions[number]), 0
        for turn in range(12):
            try:
                with mine.conn.transaction():
                    tasks = mine.claim(1 + (turn + number) % 4)
                    if turn % 5 == 4:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                continue
            for task in tasks:
                taken += 1
                (mine.complete if turn % 2 else mine.fail)(task, **({"retry_in": "0"} if turn % 2 == 0 else {}))
        return taken

    assert sum(parallel(32, worker)) > 40
    begun = value(conn, "SELECT count(*) FROM stint.task_attempts a JOIN stint.budget_config b ON b.number = ANY (a.budgets) WHERE b.budget = 'requests'")
    spent = value(
        conn,
        "SELECT sum(d.charged) FROM stint.task_attempts a CROSS JOIN unnest(a.budgets, a.charged) AS d (budget, charged)"
        " JOIN stint.budget_config b ON b.number = d.budget WHERE b.budget = 'tokens'",
    )
    # Reached, or the test would show nothing, and never passed.
    assert begun == 40 and 480 < spent <= 500
    assert window(conn, "requests")[0] == 40 and window(conn, "tokens")[1] == spent


@pytest.mark.parametrize("tokens", [None, 0])
def test_a_zero_or_missing_prediction_is_not_free_in_a_window(conn, tokens):
    make(conn, max_window_tokens=100, default_tokens=40)
    make(conn, "strict", max_window_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.fill(5, tokens=tokens)
    assert len(queue.claim(9)) == 2 and window(conn) == (2, 80, 0)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='budget "strict" limits tokens in its window'):
        queue.enqueue(tokens=tokens, budgets=["strict"])
    # A limit that came after the task was enqueued: it counts as the whole limit.
    call(conn, "create_budget", name="late", max_running=9)
    queue = Queue(conn, "other")
    queue.fill(2, tokens=tokens, budgets=["late"])
    call(conn, "alter_budget", name="late", max_window_tokens=70, per=HOUR)
    assert len(queue.claim(9)) == 1 and window(conn, "late") == (1, 70, 0)


def test_a_task_above_a_windows_capacity_is_refused_naming_the_budget(conn):
    make(conn, max_window_tokens=100)
    queue = Queue(conn)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match='101 tokens, but budget "b" allows 100 in its window at all') as raised:
        queue.enqueue(tokens=101, budgets=["b"])
    assert "max_window_tokens" in raised.value.diag.message_hint


# Every way an attempt can end settles its windows exactly once


def ended_with(verb, **usage):
    def end(queue, task, connect):
        assert getattr(queue, verb)(task, **usage).first
        assert not getattr(queue, verb)(task, **usage).first

    return end


def lapse(queue, task, connect):
    assert queue.lapse(task).lapsed == 1
    queue.cancel(task.id)


def lapse_and_late_completion(queue, task, connect):
    assert queue.lapse(task).lapsed == 1
    assert queue.complete(task, input_tokens=5).first


def cancel(queue, task, connect):
    assert queue.cancel(task.id).outcome == "cancel_requested"
    assert window(queue.conn) == (1, 30, 0)
    assert queue.release(task).outcome == "cancelled"


def release(queue, task, connect):
    assert queue.release(task).first
    queue.cancel(task.id)


def after_rollbacks(queue, task, connect):
    for verb in queue.complete, queue.fail, queue.release:
        with pytest.raises(ZeroDivisionError), queue.conn.transaction():
            assert verb(task, **({} if verb == queue.release else {"input_tokens": 1})).first
            raise ZeroDivisionError
        assert window(queue.conn) == (1, 30, 0)
    with queue.conn.transaction():
        for verb in queue.release, queue.fail:
            with pytest.raises(ZeroDivisionError), queue.conn.transaction():
                assert verb(task).first
                raise ZeroDivisionError
        assert queue.complete(task, output_tokens=12).first


def after_a_terminated_session(queue, task, connect):
    session = connect(autocommit=False)
    assert queue.by(session).complete(task, input_tokens=1).first
    queue.conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
    assert window(queue.conn) == (1, 30, 0)
    assert queue.complete(task, input_tokens=2).first


ENDS = [
    (ended_with("complete"), (1, 30, 0)),
    (ended_with("complete", input_tokens=20, cached_tokens=8, output_tokens=5), (1, 25, 0)),
    (ended_with("complete", input_tokens=20, output_tokens=35), (1, 55, 0)),
    (ended_with("complete", output_tokens=0), (1, 0, 0)),
    (ended_with("complete", model_cost="0.25", compute_cost="0.0000001"), (1, 30, 0.250001)),
    (ended_with("fail", retryable=False), (1, 30, 0)),
    (ended_with("fail", retryable=False, input_tokens=3, model_cost="2"), (1, 3, 2)),
    (ended_with("fail", retry_in="1 hour", input_tokens=3), (1, 3, 0)),
    (lapse, (1, 30, 0)),
    (lapse_and_late_completion, (1, 30, 0)),
    (cancel, (1, 30, 0)),
    (release, (0, 0, 0)),
    (after_rollbacks, (1, 12, 0)),
    (after_a_terminated_session, (1, 2, 0)),
]


@pytest.mark.parametrize("end, spent", ENDS)
def test_the_end_of_an_attempt_settles_its_windows_exactly_once(conn, connect, end, spent):
    make(conn, max_window_tokens=100, max_cost="10")
    queue = Queue(conn, budgets=["b"])
    queue.enqueue(tokens=30)
    task = queue.one()
    assert window(conn) == (1, 30, 0) and budget(conn, "b") == (1, 30)
    end(queue, task, connect)
    assert window(conn) == spent and budget(conn, "b") == (0, 0)
    # What was spent is what the rows say, when they are read anew.
    call(conn, "alter_budget", name="b", per="2 hours")
    assert window(conn) == spent
    queue.enqueue(tokens=20)
    assert len(queue.claim()) == 1 and window(conn) == (spent[0] + 1, spent[1] + 20, spent[2])


def test_an_aborted_claim_spends_nothing(conn, connect):
    make(conn, max_requests=5, max_window_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.fill(5, tokens=10)
    with pytest.raises(ZeroDivisionError), conn.transaction():
        assert len(queue.claim(2)) == 2
        with pytest.raises(ZeroDivisionError), conn.transaction():
            assert len(queue.claim(2)) == 2 and window(conn) == (4, 40, 0)
            raise ZeroDivisionError
        assert window(conn) == (2, 20, 0)
        raise ZeroDivisionError
    assert window(conn) == (0, 0, 0)
    session = connect(autocommit=False)
    assert len(queue.by(session).claim(3)) == 3 and window(conn) == (3, 30, 0)
    conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
    assert window(conn) == (0, 0, 0) and len(queue.claim(9)) == 5


def test_random_savepoints_leave_the_windows_right(conn):
    import random

    chance = random.Random(11)
    make(conn, max_requests=100_000, max_window_tokens=1_000_000)
    queue = Queue(conn, budgets=["b"], max_attempts=10_000)
    queue.fill(60, tokens=9)

    def step(depth, held):
        for _ in range(chance.randint(1, 4)):
            kept = list(held)
            try:
                with conn.transaction():
                    if depth < 4 and chance.random() < 0.5:
                        step(depth + 1, held)
                    elif held and chance.random() < 0.5:
                        task = held.pop(chance.randrange(len(held)))
                        if chance.random() < 0.3:
                            assert queue.release(task).first
                        else:
                            assert queue.complete(task, output_tokens=chance.randrange(20)).first
                            queue.enqueue(tokens=1 + chance.randrange(60))
                    else:
                        held.extend(queue.claim(2))
                    if chance.random() < 0.4:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                held[:] = kept

    held = []
    for turn in range(30):
        step(0, held)
        begun, tokens = rows(
            conn,
            "SELECT count(*), coalesce(sum(t), 0)::bigint FROM (SELECT charged[1] FROM stint.task_attempts WHERE budgets IS NOT NULL"
            " UNION ALL SELECT reserved[1] FROM stint.place_running) x (t)",
        )[0]
        assert window(conn) == (begun, tokens, 0)
        if turn % 10 == 9:
            call(conn, "alter_budget", name="b", per=f"{turn} hours")
            assert window(conn) == (begun, tokens, 0)


# Weights and money


def test_tokens_are_weighed_by_their_kind(conn):
    make(conn, "input", max_window_tokens=1000, output_weight=0)
    make(conn, "output", max_window_tokens=1000, input_weight=0, cached_weight=0)
    make(conn, "price", max_window_tokens=1000, cached_weight=0.1, output_weight=5)
    queue = Queue(conn, budgets=["input", "output", "price"])
    queue.enqueue(tokens=10)
    queue.complete(queue.one(), input_tokens=100, cached_tokens=41, output_tokens=7)
    assert [window(conn, name)[1] for name in ("input", "output", "price")] == [100, 7, 59 + 5 + 35]


def test_nothing_starts_while_the_money_of_the_window_is_spent(conn):
    make(conn, max_cost="0.30")
    queue = Queue(conn, budgets=["b"])
    queue.fill(4)
    queue.complete(queue.one(), model_cost="0.299999")
    task = queue.one()
    queue.complete(task, compute_cost="0.0000011")
    assert queue.claim() == []
    [waits] = rows(conn, "SELECT id FROM stint.place_ready ORDER BY seq LIMIT 1")
    assert '0.300001 of 0.3 spent within the last 3600.0 s' in explain(conn, waits.id)
    shown = rows(conn, "SELECT window_cost, room_cost FROM stint.budgets")[0]
    assert (shown.window_cost, shown.room_cost) == (decimal.Decimal("0.300001"), decimal.Decimal("-0.000001"))
    call(conn, "alter_budget", name="b", max_cost="0.31")
    assert len(queue.claim()) == 1


# Throttles


def test_a_throttled_budget_holds_its_tasks_and_no_others(conn):
    call(conn, "create_budget", name="b", max_running=9)
    queue = Queue(conn)
    held = queue.enqueue('"held"', budgets=["b"])
    queue.enqueue('"free"')
    running = queue.enqueue(budgets=["b"], priority=9)
    [task] = queue.claim()
    assert task.id == running
    until = call(conn, "throttle", budget="b", duration="1 hour")[0][0]
    assert [task.payload for task in queue.claim(9)] == ["free"] and queue.claim(9) == []
    # Running work goes on; a shorter throttle changes nothing; '0' ends it.
    assert queue.complete(task).first
    assert call(conn, "throttle", budget="b", duration="1 s")[0][0] == until
    assert value(conn, "SELECT throttled_until FROM stint.budgets") == until
    assert explain(conn, held).startswith('ready: budget "b" is throttled until ')
    assert call(conn, "throttle", budget="b", duration="0")[0][0] is None
    assert value(conn, "SELECT throttled_until FROM stint.budgets") is None
    assert [task.payload for task in queue.claim(9)] == ["held"]


def test_a_throttle_ends_by_itself_and_waiters_notice(conn):
    call(conn, "create_budget", name="b", max_running=9)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue()
    call(conn, "throttle", budget="b", duration="300 ms")
    assert queue.claim() == []
    assert len(queue.claim(wait="10 s")) == 1
    assert value(conn, "SELECT started_at >= (SELECT throttled_until FROM stint.budget_config) FROM stint.place_running")


def test_a_throttle_that_is_rolled_back_throttles_nothing(conn):
    call(conn, "create_budget", name="b", max_running=9)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue()
    with pytest.raises(ZeroDivisionError), conn.transaction():
        call(conn, "throttle", budget="b", duration="1 hour")
        assert queue.claim() == []
        raise ZeroDivisionError
    assert len(queue.claim()) == 1


# Changes while work runs


def test_a_lowered_limit_stops_admission_and_no_running_work(conn):
    call(conn, "create_budget", name="b", max_running=3, max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.fill(6, tokens=20)
    held = queue.claim(3)
    call(conn, "alter_budget", name="b", max_running=1)
    assert rows(conn, "SELECT running, room_running FROM stint.budgets") == [(3, -2)]
    for task in held[:2]:
        assert queue.complete(task).first
        assert queue.claim() == []
    assert queue.complete(held[2]).first and len(queue.claim(9)) == 1


def test_a_raised_limit_wakes_a_waiter_at_once(conn, connect):
    call(conn, "create_budget", name="b", max_running=0)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue()
    session = connect()
    claim = background(lambda: queue.by(session).claim(wait="30 s"))
    waiting(conn, session.info.backend_pid, "Extension")
    call(conn, "alter_budget", name="b", max_running=1)
    assert len(claim.join(20)) == 1


def test_a_task_that_a_lowered_limit_leaves_without_a_chance_is_held_visibly(conn):
    make(conn, max_window_tokens=100, max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    id = queue.enqueue(tokens=80)
    call(conn, "alter_budget", name="b", max_window_tokens=50)
    assert queue.claim() == []
    assert explain(conn, id) == 'ready: held: the task needs 80 tokens, but budget "b" allows 50 at all'
    call(conn, "alter_budget", name="b", unset=["max_window_tokens"])
    assert len(queue.claim()) == 1


@pytest.mark.parametrize("agents", [None, ["a"]])
@pytest.mark.parametrize("kind", ["max_tokens", "max_window_tokens"])
def test_a_task_that_a_lowered_limit_leaves_without_a_chance_holds_up_nobody(conn, kind, agents):
    make(conn, **{kind: 1000})
    queue = Queue(conn, budgets=["b"])
    held = [queue.enqueue(tokens=500, agent="a", priority=priority) for priority in (0, 3, 0)]
    behind = [queue.enqueue(tokens=10, agent="a") for _ in range(3)]
    call(conn, "alter_budget", name="b", **{kind: 100})
    assert [task.id for task in queue.claim(1, agents=agents)] == behind[:1]
    assert [task.id for task in queue.claim(9, agents=agents)] == behind[1:]
    assert queue.claim(9, agents=agents) == []
    assert all("held" in explain(conn, id) for id in held)
    call(conn, "alter_budget", name="b", **{kind: 5000})
    assert [task.id for task in queue.claim(9, agents=agents)] == [held[1], held[0], held[2]]
    assert call(conn, "check") == []


def test_alter_checks_what_comes_out(conn):
    make(conn, max_requests=3, max_tokens=100, default_tokens=40)
    for wrong, message in [
        ({"unset": ["per"]}, "max_requests but no window"),
        ({"max_tokens": 30}, "default_tokens 40 is above max_tokens 30"),
        ({"unset": ["max_request"]}, "no limit that can be removed"),
        ({"unset": ["max_tokens"], "max_tokens": 5}, "both given and in unset"),
        ({"unset": ["max_tokens", "max_requests"]}, "limits nothing"),
        ({"per": "1 ms"}, '"per" is 0.001 s'),
        ({"output_weight": "NaN"}, '"output_weight" is NaN'),
        ({"max_cost": "NaN"}, '"max_cost" is NaN'),
        ({"max_requests": -1}, '"max_requests" is -1'),
    ]:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=message) as raised:
            call(conn, "alter_budget", name="b", **wrong)
        assert raised.value.diag.message_hint
    for verb, args in ("alter_budget", {"name": "c"}), ("drop_budget", {"name": "c"}), ("throttle", {"budget": "c", "duration": "1 s"}):
        with pytest.raises(psycopg.errors.UndefinedObject, match='budget "c" does not exist') as raised:
            call(conn, verb, **args)
        assert 'Did you mean "b"' in raised.value.diag.message_hint or raised.value.diag.message_hint
    [row] = rows(conn, "SELECT * FROM stint.budgets")
    assert (row.max_requests, row.max_tokens, row.default_tokens) == (3, 100, 40)


def test_a_budget_is_dropped_only_when_nothing_draws_on_it(conn, connect):
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn)
    queue.enqueue(budgets=["b"])
    Queue(conn, "by name", budgets=["b"])
    with pytest.raises(psycopg.errors.DependentObjectsStillExist, match='queue "by name", tasks of queue "q"') as raised:
        call(conn, "drop_budget", name="b")
    assert raised.value.diag.message_hint
    task = queue.one()
    conn.execute("UPDATE stint.queue_config SET budgets = '{}'")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist, match='running tasks of queue "q"'):
        call(conn, "drop_budget", name="b")
    queue.complete(task)
    # Somebody enqueues meanwhile: either the budget is still there or the task is refused.
    session = connect(autocommit=False)
    queue.by(session).enqueue(budgets=["b"])
    dropping = background(lambda: call(connect(), "drop_budget", name="b"))
    threading.Event().wait(0.2)
    assert not dropping.done()
    session.commit()
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        dropping.join()
    queue.complete(queue.one())
    call(conn, "drop_budget", name="b")
    assert rows(conn, "SELECT * FROM stint.budgets") == []
    with pytest.raises(psycopg.errors.UndefinedObject):
        queue.enqueue(budgets=["b"])


# Lanes that wait cost nothing


def test_a_task_behind_one_that_was_cancelled_or_taken_is_found_at_once(conn, connect):
    """What a session remembers of the front of a lane does not outlive the task that stood there."""
    call(conn, "create_budget", name="b", max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    first = queue.enqueue(tokens=60)
    large = queue.enqueue(tokens=90)
    small = queue.enqueue(tokens=10)
    assert [task.id for task in queue.claim(9)] == [first]
    assert queue.claim(9) == [] and queue.claim(9) == []
    other = connect()
    with other.transaction():
        queue.by(other).cancel(large)
        assert queue.claim(9) == []
    assert [task.id for task in queue.claim(9)] == [small]
    # A task of higher priority is the new front.
    queue.enqueue(tokens=90)
    assert queue.claim(9) == []
    urgent = queue.by(other).enqueue(tokens=5, priority=5)
    assert [task.id for task in queue.claim(9)] == [urgent]
    # Within one transaction, too.
    with conn.transaction():
        big = queue.enqueue(tokens=95, priority=9)
        tiny = queue.enqueue(tokens=1, priority=9)
        assert queue.claim(9) == []
        queue.cancel(big)
        assert [task.id for task in queue.claim(9)] == [tiny]


@pytest.mark.parametrize("limit", ["max_running => 1", "max_tokens => 100", "max_requests => 1, per => '1 hour'", "max_window_tokens => 100, per => '1 hour'"])
def test_a_claim_looks_only_at_lanes_with_room(conn, limit):
    """Of 200 lanes with 20 tasks each before the one with room, a claim reads none."""
    conn.execute(f"SELECT stint.create_budget('b' || n, {limit}) FROM generate_series(0, 199) n")
    queue = Queue(conn)
    conn.execute(
        "SELECT stint.enqueue('q', '{}', tokens => 60, budgets => array['b' || b], priority => 9) FROM generate_series(0, 199) b, generate_series(1, 21)"
    )
    assert len(queue.claim(200)) == 200 and queue.claim(200) == []
    call(conn, "create_budget", name="room", max_running=1000)
    queue.fill(50, budgets=["room"])

    def scans():
        conn.execute("SELECT pg_stat_force_next_flush()")
        return value(conn, "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'place_ready_order'")

    queue.claim()
    before = scans()
    for _ in range(20):
        assert len(queue.claim()) == 1
    # One look at the front of the lane with room, one to take, now and then one to raise its head.
    assert scans() - before <= 20 * 3
    before = scans()
    while queue.claim(9):
        pass
    for _ in range(20):
        assert queue.claim() == []
    assert scans() - before <= 60
