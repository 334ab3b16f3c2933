"""The order in which tasks are claimed: priority descending, then enqueue order."""

import json

from stint import Queue, call, rows, until


def payloads(tasks):
    return [task.payload for task in tasks]


def test_higher_priority_first_then_enqueue_order(conn):
    queue = Queue(conn)
    for name, priority in ("a", 0), ("b", 5), ("c", -3), ("d", 5), ("e", 0), ("f", 2**31 - 1), ("g", -(2**31)):
        queue.enqueue(json.dumps(name), priority=priority)
    assert payloads(queue.claim(4)) == ["f", "b", "d", "a"]
    assert payloads(queue.claim(9)) == ["e", "c", "g"]


def test_a_batch_keeps_the_order_of_its_elements(conn):
    queue = Queue(conn)
    tasks = [{"payload": n, "priority": n % 3} for n in range(300)]
    made = call(conn, "enqueue_many", queue="q", tasks=json.dumps(tasks))
    assert [row.ordinality for row in made] == list(range(1, 301)) and all(row.created for row in made)
    expected = sorted(range(300), key=lambda n: (-(n % 3), n))
    assert payloads(queue.claim(100)) + payloads(queue.claim(1000)) == expected


def test_one_claim_merges_lanes_of_different_budgets_in_order(conn):
    for name in "abc":
        call(conn, "create_budget", name=name, max_running=100)
    queue = Queue(conn)
    lanes = [None, ["a"], ["b"], ["a", "b"], ["c"]]
    for n in range(60):
        queue.enqueue(str(n), priority=n % 2, **({"budgets": lanes[n % 5]} if n % 5 else {}))
    expected = sorted(range(60), key=lambda n: (-(n % 2), n))
    got = []
    while batch := queue.claim(7):
        got.append(payloads(batch))
    assert sum(got, []) == expected and {len(batch) for batch in got[:-1]} == {7}


def test_a_budget_without_room_gives_its_turn_to_the_next_in_order(conn):
    call(conn, "create_budget", name="narrow", max_running=2)
    queue = Queue(conn)
    for n in range(12):
        queue.enqueue(str(n), **({"budgets": ["narrow"]} if n % 2 == 0 else {}))
    assert payloads(queue.claim(7)) == [0, 1, 2, 3, 5, 7, 9]


def test_a_released_task_returns_to_its_old_place(conn):
    queue = Queue(conn)
    for n in range(4):
        queue.enqueue(str(n))
    _, second, third = queue.claim(3)
    queue.release(third)
    queue.release(second)
    assert payloads(queue.claim(9)) == [1, 2, 3]


def test_a_lapsed_task_returns_to_its_old_place(conn):
    queue = Queue(conn)
    for n in range(3):
        queue.enqueue(str(n))
    queue.lapse(queue.one())
    assert payloads(queue.claim(9)) == [0, 1, 2]


def test_a_task_that_failed_goes_to_the_end_of_its_priority(conn):
    queue = Queue(conn)
    for n in range(3):
        queue.enqueue(str(n))
    queue.enqueue("9", priority=-1)
    assert queue.fail(queue.one(), retry_in="0")[0] == "retrying"
    assert payloads(queue.claim(9)) == [1, 2, 0, 9]


def test_a_delayed_task_is_not_claimed_before_its_time_and_is_after_it(conn):
    queue = Queue(conn)
    id = queue.enqueue("1", delay="400 ms")
    assert queue.status(id) == "scheduled" and queue.task(id).why == "delayed"
    assert call(conn, "promote")[0][0] == 0 and queue.claim() == []
    until(conn, "SELECT stint.promote() >= 0 AND EXISTS (SELECT FROM stint.place_ready)")
    assert rows(conn, "SELECT clock_timestamp() >= run_at AS due FROM stint.task_facts") == [(True,)]
    assert payloads(queue.claim()) == [1]


def test_an_instant_that_has_passed_means_now(conn):
    queue = Queue(conn)
    for n, when in enumerate(("2020-01-01", "-infinity", "0001-01-01 BC", "now")):
        queue.enqueue(str(n), run_at=when)
    queue.enqueue("4", delay="0")
    assert payloads(queue.claim(9)) == [0, 1, 2, 3, 4]


def test_tasks_become_ready_in_the_order_of_their_times(conn):
    queue = Queue(conn)
    for n, delay in enumerate(("30 min", "10 min", "20 min", "10 min 1 s")):
        queue.enqueue(str(n), delay=delay)
    queue.enqueue("9", delay="1 hour", priority=1)
    with conn.transaction():
        conn.execute("UPDATE stint.place_scheduled SET run_at = run_at - interval '2 hours'; SELECT stint.rescan()")
        call(conn, "rescan")
        assert [call(conn, "promote", max=2)[0][0] for _ in range(3)] == [2, 2, 1]
    assert payloads(queue.claim(9)) == [9, 1, 3, 2, 0]


def test_a_retry_waits_as_the_backoff_says(conn):
    queue = Queue(conn, backoff_base="10 s", backoff_factor=3.0, backoff_max="60 s", backoff_jitter=0.5, max_attempts=99)
    id = queue.enqueue()
    for expected in 10, 30, 60, 60:
        answer = queue.fail(queue.one())
        assert expected * 0.5 <= answer.retry_in_ms / 1000 <= expected * 1.5
        assert queue.task(id).why == "retry"
        queue.due(id)
    assert queue.fail(queue.one(), retry_in="7 s").retry_in_ms == 7000
