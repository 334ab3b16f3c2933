"""JSON passes through untouched: what comes back reads as what PostgreSQL itself makes of what went in."""

import json

import psycopg
import pytest
from stint import Queue, background, call, rows, value, waiting

VALUES = {
    "scale": '{"a": 1.10, "b": 100.000, "c": -0.0}',
    "thirty digits": '{"n": 123456789012345678901234567890, "m": -0.123456789012345678901234567890}',
    "beyond a double": "[1e400, 1e-400, 1E+5, 17976931348623157e300]",
    "100 kB": json.dumps({"text": "".join(chr(33 + n * 7 % 90) for n in range(100_000)), "n": 1}),
    "100 kB that does not compress": json.dumps([f"{(n * 2654435761) % 2**32:08x}" for n in range(10_000)]),
    "escapes": r'{"\u00e9\ud83d\ude00": "\u0001\n\t\"\\\/ ü 😀", "": ""}',
    "nested nulls": '{"a": null, "b": [null, {"c": null}], "d": {}, "e": []}',
    "null": "null",
    "a string": '"plain"',
    "a number": "0.10",
    "false": "false",
    "deep": "[" * 200 + "1.10" + "]" * 200,
    "repeated keys": '{"a": 1, "a": 2.0, "b": 3}',
}


def as_text(conn, json_text):
    return value(conn, "SELECT %s::jsonb::text", json_text)


@pytest.mark.parametrize("mode", ["auto", "force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("what", VALUES)
def test_json_comes_back_as_it_went_in(conn, what, mode):
    given = VALUES[what]
    conn.execute(f"SET plan_cache_mode = {mode}")
    kept = as_text(conn, given)
    queue = Queue(conn)
    if what == "null":  # a label that is JSON null is no label in a batch
        ids = [queue.enqueue(given, labels=given), queue.enqueue(given, labels=given)]
    else:
        batch = value(conn, "SELECT jsonb_build_array(jsonb_build_object('payload', t.v, 'labels', t.v))::text FROM (SELECT %s::jsonb) AS t (v)", given)
        ids = [queue.enqueue(given, labels=given), call(conn, "enqueue_many", queue="q", tasks=batch)[0].id]
    claimed = rows(conn, "SELECT id, lease, payload::text AS payload, labels::text AS labels FROM stint.claim('q', 'w', 9)")
    assert [(task.id, task.payload, task.labels) for task in claimed] == [(id, kept, kept) for id in ids]
    for task in claimed:
        args = {"q": "q", "id": task.id, "lease": task.lease, "v": given}
        conn.execute("SELECT stint.extend(%(q)s, %(id)s, %(lease)s, progress => %(v)s)", args)
        assert value(conn, "SELECT progress::text FROM stint.tasks WHERE id = %s", task.id) == kept
        complete = "SELECT result::text FROM stint.complete(%(q)s, %(id)s, %(lease)s, result => %(v)s, meta => %(v)s)"
        for _ in range(2):  # the answer of the first call, and the stored result of the second
            assert conn.execute(complete, args).fetchone() == (kept,)
        assert value(conn, "SELECT meta::text FROM stint.attempts WHERE id = %s", task.id) == kept
        stored = "SELECT payload::text AS p, result::text AS r FROM stint.task_payloads WHERE id = %s"
        assert rows(conn, stored, task.id) == [(kept, kept)]


def test_a_late_result_and_late_usage_come_back_as_they_went_in(conn):
    queue = Queue(conn)
    for given in VALUES.values():
        id = queue.enqueue()
        task = queue.one()
        queue.lapse(task)
        queue.complete(task, result=given, meta=given)
        assert queue.result(id) == as_text(conn, given)
        assert value(conn, "SELECT meta::text FROM stint.attempts WHERE id = %s", id) == as_text(conn, given)


def test_a_waiter_gets_a_toasted_payload_whole(conn, connect):
    queue = Queue(conn)
    session = connect()
    for what in "100 kB that does not compress", "100 kB":
        claim = background(lambda: session.execute("SELECT * FROM stint.claim('q', 'w', wait => '20 s')").fetchall())
        waiting(conn, session.info.backend_pid, "Extension")
        queue.enqueue(VALUES[what])
        conn.execute("VACUUM stint.place_ready")
        [row] = claim.join()
        assert row[4] == json.loads(VALUES[what])


def test_money_is_exact(conn):
    queue = Queue(conn)
    id = queue.enqueue()
    queue.complete(queue.one(), model_cost="0.1000000000000000000000000000000000000001", compute_cost="12345678901234567890.10")
    found = rows(conn, "SELECT model_cost::text AS m, compute_cost::text AS c FROM stint.attempts WHERE id = %s", id)
    assert found == [("0.1000000000000000000000000000000000000001", "12345678901234567890.10")]


def test_names_of_any_script_work(conn):
    for name in ("ä ö", 'qu"ote', "it's", "emoji 😀", "日本語", "a;b--c", "%s{}\\", "$$", "NULL", "0", "ａ"):
        call(conn, "create_budget", name=name, max_running=1)
        queue = Queue(conn, name, budgets=[name])
        id = queue.enqueue(key=name, agent=name, budgets=[name])
        queue.enqueue()
        [task] = queue.claim(9, worker=name)
        assert (task.queue, task.agent, queue.task(id).worker, queue.task(id).key) == (name,) * 4
        assert f'"{name}" has no room' in call(conn, "explain", queue=name, id=queue_ready(conn, name))[0][0]
        queue.complete(task, run_id=name, trace_id=name, model=name)
        assert queue.attempts(id)[0].run_id == name


def queue_ready(conn, name):
    return value(conn, "SELECT id FROM stint.tasks WHERE queue = %s AND status = 'ready'", name)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_of_another_encoding_is_refused(server, encoding):
    """Better at CREATE EXTENSION than at the first name with an accent."""
    name = f"enc_{encoding.lower()}"
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        with server.connect(name) as conn:
            with pytest.raises(psycopg.errors.FeatureNotSupported, match=encoding) as raised:
                conn.execute("CREATE EXTENSION pg_stint")
            assert "UTF8" in raised.value.diag.message_hint
    finally:
        server.drop_database(name)
