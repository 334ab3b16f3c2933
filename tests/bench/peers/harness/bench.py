"""What scenarios measure with: databases, loads and samples of one unit."""

import json
import subprocess
import threading
import time

from . import drivers, machine
from .drivers import Qbench, Role

# What the server has written and stored, of the database that is asked.
TALLY = """
SELECT pg_current_wal_lsn() - '0/0', (SELECT wal_fpi FROM pg_stat_wal), coalesce(sum(n_tup_ins), 0), coalesce(sum(n_tup_upd), 0), coalesce(sum(n_tup_hot_upd), 0),
       coalesce(sum(n_tup_del), 0), coalesce(sum(n_dead_tup), 0), coalesce(sum(pg_total_relation_size(relid)), 0), pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM pg_stat_user_tables
"""
TALLIED = ("wal_bytes", "full_page_images", "inserted", "updated", "hot_updated", "deleted", "dead", "size_bytes", "xids")

FOREIGN_LIMIT = 0.15  # cores of others that count as a quiet machine
SETTLED = 0.03  # cores of the server that count as its having nothing left to do
SETTLE_LIMIT = 4.0  # seconds
OWN_LIMIT = 240.0  # seconds for a scenario of a contender with a client of its own


class Bench:
    """The run's options, server and programs; scenarios get it with the unit that is measured."""

    def __init__(self, options, server, store, peers, contenders):
        self.options = options
        self.server = server
        self.store = store
        self.peers = peers
        self.contenders = contenders
        self.quiet_left = options.quiet
        self.unit = None
        self.attempt = None
        self._floor_made = False

    # The machine

    def wait_until_quiet(self):
        """Holds a sample while somebody else uses the CPU; in all at most `quiet` seconds of a run, then samples are only marked."""
        while self.quiet_left > 0:
            watch = machine.Watch(self.server.pid)
            time.sleep(0.4)
            if watch.stop()["foreign_cores"] <= FOREIGN_LIMIT:
                return
            time.sleep(2)
            self.quiet_left -= 2.4

    def _settle(self):
        """CPU seconds the server still spends on what it was given: a background worker's, autovacuum's. At most a few seconds are waited for."""
        most = SETTLE_LIMIT if not self.options.quick else 0.5
        watch = machine.Watch(self.server.pid)
        while watch.stop()["watched_s"] < most:
            short = machine.Watch(self.server.pid)
            time.sleep(0.25)
            if short.stop()["cpu_s"] < SETTLED * 0.25:
                break
        return watch.stop()["cpu_s"]

    def tally(self, database):
        with self.server.cluster.connect(database) as conn:
            # Backends report to the statistics only now and then, and at their end.
            conn.execute("SELECT pg_stat_force_next_flush()")
            return dict(zip(TALLIED, map(float, conn.execute(TALLY).fetchone()), strict=True))

    # Samples

    def sample(self, contender, point, measure, beside_floor=False):
        """Runs `measure`, which returns figures with "tasks", and records them with what the server and the machine did meanwhile. With `beside_floor` the
        bare insert rate is taken right before and right after, and the rate given as a ratio to it, too."""
        floor = self.floor()["rate"] if beside_floor else 0
        kept = self.measured(contender.database, measure)
        if beside_floor:
            floor = (floor + self.floor()["rate"]) / 2
            kept |= {"floor_rate": floor, "of_floor": kept["rate"] / floor}
        self.record(contender, point, kept)
        return kept

    def measured(self, database, measure, beside=()):
        """The figures of `measure` with those of the server and the machine for the same time. `beside`: processes that make load meanwhile."""
        self.wait_until_quiet()
        before = self.tally(database)
        watch = machine.Watch(self.server.pid, beside=(*self.server.helpers(), *beside))
        kept = measure()
        time.sleep(0.1)  # until ended backends have been waited for and have told their statistics
        kept |= watch.stop()
        after = self.tally(database)
        tasks = max(kept.get("tasks", 0), 1)
        kept |= {
            f"{name}_per_task": (after[name] - before[name]) / tasks for name in ("wal_bytes", "inserted", "updated", "hot_updated", "deleted", "size_bytes")
        }
        kept |= {name: after[name] - before[name] for name in ("wal_bytes", "full_page_images", "xids")}
        kept |= {"dead": after["dead"], "cpu_us_per_task": kept["cpu_s"] * 1e6 / tasks}
        kept["later_cpu_us_per_task"] = self._settle() * 1e6 / tasks
        return kept

    def record(self, contender, point, kept):
        self.store.add(self.unit, self.attempt, {"contender": contender.name, "scenario": self.unit.split("/")[1], "point": point, **kept})
        shown = " ".join(str(value) for value in point.values())
        told = [f"{kept['rate']:,.0f}/s"] if kept.get("rate") else []
        if kept.get("cpu_share") is not None:
            told.append(f"{kept['cpu_share'] * 100:.2f} % of a core")
        for name, label in ("p50_us", "p50"), ("p99_us", "p99"):
            if kept.get(name):
                told.append(f"{label} {kept[name] / 1000:.2f} ms")
        if kept.get("foreign_cores", 0) > FOREIGN_LIMIT:
            told.append(f"(others used {kept['foreign_cores']:.2f} cores)")
        if kept.get("driver_error"):
            told.append(kept["driver_error"][:120])
        print(f"  {time.strftime('%H:%M:%S')} {contender.name:16s} {shown:28s} {'  '.join(told)}", flush=True)

    # Load

    def qbench(self, contender, roles, seconds, **options):
        dsn = self.server.cluster.dsn(contender.database)
        return Qbench(self.peers / "qbench", dsn, roles, seconds, unnamed=contender.unnamed, **options)

    def run(self, contender, roles, seconds=None, **options):
        """Runs qbench to its end."""
        return self.qbench(contender, roles, seconds or self.options.seconds, **options).result()

    def fresh(self, contender):
        """An empty database, and a checkpoint behind it, so that no full-page image falls into the samples."""
        contender.fresh(self.server, {"PEERS": str(self.peers)})
        self.server.cluster.sql("CHECKPOINT")

    def load(self, contender, tasks, script="enqueue_many.sql", limit=None):
        """Enqueues so many tasks, a thousand at a time; returns how many there was time for."""
        if tasks <= 0:
            return 0
        if contender.file("preload.sql"):
            self.server.script(contender.file("preload.sql"), contender.database, n=tasks, payload=drivers.PAYLOAD)
            loaded = tasks
        else:
            result = self.run(contender, [contender.loaders(script=script)], limit or 3600, tasks=tasks)["load"]
            if result["errors"]:
                raise drivers.DriverError(f"loading: {result['error']}")
            loaded = result["tasks"]
        with self.server.cluster.connect(contender.database) as conn:
            conn.execute("ANALYZE")
        return loaded

    def warm(self, contender, tasks=2000):
        """Runs some tasks and analyses: every table the product writes has rows and statistics, as when it has been in use."""
        result = self.run(contender, [contender.batch_claimers()], 20, tasks=tasks)["cons"]
        with self.server.cluster.connect(contender.database) as conn:
            conn.execute("ANALYZE")
        return result["tasks"]

    def floor(self, script="insert.sql", clients=8, seconds=None):
        """The bare rate of the machine at this moment: every figure is given as a ratio to one measured beside it."""
        floor = self.contenders["floor"]
        if not self._floor_made:
            floor.fresh(self.server, {})
            self._floor_made = True
        found = self.run(floor, [Role("cons", floor.file(script), clients)], seconds or min(2.0, self.options.seconds))
        return drivers.figures(found)

    def own(self, contender, scenario, point=None, **environment):
        """A scenario that a contender runs with its own client: its program prints one JSON object for each sample."""
        self.wait_until_quiet()
        values = {
            "PEERS": self.peers,
            "BENCH_SERVER_PID": self.server.pid,
            "BENCH_SECONDS": self.options.seconds,
            "BENCH_BACKLOG": self.options.backlog,
            "BENCH_HELD_SECONDS": self.options.held_seconds,
        } | environment
        if contender.version_source.startswith("pypi:"):
            self.server.create(contender.database)
        floor = self.floor()["rate"]
        command = [contender.folder / "run", scenario]
        environment = self.server.environment(contender.database) | {name: str(value) for name, value in values.items()}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            # A client that hangs must not hang the run.
            limit = threading.Timer(OWN_LIMIT + self.options.held_seconds, child.terminate)
            limit.start()
            watch = machine.Watch(child.pid, self.server.pid)
            try:
                for line in child.stdout:
                    if line.startswith("{"):
                        found = json.loads(line)
                        # From the client's start on; what the sample itself took of the server's CPU, the client tells.
                        around = watch.stop()
                        kept = {name: around[name] for name in ("foreign_cores", "steal_cores")} | found
                        kept |= {"floor_rate": floor, "of_floor": found.get("rate", 0) / floor}
                        self.record(contender, (point or {}) | kept.pop("point", {}), kept)
            except BaseException:
                child.terminate()
                raise
            finally:
                limit.cancel()
        if child.returncode:
            raise drivers.DriverError(f"{contender.name}'s own client ended with {child.returncode}")
