"""Budgets: never above the limit at any commit point, released exactly once, nothing starved and nothing held up."""

import threading

import psycopg
import pytest
from stint import Queue, background, budget, call, parallel, rows, value

IN_USE = """
    SELECT d.budget, count(*) AS running, coalesce(sum(d.tokens), 0)::bigint AS tokens
    FROM stint.place_running r CROSS JOIN LATERAL unnest(r.budgets, r.reserved) AS d (budget, tokens) GROUP BY d.budget
"""


class Sampler:
    """Looks at what the committed running rows reserve as often as it can; each look is one snapshot."""

    def __init__(self, conn):
        self.conn, self.most, self.looks = conn, {}, 0
        self._stop = threading.Event()
        self._thread = background(self._watch)

    def _watch(self):
        while not self._stop.is_set():
            for number, running, tokens in rows(self.conn, IN_USE):
                most = self.most.get(number, (0, 0))
                self.most[number] = (max(most[0], running), max(most[1], tokens))
            self.looks += 1

    def stop(self):
        """The most that was ever in use of each budget, by name."""
        self._stop.set()
        self._thread.join()
        names = dict(self.conn.execute("SELECT number, budget FROM stint.budget_config").fetchall())
        return {names[number]: most for number, most in self.most.items()}


def test_limits_are_exact_under_thirty_two_claimers(conn, connect):
    call(conn, "create_budget", name="wide", max_running=9)
    call(conn, "create_budget", name="narrow", max_running=3)
    call(conn, "create_budget", name="tokens", max_tokens=100, default_tokens=20)
    queue = Queue(conn, budgets=["wide"], max_attempts=1000)
    total = 300
    for n in range(total):
        own = [[], ["narrow"], ["tokens"], ["narrow", "tokens"]][n % 4]
        queue.enqueue(str(n), budgets=own, **({"tokens": 1 + n * 7 % 60} if n % 3 else {}))
    sessions = [connect() for _ in range(32)]
    sampler = Sampler(connect())
    left = threading.Semaphore(total)

    def worker(number):
        mine, turn = queue.by(sessions[number]), number
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < total:
            turn += 1
            # Some transactions claim and roll back, some end one task and claim the next, some give back.
            try:
                with mine.conn.transaction():
                    tasks = mine.claim(1 + turn % 4)
                    assert len(tasks) <= 1 + turn % 4
                    if turn % 7 == 0:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                continue
            mine.conn.execute("SELECT pg_sleep(0.003)")
            for task in tasks:
                turn += 1
                if turn % 11 == 0:
                    assert mine.release(task).first
                elif turn % 13 == 0:
                    assert mine.fail(task, retry_in="0").first
                else:
                    assert mine.complete(task).first
                    left.acquire(blocking=False)

    parallel(32, worker)
    most = sampler.stop()
    # Reached, or the test would show nothing, and never passed.
    assert 7 <= most["wide"][0] <= 9 and 2 <= most["narrow"][0] <= 3 and 60 < most["tokens"][1] <= 100
    assert sampler.looks > 20
    for name in "wide", "narrow", "tokens":
        assert budget(conn, name) == (0, 0)


def end_complete(queue, task, connect):
    assert queue.complete(task).first


def end_fail(queue, task, connect):
    assert queue.fail(task).first


def end_fail_for_good(queue, task, connect):
    assert queue.fail(task, retryable=False).first


def end_release(queue, task, connect):
    assert queue.release(task).first
    queue.cancel(task.id)


def end_cancel(queue, task, connect):
    assert queue.cancel(task.id).outcome == "cancel_requested"
    assert budget(queue.conn, "b") == (1, 30)  # it still runs
    assert queue.release(task).outcome == "cancelled"


def end_lapse(queue, task, connect):
    assert queue.lapse(task).lapsed == 1
    queue.cancel(task.id)


def end_lapse_and_late_completion(queue, task, connect):
    assert queue.lapse(task).lapsed == 1
    assert queue.complete(task).first


def end_after_rollbacks(queue, task, connect):
    """Ends that were rolled back release nothing."""
    for verb in queue.complete, queue.fail, queue.release:
        with pytest.raises(ZeroDivisionError), queue.conn.transaction():
            assert verb(task).first
            raise ZeroDivisionError
        assert budget(queue.conn, "b") == (1, 30)
    with queue.conn.transaction():
        for verb in queue.release, queue.fail:
            with pytest.raises(ZeroDivisionError), queue.conn.transaction():
                assert verb(task).first
                raise ZeroDivisionError
        assert queue.complete(task).first
    assert queue.complete(task).outcome == "already_completed"


def end_in_a_terminated_session_first(queue, task, connect):
    session = connect(autocommit=False)
    assert queue.by(session).complete(task).first
    queue.conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
    assert budget(queue.conn, "b") == (1, 30)
    assert queue.complete(task).first


@pytest.mark.parametrize(
    "end",
    [end_complete, end_fail, end_fail_for_good, end_release, end_cancel, end_lapse, end_lapse_and_late_completion,
     end_after_rollbacks, end_in_a_terminated_session_first],
)  # fmt: skip
def test_what_an_attempt_reserved_is_released_exactly_once(conn, connect, end):
    call(conn, "create_budget", name="b", max_running=1, max_tokens=30)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue(tokens=30)
    task = queue.one()
    other = queue.enqueue(tokens=30)
    assert budget(conn, "b") == (1, 30) and queue.claim() == []
    end(queue, task, connect)
    assert budget(conn, "b") == (0, 0)
    assert queue.one().id == other
    assert budget(conn, "b") == (1, 30)


@pytest.mark.parametrize("what", ["claimed", "ended"])
def test_a_transaction_that_moved_a_budget_cannot_be_prepared(conn, what):
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn, budgets=["b"])
    queue.enqueue()
    task = None if what == "claimed" else queue.one()
    conn.execute("BEGIN")
    queue.one() if what == "claimed" else queue.complete(task)
    with pytest.raises(psycopg.errors.FeatureNotSupported) as raised:
        conn.execute("PREPARE TRANSACTION 'p'")
    assert raised.value.diag.message_hint and raised.value.sqlstate == "0A000"
    conn.execute("ROLLBACK")
    assert budget(conn, "b") == ((0, 0) if what == "claimed" else (1, 0))
    if what == "claimed":
        task = queue.one()
    assert queue.complete(task).first and budget(conn, "b") == (0, 0)


def test_a_transaction_that_moved_no_budget_can_be_prepared(conn):
    queue = Queue(conn)
    queue.enqueue()
    queue.enqueue()
    task = queue.one()
    conn.execute("BEGIN")
    queue.one()
    queue.complete(task)
    queue.enqueue("3")
    conn.execute("PREPARE TRANSACTION 'q'")
    assert queue.claim(9) == []
    conn.execute("COMMIT PREPARED 'q'")
    assert queue.one().payload == 3 and queue.complete(task).outcome == "already_completed"


def test_a_limit_of_one_is_never_held_twice_nor_lost(conn, connect):
    """Lapse, the late finish of the lapsed worker and ten claimers race, over and over."""
    call(conn, "create_budget", name="one", max_running=1)
    queue = Queue(conn, budgets=["one"], max_attempts=1_000_000)
    rounds = 40
    queue.fill(rounds)
    sessions = [connect() for _ in range(12)]
    sampler = Sampler(connect())
    for turn in range(rounds):
        held = queue.one()

        def race(number):
            mine = queue.by(sessions[number])
            if number == 10:
                return [mine.complete(held)] if turn % 2 else [mine.fail(held, retryable=False)]
            if number == 11:
                return [mine.lapse(held)]
            return mine.claim(3)

        results = parallel(12, race)
        claimed = sum(results[:10], [])
        assert len(claimed) <= 1
        for task in claimed:
            queue.complete(task)
        assert budget(conn, "one") == (0, 0)
        if value(conn, "SELECT count(*) FROM stint.place_ready") == 0:
            break
    assert sampler.stop()["one"] == (1, 0)


def test_a_task_waiting_for_a_narrow_limit_holds_no_slot_of_the_wide_one(conn):
    call(conn, "create_budget", name="narrow", max_running=1)
    call(conn, "create_budget", name="wide", max_running=2)
    queue = Queue(conn, budgets=["wide"])
    for n in range(3):
        queue.enqueue(str(n), budgets=["narrow"])
    queue.enqueue("9")
    assert [task.payload for task in queue.claim(9)] == [0, 9]
    assert budget(conn, "wide") == (2, 0) and budget(conn, "narrow") == (1, 0)


def test_a_task_too_large_for_the_room_waits_and_is_not_overtaken_in_its_lane(conn):
    call(conn, "create_budget", name="b", max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    small = queue.enqueue('"small"', tokens=60)
    queue.enqueue('"large"', tokens=50)
    queue.enqueue('"tiny"', tokens=1)
    [first] = queue.claim(9)
    assert first.id == small and queue.claim(9) == []
    explained = value(conn, "SELECT stint.explain('q', id) FROM stint.place_ready ORDER BY seq LIMIT 1")
    assert explained == 'ready: budget "b" has no room: 60 of 100 tokens in flight, the task needs 50'
    queue.complete(first)
    assert [task.payload for task in queue.claim(9)] == ["large", "tiny"]


def test_a_large_task_is_not_starved_by_small_ones_that_keep_coming(conn, connect):
    call(conn, "create_budget", name="b", max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.fill(40, tokens=10)
    large = queue.enqueue('"large"', tokens=100)
    sessions = [connect() for _ in range(8)]
    stop = threading.Event()

    def worker(number):
        mine, after = queue.by(sessions[number]), 0
        while not stop.is_set():
            mine.enqueue('"small"', tokens=10)
            for task in mine.claim(2):
                if task.id == large:
                    stop.set()
                elif value(mine.conn, "SELECT seq > (SELECT seq FROM stint.place_ready WHERE id = %s) FROM stint.place_running WHERE id = %s", large, task.id):
                    after += 1
                mine.complete(task)
        return after

    overtook = sum(background(parallel, 8, worker).join(60))
    # Only claims that were under way when the tasks before it were taken can have passed it.
    assert overtook <= 16


def test_tasks_of_other_budgets_are_claimed_from_behind_held_ones(conn):
    for name in "ab":
        call(conn, "create_budget", name=name, max_running=1)
    queue = Queue(conn)
    for n in range(300):
        queue.enqueue(f'"a{n}"', budgets=["a"], priority=9)
    queue.enqueue('"b"', budgets=["b"])
    queue.enqueue('"free"')
    queue.enqueue('"both"', budgets=["a", "b"])
    assert [task.payload for task in queue.claim(300)] == ["a0", "b", "free"]
    assert queue.claim(300) == []


def test_a_claim_turns_to_the_other_lanes_when_what_stands_first_is_held(conn, connect):
    for name in "ab":
        call(conn, "create_budget", name=name, max_running=9)
    queue = Queue(conn)
    queue.enqueue('"a"', budgets=["a"], priority=9)
    queue.enqueue('"b"', budgets=["b"])
    queue.enqueue('"free"', priority=-9)
    other = connect(autocommit=False)
    assert [task.payload for task in queue.by(other).claim()] == ["a"]
    assert [task.payload for task in queue.claim(1)] == ["b"]
    assert [task.payload for task in queue.claim(2)] == ["free"]
    other.rollback()
    assert [task.payload for task in queue.claim(1)] == ["a"]
    assert budget(conn, "a") == (1, 0) and budget(conn, "b") == (1, 0)


def test_a_task_draws_on_its_queues_budgets_and_its_own(conn):
    call(conn, "create_budget", name="queues", max_running=5, max_tokens=100)
    call(conn, "create_budget", name="own", max_tokens=50)
    queue = Queue(conn, budgets=["queues"])
    queue.enqueue(tokens=40, budgets=["own", "queues", "own"])
    queue.enqueue(tokens=40, budgets=["own"])
    queue.enqueue(tokens=40)
    assert len(queue.claim(9)) == 2
    assert budget(conn, "queues") == (2, 80) and budget(conn, "own") == (1, 40)
    shown = {row.budget: row for row in rows(conn, "SELECT * FROM stint.budgets")}
    assert (shown["queues"].room_running, shown["queues"].room_tokens, shown["own"].room_tokens) == (3, 20, 10)


def test_two_queues_share_a_budget(conn):
    call(conn, "create_budget", name="b", max_running=3)
    queues = [Queue(conn, name, budgets=["b"]) for name in ("one", "two")]
    for queue in queues:
        queue.fill(4)
    assert len(queues[0].claim(2)) == 2 and len(queues[1].claim(4)) == 1 and queues[0].claim() == []


@pytest.mark.parametrize("tokens", [None, 0])
def test_a_zero_or_missing_prediction_is_not_free(conn, tokens):
    call(conn, "create_budget", name="b", max_tokens=100, default_tokens=40)
    call(conn, "create_budget", name="strict", max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    queue.fill(5, tokens=tokens)
    assert len(queue.claim(9)) == 2 and budget(conn, "b") == (2, 80)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='"strict"'):
        queue.enqueue(tokens=tokens, budgets=["strict"])


def test_a_task_above_a_budgets_capacity_is_refused_naming_the_budget(conn):
    call(conn, "create_budget", name="b", max_tokens=100)
    queue = Queue(conn)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match='101 tokens, but budget "b" allows 100') as raised:
        queue.enqueue(tokens=101, budgets=["b"])
    assert raised.value.diag.message_hint
    queue.enqueue(tokens=100, budgets=["b"])
    assert len(queue.claim()) == 1


def test_a_closed_budget_holds_its_tasks_visibly(conn):
    call(conn, "create_budget", name="closed", max_running=0)
    queue = Queue(conn)
    id = queue.enqueue(budgets=["closed"])
    assert queue.claim() == []
    assert call(conn, "explain", queue="q", id=id)[0][0] == 'ready: budget "closed" is closed: its max_running lets no task run'


def test_many_budgets_in_one_transaction_all_come_back(conn):
    names = [f"b{n}" for n in range(60)]
    for name in names:
        call(conn, "create_budget", name=name, max_running=2, max_tokens=50)
    queue = Queue(conn)
    queue.enqueue(tokens=5, budgets=names)
    for name in names:
        queue.enqueue(tokens=5, budgets=[name])
    with pytest.raises(ZeroDivisionError), conn.transaction():
        with conn.transaction():
            assert len(queue.claim(99)) == 61
            assert budget(conn, "b7") == (2, 10)
        raise ZeroDivisionError
    assert {tuple(row) for row in rows(conn, "SELECT running, tokens_in_flight FROM stint.budgets")} == {(0, 0)}


def test_random_savepoints_leave_the_live_usage_right(conn):
    """Claims and ends under savepoints that are released, rolled back and nested at random."""
    import random

    chance = random.Random(7)
    call(conn, "create_budget", name="b", max_running=6, max_tokens=200)
    queue = Queue(conn, budgets=["b"], max_attempts=10_000)
    for n in range(30):
        queue.enqueue(tokens=1 + n)

    def step(depth, held):
        for _ in range(chance.randint(1, 4)):
            kept = list(held)
            try:
                with conn.transaction():
                    if depth < 4 and chance.random() < 0.5:
                        step(depth + 1, held)
                    elif held and chance.random() < 0.5:
                        task = held.pop(chance.randrange(len(held)))
                        assert getattr(queue, chance.choice(["release", "complete"]))(task).first
                        queue.enqueue(tokens=1 + chance.randrange(60))
                    else:
                        held.extend(queue.claim(2))
                    if chance.random() < 0.4:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                held[:] = kept

    held = []
    for _ in range(40):
        step(0, held)
        assert budget(conn, "b") == (len(held), sum(task.tokens for task in held))
