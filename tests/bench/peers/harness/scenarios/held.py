"""The rate over time while something holds old row versions: 4 clients one by one, a producer that keeps 5,000 tasks ready, and after a start without it a transaction
(or slot) that stays open to the end. pg_stint has to get through all tasks; the others, which mostly collapse, are given a time."""

import statistics
import threading
import time

from .. import buffers, drivers, holds
from ..drivers import Role

TITLE = "Held snapshot: rate and claim latency over time, one by one, 4 clients"
CLIENTS, READY = 4, 5000
# Who is measured in every round.
REPEATED = ("pg_stint", "hand")
# Script of the claims and of the tasks for each load; only the first is for everyone.
LOADS = {
    "plain": ("claim.sql", "enqueue_many.sql"),
    "budgets": ("claim_two_budgets.sql", "enqueue_two_budgets.sql"),
    "churn": ("claim_churn.sql", "enqueue_many.sql"),
}


def variants(_options):
    return tuple(f"{hold}+{load}" for load in LOADS for hold in holds.ALL if load == "plain" or hold != "none")


def rounds(options, contender, variant):
    """The first is the one that people look at; the others show that a hold is a hold. A contender that collapses does so once: it takes a minute each time."""
    return options.rounds if variant == "snapshot+plain" and contender.name in REPEATED else 1


def runs(contender, variant):
    if contender.driver == "own":
        return variant == "snapshot+plain" and "held" in contender.own_scenarios
    load = variant.partition("+")[2]
    return contender.can(*LOADS[load]) or load == "plain" and contender.can("claim_batch.sql", "ticker.sql")


def _limit(options, contender, variant):
    if contender.name == "pg_stint":
        return options.held_limit
    return options.held_seconds if variant in ("snapshot+plain", "none+plain") else options.held_seconds / 2


def seconds(options, contender, variant):
    whole = options.held_tasks / 4000 if contender.name == "pg_stint" else options.held_seconds
    return min(whole, _limit(options, contender, variant)) + 10 + options.overhead


def run(bench, contender, variant):
    if contender.driver == "own":
        bench.own(contender, "held", {"hold": "snapshot", "load": "plain"})
        return
    hold, _, load = variant.partition("+")
    claim, enqueue = (contender.file(name) for name in LOADS[load])
    options = bench.options
    bench.fresh(contender)
    bench.load(contender, READY, enqueue.name)
    if load == "plain":
        bench.warm(contender, 2000)
    alone = 2.0 if options.quick else 10.0
    limit = _limit(options, contender, variant) + alone
    # Some are run before anything is held.
    most = int(options.held_tasks * 1.15) if contender.name == "pg_stint" else 0
    producer = contender.producer(READY)
    producer.script = enqueue
    roles = [Role("cons", claim, CLIENTS) if claim else contender.batch_claimers(), producer]
    if ticker := contender.file("ticker.sql"):
        roles.append(Role("tick", ticker, 1, {"rate": 1000 / contender.poll_ms, "per": 0}))

    def measure():
        driver = bench.qbench(contender, roles, limit, tasks=most, backlog=READY - 2000, interval_ms=1000)
        began = time.monotonic()
        try:
            time.sleep(alone)
            with holds.ALL[hold](bench.server, contender):
                held_at = time.monotonic() - began
                seen = _Buffers(bench, contender, claim.name if claim else "claim_batch.sql")
                try:
                    result = driver.result()
                finally:
                    seen.stop()
        finally:
            driver.stop()
        return _figures(result, held_at, [(round(at - began, 1), count) for at, count in seen.found])

    bench.sample(contender, {"hold": hold, "load": load}, measure)


def _figures(result, held_at, seen):
    """The start without the hold beside the last quarter of the time with it."""
    series = result["cons"]["series"]
    start = [part for part in series if part["ms"] >= 1000 and part["ms"] + 1000 <= held_at * 1000]  # the first second is the clients' own
    held = [part for part in series if part["ms"] >= held_at * 1000]
    end = held[-max(1, len(held) // 4) :]

    def over(parts, what):
        found = [what(part) for part in parts if part.get("claim")]
        return statistics.median(found) if found else None

    kept = drivers.figures(result) | {"held_at_s": round(held_at, 1), "series": series, "buffers": seen, "tasks_held": sum(part["tasks"] for part in held)}
    for name, parts in ("start", start), ("end", end):
        kept |= {
            f"{name}_rate": statistics.median(part["tasks"] for part in parts) if parts else None,
            f"{name}_p99_us": over(parts, lambda part: part["claim"]["p99_us"]),
            f"{name}_p50_us": over(parts, lambda part: part["claim"]["p50_us"]),
        }
    return kept


class _Buffers(threading.Thread):
    """Looks every few seconds how many buffers a claim reads."""

    def __init__(self, bench, contender, script):
        super().__init__(daemon=True)
        self.bench, self.contender, self.script = bench, contender, script
        self.every = 2.0 if bench.options.quick else 6.0
        self.found = []
        self.over = threading.Event()
        self.start()

    def run(self):
        while not self.over.is_set():
            try:
                self.found.append((time.monotonic(), buffers.of_claim(self.bench, self.contender, self.script, claims=1)["buffers"]))
            except Exception as error:  # the queue was empty just then, or the server is going away
                self.found.append((time.monotonic(), None))
                print(f"    buffers: {error}", flush=True)
            self.over.wait(self.every)

    def stop(self):
        self.over.set()
        self.join()
