"""Claim one, commit, complete it, commit: 8 clients on a backlog."""

from .. import drivers

TITLE = "One by one: claim, commit, complete, commit; 8 clients"
CLIENTS = 8


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("claim.sql") or "claim" in contender.own_scenarios


def seconds(options, _contender, _variant):
    return options.seconds + 3 + options.backlog / 40_000 + options.overhead


def run(bench, contender, _variant):
    if contender.driver == "own":
        bench.own(contender, "claim")
        return
    bench.fresh(contender)
    loaded = bench.load(contender, bench.options.backlog, limit=bench.options.load_limit)
    bench.warm(contender)
    bench.sample(contender, {}, lambda: drivers.figures(bench.run(contender, [contender.claimers(CLIENTS)])) | {"loaded": loaded}, beside_floor=True)
