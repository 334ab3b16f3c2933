"""64 clients on a thousand ready tasks, beside 8 clients on the same."""

from .. import drivers

TITLE = "A crowd: 64 clients one by one on 1,000 ready tasks, beside 8"


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("claim.sql", "enqueue_many.sql")


def seconds(options, _contender, _variant):
    return 2 * (options.seconds + options.overhead)


def run(bench, contender, _variant):
    for clients in 8, 64:
        bench.fresh(contender)
        bench.load(contender, 3000)
        bench.warm(contender, 2000)
        # Between one and two thousand are ready: the producer adds a thousand when there are fewer.
        roles = [contender.claimers(clients), contender.producer(1000)]
        bench.sample(contender, {"clients": clients}, lambda roles=roles: drivers.figures(bench.run(contender, roles, backlog=1000)))
