"""How many buffers one claim touches, by EXPLAIN; what nested statements touch is in it."""

import json
import statistics

from .scripts import filled, statements


def of_claim(bench, contender, script="claim.sql", claims=5):
    """Buffers of a claim, the median of some that are rolled back; the first ones of a session read the catalogue and do not count."""
    # Any value will do for the variables: names of workers, and a number.
    claim = filled(statements(contender.file(script))[0], lambda _name: 9)
    found = []
    with bench.server.cluster.connect(contender.database, autocommit=False) as conn:
        for turn in range(claims + 3):
            plan = conn.execute("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + claim).fetchone()[0]
            conn.rollback()
            top = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
            if turn >= 3:
                found.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
    return {"buffers": statistics.median(found)}
