"""Sets up, measures unit by unit, reports."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

from . import contender as contenders
from . import machine, options, scenarios, store
from .bench import Bench
from .places import DOCUMENTS, ROOT, installed
from .plan import units
from .server import Server


def capture(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build():
    """The release build as users get it, whatever profile the environment asks for."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARGO_PROFILE_")}
    subprocess.run([ROOT / "scripts/build"], check=True, env=environment)


def about(chosen, server):
    """What the report says of the run."""
    return {
        "options": dataclasses.asdict(chosen),
        "commit": commit(),
        "began": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine.describe(str(server.cluster.base)),
        "postgres": server.version(),
        "settings": server.cluster.config,
        "redis": capture("redis-server", "--version").split(" sha=")[0],
        "pgbouncer": capture("/usr/sbin/pgbouncer", "--version").splitlines()[0],
    }


MEASURED = ("Cargo.toml", "Cargo.lock", "crates", "src", "sql", "tests/bench/peers")


def commit():
    """The last commit of what is measured and what measures it: others, such as that of the report, do not make another run of it."""
    last = capture("git", "-C", str(ROOT), "log", "-1", "--abbrev=12", "--format=%h", "--", *MEASURED)
    changed = capture("git", "-C", str(ROOT), "status", "--porcelain", "--", *MEASURED)
    return last + (" with changes" if changed else "")


def duration(seconds):
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def measure(bench, todo, retry):
    """Runs all units that are not over yet; one that fails is recorded as failed, and the rest goes on."""
    for number, (unit, module, variant, entrant) in enumerate(todo, 1):
        if bench.store.is_over(unit, retry):
            continue
        print(f"[{number}/{len(todo)}] {unit.replace('//', '/')}", flush=True)
        bench.unit, bench.attempt = unit, f"{time.time():.3f}"
        began, error = time.monotonic(), None
        try:
            bench.server.revive()
            module.run(bench, entrant, variant)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:800]
            print(f"  FAILED: {error}", flush=True)
        bench.store.end(unit, bench.attempt, time.monotonic() - began, error)
        if entrant.name != "floor":
            bench.server.drop(entrant.database)


def list_units(todo, chosen):
    for unit, module, variant, entrant in todo:
        print(f"{duration(module.seconds(chosen, entrant, variant)):>8}  {unit.replace('//', '/')}")
    print(f"about {expected(todo, chosen)} in all")


def expected(todo, chosen):
    return duration(sum(module.seconds(chosen, entrant, variant) for _, module, variant, entrant in todo))


def report(folder, entrants, into):
    """Writes the report of a run; returns the exit status of the bench."""
    from .report import page  # only now: what draws is installed by `installed`

    finished = store.Store(folder)
    print(f"report: {page.write(finished, entrants, into)}")
    failed = {unit: end["error"] for unit, end in finished.ended.items() if end.get("error")}
    for unit, error in failed.items():
        print(f"failed: {unit.replace('//', '/')}: {error[:200]}")
    print(f"{len(finished.ended) - len(failed)} units measured, {len(failed)} failed")
    return 1 if failed else 0


def main():
    entrants = contenders.every()
    chosen, arguments = options.parse(tuple(entrants), scenarios.names())
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))

    peers = installed()
    for entrant in entrants.values():
        entrant.recorded = peers / "recorded" / entrant.name
    if not arguments.no_build:
        build()
    server = Server(peers.parent)
    try:
        for entrant in entrants.values():
            if entrant.name in chosen.contenders:
                entrant.record_statements(server, peers)
        todo = list(units(chosen, entrants))
        if arguments.list:
            list_units(todo, chosen)
            return 0
        kept = None if arguments.new else store.to_go_on_with(peers / "results", chosen, commit(), [unit for unit, *_ in todo], arguments.retry)
        kept = kept or store.Store.create(peers / "results", about(chosen, server))
        left = [one for one in todo if not kept.is_over(one[0], arguments.retry)]
        print(f"{len(left)} of {len(todo)} units to measure, about {expected(left, chosen)}, in {kept.folder}. If interrupted, the same command goes on.")
        began = time.monotonic()
        measure(Bench(chosen, server, kept, peers, entrants), todo, arguments.retry)
        print(f"measured in {duration(time.monotonic() - began)}")
    finally:
        server.destroy()
    # docs/bench is of runs that left nothing out.
    return report(kept.folder, entrants, DOCUMENTS if chosen.is_whole else kept.folder / "report")
