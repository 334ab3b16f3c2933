"""The figures people look at, as SVG."""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

from .stats import disturbed  # noqa: E402

# Text stays text, and two drawings of the same data are the same file.
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "pg_stint",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "figure.dpi": 96,
        "savefig.bbox": "tight",
    }
)
OURS = "#c0392b"
# Told apart without colour, too: by dashes.
OTHERS = ("#1f4e79", "#2e7d32", "#6a1b9a", "#b26a00", "#00695c", "#5d4037", "#455a64", "#827717", "#ad1457", "#283593")
DASHES = ("-", "--", "-.", ":")
PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}")


def style(contender, results):
    if contender.name == "pg_stint":
        return {"color": OURS, "linewidth": 2.6, "zorder": 5}
    others = [one.name for one in results.queues if one.name != "pg_stint"]
    number = others.index(contender.name)
    return {"color": OTHERS[number % len(OTHERS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}


def save(figure, folder, name, title):
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Title": title})
    plt.close(figure)
    return f"![{title}]({name}.svg)\n"


def logarithmic(axis, set_scale):
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def smooth(values, width=5):
    """The median of each second with its neighbours."""
    half = width // 2
    return [sorted(values[max(0, at - half) : at + half + 1])[len(values[max(0, at - half) : at + half + 1]) // 2] for at in range(len(values))]


def _run(results, contender, hold, load="plain"):
    """The run over time to draw: the one with the middle rate at its end, of the undisturbed ones where there are any."""
    samples = results.cell(contender, "held", hold=hold, load=load).samples
    samples = [sample for sample in samples if sample.get("series")]
    return sorted(samples, key=lambda sample: sample.get("end_rate") or 0)[len(samples) // 2] if samples else None


def held_rate(results, folder):
    """Rate over time, all contenders, as a snapshot is taken and held."""
    figure, axes = plt.subplots(figsize=(9, 5))
    drawn = 0
    for contender in results.queues:
        if run := _run(results, contender, "snapshot"):
            times = [part["ms"] / 1000 + 0.5 - run["held_at_s"] for part in run["series"]]
            axes.plot(times, [max(1, value) for value in smooth([part["tasks"] for part in run["series"]])], label=contender.title, **style(contender, results))
            drawn += 1
    if not drawn:
        plt.close(figure)
        return ""
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_title("Tasks run per second, one by one, 4 clients. At 0 another session opens a transaction, reads, and stays open", loc="left", fontsize=10)
    logarithmic(axes.yaxis, axes.set_yscale)
    axes.set_ylim(bottom=1)
    axes.set(xlabel="seconds", ylabel="tasks per second")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "held-snapshot", "Rate over time while a snapshot is held")


def held_claims(results, folder):
    """Claim p99 over tasks run, the same runs."""
    figure, axes = plt.subplots(figsize=(9, 4))
    drawn = 0
    for contender in results.queues:
        run = _run(results, contender, "snapshot")
        parts = [part for part in run["series"] if part.get("claim") and part["ms"] >= 1000 * run["held_at_s"]] if run else []
        if parts:
            axes.plot(
                [part["ms"] / 1000 - run["held_at_s"] for part in parts],
                smooth([part["claim"]["p99_us"] / 1000 for part in parts]),
                label=contender.title,
                **style(contender, results),
            )
            drawn += 1
    if not drawn:
        plt.close(figure)
        return ""
    logarithmic(axes.yaxis, axes.set_yscale)
    axes.set(xlabel="seconds of the held snapshot", ylabel="claim p99, ms")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "held-latency", "Claim p99 while a snapshot is held")


def held_ours(results, folder):
    """pg_stint with each thing that holds and each load, by tasks run."""
    figure, axes = plt.subplots(figsize=(9, 4))
    colours = {"snapshot": OURS, "writer": OTHERS[0], "slot": OTHERS[1], "none": "#888888"}
    dashes = {"plain": "-", "budgets": "--", "churn": ":"}
    words = {"snapshot": "open reader", "writer": "open writer", "slot": "replication slot", "none": "nothing held"}
    drawn = 0
    for hold, colour in colours.items():
        for load, dash in dashes.items():
            if run := _run(results, "pg_stint", hold, load):
                total, done = 0, []
                for part in run["series"]:
                    total += part["tasks"]
                    done.append(total / 1000)
                label = words[hold] + {"plain": "", "budgets": ", two budgets", "churn": ", retries, heartbeats, sweeps"}[load]
                axes.plot(done, smooth([part["tasks"] for part in run["series"]], 9), color=colour, linestyle=dash, linewidth=1.6, label=label)
                drawn += 1
    if not drawn:
        plt.close(figure)
        return ""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set(xlabel="thousand tasks run", ylabel="tasks per second")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "held-pg_stint", "pg_stint while different things hold old row versions")


def backlog(results, folder):
    levels = [level for level in results.points("backlog", "ready") if level]
    figure, axes = plt.subplots(figsize=(9, 4))
    drawn = 0
    for contender in results.queues:
        found = [
            (level, cell.median("p99_us") / 1000) for level in levels if (cell := results.cell(contender, "backlog", ready=level)) and cell.median("p99_us")
        ]
        if found:
            axes.plot(*zip(*found, strict=True), marker="o", markersize=4, label=contender.title, **style(contender, results))
            drawn += 1
    if not drawn:
        plt.close(figure)
        return ""
    logarithmic(axes.xaxis, axes.set_xscale)
    logarithmic(axes.yaxis, axes.set_yscale)
    axes.set(xlabel="ready tasks", ylabel="claim p99, ms, one client")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "backlog", "Claim p99 by backlog")


BARS = {"enqueue": "enqueue one, 8 clients", "claim": "one by one, 8 clients", "batch": "batches of 100, 4 clients"}


def rates(results, folder):
    figure, panels = plt.subplots(1, len(BARS), figsize=(11, 0.32 * len(results.queues) + 1.2), sharey=True)
    for axes, (scenario, title) in zip(panels, BARS.items(), strict=True):
        names = [contender.title for contender in reversed(results.queues)]
        cells = [results.cell(contender, scenario) for contender in reversed(results.queues)]
        values = [cell.median() or 0 for cell in cells]
        low = [value - min(cell.values("rate"), default=value) for cell, value in zip(cells, values, strict=True)]
        high = [max(cell.values("rate"), default=value) - value for cell, value in zip(cells, values, strict=True)]
        colours = [OURS if contender.name == "pg_stint" else "#9aa7b5" for contender in reversed(results.queues)]
        axes.barh(names, values, color=colours, xerr=[low, high], error_kw={"linewidth": 1})
        for name, value, cell in zip(names, values, cells, strict=True):
            if value:
                axes.annotate(f" {value:,.0f}{'†' if any(map(disturbed, cell.samples)) else ''}", (value, name), va="center", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.22)
    return save(figure, folder, "rates", "Tasks per second")


ALL = {"rates": rates, "held": held_rate, "held_claims": held_claims, "held_ours": held_ours, "backlog": backlog}
