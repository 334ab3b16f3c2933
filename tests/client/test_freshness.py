"""How far projected tables lag, what holds them up, and lookups kept with events."""

import json

import psycopg
import pytest
from stint import call, rows, until, value
from test_projections import MAP, POISON, declare, fold_all, goods, record, verified


def fresh(conn):
    [row] = rows(conn, "SELECT *, extract(epoch FROM lag) AS seconds FROM stint.freshness WHERE relation = 'goods'::regclass")
    return row


def test_freshness_tells_lag_and_events_that_wait(conn):
    declare(conn, freshness="1 hour")
    assert (fresh(conn).ok, fresh(conn).behind, fresh(conn).projections) == (True, 0, ["p"])
    for n in range(3):
        record(conn, sku=str(n), qty=n)
    record(conn, "other", sku="x")
    state = fresh(conn)
    assert (state.ok, state.behind, state.held_up_by) == (True, 3, None) and 0 < state.seconds < 60
    assert value(conn, "SELECT stint.require_fresh('goods') BETWEEN '1 us' AND '1 minute'")
    call(conn, "project", relation="goods", max=2)
    assert fresh(conn).behind in (0, 1), "the worker goes on with a pass that was begun"
    fold_all(conn)
    assert (fresh(conn).behind, fresh(conn).seconds) == (0, 0)


def test_what_is_too_old_is_refused_with_lag_and_cause(conn, connect):
    """The fold of the table is held by a session that does not end, so the worker cannot fold."""
    declare(conn, freshness="200 ms")
    other = connect()
    other.execute("BEGIN")
    record(conn, sku="a", qty=1)
    other.execute("SELECT stint.project('goods')")
    record(conn, sku="b", qty=1)
    until(conn, "SELECT NOT ok FROM stint.freshness")
    with pytest.raises(psycopg.Error) as error:
        call(conn, "require_fresh", relation="goods")
    assert error.value.sqlstate == "55000" and "00:00:00.2 is allowed" in str(error.value) and "goods" in str(error.value)
    assert str(other.info.backend_pid) in error.value.diag.message_detail
    other.execute("COMMIT")
    until(conn, "SELECT ok AND behind = 0 FROM stint.freshness")
    verified(conn)


def test_poisoned_events_make_a_table_not_fresh_until_they_are_skipped(conn):
    declare(conn)
    seq = record(conn, **POISON)
    with pytest.raises(psycopg.Error, match="not fresh") as error:
        call(conn, "require_fresh", relation="goods")
    assert f"number {seq}" in error.value.diag.message_detail
    assert "poisoned events that are not part of it: 1" in error.value.diag.message_primary and "skip_event" in error.value.diag.message_hint
    assert value(conn, "SELECT NOT ok AND detail LIKE '%%poisoned%%' FROM stint.doctor() WHERE \"check\" = 'projected tables are fresh'")
    call(conn, "skip_event", relation="goods", seq=seq)
    assert fresh(conn).ok and value(conn, "SELECT stint.require_fresh('goods') = '0'")
    with pytest.raises(psycopg.Error) as error:
        call(conn, "require_fresh", relation="pg_class")
    assert error.value.sqlstate == "42704"


def test_a_change_names_the_event_that_caused_it(conn):
    declare(conn)
    first, second = record(conn, sku="a", qty=1), record(conn, sku="b", qty=1)
    last = [a.seq for a in call(conn, "record_many", events=json.dumps([{"source": "s", "type": "stock", "payload": {"sku": "a", "qty": q}} for q in (5, 6)]))][1]
    causes = rows(conn, "SELECT key, cause FROM stint.change_log ORDER BY seq")
    assert [tuple(c) for c in causes] == [("{a}", first), ("{b}", second), ("{a}", last)]


PRICES = "CREATE TABLE prices (item text PRIMARY KEY, price numeric, name text, secret text)"


def lookups(conn):
    return [value for (value,) in conn.execute("SELECT lookups::text FROM stint.record_events ORDER BY seq")]


def test_what_was_looked_up_is_kept_with_the_event(conn):
    conn.execute(PRICES + "; SELECT stint.create_state('prices', 'deduplicate')")
    conn.execute("INSERT INTO prices VALUES ('a', 1.10, 'Apple', 'x')")
    conn.execute("""SELECT stint.create_lookup('price', 'prices', '{stock}', '{"item": "payload.sku"}', '{price,name}')""")
    declare(conn, columns={"sku": "payload.sku", "qty": "lookups.price.price", "note": "lookups.price.name"})
    events = [{"source": "s", "type": t, "payload": p} for t, p in [("stock", {"sku": "a"}), ("stock", {"sku": "z"}), ("stock", {}), ("other", {"sku": "a"})]]
    call(conn, "record_many", events=json.dumps(events))
    assert lookups(conn) == ['{"price": {"name": "Apple", "price": 1.10}}', '{"price": null}', '{"price": null}', None]
    assert goods(conn) == [("a", "1.10", "Apple"), ("z", None, None)]
    conn.execute("UPDATE prices SET price = 2")
    verified(conn)
    record(conn, sku="a")
    assert goods(conn)[0] == ("a", "2", "Apple")
    call(conn, "drop_lookup", name="price")
    record(conn, sku="b")
    assert lookups(conn)[-1] is None
    verified(conn)


def test_a_lookup_needs_a_table_that_its_declarer_may_read(conn):
    conn.execute(PRICES + "; SELECT stint.create_state('prices', 'deduplicate')")
    good = {"name": "price", "relation": "prices", "types": ["t"], "key": '{"item": "payload.sku"}', "columns": ["price"]}
    for change, sqlstate, says in [({"columns": ["prise"]}, "42704", '"price"'), ({"key": '{"itm": "payload.sku"}'}, "42703", '"item"'), ({"types": []}, "22023", "types"),
                                   ({"key": '{"item": "seq"}'}, "22023", "seq"), ({"relation": "pg_class"}, "42501", "system")]:  # fmt: skip
        with pytest.raises(psycopg.Error) as error:
            call(conn, "create_lookup", **(good | change))
        assert error.value.sqlstate == sqlstate and says in str(error.value) + error.value.diag.message_hint
    conn.execute("CREATE ROLE looks_up; GRANT USAGE ON SCHEMA stint TO looks_up; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA stint TO looks_up; SET ROLE looks_up")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="prices"):
            call(conn, "create_lookup", **good)
    finally:
        conn.execute("RESET ROLE; DROP OWNED BY looks_up; DROP ROLE looks_up")
