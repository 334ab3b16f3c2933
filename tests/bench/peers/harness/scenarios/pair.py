"""One session on one core, without waiting for the disk: what the calls cost beside `select 1`."""

import os

from .. import drivers
from ..drivers import Role

TITLE = "Work of one claim and completion: one session, client and server on one core, synchronous_commit off"


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("claim.sql")


def seconds(options, _contender, _variant):
    return 3 * options.seconds + 1 + options.overhead


def run(bench, contender, _variant):
    bench.fresh(contender)
    bench.load(contender, 30_000 if not bench.options.quick else 4_000)
    bench.warm(contender, 500)
    floor = bench.contenders["floor"]
    bench.floor(seconds=0.2)
    environment = os.environ | {"PGOPTIONS": "-c synchronous_commit=off"}
    options = {"prefix": ["taskset", "-c", "0"], "environment": environment}
    undo = bench.server.pin({0})
    try:
        select = [Role("cons", floor.file("select.sql"), 1)]
        before = drivers.figures(bench.run(floor, select, **options))
        kept = {}

        def pair():
            kept.update(drivers.figures(bench.run(contender, [contender.claimers(1)], bench.options.seconds, **options)))
            return kept

        def finish(figures):
            after = drivers.figures(bench.run(floor, select, **options))
            unit = (before["iteration_avg_us"] + after["iteration_avg_us"]) / 2
            return figures | {
                "select_avg_us": unit,
                "of_select": figures["iteration_avg_us"] / unit,
                "claim_of_select": figures["avg_us"] / unit,
                "complete_of_select": figures.get("second_avg_us", 0) / unit,
            }

        bench.sample(contender, {}, lambda: finish(pair()))
    finally:
        undo()
