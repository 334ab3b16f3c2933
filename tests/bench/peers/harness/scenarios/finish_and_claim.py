"""Ending a task and claiming the next in one commit, 8 clients."""

from .. import drivers
from ..drivers import Role

TITLE = "Finish one and claim the next in one commit, 8 clients"
CLIENTS = 8


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("finish_and_claim.sql")


def seconds(options, _contender, _variant):
    return options.seconds + 3 + options.backlog / 40_000 + options.overhead


def run(bench, contender, _variant):
    bench.fresh(contender)
    loaded = bench.load(contender, bench.options.backlog, limit=bench.options.load_limit)
    bench.warm(contender)
    roles = [Role("cons", contender.file("finish_and_claim.sql"), CLIENTS, {"init": contender.file("finish_and_claim_init.sql")})]
    bench.sample(contender, {}, lambda: drivers.figures(bench.run(contender, roles)) | {"loaded": loaded}, beside_floor=True)
