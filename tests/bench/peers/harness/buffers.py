"""How many buffers one claim touches, by EXPLAIN; what nested statements touch is in it."""

import json
import statistics


def claim_statement(contender):
    """The claiming statement of a script, as plain SQL."""
    lines = [line for line in contender.file("claim.sql").read_text().splitlines() if not line.lstrip().startswith(("--", "\\set"))]
    return "\n".join(lines).split("\\gset")[0].replace(":client_id", "'0'")


def of_claim(bench, contender, claims=5):
    """Buffers of a claim, the median of some that are rolled back; the first ones of a session read the catalogue and do not count."""
    statement = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + claim_statement(contender)
    found = []
    with bench.server.cluster.connect(contender.database, autocommit=False) as conn:
        for turn in range(claims + 3):
            plan = conn.execute(statement).fetchone()[0]
            conn.rollback()
            top = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
            if turn >= 3:
                found.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
    return {"buffers": statistics.median(found)}
