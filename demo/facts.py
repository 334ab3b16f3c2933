#!/usr/bin/python3
"""The second writer of `packages`: what dpkg knows of every installed package.

It then does what a writer does that is not sure whether its calls got through: it sends everything once more,
and, worse, sends an out-of-date version of it. Neither may change a row.
"""

import json
import subprocess
import sys
import time

import psycopg

BATCH = 50
PAUSE = 0.5  # seconds between batches, so that both writers are at work at the same time

# The sequence number is dpkg's own: when the package's files were last changed.
FORMAT = "${Package}\t${Version}\t${Installed-Size}\t${Section}\t${db-fsys:Last-Modified}\t${db:Status-Status}\n"

MERGE = """
    insert into merges
    select 'facts', %s, m.inserted, m.updated, m.deleted, m.unchanged, m.late from stint.merge('packages', %s) m"""


def installed():
    listing = subprocess.run(["dpkg-query", "-W", "-f", FORMAT], check=True, capture_output=True, text=True).stdout
    packages = {}
    for line in listing.splitlines():
        package, version, size, section, changed, status = line.split("\t")
        if status == "installed":  # a package installed for two architectures counts once
            packages[package] = {
                "package": package, "version": version, "size_kb": int(size or 0), "section": section or None,
                "facts_seq": int(changed or 0)}
    return list(packages.values())


def main():
    rows = installed()
    batches = [rows[start:start + BATCH] for start in range(0, len(rows), BATCH)]
    with psycopg.connect(application_name="facts", autocommit=True) as db:
        for batch in batches:
            db.execute(MERGE, ["new", json.dumps(batch)])
            time.sleep(PAUSE)
        for batch in batches:
            db.execute(MERGE, ["again", json.dumps(batch)])
        for batch in batches:
            stale = [{**row, "version": "out of date", "facts_seq": row["facts_seq"] - 1} for row in batch]
            db.execute(MERGE, ["stale", json.dumps(stale)])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except psycopg.Error as trouble:
        sys.exit(f"facts: {trouble}")
