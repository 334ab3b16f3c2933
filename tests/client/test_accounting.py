"""What finished work used, as the dashboard's functions say it, against a naive sum over every row in Python: exact for counts and sums, within the
stated error for percentiles, at moments at which some is added up, some is not, and some transaction is open.
"""

import collections
import decimal
import json
import math
import random
import zoneinfo
from datetime import datetime, timedelta, timezone

import psycopg
import pytest
from stint import Queue, background, call, parallel, rows, value

# Sums of what the database adds up exactly are exact here too.
decimal.getcontext().prec = 100
UTC = timezone.utc
SUMS = "input_tokens", "cached_tokens", "output_tokens", "model_cost", "compute_cost"
RAW = {
    "facts": "SELECT * FROM stint.task_facts",
    "attempts": "SELECT * FROM stint.task_attempts",
    "bills": "SELECT * FROM stint.usage_late",
    "outcomes": "SELECT * FROM stint.task_outcomes",
}


class Naive:
    """Every row there is, and what the functions must say of them."""

    def __init__(self, conn):
        read = {name: rows(conn, query) for name, query in RAW.items()}
        self.facts = {(f.queue, f.id): f for f in read["facts"]}
        self.attempts = {(a.queue, a.id, a.attempt): a for a in read["attempts"]}
        self.outcomes = read["outcomes"]
        self.of_task = collections.defaultdict(list)
        for a in read["attempts"]:
            self.of_task[a.queue, a.id].append(a)
        self.bills = collections.defaultdict(list)
        for u in read["bills"]:
            self.bills[u.queue, u.id, u.attempt].append(u)
        marks = rows(conn, "SELECT * FROM stint.rollup_marks")
        self.minutes_from, self.hours_from = (marks[0].minutes_from, marks[0].hours_from) if marks else (None, None)

    def floor(self, at):
        if self.hours_from and at < self.hours_from:
            return at.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.minutes_from and at < self.minutes_from:
            return at.replace(minute=0, second=0, microsecond=0)
        return at.replace(second=0, microsecond=0)

    def within(self, at, since, until):
        """since rounds down, until up, to what can still be told apart."""
        if since is not None and at < self.floor(since):
            return False
        if until is not None:
            step = timedelta(days=1) if self.hours_from and until.replace(second=0, microsecond=0) < self.hours_from else (
                timedelta(hours=1) if self.minutes_from and until.replace(second=0, microsecond=0) < self.minutes_from else timedelta(minutes=1))  # fmt: skip
            end = self.floor(until)
            if end != until:
                end += step
            return at < end
        return True

    def label(self, by, at, zone):
        at = at.astimezone(UTC)
        at = at.replace(minute=0, second=0, microsecond=0)
        if self.hours_from and at < self.hours_from:
            at = at.replace(hour=0)
        return at.astimezone(zoneinfo.ZoneInfo(zone)).strftime({"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}[by])

    def key(self, by, queue, agent, model, word, at, zone):
        return {None: None, "queue": queue, "agent": agent, "model": model, "status": word}[by] if by not in ("hour", "day", "month") else self.label(by, at, zone)

    def used(self, filters):
        """(attempt, usage, model, is the attempt itself) of everything that counts."""
        for place, a in self.attempts.items():
            agent = self.facts[place[:2]].agent
            if not self.within(a.ended_at, filters.get("since"), filters.get("until")):
                continue
            for u, model, own in [(a, a.model, True), *((u, u.model or a.model, False) for u in self.bills[place])]:
                if all(filters.get(f) in (None, got) for f, got in (("queue", a.queue), ("agent", agent), ("status", a.ended), ("model", model))):
                    yield a, u, model, own, agent

    def finished(self, filters):
        for o in self.outcomes:
            agent = self.facts[o.queue, o.id].agent
            last = self.attempts.get((o.queue, o.id, o.attempt))
            model = last.model if last else None
            if self.within(o.finished_at, filters.get("since"), filters.get("until")) and all(
                filters.get(f) in (None, got) for f, got in (("queue", o.queue), ("agent", agent), ("status", o.outcome), ("model", model))
            ):
                yield o, agent, model

    def usage_by(self, by, filters, zone="UTC"):
        groups = collections.defaultdict(lambda: {"tasks": 0, "attempts": 0, "confidences": [], **dict.fromkeys(SUMS, decimal.Decimal(0))})
        for a, u, model, own, agent in self.used(filters):
            group = groups[self.key(by, a.queue, agent, model, a.ended, a.ended_at, zone)]
            group["attempts"] += own
            for name in SUMS:
                group[name] += getattr(u, name) or 0
            if u.confidence is not None:
                group["confidences"].append(u.confidence)
        for o, agent, model in self.finished(filters):
            groups[self.key(by, o.queue, agent, model, o.outcome, o.finished_at, zone)]["tasks"] += 1
        return groups

    def latency(self, by, filters, zone="UTC"):
        groups = collections.defaultdict(lambda: {"wait": [], "run": []})
        for a, _, model, own, agent in self.used(filters):
            if own:
                group = groups[self.key(by, a.queue, agent, model, a.ended, a.ended_at, zone)]
                group["run"].append(max(0, (a.ended_at - a.started_at).total_seconds() * 1e6))
                if a.attempt == 1:
                    f = self.facts[a.queue, a.id]
                    due = max(f.enqueued_at, f.run_at or f.enqueued_at)
                    group["wait"].append(max(0, (a.started_at - due).total_seconds() * 1e6))
        return groups

    def costs(self, filters, outcomes=("failed",)):
        groups = collections.defaultdict(lambda: {"tasks": 0, "attempts": 0, "retried_attempts": 0, "retried_cost": 0, **dict.fromkeys(SUMS, decimal.Decimal(0))})
        for o, agent, _ in self.finished(filters):
            group = groups[o.queue, agent]
            for a in self.of_task[o.queue, o.id]:
                for u in [a, *self.bills[a.queue, a.id, a.attempt]]:
                    if o.outcome in outcomes:
                        group["attempts"] += u is a
                        for name in SUMS:
                            group[name] += getattr(u, name) or 0
                    elif o.outcome == "completed" and a.ended in ("failed", "lapsed") and a.attempt != o.attempt:
                        group["retried_attempts"] += u is a
                        group["retried_cost"] += (u.model_cost or 0) + (u.compute_cost or 0)
            group["tasks"] += o.outcome in outcomes
        return {key: g for key, g in groups.items() if g["tasks"] or g["retried_attempts"]}


def disc(values, share):
    values = sorted(values)
    return values[max(1, math.ceil(len(values) * share)) - 1]


def same_percentile(found_ms, values, share, error):
    if not values:
        return found_ms is None
    exact = disc(values, share)
    return abs(found_ms * 1000 - exact) <= exact * error * 1.0001 + 1.01


def compare(conn, draw, rounds=6):
    """Everything the functions say, under random filters, is what the rows say. One snapshot for both."""
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        naive = Naive(conn)
        times = [a.ended_at for a in naive.attempts.values()] or [datetime.now(UTC)]
        for turn in range(rounds):
            filters = {}
            if turn:
                for name in ("since", "until"):
                    if draw.random() < 0.5:
                        filters[name] = draw.choice(times) + timedelta(seconds=draw.choice([0, -7, 33, 3600, -86400]))
                for name, some in (("agent", ["a1", "a2"]), ("queue", ["q0", "q1"]), ("status", ["completed", "failed", "lapsed"]), ("model", ["m1", "m2"])):
                    if draw.random() < 0.25:
                        filters[name] = draw.choice(some)
            compare_usage(conn, naive, filters, draw)
            compare_latency(conn, naive, filters, draw)
            compare_tasks(conn, naive, {k: v for k, v in filters.items() if k != "model" and v != "lapsed"})
            compare_page(conn, naive, {k: v for k, v in filters.items() if k != "model"})
        assert rows(conn, "SELECT * FROM stint.verify_accounting()") == []


def compare_usage(conn, naive, filters, draw):
    for by in None, "agent", "model", "queue", "status", "hour", "day", "month":
        zone = draw.choice(["UTC", "Europe/Berlin", "Asia/Kolkata"])
        found = {row.key: row for row in call(conn, "usage_by", by=by, time_zone=zone, **filters)}
        expected = naive.usage_by(by, filters, zone)
        assert found.keys() == expected.keys(), (by, filters)
        for key, group in expected.items():
            row = found[key]
            for name in ("tasks", "attempts", *SUMS):
                assert getattr(row, name) == group[name], (by, zone, key, name, filters)
            assert row.cost == group["model_cost"] + group["compute_cost"]
            if group["confidences"]:
                assert abs(row.median_confidence - disc(group["confidences"], 0.5)) <= row.confidence_error + 1e-6
            else:
                assert row.median_confidence is None


def compare_latency(conn, naive, filters, draw):
    by = draw.choice([None, "agent", "queue", "status", "day"])
    found = {(row.key, row.measure): row for row in call(conn, "latency", by=by, **filters)}
    for key, group in naive.latency(by, filters).items():
        for measure, values in group.items():
            row = found[key, measure]
            assert row.attempts == len(values), (by, key, measure, filters)
            for share, ms in ((0.5, row.median_ms), (0.95, row.p95_ms), (0.99, row.p99_ms)):
                assert same_percentile(ms, values, share, row.error), (key, measure, share, ms, values)
            if values:
                assert abs(row.median.total_seconds() * 1000 - row.median_ms) < 0.002


def compare_tasks(conn, naive, filters):
    live = collections.Counter()

    def now():
        return naive.within(datetime.now(UTC), filters.get("since"), filters.get("until"))

    before = now()
    if before:
        for place in "ready", "scheduled", "blocked", "running":
            for row in rows(conn, f"SELECT queue, id FROM stint.place_{place}"):
                if all(filters.get(f) in (None, got) for f, got in (("queue", row.queue), ("agent", naive.facts[row.queue, row.id].agent), ("status", place))):
                    live[row.queue, place] += 1
    counted = collections.Counter((o.queue, o.outcome) for o, _, _ in naive.finished(filters)) + live
    found = {(r.queue, r.status): r.tasks for r in call(conn, "task_counts", **filters)}
    assert found == counted or before != now(), filters  # unless the clock has just passed an end of the span
    costs = {k: v for k, v in filters.items() if k != "status"}
    for status, outcomes in (("failed", ("failed",)), ("cancelled", ("cancelled",)), (None, ("failed", "cancelled"))):
        found = {(r.queue, r.agent): r for r in call(conn, "cost_of_failed", status=status, **costs)}
        expected = naive.costs(costs, outcomes)
        assert found.keys() == expected.keys()
        for key, group in expected.items():
            for name in ("tasks", "attempts", "retried_attempts", "retried_cost", *SUMS):
                assert getattr(found[key], name) == group[name], (key, name, costs)
            assert found[key].cost == group["model_cost"] + group["compute_cost"]


def compare_page(conn, naive, filters):
    page = json.loads(
        value(conn, "SELECT stint.dashboard(since => %s, until => %s, status => %s, agent => %s, queue => %s)::text",
              *(filters.get(name) for name in ("since", "until", "status", "agent", "queue"))), parse_float=decimal.Decimal,
    )  # fmt: skip
    everything = naive.usage_by(None, filters)[None]
    usage = page["usage"] or dict.fromkeys(SUMS, 0) | {"attempts": 0}
    for name in ("attempts", *SUMS):
        assert usage[name] == everything[name], name
    finished = collections.Counter(o.outcome for o, _, _ in naive.finished(filters))
    assert {word: page["tasks"].get(word, 0) for word in ("completed", "failed", "cancelled")} == {w: finished[w] for w in ("completed", "failed", "cancelled")}
    agents = naive.usage_by("agent", filters)
    assert {line["agent"]: line["cost"] for line in page["agents"]} == {
        key: g["model_cost"] + g["compute_cost"] for key, g in agents.items() if g["attempts"] or any(g[n] for n in SUMS) or key in {l["agent"] for l in page["agents"]}
    }  # fmt: skip
    assert sum(at["attempts"] for at in page["series"]) == everything["attempts"]
    assert sum(at["cost"] for at in page["series"]) == everything["model_cost"] + everything["compute_cost"]
    costs = naive.costs(filters).values()
    assert page["failed"]["cost"] == sum(g["model_cost"] + g["compute_cost"] for g in costs)
    assert page["failed"]["retried_cost"] == sum(g["retried_cost"] for g in costs)


def usage(draw):
    some = {
        "model": draw.choice(["m1", "m2"]), "input_tokens": draw.randrange(100, 5000), "cached_tokens": draw.randrange(100), "output_tokens": draw.randrange(900),
        "model_cost": decimal.Decimal(draw.randrange(100_000)) / 10_000, "compute_cost": round(decimal.Decimal(draw.randrange(100)) / 7, 25), "confidence": f"{draw.random():.3f}",
    }  # fmt: skip
    return {name: given for name, given in some.items() if draw.random() < 0.7}


def work(queue, draw, ops):
    """Some tasks enqueued and ended in every way there is. Runs inside a transaction."""
    held = []
    for _ in range(ops):
        move = draw.randrange(12)
        if move <= 2:
            queue.fill(draw.randrange(1, 4), agent=draw.choice([None, "a1", "a2"]), tokens=draw.choice([None, 100, 2000]))
        elif move <= 4 or not held:
            held += queue.claim(draw.randrange(1, 4))
        else:
            task = held.pop(draw.randrange(len(held)))
            if move <= 7:
                queue.complete(task, **usage(draw))
            elif move == 8:
                queue.fail(task, retry_in="0", retryable=draw.random() < 0.5, **usage(draw))
            elif move == 9:
                queue.lapse(task)
                if draw.random() < 0.7:
                    draw.choice([queue.complete, queue.fail])(task, **usage(draw))  # late
            elif move == 10:
                queue.release(task)
            else:
                queue.cancel(task.id)
                draw.choice([queue.complete, queue.fail])(task, **usage(draw))
    if draw.random() < 0.3:
        call(queue.conn, "retry_failed", queue=queue.name, max=draw.randrange(1, 5))
    known = rows(queue.conn, "SELECT id, attempt FROM stint.task_attempts WHERE queue = %s UNION ALL SELECT id, attempt FROM stint.place_running WHERE queue = %s", queue.name, queue.name)  # fmt: skip
    for at in draw.sample(known, min(len(known), draw.randrange(4))):
        bill = usage(draw) or {"model_cost": 1}
        key = f"bill {draw.randrange(10**9)}"
        record = {"queue": queue.name, "id": at.id, "attempt": at.attempt, "key": key} | bill
        assert call(queue.conn, "record_usage", **record)[0][0] is True
        assert call(queue.conn, "record_usage", **record)[0][0] is False


def shift(conn, back):
    """Has what this transaction ended have ended earlier: before anybody else can see it."""
    conn.execute("UPDATE stint.task_attempts SET started_at = started_at - %s - random() * interval '10 min', ended_at = ended_at - %s WHERE xact = pg_current_xact_id()", (back, back))  # fmt: skip
    conn.execute("UPDATE stint.task_outcomes o SET finished_at = finished_at - %s WHERE coalesce(xact, (SELECT a.xact FROM stint.task_attempts a WHERE a.queue = o.queue AND a.id = o.id AND a.attempt = o.attempt)) = pg_current_xact_id()", (back,))  # fmt: skip


BACK = [timedelta(0), timedelta(minutes=3), timedelta(hours=5), timedelta(days=2), timedelta(days=9), timedelta(days=60), timedelta(days=130), timedelta(days=400)]


@pytest.mark.parametrize("seed", range(4))
def test_every_figure_is_what_the_rows_say_at_every_moment(database, connect, seed):
    """Part of it added up and part not; a transaction held open over several roll-ups and committed late; rolled-back ones; retries, late callbacks, bills.

    In half of the runs hours, days and months are behind, and are made of minutes on the way.
    """
    draw = random.Random(seed)
    conn, other, reader = connect(), connect(), connect()
    here, there = Queue(conn, "q0", max_attempts=3), Queue(connect(), "q1", max_attempts=3)
    if seed % 2:
        conn.execute("INSERT INTO stint.rollup_marks SELECT true, h, date_trunc('day', h, 'UTC'), date_trunc('month', h, 'UTC'), date_trunc('month', h, 'UTC'), date_trunc('month', h, 'UTC') FROM (SELECT date_trunc('hour', now() - interval '300 days') AS h) x")  # fmt: skip
    late = None
    for turn in range(14):
        if late is None and draw.random() < 0.4:
            late = there.conn.transaction(force_rollback=draw.random() < 0.3)
            late.__enter__()
        if late is not None:
            work(there, draw, 6)
            if draw.random() < 0.5:
                shift(there.conn, draw.choice(BACK))
        with conn.transaction(force_rollback=draw.random() < 0.15):
            work(here, draw, draw.randrange(4, 25))
            if draw.random() < 0.6:
                shift(conn, draw.choice(BACK))
        if draw.random() < 0.4:
            call(other, "roll_up")
        if late is not None and draw.random() < 0.35:
            late.__exit__(None, None, None)
            late = None
        if turn % 3 == 0:
            compare(reader, draw)
    if late is not None:
        late.__exit__(None, None, None)
    compare(reader, draw)
    call(other, "roll_up")
    compare(reader, draw)
    assert value(conn, "SELECT count(*) FROM stint.usage_tail") == value(conn, "SELECT count(*) FROM stint.task_tail") == 0


def test_roll_ups_that_race_with_each_other_and_with_work_count_everything_once(server, database, connect):
    Queue(connect(), "q0", max_attempts=3), Queue(connect(), "q1", max_attempts=3)

    def one(number):
        conn, draw = connect(), random.Random(number)
        for _ in range(25):
            if number < 3:
                call(conn, "roll_up")
            else:
                with conn.transaction(force_rollback=draw.random() < 0.2):
                    work(Queue(conn, f"q{number % 2}", create=False), draw, 8)

    # Two sessions in one queue may meet on a task in a ring: each has its own.
    parallel(5, one)
    compare(connect(), random.Random(5))
    call(connect(), "roll_up")
    compare(connect(), random.Random(6))


def test_an_answer_holds_what_its_own_transaction_has_done(conn, connect):
    queue = Queue(conn)
    queue.fill(3)
    queue.complete(queue.one(), model_cost=1)
    with conn.transaction():
        queue.complete(queue.one(), model_cost=2)
        assert call(conn, "usage_by", by=None)[0].cost == 3
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="cannot roll up in a transaction that has written"), conn.transaction():
            call(conn, "roll_up")
        assert call(connect(), "usage_by", by=None)[0].cost == 1
        call(connect(), "roll_up")
        assert call(conn, "usage_by", by=None)[0].cost == 3
    call(conn, "roll_up")
    assert call(conn, "usage_by", by=None)[0].cost == 3


def test_what_failed_tasks_cost_is_one_query(conn):
    """All attempts of a task that failed, whenever they ran, with the bill that came a week later; no more once it is retried."""
    queue = Queue(conn, max_attempts=2)
    id = queue.enqueue(agent="a")
    queue.fail(queue.one(), retry_in="0", model_cost="1.10", compute_cost="0.20")
    queue.fail(queue.one(), model_cost="2.00")
    other = queue.enqueue(agent="a")
    queue.fail(queue.one(), retry_in="0", model_cost="0.30")
    queue.complete(queue.one(), model_cost="5")
    cost = "SELECT sum(cost) FROM stint.cost_of_failed(since => now() - interval '7 days')"
    assert value(conn, cost) == decimal.Decimal("3.30")
    call(conn, "roll_up")
    assert call(conn, "record_usage", queue="q", id=id, attempt=1, key="invoice 7", model_cost="0.70")[0][0]
    assert call(conn, "record_usage", queue="q", id=other, attempt=1, key="invoice 7", model_cost="0.05")[0][0]
    [row] = call(conn, "cost_of_failed")
    assert (row.queue, row.agent, row.tasks, row.attempts, row.cost, row.retried_attempts, row.retried_cost) == (
        "q", "a", 1, 2, decimal.Decimal("4.00"), 1, decimal.Decimal("0.35"),
    )  # fmt: skip
    assert queue.retry(id).outcome == "retried"
    assert value(conn, cost) == 0
    call(conn, "roll_up")
    assert value(conn, cost) == 0
    queue.complete(queue.one(), model_cost="1")
    assert value(conn, cost) == 0
    assert call(conn, "cost_of_failed")[0].retried_cost == decimal.Decimal("4.35")


def test_a_bill_is_recorded_once_and_never_changes(conn):
    queue = Queue(conn)
    queue.fill(2)
    task = queue.one()

    def record(**args):
        return call(conn, "record_usage", **{"queue": "q", "id": task.id, "attempt": 1, "key": "b", "model_cost": "1.50"} | args)[0][0]

    assert record() is True, "while it runs"
    assert record() is False and record(model_cost="1.5000") is False
    for other in {"model_cost": "1.51"}, {"input_tokens": 0}, {"meta": "{}"}, {"model": "m"}:
        with pytest.raises(psycopg.errors.UniqueViolation, match="another bill") as caught:
            record(**other)
        assert "correction" in caught.value.diag.message_hint
    assert call(conn, "usage_by", by=None) == [], "its attempt has not ended"
    call(conn, "roll_up")
    queue.complete(task, model_cost=2, model="m1")
    assert call(conn, "usage_by", by="model")[0][0:1] == ("m1",) and call(conn, "usage_by", by=None)[0].cost == decimal.Decimal("3.5")
    assert record(key="c", meta='{"line": 1}') is True
    assert queue.attempts(task.id)[0].model_cost == 5
    for args, state in (
        ({"attempt": 2}, "P0002"), ({"attempt": 0}, "22023"), ({"id": "00000000-0000-0000-0000-000000000000"}, "P0002"), ({"key": "callback"}, "22023"),
        ({"key": "d", "model_cost": None}, "22023"), ({"queue": "nobody"}, "42704"), ({"key": ""}, "22023"),
    ):  # fmt: skip
        with pytest.raises(psycopg.Error) as caught:
            record(**args)
        assert caught.value.sqlstate == state and caught.value.diag.message_hint, args
    assert queue.attempts(task.id)[0].model_cost == 5


def test_one_of_two_that_record_the_same_bill_at_once_is_the_first(conn, connect):
    queue = Queue(conn)
    queue.fill(1)
    task = queue.one()
    record = {"queue": "q", "id": task.id, "attempt": 1, "key": "b", "model_cost": 1}
    with conn.transaction():
        assert call(conn, "record_usage", **record)[0][0]
        second = background(lambda: call(connect(), "record_usage", **record)[0][0])
        third = background(lambda: call(connect(), "record_usage", **record | {"model_cost": 2}))
    assert second.join() is False
    with pytest.raises(psycopg.errors.UniqueViolation):
        third.join()


def test_a_dropped_queue_leaves_no_sums(conn):
    queue = Queue(conn)
    queue.fill(2)
    queue.complete(queue.one(), model_cost=1)
    call(conn, "roll_up")
    queue.complete(queue.one(), model_cost=1)
    call(conn, "drop_queue", queue="q", force=True)
    call(conn, "roll_up")
    assert call(conn, "usage_by", by=None) == [] and call(conn, "task_counts") == []
    assert value(conn, "SELECT count(*) FROM stint.usage_rollups") == 0


def test_sums_outlive_history(conn):
    """What roll-ups have seen stays when the rows go."""
    queue = Queue(conn)
    queue.fill(2)
    queue.complete(queue.one(), model_cost=1)
    queue.fail(queue.one(), retryable=False, model_cost=2)
    call(conn, "roll_up")
    before = [call(conn, verb) for verb in ("usage_by", "latency", "cost_of_failed", "task_counts")]
    with conn.transaction():
        for table in "task_attempts", "task_outcomes", "task_facts":
            conn.execute(f"DELETE FROM stint.{table}")
    assert [call(conn, verb) for verb in ("usage_by", "latency", "cost_of_failed", "task_counts")] == before


def test_finer_sums_are_let_go_when_they_are_old(conn):
    queue = Queue(conn)
    for back in timedelta(0), timedelta(days=4), timedelta(days=150):
        with conn.transaction():
            queue.fill(1)
            queue.complete(queue.one(), model_cost=1)
            shift(conn, back)
        conn.execute("INSERT INTO stint.rollup_marks SELECT true, h, h, h, h, h FROM (SELECT date_trunc('month', now() - interval '400 days', 'UTC') AS h) x ON CONFLICT DO NOTHING")  # fmt: skip
    call(conn, "roll_up")
    levels = dict(conn.execute("SELECT level, count(*) FROM stint.usage_rollups GROUP BY level").fetchall())
    assert levels[1] <= 1 and levels.get(2, 0) <= 2 and 2 <= levels[3] <= 3 and levels[4] >= 1
    compare(conn, random.Random(1))


@pytest.mark.parametrize("function", ["usage_by", "latency", "task_counts", "cost_of_failed", "dashboard"])
def test_a_word_that_is_none_names_the_nearest(conn, function):
    wrong = {"status": "faild"} | ({"by": "agnet"} if function == "usage_by" else {})
    for name, given in wrong.items():
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'"{name}" is "{given}"') as caught:
            call(conn, function, **{name: given})
        assert "Did you mean" in caught.value.diag.message_hint
    with pytest.raises(psycopg.errors.UndefinedObject):
        call(conn, function, queue="nobody")


def test_an_idle_queue_is_not_rolled_up(conn):
    """Once everything is added up, neither the worker nor a call writes anything."""
    queue = Queue(conn)
    queue.fill(1)
    queue.complete(queue.one())
    call(conn, "roll_up")
    before = rows(conn, "SELECT * FROM stint.rollup_epochs")
    queue.fill(1)  # writes, but ends nothing
    for _ in range(3):
        assert call(conn, "roll_up") == [(0, 0)]
    assert rows(conn, "SELECT * FROM stint.rollup_epochs") == before


def test_the_functions_need_no_right_on_tables(server, database, conn, connect):
    queue = Queue(conn)
    queue.fill(1)
    queue.complete(queue.one(), model_cost=1)
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE viewer; GRANT USAGE ON SCHEMA stint TO viewer; GRANT EXECUTE ON FUNCTION stint.usage_by, stint.dashboard TO viewer; SET LOCAL ROLE viewer")
        assert call(conn, "usage_by", by=None)[0].cost == 1
        assert call(conn, "dashboard")[0][0]["usage"]["cost"] == 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            call(conn, "latency")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            conn.execute("SELECT FROM stint.usage_rollups")


def test_more_cached_tokens_than_input_are_refused(conn):
    queue = Queue(conn)
    queue.enqueue()
    task = queue.one()
    for end in queue.complete, queue.fail:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='"cached_tokens" is 11') as raised:
            end(task, input_tokens=10, cached_tokens=11)
        assert "part of the input" in raised.value.diag.message_hint
    assert queue.complete(task, input_tokens=10, cached_tokens=10).outcome == "completed"


def test_an_unknown_time_zone_is_refused_with_the_nearest(conn):
    for function in "usage_by", "latency":
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='time zone "Europe/Berln" is not known') as raised:
            call(conn, function, by="day", time_zone="Europe/Berln")
        assert 'Did you mean "Europe/Berlin"?' in raised.value.diag.message_hint


def test_a_dashboard_of_nothing_has_the_shape_of_one_of_something(conn):
    queue = Queue(conn)
    queue.enqueue()
    queue.complete(queue.one(), confidence="0.505", input_tokens=3)
    empty, full = (value(conn, "SELECT stint.dashboard(agent => %s)->'usage'", agent) for agent in ("nobody", None))
    assert empty.keys() == full.keys()
    assert {name: number for name, number in empty.items() if not name.startswith(("median", "p9"))} == dict.fromkeys(
        ["attempts", "input_tokens", "cached_tokens", "output_tokens", "model_cost", "compute_cost", "cost"], 0
    )
    assert empty["median_run_ms"] is None and full["attempts"] == 1 and full["input_tokens"] == 3


def test_a_confidence_is_what_was_given(conn):
    queue = Queue(conn)
    queue.fill(3)
    with conn.transaction():  # in one, or a roll-up may come between
        tasks = queue.claim(max=3)
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='"confidence" is 1.0001, it must'), conn.transaction():
            queue.complete(tasks[0], confidence="1.0001")
        for task, given in zip(tasks, ("0.505", "0.1", "0.333")):
            queue.complete(task, confidence=given)
        assert value(conn, "SELECT array_agg(confidence::text ORDER BY confidence) FROM stint.attempts") == ["0.1", "0.333", "0.505"]
        assert value(conn, "SELECT array_agg(confidence::text ORDER BY confidence) FROM stint.usage_tail") == ["0.1", "0.333", "0.505"]
