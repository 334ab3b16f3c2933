"""What a call costs does not depend on how much waits or has been: plans and buffers with a million ready, a hundred thousand scheduled, a hundred thousand held
back by a budget, and a million finished; with tables never analysed, analysed while they were empty, and analysed since; in a session that made its plans while
all was empty, and in a new one; with settings that would have PostgreSQL choose otherwise; and with somebody's triggers, where statements run instead.
"""

import json
import time

import pytest
from cluster import Cluster
from stint import Queue, call, rows, value

READY, SCHEDULED, BEHIND, FINISHED = 1_000_000, 100_000, 100_000, 1_000_000
CONFIG = {
    "autovacuum": "off", "shared_buffers": "512MB", "synchronous_commit": "off", "max_wal_size": "16GB", "wal_level": "minimal", "max_wal_senders": 0,
    "stint.naptime": 60000, "stint.doorbell_interval": 60000, "stint.max_batch": 10000,
}  # fmt: skip

# What a session may have set for reasons of its own.
ODD = """SET plan_cache_mode = force_custom_plan; SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_nestloop = off; SET enable_sort = off;
         SET random_page_cost = 1000; SET cpu_index_tuple_cost = 100; SET default_statistics_target = 1"""

# The tables that grow, and what no plan may do with one of them.
HOT = ("place_", "task_")


class Session:
    """A session whose every statement tells its plan, those inside functions too."""

    def __init__(self, server, odd=False):
        self.conn = server.connect("app")
        self.plans = []
        self.conn.add_notice_handler(self._told)
        self.conn.execute(
            "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on; SET auto_explain.log_analyze = on;"
            " SET auto_explain.log_buffers = on; SET auto_explain.log_timing = off; SET auto_explain.log_format = json; SET auto_explain.log_level = notice"
        )
        if odd:
            self.conn.execute(ODD)

    def _told(self, notice):
        if " plan:\n" in (notice.message_primary or ""):
            self.plans.append(json.loads(notice.message_primary.partition(" plan:\n")[2]))

    def run(self, query, *params):
        """The rows of a statement, the buffers it read, and what is wrong with the plans of statements inside."""
        self.plans.clear()
        found = rows(self.conn, query, *params)
        top = self.plans[-1]["Plan"]
        read = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
        return found, read, [fault for plan in self.plans[:-1] for fault in faults(plan)]


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def faults(plan):
    """What a plan does that costs more the more there is."""
    found = []
    if "unnest(r.budgets" in plan["Query Text"]:
        return found  # adds up what is in use, once after rows came by hand
    for node in nodes(plan["Plan"]):
        table = node.get("Relation Name", "")
        if not table.startswith(HOT) or node["Node Type"] in ("Tid Scan", "ModifyTable", "LockRows"):
            continue
        if node["Actual Loops"] == 0:
            continue
        told = f"{node['Node Type']} of {node.get('Index Name', table)} on ({node.get('Index Cond')}), filter {node.get('Filter')}: {plan['Query Text'][:160]}"
        if not node["Node Type"].startswith("Index"):
            found.append(told)
        elif not node.get("Index Cond"):
            found.append(f"no condition: {told}")
        elif node.get("Rows Removed by Filter", 0) > 5 or node.get("Rows Removed by Index Recheck", 0) > 5:
            found.append(f"{node['Rows Removed by Filter']} rows too many: {told}")
        elif " id = " in f" {node.get('Index Cond')} {node.get('Filter')} ".replace("(", " ") and "queue" in node["Index Cond"] and " id = " not in node["Index Cond"].replace("(", " "):
            found.append(f"not by the key: {told}")
    return found


class Backlog:
    def __init__(self):
        self.server = Cluster(config=CONFIG)
        self.server.create_database("app")
        self.conn = self.server.connect("app")
        call(self.conn, "create_budget", name="full", max_running=0)
        call(self.conn, "create_budget", name="seats", max_running=100_000)
        self.big = Queue(self.conn, "big")
        self.held = Queue(self.conn, "held")
        self.seated = Queue(self.conn, "seated", budgets=["seats"])
        self.early = {odd: Session(self.server, odd) for odd in (False, True)}

    def close(self):
        self.conn.close()
        self.server.destroy()

    def sessions(self):
        """Those that made their plans before anything was there, and new ones."""
        for odd in False, True:
            yield f"early{' with odd settings' * odd}", self.early[odd]
            new = Session(self.server, odd)
            yield f"new{' with odd settings' * odd}", new
            new.conn.close()

    def fill(self, queue, count, each=1000, **options):
        task = json.dumps({"payload": {"n": 1}} | options)
        for _ in range(count // each):
            self.conn.execute("SELECT count(*) FROM stint.enqueue_many(%s, (SELECT jsonb_agg(%s::jsonb) FROM generate_series(1, %s)))", (queue.name, task, each))

    def finish_by_hand(self):
        """A million attempts and outcomes, as if the ready tasks of the big queue had been completed."""
        facts, attempts, outcomes = (
            value(self.conn, f"SELECT c.tableoid::regclass::text FROM stint.{part} c JOIN stint.task_facts f USING (queue, id) WHERE f.queue = 'big' LIMIT 1")
            for part in ("task_facts", "task_attempts", "task_outcomes")
        )
        self.conn.execute(
            f"""INSERT INTO {attempts} (queue, id, attempt, lease, started_at, ended_at, ended, worker)
                SELECT queue, id, 1, gen_random_uuid(), now(), now(), 'completed', 'w' FROM stint.place_ready WHERE queue = 'big'"""
        )
        self.conn.execute(
            f"INSERT INTO {outcomes} (queue, id, outcome, attempt, finished_at) SELECT queue, id, 'completed', 1, now() FROM stint.place_ready WHERE queue = 'big'"
        )
        self.conn.execute("DELETE FROM stint.place_ready WHERE queue = 'big'")

    def triggers(self, on):
        """Somebody's triggers on every table that verbs write to; with them, verbs run statements."""
        tables = [table for (table,) in rows(self.conn, "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'stint'::regnamespace"
                                                        " AND c.relkind = 'r' AND c.relname ~ '^(place_|task_(facts|attempts|outcomes)_)'")]  # fmt: skip
        for table in tables:
            if on:
                self.conn.execute(f"CREATE TRIGGER theirs AFTER INSERT OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION public.theirs()")
            else:
                self.conn.execute(f"DROP TRIGGER IF EXISTS theirs ON {table}")


def verbs(session, queue):
    """Every verb of a task's life once, and the worker's steps; (name, buffers, faults of plans) of each."""
    told = []

    def run(name, query, *params):
        found, read, wrong = session.run(query, *params)
        told.append((name, read, wrong))
        return found

    def claim(name="claim", more=""):
        [task] = run(name, f"SELECT * FROM stint.claim(%s, 'w'{more})", queue)
        return queue, task.id, task.lease

    def enqueued(more="", name="enqueue"):
        return run(name, f"SELECT stint.enqueue(%s, '{{}}', priority => 1{more})", queue)[0][0]

    def due():
        time.sleep(0.002)
        assert run("promote", "SELECT stint.promote()")[0][0] == 1

    enqueued()
    task = claim()
    run("extend", "SELECT * FROM stint.extend(%s, %s, %s)", *task)
    assert run("complete", "SELECT * FROM stint.complete(%s, %s, %s)", *task)[0].outcome == "completed"
    run("repeated complete", "SELECT * FROM stint.complete(%s, %s, %s)", *task)
    enqueued()
    task = claim()
    assert run("fail", "SELECT * FROM stint.fail(%s, %s, %s, 'again', retry_in => '1 ms')", *task)[0].outcome == "retrying"
    due()
    task = claim()
    assert run("fail for good", "SELECT * FROM stint.fail(%s, %s, %s, 'over', retryable => false)", *task)[0].outcome == "failed"
    run("retry", "SELECT * FROM stint.retry(%s, %s)", *task[:2])
    session.conn.execute("SELECT * FROM stint.reprioritize(%s, %s, 1)", task[:2])
    task = claim()
    run("release", "SELECT * FROM stint.release(%s, %s, %s)", *task)
    task = claim()
    run("snooze", "SELECT * FROM stint.snooze(%s, %s, %s, '1 ms')", *task)
    due()
    task = claim()
    session.conn.execute("UPDATE stint.place_running SET started_at = now() - interval '1 hour', expires_at = now() - interval '1 s' WHERE id = %s", task[1:2])
    session.conn.execute("SELECT stint.rescan()")
    run("first sweep", "SELECT 1 FROM stint.sweep()")
    assert run("late complete", "SELECT * FROM stint.complete(%s, %s, %s)", *task)[0].outcome == "completed"
    # Rows changed by hand: whoever looks first looks for everything anew.
    enqueued()
    session.conn.execute("SELECT c.* FROM stint.claim(%(q)s, 'w') t CROSS JOIN LATERAL stint.complete(%(q)s, t.id, t.lease) c", {"q": queue})
    enqueued(", agent => 'x'")
    task = claim("claim for an agent", ", agents => '{x}'")
    enqueued()
    [_, after] = run("finish and claim", "SELECT * FROM stint.finish_and_claim(%s, %s, %s, 'w')", *task)
    done = json.dumps([{"id": str(after.id), "lease": str(after.lease)}])
    run("complete many", "SELECT * FROM stint.complete_many(%s, %s)", queue, done)
    first = enqueued()
    enqueued(f", depends_on => ARRAY['{first}']::uuid[]", "enqueue a dependent")
    task = claim()
    run("complete with a dependent", "SELECT * FROM stint.complete(%s, %s, %s)", *task)
    task = claim()
    run("checkpoint", "SELECT * FROM stint.checkpoint(%s, %s, %s, 'step', '1')", *task)
    run("cancel", "SELECT * FROM stint.cancel(%s, %s)", *task[:2])
    run("fail a cancelled one", "SELECT * FROM stint.fail(%s, %s, %s, 'x')", *task)
    run("cancel a ready one", "SELECT * FROM stint.cancel(%s, %s)", queue, enqueued())
    enqueued(", key => gen_random_uuid()::text", "enqueue with a key")
    run("complete", "SELECT * FROM stint.complete(%s, %s, %s)", *claim())
    run("sweep of none", "SELECT 1 FROM stint.sweep()")
    run("promote none", "SELECT stint.promote()")
    return told


def measure(backlog):
    """What went wrong in any session, with statements and without; and the buffers of each verb."""
    wrong, reads = [], {}
    for with_triggers in False, True:
        if with_triggers:
            backlog.triggers(True)
        for who, session in backlog.sessions():
            for queue in ("big", "held") if with_triggers else ("big", "seated", "held"):
                for _ in range(2):
                    for name, read, found in verbs(session, queue):
                        where = (name, queue, who, "statements" if with_triggers else "directly")
                        wrong += [(*where, fault) for fault in found]
                        reads[where] = min(read, reads.get(where, read))
        if with_triggers:
            backlog.triggers(False)
    return wrong, reads


@pytest.fixture(scope="module")
def stages():
    """What was found at each stage: {stage: (wrong, reads)}."""
    backlog = Backlog()
    try:
        conn = backlog.conn
        conn.execute("CREATE FUNCTION public.theirs() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$")
        found = {"never analysed": measure(backlog)}
        conn.execute("ANALYZE")
        found["analysed while empty"] = measure(backlog)
        backlog.fill(backlog.big, READY)
        backlog.fill(backlog.big, SCHEDULED, delay="1 day")
        backlog.fill(backlog.held, BEHIND, budgets=["full"], priority=9)
        backlog.fill(backlog.seated, SCHEDULED, delay="1 day")
        found["a million ready"] = measure(backlog)
        conn.execute("ANALYZE")
        found["a million ready, analysed"] = measure(backlog)
        backlog.finish_by_hand()
        found["a million finished"] = measure(backlog)
        conn.execute("ANALYZE")
        found["a million finished, analysed"] = measure(backlog)
        assert rows(conn, "SELECT ready, scheduled FROM stint.queue_stats WHERE queue = 'held'") == [(BEHIND, 0)]
        yield found
    finally:
        backlog.close()


STAGES = [
    "never analysed", "analysed while empty", "a million ready", "a million ready, analysed", "a million finished", "a million finished, analysed",
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_every_statement_of_a_verb_goes_by_its_index(stages, stage):
    wrong, _ = stages[stage]
    assert wrong == []


@pytest.mark.parametrize("stage", STAGES[2:])
def test_what_a_verb_reads_does_not_depend_on_how_much_there_is(stages, stage):
    """A look into an index of a million rows reads two pages more than into one of a hundred."""
    (_, small), (_, large) = stages["never analysed"], stages[stage]
    assert {where: (small[where], read) for where, read in large.items() if read > 1.6 * small[where] + 20} == {}
