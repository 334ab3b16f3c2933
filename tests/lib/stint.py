"""The verbs as Python calls, and what tests of several sessions need.

    call(conn, "claim", queue="q", worker="w", max=3)       # rows with the function's columns as attributes
    queue = Queue(conn); task = queue.enqueue(); [held] = queue.claim(); queue.complete(held)

A test must hold whether or not the maintenance worker sweeps and promotes meanwhile: `lapse` therefore makes a
lease run out and sweeps it in one transaction, and `due` does the same for a scheduled task.
"""

import threading
import time

from psycopg import sql
from psycopg.rows import namedtuple_row

USAGE = {"model": "m1", "input_tokens": 100, "cached_tokens": 40, "output_tokens": 7, "model_cost": "0.50", "compute_cost": "0.25"}


def rows(conn, query, *params):
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query, params or None).fetchall()


def value(conn, query, *params):
    row = conn.execute(query, params or None).fetchone()
    return row[0] if row else None


def call(conn, verb, **args):
    """SELECT * FROM stint.verb(name => value, …)."""
    named = sql.SQL(", ").join(sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in args)
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(sql.SQL("SELECT * FROM stint.{}({})").format(sql.Identifier(verb), named), args).fetchall()


class Queue:
    """One queue seen through one connection."""

    def __init__(self, conn, name="q", create=True, **settings):
        self.conn, self.name = conn, name
        if create:
            call(conn, "create_queue", queue=name, **settings)

    def by(self, conn):
        """The same queue through another connection."""
        return Queue(conn, self.name, create=False)

    def enqueue(self, payload="{}", **options):
        return call(self.conn, "enqueue", queue=self.name, payload=payload, **options)[0][0]

    def fill(self, count, **options):
        """`count` tasks in one statement."""
        named = "".join(f", {name} => %({name})s" for name in options)
        self.conn.execute(
            f"SELECT stint.enqueue(%(q)s, to_jsonb(n){named}) FROM generate_series(1, %(n)s) AS n",
            options | {"q": self.name, "n": count},
        )

    def claim(self, max=1, worker="w", **options):
        return call(self.conn, "claim", queue=self.name, worker=worker, max=max, **options)

    def one(self, **options):
        """The only task that a claim gets."""
        [task] = self.claim(**options)
        return task

    def _end(self, verb, task, options):
        [answer] = call(self.conn, verb, queue=self.name, **{"id": task.id, "lease": task.lease} | options)
        return answer

    def complete(self, task, **options):
        return self._end("complete", task, options)

    def fail(self, task, **options):
        return self._end("fail", task, {"error": "it broke"} | options)

    def release(self, task, **options):
        return self._end("release", task, options)

    def extend(self, task, **options):
        return self._end("extend", task, options)

    def cancel(self, id, **options):
        [answer] = call(self.conn, "cancel", queue=self.name, id=id, **options)
        return answer

    def task(self, id):
        [task] = rows(self.conn, "SELECT * FROM stint.tasks WHERE queue = %s AND id = %s", self.name, id)
        return task

    def status(self, id):
        return self.task(id).status

    def attempts(self, id):
        return rows(self.conn, "SELECT * FROM stint.attempts WHERE queue = %s AND id = %s ORDER BY attempt", self.name, id)

    def ended(self, id):
        return [attempt.ended for attempt in self.attempts(id)]

    def result(self, id):
        return value(self.conn, "SELECT result::text FROM stint.task_payloads WHERE queue = %s AND id = %s", self.name, id)

    def expire(self, task):
        """Makes the lease run out now, without sweeping. Only inside a transaction, or the worker may sweep it."""
        self.conn.execute(
            "UPDATE stint.place_running SET started_at = clock_timestamp() - interval '1 s' - (expires_at - started_at),"
            " expires_at = clock_timestamp() - interval '1 s', extended_until = NULL WHERE queue = %s AND id = %s",
            (self.name, task.id),
        )
        call(self.conn, "rescan")

    def lapse(self, task):
        """Makes the lease run out and sweeps."""
        with self.conn.transaction():
            self.expire(task)
            call(self.conn, "rescan")
            return call(self.conn, "sweep")[0]

    def due(self, id):
        """Makes a scheduled task due and promotes it."""
        with self.conn.transaction():
            self.conn.execute(
                "UPDATE stint.place_scheduled SET run_at = clock_timestamp() WHERE queue = %s AND id = %s", (self.name, id)
            )
            call(self.conn, "rescan")
            call(self.conn, "promote")

    def place(self, id):
        """Where the task is, with everything the storage keeps of it there, leases excepted."""
        found = rows(
            self.conn,
            """SELECT p.place, p.row - 'lease' AS row FROM (
                   SELECT 'ready' AS place, queue, id, to_jsonb(w) AS row FROM stint.place_ready w
                   UNION ALL SELECT 'scheduled', queue, id, to_jsonb(s) FROM stint.place_scheduled s
                   UNION ALL SELECT 'running', queue, id, to_jsonb(r) FROM stint.place_running r
                   UNION ALL SELECT 'outcome', queue, id, to_jsonb(o) FROM stint.task_outcomes o) p
               WHERE p.queue = %s AND p.id = %s""",
            self.name, id,
        )  # fmt: skip
        return [tuple(row) for row in found]


def usage_of(attempt):
    """What an attempt's row says it used."""
    return {
        name: (str(got) if name.endswith("cost") and got is not None else got)
        for name, got in ((name, getattr(attempt, name)) for name in USAGE)
    }


def budget(conn, name):
    """(running, tokens) in use of a budget as claims see it; also that it is what the running rows reserve."""
    [found] = rows(conn, "SELECT running, tokens, derived FROM stint.budget_usage() WHERE budget = %s", name)
    assert found.derived, f"live usage of {name} is not what its running rows reserve"
    return found.running, found.tokens


def waiting(conn, pid, event, timeout=10):
    """Waits until the backend waits for something of this type (Lock, Extension …)."""
    until(conn, f"SELECT coalesce((SELECT wait_event_type = '{event}' FROM pg_stat_activity WHERE pid = {pid}), false)", timeout)


def until(conn, query, timeout=10):
    deadline = time.monotonic() + timeout
    while not value(conn, query):
        assert time.monotonic() < deadline, f"not true after {timeout} s: {query}"
        time.sleep(0.005)


def background(work, *args):
    """Runs work in a thread; join() gives its result or raises its error."""
    return _Thread(work, args)


class _Thread:
    def __init__(self, work, args):
        self._result = self._error = None
        self._thread = threading.Thread(target=self._run, args=(work, args), daemon=True)
        self._thread.start()

    def _run(self, work, args):
        try:
            self._result = work(*args)
        except BaseException as error:
            self._error = error

    def done(self):
        return not self._thread.is_alive()

    def join(self, timeout=60):
        self._thread.join(timeout)
        assert self.done(), f"still running after {timeout} s"
        if self._error is not None:
            raise self._error
        return self._result


def parallel(count, work):
    """Runs work(0) … work(count - 1) at once; their results in order."""
    barrier = threading.Barrier(count)

    def start(number):
        barrier.wait(30)
        return work(number)

    threads = [background(start, number) for number in range(count)]
    return [thread.join(120) for thread in threads]
