"""The verbs of every task write their rows without the executor where they can; what anybody can see of that must be the same."""

import psycopg
import pytest
from stint import Queue, call, rows, value

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
