"""Rebuild and verify: the record folded anew equals the table, or the difference is told and written."""

import json
import random

import psycopg
import pytest
from stint import background, call, parallel, rows, until, value
from test_projections import MAP, declare, fold_all, goods, project, record, verified


def test_verify_tells_each_difference_and_rebuild_writes_it(conn):
    declare(conn)
    for n in range(5):
        record(conn, sku=f"k{n}", qty=n)
    conn.execute("DELETE FROM goods WHERE sku = 'k0'")
    conn.execute("UPDATE goods SET qty = 1.00 WHERE sku = 'k1'")
    conn.execute("INSERT INTO goods VALUES ('x', 1)")
    conn.execute("SELECT stint.tick()")
    pos = value(conn, "SELECT max(end_pos) FROM stint.ticks")
    found = rows(conn, "SELECT key ->> 'sku' AS key, what, expected ->> 'qty' AS expected, actual ->> 'qty' AS actual FROM stint.verify('goods')")
    assert [tuple(f) for f in found] == [("k0", "missing", "0", None), ("k1", "different", "1", "1.00"), ("x", "extra", None, "1")]
    assert len(goods(conn)) == 5, "verify changes nothing"
    done = call(conn, "rebuild", relation="goods")[0]
    assert (done.events, done.inserted, done.updated, done.deleted, done.set_aside) == (5, 1, 1, 1, 0)
    conn.execute("SELECT stint.tick()")
    changes = rows(conn, "SELECT kind, key ->> 'sku' AS key FROM stint.changes('goods', %s)", pos)
    assert sorted(tuple(c) for c in changes) == [("+I", "k0"), ("+U", "k1"), ("-D", "x"), ("-U", "k1")], "true differences only"
    verified(conn)
    assert value(conn, "SELECT count(*) FROM pg_class WHERE relname LIKE 'stint_shadow%%'") == 0


def test_rebuild_goes_on_while_events_arrive(conn, connect):
    declare(conn)
    record(conn, sku="0", qty=0)
    conns = [connect() for _ in range(4)]
    done = []

    def work(n):
        if n == 3:
            while len(done) < 3:
                conns[n].execute("SELECT * FROM stint.rebuild('goods')")
                assert rows(conns[n], "SELECT * FROM stint.verify('goods')") == []
        else:
            for i in range(150):
                record(conns[n], sku=str(i % 5), qty=n * 1000 + i)
            done.append(n)

    parallel(4, work)
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 451
    verified(conn)


def test_verify_neither_waits_for_recorders_nor_holds_them_up(conn, connect):
    declare(conn)
    other = connect()
    other.execute("BEGIN")
    record(other, sku="a", qty=1)
    assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    with conn.transaction():
        conn.execute("SELECT * FROM stint.verify('goods')")
        record(other, sku="b", qty=1)
        other.execute("COMMIT")
    verified(conn)


def test_a_rebuild_remembers_deleted_keys_as_the_record_does(conn):
    declare(conn, "'deduplicate', sequence => '{at}'", columns=MAP | {"at": "payload.at"})
    project(conn, "gone", ["gone"], {"sku": "payload.sku", "at": "payload.at"}, kind="delete")
    record(conn, sku="a", qty=1, at="2020-01-02")
    record(conn, "gone", sku="a", at="2020-01-05")
    conn.execute("DELETE FROM goods_tombstones")
    call(conn, "rebuild", relation="goods")
    record(conn, sku="a", qty=2, at="2020-01-03")
    assert goods(conn) == []
    verified(conn)


ENGINES = ["'deduplicate'", "'deduplicate', sequence => '{at}'", "'partial-update', deletes => 'remove'", "'partial-update', groups => '{\"at\": [\"qty\", \"note\"]}'"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_one_by_one_and_batches_and_rebuild_give_the_same(conn, engine, seed):
    rng = random.Random(seed)
    events = []
    for n in range(80):
        payload = {"sku": str(rng.randrange(5)), "at": f"2020-01-{rng.randrange(1, 9):02}"}
        if rng.random() < 0.8:
            payload["qty"] = rng.choice([None, n, "1.10" if rng.random() < 0.5 else 2])
        if rng.random() < 0.3:
            payload["note"] = f"n{n}"
        events.append({"source": "s", "type": rng.choice(["stock", "stock", "gone"]), "payload": payload})
    columns = {name: f"payload.{name}" for name in ("sku", "qty", "note", "at")}
    results = []
    for mode in "one", "batches", "worker":
        conn.execute("BEGIN")
        freshness = "1 hour" if mode == "worker" else "0"
        declare(conn, engine, freshness=freshness, columns=columns)
        project(conn, "gone", ["gone"], {name: columns[name] for name in ("sku", "at")}, kind="delete", freshness=freshness)
        conn.execute("COMMIT")
        left = list(events)
        while left:
            size = 1 if mode == "one" else rng.randrange(1, 30)
            call(conn, "record_many", events=json.dumps(left[:size]))
            left = left[size:]
        if mode == "worker":
            while call(conn, "project", relation="goods", max=rng.randrange(1, 40))[0][0]:
                pass
        verified(conn)
        results.append(goods(conn, "sku, qty::text, note, at"))
        for name in "p", "gone":
            call(conn, "drop_projection", name=name)
        conn.execute("SELECT stint.drop_state('goods'); DROP TABLE goods; SET session_replication_role = replica; DELETE FROM stint.event_log; RESET session_replication_role")
    assert results[0] == results[1] == results[2] and results[0]


@pytest.mark.parametrize("engine", [e for e in ENGINES if "groups" not in e])
@pytest.mark.parametrize("freshness", ["0", "1 hour"])
def test_what_removed_events_amounted_to_stays(conn, engine, freshness):
    """Events go bit by bit, in the midst of those that keep arriving; the table stays what all of them say, deleted keys and their sequences included."""
    columns = {name: f"payload.{name}" for name in ("sku", "qty", "note", "at")}
    declare(conn, engine, freshness=freshness, columns=columns)
    project(conn, "gone", ["gone"], {name: columns[name] for name in ("sku", "at")}, kind="delete", freshness=freshness)
    rng, all_removed = random.Random(engine), 0
    for round in range(6):
        for _ in range(15):
            record(conn, rng.choice(["stock", "stock", "gone", "other"]), sku=str(rng.randrange(4)), qty=rng.random(), note="n", at=f"2020-01-{rng.randrange(1, 20):02}")
        if freshness != "0":
            call(conn, "project", relation="goods", max=10)
        before = goods(conn)
        removed = value(conn, "SELECT stint.expire_record(clock_timestamp())")
        all_removed += removed
        assert removed > 0 or freshness != "0"
        assert goods(conn) == before or freshness != "0", "only the worker, with a pass that was begun, changes the table meanwhile"
        assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    if freshness != "0":
        fold_all(conn)
    verified(conn)
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 90 - all_removed
    assert all_removed == 90 or freshness != "0"


def test_events_that_somebody_still_needs_are_not_removed(conn, connect):
    declare(conn)
    record(conn, sku="a", qty=1)
    poison = record(conn, sku="b", qty="many")
    record(conn, sku="c", qty=1)
    assert value(conn, "SELECT stint.expire_record(clock_timestamp() - interval '1 hour')") == 0
    assert value(conn, "SELECT stint.expire_record(clock_timestamp())") == 1
    call(conn, "skip_event", relation="goods", seq=poison)
    late = connect()
    late.execute("BEGIN")
    record(late, sku="d", qty=1)
    assert value(conn, "SELECT stint.expire_record(clock_timestamp())") == 2
    late.execute("COMMIT")
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 1
    verified(conn)
    assert goods(conn, "sku") == [("a",), ("c",), ("d",)]


def test_the_worker_lets_events_go_that_are_past_their_retention(conn):
    declare(conn, freshness="1 hour")
    with pytest.raises(psycopg.Error, match='"keep" is not positive') as error:
        call(conn, "set_record_retention", keep="0")
    assert error.value.sqlstate == "22023" and error.value.diag.message_hint
    for sku in "abc":
        record(conn, sku=sku, qty=1)
    fold_all(conn)
    call(conn, "set_record_retention", keep="1 hour")
    call(conn, "set_record_retention", keep="1 microsecond")
    assert rows(conn, "SELECT keep::text FROM stint.record_retention") == [("00:00:00.000001",)]
    until(conn, "SELECT NOT EXISTS (SELECT FROM stint.record_events)", 30)
    call(conn, "set_record_retention", keep=None)
    assert rows(conn, "SELECT * FROM stint.record_retention") == []
    assert value(conn, "SELECT count(*) FROM stint.base_images") == 1 and goods(conn, "sku") == [("a",), ("b",), ("c",)]
    record(conn, sku="d", qty=1)
    record(conn, sku="e", qty=1)
    assert call(conn, "expire_record", before="infinity", max=1)[0][0] == 0, "not folded yet"
    fold_all(conn)
    assert call(conn, "expire_record", before="infinity", max=1)[0][0] == 1 == value(conn, "SELECT count(*) FROM stint.record_events")
    verified(conn)


def test_only_the_owner_of_a_projected_table_rebuilds_it(conn):
    conn.execute("CREATE TABLE goods (sku text PRIMARY KEY); SELECT stint.create_state('goods', 'deduplicate')")
    for verb in "rebuild", "verify":
        with pytest.raises(psycopg.Error) as error:
            call(conn, verb, relation="goods")
        assert error.value.sqlstate == "42704" and "create_projection" in error.value.diag.message_hint
