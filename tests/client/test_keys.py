"""Idempotency keys: at most one task for each queue and key while the key is kept."""

import json
import random

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, value, waiting


def test_a_repeat_returns_the_first_id_and_changes_nothing(conn):
    queue = Queue(conn)
    id = queue.enqueue("1", key="k", priority=1)
    assert queue.enqueue("2", key="k", priority=9, delay="1 hour") == id
    assert queue.enqueue("3", key="K") != id
    assert Queue(conn, "other").enqueue("4", key="k") != id
    assert queue.one().payload == 1
    queue.cancel(id)
    assert queue.enqueue("5", key="k") == id


@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_ten_sessions_enqueuing_one_key_make_exactly_one_task(conn, connect, first):
    queue = Queue(conn)
    holder = connect(autocommit=False)
    held = queue.by(holder).enqueue('"first"', key="k")
    sessions = [connect() for _ in range(10)]
    others = [background(lambda s=session: queue.by(s).enqueue('"other"', key="k")) for session in sessions]
    for session in sessions:
        waiting(conn, session.info.backend_pid, "Lock")
    holder.commit() if first == "commits" else holder.rollback()
    ids = {other.join() for other in others}
    assert len(ids) == 1 and (ids == {held}) == (first == "commits")
    assert rows(conn, "SELECT count(*) AS tasks, count(DISTINCT id) AS ids FROM stint.task_facts") == [(1, 1)]
    assert value(conn, "SELECT count(*) FROM stint.place_ready") == 1


def test_batches_that_share_a_thousand_keys_in_random_order_do_not_deadlock(conn, connect):
    Queue(conn)
    sessions = [connect(), connect()]
    for trial in range(3):

        def batch(number):
            keys = list(range(1000))
            random.Random(trial * 2 + number).shuffle(keys)
            tasks = json.dumps([{"payload": number, "key": f"{trial}-{key}"} for key in keys])
            made = call(sessions[number], "enqueue_many", queue="q", tasks=tasks)
            return {key: row for key, row in zip(keys, made)}

        one, two = parallel(2, batch)
        assert all(one[key].id == two[key].id and one[key].created != two[key].created for key in range(1000))
    assert value(conn, "SELECT count(*) FROM stint.task_facts") == 3000


def test_a_thousand_keys_in_random_order_do_not_deadlock_one_by_one_beside_batches(conn, connect):
    queue = Queue(conn)
    sessions = [connect() for _ in range(4)]

    def session(number):
        mine, keys = queue.by(sessions[number]), list(range(1000))
        random.Random(number).shuffle(keys)
        if number < 2:
            return [mine.enqueue(key=f"{key}") for key in keys]
        return [call(mine.conn, "enqueue_many", queue="q", tasks=json.dumps([{"payload": 1, "key": f"{key}"} for key in keys[at::5]])) for at in range(5)]

    parallel(4, session)
    assert value(conn, "SELECT count(*) FROM stint.task_facts") == value(conn, "SELECT count(*) FROM stint.task_keys") == 1000


def test_a_batch_that_repeats_a_key_makes_its_first_element(conn):
    queue = Queue(conn)
    tasks = [{"payload": n, "key": key} for n, key in enumerate(["b", "a", "b", None, "a", None])]
    made = call(conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    assert [row.created for row in made] == [True, True, False, True, False, True]
    assert made[2].id == made[0].id and made[4].id == made[1].id
    assert [task.payload for task in queue.claim(9)] == [0, 1, 3, 5]


def test_a_refused_batch_holds_no_key(conn):
    queue = Queue(conn)
    with pytest.raises(psycopg.Error):
        call(conn, "enqueue_many", queue="q", tasks=json.dumps([{"payload": 1, "key": "k"}, {"payload": 2, "priority": "x"}]))
    queue.enqueue("3", key="k")
    assert queue.one().payload == 3


def test_a_key_outlives_its_retention_while_its_task_lives(conn):
    queue = Queue(conn, key_retention="0")
    for state in "ready", "scheduled", "running":
        id = queue.enqueue("1", key=state, **({"delay": "1 hour"} if state == "scheduled" else {}))
        if state == "running":
            task = queue.claim(9)[-1]
            assert task.id == id
        call(conn, "expire_keys")
        assert queue.enqueue("2", key=state) == id
    queue.complete(task)
    call(conn, "expire_keys")
    assert queue.enqueue("3", key="running") != id
    assert value(conn, "SELECT count(*) FROM stint.task_keys") == 3


def test_a_key_is_kept_for_its_retention_after_its_task_finished(conn):
    queue = Queue(conn, key_retention="1 day")
    id = queue.enqueue(key="k")
    queue.complete(queue.one())
    assert call(conn, "expire_keys")[0][0] == 0
    assert queue.enqueue(key="k") == id
    with conn.transaction():
        conn.execute("UPDATE stint.task_keys SET kept_until = now() - interval '1 s'")
        assert call(conn, "expire_keys")[0][0] == 1
    assert queue.enqueue(key="k") != id


def test_a_key_expiring_while_it_is_asked_for_gives_one_live_task(conn, connect):
    """Finish, expire and enqueue race on one key: there is never a second live task for it."""
    queue = Queue(conn, key_retention="0")
    sessions = [connect() for _ in range(4)]

    def work(number):
        mine = queue.by(sessions[number])
        for _ in range(150):
            if number == 0:
                call(mine.conn, "expire_keys")
            elif number == 1:
                for task in mine.claim():
                    mine.complete(task)
            else:
                mine.enqueue(str(number), key="k")

    watch = connect()
    done = background(parallel, 4, work)
    while not done.done():
        live = "SELECT (SELECT count(*) FROM stint.place_ready) + (SELECT count(*) FROM stint.place_running)"
        assert value(watch, live) <= 1
    done.join()


def test_under_repeatable_read_a_key_taken_meanwhile_is_a_serialization_failure(conn, connect):
    queue = Queue(conn)
    other = connect(autocommit=False)
    other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    other.execute("SELECT 1 FROM stint.queues")
    id = queue.enqueue(key="k")
    with pytest.raises(psycopg.errors.SerializationFailure):
        queue.by(other).enqueue(key="k")
    other.rollback()
    assert queue.by(other).enqueue(key="k") == id
    other.rollback()
