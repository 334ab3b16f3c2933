#!/usr/bin/env python3
"""A worker in Python, with psycopg 3:   worker.py QUEUE [--name NAME] [--lease SECONDS] [--ahead N]

The connection comes from PGHOST and friends; put your own work into `work`. Everything else is SQL: run as many of these processes as should work at a time.

* It waits in the server: `claim(wait => …)` answers as soon as there is a task. The connection is busy meanwhile, so do not share it through a small pool.
* A second connection, in a thread, keeps the leases while the work runs, and learns there of cancellations and of leases that are lost.
* --ahead N claims up to N tasks more than it can begin, so that the next one is at hand. A claimed task holds its budgets, begun or not; so nothing is claimed
  ahead from a queue that draws on budgets. There the claim that waits in the server is all the prefetching there is: it holds nothing until it is answered.
  Do not use --ahead where tasks name budgets themselves.
* An answer that was lost with the connection is asked for again: complete and fail may be repeated, count once, and say whether this call was the one.
* SIGTERM: the task in hand is finished and reported, those not begun are released, which does not count as an attempt.
"""

import argparse
import collections
import json
import os
import random
import signal
import socket
import sys
import threading
import time

import psycopg
from psycopg.rows import dict_row

CLAIM = "SELECT id, lease, attempt, payload FROM stint.claim(%(queue)s, %(worker)s, max => %(max)s, lease_for => %(lease_for)s, wait => '20 s')"
EXTEND = "SELECT status FROM stint.extend(%(queue)s, %(id)s, %(lease)s)"
COMPLETE = """
    SELECT outcome, first FROM stint.complete(%(queue)s, %(id)s, %(lease)s, result => %(result)s::jsonb, run_id => %(run_id)s,
        model => %(model)s, input_tokens => %(input_tokens)s, output_tokens => %(output_tokens)s, model_cost => %(model_cost)s)"""
FAIL = "SELECT outcome, first FROM stint.fail(%(queue)s, %(id)s, %(lease)s, %(error)s)"
RELEASE = "SELECT outcome, first FROM stint.release(%(queue)s, %(id)s, %(lease)s)"
HAS_BUDGETS = "SELECT budgets <> '{}' AS yes FROM stint.queues WHERE queue = %(queue)s"


def work(payload, stop):
    """Your work: returns the result and what it used. `stop.is_set()` says that the task was cancelled or its lease is lost."""
    for _ in range(int(payload.get("seconds", 0) * 10)):
        if stop.is_set():
            raise RuntimeError("stopped")
        time.sleep(0.1)
    if "error" in payload:
        raise RuntimeError(payload["error"])
    return {"echo": payload}, {"model": "example-1", "input_tokens": 100, "output_tokens": 20, "model_cost": "0.0012"}


class Patience:
    """How long to wait after the nth failure in a row: longer each time, up to half a minute, and never the same as the other workers."""

    def __init__(self):
        self.failures = 0

    def wait(self, error):
        self.failures += 1
        seconds = min(30, 0.2 * 2**self.failures) * random.uniform(0.5, 1)
        print(f"{error!r}: again in {seconds:.1f} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


class Database:
    """One connection, made again when it is lost."""

    def __init__(self, name):
        self.name, self.conn = name, None

    def ask(self, query, **values):
        if self.conn is None or self.conn.closed:
            self.conn = psycopg.connect(application_name=self.name, autocommit=True, row_factory=dict_row, connect_timeout=10)
        return self.conn.execute(query, values).fetchall()

    def insist(self, query, **values):
        """Asks until there is an answer. Only for what may be asked twice."""
        patience = Patience()
        while True:
            try:
                return self.ask(query, **values)[0]
            except psycopg.OperationalError as error:  # no connection, a shutdown, a cancelled statement
                patience.wait(error)


class Worker:
    def __init__(self, options):
        self.queue, self.name, self.lease, self.ahead = options.queue, options.name, options.lease, options.ahead
        self.db, self.heart = Database(self.name), Database(f"{self.name} heartbeat")
        self.held = {}  # by lease: the task's id, and the event that says it is ours no more
        self.lock = threading.Lock()
        self.stopping = self.waiting = False

    def run(self):
        threading.Thread(target=self.heartbeat, daemon=True).start()
        waiting_here, patience = collections.deque(), Patience()
        while not self.stopping:
            try:
                waiting_here.extend(self.claim())
                patience.failures = 0
            except psycopg.OperationalError as error:
                # If the server had granted a lease, it lapses: nobody knows it.
                if not self.stopping:
                    patience.wait(error)
            while waiting_here and not self.stopping:
                self.perform(waiting_here.popleft())
        for task in waiting_here:
            self.report(RELEASE, task)

    def claim(self):
        budgeted = self.ahead and self.db.ask(HAS_BUDGETS, queue=self.queue) != [{"yes": False}]
        self.waiting = True
        try:
            if self.stopping:
                return []
            tasks = self.db.ask(CLAIM, queue=self.queue, worker=self.name, max=1 if budgeted else 1 + self.ahead, lease_for=f"{self.lease} s")
        finally:
            self.waiting = False
        with self.lock:
            for task in tasks:
                self.held[task["lease"]] = (task["id"], threading.Event())
        return tasks

    def perform(self, task):
        stop = self.held[task["lease"]][1]
        if stop.is_set():  # lost or cancelled before it was begun
            return self.report(RELEASE, task)
        try:
            result, usage = work(task["payload"], stop)
        except Exception as error:  # whatever the work did, the worker goes on
            return self.report(FAIL, task, error=f"{type(error).__name__}: {error}")
        try:
            self.report(COMPLETE, task, result=json.dumps(result), run_id=f"{self.name}/{task['id']}.{task['attempt']}", **usage)
        except psycopg.Error as error:  # the server does not take the result: too large, say
            self.report(FAIL, task, error=f"result refused: {error}")

    def report(self, query, task, **values):
        answer = self.db.insist(query, queue=self.queue, id=task["id"], lease=task["lease"], **values)
        with self.lock:
            del self.held[task["lease"]]
        print(json.dumps({"id": str(task["id"]), "attempt": task["attempt"], **answer}), flush=True)

    def heartbeat(self):
        while True:
            time.sleep(self.lease / 3)
            with self.lock:
                held = list(self.held.items())
            for lease, (id, stop) in held:
                try:
                    if self.heart.ask(EXTEND, queue=self.queue, id=id, lease=lease)[0]["status"] != "held":
                        stop.set()
                except psycopg.Error as error:  # the next beat tries again; the lease has two thirds of its time left
                    print(f"heartbeat: {error!r}", file=sys.stderr, flush=True)
                    break

    def stop(self, *_):
        self.stopping = True
        threading.Thread(target=self.end_wait, daemon=True).start()

    def end_wait(self):
        while self.waiting:  # more than once: the first may come before the statement that it is to cancel
            if self.db.conn is not None:
                self.db.conn.cancel()
            time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue")
    parser.add_argument("--name", default=f"{socket.gethostname()}:{os.getpid()}")
    parser.add_argument("--lease", type=float, default=60)
    parser.add_argument("--ahead", type=int, default=0)
    worker = Worker(parser.parse_args())
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, worker.stop)
    worker.run()


if __name__ == "__main__":
    main()
