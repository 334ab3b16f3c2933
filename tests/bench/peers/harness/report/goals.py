"""What pg_stint sets itself, and what this run gave: met or not."""

import statistics

from . import tables

OURS = "pg_stint"


def _figure(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _at_least(words, value, least, unit=""):
    return words, f"≥ {least:,g}{unit}", None if value is None else f"{_figure(value)}{unit}", None if value is None else value >= least


def _at_most(words, value, most, unit=""):
    return words, f"≤ {most:,g}{unit}", None if value is None else f"{_figure(value)}{unit}", None if value is None else value <= most


def _ratio(over, under, name="rate"):
    above, below = over.median(name), under.median(name)
    return above / below if above is not None and below else None


def _difference(over, under, name, factor):
    above, below = over.median(name), under.median(name)
    return (above - below) * factor if above is not None and below is not None else None


def _thousandths(value):
    return value / 1000 if value is not None else None


def throughput(results):
    def of_floor(scenario):
        return results.cell(OURS, scenario).median("of_floor")

    claim, batch = of_floor("claim"), results.cell(OURS, "batch")
    many = results.cell(OURS, "enqueue_many")
    yield _at_least("one by one, 8 clients, of half the bare insert+commit rate (two commits)", None if claim is None else claim * 2, 0.7)
    yield _at_least("`finish_and_claim`, of the bare rate", of_floor("finish_and_claim"), 0.6)
    yield _at_most("claim + complete in one session, × `select 1`", results.cell(OURS, "pair").median("of_select"), 7)
    yield _at_least("batches of 100, × the two tables by hand", _ratio(batch, results.cell("hand", "batch")), 1.8)
    yield _at_least("batches of 100, × pgmq", _ratio(batch, results.cell("pgmq", "batch")), 1)
    yield _at_least("enqueue, of the bare rate", of_floor("enqueue"), 0.75)
    yield _at_least("`enqueue_many` of 1,000, tasks/s", many.median(), 150_000)
    yield (
        "`enqueue_many`, of a plain insert into the same tables",
        "printed",
        tables.ratio(_ratio(many, results.cell(OURS, "enqueue_many", statement="plain insert into the same tables"))),
        None,
    )


def held(results):
    for load in results.points("held", "load"):
        for hold in results.points("held", "hold"):
            cell = results.cell(OURS, "held", hold=hold, load=load)
            if hold == "none" or not cell:
                continue
            words = f"held {hold}, {load}:"
            yield _at_least(f"{words} tasks run meanwhile", cell.median("tasks_held"), results.store.about["options"]["held_tasks"])
            yield _at_least(f"{words} rate at the end, of the start", tables.share(cell), 0.95)
            start, end = cell.median("start_p99_us"), cell.median("end_p99_us")
            yield _at_most(f"{words} claim p99 at the end, of the start", end / start if start and end else None, 1.05)
            seen = [count for _, count in cell.samples[0].get("buffers", []) if count is not None]
            if len(seen) > 3:
                # Single claims: one of many reads a page more, where a page of an index is full.
                first, last = (statistics.median(part) for part in (seen[:5], seen[-5:]))
                yield _at_most(f"{words} buffers of a claim at the end, of the start", last / first if first else None, 1.25)


def backlog(results):
    levels = results.points("backlog", "ready")
    if levels:
        last, first = (results.cell(OURS, "backlog", ready=level) for level in (levels[-1], levels[0]))
        yield _at_most(f"claim p99 with {levels[-1]:,} ready, of {levels[0]:,}", _ratio(last, first, "p99_us"), 1.2)
    for kind in "scheduled", "withheld":
        if counts := [count for count in results.points("backlog", kind) if count]:
            with_them, without = results.cell(OURS, "backlog", **{kind: counts[-1]}), results.cell(OURS, "backlog", **{kind: 0})
            yield _at_most(f"claim p99 with {counts[-1]:,} {kind}, of none", _ratio(with_them, without, "p99_us"), 1.2)


def others(results):
    none = results.cell(OURS, "budgets", budgets="none")
    yield _at_least("8 clients on one budget, of none", _ratio(results.cell(OURS, "budgets", budgets="one budget"), none), 0.8)
    for path, words in ("direct", ""), ("pgbouncer", ", through PgBouncer"):
        latency = results.cell(OURS, "waiting", path=path, what="latency")
        yield _at_most(f"enqueue to claim, p50{words}", _thousandths(latency.median("p50_us")), 1, " ms")
        yield _at_most(f"enqueue to claim, p99{words}", _thousandths(latency.median("p99_us")), 5, " ms")
        alone = results.cell(OURS, "waiting", path=path, what="idle", workers=0)
        with_them = results.cell(OURS, "waiting", path=path, what="idle", workers=64)
        yield _at_most(f"64 waiting workers, of one core beyond none{words}", _difference(with_them, alone, "cpu_share", 100), 1, " %")
        yield _at_most(f"64 waiting workers, transaction ids used{words}", with_them.median("xids"), 0)
    yield _at_least("enqueue with notifications, of without", _ratio(*(results.cell(OURS, "notify", notifications=state) for state in ("on", "off"))), 0.95)
    yield _at_least("64 clients on 1,000 ready, of 8 clients", _ratio(*(results.cell(OURS, "crowd", clients=clients) for clients in (64, 8))), 0.8)
    yield _at_most("64 clients on 1,000 ready, errors", results.cell(OURS, "crowd", clients=64).median("errors"), 0)


def table(results):
    rows = []
    for source in throughput, held, backlog, others:
        for words, asked, got, met in source(results):
            if got is not None and got != "–":
                rows.append([words, asked, got, "" if met is None else "yes" if met else "**no**"])
    return tables.table(["goal", "asked", "got", "met"], rows) if rows else ""
