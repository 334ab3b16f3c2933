"""report.md and its plots, as docs/bench carries them."""

import statistics

from ..scenarios import ALL
from . import goals, plots, summary, tables
from .stats import FOREIGN_LIMIT, STEAL_LIMIT, Results, disturbed

HOW = """
Every figure is the median of {rounds} (of one where a contender other than pg_stint and the tables by hand needs a minute or more: under a held
snapshot, with a million tasks ready, by way of a pooler). Rounds go through all scenarios one after the other, so that what is compared was measured side by
side and a slow hour hits all alike. The *spread* is half the distance between the extremes, as a share of the median. *Of bare insert+commit* divides
by the rate of single-row inserts by 8 clients into a table with one index, measured right before and right after the very sample.

All SQL contenders run on one server with one configuration, in a fresh database each, after a checkpoint; payloads have 300 bytes. The driver is
`tests/bench/peers/driver/qbench.c`, checked against pgbench under the floors. Each contender has its product's defaults, and sends what its own
client sends: recorded from that client where its statements are no public interface. Nothing is tuned for any of them, and nothing is left out. WAL,
CPU and rows written are counted for the sample's time and divided by its tasks; CPU is of all server processes, *after it* is what they still used in
the seconds after the sample (background workers, autovacuum). A dash is what a contender does not do, or what was not measured in this run.

A sample during which others used more than {foreign:g} of a core, or the hypervisor took more than {steal:g}, is set aside where the same figure has
undisturbed ones, and marked † where it has none: read those as lower bounds.
"""


def _machine(results):
    about = results.store.about
    machine, settings = about["machine"], about["settings"]
    lines = [
        f"* {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; data on {machine['data_on']}; {machine['system']}, Linux {machine['kernel']}",
        f"* PostgreSQL {about['postgres']}: "
        + ", ".join(f"{name} = {value}" for name, value in settings.items() if name not in ("fsync", "full_page_writes"))
        + ", fsync on, full_page_writes on",
        f"* {about['pgbouncer']}; {about['redis']}",
        f"* begun {about['began']}, pg_stint {about['commit']}",
    ]
    return "\n".join(lines) + "\n"


def _contenders(results):
    rows = [
        [
            contender.title,
            contender.version or (results.store.about["commit"] if contender.name == "pg_stint" else "–"),
            contender.history or "–",
            contender.note,
        ]
        for contender in results.contenders
    ]
    return tables.table(["contender", "version", "history", "what it is"], rows)


def _quality(results):
    """How quiet the machine was, what was marked, and what failed."""
    foreign = sorted(sample["foreign_cores"] for sample in results.samples if "foreign_cores" in sample)
    steal = sorted(sample["steal_cores"] for sample in results.samples if "steal_cores" in sample)
    text = "## How quiet the machine was\n\n"
    if foreign:
        count = sum(map(disturbed, results.samples))
        text += (
            f"Others used {statistics.median(foreign):.2f} cores (median; p90 {foreign[int(len(foreign) * 0.9)]:.2f}, most {foreign[-1]:.2f}) and the hypervisor took "
            f"{statistics.median(steal):.3f} (most {steal[-1]:.2f}) during the {len(results.samples)} samples, {count} of which were disturbed.\n"
        )
    cells = results.disturbed_cells()
    if cells:
        text += (
            f"\nFigures without an undisturbed sample: {len(cells)}. "
            + "; ".join(f"{name} {scenario} {point} ({cores:.2f} cores)" for name, scenario, point, cores in cells[:40])
            + "\n"
        )
    failed = {unit: end["error"] for unit, end in results.store.ended.items() if end.get("error")}
    told = [(sample["contender"], sample["scenario"], sample["driver_error"]) for sample in results.samples if sample.get("driver_error")]
    if failed or told:
        text += "\n**What failed**\n\n"
        text += "".join(f"* {unit.replace('//', '/')}: {error[:300]}\n" for unit, error in failed.items())
        text += "".join(f"* {name}, {scenario}: {error[:300]}\n" for name, scenario, error in dict.fromkeys(told))
    return text


def write(store, contenders, folder):
    """Writes the report and its plots into a folder; returns the report's path."""
    results = Results(store, contenders)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: plot(results, folder) for name, plot in plots.ALL.items()}
    options = store.about["options"]
    quick = "\n**A quick run: it shows that everything works; its figures mean nothing.**\n" if options["quick"] else ""
    how = HOW.format(rounds=results.rounds(), foreign=FOREIGN_LIMIT, steal=STEAL_LIMIT)
    parts = [
        "# Bench\n",
        quick,
        "Made by `make bench`; [tests/bench/peers](../../tests/bench/peers/README.md) says how.\n",
        "## Summary\n",
        summary.table(results),
        drawn["held"],
        drawn["rates"],
        "## How it was measured\n" + how,
        _machine(results),
        "\n## Goals\n",
        goals.table(results),
        "## Contenders\n",
        _contenders(results),
    ]
    after = {"held": ("held_claims", "held_ours"), "backlog": ("backlog",)}
    for scenario in ALL:
        parts.append(tables.of(results, scenario))
        parts += [drawn[name] for name in after.get(scenario, ())]
    parts.append(_quality(results))
    path = folder / "report.md"
    path.write_text("\n".join(part for part in parts if part))
    return path
