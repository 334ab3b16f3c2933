"""The table and the plot for the README."""

from . import tables

HEADS = [
    "per second",
    "enqueue one, 8 clients",
    "one by one, 8 clients",
    "batches of 100, 4 clients",
    "one by one with a snapshot held: before → at the end",
    "enqueue to claim, p50 / p99 ms",
    "enqueue with notifications, of without",
    "WAL B for a task's life",
    "history",
]


def life(results, contender):
    """WAL of one task from enqueue to completion, one by one."""
    parts = [results.cell(contender, scenario).median("wal_bytes_per_task") for scenario in ("enqueue", "claim")]
    return None if None in parts else sum(parts)


def row(results, contender):
    held = results.cell(contender, "held", hold="snapshot", load="plain")
    latency = results.cell(contender, "waiting", path="direct", what="latency")
    on, off = (results.cell(contender, "notify", notifications=state) for state in ("on", "off"))
    told = tables.ratio(results.ratio(on, off))
    if told == "–" and latency:
        told = latency.samples[-1]["point"].get("how", "–")
    shown = f"{tables.milliseconds(latency.median('p50_us'))} / {tables.milliseconds(latency.median('p99_us'))}" if latency else "–"
    return [
        contender.title,
        *(tables.rate(results.cell(contender, scenario)) for scenario in ("enqueue", "claim", "batch")),
        f"{tables.rate(held, 'start_rate')} → {tables.rate(held, 'end_rate')}" if held else "–",
        shown,
        told,
        tables.number(life(results, contender)),
        contender.history or "–",
    ]


def table(results):
    rows = [row(results, contender) for contender in results.queues]
    floor = results.cell("floor", "floors", statement="insert one row", clients=8)
    if floor:
        rows.append(["bare one-row insert + commit", tables.rate(floor), "", "", "", "", "", tables.number(floor.median("wal_bytes_per_task")), ""])
    return tables.table(HEADS, rows)


def text(results):
    """What README.md says of the bench; printed by tests/bench/peers/report --readme."""
    about = results.store.about
    return (
        f"{table(results)}\n"
        f"Medians of {results.rounds()}, all in one run on one machine ({about['machine']['cores']} cores, PostgreSQL "
        f"{about['postgres']}, every commit flushed), 300-byte payloads, each product with its defaults. "
        "How it was measured, and all the rest: [docs/bench/report.md](docs/bench/report.md); `make bench` measures it again.\n\n"
        "![Rate over time while a snapshot is held](docs/bench/held-snapshot.svg)\n"
    )
