"""How long from enqueue to claim at 50 tasks a second with 8 workers waiting, and what 64 workers cost that wait for nothing: each product as it waits, directly and
through PgBouncer in transaction mode, where LISTEN does not work and who relies on it polls."""

import time

from .. import drivers
from ..drivers import Role

TITLE = "Waiting: enqueue to claim at 50 tasks/s with 8 waiting workers, and the cost of 64 idle ones"
RATE, WORKERS, IDLE = 50, 8, 64


def variants(_options):
    return ("direct", "pgbouncer")


def rounds(options, contender, variant):
    """By way of a pooler everyone else polls, and waits half the pause."""
    return options.rounds if variant == "direct" or contender.name == "pg_stint" else 1


def runs(contender, variant):
    if contender.driver == "own":
        return variant == "direct" and "waiting" in contender.own_scenarios
    return (
        contender.payload_column is not None and contender.can("enqueue.sql") and (contender.can("claim.sql") or contender.can("ticker.sql", "claim_batch.sql"))
    )


def _seconds(options):
    """Long enough for a p99 of some hundreds."""
    return 2 if options.quick else 3 * options.seconds


def seconds(options, contender, _variant):
    return _seconds(options) + (options.idle_seconds + 5 if contender.driver == "sql" else 0) + options.overhead


def _how(contender, variant):
    """In words, and as options of qbench."""
    if contender.can("claim_waiting.sql"):
        return "waits in the server", {}
    if contender.channel and variant == "direct":
        # Who listens looks only now and then by himself.
        return "LISTEN", {"listen": contender.channel, "poll": max(contender.poll_ms, 1000)}
    return f"polls every {contender.poll_ms} ms", {"poll": contender.poll_ms}


def run(bench, contender, variant):
    if contender.driver == "own":
        bench.own(contender, "waiting")
        return
    bench.fresh(contender)
    if script := contender.file("notify_on.sql"):
        bench.server.script(script, contender.database)
    pooler = bench.server.bouncer_dsn(contender.database) if variant == "pgbouncer" else None
    how, options = _how(contender, variant)
    if pooler:
        options["pooled"] = 1
    try:
        _latency(bench, contender, variant, how, options, pooler)
        _idle(bench, contender, variant, how, options, pooler)
    finally:
        bench.server.stop_bouncer()


def _latency(bench, contender, variant, how, options, pooler):
    whole = contender.can("claim.sql")
    claim = contender.file("claim_waiting.sql") or contender.file("claim.sql") or contender.file("claim_batch.sql")
    workers = WORKERS if whole else contender.batch_clients
    seconds = _seconds(bench.options)
    roles = [
        Role("prod", contender.file("enqueue.sql"), 1, {"rate": RATE}),
        Role("cons", claim, workers, options | {"lat": contender.payload_column, "per": 1 if whole else contender.batch_size}),
    ]
    if ticker := contender.file("ticker.sql"):
        roles.append(Role("tick", ticker, 1, {"rate": 1000 / contender.poll_ms, "per": 0}))

    def measure():
        result = bench.run(contender, roles, seconds, pooler=pooler)
        waited = result["cons"]["latency"].get("waited")
        kept = drivers.figures(result)
        if not waited:
            return {"tasks": 0, "rate": 0, "driver_error": kept.get("driver_error", "nothing was claimed")}
        return kept | {"p50_us": waited["p50_us"], "p99_us": waited["p99_us"], "max_us": waited["max_us"]}

    bench.sample(contender, {"path": variant, "what": "latency", "how": how}, measure)


def _idle(bench, contender, variant, how, options, pooler):
    claim = contender.file("claim_waiting_long.sql") or contender.file("claim.sql")
    if claim is None:
        return
    seconds = bench.options.idle_seconds / 2

    def idle(workers, driver=()):
        def measure():
            time.sleep(seconds)
            return {"tasks": 0, "rate": 0}

        kept = bench.measured(contender.database, measure, driver)
        bench.record(contender, {"path": variant, "what": "idle", "how": how, "workers": workers}, kept | {"cpu_share": kept["cpu_s"] / kept["watched_s"]})

    time.sleep(1)  # what the latency's tasks left to do is not idleness
    idle(0)
    running = bench.qbench(contender, [Role("cons", claim, IDLE, options)], 3 * seconds + 10, pooler=pooler)
    try:
        time.sleep(min(3.0, seconds))  # connected and waiting
        idle(IDLE, [running.process.pid])
    finally:
        _cancel(bench, contender)
        running.stop()


def _cancel(bench, contender):
    """Waits in the server last longer than the sample."""
    with bench.server.cluster.connect(contender.database) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
