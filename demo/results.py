#!/usr/bin/python3
"""The first writer of `packages`: carries finished extractions into the state table, a batch at a time.

It keeps nothing of its own: what is completed in the queue and not yet in the table is what is left to do.
"""

import signal
import sys
import time

import psycopg

BATCH = 40

MERGE = """
    with batch as (
        select jsonb_agg(jsonb_build_object(
                   'package', t.result->>'package',
                   'kind', t.result->>'kind',
                   'licences', t.result->'licences',
                   'holders', t.result->'holders',
                   'confidence', t.result->'confidence',
                   'licence_seq', (extract(epoch from t.finished_at) * 1000000)::bigint)) as rows
        from (select p.result, t.finished_at
              from stint.tasks t
              join stint.task_payloads p using (queue, id)
              where t.queue = 'extract' and t.status = 'completed'
                and not exists (select from packages
                                where package = p.result->>'package' and licence_seq is not null)
              order by t.finished_at
              limit %s) t)
    insert into merges
    select 'results', 'new', m.inserted, m.updated, m.deleted, m.unchanged, m.late
    from batch cross join lateral stint.merge('packages', batch.rows) m
    where batch.rows is not null
    returning inserted + updated as written"""


def main():
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    with psycopg.connect(application_name="results", autocommit=True) as db:
        while not stopping:
            if not db.execute(MERGE, [BATCH]).fetchall():
                time.sleep(0.2)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except psycopg.Error as trouble:
        sys.exit(f"results: {trouble}")
