"""Bad input: every argument of every function is given nothing, too much and nonsense.

Each such call works, or fails with an error that is no internal one, says what it is about and, where the extension
raised it, what to do; and it changes nothing. A new function fails here until CALLS has a row for it.
"""

import json
import re
import uuid

import psycopg
import pytest
from stint import Queue, call, rows, value

SETUP = """
    CREATE TABLE goods (id int PRIMARY KEY, name text, at timestamptz);
    CREATE TABLE fresh (id int PRIMARY KEY, name text, at timestamptz);
    SELECT stint.create_state('goods', 'deduplicate', sequence => '{at}');
    SELECT stint.merge('goods', '[{"id": 1, "name": "a", "at": "2026-01-01"}]');
"""

# A call of each function that works. Arguments that are not here have their default. "$id" and "$lease" are a running task's.
CALLS = {
    "create_queue": {"queue": "new"},
    "create_budget": {"name": "new", "max_running": "1", "max_tokens": "1000", "per": "1 hour"},
    "alter_budget": {"name": "b", "max_running": "5"},
    "drop_budget": {"name": "unused"},
    "throttle": {"budget": "b", "duration": "0"},
    "enqueue": {"queue": "q", "payload": "{}"},
    "enqueue_many": {"queue": "q", "tasks": '[{"payload": 1}]'},
    "claim": {"queue": "q", "worker": "w"},
    "extend": {"queue": "q", "id": "$id", "lease": "$lease"},
    "complete": {"queue": "q", "id": "$id", "lease": "$lease"},
    "fail": {"queue": "q", "id": "$id", "lease": "$lease", "error": "x"},
    "release": {"queue": "q", "id": "$id", "lease": "$lease"},
    "cancel": {"queue": "q", "id": "$id"},
    "checkpoint": {"queue": "q", "id": "$id", "lease": "$lease", "step": "s", "value": "1"},
    "checkpoints": {"queue": "q", "id": "$id"},
    "await": {"queue": "q", "id": "$id", "lease": "$lease", "event": "e"},
    "emit": {"event": "e"},
    "explain": {"queue": "q", "id": "$id"},
    "create_schedule": {"queue": "q", "name": "new", "cron": "@daily", "payload": "{}"},
    "pause_schedule": {"name": "s"},
    "resume_schedule": {"name": "s"},
    "drop_schedule": {"name": "s"},
    "fire_schedules": {},
    "next_fire": {"cron": "@daily"},
    "alter_queue": {"queue": "q", "lease_for": "1 hour"},
    "set_weight": {"queue": "q", "group_key": "g", "weight": "2"},
    "group_usage": {},
    "tidy_lanes": {},
    "refresh_factors": {},
    "pause_queue": {"queue": "q"},
    "resume_queue": {"queue": "q"},
    "purge_queue": {"queue": "q"},
    "drop_queue": {"queue": "q", "force": "true"},
    "enqueue_once": {"queue": "q", "payload": "{}", "key": "new"},
    "snooze": {"queue": "q", "id": "$id", "lease": "$lease", "duration": "1 hour"},
    "annotate": {"queue": "q", "id": "$id", "lease": "$lease"},
    "retry": {"queue": "q", "id": "$id"},
    "retry_failed": {"queue": "q"},
    "reprioritize": {"queue": "q", "id": "$id", "priority": "1"},
    "complete_many": {"queue": "q", "items": "[]"},
    "finish_and_claim": {"queue": "q", "id": "$id", "lease": "$lease", "worker": "w"},
    "task_events": {"queue": "q"},
    "trim_task_events": {},
    "lease_advice": {"queue": "q"},
    "prediction_advice": {"queue": "q"},
    "record_usage": {"queue": "q", "id": "$id", "attempt": "1", "key": "new", "model_cost": "1"},
    "roll_up": {},
    "task_counts": {},
    "usage_by": {},
    "latency": {},
    "cost_of_failed": {},
    "dashboard": {},
    "verify_accounting": {},
    "incarnation": {},
    "histogram": {"scale": "duration", "measures": "{1,2}"},
    "quantile": {"scale": "duration", "histogram": "\\x0101"},
    "sweep": {},
    "promote": {},
    "expire_keys": {},
    "rescan": {},
    "budget_usage": {},
    "history_partition": {"id": "$id"},
    "create_history_partition": {"id": "$id"},
    "maintain_history": {},
    "check": {},
    "doctor": {},
    "version": {},
    "library_version": {},
    "launcher_state": {},
    "worker_state": {},
    "create_state": {"relation": "fresh", "engine": "deduplicate"},
    "alter_state": {"relation": "goods", "deletes": "remove"},
    "drop_state": {"relation": "goods"},
    "merge": {"relation": "goods", "rows": '[{"id": 2, "name": "b", "at": "2026-01-01"}]'},
    "uncaptured": {},
    "record": {"source": "s", "type": "t", "payload": "{}"},
    "record_many": {"events": '[{"source": "s", "type": "t", "payload": 1}]'},
    "events_after": {},
    "create_projection": {"name": "new", "relation": "projected", "types": "{t}", "columns": '{"id": "payload.id"}'},
    "drop_projection": {"name": "p"},
    "create_lookup": {"name": "new", "relation": "goods", "types": "{t}", "key": '{"id": "payload.id"}', "columns": "{name}"},
    "drop_lookup": {"name": "l"},
    "rebuild": {"relation": "projected"},
    "verify": {"relation": "projected"},
    "project": {"relation": "projected"},
    "skip_event": {"relation": "projected", "seq": "1"},
    "require_fresh": {"relation": "projected"},
    "expire_record": {"before": "2020-01-01"},
    "set_record_retention": {"keep": "1 day"},
    "utc_text": {"at": "2026-01-01"},
    "tick": {},
    "changes": {"relation": "goods"},
    "export_changes": {"relation": "goods"},
    "create_consumer": {"consumer": "new", "relations": "{goods}"},
    "drop_consumer": {"consumer": "c"},
    "poll": {"consumer": "c"},
    "commit": {"consumer": "c", "pos": "0"},
    "trim_consumers": {},
    "activate": {},
    "create_watch": {"name": "new", "relation": "goods", "condition": "name = 'a'", "queue": "q"},
    "pause_watch": {"name": "low"},
    "resume_watch": {"name": "low"},
    "drop_watch": {"name": "low"},
    "trim_watches": {},
    "pin": {},
    "tag": {"name": "new"},
    "drop_tag": {"name": "t"},
    "release_hold": {"name": "t"},
    "row_as_of": {"live": "(1,a,2026-01-01)", "key": "{1}", "tag": "t", "pos": None, "at": None},
    "point_is_kept": {"kind": "(1,a,2026-01-01)", "tag": "t", "pos": None, "at": None},
    "diff": {"relation": "goods", "since_tag": "t"},
    "expire_changes": {},
    "set_history": {"relation": "goods", "history": "1 day"},
    "image_row": {"kind": "(1,a,2026-01-01)", "image": "{1,a}"},
}

# Functions that are not called with values: what they take cannot be written as a literal.
NOT_WALKED = {
    "capture": "a trigger function",
    "keep_events": "a trigger function",
    "looked_up": "takes what a lookup found",
    "placed": "a trigger function",
    "follow_ddl": "an event trigger function",
    "follow_drop": "an event trigger function",
    "image": "takes any number of values of any type",
}

# The type that a value of a polymorphic argument is given as.
CONCRETE = {"anyelement": "goods"}

LONG = "x" * 10_000
NESTED = "[" * 3000 + "]" * 3000
BATCH = json.dumps([{"payload": 1, "id": n} for n in range(10_001)])
VALUES = {
    "text": ["", "   ", LONG, "é" * 40, "line\nbreak", "it's", 'qu"ote', "emoji 😀", "日本語", "; DROP TABLE goods; --", "%s", "$1", "nobody", "NULL", "\u202e", "\u0085"],
    "integer": ["0", "-1", "2147483647", "-2147483648"],
    "bigint": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "double precision": ["NaN", "Infinity", "-Infinity", "-1", "1e308", "0", "-0", "1e-308"],
    "real": ["NaN", "Infinity", "-Infinity", "-1", "1e38", "1.0001", "0"],
    "numeric": ["NaN", "Infinity", "-Infinity", "-1", "-0.0001", "1e131000", "1e-16383"],
    "boolean": [],
    "interval": ["-1 s", "0", "1 us", "178000000 years", "-178000000 years", "1000 years", "-2147483648 days", "1 month -30 days"],
    "timestamp with time zone": ["infinity", "-infinity", "294276-12-31 23:59:59", "4713-01-01 BC"],
    "jsonb": ["null", "1", '"text"', "true", "[]", "{}", "[null]", "[1]", "[[]]", "[{}]", '[{"bogus": 1}]', '{"bogus": 1}', '{"": {}}',
              json.dumps("x" * 2_000_000), NESTED, BATCH],
    "uuid": [str(uuid.UUID(int=0)), str(uuid.uuid4())],
    "uuid[]": ["{}", "{NULL}", "{{}}", f"{{{uuid.uuid4()}}}"],
    "text[]": ["{}", "{NULL}", '{""}', "{a,NULL}", "{{a,b},{c,d}}", "{nobody}", "{" + ",".join(f"n{n}" for n in range(20_000)) + "}",
               "{" + LONG + "}", '{"emoji 😀","it\'s"}', "[5:6]={a,b}"],
    "regclass": ["pg_class", "0", "999999", "stint.tasks", "stint.queue_config", "goods_pkey", "pg_toast.pg_toast_1255"],
    "regclass[]": ["{}", "{NULL}", "{pg_class}", "{goods,NULL}", "{999999}", "{goods,goods}"],
    "anyelement": ["(,,)"],
    "bytea": ["\\x", "\\x80", "\\xffffffffffffffffffffff01", "\\x01"],
    "bytea[]": ["{}", "{NULL}", '{"\\\\x80"}'],
    "double precision[]": ["{}", "{NULL}", "{NaN,Infinity,-Infinity,-1,1e308}", "{{1,2},{3,4}}"],
}  # fmt: skip

TASK_FIELDS = {
    "priority": ['"high"', "1.5", "99999999999", "true", "[]"],
    "run_at": ['"yesterday or so"', "12", '"infinity"', '""'],
    "delay": ['"soon"', '"-1 s"', '"1000 years"', "{}"],
    "key": ['""', json.dumps(LONG), '"a\\nb"'],
    "agent": ['""', json.dumps(LONG)],
    "tokens": ["-1", "1e30", '"many"', "0.5", "1000000000000001"],
    "budgets": ['"b"', "[null]", '["nobody"]', '[["b"]]', "{}", '[""]', "[1]"],
    "max_attempts": ["0", "-1", '"x"', "1e10"],
    "lease_for": ['"0"', '"-1 s"', '"1000 years"', '"x"'],
    "max_run_time": ['"0"', '"-1 s"', '"1000 years"', '"x"'],
    "labels": [json.dumps("x" * 2_000_000)],
    "payload": [json.dumps("x" * 2_000_000)],
    "bogus": ["1", "null"],
    "Priority": ["1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def walked(server):
    """A database with something of everything, and the running task that the calls name."""
    server.create_database("walked")
    with server.connect("walked") as conn:
        conn.execute(SETUP)
        call(conn, "tick")
        call(conn, "create_budget", name="b", max_running=5, max_tokens=1000, default_tokens=10)
        call(conn, "create_budget", name="unused", max_running=5)
        queue = Queue(conn, budgets=["b"], events=True)
        queue.enqueue(key="k")
        queue.complete(queue.one())
        queue.enqueue(max_attempts=9)
        running = queue.one(lease_for="10 hours")
        queue.enqueue()
        queue.enqueue(delay="10 hours")
        conn.execute("SELECT stint.create_consumer('c', '{goods}')")
        conn.execute("SELECT stint.tag('t')")
        call(conn, "create_queue", queue="fed")
        call(conn, "create_schedule", queue="fed", name="s", cron="0 0 29 2 *", payload="{}")
        conn.execute("CREATE TABLE projected (id int PRIMARY KEY); SELECT stint.create_state('projected', 'deduplicate')")
        conn.execute("""SELECT stint.create_projection('p', 'projected', '{told}', '{"id": "payload.id"}')""")
        conn.execute("""SELECT stint.create_lookup('l', 'goods', '{told}', '{"id": "payload.id"}', '{name}')""")
        conn.execute("""SELECT stint.record('s', 'told', '{"id": "poison"}', event_id => 'e')""")
        conn.execute("UPDATE stint.events_aside SET seq = 1, state = 'skipped'")
        call(conn, "create_watch", name="low", relation="goods", condition="id < 0", queue="fed")
        conn.execute("SET statement_timeout = '20 s'")
        yield conn, {"$id": str(running.id), "$lease": str(running.lease)}
    server.drop_database("walked")


def signature(conn, function):
    return dict(
        conn.execute(
            """SELECT a.name, format_type(a.type, NULL)
               FROM pg_proc p, unnest(p.proargnames[:p.pronargs], p.proargtypes::oid[]) AS a (name, type)
               WHERE p.pronamespace = 'stint'::regnamespace AND p.proname = %s""",
            (function,),
        ).fetchall()
    )


# Tables to which the maintenance worker adds on its own.
BY_THE_WORKER = {"stint.ticks", "stint.projection_positions", "stint.task_event_ticks", "stint.rollup_epochs", "stint.rollup_marks", "stint.usage_rollups", "stint.task_rollups"}


def stored(conn):
    """How many rows each table holds but those that the maintenance worker adds to, what is in use of budgets, and that the storage rules hold."""
    tables = [t for (t,) in conn.execute(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'stint'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition")]
    counts = {t: value(conn, f"SELECT count(*) FROM {t}") for t in tables if t not in BY_THE_WORKER}
    return counts, rows(conn, "SELECT * FROM stint.budget_usage()"), rows(conn, "SELECT * FROM stint.check()")


def attempt(conn, function, types, args):
    """Calls and rolls back. Returns the error, if it was one."""
    named = ", ".join(f"{name} => %({name})s::{CONCRETE.get(types[name], types[name])}" for name in args)
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(f"SELECT count(*) FROM stint.{function}({named})", args)
    except psycopg.Error as error:
        return error
    return None


def faults_of(error, argument, given, args):
    """What is wrong with an error; nothing where it is a proper one."""
    text = f"{error.diag.message_primary} {error.diag.message_detail or ''}"
    state = error.sqlstate or "none"
    if state[:2] in ("XX", "57", "no", "58", "53"):
        return f"{state}: {text[:200]}"
    if error.diag.source_function == "pg_stint" and not error.diag.message_hint:
        return f"no hint: {text[:200]}"
    about = [argument, *(v for v in args.values() if v and len(v) < 200)]
    # What the message calls the thing, where that is not what was given.
    about += {"tasks": ["task "], "items": ["item "], "events": ["event "], "relations": ["pg_catalog.pg_class"]}.get(argument, [])
    # Of an array, the element that is wrong.
    named = [word for word in re.findall('"([^"]*)"', text) if word in (given or "")]
    if not named and not any(word in text for word in about):
        return f"does not say what it is about ({state}): {text[:200]}"
    return None


def test_every_function_is_walked(walked):
    conn, _ = walked
    names = {name for (name,) in conn.execute("SELECT proname FROM pg_proc WHERE pronamespace = 'stint'::regnamespace")}
    assert names == CALLS.keys() | NOT_WALKED.keys()


@pytest.mark.parametrize("function", CALLS)
def test_bad_input_is_refused_properly_or_works(walked, function):
    conn, ids = walked
    types = signature(conn, function)
    good = {name: ids.get(v, v) for name, v in CALLS[function].items()}
    assert attempt(conn, function, types, good) is None
    before = stored(conn)
    wrong, tried = [], 0
    for argument, type in types.items():
        assert type in VALUES, f"no values for the type {type} of {function}({argument})"
        for given in [None, *VALUES[type]]:
            args = good | {argument: given}
            tried += 1
            if error := attempt(conn, function, types, args):
                if fault := faults_of(error, argument, given, args):
                    wrong.append(f"{argument} => {str(given)[:40]!r}: {fault}")
    assert not wrong, "\n".join(wrong)
    assert stored(conn) == before


@pytest.mark.parametrize("function", [name for name in CALLS if CALLS[name]])
def test_what_must_be_given_cannot_be_null_or_empty(walked, function):
    """Of the arguments a call cannot do without, none may be null; a name may not be empty."""
    conn, ids = walked
    if function in ("row_as_of", "point_is_kept", "image_row", "utc_text"):
        pytest.skip("takes nulls")
    types = signature(conn, function)
    good = {name: ids.get(v, v) for name, v in CALLS[function].items()}
    without_default = len(types) - value(
        conn, "SELECT pronargdefaults FROM pg_proc WHERE pronamespace = 'stint'::regnamespace AND proname = %s", function)  # fmt: skip
    for argument in list(types)[:without_default]:
        if (function, argument) in {("fail", "error"), ("commit", "pos"), ("set_history", "history"), ("set_record_retention", "keep")}:
            continue
        error = attempt(conn, function, types, good | {argument: None})
        assert error is not None and error.sqlstate == "22004" and argument in str(error), f"{argument} => null: {error}"
        if types[argument] == "text":
            for empty in "", "  ":
                assert attempt(conn, function, types, good | {argument: empty}) is not None, f"{argument} => {empty!r}"


@pytest.mark.parametrize("field", TASK_FIELDS)
def test_a_bad_field_of_a_batch_names_its_element_and_the_field(walked, field):
    conn, _ = walked
    for given in TASK_FIELDS[field]:
        element = f'{{"payload": 1, "{field}": {given}}}' if field != "payload" else f'{{"payload": {given}}}'
        tasks = f'[{{"payload": 1}}, {{"payload": 2, "{field if field in ("key", "agent") else "agent"}": "ok"}}, {element}]'
        error = attempt(conn, "enqueue_many", signature(conn, "enqueue_many"), {"queue": "q", "tasks": tasks})
        assert error is not None, f"{field}: {given[:50]} was taken"
        assert error.sqlstate[:2] in ("22", "42", "54"), f"{given[:50]}: {error.sqlstate} {error}"
        assert "task 3" in str(error), f"{given[:50]}: {error}"
        if field != "budgets" or given in ('"b"', "{}"):
            assert f'"{field}"' in str(error), f"{given[:50]}: {error}"
        assert error.diag.message_hint


@pytest.mark.parametrize(
    "tasks, says",
    [("{}", "not an array"), ("null", "not an array"), ("[null]", "task 1"), ("[[]]", "task 1"), ('[{"payload": 1}, {}]', "task 2"),
     ('[{"payload": 1}, "x"]', "task 2"), ('[{"priority": 1}]', "payload"), (BATCH, "10001 items")],
)  # fmt: skip
def test_a_batch_of_the_wrong_shape_says_so(walked, tasks, says):
    conn, _ = walked
    error = attempt(conn, "enqueue_many", signature(conn, "enqueue_many"), {"queue": "q", "tasks": tasks})
    assert says in str(error) and error.diag.message_hint and error.sqlstate in ("22023", "54000")


@pytest.mark.parametrize(
    "setting, args, sqlstate",
    [("max_payload = '1kB'", {"payload": json.dumps("x" * 1100)}, "54000"), ("max_payload = '1kB'", {"labels": json.dumps("x" * 1100)}, "54000"),
     ("max_name_length = 5", {"agent": "agents"}, "54000"), ("max_name_length = 5", {"key": "k" * 21}, "54000"),
     ("max_lease = '10 s'", {"lease_for": "11 s"}, "54000"), ("max_delay = '10 s'", {"delay": "11 s"}, "54000"),
     ("max_delay = '10 s'", {"run_at": "2100-01-01"}, "54000")],
)  # fmt: skip
def test_limits_are_settings_that_the_error_names(walked, setting, args, sqlstate):
    conn, _ = walked
    with conn.transaction(force_rollback=True):
        conn.execute(f"SET LOCAL stint.{setting}")
        error = attempt(conn, "enqueue", signature(conn, "enqueue"), {"queue": "q", "payload": "{}"} | args)
    assert error is not None and error.sqlstate == sqlstate
    assert f"stint.{setting.split()[0]}" in error.diag.message_hint and next(iter(args)) in str(error)


def test_an_unknown_name_tells_the_nearest_one(walked):
    conn, _ = walked
    call(conn, "create_queue", queue="extract")
    error = attempt(conn, "enqueue", signature(conn, "enqueue"), {"queue": "extrct", "payload": "{}"})
    assert error.sqlstate == "42704" and 'Did you mean "extract"?' in error.diag.message_hint
