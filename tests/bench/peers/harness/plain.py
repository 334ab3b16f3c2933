"""The plain multi-row insert that stint.enqueue_many is compared with: the same rows into the same tables, with ids of their own, and nothing else."""

import json

from .drivers import PAYLOAD
from .scripts import filled, statements

# Tables that hold rows, each partition for itself.
TABLES = """
SELECT c.oid::regclass::text, c.oid FROM pg_class c
WHERE c.relnamespace = 'stint'::regnamespace AND c.relkind = 'r' AND pg_relation_size(c.oid) > 0 ORDER BY c.oid
"""
COLUMNS = "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"

# An id keeps its time and its last byte, by which the history is partitioned; what lies between grows with each row, as it does in ids of the product.
NUMBER = "lpad(to_hex(nextval('plain.number')), 16, '0') as number"
ID = "(left(id::text, 14) || '7' || left(number, 3) || '-8' || substr(number, 4, 3) || '-' || right(number, 10) || right(id::text, 2))::uuid"
VALUES = {"id": ID, "seq": "nextval('plain.number')", "xid8": "pg_current_xact_id()"}


def write_plain_insert(conn, path, enqueue_many, init):
    """Calls enqueue_many once, keeps the rows its transaction wrote, and writes a script that inserts a thousand like them at each run."""
    conn.execute("CREATE SCHEMA IF NOT EXISTS plain")
    conn.execute("CREATE SEQUENCE IF NOT EXISTS plain.number START 1000000000")
    tasks = conn.execute(filled(statements(init)[0], lambda _payload: PAYLOAD))
    named = dict(zip((column.name for column in tasks.description), tasks.fetchone(), strict=True))
    call = filled(statements(enqueue_many)[0], named.__getitem__)
    with conn.transaction():
        conn.execute(call)
        xid = conn.execute("SELECT pg_current_xact_id()::text::bigint % (2 ^ 32)::bigint").fetchone()[0]
    inserts = []
    for number, (table, oid) in enumerate(conn.execute(TABLES).fetchall()):
        found = conn.execute(f"CREATE TABLE plain.rows_{number} AS SELECT * FROM {table} WHERE xmin::text::bigint = %s", (xid,)).rowcount
        if found <= 0:
            conn.execute(f"DROP TABLE plain.rows_{number}")
            continue
        columns = conn.execute(COLUMNS, (oid,)).fetchall()
        values = [VALUES.get(name if kind != "xid8" else kind, name) for name, kind in columns]
        conn.execute(f"VACUUM ANALYZE plain.rows_{number}")
        names = ", ".join(name for name, _ in columns)
        inserts.append((table, f"insert into {table} ({names}) select {', '.join(values)} from (select *, {NUMBER} from plain.rows_{number}) r", found))
    return _write(path, inserts)


def _write(path, inserts):
    tables = json.dumps({table: rows for table, _, rows in inserts})
    lines = [f"-- Rows that one call of stint.enqueue_many wrote, by table: {tables}"]
    *first, last = [text for _, text, _ in inserts]
    parts = [f"t{number} as ({text})" for number, text in enumerate(first)]
    lines.append(("with " + ",\n".join(parts) + "\n" if parts else "") + last + ";")
    path.write_text("\n".join(lines) + "\n")
    return path
