"""How many buffers one claim touches, by EXPLAIN; what nested statements touch is in it."""

import json
import re
import statistics


def claim_statement(path):
    """The claiming statement of a script, as plain SQL: any value will do for its variables."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith(("--", "\\set"))]
    return re.sub(r"(?<!:):(?!:)[a-z_]\w*", "'9'", "\n".join(lines).split("\\gset")[0])


def of_claim(bench, contender, script="claim.sql", claims=5):
    """Buffers of a claim, the median of some that are rolled back; the first ones of a session read the catalogue and do not count."""
    statement = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + claim_statement(contender.file(script))
    found = []
    with bench.server.cluster.connect(contender.database, autocommit=False) as conn:
        for turn in range(claims + 3):
            plan = conn.execute(statement).fetchone()[0]
            conn.rollback()
            top = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
            if turn >= 3:
                found.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
    return {"buffers": statistics.median(found)}
