"""Partitioned tables together with all that state tables have: points in the past, retention, projections and watches."""

import json

import psycopg.errors
import pytest
from stint import call, rows, value

LIST = """
    CREATE TABLE goods (region text, id int, qty int, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
    CREATE TABLE north PARTITION OF goods FOR VALUES IN ('n');
    CREATE TABLE south PARTITION OF goods FOR VALUES IN ('s') PARTITION BY RANGE (id);
    CREATE TABLE south_low PARTITION OF south FOR VALUES FROM (MINVALUE) TO (100);
    CREATE TABLE south_high (id int NOT NULL, note text, gone int, region text NOT NULL, qty int);
    ALTER TABLE south_high DROP COLUMN gone;
    ALTER TABLE south ATTACH PARTITION south_high FOR VALUES FROM (100) TO (MAXVALUE);
"""


def texts(conn, source):
    return sorted(row for (row,) in conn.execute(f"SELECT r::text FROM {source} r"))


def changed(conn):
    """One change after another that a partition sees, each in its own transaction."""
    yield "INSERT INTO goods SELECT r, n, 0, 'first' FROM unnest('{n,s}'::text[]) r, generate_series(95, 105) n"
    yield "UPDATE goods SET region = 's', id = id + 1000 WHERE region = 'n' AND id < 97"  # to another partition
    yield "UPDATE south SET id = id + 20 WHERE id = 95"  # between its partitions
    yield "DELETE FROM goods WHERE id = 97; DELETE FROM south_low WHERE id = 98"
    yield "UPDATE south_high SET qty = qty + 1"
    yield "TRUNCATE south_low"
    yield "INSERT INTO goods VALUES ('s', 98, 9, 'again')"
    yield "TRUNCATE north; INSERT INTO north VALUES ('n', 1, 1, 'only')"
    yield "ALTER TABLE goods DETACH PARTITION north"
    yield "INSERT INTO north VALUES ('n', 2, 2, 'unseen')"
    yield "ALTER TABLE goods ATTACH PARTITION north FOR VALUES IN ('n')"
    yield "CREATE TABLE west PARTITION OF goods FOR VALUES IN ('w'); INSERT INTO goods VALUES ('w', 1, 1, 'new')"
    yield "ALTER TABLE goods ADD COLUMN extra int DEFAULT 1; UPDATE goods SET extra = 2 WHERE region = 'w'"
    yield "DROP TABLE west"
    yield "TRUNCATE goods"
    yield "INSERT INTO goods SELECT 's', n, n FROM generate_series(90, 110) n"


@pytest.mark.parametrize("retention", [False, True])
def test_tags_read_back_what_partitions_held(conn, retention):
    conn.execute(LIST)
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', history => '1 hour')")
    seen, columns = {}, "region, id, qty, note"
    read = lambda source: texts(conn, f"(SELECT {columns} FROM {source})")
    for number, change in enumerate(changed(conn)):
        conn.execute(change)
        tag = f"t{number}"
        seen[tag] = read("goods")
        conn.execute("SELECT stint.tag(%s)", (tag,))
        if retention and number % 4 == 3:
            conn.execute("SELECT stint.tick()")
            conn.execute("UPDATE stint.ticks SET at = at - interval '1 day'")
            while call(conn, "expire_changes")[0].more:
                pass
    if retention:
        assert value(conn, "SELECT count(*) FROM stint.change_log") == 0 < value(conn, "SELECT count(*) FROM stint.kept_images")
    assert len(set(map(str, seen.values()))) > 10
    for tag, expected in seen.items():
        assert read(f"goods_as_of('{tag}')") == expected, tag
        assert value(conn, f"SELECT count(extra) FROM goods_as_of('{tag}')") == (len(expected) if int(tag[1:]) >= 12 else 0), tag
    everything = {row: None for rows_of in seen.values() for row in rows_of}
    assert len(everything) > 50
    for key in (("s", 98), ("n", 1), ("w", 1), ("s", 105), ("n", 97)):
        for tag, expected in seen.items():
            found = conn.execute(f"SELECT r::text FROM (SELECT {columns} FROM goods_as_of(%s) WHERE region = %s AND id = %s) r", (tag, *key)).fetchall()
            assert [row for (row,) in found] == [row for row in expected if row.startswith(f"({key[0]},{key[1]},")], (tag, key)


MAP = {"region": "payload.region", "id": "payload.id", "qty": "payload.qty", "note": "payload.note"}


@pytest.mark.parametrize("freshness", ["0", "1 hour"])
@pytest.mark.parametrize("engine", ["'deduplicate', sequence => '{qty}'", "'aggregation', fields => '{\"qty\": \"sum\", \"*\": \"last_value\"}'"])
def test_a_projected_partitioned_table_is_rebuilt_and_verified(conn, engine, freshness):
    conn.execute(LIST)
    conn.execute(f"SELECT stint.create_state('goods', {engine})")
    call(conn, "create_projection", name="p", relation="goods", types=["stock"], columns=json.dumps(MAP), freshness=freshness)
    call(conn, "create_projection", name="d", relation="goods", types=["gone"], columns=json.dumps(MAP), freshness=freshness, kind="delete")

    def record(count, kind="stock"):
        events = [{"source": "s", "type": kind, "payload": {"region": "ns"[n % 2], "id": 90 + n % 20, "qty": n}} for n in range(count)]
        call(conn, "record_many", events=json.dumps(events))
        while call(conn, "project", relation="goods")[0][0]:
            pass

    record(60)
    record(5, "gone")
    assert value(conn, "SELECT count(*) FROM south_high") > 0 < value(conn, "SELECT count(*) FROM north")
    assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    before = value(conn, "SELECT count(*) FROM stint.change_log")
    assert call(conn, "rebuild", relation="goods")[0][1:4] == (0, 0, 0)
    conn.execute("UPDATE south_high SET qty = -1 WHERE id = 101; DELETE FROM north WHERE id = 96")
    assert {row.what for row in rows(conn, "SELECT * FROM stint.verify('goods')")} == {"different", "missing"}
    assert call(conn, "rebuild", relation="goods")[0][1:4] == (1, 1, 0)
    assert value(conn, "SELECT count(*) FROM stint.change_log") == before + 4, "what was done by hand and what was put right, and nothing of the fold beside the table"
    assert call(conn, "expire_record", before="infinity")[0][0] == 65
    record(30)
    assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    assert rows(conn, "SELECT relation::text FROM stint.captures") == [("goods",)] and rows(conn, "SELECT relation::text FROM stint.states") == [("goods",)]


def test_a_watch_fires_for_what_is_written_to_a_partition(conn):
    conn.execute(LIST)
    conn.execute("SELECT stint.create_state('goods', 'deduplicate'); SELECT stint.create_queue('q')")
    call(conn, "create_watch", name="low", relation="goods", condition="qty < 5", queue="q")
    tasks = lambda: value(conn, "SELECT count(*) FROM stint.tasks")
    conn.execute("INSERT INTO south_high (region, id, qty) VALUES ('s', 200, 1), ('s', 201, 9)")
    assert tasks() == 1
    conn.execute("UPDATE south SET qty = 2 WHERE id = 201; UPDATE north SET qty = 1")
    assert tasks() == 2
    conn.execute("UPDATE goods SET id = 3 WHERE id = 200")
    assert tasks() == 3, "another key, in another partition"
    conn.execute("ALTER TABLE goods DETACH PARTITION north; INSERT INTO north VALUES ('n', 1, 1); UPDATE north SET qty = 9; UPDATE north SET qty = 1")
    assert tasks() == 3, "no part of the table"
    conn.execute("ALTER TABLE goods ATTACH PARTITION north FOR VALUES IN ('n')")
    assert tasks() == 4, "it came with a row that is low"


def test_a_partition_with_rows_neither_joins_nor_leaves_a_projected_table(conn):
    conn.execute(LIST)
    conn.execute("SELECT stint.create_state('goods', 'deduplicate')")
    call(conn, "create_projection", name="p", relation="goods", types=["stock"], columns=json.dumps(MAP))
    call(conn, "record", source="s", type="stock", payload=json.dumps({"region": "n", "id": 1}))
    conn.execute("CREATE TABLE west (LIKE goods); INSERT INTO west VALUES ('w', 1)")
    attach, detach, drop = "ALTER TABLE goods ATTACH PARTITION west FOR VALUES IN ('w')", "ALTER TABLE goods DETACH PARTITION north", "DROP TABLE north"
    logged = value(conn, "SELECT count(*) FROM stint.change_log")
    for statement, partition in (attach, "west"), (detach, "north"), (drop, "north"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"public.{partition}: it has rows, and public.goods is projected") as error:
            conn.execute(statement)
        assert error.value.diag.message_detail == "Its projections are p." and "drop_projection" in error.value.diag.message_hint
    assert value(conn, "SELECT count(*) FROM stint.change_log") == logged and rows(conn, "SELECT * FROM stint.verify('goods')") == []
    conn.execute("DELETE FROM west")
    for statement in attach, "ALTER TABLE goods DETACH PARTITION south", "DROP TABLE west":
        conn.execute(statement)
    assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    call(conn, "drop_projection", name="p")
    conn.execute(detach)


def test_partitions_come_and_go_without_running_what_a_search_path_offers(conn):
    """The look-ups behind ATTACH, DETACH, CREATE and DROP run as the extension's owner: an operator of the caller's must not slip in."""
    conn.execute("CREATE TABLE parted (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)")
    conn.execute("SELECT stint.create_state('parted', 'deduplicate')")
    conn.execute("CREATE SCHEMA trap")
    for type_name in ("oid", "text", "name", "\"char\""):
        conn.execute(f"CREATE FUNCTION trap.eq({type_name}, {type_name}) RETURNS bool LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
        conn.execute(f"CREATE OPERATOR trap.= (LEFTARG = {type_name}, RIGHTARG = {type_name}, FUNCTION = trap.eq)")
    conn.execute("SET search_path = trap, public, pg_catalog")
    conn.execute("CREATE TABLE one PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    conn.execute("CREATE TABLE two (id int PRIMARY KEY, v int)")
    conn.execute("INSERT INTO two VALUES (11, 1)")
    conn.execute("ALTER TABLE parted ATTACH PARTITION two FOR VALUES FROM (10) TO (20)")
    conn.execute("INSERT INTO one VALUES (1, 1)")
    conn.execute("ALTER TABLE parted DETACH PARTITION one")
    conn.execute("DROP TABLE two")
    conn.execute("RESET search_path")
    conn.execute("SELECT stint.tick()")
    found = conn.execute("SELECT kind, (key ->> 'id')::int FROM stint.changes('parted') ORDER BY pos").fetchall()
    assert found == [("+I", 11), ("+I", 1), ("-D", 1), ("-D", 11)]
