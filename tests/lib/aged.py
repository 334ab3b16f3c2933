"""Tasks as they would be had they been enqueued long ago: rows written by hand under ids of that time.

    old = Aged(conn, "q"); id = old.completed(days=40); ready = old.ready(days=40)
"""

import os
import time
import uuid

from stint import call, value

DAY = 86_400


class Aged:
    def __init__(self, conn, queue):
        self.conn, self.queue = conn, queue
        self.history_class, self.lane = conn.execute(
            "SELECT history_class, (SELECT min(lane) FROM stint.lanes l WHERE l.queue = q.queue) FROM stint.queue_config q WHERE queue = %s", (queue,)
        ).fetchone()

    def id(self, days):
        """The id of a task that was enqueued so many days ago."""
        random = bytearray(os.urandom(10))
        random[0], random[2], random[9] = 0x70 | random[0] & 0xF, 0x80 | random[2] & 0x3F, self.history_class
        return uuid.UUID(bytes=int((time.time() - days * DAY) * 1000).to_bytes(6, "big") + bytes(random))

    def _facts(self, days, payload):
        id = self.id(days)
        call(self.conn, "create_history_partition", id=id)
        self.conn.execute(
            "INSERT INTO stint.task_facts (queue, id, lane, priority, enqueued_at, payload)"
            " VALUES (%s, %s, %s, 0, clock_timestamp() - %s * interval '1 day', %s)",
            (self.queue, id, self.lane, days, payload),
        )
        return id

    def finished(self, days, ago=None, outcome="completed", payload="{}"):
        """Enqueued so many days ago, and finished `ago` days ago (as long ago, unless given)."""
        with self.conn.transaction():
            id = self._facts(days, payload)
            at = (days if ago is None else ago,)
            self.conn.execute(
                "INSERT INTO stint.task_attempts (queue, id, attempt, lease, started_at, ended_at, ended, worker)"
                " SELECT %s, %s, 1, gen_random_uuid(), t.at, t.at, %s, 'w' FROM (SELECT clock_timestamp() - %s * interval '1 day') t (at)",
                (self.queue, id, outcome, *at),
            )
            self.conn.execute(
                "INSERT INTO stint.task_outcomes (queue, id, outcome, attempt, finished_at, incarnation, xact)"
                " SELECT %s, %s, o, 1, clock_timestamp() - %s * interval '1 day', CASE WHEN own THEN stint.incarnation() END, CASE WHEN own THEN pg_current_xact_id() END"
                " FROM (SELECT %s, %s <> 'completed') AS x (o, own)",
                (self.queue, id, *at, outcome, outcome),
            )
        return id

    def ready(self, days, payload="{}"):
        with self.conn.transaction():
            id = self._facts(days, payload)
            self.conn.execute(
                "INSERT INTO stint.place_ready (queue, id, lane, priority, seq, attempt, counted) VALUES (%s, %s, %s, 0, nextval('stint.task_seq'), 0, 0)",
                (self.queue, id, self.lane),
            )
            call(self.conn, "rescan")
        return id

    def scheduled(self, days, payload="{}"):
        with self.conn.transaction():
            id = self._facts(days, payload)
            self.conn.execute(
                "INSERT INTO stint.place_scheduled (queue, id, lane, priority, run_at, attempt, counted) VALUES (%s, %s, %s, 0, clock_timestamp() + interval '9 days', 0, 0)",
                (self.queue, id, self.lane),
            )
            call(self.conn, "rescan")
        return id


def partition(conn, id):
    """The name of the partition of a task's facts, if it is there."""
    return value(conn, "SELECT c.relname::text FROM pg_class c WHERE c.oid = to_regclass('stint.' || stint.history_partition(%s))", id)


def table(conn, id):
    """The oid of that table."""
    return value(conn, "SELECT to_regclass('stint.' || stint.history_partition(%s))::oid", id)


def maintain(conn, patient=True):
    """All there is to do for the history now; what the worker holds just then is waited for, if patient."""
    call(conn, "roll_up")  # nothing is removed before it is added up
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        [done] = call(conn, "maintain_history")
        if done.more:
            continue
        if not (patient and done.postponed):
            return done
        time.sleep(0.05)
    raise AssertionError(f"there is more to do after 20 s: {done}")
