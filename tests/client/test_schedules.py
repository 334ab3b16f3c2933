"""Schedules: a slot fires once, with its task, whoever looks; what was missed follows the catch-up policy. Which instants are slots is tested in crates/core."""

import psycopg
import pytest
from stint import Queue, call, parallel, rows, until, value

SLOTS = "SELECT slot FROM stint.schedule_fires WHERE schedule = %s ORDER BY slot"


def schedule(conn, name="s", cron="* * * * *", payload="{}", **options):
    call(conn, "create_schedule", queue="q", name=name, cron=cron, payload=payload, **options)


def behind(conn, minutes, name="s"):
    """Makes the schedule look as if it was in force for so long and nobody had fired it: what a stopped server or a clock set forward leaves.
    Call it in a transaction with what follows, or the worker comes first."""
    conn.execute(
        "UPDATE stint.schedule_config SET since = date_trunc('minute', clock_timestamp()) - make_interval(mins => %s) WHERE schedule = %s",
        (minutes, name),
    )


def fire(conn, **options):
    return call(conn, "fire_schedules", **options)[0][0]


def fires(conn, name="s"):
    return [slot for (slot,) in conn.execute(SLOTS, (name,))]


def shown(conn, name="s"):
    [row] = rows(conn, "SELECT * FROM stint.schedules WHERE schedule = %s", name)
    return row


@pytest.mark.parametrize("catch_up, expected", [("all", range(1, 11)), ("last", [10]), ("none", [10])])
def test_missed_slots_follow_the_catch_up_policy(conn, catch_up, expected):
    queue = Queue(conn)
    schedule(conn, catch_up=catch_up)
    with conn.transaction():
        behind(conn, 10)
        since = value(conn, "SELECT since FROM stint.schedule_config")
        # The minute may turn over between two statements.
        count = fire(conn)
        slots = fires(conn)
        assert len(expected) <= count <= len(expected) + 1
        assert [int((slot - since).total_seconds()) // 60 for slot in slots[: len(expected)]] in (list(expected), [11])
        assert value(conn, "SELECT count(*) FROM stint.tasks") == count
        assert fire(conn) <= 1
    assert queue.claim(20)[0].payload == {}


def test_without_catch_up_a_slot_that_is_more_than_a_minute_old_is_left_out(conn):
    Queue(conn)
    schedule(conn, catch_up="none", cron=value(conn, "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC' - interval '10 min', 'MI HH24') || ' * * *'"))
    with conn.transaction():
        behind(conn, 60)
        assert fire(conn) == 0
    assert shown(conn).next_fire > value(conn, "SELECT clock_timestamp()")


def test_sessions_that_fire_together_fire_each_slot_once(conn, connect):
    queue = Queue(conn)
    names = [f"s{n}" for n in range(5)]
    with conn.transaction():
        for name in names:
            schedule(conn, name, catch_up="all", payload=f'"{name}"')
            behind(conn, 30, name)
    sessions = [connect() for _ in range(8)]
    parallel(8, lambda n: [fire(sessions[n], max=7) for _ in range(20)])
    for name in names:
        slots = fires(conn, name)
        assert len(slots) == len(set(slots)) and len(slots) in (30, 31)
        assert value(conn, "SELECT count(*) FROM stint.task_payloads WHERE payload = to_jsonb(%s::text)", name) == len(slots)
    assert len(queue.claim(1000)) == value(conn, "SELECT count(*) FROM stint.schedule_fires")


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_schedule_that_another_session_fires_is_left_to_it(conn, connect, ending):
    Queue(conn)
    schedule(conn, cron="0 0 1 1 *")
    first, second = connect(autocommit=False), connect()
    behind(first, 527_040)  # the worker sees it when this commits
    first.execute("SAVEPOINT fired")
    assert fire(first) == 1
    assert fire(second) == 0
    if ending == "rollback":
        first.execute("ROLLBACK TO fired")
    first.commit()
    fire(second)
    until(conn, "SELECT count(*) = 1 FROM stint.schedule_fires")
    assert value(conn, "SELECT count(*) FROM stint.tasks") == 1


def test_a_slot_and_its_task_are_made_together_or_not_at_all(conn, connect):
    Queue(conn)
    session = connect(autocommit=False)
    schedule(session, cron="0 0 1 1 *")
    behind(session, 527_040)
    assert fire(session) == 1
    session.rollback()
    assert value(conn, "SELECT count(*) FROM stint.tasks") == 0
    assert rows(conn, "SELECT * FROM stint.schedule_fires") == []


def test_a_refused_task_leaves_its_error_and_the_others_go_on(conn, connect):
    with conn.transaction():
        for queue in "q", "gone":
            Queue(conn, queue)
        schedule(conn, "a", "0 0 1 1 *")
        call(conn, "create_schedule", queue="gone", name="b", cron="0 0 1 1 *", payload="{}")
        schedule(conn, "c", "0 0 1 1 *", payload='"' + "x" * 2000 + '"')
        schedule(conn, "d", "0 0 1 1 *")
        for name in "abcd":
            behind(conn, 527_040, name)
        # As dropping it does; and a limit that was lowered.
        conn.execute("DELETE FROM stint.lanes WHERE queue = 'gone'; DELETE FROM stint.queue_config WHERE queue = 'gone'; SET LOCAL stint.max_payload = '1kB'")
        assert fire(conn) == 4
        assert fire(conn) == 0
    assert value(conn, "SELECT count(*) FROM stint.tasks") == 2
    assert shown(conn, "a").last_error is None and shown(conn, "d").last_task is not None
    assert 'queue "gone" does not exist' in shown(conn, "b").last_error and shown(conn, "b").last_fire is None
    assert '"payload" has 2' in shown(conn, "c").last_error and shown(conn, "c").last_error_slot is not None


def test_a_paused_schedule_fires_nothing_and_makes_nothing_up(conn):
    Queue(conn)
    with conn.transaction():
        schedule(conn, catch_up="all", paused=True)
        behind(conn, 60)
        assert fire(conn) == 0 and shown(conn).next_fire is None and shown(conn).paused
        call(conn, "pause_schedule", name="s")
        call(conn, "resume_schedule", name="s")
        assert fire(conn) <= 1
        behind(conn, 60)
        call(conn, "resume_schedule", name="s")  # not paused: changes nothing
        call(conn, "pause_schedule", name="s")
        assert fire(conn) == 0
        call(conn, "resume_schedule", name="s")
        assert fire(conn) <= 1


def test_a_clock_that_is_set_back_fires_nothing_twice(conn):
    Queue(conn)
    with conn.transaction():
        schedule(conn, catch_up="all")
        # Fired by a clock that was three hours ahead.
        conn.execute(
            "INSERT INTO stint.schedule_slots (schedule, slot, fired_at, queue_was, id)"
            " VALUES ('s', date_trunc('minute', clock_timestamp()) + interval '3 hours', clock_timestamp(), 'q', gen_random_uuid())"
        )
        behind(conn, 60)
        assert fire(conn) == 0
        assert shown(conn).next_fire == shown(conn).last_fire + value(conn, "SELECT interval '1 minute'")


def test_a_held_key_lets_no_second_task_begin(conn):
    queue = Queue(conn, key_retention="0")
    with conn.transaction():
        schedule(conn, catch_up="all", key="only one")
        behind(conn, 5)
        assert fire(conn) >= 5
    assert value(conn, "SELECT count(*) FROM stint.tasks") == 1
    assert rows(conn, "SELECT DISTINCT id FROM stint.schedule_fires") == [(queue.one().id,)]


def test_the_task_is_what_the_schedule_says(conn):
    payload, labels = '{"a": 1.10, "n": 123456789012345678901234567890, "e": 1e400}', '{"team": 1.0}'
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn)
    with conn.transaction():
        schedule(
            conn, cron="0 0 1 1 *", payload=payload, labels=labels, priority=7, agent="reader", tokens=5, budgets=["b"], max_attempts=2, lease_for="7 s", key="k",
        )  # fmt: skip
        behind(conn, 527_040)
        fire(conn)
    given = conn.execute("SELECT %s::jsonb::text, %s::jsonb::text", (payload, labels)).fetchone()
    found = "SELECT p.payload::text, t.labels::text FROM stint.task_payloads p JOIN stint.tasks t USING (queue, id)"
    assert conn.execute(found).fetchone() == given
    task = queue.task(shown(conn).last_task)
    assert (task.priority, task.agent, task.tokens, task.key) == (7, "reader", 5, "k")
    assert rows(conn, "SELECT max_attempts, lease_for::text FROM stint.task_facts") == [(2, "00:00:07")]
    assert 6000 < queue.one().expires_in_ms <= 7000 and value(conn, "SELECT running FROM stint.budgets") == 1


def test_a_hundred_slots_are_kept_and_none_fires_again(conn):
    Queue(conn)
    with conn.transaction():
        schedule(conn, catch_up="all")
        behind(conn, 150)
        fired = fire(conn)
        assert fired >= 150 and len(fires(conn)) == 100
        assert fire(conn) <= 1
        assert value(conn, "SELECT count(*) FROM stint.tasks") <= fired + 1


def test_max_bounds_what_one_call_fires(conn):
    Queue(conn)
    with conn.transaction():
        schedule(conn, catch_up="all")
        behind(conn, 20)
        assert [fire(conn, max=8) for _ in range(2)] == [8, 8]
        assert 4 <= fire(conn, max=8) <= 5


def test_looking_for_due_slots_writes_nothing(conn, connect):
    Queue(conn)
    schedule(conn, cron="0 0 29 2 *")
    session = connect(autocommit=False)
    assert fire(session) == 0
    assert value(session, "SELECT pg_current_xact_id_if_assigned()") is None


def test_a_copy_of_a_database_fires_nothing_until_it_is_activated(conn):
    Queue(conn)
    with conn.transaction():
        schedule(conn, cron="0 0 1 1 *")
        behind(conn, 527_040)
        conn.execute("UPDATE stint.meta SET database = 1")
        call(conn, "rescan")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="copy"):
        fire(conn)
    assert fires(conn) == []
    call(conn, "activate")
    fire(conn)
    assert len(fires(conn)) == 1


def test_the_worker_fires_what_is_due(conn):
    Queue(conn)
    schedule(conn, cron="0 0 1 1 *")
    behind(conn, 527_040)
    until(conn, "SELECT count(*) = 1 FROM stint.tasks WHERE status = 'ready'")


def test_a_dropped_schedule_is_gone_and_its_tasks_stay(conn):
    queue = Queue(conn)
    with conn.transaction():
        schedule(conn, cron="0 0 1 1 *")
        behind(conn, 527_040)
        fire(conn)
    call(conn, "drop_schedule", name="s")
    assert rows(conn, "SELECT * FROM stint.schedules") == [] and fires(conn) == []
    assert len(queue.claim(5)) == 1
    schedule(conn)


def test_next_fire_reads_the_wall_clock_of_its_zone(conn):
    ask = "SELECT stint.next_fire(%s, %s, %s::timestamptz)::text"
    conn.execute("SET timezone = 'UTC'")
    assert value(conn, ask, "30 2 * * *", "Europe/Berlin", "2024-03-30 12:00Z") == "2024-03-31 01:00:00+00"
    assert value(conn, ask, "@daily", "asia/kathmandu", "2024-01-01 00:00Z") == "2024-01-01 18:15:00+00"


@pytest.mark.parametrize(
    "change, state, names, hint",
    [
        ({"cron": "61 * * * *"}, "22023", "61 * * * *", "five fields"),
        ({"cron": "every day"}, "22023", "every day", "five fields"),
        ({"cron": "0 0 0 1 1 *"}, "22023", "0 0 0 1 1 *", "five fields"),
        ({"cron": "0 0 30 2 *"}, "22023", "never fires", "day of month"),
        ({"cron": None}, "22004", "cron", "cron"),
        ({"time_zone": "Europe/Belin"}, "22023", "Europe/Belin", "Europe/Berlin"),
        ({"time_zone": None}, "22004", "time_zone", "time_zone"),
        ({"queue": "p"}, "42704", '"p"', 'Did you mean "q"'),
        ({"name": ""}, "22023", "name", "character"),
        ({"name": "taken"}, "42710", "taken", "another name"),
        ({"payload": None}, "22004", "payload", "payload"),
        ({"catch_up": "some"}, "22023", "some", "'none', 'last' or 'all'"),
        ({"budgets": ["x"]}, "42704", '"x"', "stint.budgets"),
        ({"tokens": -1}, "22023", "tokens", "0 or more"),
        ({"max_attempts": 0}, "22023", "max_attempts", "1 or more"),
        ({"delay": "-1 s"}, "22023", "delay", "longer"),
    ],
)
def test_a_bad_schedule_is_refused_by_name(conn, change, state, names, hint):
    Queue(conn)
    schedule(conn, "taken")
    with pytest.raises(psycopg.Error) as error:
        call(conn, "create_schedule", **({"queue": "q", "name": "s", "cron": "@daily", "payload": "{}"} | change))
    assert error.value.sqlstate == state
    assert names in error.value.diag.message_primary and hint in error.value.diag.message_hint


@pytest.mark.parametrize("verb", ["pause_schedule", "resume_schedule", "drop_schedule"])
def test_an_unknown_schedule_is_named_with_the_nearest(conn, verb):
    Queue(conn)
    schedule(conn, "nightly")
    with pytest.raises(psycopg.errors.UndefinedObject, match='schedule "nigthly" does not exist') as error:
        call(conn, verb, name="nigthly")
    assert 'Did you mean "nightly"' in error.value.diag.message_hint
    with pytest.raises(psycopg.errors.NullValueNotAllowed):
        call(conn, verb, name=None)
