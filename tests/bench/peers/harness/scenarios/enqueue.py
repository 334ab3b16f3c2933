"""One task for each transaction, 8 clients."""

from .. import drivers
from ..drivers import Role

TITLE = "Enqueue one task for each transaction, 8 clients"
CLIENTS = 8


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("enqueue.sql") or "enqueue" in contender.own_scenarios


def seconds(options, _contender, _variant):
    return options.seconds + 3 + options.overhead


def run(bench, contender, _variant):
    if contender.driver == "own":
        bench.own(contender, "enqueue")
        return
    bench.fresh(contender)
    roles = [Role("prod", contender.file("enqueue.sql"), CLIENTS)]
    bench.run(contender, roles, 0.5)  # the first tasks make the tables' first pages
    bench.sample(contender, {}, lambda: drivers.figures(bench.run(contender, roles), "prod"), beside_floor=True)
