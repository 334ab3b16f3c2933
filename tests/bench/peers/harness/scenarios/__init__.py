"""The scenarios, in the order in which they are measured. Each module has

TITLE                    what the report calls it
variants(options)        names of its parts, each measured as a unit of its own; the first is the one that counts
runs(contender, variant) whether a contender can do that
rounds(options, contender, variant) optional: how often
seconds(options, contender, variant)   about how long one unit takes
run(bench, contender, variant)
"""

from . import (
    backlog,
    batch,
    budgets,
    claim,
    crowd,
    enqueue,
    enqueue_many,
    finish_and_claim,
    floors,
    held,
    notify,
    operations,
    pair,
    profile,
    waiting,
)

ALL = {
    "floors": floors,
    "enqueue": enqueue,
    "enqueue_many": enqueue_many,
    "claim": claim,
    "finish_and_claim": finish_and_claim,
    "batch": batch,
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


def names():
    """What may be asked for: a scenario, or one of its variants as "held/snapshot+plain"; values say which of them a run without a choice takes."""
    return {name: True for name in ALL} | {f"{name}/{variant}": False for name, module in ALL.items() for variant in module.variants(None) if variant}
