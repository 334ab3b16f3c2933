"""What is kept of a state table goes with it, however it is dropped, and comes back with it where the drop is undone."""

import json

import pytest
from stint import call, rows, value

KEPT = ["state_config", "captures", "captured_columns", "image_layouts", "kept_images", "projection_config", "projection_positions", "events_aside", "base_images",
        "lookup_config", "watch_config", "watch_log", "watch_disarmed"]  # fmt: skip


@pytest.fixture
def full(conn):
    """A table of which everything is kept that there is, and one beside it that stays."""
    conn.execute("SELECT stint.create_queue('q'); CREATE SCHEMA shop; CREATE TYPE shop.article AS (sku text, qty int, note text)")
    conn.execute("CREATE TABLE shop.goods OF shop.article (PRIMARY KEY (sku)); CREATE TABLE stays (sku text PRIMARY KEY, qty int)")
    conn.execute("SELECT stint.create_state('shop.goods', 'deduplicate', sequence => '{qty}', history => '1 hour'), stint.create_state('stays', 'deduplicate')")
    columns = {name: f"payload.{name}" for name in ("sku", "qty", "note")}
    call(conn, "create_projection", name="p", relation="shop.goods", types=["stock"], columns=json.dumps(columns), freshness="1 hour")
    call(conn, "create_lookup", name="l", relation="shop.goods", types=["sale"], key='{"sku": "payload.sku"}', columns=["qty"])
    call(conn, "create_watch", name="w", relation="shop.goods", condition="qty < 5", rearm="qty > 7", queue="q")
    call(conn, "create_consumer", consumer="both", relations=["shop.goods", "stays"])
    call(conn, "create_consumer", consumer="one", relations=["shop.goods"])
    events = [{"sku": sku, "qty": qty} for sku, qty in (("a", 1), ("b", 2), ("c", 9))]
    call(conn, "record_many", events=json.dumps([{"source": "s", "type": "stock", "payload": event} for event in events]))
    call(conn, "project", relation="shop.goods")
    call(conn, "expire_record", before="infinity")
    call(conn, "record", source="s", type="stock", payload='{"sku": "x", "qty": "many"}')
    call(conn, "project", relation="shop.goods")
    conn.execute("SELECT stint.tag('t')")
    conn.execute("DELETE FROM shop.goods WHERE sku = 'b'")
    for change in "", "INSERT INTO stays VALUES ('k', 1)":
        conn.execute(change)
        conn.execute("SELECT stint.tick()")
    conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")
    while call(conn, "expire_changes")[0].more:
        pass
    conn.execute("ALTER TABLE stays ADD COLUMN later int")
    return conn


def kept(conn):
    # Layouts of images that are still in the changelog stay with them.
    counts = {table: value(conn, f"SELECT count(*) FROM stint.{table}") for table in KEPT}
    return counts | {"beside": value(conn, "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '(^gone_keys_|_tombstones$)'")}


@pytest.mark.parametrize(
    "drop", ["DROP TABLE shop.goods CASCADE", "DROP SCHEMA shop CASCADE", "DROP TYPE shop.article CASCADE", "DROP OWNED BY {role} CASCADE"]
)
def test_everything_kept_of_a_dropped_table_goes(full, drop):
    conn = full
    before = kept(conn)
    assert all(before.values()), before
    role = f"r_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role}; GRANT ALL ON SCHEMA shop TO {role}; ALTER TABLE shop.goods OWNER TO {role}")
    conn.execute("BEGIN")
    conn.execute(drop.format(role=role))
    conn.execute("ROLLBACK")
    assert kept(conn) == before
    conn.execute(drop.format(role=role))
    conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    after = kept(conn)
    assert {table: count for table, count in after.items() if count} == {"state_config": 1, "captures": 1, "captured_columns": 3, "image_layouts": 2, "beside": 1}
    assert rows(conn, "SELECT consumer, relations::text FROM stint.consumers ORDER BY 1") == [("both", "{stays}"), ("one", "{}")]
    assert [row.kind for row in call(conn, "poll", consumer="both")] == ["+I"] and call(conn, "poll", consumer="one") == []
    assert value(conn, "SELECT count(*) FROM stays_as_of('t')") == 0
    call(conn, "record", source="s", type="sale", payload='{"sku": "a"}')
    assert rows(conn, "SELECT * FROM stint.check()") == []
