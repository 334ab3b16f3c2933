"""Markdown tables, one for each scenario."""

import re

from ..scenarios import ALL


def number(value, digits=2):
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{max(0, digits - len(str(int(abs(value)))) + (abs(value) < 1))}f}"


def rate(cell, name="rate"):
    """A rate, marked where all its samples were disturbed."""
    value = cell.median(name)
    return "–" if value is None else f"{number(value)}{'†' if cell.disturbed else ''}"


def milliseconds(value):
    if not value:
        return "–"
    value /= 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def spread(cell, name="rate"):
    value = cell.spread(name)
    return "–" if value is None else f"±{value * 100:.0f} %"


def _is_figure(text):
    return text == "" or text[0] in "0123456789–±×" or text.startswith("**")


def table(heads, rows):
    """Markdown; columns of figures go to the right."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    rules = [" ---: " if number and all(_is_figure(row[number]) for row in rows) else " --- " for number in range(len(heads))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(rules) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def rows_written(cell):
    parts = [cell.median(f"{name}_per_task") for name in ("inserted", "updated", "deleted")]
    return "–" if None in parts else " / ".join(f"{part:.1f}" for part in parts)


COSTS = ("WAL B/task", "server CPU µs/task", "… after it", "rows written/task: ins / upd / del", "growth B/task", "spread")


def costs(cell):
    return [
        number(cell.median("wal_bytes_per_task")),
        number(cell.median("cpu_us_per_task")),
        number(cell.median("later_cpu_us_per_task")),
        rows_written(cell),
        number(cell.median("size_bytes_per_task")),
        spread(cell),
    ]


def floors(results):
    names = dict.fromkeys((sample["point"]["statement"], sample["point"].get("clients")) for sample in results.samples if sample["scenario"] == "floors")
    rows = []
    for statement, clients in names:
        cell = results.cell("floor", "floors", statement=statement, **({"clients": clients} if clients else {}))
        rows.append(
            [
                statement,
                clients or "",
                rate(cell),
                milliseconds(cell.median("p50_us")),
                milliseconds(cell.median("p99_us")),
                number(cell.median("wal_bytes_per_task")),
                spread(cell),
            ]
        )
    return table(["statement", "clients", "per second", "p50 ms", "p99 ms", "WAL B each", "spread"], rows)


def simple(scenario, call="call"):
    """One figure for each contender, with its ratio to the floor measured beside it."""

    def write(results):
        rows = []
        for contender in results.queues:
            if cell := results.cell(contender, scenario):
                latency = [milliseconds(cell.median(name)) for name in ("p50_us", "p99_us", "second_p50_us", "second_p99_us")]
                loaded = cell.median("loaded")
                less = f", on {loaded:,.0f} tasks" if loaded and loaded < 0.9 * results.store.about["options"]["backlog"] else ""
                rows.append(
                    [contender.title + less, rate(cell), ratio(cell.median("of_floor")), " / ".join(latency[:2]), " / ".join(latency[2:]), *costs(cell)]
                )
        return table(["", "tasks/s", "of bare insert+commit", f"{call} p50 / p99 ms", "completion p50 / p99 ms", *COSTS], rows)

    return write


def enqueue_many(results):
    text = simple("enqueue_many")(results)
    plain, ours = results.cell("pg_stint", "enqueue_many", statement="plain insert into the same tables"), results.cell("pg_stint", "enqueue_many")
    if plain and ours:
        text += (
            f"\nA plain multi-row insert of the same rows into the same tables, in this run: {rate(plain)} rows/s ({spread(plain)}), "
            f"{number(plain.median('wal_bytes_per_task'))} B of WAL each. `enqueue_many` does {ratio(results.ratio(ours, plain))} of that.\n"
        )
    return text


def pair(results):
    rows = []
    for contender in results.queues:
        if cell := results.cell(contender, "pair"):
            rows.append(
                [
                    contender.title,
                    f"{cell.median('iteration_avg_us'):.0f}",
                    f"{cell.median('select_avg_us'):.1f}",
                    ratio(cell.median("of_select"), 1),
                    ratio(cell.median("claim_of_select"), 1),
                    ratio(cell.median("complete_of_select"), 1),
                    number(cell.median("cpu_us_per_task")),
                    spread(cell, "of_select"),
                ]
            )
    return table(["", "claim+complete µs", "`select 1` µs", "pair × `select 1`", "claim ×", "completion ×", "server CPU µs/task", "spread"], rows)


def budgets(results):
    rows = []
    for contender in results.queues:
        none = results.cell(contender, "budgets", budgets="none")
        for kind in results.points("budgets", "budgets"):
            if cell := results.cell(contender, "budgets", budgets=kind):
                rows.append(
                    [
                        f"{contender.title}, {kind if kind != 'none' else 'no budget'}",
                        rate(cell),
                        ratio(results.ratio(cell, none)),
                        milliseconds(cell.median("p50_us")),
                        milliseconds(cell.median("p99_us")),
                        *costs(cell),
                    ]
                )
    return table(["", "tasks/s", "of no budget", "claim p50 ms", "claim p99 ms", *COSTS], rows)


def crowd(results):
    rows = []
    for contender in results.queues:
        few, many = (results.cell(contender, "crowd", clients=clients) for clients in (8, 64))
        if many:
            rows.append(
                [
                    contender.title,
                    rate(few),
                    rate(many),
                    ratio(results.ratio(many, few)),
                    milliseconds(many.median("p50_us")),
                    milliseconds(many.median("p99_us")),
                    number(many.median("errors")),
                    spread(many),
                ]
            )
    return table(["", "8 clients, tasks/s", "64 clients, tasks/s", "of 8", "claim p50 ms", "claim p99 ms", "errors", "spread"], rows)


def notify(results):
    rows = []
    for contender in results.queues:
        on, off = (results.cell(contender, "notify", notifications=state) for state in ("on", "off"))
        if on and off:
            rows.append(
                [
                    contender.title,
                    rate(on),
                    rate(off),
                    ratio(results.ratio(on, off)),
                    number(on.median("notifications")),
                    f"{number(on.median('cpu_us_per_task'))} / {number(off.median('cpu_us_per_task'))}",
                    spread(on),
                ]
            )
    return table(["", "tasks/s with", "without", "of without", "notifications heard by two", "CPU µs/task with / without", "spread"], rows)


def waiting(results):
    rows = []
    for path in "direct", "pgbouncer":
        for contender in results.queues:
            latency = results.cell(contender, "waiting", path=path, what="latency")
            none, idle = (results.cell(contender, "waiting", path=path, what="idle", workers=workers) for workers in (0, 64))
            if not latency and not idle:
                continue
            how = (latency or idle).samples[-1]["point"].get("how", "")
            shares = [f"{cell.median('cpu_share') * 100:.1f} %" if cell else "–" for cell in (none, idle)]
            rows.append(
                [
                    contender.title + (", through PgBouncer" if path == "pgbouncer" else ""),
                    how,
                    milliseconds(latency.median("p50_us")),
                    milliseconds(latency.median("p99_us")),
                    *shares,
                    number(idle.median("wal_bytes")),
                    number(idle.median("xids")),
                    spread(latency, "p50_us"),
                ]
            )
    return table(
        ["", "how it waits", "p50 ms", "p99 ms", "CPU of one core: nobody waits", "64 wait", "WAL B meanwhile", "transaction ids", "spread of p50"], rows
    )


def backlog(results):
    levels = results.points("backlog", "ready")
    rows = []
    for contender in results.queues:
        cells = [results.cell(contender, "backlog", ready=level) for level in levels]
        if any(cells):
            shown = [
                f"{milliseconds(cell.median('p50_us'))} / {milliseconds(cell.median('p99_us'))} / {number(cell.median('buffers'))}" if cell else "–"
                for cell in cells
            ]
            reached = [cell for cell in cells if cell]
            rows.append([contender.title, *shown, ratio(results.ratio(reached[-1], reached[0], "p99_us"))])
    text = table(["p50 ms / p99 ms / buffers of a claim", *(f"{level:,} ready" for level in levels), "p99: last ÷ first"], rows)
    for kind, words in ("scheduled", "scheduled for another day"), ("withheld", "of higher priority, held by an exhausted budget"):
        counts = results.points("backlog", kind)
        rows = []
        for contender in results.queues:
            cells = {count: cell for count in counts if (cell := results.cell(contender, "backlog", **{kind: count}))}
            if len(cells) > 1:
                first, last = cells[min(cells)], cells[max(cells)]
                rows.append(
                    [
                        contender.title,
                        *(f"{milliseconds(c.median('p50_us'))} / {milliseconds(c.median('p99_us'))} / {number(c.median('buffers'))}" for c in (first, last)),
                        f"{max(cells):,}",
                        ratio(results.ratio(last, first, "p99_us")),
                    ]
                )
        if rows:
            text += f"\nThe same with 1,000 ready, and beside them tasks {words}.\n\n" + table(["", "without", "with", "how many", "p99: with ÷ without"], rows)
    return text


def held(results):
    text = ""
    for hold, words in (
        ("snapshot", "a REPEATABLE READ transaction"),
        ("writer", "a transaction that has written"),
        ("slot", "a replication slot with its standby gone"),
        ("none", "nothing"),
    ):
        rows = []
        for contender in results.queues:
            for load in results.points("held", "load"):
                if cell := results.cell(contender, "held", hold=hold, load=load):
                    seen = [count for _, count in cell.samples[0].get("buffers", []) if count is not None]
                    rows.append(
                        [
                            contender.title + (f", {load}" if load != "plain" else ""),
                            rate(cell, "start_rate"),
                            rate(cell, "end_rate"),
                            ratio(share(cell)),
                            milliseconds(cell.median("start_p99_us")),
                            milliseconds(cell.median("end_p99_us")),
                            number(cell.median("tasks_held")),
                            number(cell.median("elapsed")),
                            f"{number(seen[0])} → {number(seen[-1])}" if seen else "–",
                            number(cell.median("dead")),
                            spread(cell, "end_rate"),
                        ]
                    )
        if rows:
            heads = [
                "",
                "before, tasks/s",
                "last quarter",
                "of before",
                "claim p99 ms before",
                "last quarter",
                "tasks run meanwhile",
                "seconds in all",
                "buffers of a claim",
                "dead rows",
                "spread",
            ]
            text += f"\n**Held by {words}**\n\n" + table(heads, rows)
    return text.lstrip()


def share(cell):
    """What is left at the end of the rate at the start."""
    start, end = cell.median("start_rate"), cell.median("end_rate")
    return end / start if start and end is not None else None


def profile(results):
    text = ""
    for contender in results.queues:
        cell = results.cell(contender, "profile")
        if not cell:
            continue
        rows = []
        for one in cell.samples[-1]["statements"]:
            if re.match(r"(?i)begin|commit|deallocate|select pg_|set ", one["query"]) or len(rows) == 12:
                continue
            shown = one["query"][:110] + ("…" if len(one["query"]) > 110 else "")
            rows.append(
                [
                    "`" + shown.replace("`", "'") + "`" + ("" if one["toplevel"] else " (nested)"),
                    one["calls"],
                    one["run_us"],
                    one["plans"],
                    one["plan_us"],
                    one["buffers"],
                    number(one["wal_bytes"]),
                ]
            )
        text += f"\n**{contender.title}**\n\n" + table(["statement", "calls", "mean run µs", "plans made", "mean plan µs", "buffers", "WAL B"], rows)
    return text.lstrip()


def operations(results):
    rows = []
    for contender in results.queues:
        for call in results.points("operations", "call"):
            if cell := results.cell(contender, "operations", call=call):
                one = cell.samples[-1]
                where = ", ".join(f"{name} {'/'.join(map(str, counts))}" for name, counts in sorted(one["tables"].items()))
                rows.append([contender.title, call, number(one["wal_bytes_each"]), f"{one['inserted']} / {one['updated']} / {one['deleted']}", where or "–"])
    return table(["", "call", "WAL B with its commit", "rows inserted / updated / deleted", "of which tables"], rows)


WRITERS = {
    "floors": floors,
    "enqueue": simple("enqueue"),
    "enqueue_many": enqueue_many,
    "claim": simple("claim", "claim"),
    "finish_and_claim": simple("finish_and_claim"),
    "batch": simple("batch", "claim"),
    "pair": pair,
    "budgets": budgets,
    "crowd": crowd,
    "notify": notify,
    "waiting": waiting,
    "backlog": backlog,
    "held": held,
    "operations": operations,
    "profile": profile,
}


def of(results, scenario):
    """The title and table of a scenario, or nothing where it was not measured."""
    if not any(sample["scenario"] == scenario for sample in results.samples):
        return ""
    return f"## {ALL[scenario].TITLE}\n\n{WRITERS[scenario](results)}\n"
