"""What budgets cost: 8 clients one by one on a queue without, with one and with two budgets that all have room."""

from .. import drivers
from ..drivers import Role

TITLE = "Budgets: one by one, 8 clients, all on the same budget"
CLIENTS = 8
# Loading script and claiming script of each kind of queue; claims without a budget report the same usage.
KINDS = {
    "none": ("enqueue_many.sql", "claim_usage.sql"),
    "one budget": ("enqueue_one_budget.sql", "claim_one_budget.sql"),
    "two budgets": ("enqueue_two_budgets.sql", "claim_two_budgets.sql"),
}


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("claim_one_budget.sql")


def seconds(options, _contender, _variant):
    return 3 * (options.seconds + options.backlog / 80_000 + options.overhead)


def run(bench, contender, _variant):
    for kind, (load, claim) in KINDS.items():
        bench.fresh(contender)
        # A part of the backlog is enough for the time: one by one takes far less than is loaded for batches.
        bench.load(contender, bench.options.backlog // 2, load, limit=bench.options.load_limit)
        roles = [Role("cons", contender.file(claim), CLIENTS)]
        bench.run(contender, roles, 0.3)
        bench.sample(contender, {"budgets": kind}, lambda roles=roles: drivers.figures(bench.run(contender, roles)))
