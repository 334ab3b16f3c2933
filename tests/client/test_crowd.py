"""Sixty-four clients on one queue: no deadlock, no error, no task lost and none doubled."""

import collections

from stint import Queue, call, parallel, rows, value

CLIENTS, PRODUCERS, READY, EACH = 60, 4, 1000, 100
TOTAL = READY + PRODUCERS * EACH


def test_sixty_four_clients_with_retries_and_producers_do_each_task_once(conn, connect):
    """Every fifth task fails at its first attempt and every seventh is given back; some wait under a budget, some run under a heartbeat, some end in batches."""
    call(conn, "create_budget", name="b", max_running=20)
    queue = Queue(conn, max_attempts=5)
    queue.fill(READY // 2)
    queue.fill(READY // 2, budgets=["b"])
    sessions = [connect() for _ in range(CLIENTS + PRODUCERS)]

    def producer(mine):
        for n in range(EACH):
            mine.enqueue(str(n), priority=n % 3, **({"budgets": ["b"]} if n % 4 == 0 else {}))
        return [], []

    def worker(mine, number):
        leases, done = [], []
        while value(mine.conn, "SELECT count(*) FROM stint.task_outcomes") < TOTAL:
            tasks = mine.claim(1 + number % 3, worker=f"w{number}", wait="300 ms")
            leases += [task.lease for task in tasks]
            for task in tasks:
                kind = int(str(task.id).replace("-", "")[-8:-2], 16)  # random bits of the id
                if task.attempt == 1 and kind % 5 == 0:
                    assert mine.fail(task, retry_in="0" if kind % 2 else "20 ms").outcome == "retrying"
                elif task.attempt == 1 and kind % 7 == 0:
                    assert mine.release(task).first
                else:
                    if kind % 3 == 0:
                        assert mine.extend(task).status == "held"
                    done.append((task.id, mine.complete(task).outcome))
        return leases, done

    results = parallel(len(sessions), lambda n: producer(queue.by(sessions[n])) if n < PRODUCERS else worker(queue.by(sessions[n]), n))
    leases = sum((leases for leases, _ in results), [])
    done = sum((done for _, done in results), [])
    assert len(set(leases)) == len(leases), "a lease was granted twice"
    assert len(done) == TOTAL and set(outcome for _, outcome in done) == {"completed"}
    assert max(collections.Counter(id for id, _ in done).values()) == 1
    assert rows(conn, "SELECT ready, scheduled, running, completed, failed FROM stint.queue_stats") == [(0, 0, 0, TOTAL, 0)]
    assert value(conn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    assert rows(conn, "SELECT running, derived FROM stint.budget_usage()") == [(0, True)]
