"""A thousand tasks in one call, 4 clients; for pg_stint beside plain inserts of the same rows into the same tables."""

from .. import drivers
from ..drivers import Role
from ..places import HERE
from ..plain import write_plain_insert

TITLE = "Enqueue 1,000 tasks in one call, 4 clients"
CLIENTS = 4


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.can("enqueue_many.sql") or "enqueue_many" in contender.own_scenarios


def seconds(options, _contender, _variant):
    return options.seconds + 1 + options.overhead


def run(bench, contender, _variant):
    if contender.driver == "own":
        bench.own(contender, "enqueue_many")
        return
    bench.fresh(contender)
    options = {"per": 1000, "init": contender.file("enqueue_many_init.sql") or HERE / "driver/payloads.sql"}
    roles = [Role("prod", contender.file("enqueue_many.sql"), CLIENTS, options)]
    bench.load(contender, 4000)
    bench.sample(contender, {}, lambda: drivers.figures(bench.run(contender, roles), "prod"))
    if contender.name == "pg_stint":
        with bench.server.cluster.connect(contender.database) as conn:
            script = write_plain_insert(conn, bench.store.folder / "plain_insert.sql", contender.file("enqueue_many.sql"), options["init"])
        plain = [Role("prod", script, CLIENTS, {"per": 1000})]
        bench.run(contender, plain, 0.3)
        bench.sample(contender, {"statement": "plain insert into the same tables"}, lambda: drivers.figures(bench.run(contender, plain), "prod"))
