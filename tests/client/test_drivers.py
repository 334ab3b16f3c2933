"""What client drivers do: server-side prepared statements, bound parameters, one statement a transaction, and a pooler's changes of session."""

import subprocess

import psycopg
from cluster import bindir, clean_environment
from stint import Queue, call, rows, value


def test_prepared_statements_in_autocommit_run_a_whole_task(conn, connect):
    call(conn, "create_budget", name="b", max_running=2)
    queue = Queue(conn, budgets=["b"])
    session = connect(prepare_threshold=0)  # prepared at first use
    for n in range(30):
        # The fifth execution on may use a generic plan.
        id = session.execute("SELECT stint.enqueue(%s, %s, priority => %s, tokens => %s)", ("q", f'{{"n": {n}.10}}', n, n)).fetchone()[0]
        [task] = queue.by(session).claim()
        assert task.id == id
        assert session.execute("SELECT status FROM stint.extend(%s, %s, %s)", ("q", id, task.lease)).fetchone() == ("held",)
        answer = session.execute(
            "SELECT outcome, result::text, first FROM stint.complete(%s, %s, %s, result => %s, input_tokens => %s, model_cost => %s)",
            ("q", id, task.lease, f'{{"n": {n}.10}}', n, "0.10"),
        ).fetchone()
        assert answer == ("completed", f'{{"n": {n}.10}}', True)
    assert rows(conn, "SELECT sum(input_tokens) AS t, sum(model_cost)::text AS c FROM stint.attempts") == [(435, "3.00")]


def test_prepared_statements_survive_a_new_extension(conn, connect):
    session = connect(prepare_threshold=0)
    for _ in range(2):
        queue = Queue(conn)
        for _ in range(3):
            queue.by(session).enqueue()
            assert len(queue.by(session).claim()) == 1
        conn.execute("SET stint.allow_drop = on; DROP EXTENSION pg_stint CASCADE; CREATE EXTENSION pg_stint")


def test_a_task_may_begin_and_end_in_different_sessions(conn, connect):
    """As behind a pooler in transaction mode: nothing is kept in the session but what it can do without."""
    call(conn, "create_budget", name="b", max_running=1)
    queue = Queue(conn, budgets=["b"])
    sessions = [connect() for _ in range(4)]
    for n in range(12):
        queue.by(sessions[n % 4]).enqueue()
        task = queue.by(sessions[(n + 1) % 4]).one()
        assert queue.by(sessions[(n + 2) % 4]).extend(task).status == "held"
        sessions[(n + 3) % 4].execute("DISCARD ALL")
        assert queue.by(sessions[(n + 3) % 4]).complete(task).first


def test_a_cursor_reads_a_claim_in_parts(conn):
    queue = Queue(conn)
    queue.fill(50)
    with conn.transaction():
        with conn.cursor("c") as cursor:
            cursor.execute("SELECT id, payload FROM stint.claim('q', 'w', 40)")
            first = cursor.fetchmany(7)
            queue.enqueue("51")
            rest = cursor.fetchall()
    assert [payload for _, payload in first + rest] == list(range(1, 41))
    assert value(conn, "SELECT count(*) FROM stint.place_running") == 40


def test_a_pipeline_of_calls_works(conn):
    queue = Queue(conn)
    with conn.pipeline():
        cursors = [conn.execute("SELECT stint.enqueue('q', to_jsonb(%s::int))", (n,)) for n in range(20)]
        claim = conn.execute("SELECT payload FROM stint.claim('q', 'w', 30)")
    assert len({cursor.fetchone()[0] for cursor in cursors}) == 20
    assert [payload for (payload,) in claim.fetchall()] == list(range(20))


def test_verbs_inside_plpgsql_behave_as_outside(conn):
    queue = Queue(conn, max_attempts=1)
    queue.fill(3)
    conn.execute(
        """DO $$
           DECLARE t record; answer record; n int := 0;
           BEGIN
               FOR t IN SELECT * FROM stint.claim('q', 'w', 3) LOOP
                   BEGIN
                       SELECT * INTO answer FROM stint.complete('q', t.id, t.lease);
                       n := n + 1;
                       IF n = 2 THEN RAISE 'back'; END IF;
                   EXCEPTION WHEN raise_exception THEN
                       SELECT * INTO answer FROM stint.fail('q', t.id, t.lease, sqlerrm);
                   END;
               END LOOP;
           END $$"""
    )
    assert rows(conn, "SELECT completed, failed, running FROM stint.queue_stats") == [(2, 1, 0)]


def test_pgbench_with_prepared_statements_loses_nothing(conn, server, tmp_path):
    call(conn, "create_budget", name="b", max_running=3, max_tokens=100)
    queue = Queue(conn, budgets=["b"])
    script = tmp_path / "work.sql"
    script.write_text(
        """SELECT stint.enqueue('q', '{"n": 1.10}', tokens => 10);
           WITH c AS MATERIALIZED (SELECT * FROM stint.claim('q', 'bench')) SELECT f.first FROM c CROSS JOIN LATERAL stint.complete('q', c.id, c.lease) f;
        """
    )
    done = subprocess.run(
        [bindir() / "pgbench", "-n", "-M", "prepared", "-c", "4", "-t", "100", "-f", script],
        env=clean_environment() | server.env(conn.info.dbname), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    while tasks := queue.claim(10):
        for task in tasks:
            queue.complete(task)
    assert rows(conn, "SELECT completed, ready, running FROM stint.queue_stats") == [(400, 0, 0)]


def test_an_error_in_a_verb_leaves_the_session_as_it_was(conn, connect):
    queue = Queue(conn)
    session = connect()
    before = rows(session, "SELECT current_user AS u, current_setting('plan_cache_mode') AS p, current_setting('search_path') AS s")
    for bad in ("SELECT stint.enqueue('nope', '{}')", "SELECT * FROM stint.claim('q', '')", "SELECT stint.enqueue('q', null)"):
        for _ in range(3):
            try:
                session.execute(bad)
            except psycopg.Error:
                pass
    assert rows(session, "SELECT current_user AS u, current_setting('plan_cache_mode') AS p, current_setting('search_path') AS s") == before
    queue.by(session).enqueue()
    assert len(queue.by(session).claim()) == 1
