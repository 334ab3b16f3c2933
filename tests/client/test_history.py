"""History is kept in partitions by retention and time: none that is missing makes a call fail, those past their retention go as a whole, and what is needed stays."""

import psycopg
import pytest
from aged import Aged, maintain, partition, table
from stint import Queue, background, call, parallel, rows, until, value, waiting

KEPT = "30 days"


@pytest.fixture
def queue(conn):
    return Queue(conn, history_retention=KEPT)


@pytest.fixture
def old(queue):
    return Aged(queue.conn, "q")


def drop_partitions(queue):
    """As if nobody had made any. The worker, which has just looked, looks again in ten seconds only."""
    until(queue.conn, "SELECT count(*) >= 2 FROM stint.history")
    for (name,) in rows(queue.conn, "SELECT c.relname FROM pg_class c WHERE c.relname ~ '^task_[a-z]+_c[0-9]+_[0-9]+$' AND c.relispartition"):
        queue.conn.execute(f"DROP TABLE stint.{name}")


# A missing partition


def test_a_missing_partition_makes_no_enqueue_fail(queue, connect):
    watching = connect(autocommit=False)
    watching.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    watching.execute("SELECT count(*) FROM stint.lanes")
    drop_partitions(queue)
    id = queue.enqueue('"first"')
    assert queue.status(id) == "ready" and queue.complete(queue.one()).first
    assert value(watching, "SELECT count(*) FROM stint.tasks") == 0, "its snapshot is older"
    watching.commit()
    assert queue.by(watching).status(id) == "completed"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_that_miss_the_same_partition_both_succeed(queue, connect, end):
    first, second = connect(autocommit=False), connect()
    drop_partitions(queue)
    one = queue.by(first).enqueue()
    other = background(lambda: queue.by(second).enqueue())
    waiting(queue.conn, second.info.backend_pid, "Lock")
    getattr(first, end)()
    there = {other.join()} | ({one} if end == "commit" else set())
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == there
    assert {task.id for task in queue.claim(9)} == there


def test_ten_sessions_that_miss_the_same_partition_all_succeed(queue, connect):
    sessions = [queue.by(connect()) for _ in range(10)]
    drop_partitions(queue)
    ids = parallel(10, lambda n: sessions[n].enqueue())
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == set(ids)


def test_a_partition_made_in_a_savepoint_goes_with_it_and_is_made_again(queue, connect):
    drop_partitions(queue)
    conn = connect(autocommit=False)
    mine = queue.by(conn)
    conn.execute("SAVEPOINT s")
    mine.enqueue()
    conn.execute("ROLLBACK TO s")
    id = mine.enqueue()
    assert mine.status(id) == "ready"
    conn.commit()
    assert queue.one().id == id


def test_a_partition_missing_while_the_same_query_reads_history_is_made_too(queue):
    """PostgreSQL lets nobody change a table that a query of the session is reading: the new partition is attached a moment later."""
    other = Queue(queue.conn, "other", history_retention="7 days")
    drop_partitions(queue)
    first = queue.enqueue()
    made = value(queue.conn, "SELECT stint.enqueue('other', to_jsonb(t.id)) FROM stint.tasks t WHERE t.queue = 'q'")
    assert other.one().id == made
    maintain(queue.conn)
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == {first, made}


def test_every_partition_has_its_key(queue):
    keys = """SELECT DISTINCT substring(c.relname FROM '^task_[a-z]+') AS part, pg_get_indexdef(i.indexrelid) ~ 'UNIQUE', substring(pg_get_indexdef(i.indexrelid) FROM '\\(.*')
              FROM pg_class c LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
              WHERE c.relkind = 'r' AND c.relname ~ '^task_[a-z]+_c[0-9]+_[0-9]+$' ORDER BY 1"""
    assert [tuple(row) for row in queue.conn.execute(keys).fetchall()] == [
        ("task_attempts", True, "(queue, id, attempt)"), ("task_facts", True, "(queue, id)"), ("task_outcomes", True, "(queue, id)")]  # fmt: skip


# Retention


def test_retention_drops_whole_partitions_of_each_queue_apart(queue, old):
    short = Queue(queue.conn, "short", history_retention="1 day")
    quick = Aged(queue.conn, "short")
    forever = Queue(queue.conn, "forever")
    endless = Aged(queue.conn, "forever")
    with queue.conn.transaction():
        gone = [old.finished(40), old.finished(40, outcome="failed"), old.finished(33), quick.finished(40), quick.finished(3)]
    kept = [old.finished(3), old.finished(29), quick.finished(0.5), endless.finished(400), queue.enqueue(), short.enqueue(), forever.enqueue()]
    tables = [table(queue.conn, id) for id in kept]
    assert all(tables)
    maintain(queue.conn)
    assert [partition(queue.conn, id) for id in gone] == [None] * len(gone), "whole tables, not rows"
    assert [table(queue.conn, id) for id in kept] == tables, "not touched"
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == set(kept)
    names = rows(queue.conn, "SELECT count(*) AS n FROM pg_class WHERE relname ~ '^task_(attempts|outcomes)_c[0-9]+_[0-9]+$' GROUP BY replace(relname, 'attempts', 'outcomes')")
    assert {n for (n,) in names} == {2}, "attempts and outcomes go with their facts"


def test_what_finished_lately_stays_however_long_ago_it_was_enqueued(queue, old):
    with queue.conn.transaction():
        expired = [old.finished(50) for _ in range(8)]
        [late, later] = [old.finished(50, ago=29), old.finished(50, ago=1)]
    assert len({value(queue.conn, "SELECT stint.history_partition(%s)", id) for id in [*expired, late, later]}) == 1
    maintain(queue.conn)
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == {late, later}
    assert queue.ended(late) == ["completed"]


def test_no_live_task_is_lost(queue, old):
    with queue.conn.transaction():
        for _ in range(40):
            old.finished(50)
        ready = old.ready(50, '"' + "x" * 100_000 + '"')
        before = table(queue.conn, ready)
        scheduled, running, failing = old.scheduled(50), old.ready(50), old.ready(50)
        held = {task.id: task for task in queue.claim(3)}
        queue.release(held[ready])
        queue.fail(held[failing], retry_in="1 day")
    behind = queue.enqueue(depends_on=[scheduled])
    maintain(queue.conn)
    assert table(queue.conn, ready) not in (None, before), "a new table with nothing but what is live"
    live = {ready: "ready", scheduled: "scheduled", running: "running", failing: "scheduled", behind: "blocked"}
    assert {task.id: task.status for task in rows(queue.conn, "SELECT id, status FROM stint.tasks")} == live
    assert rows(queue.conn, "SELECT length(payload::text) AS n FROM stint.task_payloads WHERE id = %s", ready) == [(100_002,)]
    assert queue.complete(held[running]).first and queue.complete(queue.one()).first
    queue.due(scheduled)
    assert queue.complete(queue.one()).first
    assert queue.one().id == behind
    queue.due(failing)
    again = queue.one()
    assert (again.id, again.attempt) == (failing, 2) and queue.complete(again).first
    assert queue.ended(failing) == ["failed", "completed"]
    assert queue.complete(held[running]).outcome == "already_completed"


def test_a_partition_of_which_much_is_live_waits(queue, old):
    with queue.conn.transaction():
        finished, live = [old.finished(50) for _ in range(5)], [old.scheduled(50) for _ in range(5)]
    before = table(queue.conn, live[0])
    assert maintain(queue.conn).held_up == 1
    assert table(queue.conn, live[0]) == before and partition(queue.conn, finished[0])
    for id in live[:4]:
        queue.cancel(id)
        queue.conn.execute("UPDATE stint.task_outcomes SET finished_at = finished_at - interval '40 days' WHERE id = %s", (id,))
    maintain(queue.conn)
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks")} == {live[4]}


def test_tasks_are_claimed_and_ended_while_their_partitions_are_exchanged(queue, old, connect):
    """Three partitions, each exchanged as often as its tasks allow, under four workers."""
    with queue.conn.transaction():
        live = {old.ready(days, f'"{days}"'): days for days in (50, 60, 70) for _ in range(40)}
        for days in (50, 60, 70):
            for _ in range(200):
                old.finished(days)
    stop = []

    def keep_up():
        conn, exchanged = connect(), 0
        while not stop:
            [done] = call(conn, "maintain_history")
            exchanged += done.compacted
            conn.execute("SELECT pg_sleep(0.01)")
        return exchanged

    def work(number):
        mine, ended, idle = queue.by(connect()), [], 0
        while idle < 200:
            claimed = mine.claim(2)
            idle = 0 if claimed else idle + 1
            for task in claimed:
                assert task.payload == str(live[task.id])
                verb = mine.fail if task.attempt == 1 and number % 2 else mine.complete
                options = {"retry_in": "0"} if verb == mine.fail else {}
                if verb(task, **options).outcome == "completed":
                    ended.append(task.id)
            if not claimed:
                mine.conn.execute("SELECT pg_sleep(0.005)")
        return ended

    keeper = background(keep_up)
    ended = [id for share in parallel(4, work) for id in share]
    stop.append(True)
    keeper.join()
    maintain(queue.conn)
    assert sorted(ended) == sorted(live), "each once"
    assert {task.id for task in rows(queue.conn, "SELECT id FROM stint.tasks WHERE status = 'completed'")} == set(live)
    assert {table(queue.conn, id) for id in live} and value(queue.conn, "SELECT count(*) FROM stint.task_facts") == len(live)


def test_a_snapshot_of_before_sees_what_was_kept(queue, old, connect):
    """As a dump would: its snapshot is taken before it locks the tables."""
    with queue.conn.transaction():
        live = old.ready(50, '"kept"')
        for _ in range(9):
            old.finished(50)
        before = table(queue.conn, live)
    dump = connect(autocommit=False)
    dump.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert value(dump, "SELECT count(*) FROM stint.place_ready") == 1
    maintain(queue.conn)
    assert table(queue.conn, live) != before
    assert rows(dump, "SELECT id, payload FROM stint.task_facts") == [(live, "kept")]
    dump.rollback()


def test_a_partition_waits_for_snapshots_that_do_not_see_all_of_it(queue, old, connect):
    dump = connect(autocommit=False)
    with queue.conn.transaction():
        live = old.ready(50)
        for _ in range(9):
            old.finished(50)
        before = table(queue.conn, live)
        dump.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert value(dump, "SELECT count(*) FROM stint.place_ready") == 0
    queue.fail(queue.one(), retry_in="1 day")
    assert maintain(queue.conn, patient=False).postponed == 1
    assert table(queue.conn, live) == before
    assert value(dump, "SELECT count(*) FROM stint.task_facts") == 0
    dump.rollback()
    until(queue.conn, "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()")
    maintain(queue.conn)
    assert table(queue.conn, live) != before and queue.ended(live) == ["failed"]


def test_a_reader_of_history_only_postpones(queue, old, connect):
    reader = connect(autocommit=False)
    old.finished(3)
    with queue.conn.transaction():
        gone = old.finished(50)
        reader.execute("LOCK TABLE ONLY stint.task_facts, ONLY stint.task_facts_c102 IN ACCESS SHARE MODE")
    done = maintain(queue.conn, patient=False)
    assert (done.postponed, done.dropped) == (1, 0) and partition(queue.conn, gone)
    queue.enqueue()
    assert queue.complete(queue.one()).first
    reader.rollback()
    maintain(queue.conn)
    assert partition(queue.conn, gone) is None


def test_whoever_is_at_work_on_a_task_keeps_its_partition(queue, old, connect):
    with queue.conn.transaction():
        for _ in range(9):
            old.finished(50)
        live = old.ready(50)
    worker = connect(autocommit=False)
    task = queue.by(worker).one()
    assert task.id == live
    assert maintain(queue.conn, patient=False).postponed == 1
    assert queue.by(worker).complete(task).first
    worker.commit()
    maintain(queue.conn)
    assert queue.status(live) == "completed"


def hanging(queue, old):
    gone, kept = old.finished(50, outcome="failed"), old.finished(3, outcome="failed")
    for id in gone, kept:
        queue.conn.execute("INSERT INTO stint.usage_late (queue, id, attempt, key, recorded_at) VALUES ('q', %s, 1, 'k', now())", (id,))
        queue.conn.execute("INSERT INTO stint.task_checkpoints (queue, id, step, attempt, saved_at) VALUES ('q', %s, 's', 1, now())", (id,))
        queue.conn.execute("INSERT INTO stint.task_keys (queue, key, id, kept_until) VALUES ('q', %s, %s, now() + interval '1 day')", (str(id), id))
    queue.conn.execute(
        "INSERT INTO stint.task_retries (queue, id, retry, retried_at, outcome, attempt, finished_at, outcome_incarnation, outcome_xact)"
        " SELECT queue, id, 1, finished_at, 'failed', 0, finished_at, incarnation, xact FROM stint.task_outcomes"
    )
    return gone, kept


def test_what_hangs_on_expired_tasks_goes_with_them(queue, old):
    with queue.conn.transaction():
        gone, kept = hanging(queue, old)
    maintain(queue.conn)
    for name in "usage_late", "task_checkpoints", "task_retries":
        assert [id for (id,) in rows(queue.conn, f"SELECT id FROM stint.{name}")] == [kept]
    assert queue.enqueue(key=str(gone)) == gone, "a key is kept as long as it was promised"
    queue.conn.execute("UPDATE stint.task_keys SET kept_until = now() - interval '1 s'")
    call(queue.conn, "expire_keys")
    assert queue.enqueue(key=str(gone)) != gone


def test_nothing_is_removed_before_accounting_has_added_it_up(queue, old):
    with queue.conn.transaction():
        gone = old.finished(50)
        assert call(queue.conn, "maintain_history")[0].postponed == 1 and partition(queue.conn, gone)
    maintain(queue.conn)
    assert partition(queue.conn, gone) is None
    assert rows(queue.conn, "SELECT status, tasks FROM stint.task_counts(queue => 'q')") == [("completed", 1)]


def test_detached_partitions_keep_their_rows(conn):
    queue = Queue(conn, history_retention=KEPT, history_archive="detach")
    old = Aged(conn, "q")
    with conn.transaction():
        gone = [old.finished(50) for _ in range(9)]
        live = old.scheduled(50)
    maintain(conn)
    [name] = [f"stint_archive.{value(conn, 'SELECT stint.history_partition(%s)', live)}"]
    assert {id for (id,) in rows(conn, f"SELECT id FROM {name}")} == set(gone)
    assert value(conn, f"SELECT count(*) FROM {name.replace('facts', 'attempts')}") == 9
    assert {task.id for task in rows(conn, "SELECT id FROM stint.tasks")} == {live}
    queue.cancel(live)
    conn.execute("UPDATE stint.task_outcomes SET finished_at = finished_at - interval '40 days'")
    maintain(conn)
    assert {id for (id,) in rows(conn, f"SELECT id FROM {name}_2")} == {live}
    assert rows(conn, f"SELECT outcome FROM {name.replace('facts', 'outcomes')}_2") == [("cancelled",)]
    assert rows(conn, "SELECT id FROM stint.tasks") == [] and partition(conn, live) is None


def test_a_task_whose_history_went_says_so(queue, old):
    gone = old.finished(50, outcome="failed")
    maintain(queue.conn)
    for verb, args in [("retry", {}), ("cancel", {}), ("explain", {}), ("complete", {"lease": gone})]:
        with pytest.raises(psycopg.errors.NoDataFound) as caught:
            call(queue.conn, verb, queue="q", id=gone, **args)
        assert "history was removed" in caught.value.diag.message_detail
    with pytest.raises(psycopg.errors.NoDataFound):
        queue.enqueue(depends_on=[gone])


# Settings


def test_a_retention_holds_for_tasks_enqueued_from_then_on(queue):
    conn, before = queue.conn, queue.enqueue()
    call(conn, "alter_queue", queue="q", history_retention="7 days")
    after = queue.enqueue()
    call(conn, "alter_queue", queue="q", history_retention="0")
    forever = queue.enqueue()
    shown = rows(conn, "SELECT t.id, h.retention::text FROM stint.tasks t JOIN stint.history h ON h.partition = stint.history_partition(t.id)")
    assert dict(shown) == {before: "30 days", after: "7 days", forever: None}
    assert rows(conn, "SELECT history_retention, history_archive FROM stint.queues") == [(None, "drop")]
    assert {task.id for task in queue.claim(3)} == {before, after, forever}


def test_queues_of_one_retention_share_their_partitions(queue):
    conn = queue.conn
    call(conn, "create_queue", queue="same", history_retention="720 hours")
    call(conn, "create_queue", queue="apart", history_retention=KEPT, history_archive="detach")
    classes = dict(rows(conn, "SELECT queue, history_class FROM stint.queue_config"))
    assert classes["q"] == classes["same"] != classes["apart"]


def test_classes_made_at_once_are_one(connect):
    sessions = [connect() for _ in range(8)]
    parallel(8, lambda n: call(sessions[n], "create_queue", queue=f"q{n}", history_retention="11 days" if n % 2 else "12 days"))
    assert rows(sessions[0], "SELECT count(*) AS n, count(DISTINCT history_class) AS classes FROM stint.queue_config") == [(8, 2)]


def test_there_is_room_for_many_retentions_and_one_too_many_is_refused(conn):
    for days in range(30, 81):
        call(conn, "create_queue", queue=f"q{days}", history_retention=f"{days} days")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        call(conn, "create_queue", queue="more", history_retention="100 days")
    call(conn, "create_queue", queue="other", history_retention="365 days")


@pytest.mark.parametrize(
    "bad", [{"history_retention": "59 minutes"}, {"history_retention": "-1 day"}, {"history_retention": "101 years"}, {"history_archive": "burn"}]
)
def test_a_retention_out_of_bounds_is_refused(queue, bad):
    for verb, name in ("create_queue", "new"), ("alter_queue", "q"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            call(queue.conn, verb, queue=name, **bad)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        call(queue.conn, "create_queue", queue="new", history_retention="0")


# Looking


def test_a_task_is_looked_up_in_one_partition(queue, old):
    id = queue.enqueue()
    for days in (3, 4, 5):
        old.finished(days)
    explain = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) SELECT * FROM stint.tasks WHERE queue = 'q' AND id = '{id}'"
    plan = "\n".join(line for (line,) in queue.conn.execute(explain).fetchall() if "never executed" not in line)
    mine = value(queue.conn, "SELECT stint.history_partition(%s)", id)
    assert plan.count(" on task_facts_") == plan.count(f" on {mine} ") == 1
    assert plan.count(" on task_outcomes_") <= 1 and plan.count(" on task_attempts_") <= 1


def test_doctor_tells_of_partitions_long_past_their_retention(queue, old):
    about = "SELECT ok, detail FROM stint.doctor() WHERE \"check\" LIKE 'history%' ORDER BY 1"
    until(queue.conn, "SELECT count(*) >= 2 FROM stint.history")
    assert [ok for ok, _ in rows(queue.conn, about)] == [True, True]
    live = old.scheduled(50)
    [(ok, detail), _] = rows(queue.conn, about)
    assert not ok and partition(queue.conn, live) in detail


def test_create_history_partition_takes_ids_of_tasks_only(queue):
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        call(queue.conn, "create_history_partition", id="00000000-0000-7000-8000-0000000000ff")
    assert value(queue.conn, "SELECT stint.history_partition('00000000-0000-7000-8000-0000000000ff')") is None


@pytest.mark.parametrize("id", ["00000000-0000-7000-8000-000000000000", "fb0b7a58-1111-4222-8333-0123456789ab", "019ad000-0000-7000-8000-0000000000c8", "ff9ad000-0000-7000-8000-000000000000"])
def test_no_partition_is_made_for_what_is_no_tasks_id(conn, id):
    Queue(conn)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="not the id of a task"):
        call(conn, "create_history_partition", id=id)
