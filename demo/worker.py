#!/usr/bin/python3
"""A reader in Python: claims documents, reads them, completes them.

    worker.py NAME            as it should be
    worker.py NAME --twice    sends every callback twice, as a worker does that lost the first answer
    worker.py NAME --late     oversleeps its lease on its first two tasks, calls back all the same, then behaves

The connection comes from PGHOST and friends. SIGTERM ends it after the task in hand.
"""

import json
import os
import signal
import sys
import time
from decimal import Decimal

import psycopg

import licences

PACE = int(os.environ["READ_PACE"])
WINDOW = int(os.environ["READ_WINDOW"])
PRICE_IN = Decimal(os.environ["PRICE_IN"])
PRICE_OUT = Decimal(os.environ["PRICE_OUT"])
LATE_LEASE = "2 s"
LATE_PATIENCE = 60  # seconds a late worker waits for others to move on without it

CLAIM = """
    select id, attempt, lease, payload->>'path' as path
    from stint.claim('extract', worker => %(worker)s, lease_for => %(lease_for)s::interval, wait => '1 s')"""

EXTEND = """
    select status from stint.extend('extract', %(id)s, %(lease)s, progress => %(progress)s)"""

# The answer is kept in the same transaction as the call, so that the report can show both.
COMPLETE = """
    insert into callbacks (worker, id, attempt, call, outcome, first)
    select %(worker)s, %(id)s, %(attempt)s, %(call)s, c.outcome, c.first
    from stint.complete('extract', %(id)s, %(lease)s,
        result => %(result)s, run_id => %(run_id)s, trace_id => %(trace_id)s, model => 'parser-1',
        input_tokens => %(input_tokens)s, output_tokens => %(output_tokens)s,
        model_cost => %(model_cost)s, confidence => %(confidence)s::real) as c
    returning outcome"""

STANDING = "select status, attempt from stint.tasks where queue = 'extract' and id = %(id)s"


class Worker:
    def __init__(self, name, twice=False, late=False):
        self.name = name
        self.twice = twice
        self.lateness = ["until it is taken back", "until another has finished it"] if late else []
        self.stopping = False
        self.db = psycopg.connect(application_name=name, autocommit=True, row_factory=psycopg.rows.dict_row)

    def one(self, statement, **values):
        return self.db.execute(statement, values).fetchone()

    def run(self):
        while not self.stopping:
            task = self.one(CLAIM, worker=self.name, lease_for=LATE_LEASE if self.lateness else None)
            if task and self.lateness:
                self.be_late(task, self.lateness.pop(0))
            elif task:
                self.work(task)

    def work(self, task):
        findings, tokens_in, tokens_out = licences.read(task["path"])
        if not self.read_on(task, tokens_in):
            return  # the lease is lost: whoever holds the task now will answer for it
        self.complete(task, "on time", findings, tokens_in, tokens_out)
        if self.twice:
            self.complete(task, "again", findings, tokens_in, tokens_out)

    def read_on(self, task, tokens):
        """The time a model would take; after each full window the lease is renewed. False when it was lost."""
        done = 0
        while tokens - done > WINDOW:
            time.sleep(WINDOW / PACE)
            done += WINDOW
            progress = json.dumps({"read": done, "of": tokens})
            if self.one(EXTEND, progress=progress, **lease_of(task))["status"] != "held":
                return False
        time.sleep((tokens - done) / PACE)
        return True

    def be_late(self, task, how_long):
        """Do the work, oversleep until the task has gone its way without us, and call back then."""
        findings, tokens_in, tokens_out = licences.read(task["path"])
        give_up = time.monotonic() + LATE_PATIENCE
        while not self.stopping and time.monotonic() < give_up:
            now = self.one(STANDING, id=task["id"])
            lapsed = now["status"] != "running" or now["attempt"] != task["attempt"]
            if lapsed and (now["status"] == "completed" or how_long == "until it is taken back"):
                break
            time.sleep(0.01)
        self.complete(task, "late", findings, tokens_in, tokens_out)

    def complete(self, task, call, findings, tokens_in, tokens_out):
        cost = (tokens_in * PRICE_IN + tokens_out * PRICE_OUT) / 1_000_000
        self.one(
            COMPLETE, worker=self.name, attempt=task["attempt"], call=call,
            result=json.dumps(findings), run_id=f"{self.name}/{os.getpid()}", trace_id=f"{task['id']}.{task['attempt']}",
            input_tokens=tokens_in, output_tokens=tokens_out, model_cost=cost, confidence=findings["confidence"],
            **lease_of(task))


def lease_of(task):
    return {"id": task["id"], "lease": task["lease"]}


def main(arguments):
    if not arguments or set(arguments[1:]) - {"--twice", "--late"}:
        print(__doc__, file=sys.stderr)
        return 2
    worker = Worker(arguments[0], twice="--twice" in arguments, late="--late" in arguments)

    def stop(_signal, _frame):
        worker.stopping = True

    signal.signal(signal.SIGTERM, stop)
    worker.run()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except psycopg.Error as trouble:
        sys.exit(f"{sys.argv[1]}: {trouble}")
