"""The verbs of every task write their rows without the executor where they can; what anybody can see of that must be the same."""

import json
import random

import psycopg
import pytest
from stint import Queue, background, call, rows, value, waiting

PLACES = ("place_ready", "place_running")
HISTORY = ("task_facts", "task_attempts", "task_outcomes")


def leaf(conn, part, id):
    """The partition that holds a row of the task."""
    return value(conn, f"SELECT tableoid::regclass::text FROM stint.{part} WHERE id = %s", id)


def a_whole_life(queue, **more):
    """One task goes through its life; one that depends on it is left running."""
    id = queue.enqueue('{"n": 1.10}', priority=3, tokens=7, **more)
    after = queue.enqueue('"after"', depends_on=[id])
    task = queue.one()
    assert (task.id, task.payload, task.priority, task.tokens) == (id, {"n": 1.1}, 3, 7)
    assert queue.complete(task, result='{"r": 1e400}', input_tokens=5, model="m").outcome == "completed"
    assert queue.complete(task).outcome == "already_completed"
    last = queue.one()
    assert last.id == after
    return id, last


def unchecked(conn):
    return rows(conn, "SELECT * FROM stint.check()")


def test_a_life_runs_no_statement_on_the_places(conn):
    """The statement trigger of the places would be called by one."""
    queue = Queue(conn)
    for _ in range(2):
        queue.enqueue()
        queue.complete(queue.one())
        conn.execute("SET track_functions = 'all'")
    conn.execute("RESET track_functions; SELECT pg_stat_force_next_flush()")
    assert rows(conn, "SELECT calls FROM pg_stat_user_functions WHERE funcname = 'placed' AND schemaname = 'stint'") == []
    assert unchecked(conn) == []


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_life_is_the_same_at_every_isolation_level(conn, level):
    queue = Queue(conn)
    stored = []
    for isolation in "READ COMMITTED", level:
        conn.execute(f"SET default_transaction_isolation = '{isolation}'")
        id, last = a_whole_life(queue)
        stored.append(
            [
                rows(conn, f"SELECT to_jsonb(t) - '{{id,lease,started_at,ended_at,enqueued_at,finished_at,xact}}'::text[] FROM stint.{part} t WHERE id = %s", id)
                for part in HISTORY
            ]
        )
        queue.complete(last)
    assert stored[0] == stored[1] and all(len(part) == 1 for part in stored[0])
    assert unchecked(conn) == []


@pytest.mark.parametrize("part", PLACES + HISTORY)
def test_triggers_of_others_fire(conn, part):
    queue = Queue(conn)
    id, last = a_whole_life(queue)
    table = f"stint.{part}" if part in PLACES else leaf(conn, part, id)
    conn.execute("CREATE TABLE public.seen (what text)")
    conn.execute("CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO public.seen VALUES (TG_OP); RETURN NULL; END$$")
    conn.execute(f"CREATE TRIGGER see AFTER INSERT OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION public.see()")
    queue.complete(last)
    conn.execute("TRUNCATE public.seen")
    _, last = a_whole_life(queue)
    # The task and the one after it: both become ready and are claimed, the first is completed.
    expected = {"place_ready": (2, 2), "place_running": (2, 1), "task_facts": (2, 0), "task_attempts": (1, 0), "task_outcomes": (1, 0)}[part]
    assert rows(conn, "SELECT count(*) FILTER (WHERE what = 'INSERT') AS i, count(*) FILTER (WHERE what = 'DELETE') AS d FROM public.seen") == [expected]
    conn.execute(f"DROP TRIGGER see ON {table}; TRUNCATE public.seen")
    queue.complete(last)
    a_whole_life(queue)
    assert rows(conn, "SELECT * FROM public.seen") == []
    assert unchecked(conn) == []


@pytest.mark.parametrize(
    "index",
    [
        "(worker)",
        "(upper(worker))",
        "(worker) WHERE tokens > 5",
        "(worker) WHERE tokens IS NOT NULL",
        "(worker) INCLUDE (tokens)",
        "USING hash (worker)",
        "USING brin (started_at)",
    ],
)
def test_indexes_of_others_are_kept(conn, index):
    queue = Queue(conn)
    queue.complete(a_whole_life(queue)[1])
    conn.execute(f"CREATE INDEX theirs ON stint.place_running {index}")
    queue.enqueue(tokens=9)
    queue.enqueue()
    tasks = queue.claim(2)
    assert len(tasks) == 2
    conn.execute("SET enable_seqscan = off")
    condition = {"(upper(worker))": "upper(worker) = 'W'", "USING brin (started_at)": "started_at > now() - interval '1 hour'"}.get(index, "worker = 'w'")
    if "WHERE" in index:
        condition += f" AND {index.split('WHERE ')[1]}"
    query = f"SELECT count(*) FROM stint.place_running WHERE {condition}"
    assert "theirs" in str(rows(conn, f"EXPLAIN {query}"))
    assert value(conn, query) == (1 if "WHERE" in index else 2)
    for task in tasks:
        queue.complete(task)
    assert value(conn, query) == 0
    conn.execute("RESET enable_seqscan")
    assert unchecked(conn) == []


def test_constraints_of_others_hold(conn):
    queue = Queue(conn)
    queue.complete(a_whole_life(queue)[1])
    conn.execute("ALTER TABLE stint.place_running ADD CONSTRAINT theirs CHECK (priority < 5)")
    queue.enqueue(priority=9)
    with pytest.raises(psycopg.errors.CheckViolation):
        queue.claim()
    conn.execute("ALTER TABLE stint.place_running DROP CONSTRAINT theirs")
    assert queue.one().priority == 9
    conn.execute("CREATE UNIQUE INDEX theirs ON stint.place_running (queue)")
    queue.enqueue()
    with pytest.raises(psycopg.errors.UniqueViolation, match="theirs"):
        queue.claim()
    conn.execute("DROP INDEX stint.theirs")
    assert len(queue.claim()) == 1
    assert unchecked(conn) == []


def test_a_read_only_transaction_writes_nothing(conn):
    queue = Queue(conn)
    _, task = a_whole_life(queue)
    queue.enqueue()
    for verb in queue.enqueue, queue.claim, lambda: queue.complete(task):
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            verb()
    assert queue.complete(task).outcome == "completed" and len(queue.claim()) == 1


def test_vacuum_is_told_of_the_rows(conn):
    queue = Queue(conn)
    queue.complete(a_whole_life(queue)[1])
    counters = "SELECT relname, n_tup_ins, n_tup_del FROM pg_stat_user_tables WHERE schemaname = 'stint' AND relname = ANY(%s) ORDER BY relname"

    def counted():
        conn.execute("SELECT pg_stat_force_next_flush()")
        conn.execute("SELECT 1")
        return {name: (inserted, deleted) for name, inserted, deleted in rows(conn, counters, list(PLACES))}

    before = counted()
    for _ in range(20):
        queue.enqueue()
        queue.complete(queue.one())
    after = counted()
    for place in PLACES:
        assert tuple(now - then for now, then in zip(after[place], before[place])) == (20, 20), place


def test_a_rolled_back_step_is_undone_and_the_rest_stays(conn):
    queue = Queue(conn)
    queue.fill(3)
    with conn.transaction():
        first = queue.one()
        with pytest.raises(ZeroDivisionError), conn.transaction():
            second = queue.one()
            queue.complete(first)
            assert second.id != first.id
            raise ZeroDivisionError
        again = queue.one()
        assert again.id == second.id and again.lease != second.lease
        queue.complete(first)
    assert rows(conn, "SELECT ready, running, completed FROM stint.queue_stats") == [(1, 1, 1)]
    assert unchecked(conn) == []


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_hostile_search_path_is_not_searched_by_the_verbs_of_every_task(conn, level):
    queue = Queue(conn)
    conn.execute("CREATE SCHEMA trap")
    for left in "text", "uuid", "int", "bigint":
        conn.execute(f"CREATE FUNCTION trap.eq({left}, {left}) RETURNS bool LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
        conn.execute(f"CREATE OPERATOR trap.= (LEFTARG = {left}, RIGHTARG = {left}, FUNCTION = trap.eq)")
    conn.execute("CREATE FUNCTION trap.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE plpgsql AS $$BEGIN RAISE 'ran'; END$$")
    # The first enqueue has to make the partition anew.
    for part in HISTORY:
        for (table,) in rows(conn, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", f"stint.{part}_c0"):
            conn.execute(f"DROP TABLE {table}")
    conn.execute(f"SET search_path = trap, pg_catalog; SET default_transaction_isolation = '{level}'")
    queue.complete(a_whole_life(queue)[1])
    queue.fill(2)
    task = queue.one()
    call(queue.conn, "finish_and_claim", queue="q", id=task.id, lease=task.lease, worker="w")
    assert value(conn, "SHOW search_path") == "trap, pg_catalog"


def enqueue_many(queue, tasks):
    return call(queue.conn, "enqueue_many", queue=queue.name, tasks=json.dumps(tasks))


def complete_many(queue, tasks, **fields):
    items = [{"id": str(task.id), "lease": str(task.lease)} | {name: make(task) for name, make in fields.items()} for task in tasks]
    return call(queue.conn, "complete_many", queue=queue.name, items=json.dumps(items))


def a_batch(queue, count=250):
    """So many tasks, more than are written in one go, go through their lives together; returns their ids."""
    tasks = [{"payload": {"n": n}, "tokens": n, "priority": n % 3, **({"labels": {"l": n}, "agent": f"a{n % 2}"} if n % 5 == 0 else {})} for n in range(count)]
    made = enqueue_many(queue, tasks)
    assert [(row.ordinality, row.created) for row in made] == [(n + 1, True) for n in range(count)]
    held = queue.claim(count)
    assert [task.payload["n"] for task in held] == sorted(range(count), key=lambda n: (-(n % 3), n))
    assert {task.id: task.payload["n"] for task in held} == {row.id: row.ordinality - 1 for row in made}
    assert all((task.labels, task.agent) == (({"l": n}, f"a{n % 2}") if n % 5 == 0 else (None, None)) for task in held for n in [task.payload["n"]])
    answers = complete_many(queue, held, result=lambda task: [task.payload["n"]], input_tokens=lambda task: task.payload["n"])
    assert [(a.ordinality, a.id, a.outcome, a.result, a.first, a.status) for a in answers] == [
        (at + 1, task.id, "completed", [task.payload["n"]], True, "completed") for at, task in enumerate(held)
    ]
    return [row.id for row in made]


def test_a_batch_runs_no_statement_on_the_places(conn):
    queue = Queue(conn)
    a_batch(queue, 3)
    conn.execute("SET track_functions = 'all'")
    a_batch(queue)
    conn.execute("RESET track_functions; SELECT pg_stat_force_next_flush()")
    assert rows(conn, "SELECT calls FROM pg_stat_user_functions WHERE funcname = 'placed' AND schemaname = 'stint'") == []
    assert unchecked(conn) == []


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_batch_is_the_same_at_every_isolation_level(conn, level):
    queue = Queue(conn, events=True)
    stored = []
    for isolation in "READ COMMITTED", level:
        conn.execute(f"SET default_transaction_isolation = '{isolation}'")
        ids = a_batch(queue)
        drop = "'{id,lease,started_at,ended_at,enqueued_at,finished_at,at,xact,xid,seq}'::text[]"
        stored.append(
            [
                rows(conn, f"SELECT to_jsonb(t) - {drop} FROM unnest(%s) WITH ORDINALITY AS u (id, n) JOIN stint.{part} t USING (id) ORDER BY u.n", ids)
                for part in HISTORY
            ]
            + [rows(conn, f"SELECT to_jsonb(t) - {drop} FROM stint.task_event_log t WHERE id = ANY(%s) ORDER BY t.seq", ids)]
        )
    assert stored[0] == stored[1] and [len(part) for part in stored[0]] == [250, 250, 250, 750]
    assert unchecked(conn) == []


@pytest.mark.parametrize("part", PLACES + HISTORY)
def test_triggers_of_others_fire_for_each_row_of_a_batch(conn, part):
    queue = Queue(conn)
    ids = a_batch(queue, 2)
    table = f"stint.{part}" if part in PLACES else leaf(conn, part, ids[0])
    conn.execute("CREATE TABLE public.seen (what text)")
    conn.execute("CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO public.seen VALUES (TG_OP); RETURN NULL; END$$")
    conn.execute(f"CREATE TRIGGER see AFTER INSERT OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION public.see()")
    a_batch(queue, 30)
    expected = (30, 30) if part in PLACES else (30, 0)
    assert rows(conn, "SELECT count(*) FILTER (WHERE what = 'INSERT') AS i, count(*) FILTER (WHERE what = 'DELETE') AS d FROM public.seen") == [expected]
    assert unchecked(conn) == []


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize(
    ("part", "column", "bad", "step"),
    [
        ("place_ready", "tokens", "105", 0),
        ("task_facts", "tokens", "105", 0),
        ("place_running", "tokens", "105", 1),
        ("task_attempts", "input_tokens", "105", 2),
        ("task_outcomes", "result", "'[105]'", 2),
    ],
)
def test_a_row_refused_in_the_middle_of_a_batch_leaves_nothing(conn, part, column, bad, step, unique):
    """By a constraint, for which each row is a statement, or by an index, where another row of the same batch is in the way."""
    queue = Queue(conn)
    table = f"stint.{part}" if part in PLACES else leaf(conn, part, a_batch(queue, 2)[0])
    held = []

    def end():
        number = {task.id: task.tokens for task in held}
        return complete_many(queue, held, result=lambda task: [number[task.id]], input_tokens=lambda task: number[task.id])

    steps = [
        lambda: enqueue_many(queue, [{"payload": n, "tokens": 100 + (n % 8 if unique else n)} for n in range(10)]),
        lambda: held.extend(queue.claim(10)),
        end,
    ]
    for before in steps[:step]:
        before()
    conn.execute(f"CREATE UNIQUE INDEX theirs ON {table} ({column})" if unique else f"ALTER TABLE {table} ADD CONSTRAINT theirs CHECK ({column} <> {bad})")

    def count():
        return [value(conn, f"SELECT count(*) FROM stint.{each}") for each in PLACES + HISTORY]

    was = count()
    with pytest.raises(psycopg.errors.UniqueViolation if unique else psycopg.errors.CheckViolation, match="theirs") as refused:
        steps[step]()
    assert count() == was
    assert unique or step == 1 or str(refused.value).startswith(f"{['task', '', 'item'][step]} 6: ")
    conn.execute("DROP INDEX stint.theirs" if unique else f"ALTER TABLE {table} DROP CONSTRAINT theirs")
    *_, answers = [after() for after in steps[step:]]
    assert [answer.first for answer in answers] == [True] * 10


def test_a_batch_of_large_values(conn):
    """Some are kept out of line, some compressed, some as they are; none changes."""
    queue = Queue(conn)
    noise = random.Random(7)
    sizes = [10, 3_000, 100, 60_000, 9_000, 1, 2_100, 200_000] * 8
    texts = ["".join(noise.choices("abcdefghijklmnop0123456789", k=size)) if n % 2 else "x" * size for n, size in enumerate(sizes)]
    enqueue_many(queue, [{"payload": text, "labels": {"t": text[:5000]}} for text in texts])
    held = queue.claim(100)
    assert [task.payload for task in held] == texts and [task.labels["t"] for task in held] == [text[:5000] for text in texts]
    answers = complete_many(queue, held, result=lambda task: {"r": task.payload}, meta=lambda task: {"m": task.payload[::-1]})
    assert [answer.result["r"] for answer in answers] == texts
    kept = """SELECT o.result ->> 'r' AS result, a.meta ->> 'm' AS meta
              FROM unnest(%s) WITH ORDINALITY AS u (id, n) JOIN stint.task_outcomes o USING (id) JOIN stint.task_attempts a USING (id)
              ORDER BY u.n"""
    assert rows(conn, kept, [task.id for task in held]) == [(text, text[::-1]) for text in texts]
    assert unchecked(conn) == []


def test_batches_of_tasks_that_lie_far_apart(conn):
    """Looked up one by one where others lie between them, in two classes of history, with some that ended already."""
    queue = Queue(conn)
    made = [row.id for row in enqueue_many(queue, [{"payload": n, "priority": n * 7919 % 50} for n in range(1000)])]
    call(conn, "alter_queue", queue="q", history_retention="90 days")
    made += [row.id for row in enqueue_many(queue, [{"payload": n, "priority": n * 7919 % 50} for n in range(1000, 1500)])]
    held = [task for _ in range(15) for task in queue.claim(100)]
    assert {task.id: task.payload for task in held} == {id: n for n, id in enumerate(made)} and len(held) == 1500
    noise = random.Random(3)
    noise.shuffle(held)
    ended = held[::7]
    assert all(answer.first for answer in complete_many(queue, ended))
    batches = [complete_many(queue, held[start : start + 60], result=lambda task: task.payload) for start in range(0, 1500, 60)]
    first = {answer.id: answer.first for batch in batches for answer in batch}
    assert first == {task.id: task not in ended for task in held}
    assert value(conn, "SELECT count(*) FROM stint.task_outcomes o JOIN stint.task_facts f USING (queue, id) WHERE o.result = f.payload") == 1500 - len(ended)
    assert rows(conn, "SELECT ready, running, completed FROM stint.queue_stats") == [(0, 0, 1500)]
    assert unchecked(conn) == []


def test_a_batch_waits_for_a_heartbeat_in_its_midst(conn, connect):
    queue, other = Queue(conn), connect()
    enqueue_many(queue, [{"payload": n} for n in range(20)])
    held = queue.claim(20)
    with other.transaction():
        queue.by(other).extend(held[10], progress='{"half": true}')
        ending = background(lambda: complete_many(queue, held))
        waiting(other, conn.info.backend_pid, "Lock")
    assert [answer.first for answer in ending.join()] == [True] * 20
    assert [value(conn, f"SELECT count(*) FROM stint.{part}") for part in ("place_running", "task_attempts", "task_outcomes")] == [0, 20, 20]


def test_tasks_on_which_others_depend_end_in_a_batch(conn):
    queue = Queue(conn)
    first = [row.id for row in enqueue_many(queue, [{"payload": n} for n in range(30)])]
    after = [row.id for row in enqueue_many(queue, [{"payload": "after", "depends_on": [str(first[n]), str(first[29])]} for n in range(0, 30, 3)])]
    held = queue.claim(100)
    assert len(held) == 30
    complete_many(queue, held[:29])
    assert queue.claim(100) == []
    complete_many(queue, held[29:])
    assert {task.id for task in queue.claim(100)} == set(after)
    assert unchecked(conn) == []


def test_vacuum_is_told_of_the_rows_of_a_batch(conn):
    queue = Queue(conn)
    counters = "SELECT relname, n_tup_ins, n_tup_del FROM pg_stat_user_tables WHERE schemaname = 'stint' AND relname = ANY(%s) ORDER BY relname"
    a_batch(queue)
    conn.execute("SELECT pg_stat_force_next_flush()")
    conn.execute("SELECT 1")
    assert rows(conn, counters, list(PLACES)) == [(place, 250, 250) for place in sorted(PLACES)]
