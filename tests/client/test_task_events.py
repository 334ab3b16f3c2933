"""The feed of tasks' changes of status: every committed one once, in an order that a reader can resume from anywhere."""

import json
import random
import time
from itertools import pairwise

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, until, value

# What may follow what. A late result ends a task that waits again; a retry makes a finished one wait again.
FOLLOWS = {
    None: {"scheduled", "blocked", "ready", "failed", "cancelled"},
    "scheduled": {"ready", "completed", "cancelled"},
    "blocked": {"scheduled", "ready", "completed", "failed", "cancelled"},
    "ready": {"running", "completed", "cancelled"},
    "running": {"scheduled", "ready", "completed", "failed", "cancelled"},
    "failed": {"ready", "blocked"},
    "cancelled": {"ready", "blocked"},
    "completed": set(),
}


@pytest.fixture
def queue(conn):
    return Queue(conn, events=True, max_attempts=2, backoff_base="1 hour")


def events(queue, after=0, tick=True, **options):
    if tick:
        queue.conn.execute("SELECT stint.tick()")
    return call(queue.conn, "task_events", queue=queue.name, after=after, **options)


def statuses(queue, id):
    return [(event.status, event.attempt) for event in events(queue) if event.id == id]


def test_every_change_of_status_of_a_task_is_told_with_its_attempt_and_worker(queue):
    id = queue.enqueue(delay="1 hour")
    queue.due(id)
    queue.fail(queue.one(worker="w1"))
    queue.due(id)
    queue.fail(queue.one(worker="w2"), error="it broke again")
    queue.retry(id)
    task = queue.one(worker="w3")
    call(queue.conn, "await", queue="q", id=id, lease=task.lease, event="e")
    call(queue.conn, "emit", event="e")
    queue.lapse(queue.one(worker="w4"))
    queue.complete(queue.one(worker="w5"))
    told = events(queue)
    assert [(event.status, event.attempt, event.worker, event.why) for event in told] == [
        ("scheduled", 0, None, None),
        ("ready", 0, None, None),
        ("running", 1, "w1", None),
        ("scheduled", 1, None, None),
        ("ready", 1, None, None),
        ("running", 2, "w2", None),
        ("failed", 2, None, "it broke again"),
        ("ready", 2, None, None),
        ("running", 3, "w3", None),
        ("scheduled", 3, None, 'awaits event "e"'),
        ("ready", 3, None, None),
        ("running", 4, "w4", None),
        ("ready", 4, None, None),
        ("running", 5, "w5", None),
        ("completed", 5, None, None),
    ]
    assert {event.id for event in told} == {id}
    assert all(a.pos + 1 == b.pos and a.changed_at <= b.changed_at for a, b in pairwise(told))


def test_tasks_that_wait_for_others_are_told_of_once_for_each_change(conn):
    queue = Queue(conn, events=True, strict_groups=True, max_attempts=1)
    root = queue.enqueue(group_key="a")
    turn = queue.enqueue(group_key="a", depends_on=[other := queue.enqueue()])
    fails = queue.enqueue(depends_on=[root])
    first, second = queue.claim(2)
    queue.fail(first)
    assert queue.task(turn).why == f"waits for task {other}"
    queue.complete(second)
    assert statuses(queue, turn) == [("blocked", 0), ("ready", 0)]
    assert statuses(queue, fails) == [("blocked", 0), ("failed", 0)]


def test_what_changes_no_status_is_no_event(queue):
    first, second = queue.enqueue(), queue.enqueue(delay="1 hour")
    for id in first, second:
        call(queue.conn, "reprioritize", queue="q", id=id, priority=7)
    task = queue.one()
    queue.extend(task)
    queue.cancel(first)
    assert [event.status for event in events(queue)] == ["ready", "scheduled", "running"]


def test_what_is_rolled_back_never_happened(queue, connect):
    session = connect(autocommit=False)
    mine = queue.by(session)
    kept = mine.enqueue()
    session.execute("SAVEPOINT s")
    mine.enqueue()
    session.execute("ROLLBACK TO s")
    assert events(queue) == []
    session.commit()
    queue.by(session).cancel(kept)
    session.rollback()
    assert [(event.id, event.status) for event in events(queue)] == [(kept, "ready")]


def test_a_queue_keeps_events_only_on_request(conn):
    queue = Queue(conn)
    queue.enqueue()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match='"q" keeps no events'):
        events(queue)
    with pytest.raises(psycopg.errors.UndefinedObject):
        events(Queue(conn, "gone", create=False))
    assert value(conn, "SELECT count(*) FROM stint.task_event_log") == 0
    call(conn, "alter_queue", queue="q", events=True)
    assert rows(conn, "SELECT events FROM stint.queues") == [(True,)] and events(queue) == []
    queue.one()
    assert [event.status for event in events(queue)] == ["running"]


def test_a_feed_that_begins_anew_refuses_positions_of_the_one_before(conn):
    queue = Queue(conn, events=True)
    queue.enqueue()
    [before] = events(queue)
    call(conn, "alter_queue", queue="q", events=False)
    queue.enqueue()
    call(conn, "alter_queue", queue="q", events=True)
    with pytest.raises(psycopg.errors.SnapshotTooOld, match="not kept any more"):
        events(queue, after=before.pos)
    assert events(queue) == []
    queue.enqueue()
    [after] = events(queue)
    assert after.pos > before.pos
    # And so does another queue of that name.
    conn.execute("SELECT stint.drop_queue('q', force => true)")
    queue = Queue(conn, events=True)
    with pytest.raises(psycopg.errors.SnapshotTooOld):
        events(queue, after=after.pos)
    queue.enqueue()
    [again] = events(queue)
    assert again.pos > after.pos


def test_a_position_that_was_never_given_is_refused(queue):
    queue.enqueue()
    [event] = events(queue)
    assert events(queue, after=event.pos) == []
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="beyond the last position"):
        events(queue, after=event.pos + 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        events(queue, after=-1)


def test_a_tick_that_may_yet_be_rolled_back_shows_nothing(queue, connect):
    """Its positions could be given to other events afterwards."""
    session = connect(autocommit=False)
    session.execute("SELECT stint.tick()")  # keeps all others from ticking
    queue.enqueue()
    session.execute("SELECT stint.tick()")
    assert value(session, "SELECT count(*) FROM stint.task_event_ticks") == 1
    assert events(queue.by(session), tick=False) == [] and events(queue, tick=False) == []
    session.commit()
    assert len(events(queue, tick=False)) == 1


def test_the_feed_is_the_same_for_all_readers_and_complete_while_transactions_overlap(conn, connect):
    """Clients that roll back, keep transactions open, lapse, retry and cancel; readers that follow in steps of their own."""
    queue = Queue(conn, events=True, max_attempts=2, backoff_base="0", strict_groups=True)
    writers, readers = [connect() for _ in range(6)], [connect() for _ in range(2)]
    known = [queue.enqueue() for _ in range(5)]
    busy = [True]

    def step(mine, chance, made):
        id = chance.choice(known[-30:])
        match chance.randrange(9):
            case 0 | 1 | 2:
                on = chance.sample(known[-6:], chance.randrange(3))
                group = {"group_key": chance.choice("ab")} if chance.random() < 0.4 else {}
                made.append(mine.enqueue(depends_on=on, on_dependency_failure=chance.choice(["fail", "run"]), **group))
            case 3:
                mine.cancel(id)
            case 4:
                mine.retry(id)
            case _:
                for task in mine.claim(2, worker="w"):
                    match chance.randrange(6):
                        case 0:
                            mine.fail(task)
                        case 1:
                            mine.release(task)
                        case 2:
                            mine.snooze(task, duration="0")
                        case 3:
                            mine.expire(task)
                            call(mine.conn, "sweep")
                            if chance.random() < 0.5:
                                mine.complete(task)
                        case _:
                            mine.complete(task)

    def writer(number):
        chance, conn = random.Random(number), writers[number]
        mine = queue.by(conn)
        for _ in range(120):
            made = []
            try:
                with conn.transaction(force_rollback=chance.random() < 0.2):
                    step(mine, chance, made)
                    if chance.random() < 0.3:
                        with conn.transaction(force_rollback=chance.random() < 0.5):
                            step(mine, chance, [])
                    if chance.random() < 0.3:
                        time.sleep(chance.random() / 50)
                known.extend(id for id in made if chance.random() < 0.9)
            except (psycopg.errors.DeadlockDetected, psycopg.errors.NoDataFound):
                pass  # several verbs in one transaction; a task of a transaction that rolled back

    def reader(number):
        chance, conn, seen, last = random.Random(number), readers[number], [], False
        while True:
            more = events(queue.by(conn), after=seen[-1].pos if seen else 0, max=chance.randint(1, 40), tick=chance.random() < 0.3 or last)
            seen += more
            if not more and last:
                return seen
            last = not busy[0]

    following = [background(reader, number) for number in range(2)]
    parallel(6, writer)
    until(conn, "SELECT NOT EXISTS (SELECT FROM stint.place_scheduled) AND NOT EXISTS (SELECT FROM stint.follow_ups)", 30)  # what the worker does after
    busy[0] = False
    one, two = (reader.join(120) for reader in following)
    everything = events(queue, max=10_000)
    assert len(everything) > 500 and one == two == everything
    assert all(a.pos < b.pos for a, b in pairwise(everything)) and value(conn, "SELECT count(*) FROM stint.task_event_log") == len(everything)

    told = {}
    for event in everything:
        told.setdefault(event.id, []).append(event)
    assert {id: story[-1].status for id, story in told.items()} == dict(rows(conn, "SELECT id, status FROM stint.tasks"))
    for story in told.values():
        path = [None] + [event.status for event in story]
        assert all(b in FOLLOWS[a] for a, b in pairwise(path)), path
        assert [event.attempt for event in story] == sorted(event.attempt for event in story)
    # Every attempt, outcome and retry there was is in it, and nothing else.
    ran = sorted((event.id, event.attempt) for event in everything if event.status == "running")
    assert ran == sorted(rows(conn, "SELECT id, attempt FROM stint.task_attempts UNION ALL SELECT id, attempt FROM stint.place_running"))
    ended = sorted((event.id, event.status) for event in everything if event.status in ("completed", "failed", "cancelled"))
    assert ended == sorted(rows(conn, "SELECT id, outcome FROM stint.task_outcomes UNION ALL SELECT id, outcome FROM stint.task_retries"))

    chance = random.Random(1)
    for at in [0, len(everything) - 1] + [chance.randrange(len(everything)) for _ in range(40)]:
        assert events(queue, after=everything[at].pos, max=10_000, tick=False) == everything[at + 1 :]


def test_a_reader_sleeps_in_the_server_until_something_happens(queue, connect):
    reading = queue.by(connect())
    began = time.monotonic()
    assert events(reading, tick=False, wait="300 ms") == [] and time.monotonic() - began >= 0.3
    waiter = background(lambda: events(reading, tick=False, wait="30 s"))
    time.sleep(0.1)
    id = queue.enqueue()
    assert [event.id for event in waiter.join(10)] == [id]
    with reading.conn.transaction(), pytest.raises(psycopg.errors.ActiveSqlTransaction):
        reading.conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        events(reading, tick=False, wait="1 s")


def aged(conn, end):
    """Makes the ticks up to a position older than their time. The worker may be removing some of them, in another order than this hand."""
    while True:
        try:
            return conn.execute("UPDATE stint.task_event_ticks SET at = at - interval '8 days' WHERE end_pos <= %s", (end,))
        except psycopg.errors.DeadlockDetected:
            pass


def test_old_events_go_bit_by_bit_and_whoever_missed_them_is_told(queue):
    for _ in range(4):
        queue.fill(10)
        told = events(queue)
    assert len(told) == 40
    aged(queue.conn, told[24].pos)  # two ticks end before, if each round of ten was one
    while value(queue.conn, "SELECT stint.trim_task_events(max => 3)"):
        pass
    kept = events(queue, tick=False)
    gone = 40 - len(kept)
    assert 0 < gone < 40 and kept == told[gone:]
    until(queue.conn, f"SELECT count(*) = {40 - gone} FROM stint.task_event_log")
    assert events(queue, after=told[gone - 1].pos, tick=False) == kept
    for at in range(gone - 1):
        with pytest.raises(psycopg.errors.SnapshotTooOld) as error:
            events(queue, after=told[at].pos, tick=False)
    assert "stint.task_event_retention" in error.value.diag.message_hint
    # Once all are gone the last position still holds, and the next event follows it.
    aged(queue.conn, told[-1].pos)
    until(queue.conn, "SELECT stint.trim_task_events() = 0 AND NOT EXISTS (SELECT FROM stint.task_event_log)")
    assert events(queue, after=told[-1].pos) == [] == events(queue)
    queue.enqueue()
    [event] = events(queue, after=told[-1].pos)
    assert event.pos == told[-1].pos + 1
    assert value(queue.conn, "SELECT count(*) FROM stint.task_event_ticks") == 2


def test_a_reader_beside_a_trim_gets_all_or_an_error(conn, connect):
    queue = Queue(conn, events=True)
    for _ in range(30):
        queue.fill(20)
        told = events(queue)
        told = events(queue, max=10_000)
    sessions = [connect() for _ in range(3)]

    def act(number):
        mine = queue.by(sessions[number])
        if number == 0:
            for at in range(0, 600, 15):
                aged(mine.conn, told[at].pos)
                mine.conn.execute("SELECT stint.trim_task_events(max => 7)")
            return
        chance = random.Random(number)
        for _ in range(60):
            at = chance.randrange(599)
            try:
                assert events(mine, after=told[at].pos, max=10_000, tick=False) == told[at + 1 :]
            except psycopg.errors.SnapshotTooOld:
                pass
            kept = events(mine, max=10_000, tick=False)
            assert kept == told[-len(kept) :]

    parallel(3, act)


def test_reading_on_costs_the_same_however_long_the_feed_is_and_however_busy_others_are(conn):
    queue, busy = Queue(conn, events=True), Queue(conn, "busy", events=True)
    queue.enqueue()
    [first] = events(queue)

    def buffers():
        [[plan]] = rows(conn, f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT * FROM stint.task_events('q', after => {first.pos})")
        plan = plan[0]["Plan"]
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    buffers()
    before = buffers()
    for _ in range(10):
        call(conn, "enqueue_many", queue="busy", tasks=json.dumps([{"payload": 1}] * 2000))
        conn.execute("SELECT stint.tick()")
    assert len(events(busy, max=10_000)) == 10_000
    assert buffers() <= before + 10
    queue.enqueue()
    assert [event.pos for event in events(queue, after=first.pos)] == [first.pos + 1]
