"""What telling listeners costs those who enqueue: 8 clients, two listeners, with notifications and without."""

from .. import drivers
from ..drivers import Role

TITLE = "Notifications: enqueue one, 8 clients, 2 listeners, with and without"
CLIENTS = 8


def variants(_options):
    return ("",)


def runs(contender, _variant):
    return contender.driver == "sql" and contender.channel is not None


def seconds(options, _contender, _variant):
    return 2 * (options.seconds + options.overhead)


def _roles(contender, state):
    silent = contender.file("enqueue_silent.sql") if state == "off" else None
    return [Role("prod", silent or contender.file("enqueue.sql"), CLIENTS), Role("heard", None, 2, {"listen": contender.channel})]


def run(bench, contender, _variant):
    for state in "on", "off":
        bench.fresh(contender)
        if script := contender.file(f"notify_{state}.sql"):
            bench.server.script(script, contender.database)
        roles = _roles(contender, state)
        bench.run(contender, roles, 0.5)

        def measure(roles=roles):
            result = bench.run(contender, roles)
            return drivers.figures(result, "prod") | {"notifications": result["heard"]["iterations"]}

        bench.sample(contender, {"notifications": state}, measure)
