"""Claim 100, commit, complete 100, commit: 4 clients."""

from .. import drivers

TITLE = "Batches of 100: claim, commit, complete, commit; 4 clients"


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("claim_batch.sql") or "batch" in contender.own_scenarios


def seconds(options, _contender, _variant):
    return options.seconds + 3 + options.backlog / 40_000 + options.overhead


def run(bench, contender, _variant):
    if contender.driver == "own":
        bench.own(contender, "batch")
        return
    bench.fresh(contender)
    loaded = bench.load(contender, bench.options.backlog, limit=bench.options.load_limit)
    bench.warm(contender)
    # Fast ones would empty the queue: they end early then, and the rate is that of the time they took.
    roles = [contender.batch_claimers(drain=1)]
    bench.sample(contender, {}, lambda: drivers.figures(bench.run(contender, roles)) | {"loaded": loaded}, beside_floor=True)
