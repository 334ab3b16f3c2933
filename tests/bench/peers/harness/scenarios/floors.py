"""The bare machine."""

from .. import drivers
from ..drivers import Role
from ..places import HERE

TITLE = "Floors of the machine"

POINTS = (("select 1", "select.sql", 1), ("select 1", "select.sql", 8), ("insert one row", "insert.sql", 1), ("insert one row", "insert.sql", 8))


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.name == "floor"


def seconds(options, _contender, _variant):
    return 7 * options.seconds + 12


def run(bench, contender, _variant):
    bench.fresh(contender)
    bench.record(contender, {"statement": "fdatasync"}, {"tasks": 0, "rate": bench.server.flush_rate()})
    for statement, script, clients in POINTS:
        roles = [Role("cons", contender.file(script), clients)]
        bench.sample(contender, {"statement": statement, "clients": clients}, lambda roles=roles: drivers.figures(bench.run(contender, roles)))
    many = [Role("cons", contender.file("insert_many.sql"), 4, {"per": 1000, "init": HERE / "driver/payloads.sql"})]
    bench.sample(contender, {"statement": "insert 1,000 rows at a time", "clients": 4}, lambda: drivers.figures(bench.run(contender, many)))
    program, environment = bench.server.tool("pgbench"), bench.server.environment(contender.database)
    for statement, script in ("select 1", "select.sql"), ("insert one row", "insert.sql"):
        bench.sample(
            contender,
            {"statement": f"{statement}, by pgbench", "clients": 8},
            lambda script=script: drivers.pgbench(program, environment, contender.file(script), 8, bench.options.seconds),
        )
