"""What a claim costs by how much waits: 1,000 to a million ready tasks, many scheduled ones, many that an exhausted budget withholds. One client."""

from .. import buffers, drivers

TITLE = "Backlog: one client's claim by what else waits in the queue"
# Who is measured in every round.
REPEATED = ("pg_stint", "hand")
CLAIMS = 1000  # of one sample: as few as leave the backlog what it is


def variants(_options):
    return ("ready", "scheduled", "withheld")


def rounds(options, contender, variant):
    """A million tasks take a contender half a minute to load: others than the two that are compared are measured once."""
    return options.rounds if variant != "ready" or contender.name in REPEATED else 1


def runs(contender, variant):
    if variant == "ready":
        return contender.can("claim.sql", "enqueue_many.sql")
    return contender.can("claim.sql", "enqueue_many.sql", f"enqueue_{variant}.sql")


def seconds(options, _contender, variant):
    if variant == "ready":
        return min(options.load_limit, options.levels[-1] / 30_000) + len(options.levels) * 6 + options.overhead
    return options.waiting / 30_000 + 7 + options.overhead


def _claims(bench, contender, point):
    claims = 300 if bench.options.quick else CLAIMS

    def measure():
        result = bench.run(contender, [contender.claimers(1)], 10 * bench.options.seconds, tasks=claims)
        return drivers.figures(result) | buffers.of_claim(bench, contender)

    return bench.sample(contender, point, measure)["tasks"]


def run(bench, contender, variant):
    bench.fresh(contender)
    bench.load(contender, 2000)
    left = 2000 - bench.warm(contender, 1000)
    if variant != "ready":
        left += bench.load(contender, 1000 + CLAIMS - left)
        left -= _claims(bench, contender, {variant: 0})
        waiting = bench.load(contender, bench.options.waiting, f"enqueue_{variant}.sql", limit=bench.options.load_limit)
        bench.load(contender, 1000 + CLAIMS - left)
        _claims(bench, contender, {variant: min(waiting, bench.options.waiting)})  # loaders may overshoot by a call
        return
    for level in bench.options.levels:
        wanted = level + (CLAIMS // 2 if level <= 1000 else 0)
        left += bench.load(contender, wanted - left, limit=bench.options.load_limit)
        if left < level * 0.9:
            bench.record(
                contender, {"ready": level}, {"tasks": 0, "rate": 0, "driver_error": f"only {left:,} tasks were loaded within {bench.options.load_limit:.0f} s"}
            )
            return
        left -= _claims(bench, contender, {"ready": level})
