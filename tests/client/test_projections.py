"""Projections: what the record says becomes rows, in its order, at once or within the freshness."""

import json
import random

import psycopg
import pytest
from stint import background, call, parallel, rows, value, waiting

GOODS = "CREATE TABLE goods (sku text PRIMARY KEY, qty numeric, note text, seq bigint, at timestamptz)"
MAP = {"sku": "payload.sku", "qty": "payload.qty", "note": "payload.note", "seq": "seq", "at": "occurred_at"}


def declare(conn, engine="'deduplicate'", freshness="0", table=GOODS, **more):
    conn.execute(table)
    conn.execute(f"SELECT stint.create_state('goods', {engine})")
    project(conn, freshness=freshness, **more)


def project(conn, name="p", types=("stock",), columns=MAP, **more):
    call(conn, "create_projection", name=name, relation="goods", types=list(types), columns=json.dumps(columns), **more)


def record(conn, type="stock", source="s", event_id=None, **payload):
    return call(conn, "record", source=source, type=type, payload=json.dumps(payload), event_id=event_id)[0][0]


def goods(conn, columns="sku, qty::text, note"):
    return [tuple(row) for row in conn.execute(f"SELECT {columns} FROM goods ORDER BY 1")]


def verified(conn):
    """That the table is what the record says, and that a rebuild finds nothing to change."""
    assert rows(conn, "SELECT * FROM stint.verify('goods')") == []
    done = call(conn, "rebuild", relation="goods")[0]
    assert (done.inserted, done.updated, done.deleted) == (0, 0, 0)
    return done


def fold_all(conn):
    while call(conn, "project", relation="goods")[0][0]:
        pass


def test_an_event_changes_the_table_in_the_transaction_that_records_it(conn, connect):
    declare(conn)
    other = connect()
    with conn.transaction():
        seq = record(conn, sku="a", qty=1)
        assert goods(conn, "sku, qty, note, seq") == [("a", 1, None, seq)]
        assert goods(other) == []
    assert len(goods(other)) == 1
    with pytest.raises(ZeroDivisionError):
        with conn.transaction():
            record(conn, sku="b")
            raise ZeroDivisionError
    assert len(goods(conn)) == 1
    verified(conn)


def test_numbers_and_paths_arrive_exactly(conn):
    conn.execute("CREATE TABLE goods (sku text PRIMARY KEY, n numeric, whole jsonb, s text, t text, id text, c numeric, r timestamptz)")
    conn.execute("SELECT stint.create_state('goods', 'partial-update')")
    project(conn, columns={"sku": ["payload", "a.b", "sku"], "n": "payload.n", "whole": "payload", "s": "source", "t": "type", "id": "event_id",
                           "c": {"const": 1}, "r": "recorded_at"})  # fmt: skip
    conn.execute("SELECT stint.drop_projection('p')")
    conn.execute("""SELECT stint.create_projection('p', 'goods', '{stock}', '{"sku": ["payload", "a.b", "sku"], "n": "payload.n", "whole": "payload",
        "s": "source", "t": "type", "id": "event_id", "c": {"const": 1.10}, "r": "recorded_at"}')""")
    payload = '{"a.b": {"sku": "x"}, "n": 123456789012345678901234567890.10}'
    call(conn, "record", source="src", type="stock", payload=payload, event_id="e'1")
    assert goods(conn, "sku, n::text, whole = %s::jsonb, s, t, id, c::text" % ("'" + payload + "'")) == [
        ("x", "123456789012345678901234567890.10", True, "src", "stock", "e'1", "1.10")]  # fmt: skip
    assert value(conn, "SELECT g.r = e.recorded_at FROM goods g, stint.record_events e")
    conn.execute("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German'")
    verified(conn)


def test_a_missing_field_leaves_the_column_alone_and_a_null_does_what_the_engine_says(conn):
    declare(conn, "'partial-update'", columns=MAP)
    record(conn, sku="a", qty=1, note="n")
    record(conn, sku="a", qty=2)
    assert goods(conn) == [("a", "2", "n")]
    verified(conn)


def test_several_projections_of_one_table_fold_in_the_order_of_events(conn):
    declare(conn)
    project(conn, "gone", ["gone"], {"sku": "payload.sku"}, kind="delete")
    batch = [("stock", "a", 1), ("gone", "a", None), ("stock", "b", 1), ("stock", "a", 2), ("gone", "b", None), ("other", "c", 1), ("stock", "a", 3)]
    call(conn, "record_many", events=json.dumps([{"source": "s", "type": t, "payload": {"sku": k, "qty": q}} for t, k, q in batch]))
    assert goods(conn) == [("a", "3", None)]
    verified(conn)


def test_a_projected_table_has_no_other_feed(conn):
    declare(conn)
    with pytest.raises(psycopg.Error) as error:
        conn.execute("SELECT * FROM stint.merge('goods', '[{\"sku\": \"x\"}]')")
    assert error.value.sqlstate == "55000" and "p" in error.value.diag.message_detail
    with pytest.raises(psycopg.Error, match="projected"):
        conn.execute("SELECT stint.drop_state('goods')")
    record(conn, sku="a", qty=1)
    call(conn, "drop_projection", name="p")
    conn.execute("SELECT * FROM stint.merge('goods', '[{\"sku\": \"x\"}]')")
    assert len(goods(conn)) == 2
    with pytest.raises(psycopg.Error, match="has rows") as error:
        project(conn)
    assert error.value.sqlstate == "55000" and "replace_rows" in error.value.diag.message_hint
    project(conn, replace_rows=True)
    assert goods(conn) == [("a", "1", None)]
    verified(conn)


@pytest.mark.parametrize(
    "change, sqlstate, says",
    [({"columns": {"sku": "payload.sku", "qtty": "payload.q"}}, "42703", '"qty"'), ({"columns": {"qty": "payload.q"}}, "22023", '"sku"'),
     ({"columns": {"sku": "paylod.sku"}}, "22023", '"payload"'), ({"kind": "upsrt"}, "22023", '"upsert"'), ({"types": []}, "22023", "types"),
     ({"on_error": "refuze"}, "22023", '"refuse"'), ({"freshness": "-1 s"}, "22023", "freshness"), ({"freshness": "1 s", "on_error": "refuse"}, "22023", "freshness"),
     ({"relation": "plain"}, "42704", "plain"), ({"name": "p"}, "42710", '"p"'), ({"freshness": "1 s"}, "22023", '"p"')],
)  # fmt: skip
def test_a_projection_that_cannot_work_is_refused(conn, change, sqlstate, says):
    declare(conn)
    conn.execute("CREATE TABLE plain (sku text PRIMARY KEY)")
    good = {"name": "q", "relation": "goods", "types": ["t"], "columns": MAP}
    args = good | change
    with pytest.raises(psycopg.Error) as error:
        call(conn, "create_projection", **(args | {"columns": json.dumps(args["columns"])}))
    assert error.value.sqlstate == sqlstate, error.value
    assert says in str(error.value) + error.value.diag.message_hint + (error.value.diag.message_detail or "")
    assert value(conn, "SELECT count(*) FROM stint.projections") == 1


def test_events_recorded_before_are_projected_too(conn):
    record(conn, sku="a", qty=1)
    record(conn, sku="a", qty=2)
    declare(conn)
    assert goods(conn) == [("a", "2", None)]
    record(conn, "sold", sku="a", qty=9)
    project(conn, "sold", ["sold"])
    assert goods(conn) == [("a", "9", None)]
    verified(conn)


POISON = {"sku": "b", "qty": "many"}


@pytest.mark.parametrize("freshness", ["0", "1 hour"])
def test_an_event_that_does_not_fit_is_set_aside_and_the_rest_goes_on(conn, freshness):
    declare(conn, freshness=freshness, table=GOODS.replace("note text", "note text CHECK (note <> 'bad')"))
    batch = [{"sku": f"k{n}", "qty": n} for n in range(40)]
    batch[7] = {"sku": "k7", "qty": "many"}
    batch[21] = {"qty": 1}
    batch[33] = {"sku": "k3", "note": "bad"}
    seqs = [a.seq for a in call(conn, "record_many", events=json.dumps([{"source": "s", "type": "stock", "payload": p} for p in batch]))]
    one = record(conn, **POISON)
    fold_all(conn)
    assert len(goods(conn)) == 37
    aside = rows(conn, "SELECT seq, state, sqlstate, reason FROM stint.poisoned_events ORDER BY seq")
    assert [(a.seq, a.sqlstate) for a in aside] == [(seqs[7], "22P02"), (seqs[21], "23502"), (seqs[33], "23514"), (one, "22P02")]
    assert "many" in aside[0].reason
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 41
    assert verified(conn).set_aside == 4
    conn.execute("ALTER TABLE goods ALTER qty TYPE text")
    done = call(conn, "rebuild", relation="goods")[0]
    assert (done.inserted, done.set_aside) == (2, 2)
    call(conn, "skip_event", relation="goods", seq=seqs[33])
    assert [a.state for a in rows(conn, "SELECT state FROM stint.poisoned_events ORDER BY seq")] == ["poisoned", "skipped"]
    assert verified(conn).set_aside == 1


def test_a_projection_may_refuse_what_does_not_fit(conn):
    declare(conn, on_error="refuse")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        record(conn, **POISON)
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 0
    record(conn, sku="b", qty=1)
    verified(conn)


def test_a_lagging_table_is_folded_in_bounded_writes_and_loses_nothing(conn):
    declare(conn, freshness="1 hour")
    call(conn, "record_many", events=json.dumps([{"source": "s", "type": "stock", "payload": {"sku": str(n % 7), "qty": n}} for n in range(100)]))
    assert goods(conn) == []
    # The worker may go on with a pass that was begun.
    while done := call(conn, "project", relation="goods", max=30)[0][0]:
        assert done <= 30
        assert rows(conn, "SELECT * FROM stint.verify('goods')") == [], "what is folded is what the record says so far"
    assert goods(conn, "sku, qty") == [(str(k), max(n for n in range(100) if n % 7 == k)) for k in range(7)]
    record(conn, sku="0", qty=1000)
    done = call(conn, "rebuild", relation="goods")[0]
    assert (done.events, done.updated) == (101, 1), "a rebuild leaves nothing waiting"
    verified(conn)
    assert call(conn, "project", relation="goods")[0][0] == 0


def test_an_older_transaction_that_commits_later_is_not_skipped(conn, connect):
    declare(conn, freshness="1 hour")
    early = connect()
    early.execute("BEGIN")
    record(early, sku="a", qty=1)
    record(conn, sku="b", qty=2)
    fold_all(conn)
    assert goods(conn, "sku") == [("b",)]
    early.execute("COMMIT")
    fold_all(conn)
    assert goods(conn, "sku") == [("a",), ("b",)]
    verified(conn)


def test_a_key_is_recorded_in_the_order_of_commits(conn, connect):
    """The second event of a key waits for the first one's transaction before it draws its number; an event of another key does not."""
    declare(conn)
    one, two = connect(), connect()
    one.execute("BEGIN")
    first = record(one, sku="a", qty=1)
    record(two, sku="b", qty=1)
    later = background(lambda: record(two, sku="a", qty=2))
    waiting(conn, two.info.backend_pid, "Lock")
    between = record(conn, sku="c", qty=1)
    one.execute("COMMIT")
    assert first < between < later.join()
    assert goods(conn) == [("a", "2", None), ("b", "1", None), ("c", "1", None)]
    verified(conn)


@pytest.mark.parametrize("freshness", ["0", "1 hour"])
def test_recorders_of_hot_keys_leave_what_the_record_says(conn, connect, freshness):
    """An engine whose result depends on order alone: the fold by number must be what the table went through, aborts and batches and all."""
    declare(conn, freshness=freshness)
    project(conn, "gone", ["gone"], {"sku": "payload.sku"}, kind="delete", freshness=freshness)
    conns = [connect() for _ in range(6)]
    end = background(lambda: [call(conns[5], "project", relation="goods", max=17) for _ in range(120)]) if freshness != "0" else None

    def work(n):
        rng = random.Random(n)
        for i in range(40):
            events = [
                {"source": f"s{n}", "type": rng.choice(["stock", "stock", "gone"]), "payload": {"sku": str(rng.randrange(4)), "qty": n * 1000 + i, "note": f"{n}/{i}"}}
                for _ in range(rng.choice([1, 1, 3]))
            ]
            try:
                with conns[n].transaction():
                    call(conns[n], "record_many", events=json.dumps(events))
                    if rng.random() < 0.15:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass

    parallel(5, work)
    if end:
        end.join(120)
        fold_all(conn)
    done = verified(conn)
    assert done.events == value(conn, "SELECT count(*) FROM stint.record_events") > 150


def test_recorders_that_write_and_delete_never_wait_in_a_ring(conn, connect):
    """A table that remembers deleted keys; batches that take several writes, and are halved for events that do not fit."""
    conn.execute("CREATE TABLE goods (sku text PRIMARY KEY, qty numeric, seq bigint)")
    conn.execute("SELECT stint.create_state('goods', 'deduplicate', sequence => ARRAY['seq'])")
    project(conn, columns={"sku": "payload.sku", "qty": "payload.qty", "seq": "seq"})
    project(conn, "gone", ["gone"], {"sku": "payload.sku", "seq": "seq"}, kind="delete")
    conns = [connect() for _ in range(6)]

    def work(n):
        rng = random.Random(n)
        conns[n].execute("SET stint.max_batch = 8")
        for i in range(50):
            # Keys of its own, or none would be there at the same time; and some that all write.
            skus = [f"{n}/{rng.randrange(6)}" for _ in range(5)] + [str(k) for k in rng.sample(range(8), 3)]
            events = [{"source": "s", "type": rng.choice(["stock", "gone"]), "payload": {"sku": sku, "qty": "x" if rng.random() < 0.05 else i}} for sku in skus]
            call(conns[n], "record_many", events=json.dumps(events))

    parallel(6, work)
    done = verified(conn)
    assert done.events + done.set_aside == value(conn, "SELECT count(*) FROM stint.record_events") == 6 * 50 * 8
    assert done.set_aside > 20


@pytest.mark.parametrize("sequence", ["", ", sequence => ARRAY['at']"])
def test_an_event_deletes_the_row_that_another_is_still_inserting_under_its_number(conn, connect, sequence):
    conn.execute("CREATE TABLE goods (id bigint PRIMARY KEY, at bigint)")
    conn.execute(f"SELECT stint.create_state('goods', 'deduplicate'{sequence})")
    project(conn, columns={"id": "seq", "at": "seq"})
    project(conn, "gone", ["gone"], {"id": "payload.of", "at": "seq"}, kind="delete")
    one, two = connect(), connect()
    with one.transaction():
        made = record(one)
        gone = background(lambda: record(two, "gone", of=made))
        waiting(conn, two.info.backend_pid, "Lock")
    assert gone.join() > made
    assert goods(conn, "id") == []
    verified(conn)


CAUSE = "SELECT after ->> 'sku' AS sku, kind, cause FROM stint.changes('goods', %s) WHERE kind IN ('+I', '+U') ORDER BY pos"
PARTED = """
    CREATE TABLE goods (sku text PRIMARY KEY, qty numeric, note text, seq bigint, at timestamptz) PARTITION BY HASH (sku);
    CREATE TABLE goods_0 PARTITION OF goods FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE goods_1 PARTITION OF goods FOR VALUES WITH (MODULUS 2, REMAINDER 1);
"""


@pytest.mark.parametrize("freshness", ["0", "1 hour"])
@pytest.mark.parametrize("table", [GOODS, PARTED])
def test_a_change_names_the_last_event_of_its_key_that_was_folded_into_it(conn, table, freshness):
    declare(conn, "'partial-update'", table=table, freshness=freshness)
    events = [{"source": "s", "type": "stock", "payload": {"sku": sku, "qty": qty}} for qty, sku in enumerate("abacb")]
    seqs = [row.seq for row in call(conn, "record_many", events=json.dumps(events))]
    fold_all(conn)
    pos = call(conn, "tick")[0][0]
    assert sorted(rows(conn, CAUSE, 0)) == [("a", "+I", seqs[2]), ("b", "+I", seqs[4]), ("c", "+I", seqs[3])]
    seq = record(conn, sku="a", note="n")
    fold_all(conn)
    call(conn, "tick")
    assert rows(conn, CAUSE, pos) == [("a", "+U", seq)]
    pos = call(conn, "tick")[0][0]
    conn.execute("UPDATE goods SET note = 'by hand' WHERE sku = 'b'")
    call(conn, "tick")
    assert rows(conn, CAUSE, pos) == [("b", "+U", None)], "no event caused it"


@pytest.mark.parametrize("freshness", ["0", "1 hour"])
def test_a_table_that_was_dropped_keeps_nobody_from_recording(conn, freshness):
    declare(conn, freshness=freshness)
    record(conn, sku="a", qty=1)
    conn.execute("DROP TABLE goods CASCADE")
    assert record(conn, sku="a", qty=2) > 0
    declare(conn, freshness=freshness)
    fold_all(conn)
    assert goods(conn, "sku, qty::int") == [("a", 2)]
    verified(conn)


@pytest.mark.parametrize("altered", ["RENAME COLUMN qty TO amount", "DROP COLUMN qty", "RENAME COLUMN sku TO code"])
@pytest.mark.parametrize("freshness", ["0", "1 hour"])
def test_a_column_that_went_keeps_nobody_from_recording(conn, connect, freshness, altered):
    declare(conn, freshness=freshness)
    other = connect()
    record(other, sku="a", qty=1, note="x")
    fold_all(conn)
    conn.execute(f"ALTER TABLE goods {altered}")
    seq = record(other, sku="a", qty=2, note="y")
    event = {"source": "s", "type": "stock", "payload": {"sku": "b", "qty": 3, "note": "z"}}
    call(conn, "record_many", events=json.dumps([event, {**event, "type": "unprojected"}]))
    if freshness == "0":
        aside = rows(conn, "SELECT seq, reason FROM stint.poisoned_events ORDER BY seq")
        assert [row.seq for row in aside] == [seq, seq + 1]
        assert all('projection "p" no longer fits' in row.reason for row in aside)
        assert value(conn, "SELECT held_up_by FROM stint.freshness").startswith("2 poisoned events")
    assert value(conn, "SELECT count(*) FROM goods WHERE note = 'x'") == 1
    with pytest.raises(psycopg.Error, match='projection "p" no longer fits'):
        call(conn, "rebuild", relation="goods")
    call(conn, "drop_projection", name="p")
    key = "code" if "sku" in altered else "sku"
    project(conn, columns={key: "payload.sku", "note": "payload.note"}, freshness=freshness, replace_rows=True)
    fold_all(conn)
    assert goods(conn, f"{key}, note") == [("a", "y"), ("b", "z")]
    assert rows(conn, "SELECT * FROM stint.poisoned_events") == []
    verified(conn)


def test_a_column_that_comes_back_brings_what_was_set_aside(conn):
    declare(conn)
    conn.execute("ALTER TABLE goods RENAME COLUMN qty TO amount")
    record(conn, sku="a", qty=2)
    assert goods(conn, "sku") == []
    conn.execute("ALTER TABLE goods RENAME COLUMN amount TO qty")
    record(conn, sku="b", qty=3)
    assert goods(conn, "sku, qty::int") == [("b", 3)]
    call(conn, "rebuild", relation="goods")
    assert goods(conn, "sku, qty::int") == [("a", 2), ("b", 3)]
    verified(conn)


def test_a_projection_that_refuses_says_that_it_no_longer_fits(conn):
    declare(conn, on_error="refuse")
    conn.execute("ALTER TABLE goods DROP COLUMN qty")
    with pytest.raises(psycopg.errors.UndefinedColumn, match='projection "p" no longer fits'):
        record(conn, sku="a", qty=1)
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 0
