"""The record: events appended once each, unchanged for ever."""

import json

import psycopg
import pytest
from stint import background, call, parallel, rows, value, waiting

BIG = '{"a": 1.10, "b": 123456789012345678901234567890, "c": 1e400, "d": "x", "e": null, "f": 0.0000}'


def record(conn, payload="{}", source="shop", type="sold", **more):
    return call(conn, "record", source=source, type=type, payload=payload, **more)[0][0]


def events(conn):
    return rows(conn, "SELECT seq, source, type, event_id, payload::text AS payload FROM stint.record_events ORDER BY seq")


def test_an_event_is_kept_as_it_came(conn):
    seq = record(conn, BIG, event_id="e1", occurred_at="2024-02-29 12:00+02")
    [event] = rows(conn, "SELECT *, payload::text AS text FROM stint.record_events")
    assert (event.seq, event.source, event.type, event.event_id, event.recorded_by) == (seq, "shop", "sold", "e1", "postgres")
    assert event.text == value(conn, "SELECT %s::jsonb::text", BIG)
    assert str(event.occurred_at.astimezone(None).timestamp()) == "1709200800.0"
    [(ordinality, other, created)] = call(conn, "record_many", events=f'[{{"source": "s", "type": "t", "payload": {BIG}}}]')
    assert (ordinality, created) == (1, True) and other > seq
    assert [e.payload for e in events(conn)] == [event.text] * 2


def test_a_repeat_is_the_same_event(conn):
    seq = record(conn, '{"n": 1}', event_id="e1")
    assert record(conn, '{"n": 1}', event_id="e1") == seq
    assert record(conn, '{"n": 1}', event_id="e1", source="other") != seq
    assert record(conn) != record(conn), "without an id each call is an event of its own"
    at = value(conn, "SELECT occurred_at::text FROM stint.record_events WHERE seq = %s", seq)
    assert record(conn, '{"n": 1}', event_id="e1", occurred_at=at) == seq
    for wrong in {"payload": '{"n": 1.0}'}, {"payload": '{"n": 2}'}, {"type": "bought"}, {"occurred_at": "2001-01-01"}:
        with pytest.raises(psycopg.errors.UniqueViolation) as error:
            record(conn, **({"payload": '{"n": 1}', "event_id": "e1"} | wrong))
        assert '"e1"' in str(error.value) and str(seq) in error.value.diag.message_detail and error.value.diag.message_hint
    assert value(conn, "SELECT count(*) FROM stint.record_events WHERE event_id = 'e1'") == 2


def test_a_batch_tells_which_of_its_events_are_new(conn):
    old = record(conn, "1", event_id="b")
    batch = [{"source": "shop", "type": "sold", "event_id": id, "payload": n} for n, id in enumerate("abca")]
    batch[3]["payload"] = 0
    answer = call(conn, "record_many", events=json.dumps(batch))
    assert [(a.ordinality, a.created) for a in answer] == [(1, True), (2, False), (3, True), (4, False)]
    assert answer[1].seq == old and answer[3].seq == answer[0].seq < answer[2].seq
    batch[2]["payload"] = 9
    with pytest.raises(psycopg.errors.UniqueViolation, match="event 3: "):
        call(conn, "record_many", events=json.dumps([{"source": "shop", "type": "sold", "payload": 1}, *batch[:2][1:], batch[2]]))
    assert value(conn, "SELECT count(*) FROM stint.record_events") == 3


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_a_repeat_waits_for_the_first(connect, ends):
    one, two, watch = connect(), connect(), connect()
    record(one)
    one.execute("BEGIN")
    first = record(one, "1", event_id="e")
    assert background(record, two, "1").join() != first, "another event waits for nobody"
    second = background(lambda: record(two, "1", event_id="e"))
    waiting(watch, two.info.backend_pid, "Lock")
    one.execute(ends)
    assert (second.join() == first) == (ends == "COMMIT")
    assert value(one, "SELECT count(*) FROM stint.record_events WHERE event_id = 'e'") == 1


def test_sessions_that_record_the_same_events_at_once_record_each_once(connect):
    conns = [connect() for _ in range(6)]

    def work(n):
        ids = [str(i) for i in range(200)]
        if n % 2:
            ids.reverse()
        batch = [{"source": "s", "type": "t", "event_id": id, "payload": id} for id in ids]
        return {
            batch[i + a.ordinality - 1]["event_id"]: a.seq
            for i in range(0, 200, 40)
            for a in call(conns[n], "record_many", events=json.dumps(batch[i : i + 40]))
        }

    answers = parallel(6, work)
    assert all(answer == answers[0] for answer in answers)
    assert value(conns[0], "SELECT count(*) FROM stint.record_events") == 200


@pytest.mark.parametrize("statement", ["UPDATE stint.event_log SET payload = '1'", "DELETE FROM stint.event_log", "TRUNCATE stint.event_log", "DELETE FROM stint.record_events"])
def test_nobody_changes_an_event(conn, statement):
    record(conn)
    with pytest.raises(psycopg.Error) as error:
        conn.execute(statement)
    assert error.value.sqlstate == "55000" and "expire_record" in error.value.diag.message_hint
    assert len(events(conn)) == 1


def test_recording_needs_no_right_but_that_of_the_function(conn, connect):
    conn.execute("CREATE ROLE teller_of_events")
    try:
        conn.execute("GRANT USAGE ON SCHEMA stint TO teller_of_events")
        conn.execute("GRANT EXECUTE ON FUNCTION stint.record(text, text, jsonb, text, timestamptz) TO teller_of_events")
        conn.execute("CREATE TABLE t (id int PRIMARY KEY)")
        conn.execute("SELECT stint.create_state('t', 'deduplicate')")
        conn.execute("""SELECT stint.create_projection('p', 't', '{sold}', '{"id": "payload.id"}')""")
        conn.execute("SET ROLE teller_of_events")
        record(conn, '{"id": 7}')
        for refused in "SELECT * FROM stint.record_events", "SELECT * FROM t", "SELECT stint.rebuild('t')", "SELECT stint.drop_projection('p')":
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(refused)
        conn.execute("RESET ROLE")
        assert rows(conn, "SELECT id FROM t") == [(7,)]
        assert value(conn, "SELECT recorded_by FROM stint.record_events") == "teller_of_events"
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="owner"):
            with conn.transaction():
                conn.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO teller_of_events")
                conn.execute("SET LOCAL ROLE teller_of_events")
                conn.execute("SELECT * FROM stint.verify('t')")
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP OWNED BY teller_of_events")
        conn.execute("DROP ROLE teller_of_events")


@pytest.mark.parametrize(
    "batch, says",
    [("{}", "not an array"), ("[1]", "event 1 is not an object"), ('[{"source": "s", "type": "t"}]', 'no field "payload"'),
     ('[{"source": "s", "type": "t", "payload": 1}, {"source": "s", "tpye": "t", "payload": 1}]', 'event 2 has the unknown field "tpye"'),
     ('[{"source": "", "type": "t", "payload": 1}]', 'event 1: argument "source" is empty'),
     ('[{"type": "t", "payload": 1}]', 'event 1: argument "source" must not be null'),
     ('[{"source": "s", "type": "t", "payload": 1, "occurred_at": "soon"}]', "event 1: "),
     ('[{"source": "s", "type": "t", "payload": 1, "occurred_at": "infinity"}]', "event 1: ")],
)  # fmt: skip
def test_a_batch_of_the_wrong_shape_names_the_event(conn, batch, says):
    with pytest.raises(psycopg.Error) as error:
        call(conn, "record_many", events=batch)
    assert says in str(error.value) and error.value.diag.message_hint
    assert error.value.sqlstate[:2] == "22"
    assert events(conn) == []


def test_a_reader_gets_every_event_once_while_transactions_overlap(connect):
    conns = [connect() for _ in range(6)]
    record(conns[0])
    read, running = [], []

    def work(n):
        if n == 5:
            after = None
            while True:
                alive = len(running) < 5
                got = rows(conns[n], "SELECT pos, seq, source FROM stint.events_after(NULL, %s, 7)", after)
                read.extend((e.seq, e.source) for e in got)
                after = got[-1].pos if got else after
                if not got and not alive:
                    return
        for i in range(60):
            with conns[n].transaction():
                for _ in range(1 + i % 3):
                    record(conns[n], str(i), source=f"s{n}")
        running.append(n)

    parallel(6, work)
    assert sorted(seq for seq, _ in read) == [e.seq for e in events(conns[0])]
    for n in range(5):
        own = [seq for seq, source in read if source == f"s{n}"]
        assert own == sorted(own) and len(own) == 120


def test_a_reader_of_some_types_resumes_where_it_was(conn):
    for n in range(10):
        record(conn, str(n), type="ab"[n % 2])
    whole = rows(conn, "SELECT pos, payload::text AS payload FROM stint.events_after('{b}')")
    assert [e.payload for e in whole] == ["1", "3", "5", "7", "9"]
    for event in whole:
        rest = rows(conn, "SELECT payload::text AS payload FROM stint.events_after('{b}', %s)", event.pos)
        assert [e.payload for e in rest] == [p for p in "13579" if p > event.payload]
    record(conn, "11", type="b")
    assert [e.payload for e in rows(conn, "SELECT payload::text AS payload FROM stint.events_after('{b}', %s)", whole[-1].pos)] == ["11"]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no position"):
        conn.execute("SELECT * FROM stint.events_after(NULL, '7')")


def test_the_record_is_searched_by_index(conn):
    conn.execute("SET enable_seqscan = off; SET enable_sort = off")
    for where, index in [("type = 'a' AND occurred_at >= now() ORDER BY occurred_at", "event_log_occurred"), ("recorded_at < now()", "event_log_recorded"),
                         ("source = 's' AND event_id = 'x'", "event_log_id"), ("seq = 4", "event_log_pkey")]:  # fmt: skip
        plan = "\n".join(r[0] for r in conn.execute(f"EXPLAIN SELECT * FROM stint.record_events WHERE {where}"))
        assert index in plan, plan
