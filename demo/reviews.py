#!/usr/bin/python3
"""A consumer of the changelog: asks for a review of every package that comes under the watched licence.

It reads nothing but the changes. Reaction and committed position share one transaction, so that a change is
reacted to once however often this program is restarted; the task's key makes a repeat harmless besides.
"""

import json
import os
import signal
import sys
import time

import psycopg

LICENCE = os.environ["WATCHED_LICENCE"]

POLL = "select pos, kind, key->>'package', before->'licences', after->'licences' from stint.poll('licence-watch', max => 200)"
REACT = "select stint.enqueue('review', jsonb_build_object('package', %s::text, 'licences', %s::jsonb, 'pos', %s::bigint), key => %s)"
COMMIT = "select stint.commit('licence-watch', %s)"


def watched(names):
    return bool({LICENCE, LICENCE + "+"} & set(names or []))


def react_to_some(db):
    """One batch; how many changes it held."""
    with db.transaction():
        changes = db.execute(POLL).fetchall()
        for pos, kind, package, before, after in changes:
            if kind in ("+I", "+U") and watched(after) and not watched(before):
                db.execute(REACT, [package, json.dumps(after), pos, package])
        if changes:
            db.execute(COMMIT, [changes[-1][0]])
    return len(changes)


def main():
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    with psycopg.connect(application_name="reviews", autocommit=True) as db:
        db.execute("select stint.create_consumer('licence-watch', '{packages}', start => 'earliest')")
        while not stopping:
            if not react_to_some(db):
                time.sleep(0.1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except psycopg.Error as trouble:
        sys.exit(f"reviews: {trouble}")
