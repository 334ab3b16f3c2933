"""Where the time goes: the statements of claim and completion, nested ones too, by pg_stat_statements. Not part of the figures."""

from .. import drivers

TITLE = "Where the time goes: statements of one by one, nested ones with them"
STATEMENTS = """
SELECT regexp_replace(query, '\\s+', ' ', 'g'), toplevel, calls, round(mean_exec_time::numeric * 1000, 1), round(mean_plan_time::numeric * 1000, 1), plans,
       round(shared_blks_hit::numeric / calls, 1), round(wal_bytes / calls)
FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
WHERE d.datname = %s AND calls >= 20 ORDER BY total_exec_time DESC LIMIT 24
"""
COLUMNS = ("query", "toplevel", "calls", "run_us", "plan_us", "plans", "buffers", "wal_bytes")


def variants(_options):
    return ("",)


def rounds(_options, _contender, _variant):
    return 1


def runs(contender, _variant):
    return contender.can("claim.sql")


def seconds(options, _contender, _variant):
    return options.seconds + options.overhead


def run(bench, contender, _variant):
    cluster = bench.server.cluster
    bench.fresh(contender)
    bench.load(contender, 20_000 if not bench.options.quick else 3000)
    bench.warm(contender, 500)
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    for name, value in ("track", "all"), ("track_planning", "on"):
        cluster.sql(f"ALTER DATABASE {contender.database} SET pg_stat_statements.{name} = '{value}'")
    cluster.sql("SELECT pg_stat_statements_reset()")
    result = bench.run(contender, [contender.claimers(4)])
    with cluster.connect() as conn:
        rows = conn.execute(STATEMENTS, (contender.database,)).fetchall()
    statements = [dict(zip(COLUMNS, (float(v) if hasattr(v, "as_tuple") else v for v in row), strict=True)) for row in rows]
    bench.record(contender, {}, drivers.figures(result) | {"statements": statements})
