"""What a call reads does not grow while something holds back VACUUM: an old snapshot, a long writing transaction, an idle replication slot.

Counted are buffers, not time: those of one call by EXPLAIN, with all that it does inside, and those that the maintenance worker reads of the extension's tables,
by PostgreSQL's statistics. Nothing is ever cleaned up here: autovacuum is off, so what a holder lets VACUUM remove stays as well.
"""

import subprocess
import time

import pytest
from cluster import Cluster, bindir, clean_environment
from stint import Queue, call, rows, value

HOLDERS = {
    "snapshot": "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM stint.queues",
    "writer": "BEGIN; INSERT INTO public.junk VALUES (1)",
    "slot": "SELECT pg_create_logical_replication_slot('idle', 'test_decoding')",
}
SETTINGS = {
    "autovacuum": "off", "shared_buffers": "256MB", "wal_level": "logical", "synchronous_commit": "off", "max_wal_size": "4GB",
    "stint.naptime": 60000, "stint.doorbell_interval": 60000,
}  # fmt: skip
AGENTS = {"agent": "a"}
# So many tasks of each kind: what grows with them grows by far more than what is allowed.
TASKS = 3000
# How often a call is looked at.
READS = 7


def buffers(conn, query, *params):
    """The buffers that one statement reads, with everything inside its functions."""
    plan = value(conn, "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT json) " + query, *params)[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


class Held:
    """A server on which something holds back VACUUM, with a queue of each kind."""

    def __init__(self, holder, **config):
        self.server = Cluster(config=SETTINGS | config)
        self.server.create_database("app")
        self.conn = self.server.connect("app")
        self.conn.execute("CREATE TABLE public.junk (a int)")
        self._holder = self.server.connect("app")
        self._holder.execute(HOLDERS[holder])
        self._lapsed = 0
        call(self.conn, "create_budget", name="seats", max_running=1_000_000)
        call(self.conn, "create_budget", name="window", max_window_tokens=10**15, per="1 minute")
        self.plain = Queue(self.conn, "plain", events=True)
        self.budgeted = Queue(self.conn, "budgeted", budgets=["seats", "window"])
        self.agents = Queue(self.conn, "agents")
        self.keyed = Queue(self.conn, "keyed", key_retention="0")
        self.strict = Queue(self.conn, "strict", strict_groups=True)
        self.fair = Queue(self.conn, "fair", fair=True)

    def close(self):
        self.conn.close()
        self._holder.close()
        self.server.destroy()

    def finish(self, queue, count, end="complete", args="", **options):
        """Claims and ends so many tasks in one statement."""
        named = "".join(f", {name} => %({name})s" for name in options)
        claim = f"stint.claim(%(q)s, 'w', max => %(n)s{named})"
        query = f"SELECT count(*) FROM {claim} c CROSS JOIN LATERAL stint.{end}(%(q)s, c.id, c.lease{args})"
        return self.conn.execute(query, options | {"q": queue.name, "n": count}).fetchone()[0]

    def work(self, count):
        """So many tasks of every kind, with retries, heartbeats, lapses, keys, dependencies and groups."""
        conn, part = self.conn, 500
        for at in range(0, count, part):
            self.plain.fill(part)
            assert self.finish(self.plain, part) == part
            self.budgeted.fill(part, tokens=3)
            assert self.finish(self.budgeted, part) == part
            self.agents.fill(part, **AGENTS)
            assert self.finish(self.agents, part, agents=["a"]) == part
            self.plain.fill(part)
            assert self.finish(self.plain, part, "fail", ", 'again', retry_in => '1 ms'") == part
            time.sleep(0.002)
            assert call(conn, "promote", max=part)[0][0] == part
            assert self.finish(self.plain, part, "extend") == part
            conn.execute(
                "UPDATE stint.place_running SET started_at = started_at - interval '1 hour', expires_at = expires_at - interval '1 hour', extended_until = NULL"
                " WHERE queue = 'plain'; SELECT stint.rescan()"
            )
            assert call(conn, "sweep", max=part)[0].retried == part
            assert self.finish(self.plain, part) == part
            conn.execute("SELECT stint.enqueue('keyed', '{}', key => 'k' || n) FROM generate_series(%s::int, %s) n", (at, at + part - 1))
            assert self.finish(self.keyed, part) == part and call(conn, "expire_keys")[0][0] >= part
            first = "SELECT stint.enqueue('plain', '{}') AS id FROM generate_series(1, 100)"
            conn.execute(f"WITH a AS MATERIALIZED ({first}) SELECT stint.enqueue('plain', '{{}}', depends_on => ARRAY[a.id]) FROM a")
            assert self.finish(self.plain, part) == 100 and self.finish(self.plain, part) == 100
            conn.execute("SELECT stint.enqueue('strict', '{}', group_key => 'g' || n) FROM generate_series(%s::int, %s) n", (at, at + 99))
            assert self.finish(self.strict, part) == 100
            conn.execute("SELECT stint.enqueue('fair', '{}', group_key => 'g' || n % 10) FROM generate_series(1, 100) n")
            assert self.finish(self.fair, part) == 100
            call(conn, "tick")
            call(conn, "roll_up")

    def one(self, queue, **options):
        """A task of the queue, claimed: what a call that ends it needs."""
        queue.enqueue(**options)
        task = queue.one()
        return queue.name, task.id, task.lease

    def due(self):
        self.conn.execute("SELECT * FROM stint.fail(%s, %s, %s, 'again', retry_in => '1 ms')", self.one(self.plain))
        time.sleep(0.002)

    def lapsed(self):
        """Some attempts whose leases have run out, for one sweep each."""
        if not self._lapsed:
            self._lapsed = READS
            self.plain.fill(READS)
            assert len(self.plain.claim(READS, lease_for="1 s")) == READS
            time.sleep(1.1)
        self._lapsed -= 1

    def awaited(self):
        before = self.plain.enqueue(priority=9)
        self.plain.enqueue(depends_on=[before])
        task = self.plain.one()
        assert task.id == before
        return "plain", task.id, task.lease

    def calls(self):
        """Each call with what has to be done before it, which gives its arguments."""
        end, claim = "(%s, %s, %s)", "SELECT * FROM stint.claim(%s, 'w')"
        given = {
            "enqueue": (lambda: None, "SELECT stint.enqueue('plain', '{}')"),
            "enqueue with a key": (lambda: None, "SELECT stint.enqueue('keyed', '{}', key => gen_random_uuid()::text)"),
            "claim": (lambda: self.plain.enqueue() and ["plain"], claim),
            "claim of none": (lambda: self.finish(self.plain, 1000) and None, "SELECT * FROM stint.claim('plain', 'w')"),
            "claim under two budgets": (lambda: self.budgeted.enqueue(tokens=3) and ["budgeted"], claim),
            "claim for an agent": (lambda: self.agents.enqueue(**AGENTS) and ["agents"], "SELECT * FROM stint.claim(%s, 'w', agents => '{a}')"),
            "claim for an agent without tasks": (lambda: None, "SELECT * FROM stint.claim('agents', 'w', agents => '{nobody}')"),
            "claim from groups by turns": (lambda: self.fair.enqueue(group_key="g1") and ["fair"], claim),
            "finish and claim": (lambda: self.one(self.agents), f"SELECT * FROM stint.finish_and_claim{end[:-1]}, 'w')"),
            "complete": (lambda: self.one(self.plain), f"SELECT * FROM stint.complete{end}"),
            "complete under two budgets": (lambda: self.one(self.budgeted, tokens=3), f"SELECT * FROM stint.complete{end}"),
            "complete with a dependent": (self.awaited, f"SELECT * FROM stint.complete{end}"),
            "complete in a strict group": (lambda: self.one(self.strict, group_key="other"), f"SELECT * FROM stint.complete{end}"),
            "heartbeat": (lambda: self.one(self.plain), f"SELECT * FROM stint.extend{end}"),
            "fail": (lambda: self.one(self.plain), f"SELECT * FROM stint.fail{end[:-1]}, 'again', retry_in => '1 hour')"),
            "release": (lambda: self.one(self.plain), f"SELECT * FROM stint.release{end}"),
            "promotion of a retry": (self.due, "SELECT stint.promote()"),
            "promotion of none": (lambda: None, "SELECT stint.promote()"),
            "sweep": (self.lapsed, "SELECT * FROM stint.sweep(1)"),
            "sweep of none": (lambda: None, "SELECT * FROM stint.sweep()"),
            "roll-up": (lambda: self.plain.enqueue() and self.finish(self.plain, 1000) and None, "SELECT * FROM stint.roll_up()"),
            "tick": (lambda: self.plain.enqueue() and None, "SELECT stint.tick()"),
            "schedules": (lambda: None, "SELECT stint.fire_schedules()"),
            "history": (lambda: None, "SELECT * FROM stint.maintain_history()"),
        }  # fmt: skip
        return given

    def read(self, name):
        """The buffers of one call, the median of some; the first ones of a session read the catalogue."""
        prepare, query = self.calls()[name]
        counts = []
        for _ in range(READS):
            counts.append(buffers(self.conn, query, *(prepare() or ())))
        return sorted(counts)[READS // 2]

    def settle(self):
        """Nothing is left from one round to the next."""
        for queue in self.plain, self.budgeted, self.agents, self.keyed, self.strict, self.fair:
            while self.finish(queue, 1000):
                pass
        self.conn.execute("UPDATE stint.place_running SET started_at = started_at - interval '1 day', expires_at = now() - interval '1 s'; SELECT stint.rescan()")
        while self.conn.execute("SELECT lapsed FROM stint.sweep()").fetchone()[0]:
            pass
        for queue in self.plain, self.budgeted, self.agents, self.keyed, self.strict, self.fair:
            while self.finish(queue, 1000):
                pass


def worker_reads(server):
    """Buffers of each of the extension's tables that the maintenance worker reads in a round, while nobody else works."""
    query = """SELECT s.relname, s.heap_blks_hit + s.heap_blks_read + coalesce(s.idx_blks_hit + s.idx_blks_read, 0)
               FROM pg_statio_user_tables s WHERE s.schemaname = 'stint'"""
    server.configure(**{"stint.naptime": 20})
    server.reload()
    with server.connect("app") as conn:

        def told():
            """What was counted so far, and the rounds until then; a process tells what it counted once a second at the most."""
            seen, until = set(), time.monotonic() + 1.2
            while time.monotonic() < until or len(seen) < 5:
                seen.add(value(conn, "SELECT last_round FROM stint.maintenance WHERE database = 'app'"))
                time.sleep(0.002)
            return dict(conn.execute(query).fetchall()), len(seen)

        (before, _), (after, rounds) = told(), told()
    server.configure(**{"stint.naptime": 60000})
    server.reload()
    return {table: (after[table] - before.get(table, 0)) / rounds for table in after}


@pytest.fixture(scope="module", params=HOLDERS)
def measured(request):
    """Buffers of each call and of the worker's rounds, before and after some thousand tasks: {call: (before, after)}."""
    held = Held(request.param)
    try:
        held.work(500)
        held.settle()
        before, worker_before = {name: held.read(name) for name in held.calls()}, worker_reads(held.server)
        held.settle()
        held.work(TASKS)
        held.settle()
        after, worker_after = {name: held.read(name) for name in held.calls()}, worker_reads(held.server)
        calls = {name: (before[name], after[name]) for name in before}
        worker = {name: (worker_before.get(name, 0), worker_after[name]) for name in worker_after}
        print(f"buffers under a {request.param}: {calls}; by the worker in a round: { {name: pair for name, pair in worker.items() if pair[1] >= 1} }")
        yield calls, worker
    finally:
        held.close()


def test_no_call_reads_more_after_many_tasks_while_the_horizon_is_held(measured):
    """Trees of indexes get a level higher, and rows fill pages: that is all."""
    calls, _ = measured
    assert {name: pair for name, pair in calls.items() if pair[1] > 1.25 * pair[0] + 6} == {}


def test_the_worker_reads_no_more_in_a_round_while_the_horizon_is_held(measured):
    _, worker = measured
    assert {name: pair for name, pair in worker.items() if pair[1] > 1.5 * pair[0] + 6} == {}


@pytest.fixture
def held(request):
    """A server on which a snapshot is held."""
    made = []

    def make(**config):
        made.append(Held("snapshot", **config))
        return made[-1]

    yield make
    for one in made:
        assert rows(one.conn, "SELECT * FROM stint.check()") == []
        one.close()


def claims(held, queue, count=5, **enqueue):
    """What a claim reads, several times."""
    found = []
    for _ in range(count):
        queue.enqueue(**enqueue)
        found.append(buffers(held.conn, "SELECT * FROM stint.claim(%s, 'w')", queue.name))
    return found


def churn(held, queue, count, part=500, **options):
    for _ in range(0, count, part):
        queue.fill(part, **options)
        assert held.finish(queue, part) == part


def test_a_claim_in_an_open_transaction_does_not_hold_up_those_behind_it(held):
    """A worker that claims, works and completes in one transaction: its task is nobody's hindrance, and is the first again when that is undone."""
    held = held()
    mine = held.plain.by(held.server.connect("app", autocommit=False))
    budgeted = held.budgeted.by(mine.conn)
    for queue, own, options in (held.plain, mine, {}), (held.budgeted, budgeted, {"tokens": 3}):
        churn(held, queue, 500, **options)
        queue.enqueue('"held"', **options)
        task = own.one()
        claims(held, queue, **options)
        before = sorted(claims(held, queue, **options))[2]
        churn(held, queue, 4000, **options)
        after = sorted(claims(held, queue, **options))[2]
        assert after <= before + 6, f"{queue.name}: {before} buffers at first, {after} after 4,000 tasks"
        mine.conn.rollback()
        again = queue.one()
        assert (again.id, again.payload) == (task.id, "held")


def test_where_somebodys_trigger_fires_calls_read_no_more_either(held):
    """There each step is a statement."""
    held = held()
    conn = held.conn
    conn.execute("CREATE FUNCTION public.theirs() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$")
    for table in "place_ready", "place_running", "place_scheduled":
        conn.execute(f"CREATE TRIGGER theirs AFTER INSERT OR DELETE ON stint.{table} FOR EACH ROW EXECUTE FUNCTION public.theirs()")
    names = ["claim", "claim under two budgets", "claim for an agent", "finish and claim", "complete", "heartbeat", "fail", "release", "promotion of a retry"]
    held.work(500)
    held.settle()
    before = {name: held.read(name) for name in names}
    held.settle()
    held.work(TASKS)
    held.settle()
    after = {name: held.read(name) for name in names}
    assert {name: (before[name], after[name]) for name in names if after[name] > 1.25 * before[name] + 6} == {}


@pytest.mark.parametrize("end", ["cancel", "late completion", "reprioritize", "purge", "drop", "delete", "update"])
def test_what_is_taken_from_a_line_and_given_back_is_claimed(held, end):
    """However it is taken: a claim meanwhile goes past it, and finds it once it is there again."""
    held = held()
    queue = held.plain
    churn(held, queue, 500)
    queue.enqueue('"first"')
    task = queue.one()
    with held.conn.transaction():
        held.conn.execute("UPDATE stint.place_running SET started_at = now() - interval '1 hour', expires_at = now() - interval '1 s'; SELECT stint.rescan()")
        assert call(held.conn, "sweep")[0].retried == 1
    other = held.server.connect("app", autocommit=False)
    for how in "rollback", "savepoint":
        if how == "savepoint":
            other.execute("SAVEPOINT s")
        if end == "cancel":
            queue.by(other).cancel(task.id)
        elif end == "late completion":
            assert queue.by(other).complete(task).outcome == "completed"
        elif end == "reprioritize":
            call(other, "reprioritize", queue="plain", id=task.id, priority=-3)
        elif end == "purge":
            call(other, "purge_queue", queue="plain")
        elif end == "drop":
            call(other, "drop_queue", queue="plain", force=True)
        elif end == "delete":
            other.execute("DELETE FROM stint.place_ready WHERE id = %s", (task.id,))
        else:
            other.execute("UPDATE stint.place_ready SET tokens = 5 WHERE id = %s", (task.id,))
        if end != "drop":  # which keeps claims out
            queue.enqueue('"later"')
            assert [found.payload for found in queue.claim(9)] == ["later"]
            assert queue.claim() == []
        other.execute("ROLLBACK TO s") if how == "savepoint" else other.rollback()
    other.commit()
    assert [found.id for found in queue.claim(9)] == [task.id]


def test_who_only_finishes_and_claims_reads_no_more(held):
    """Each such claim is made by a transaction that has written before it."""
    held = held()
    queue, conn = held.plain, held.conn
    queue.fill(4000)
    _, task, lease = queue.name, *(lambda one: (one.id, one.lease))(queue.one())
    counts = []
    step = "SELECT id, lease FROM stint.finish_and_claim('plain', %s, %s, 'w') WHERE kind = 'claimed'"
    for turn in range(3900):
        if turn % 100 < 5 and turn > 50:
            counts.append(buffers(conn, "SELECT * FROM stint.finish_and_claim('plain', %s, %s, 'w')", task, lease))
            task, lease = conn.execute("SELECT id, lease FROM stint.place_running ORDER BY started_at DESC LIMIT 1").fetchone()
        else:
            task, lease = conn.execute(step, (task, lease)).fetchone()
    assert sorted(counts[-40:])[20] <= sorted(counts[:40])[20] + 6, (counts[:5], counts[-5:])


def test_claims_find_the_front_again_while_others_enqueue_all_the_time(held, tmp_path):
    """All is looked for anew, from the beginning; that look takes long, and somebody lowers the line all the while."""
    held = held()
    queue, conn = held.plain, held.conn
    claims(held, queue)
    before = sorted(claims(held, queue))[2]
    churn(held, queue, 30_000, 1000)
    script = tmp_path / "enqueue.sql"
    script.write_text("SELECT stint.enqueue('plain', '{}', priority => -1);\n")
    command = [bindir() / "pgbench", "-n", "-M", "prepared", "-c", "2", "-T", "60", "-f", script]
    producers = subprocess.Popen(command, env=clean_environment() | held.server.env("app"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        held.server.wait_until("SELECT count(*) > 50 FROM stint.place_ready", dbname="app")
        for _ in range(3):
            conn.execute("SELECT stint.rescan()")
            counts = [buffers(conn, "SELECT * FROM stint.claim('plain', 'w')") for _ in range(30)]
            # A claim may walk what another one's look has just found gone; all of them, none may.
            assert sorted(counts)[20] <= before + 20, counts
        assert producers.poll() is None
    finally:
        producers.terminate()
        producers.wait()


def test_a_long_attempt_does_not_slow_the_sweep(held):
    """Its heartbeats keep it where its first lease ended, with everything that ended since between there and now."""
    held = held()
    queue = held.plain
    queue.fill(3)
    longs = queue.claim(3, lease_for="1 s")
    for task in longs:
        queue.extend(task, duration="1 hour")
    time.sleep(1)

    def short(count):
        """Attempts whose leases would have ended by now."""
        for _ in range(count // 500):
            queue.fill(500)
            held.conn.execute(
                "WITH c AS MATERIALIZED (SELECT * FROM stint.claim('plain', 'w', max => 500, lease_for => '1 s'))"
                " SELECT count(*) FROM c CROSS JOIN LATERAL stint.complete('plain', c.id, c.lease)"
            )
        time.sleep(1)

    short(500)
    before = worker_reads(held.server)["place_running"]
    short(5000)
    after = worker_reads(held.server)["place_running"]
    assert after <= 1.5 * before + 6, f"{before} buffers in a round at first, {after} after 5,000 attempts"
    assert [queue.status(task.id) for task in longs] == ["running"] * 3


def test_the_worker_takes_back_what_it_passed_once_it_lapses(started):
    server, _ = started(config={"stint.naptime": 20})
    with server.connect("app") as conn, server.connect("app", autocommit=False) as slow:
        queue = Queue(conn)
        queue.fill(4)
        late = queue.by(slow).claim(1, lease_for="1 s")[0]  # committed after the worker has passed its place in the line
        stays, dies, ends = queue.claim(3, lease_for="1 s")
        queue.extend(stays, duration="1 hour")
        queue.extend(dies, duration="4 s")
        queue.extend(ends, duration="4 s")
        lapsed = "SELECT array_agg(id ORDER BY id) FROM stint.task_attempts WHERE ended = 'lapsed'"
        time.sleep(2)
        assert value(conn, lapsed) is None
        slow.commit()
        server.wait_until("SELECT count(*) = 1 FROM stint.task_attempts WHERE ended = 'lapsed'", dbname="app", timeout=2)
        assert value(conn, lapsed) == [late.id]
        queue.extend(dies, duration="1 s")
        assert queue.complete(ends).first
        server.wait_until("SELECT count(*) = 2 FROM stint.task_attempts WHERE ended = 'lapsed'", dbname="app", timeout=4)
        assert set(value(conn, lapsed)) == {late.id, dies.id} and queue.status(stays.id) == "running"
        assert rows(conn, "SELECT * FROM stint.check()") == []


def test_roll_ups_read_no_more_however_many_there_were(held):
    held = held()
    conn = held.conn

    def roll_up():
        held.plain.enqueue()
        held.finish(held.plain, 1)
        conn.execute("SELECT stint.roll_up()")

    pending = "SELECT (SELECT count(*) FROM stint.new_attempts), (SELECT max(rolled_up_at) FROM stint.last_rollups)"
    for _ in range(9):
        roll_up()
    before = sorted(buffers(conn, pending) for _ in range(5))[2]
    for _ in range(500):
        roll_up()
    after = sorted(buffers(conn, pending) for _ in range(5))[2]
    assert after <= before + 6, f"{before} buffers at first, {after} after 500 roll-ups"
    assert value(conn, "SELECT count(*) FROM stint.rollup_epochs") == 1


def test_keys_of_live_tasks_are_not_looked_at_in_every_round(held):
    """A key is kept as long as its task lives; the worker does not ask for all of them all the time, and finds the others."""
    held = held()
    queue, conn = held.keyed, held.conn
    queue.enqueue(key="live")

    def spent(at):
        conn.execute("SELECT stint.enqueue('keyed', '{}', key => 's' || n) FROM generate_series(%s::int, %s) n", (at, at + 999))
        ids = "SELECT t.id FROM stint.place_ready t JOIN stint.task_keys k USING (queue, id) WHERE k.key <> 'live'"
        conn.execute(f"SELECT count(*) FROM ({ids}) t CROSS JOIN LATERAL stint.cancel('keyed', t.id)")

    spent(0)
    before = worker_reads(held.server)["task_keys"]
    assert value(conn, "SELECT array_agg(key) FROM stint.task_keys") == ["live"]
    for at in range(1000, 9000, 1000):
        spent(at)
    after = worker_reads(held.server)["task_keys"]
    assert after <= 1.5 * before + 6, f"{before} buffers in a round at first, {after} after 8,000 keys"
    assert value(conn, "SELECT array_agg(key) FROM stint.task_keys") == ["live"]
