"""What one call writes: WAL with its commit, and rows by table, of single calls in one session. The median of some."""

import re
import statistics

from ..scripts import filled, statements

TITLE = "What one call writes"
CALLS = 40
ROWS = """
SELECT regexp_replace(relname, '_c\\d+_\\d+$', ''), n_tup_ins, n_tup_upd, n_tup_del
FROM pg_stat_xact_user_tables WHERE n_tup_ins + n_tup_upd + n_tup_del > 0 AND schemaname <> 'pg_toast'
"""
PAYLOAD = '{"t": 0, "pad": "' + "x" * 265 + '"}'


def variants(_options):
    return ("",)


def rounds(_options, _contender, _variant):
    return 1


def runs(contender, _variant):
    return contender.can("enqueue.sql", "claim.sql")


def seconds(options, _contender, _variant):
    return 2 + options.overhead


def _sections(path):
    """A file of named statements: each under a line "-- name: how it is prepared", where that is "claimed" or "nothing"."""
    found = re.findall(r"^-- (.+?): (claimed|nothing)\n((?:(?!-- ).*\n)+)", path.read_text(), re.M)
    return [(name, prepared == "claimed", text.strip().rstrip(";")) for name, prepared, text in found]


class _Session:
    def __init__(self, conn):
        self.conn = conn
        self.values = {"payload": PAYLOAD, "client_id": "0"}

    def call(self, statement):
        """Runs it in a transaction of its own; returns bytes of WAL and rows by table, and keeps what it returned for the next."""
        text = filled(statement, self.values.__getitem__)
        before = self.conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()[0]
        with self.conn.transaction():
            counted = self._rows()  # with what the session has not told the server's statistics yet
            cursor = self.conn.execute(text)
            if cursor.description and (row := cursor.fetchone()):
                # An array is written as PostgreSQL writes it, which only ids need here.
                self.values |= {column.name: value for column, value in zip(cursor.description, row, strict=True) if not isinstance(value, (dict, list))}
            rows = self._rows()
        after = self.conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()[0]
        changed = {name: [now - then for now, then in zip(counts, counted.get(name, (0, 0, 0)), strict=True)] for name, counts in rows.items()}
        return float(after - before), {name: counts for name, counts in changed.items() if any(counts)}

    def _rows(self):
        return {name: counts for name, *counts in self.conn.execute(ROWS)}


def run(bench, contender, _variant):
    bench.fresh(contender)
    bench.load(contender, 3000)
    bench.warm(contender, 1000)
    claim, *complete = statements(contender.file("claim.sql"))
    plan = [("enqueue one", False, statements(contender.file("enqueue.sql"))[0]), ("claim one", False, claim), ("complete one", True, complete[0])]
    if more := contender.file("operations.sql"):
        plan += _sections(more)
    with bench.server.cluster.connect(contender.database) as conn:
        session = _Session(conn)
        for name, claimed, statement in plan:
            wal, rows = [], {}
            for _ in range(CALLS):
                if claimed:
                    session.call(claim)
                written, rows = session.call(statement)
                wal.append(written)
            totals = {kind: sum(counts[at] for counts in rows.values()) for at, kind in enumerate(("inserted", "updated", "deleted"))}
            bench.record(contender, {"call": name}, {"tasks": 1, "rate": 0, "wal_bytes_each": statistics.median(wal), "tables": rows, **totals})
