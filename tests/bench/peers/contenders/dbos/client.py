"""One scenario with DBOS's own queue and workers; prints one JSON object for each sample."""

import concurrent.futures
import json
import os
import pathlib
import sys
import threading
import time

import psycopg
from dbos import DBOS

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from harness.machine import tree_seconds  # noqa: E402

URL = os.environ["DATABASE_URL"]
SECONDS = float(os.environ["BENCH_SECONDS"])
HELD_SECONDS = float(os.environ["BENCH_HELD_SECONDS"])
PAD = "x" * 265
TALLY = (
    """SELECT pg_current_wal_lsn() - '0/0', coalesce(sum(n_tup_ins), 0), coalesce(sum(n_tup_upd), 0), coalesce(sum(n_tup_del), 0) FROM pg_stat_user_tables"""
)
TALLIED = ("wal_bytes", "inserted", "updated", "deleted")

DBOS(config={"name": "bench", "system_database_url": URL, "log_level": "ERROR", "console_log_level": "ERROR"})
lock = threading.Lock()
waited = []


@DBOS.workflow()
def task(made: float, _pad: str) -> None:
    with lock:
        waited.append((time.time() - made) * 1e6)


def tally():
    with psycopg.connect(URL, autocommit=True) as conn:
        conn.execute("SELECT pg_stat_force_next_flush()")
        return [float(value) for value in conn.execute(TALLY).fetchone()]


def percentiles(latencies):
    ordered = sorted(latencies)
    return {f"p{share}_us": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99) if ordered}


def sample(measure):
    server = int(os.environ["BENCH_SERVER_PID"])
    before, cpu = tally(), tree_seconds(server)
    kept = measure()
    cpu, after = tree_seconds(server) - cpu, tally()
    tasks = max(1, kept["tasks"])
    kept["cpu_us_per_task"] = cpu * 1e6 / tasks
    kept |= {f"{name}_per_task": (now - then) / tasks for name, now, then in zip(TALLIED, after, before, strict=True)}
    print(json.dumps(kept), flush=True)


def enqueue_for(seconds, clients=8):
    """Eight threads that enqueue one after the other; latencies of the calls."""
    end = time.monotonic() + seconds

    def client():
        took = []
        while time.monotonic() < end:
            began = time.monotonic()
            queue.enqueue(task, time.time(), PAD)
            took.append((time.monotonic() - began) * 1e6)
        return took

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        took = [one for found in [pool.submit(client) for _ in range(clients)] for one in found.result()]
    return {"tasks": len(took), "rate": len(took) / (time.monotonic() - began), **percentiles(took)}


def drain(tasks, seconds):
    """The rate at which what was enqueued is run."""
    before, began = len(waited), time.monotonic()
    while len(waited) - before < tasks and time.monotonic() < began + seconds:
        time.sleep(0.02)
    ran = len(waited) - before
    return {"tasks": ran, "rate": ran / (time.monotonic() - began)}


def claim():
    """A backlog that is there before the workers listen would need a second process; so it is made and run down at the same time, and the rest of it is timed."""
    made = enqueue_for(SECONDS)["tasks"]
    sample(lambda: drain(max(1, made - len(waited)), 5 * SECONDS))


def waiting():
    def measure():
        began = time.monotonic()
        for turn in range(int(50 * 3 * SECONDS)):
            time.sleep(max(0, began + turn / 50 - time.monotonic()))
            queue.enqueue(task, time.time(), PAD)
        time.sleep(1.5)
        return {
            "tasks": len(waited),
            "rate": len(waited) / (time.monotonic() - began),
            **percentiles(waited),
            "point": {"path": "direct", "what": "latency", "how": "polls, by itself"},
        }

    sample(measure)


def held():
    """Enqueued and run at the same time, first alone and then beside a snapshot; tasks that ran in each second."""

    def measure():
        stop = time.monotonic() + HELD_SECONDS
        began, alone, series = time.monotonic(), 10.0 if HELD_SECONDS > 30 else 3.0, []
        with concurrent.futures.ThreadPoolExecutor(1) as pool, psycopg.connect(URL) as conn:
            producer = pool.submit(enqueue_for, HELD_SECONDS, 2)
            held_at = None
            while time.monotonic() < stop:
                before = len(waited)
                time.sleep(1)
                series.append({"ms": 1000 * len(series), "tasks": len(waited) - before})
                if held_at is None and time.monotonic() - began > alone:
                    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    conn.execute("SELECT count(*) FROM pg_class")
                    held_at = time.monotonic() - began
            producer.result()
        start = sorted(part["tasks"] for part in series if 1000 <= part["ms"] < 1000 * (held_at - 1))
        end = sorted(part["tasks"] for part in series[-max(1, len(series) // 4) :])
        ran = sum(part["tasks"] for part in series)
        return {
            "tasks": ran,
            "rate": ran / HELD_SECONDS,
            "series": series,
            "held_at_s": held_at,
            "start_rate": start[len(start) // 2] if start else None,
            "end_rate": end[len(end) // 2],
            "tasks_held": sum(part["tasks"] for part in series if part["ms"] >= 1000 * held_at),
        }

    sample(measure)


DBOS.launch()
queue = DBOS.register_queue("bench")
# Until its workers have begun to look for work.
for _ in range(20):
    queue.enqueue(task, time.time(), PAD)
began = time.monotonic()
while len(waited) < 20 and time.monotonic() < began + 30:
    time.sleep(0.02)
waited.clear()
{"enqueue": lambda: sample(lambda: enqueue_for(SECONDS)), "claim": claim, "waiting": waiting, "held": held}[sys.argv[1]]()
DBOS.destroy()
os._exit(0)
