"""State tables as the source of logical replication, as a subscriber and a CDC tool read them: through pgoutput."""

import random

import psycopg
import psycopg.errors
import pytest

SCHEMA = "CREATE TABLE goods (id int PRIMARY KEY, name text, qty numeric, at timestamptz)"
EVERYTHING = "SELECT array_agg(g::text ORDER BY id) FROM goods g"


@pytest.fixture
def source(cluster):
    server = cluster(config={"wal_level": "logical"})
    server.create_database("app")
    with server.connect("app") as conn:
        conn.execute(SCHEMA)
        conn.execute("SELECT stint.create_state('goods', 'partial-update', groups => '{\"at\": [\"qty\"]}')")
        conn.execute("CREATE PUBLICATION cdc FOR TABLE goods")
    return server


def merge(conn, rows, kind="upsert"):
    conn.execute("SELECT FROM stint.merge('goods', %s, %s)", (rows, kind))


def same(source, target, dbname="copy"):
    """The subscriber has confirmed all that the source wrote, and then holds what the source holds."""
    source.wait_until(
        "SELECT bool_and(confirmed_flush_lsn >= pg_current_wal_lsn()) AND count(*) > 0 FROM pg_replication_slots WHERE slot_type = 'logical' AND active",
        dbname="app",
    )
    expected = source.sql(EVERYTHING, dbname="app")
    target.wait_until("SELECT NOT EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r')", dbname=dbname)
    assert target.sql(EVERYTHING, dbname=dbname) == expected
    return expected


def subscribe(source, target, dbname="copy"):
    with target.connect(dbname) as conn:
        conn.execute("SET timezone = 'UTC'")
        conn.execute(psycopg.sql.SQL("CREATE SUBSCRIPTION copy CONNECTION {} PUBLICATION cdc").format(source.dsn("app")))


def test_a_subscriber_of_a_state_table_holds_what_the_state_table_holds(source, cluster):
    target = cluster(config={"wal_level": "logical"})
    target.create_database("copy", extension=False)
    target.sql(SCHEMA, dbname="copy")
    with source.connect("app") as conn:
        merge(conn, '[{"id": 1, "name": "a", "qty": 1.10, "at": "2026-01-01"}, {"id": 2, "name": "b"}]')
        subscribe(source, target)
        chance = random.Random(3)
        for number in range(60):
            conn.execute("BEGIN")
            for _ in range(chance.randint(1, 3)):
                key, kind = chance.randint(1, 9), chance.choice(["upsert", "upsert", "upsert", "delete", "retract"])
                row = f'{{"id": {key}, "name": "n{number}", "qty": {chance.randint(0, 99)}.50, "at": "2026-01-{chance.randint(10, 28)}"}}'
                merge(conn, f"[{row}]", kind)
            conn.execute("SAVEPOINT s")
            merge(conn, f'[{{"id": 1, "name": "never {number}"}}]')
            conn.execute("ROLLBACK TO s")
            conn.execute("ROLLBACK" if chance.random() < 0.3 else "COMMIT")
        conn.execute("DELETE FROM goods WHERE id = 2")
        conn.execute("UPDATE goods SET id = 50 WHERE id = (SELECT max(id) FROM goods)")
        assert len(same(source, target)) > 3
        conn.execute("TRUNCATE goods")
        merge(conn, '[{"id": 3, "name": "after"}]')
        assert same(source, target) == ["(3,after,,)"]
        # Nothing of the extension's own is published.
        assert target.sql("SELECT count(*) FROM pg_class WHERE relname LIKE '%tombstones%' OR relnamespace = to_regnamespace('stint')", dbname="copy") == 0


def test_a_copy_may_be_a_source_of_merges_but_no_state_table(source):
    """In one server, with the extension on both ends: what a subscription writes fires no capture trigger, so such a table is refused."""
    source.create_database("copy")
    source.sql(SCHEMA, dbname="copy")
    with source.connect("app") as conn, source.connect("copy") as copy:
        conn.execute("SELECT pg_create_logical_replication_slot('copy', 'pgoutput')")
        copy.execute(
            psycopg.sql.SQL("CREATE SUBSCRIPTION copy CONNECTION {} PUBLICATION cdc WITH (create_slot = false, slot_name = 'copy')").format(source.dsn("app"))
        )
        merge(conn, '[{"id": 1, "name": "a"}]')
        assert same(source, source) == ["(1,a,,)"]
        with pytest.raises(psycopg.errors.FeatureNotSupported, match='the subscription "copy" writes to it') as caught:
            copy.execute("SELECT stint.create_state('goods', 'deduplicate')")
        assert caught.value.diag.message_hint
        copy.execute("DROP SUBSCRIPTION copy")


def test_pgoutput_carries_the_row_before_where_the_replica_identity_is_full(source):
    """What a CDC tool makes -U of. With the default identity, an update carries the new row alone and a deletion the key."""
    with source.connect("app") as conn:
        conn.execute("SELECT pg_create_logical_replication_slot('cdc', 'pgoutput')")

        def messages():
            """The letters of the messages, and for updates and deletions that of the part that comes first."""
            rows = conn.execute("SELECT data FROM pg_logical_slot_get_binary_changes('cdc', NULL, NULL, 'proto_version', '1', 'publication_names', 'cdc')")
            found = [bytes(data) for (data,) in rows]
            return [chr(m[0]) + (chr(m[5]) if chr(m[0]) in "UD" else "") for m in found if chr(m[0]) in "IUDT"]

        def write():
            merge(conn, '[{"id": 1, "name": "a"}]')
            merge(conn, '[{"id": 1, "name": "b"}]')
            merge(conn, '[{"id": 1, "name": "b"}]')  # changes nothing, is nothing
            conn.execute("DELETE FROM goods")
            conn.execute("TRUNCATE goods")

        write()
        assert messages() == ["I", "UN", "DK", "T"]
        conn.execute("ALTER TABLE goods REPLICA IDENTITY FULL")
        write()
        assert messages() == ["I", "UO", "DO", "T"]
        conn.execute("SELECT pg_drop_replication_slot('cdc')")
