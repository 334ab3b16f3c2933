"""Fair queues: groups share a queue by weight, in tokens; nobody's backlog, priority, budget or rollback is at another's cost."""

import threading
import time

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, until, value


@pytest.fixture
def queue(conn):
    return Queue(conn, fair=True)


def weigh(queue, group, weight=None):
    call(queue.conn, "set_weight", queue=queue.name, group_key=group, weight=weight)


def groups(tasks):
    return "".join(task.payload for task in tasks)


def fill(queue, group, count, **options):
    """So many tasks of a group, whose payload is its key."""
    named = "".join(f", {name} => %({name})s" for name in options)
    queue.conn.execute(
        f"SELECT stint.enqueue(%(q)s, to_jsonb(%(g)s::text), group_key => %(g)s{named}) FROM generate_series(1, %(n)s)",
        options | {"q": queue.name, "g": group, "n": count},
    )


def shares(queue):
    found = rows(queue.conn, "SELECT * FROM stint.fair_shares WHERE queue = %s ORDER BY group_key NULLS FIRST", queue.name)
    return {row.group_key: row for row in found}


def turns(queue, count, **usage):
    """The groups of the next tasks, claimed one by one and completed."""
    order = ""
    for _ in range(count):
        task = queue.one()
        order += task.payload
        queue.complete(task, **usage)
    return order


def test_groups_have_turns_by_weight_in_tokens_and_not_in_tasks(queue):
    weigh(queue, "b", 3)
    fill(queue, "a", 12, tokens=100)
    fill(queue, "b", 12, tokens=100)
    fill(queue, "c", 12, tokens=300)
    order = turns(queue, 24)
    # In any 16 turns with all three waiting: a once for c's third, b three times for a's one.
    got = {group: order[:15].count(group) for group in "abc"}
    assert got["b"] in (8, 9, 10) and got["a"] in (3, 4) and got["c"] in (1, 2), order


def test_two_groups_share_tokens_by_weight_under_parallel_claimers(queue, connect):
    """Each of the workers has at most one task under way, so what the groups got by weight differs by one largest task for each, and one more."""
    workers, largest = 6, 900
    weigh(queue, "b", 3)
    fill(queue, "a", 900, tokens=300)
    fill(queue, "b", 700, tokens=900)
    fill(queue, "b", 700, tokens=100)
    sessions = [connect() for _ in range(workers)]
    got, lock, stop = {"a": 0, "b": 0}, threading.Lock(), threading.Event()
    worst = []

    def worker(number):
        mine = queue.by(sessions[number])
        for turn in range(120):
            with mine.conn.transaction():
                tasks = mine.claim(1 + (number + turn) % 3)
            with lock:
                for task in tasks:
                    got[task.payload] += task.tokens
                worst.append(abs(got["a"] - got["b"] / 3))
            for task in tasks:
                # Some use less or more than predicted, which is settled.
                mine.complete(task, input_tokens=task.tokens)
        stop.set()

    parallel(workers, worker)
    assert got["a"] > 20_000
    # Three tasks a claim at the most.
    assert max(worst) <= largest * 3 * (workers + 1), worst
    seen = shares(queue)
    assert seen["a"].tokens == got["a"] and seen["b"].tokens == got["b"]
    assert abs(seen["a"].virtual_time - seen["b"].virtual_time) <= largest
    assert abs(got["a"] - got["b"] / 3) <= largest


def test_a_backlog_does_not_delay_a_newcomer(queue):
    fill(queue, "a", 10_000, tokens=1000, priority=9)
    turns(queue, 50)
    fill(queue, "b", 3, tokens=1000)
    assert turns(queue, 6) == "bababa"


def test_priority_and_order_count_within_a_group(queue):
    for n, priority in enumerate((0, 5, 0)):
        for group in "ab":
            queue.enqueue(f'"{group}{n}"', group_key=group, priority=priority * (group == "a"), tokens=10)
    queue.enqueue('"none"', priority=2)
    assert [queue.one().payload for _ in range(7)] == ["a1", "none", "b0", "a0", "b1", "a2", "b2"]


def test_a_claim_of_many_has_the_same_turns(queue):
    for group in "abcdefghij":
        fill(queue, group, 30, tokens=10)
    tasks = queue.claim(100)
    assert {group: groups(tasks).count(group) for group in "abcdefghij"} == dict.fromkeys("abcdefghij", 10)
    weigh(queue, "a", 4)
    fill(queue, "a", 60, tokens=10)
    tasks = queue.claim(39)
    assert groups(tasks).count("a") == 12 and groups(tasks).count("b") == 3
    # One far behind gets them all, however many are looked at at a time.
    fill(queue, "z", 200, tokens=1)
    assert groups(queue.claim(30)).count("z") == 30
    assert len(queue.claim(10_000)) == 300 + 60 + 200 - 100 - 39 - 30
    assert queue.claim() == []


def test_what_is_rolled_back_is_not_charged(queue, connect):
    fill(queue, "a", 20, tokens=1000)
    fill(queue, "b", 20, tokens=1000)
    assert turns(queue, 4) == "abab"
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), queue.conn.transaction():
            assert queue.one().payload == "a"
            raise ZeroDivisionError
        with queue.conn.transaction():
            with pytest.raises(ZeroDivisionError), queue.conn.transaction():
                assert groups(queue.claim(5)) in ("aabba", "aaabb", "ababa")
                raise ZeroDivisionError
    session = connect(autocommit=False)
    assert queue.by(session).one().payload == "a"
    queue.conn.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
    assert shares(queue)["a"].tokens == shares(queue)["b"].tokens == 2000
    assert turns(queue, 4) == "abab"


def test_what_an_open_transaction_claims_is_charged_at_once(queue, connect):
    fill(queue, "a", 5, tokens=1000)
    fill(queue, "b", 5, tokens=100)
    sessions = [connect(autocommit=False) for _ in range(3)]
    assert [queue.by(session).one().payload for session in sessions] == ["a", "b", "b"]
    for session in sessions:
        session.rollback()
    assert shares(queue)["a"].tokens == shares(queue)["b"].tokens == 0
    assert queue.one().payload == "a"


ENDS = {
    "complete": lambda queue, task: queue.complete(task, input_tokens=4000, output_tokens=1000),
    "fail": lambda queue, task: queue.fail(task, retryable=False, input_tokens=4500, cached_tokens=400, output_tokens=500),
    "complete_many": lambda queue, task: call(queue.conn, "complete_many", queue="q",
        items=f'[{{"id": "{task.id}", "lease": "{task.lease}", "output_tokens": 5000}}]'),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_group_that_used_more_than_predicted_waits_accordingly(queue, end):
    fill(queue, "a", 10, tokens=1000)
    fill(queue, "b", 10, tokens=1000)
    task = queue.one()
    assert task.payload == "a"
    ENDS[end](queue, task)
    assert shares(queue)["a"].tokens == 5000
    assert turns(queue, 7) == "bbbbbab"


@pytest.mark.parametrize("end", ["release", "snooze"])
def test_what_was_given_back_is_not_charged(queue, end):
    fill(queue, "a", 5, tokens=1000)
    fill(queue, "b", 5, tokens=1000)
    task = queue.one()
    getattr(queue, end)(task)
    assert shares(queue)["a"].tokens == 0
    assert turns(queue, 2) == "ab"


@pytest.mark.parametrize("end", ["lapse", "no usage", "cancel", "await"])
def test_without_reported_usage_the_prediction_stays_charged(queue, end):
    fill(queue, "a", 5, tokens=1000)
    fill(queue, "b", 5, tokens=1000)
    task = queue.one()
    if end == "lapse":
        queue.lapse(task)
    elif end == "no usage":
        queue.complete(task)
    elif end == "cancel":
        queue.cancel(task.id)
        queue.release(task)
    else:
        call(queue.conn, "await", queue="q", id=task.id, lease=task.lease, event="never")
    assert shares(queue)["a"].tokens == 1000
    assert turns(queue, 2) == "ba"


def test_an_end_that_was_rolled_back_settles_nothing(queue):
    fill(queue, "a", 5, tokens=1000)
    task = queue.one()
    with pytest.raises(ZeroDivisionError), queue.conn.transaction():
        queue.complete(task, input_tokens=9)
        raise ZeroDivisionError
    assert shares(queue)["a"].tokens == 1000
    queue.complete(task, input_tokens=9)
    assert shares(queue)["a"].tokens == 9


def test_a_group_that_was_idle_saves_up_no_turns(queue):
    fill(queue, "a", 1, tokens=10)
    fill(queue, "b", 300, tokens=10)
    turns(queue, 101)
    fill(queue, "a", 100, tokens=10)
    assert turns(queue, 10).count("a") == 5
    # Nor where the others' tasks are all taken each time, some at once.
    queue.claim(1000)
    for _ in range(20):
        fill(queue, "d", 5, tokens=10)
        assert groups(queue.claim(100)) == "ddddd"
    fill(queue, "e", 50, tokens=10)
    fill(queue, "d", 50, tokens=10)
    assert turns(queue, 20).count("e") in range(10, 17)
    queue.claim(1000)
    fill(queue, "a", 100, tokens=10)
    fill(queue, "b", 200, tokens=10)
    # Nor does one that waited without room.
    call(queue.conn, "create_budget", name="narrow", max_running=0)
    fill(queue, "c", 50, tokens=10, budgets=["narrow"])
    turns(queue, 100)
    call(queue.conn, "alter_budget", name="narrow", max_running=9)
    assert turns(queue, 12).count("c") in (4, 5)


def test_a_group_over_its_budget_does_not_hold_up_others(queue):
    call(queue.conn, "create_budget", name="a", max_tokens=1000)
    call(queue.conn, "create_budget", name="wide", max_tokens=3000)
    call(queue.conn, "alter_queue", queue="q", budgets=["wide"])
    fill(queue, "a", 10, tokens=1000, budgets=["a"], priority=9)
    fill(queue, "b", 10, tokens=1000)
    held = queue.claim(10)
    # a has room for one, and the queue for three.
    assert sorted(groups(held)) == ["a", "b", "b"]
    assert queue.claim() == []
    queue.complete(next(task for task in held if task.payload == "b"), input_tokens=1000)
    assert queue.one().payload == "b"
    queue.complete(next(task for task in held if task.payload == "a"), input_tokens=1000)
    assert queue.one().payload == "a"


def test_of_one_group_the_lanes_of_all_its_budgets_count_together(queue):
    call(queue.conn, "create_budget", name="one", max_running=100)
    call(queue.conn, "create_budget", name="two", max_running=100)
    for budgets in ([], ["one"], ["two"]):
        fill(queue, "a", 10, tokens=10, **({"budgets": budgets} if budgets else {}))
    fill(queue, "b", 30, tokens=10)
    assert groups(queue.claim(20)).count("a") == 10
    assert turns(queue, 10).count("a") == 5


def test_a_claim_for_some_agents_has_the_turns_of_their_tasks(queue):
    fill(queue, "a", 20, tokens=10, agent="x")
    for group in "bc":
        fill(queue, group, 20, tokens=10, agent="y")
    weigh(queue, "b", 3)
    order = ""
    for n in range(16):
        order += queue.one(agents=["y"]).payload
        queue.one(agents=["x"])
    # The claims of the others do not take away what b is due.
    assert order.count("b") == 12 and order.count("c") == 4, order
    # Far down among groups that have nothing for an agent, its task is found.
    for n in range(60):
        queue.enqueue(group_key=f"g{n}", agent="y")
    queue.enqueue('"found"', group_key="last", agent="z")
    assert queue.one(agents=["z"]).payload == "found"
    assert queue.claim(agents=["z"]) == []


def test_tasks_without_a_prediction_are_charged_all_the_same(queue):
    call(queue.conn, "create_budget", name="b", max_tokens=10**9, default_tokens=70)
    queue.enqueue('"a"', group_key="a")
    queue.enqueue('"b"', group_key="b", tokens=0)
    queue.enqueue('"c"', group_key="c", budgets=["b"])
    assert sorted(groups(queue.claim(3))) == ["a", "b", "c"]
    assert {key: row.tokens for key, row in shares(queue).items() if key} == {"a": 1000, "b": 1000, "c": 70}


def test_claims_that_race_for_the_same_rows_charge_what_they_got(queue, connect):
    for group in "abc":
        for n in range(40):
            queue.enqueue(f'"{group}"', group_key=group, tokens=1 + n * 37 % 100)
    sessions = [connect() for _ in range(8)]

    def worker(number):
        mine, got = queue.by(sessions[number]), []
        while tasks := mine.claim(3):
            got += [(task.payload, task.tokens) for task in tasks]
        return got

    got = [task for tasks in parallel(8, worker) for task in tasks]
    assert len(got) == 120
    for group in "abc":
        assert shares(queue)[group].tokens == sum(tokens for key, tokens in got if key == group)


def test_fair_and_strict_groups_go_together(conn):
    queue = Queue(conn, fair=True, strict_groups=True)
    fill(queue, "a", 4, tokens=1000)
    fill(queue, "b", 4, tokens=250)
    running = queue.claim(8)
    assert sorted(groups(running)) == ["a", "b"]
    assert queue.claim() == []
    order = groups(running)
    for _ in range(6):
        for task in running:
            queue.complete(task, input_tokens=task.tokens)
        running = queue.claim()
        order += groups(running)
    assert order[2:].startswith("bbba"), order


def test_fairness_can_be_turned_on_and_off_while_tasks_wait(queue):
    plain = Queue(queue.conn, "p")
    fill(plain, "a", 5, tokens=10)
    call(queue.conn, "alter_queue", queue="p", fair=True)
    fill(plain, "b", 5, tokens=10)
    fill(plain, "a", 5, tokens=10)
    # What waited stands together.
    assert sorted(turns(plain, 3)) == ["a", "a", "b"]
    held = plain.claim(3)
    call(queue.conn, "alter_queue", queue="p", fair=False)
    plain.enqueue('"z"', priority=9, group_key="z")
    assert plain.one().payload == "z"
    for task in held:
        plain.release(task)
    assert groups(plain.claim(100)) == "aaaa" + "bbbb" + "aaaa"
    assert plain.claim() == []
    assert value(queue.conn, "SELECT count(*) FROM stint.place_running WHERE share IS NOT NULL") == 0


def test_weights_apply_from_then_on_and_can_be_taken_away(queue):
    fill(queue, "a", 60, tokens=10)
    fill(queue, "b", 60, tokens=10)
    assert turns(queue, 8).count("a") == 4
    weigh(queue, "a", 3)
    assert turns(queue, 8).count("a") == 6
    assert shares(queue)["a"].weight == 3
    weigh(queue, "a")
    assert turns(queue, 8).count("a") == 4
    for weight in (0, -1, float("nan"), float("inf"), 1001):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="weight"):
            weigh(queue, "a", weight)


def test_explain_says_whose_turn_it_is(queue):
    fill(queue, "a", 1, tokens=1000)
    fill(queue, "b", 1, tokens=1000)
    turns(queue, 1)
    id = queue.enqueue('"a"', group_key="a", tokens=10)
    assert 'group "a" has its turn after 1 that got less' in call(queue.conn, "explain", queue="q", id=id)[0][0]
    turns(queue, 1)
    assert call(queue.conn, "explain", queue="q", id=id)[0][0] == "ready: the next claim gets it"


def lanes(conn):
    return value(conn, "SELECT count(*) FROM stint.lanes WHERE group_key IS NOT NULL")


def tidy(conn):
    return [call(conn, "tidy_lanes")[0][0] for _ in range(4)]


def tidied(conn, done):
    """Lanes go when every transaction is over that was under way when they were closed, in whatever database of the server."""
    deadline = time.monotonic() + 10
    while not value(conn, done):
        assert time.monotonic() < deadline, f"not true after 10 s: {done}"
        tidy(conn)
        time.sleep(0.01)


def test_lanes_go_with_the_last_task_of_their_group(queue, connect):
    for n in range(50):
        queue.enqueue(group_key=f"g{n}")
    scheduled = queue.enqueue(group_key="later", delay="1 hour")
    assert lanes(queue.conn) == 51
    running = queue.claim(1)
    for task in queue.claim(100):
        queue.complete(task)
    # Somebody who has just enqueued into one of them is waited for.
    session = connect(autocommit=False)
    open = queue.by(session).enqueue(group_key="g40")
    before = lanes(queue.conn)
    tidy(queue.conn)
    assert lanes(queue.conn) == before
    session.commit()
    tidied(queue.conn, "SELECT count(*) = 3 FROM stint.lanes WHERE group_key IS NOT NULL")
    taken = queue.one()
    assert taken.id == open
    queue.due(scheduled)
    assert queue.one().id == scheduled
    # In a database that came from a server with more transactions, too.
    queue.conn.execute("UPDATE stint.lanes SET closed = '900000000000' WHERE group_key = 'g40'")
    queue.complete(taken)
    tidied(queue.conn, "SELECT NOT EXISTS (SELECT FROM stint.lanes WHERE group_key = 'g40')")
    # A task that comes back to life gets a lane again.
    queue.fail(running[0], retryable=False)
    tidy(queue.conn)
    assert queue.retry(running[0].id).outcome == "retried"
    assert queue.one().id == running[0].id


def test_a_transaction_that_keeps_an_old_snapshot_enqueues_into_a_lane_that_stays(queue, connect):
    session = connect()
    session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    mine = queue.by(session)
    mine.enqueue(group_key="g")
    with session.transaction():
        session.execute("SELECT 1 FROM stint.queues")
        queue.complete(queue.one())
        tidied(queue.conn, "SELECT NOT EXISTS (SELECT FROM stint.lanes WHERE group_key IS NOT NULL)")
        id = mine.enqueue(group_key="g")
    assert queue.one().id == id
    fill(queue, "a", 3, tokens=10)
    fill(queue, "b", 3, tokens=10)
    with session.transaction():
        assert groups(mine.claim(2)) == "ab"


def test_empty_lanes_are_not_looked_at_again_and_again(queue):
    """Also not by a session that only ever ends one task and claims the next, and so may not tell others that a lane is empty."""
    for n in range(300):
        queue.enqueue(group_key=f"g{n}", tokens=1)
    fill(queue, "busy", 100, tokens=1000)
    task = queue.one()

    def next():
        nonlocal task
        found = call(queue.conn, "finish_and_claim", queue="q", id=task.id, lease=task.lease, worker="w")
        task = found[1]

    for _ in range(320):
        next()
    assert task.payload == "busy"
    read = "SELECT sum(idx_scan) FROM pg_stat_user_tables WHERE relid = 'stint.place_ready'::regclass"
    queue.conn.execute("SELECT pg_stat_force_next_flush()")
    before = value(queue.conn, read)
    for _ in range(20):
        next()
    queue.conn.execute("SELECT pg_stat_force_next_flush()")
    assert value(queue.conn, read) - before <= 20 * 10


def test_no_task_is_lost_to_a_lane_that_goes(queue, connect):
    """Producers whose transactions stay open for a while, claimers, and somebody who tidies up all the time."""
    sessions = [connect() for _ in range(7)]
    total, over = 4 * 60, threading.Event()

    def producer(number):
        mine = queue.by(sessions[number])
        for n in range(60):
            with mine.conn.transaction():
                mine.enqueue(group_key=f"g{n // 3}")
                if n % 3 == number % 3:
                    mine.conn.execute("SELECT pg_sleep(0.005)")

    def claimer(number):
        mine, done, idle = queue.by(sessions[number]), 0, 0
        while not over.is_set() and idle < 20_000:
            tasks = mine.claim(4)
            idle = 0 if tasks else idle + 1
            for task in tasks:
                mine.complete(task)
                done += 1
            if value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") == total:
                over.set()
        return done

    def tidier(number):
        removed = 0
        while not over.is_set():
            removed += call(sessions[number], "tidy_lanes")[0][0]
        return removed

    work = [producer] * 4 + [claimer] * 2 + [tidier]
    done = background(parallel, 7, lambda n: work[n](n)).join(90)
    assert sum(done[4:6]) == total
    assert done[6] > 10


def test_batches_that_make_lanes_of_the_same_groups_wait_in_a_line(queue, connect):
    sessions = [connect() for _ in range(2)]

    def enqueue(number):
        for turn in range(30):
            order = range(40) if number else reversed(range(40))
            tasks = ", ".join(f'{{"payload": 1, "group_key": "{turn} {n}"}}' for n in order)
            call(sessions[number], "enqueue_many", queue="q", tasks=f"[{tasks}]")

    parallel(2, enqueue)
    assert lanes(queue.conn) == 30 * 40
    assert len(queue.claim(10_000)) == 2 * 30 * 40


def test_an_enqueue_and_a_claim_in_one_transaction_see_the_new_group(queue, connect):
    with queue.conn.transaction():
        id = queue.enqueue(group_key="new")
        assert queue.one().id == id
    other = queue.by(connect())
    other.claim()
    id = queue.enqueue(group_key="newer")
    assert other.one().id == id


def test_a_waiting_claim_is_woken_by_a_new_group(queue, connect):
    session = connect()
    waiting = background(queue.by(session).claim, 1, "w")
    assert waiting.join() == []
    waiting = background(lambda: queue.by(session).claim(wait="20 s"))
    until(queue.conn, f"SELECT coalesce((SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = {session.info.backend_pid}), false)")
    id = queue.enqueue(group_key="new")
    assert [task.id for task in waiting.join(5)] == [id]


def test_a_transaction_that_claimed_of_a_fair_queue_cannot_be_prepared(queue, connect):
    queue.enqueue(group_key="a")
    queue.enqueue(group_key="a")
    session = connect()
    session.execute("BEGIN")
    queue.by(session).one()
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="fair queue"):
        session.execute("PREPARE TRANSACTION 'p'")
    assert shares(queue)["a"].tokens == 0


def test_finish_and_claim_has_the_next_turn(queue):
    fill(queue, "a", 3, tokens=100)
    fill(queue, "b", 3, tokens=100)
    task = queue.one()
    found = call(queue.conn, "finish_and_claim", queue="q", id=task.id, lease=task.lease, worker="w", input_tokens=1000)
    assert [row.payload for row in found[1:]] == ["b"]
    assert shares(queue)["a"].tokens == 1000


def test_after_a_crash_all_groups_start_equal(cluster):
    server = cluster()
    server.create_database("app")
    with server.connect("app") as conn:
        queue = Queue(conn, fair=True)
        fill(queue, "a", 20, tokens=1000)
        fill(queue, "b", 20, tokens=1000)
        task = queue.one()
        queue.complete(task, input_tokens=100_000)
        held = queue.one()
    server.crash()
    server.start()
    with server.connect("app") as conn:
        queue = Queue(conn, create=False)
        assert turns(queue, 6).count("a") == 3
        queue.complete(held, input_tokens=1)
        assert turns(queue, 6).count("a") == 3
        assert call(conn, "check") == []


def test_groups_beyond_the_table_have_their_turns_together(cluster):
    server = cluster(config={"stint.max_groups": 16})
    server.create_database("app")
    with server.connect("app") as conn:
        queue = Queue(conn, fair=True)
        for n in range(60):
            fill(queue, f"g{n}", 4, tokens=1 + n)
        assert len(queue.claim(200)) == 200
        fill(queue, "new", 2, tokens=1)
        assert len(queue.claim(60)) == 42
        assert queue.claim() == []
