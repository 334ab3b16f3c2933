//! `stint.roll_up`: adds up what was committed since the last roll-up.
//!
//! The roll-up lock is taken first and the snapshot then, so each snapshot includes the one before. The sums and the snapshot they reach to are written in one
//! statement: a reader sees both or neither, and takes what is not in them from the rows themselves.

use crate::changelog::epoch;
use crate::object_lock::{self, Lock};
use crate::shmem::workers;
use crate::spi::{Identity, Rows, Session, Statement, arg, connect};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;
use stint_core::rollup::{Level, Marks};

/// Rows that came since the last roll-up after which the worker makes another at once; otherwise it lets time pass.
const SOON: i64 = 500;
const AT_LATEST: i64 = 5 * SECOND;

/// What is not added up, counted up to the number at which that is enough to know; when there was a roll-up last; and whether the sums are those of another
/// database, of which this one is a copy that was not activated.
static PENDING: Statement = Statement::new(
    c"select (select count(*) from (select from stint.new_attempts limit 500) a) + (select count(*) from (select from stint.new_outcomes n where not n.by_first limit 500) o)
             + (select count(*) from (select from stint.new_bills limit 500) u) + (select count(*) from (select from stint.new_retries limit 500) y),
             (select e.rolled_up_at from stint.last_rollups e where e.incarnation = stint.incarnation()),
             exists (select from stint.last_rollups e where e.incarnation <> stint.incarnation() and e.snapshot is not null)",
    &[],
);

static BEGIN: Statement = Statement::new(
    c"insert into stint.rollup_marks (hours_until, days_until, months_until, minutes_from, hours_from) values ($1, $2, $3, $4, $5)
      on conflict (one) do nothing",
    &[pg_sys::TIMESTAMPTZOID; 5],
);

/// Adds the tails to every level that is complete up to their minute, and notes the snapshot of this very statement as what is added up. In a copy that is only
/// done when it is activated ($1), and then for good: looked at here, since a dump's rows may have come since the statement before.
/// In the order of time, so that what is read together lies together.
static ADD: Statement = Statement::new(
    c"with may as materialized (
          select $1 or not exists (select from stint.last_rollups e where e.incarnation <> stint.incarnation() and e.snapshot is not null) as add
      ), before as materialized (
          select e.number from stint.last_rollups e where e.incarnation = stint.incarnation()
      ), reached as (
          insert into stint.rollup_epochs (incarnation, number, snapshot)
          select stint.incarnation(), coalesce((select b.number from before b), 0) + 1, pg_current_snapshot() from may where may.add
      ), forgotten as (
          delete from stint.rollup_epochs e using before b, may where may.add and e.incarnation = stint.incarnation() and e.number = b.number
      ), closed as (
          update stint.rollup_epochs e
          set snapshot = null
          from stint.last_rollups c
          where $1 and c.incarnation <> stint.incarnation() and c.snapshot is not null and e.incarnation = c.incarnation and e.number = c.number
      ), attempts as materialized (
          select a.* from stint.attempt_tail a
      ), usage as (
          insert into stint.usage_rollups as r
                 (queue, level, since, agent, model, ended, attempts, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost,
                  predicted_tokens, measured_tokens, wait, run, confidence)
          select t.queue, l.level, l.since, t.agent, t.model, t.ended, sum(t.attempts), sum(t.input_tokens), sum(t.cached_tokens), sum(t.output_tokens),
                 sum(t.model_cost), sum(t.compute_cost), sum(t.predicted_tokens), sum(t.measured_tokens),
                 stint.histogram('duration', null, array_agg(t.wait)), stint.histogram('duration', null, array_agg(t.run)),
                 stint.histogram('share', null, array_agg(t.confidence))
          from (select a.since, a.queue, a.agent, a.model, a.ended, a.attempts, a.input_tokens, a.cached_tokens, a.output_tokens, a.model_cost, a.compute_cost,
                       a.predicted_tokens, a.measured_tokens, a.wait, a.run, a.confidence
                from attempts a
                union all
                select b.* from stint.bill_tail b) t
          cross join stint.rollup_marks m
          cross join lateral (
              select 1 as level, t.since where t.since >= m.minutes_from
              union all select 2, date_bin('1 hour', t.since, '2000-01-01 00:00:00+00') where t.since < m.hours_until and t.since >= m.hours_from
              union all select 3, date_bin('1 day', t.since, '2000-01-01 00:00:00+00') where t.since < m.days_until
              union all select 4, date_trunc('month', t.since, 'UTC') where t.since < m.months_until
          ) l
          where (select may.add from may)
          group by t.queue, l.level, l.since, t.agent, t.model, t.ended
          order by l.level, l.since
          on conflict (queue, level, since, agent, model, ended) do update
          set attempts = r.attempts + excluded.attempts, input_tokens = r.input_tokens + excluded.input_tokens,
              cached_tokens = r.cached_tokens + excluded.cached_tokens, output_tokens = r.output_tokens + excluded.output_tokens,
              model_cost = r.model_cost + excluded.model_cost, compute_cost = r.compute_cost + excluded.compute_cost,
              predicted_tokens = r.predicted_tokens + excluded.predicted_tokens, measured_tokens = r.measured_tokens + excluded.measured_tokens,
              wait = stint.histogram('duration', array[r.wait, excluded.wait]), run = stint.histogram('duration', array[r.run, excluded.run]),
              confidence = stint.histogram('share', array[r.confidence, excluded.confidence])
      ), tasks as (
          insert into stint.task_rollups as r
                 (queue, level, since, agent, model, outcome, tasks, attempts, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost,
                  retried_attempts, retried_cost)
          select t.queue, l.level, l.since, t.agent, t.model, t.outcome, sum(t.tasks), sum(t.attempts), sum(t.input_tokens), sum(t.cached_tokens),
                 sum(t.output_tokens), sum(t.model_cost), sum(t.compute_cost), sum(t.retried_attempts), sum(t.retried_cost)
          from (select a.since, a.queue, a.agent, a.model_of_attempt as model, a.ended as outcome, a.attempts as tasks, a.attempts, a.input_tokens, a.cached_tokens,
                       a.output_tokens, a.model_cost, a.compute_cost, 0 as retried_attempts, 0::numeric as retried_cost
                from attempts a
                where a.by_first
                union all
                select o.* from stint.other_task_tail o) t
          cross join stint.rollup_marks m
          cross join lateral (
              select 1 as level, t.since where t.since >= m.minutes_from
              union all select 2, date_bin('1 hour', t.since, '2000-01-01 00:00:00+00') where t.since < m.hours_until and t.since >= m.hours_from
              union all select 3, date_bin('1 day', t.since, '2000-01-01 00:00:00+00') where t.since < m.days_until
              union all select 4, date_trunc('month', t.since, 'UTC') where t.since < m.months_until
          ) l
          where (select may.add from may)
          group by t.queue, l.level, l.since, t.agent, t.model, t.outcome
          order by l.level, l.since
          on conflict (queue, level, since, agent, model, outcome) do update
          set tasks = r.tasks + excluded.tasks, attempts = r.attempts + excluded.attempts, input_tokens = r.input_tokens + excluded.input_tokens,
              cached_tokens = r.cached_tokens + excluded.cached_tokens, output_tokens = r.output_tokens + excluded.output_tokens,
              model_cost = r.model_cost + excluded.model_cost, compute_cost = r.compute_cost + excluded.compute_cost,
              retried_attempts = r.retried_attempts + excluded.retried_attempts, retried_cost = r.retried_cost + excluded.retried_cost
      )
      select (select coalesce(sum(a.attempts), 0) from attempts a),
             (select coalesce(sum(a.attempts), 0) from attempts a where a.by_first)
             + (select count(*) from stint.new_outcomes n where not n.by_first) - (select count(*) from stint.new_retries), may.add
      from may",
    &[pg_sys::BOOLOID],
);

static MARKS: Statement =
    Statement::new(c"select m.hours_until, m.days_until, m.months_until, m.minutes_from, m.hours_from from stint.rollup_marks m", &[]);

/// The first sums of a level from an instant on.
static FIRST: Statement = Statement::new(
    c"select least((select u.since from stint.usage_rollups u where u.level = $1 and u.since >= $2 order by u.since limit 1),
                   (select t.since from stint.task_rollups t where t.level = $1 and t.since >= $2 order by t.since limit 1))",
    &[pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID],
);

/// Sums of level $2 made of those of level $1 from $3 to $4.
static COARSEN: [Statement; 2] = [
    Statement::new(
        c"insert into stint.usage_rollups
                 (queue, level, since, agent, model, ended, attempts, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost,
                  predicted_tokens, measured_tokens, wait, run, confidence)
          select r.queue, $2, l.since, r.agent, r.model, r.ended, sum(r.attempts), sum(r.input_tokens), sum(r.cached_tokens), sum(r.output_tokens),
                 sum(r.model_cost), sum(r.compute_cost), sum(r.predicted_tokens), sum(r.measured_tokens),
                 stint.histogram('duration', array_agg(r.wait)), stint.histogram('duration', array_agg(r.run)), stint.histogram('share', array_agg(r.confidence))
          from stint.usage_rollups r
          cross join lateral (select case $2 when 2 then date_bin('1 hour', r.since, '2000-01-01 00:00:00+00')
                                             when 3 then date_bin('1 day', r.since, '2000-01-01 00:00:00+00')
                                             else date_trunc('month', r.since, 'UTC') end as since) l
          where r.level = $1 and r.since >= $3 and r.since < $4
          group by r.queue, l.since, r.agent, r.model, r.ended
          order by l.since",
        &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID],
    ),
    Statement::new(
        c"insert into stint.task_rollups
                 (queue, level, since, agent, model, outcome, tasks, attempts, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost,
                  retried_attempts, retried_cost)
          select r.queue, $2, l.since, r.agent, r.model, r.outcome, sum(r.tasks), sum(r.attempts), sum(r.input_tokens), sum(r.cached_tokens),
                 sum(r.output_tokens), sum(r.model_cost), sum(r.compute_cost), sum(r.retried_attempts), sum(r.retried_cost)
          from stint.task_rollups r
          cross join lateral (select case $2 when 2 then date_bin('1 hour', r.since, '2000-01-01 00:00:00+00')
                                             when 3 then date_bin('1 day', r.since, '2000-01-01 00:00:00+00')
                                             else date_trunc('month', r.since, 'UTC') end as since) l
          where r.level = $1 and r.since >= $3 and r.since < $4
          group by r.queue, l.since, r.agent, r.model, r.outcome
          order by l.since",
        &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID],
    ),
];

static FORGET: [Statement; 2] = [
    Statement::new(c"delete from stint.usage_rollups r where r.level = $1 and r.since < $2", &[pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID]),
    Statement::new(c"delete from stint.task_rollups r where r.level = $1 and r.since < $2", &[pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID]),
];

static MOVE: Statement = Statement::new(
    c"update stint.rollup_marks m set hours_until = $1, days_until = $2, months_until = $3, minutes_from = $4, hours_from = $5",
    &[pg_sys::TIMESTAMPTZOID; 5],
);

fn params(marks: &Marks) -> [crate::spi::Param; 5] {
    [marks.hours_until, marks.days_until, marks.months_until, marks.minutes_from, marks.hours_from].map(|at| arg(Instant(at)))
}

fn marks_of(row: &Rows) -> Marks {
    if row.is_empty() {
        return Marks::NONE;
    }
    let [hours_until, days_until, months_until, minutes_from, hours_from] = [1, 2, 3, 4, 5].map(|column| row.must::<Instant>(0, column).0);
    Marks { hours_until, days_until, months_until, minutes_from, hours_from }
}

/// How far the levels are, as the calling query sees it.
pub fn marks(session: &Session) -> Marks {
    marks_of(&session.read(&MARKS, &[]))
}

/// What `PENDING` found.
struct Pending {
    rows: i64,
    last: Option<Instant>,
    copied: bool,
}

fn pending(session: &Session) -> Pending {
    let row = session.run(&PENDING, &[]);
    Pending { rows: row.must(0, 1), last: row.get(0, 2), copied: row.must(0, 3) }
}

fn add(session: &Session, now: Instant, activating: bool) -> (i64, i64) {
    session.run(&BEGIN, &params(&Marks::at(now.0)));
    let added = session.run(&ADD, &[arg(activating)]);
    if added.must(0, 3) { (added.must(0, 1), added.must(0, 2)) } else { (0, 0) }
}

/// Most spans of a level made in one transaction.
const STEP: i64 = 24;

/// Makes hours, days and months of what is old enough, in bounded steps, and lets go of finer sums that are old. The roll-up lock is held. Returns whether there is more to do.
fn coarsen(session: &Session, now: Instant) -> bool {
    let row = session.run(&MARKS, &[]);
    if row.is_empty() {
        return false;
    }
    let (before, target) = (marks_of(&row), Marks::at(now.0));
    let (mut marks, mut more) = (before, false);
    for (fine, coarse) in [(Level::Minute, Level::Hour), (Level::Hour, Level::Day), (Level::Day, Level::Month)] {
        let reach = target.until(coarse).min(coarse.floor(marks.until(fine)));
        let from = marks.until(coarse);
        // Spans without anything need no sums: the mark goes on when something lies behind it.
        let Some(first) = (from < reach).then(|| first(session, fine, from)).flatten().filter(|first| *first < reach) else { continue };
        let to = (0..STEP).fold(coarse.floor(first), |at, _| coarse.ceil(at.saturating_add(1))).min(reach);
        for statement in &COARSEN {
            session.run(statement, &[arg(fine as i32), arg(coarse as i32), arg(Instant(from)), arg(Instant(to))]);
        }
        marks.reached(coarse, to);
        more |= to < reach;
    }
    for (level, until) in [(Level::Minute, target.minutes_from.min(marks.hours_until)), (Level::Hour, target.hours_from.min(marks.days_until))] {
        if marks.kept_from(level) < until && first(session, level, i64::MIN).is_some_and(|first| first < until) {
            for statement in &FORGET {
                session.run(statement, &[arg(level as i32), arg(Instant(until))]);
            }
            marks.keep_from(level, until);
        }
    }
    if marks != before {
        session.run(&MOVE, &params(&marks));
    }
    more
}

fn first(session: &Session, level: Level, from: i64) -> Option<i64> {
    session.run(&FIRST, &[arg(level as i32), arg(Instant(from))]).get::<Instant>(0, 1).map(|at| at.0)
}

/// How often the maintenance worker looks what has come, where it does not know of much, in microseconds.
const LOOK_EVERY: i64 = SECOND;

thread_local! {
    /// When it looks next, and how much had been added up of what was counted in shared memory.
    static NEXT: Cell<(i64, u64)> = const { Cell::new((i64::MIN, 0)) };
}

/// And where it knows of nothing: rows may have come by other ways than the verbs, or before a restart, and finer sums become coarser ones with time.
const LOOK_SELDOM: i64 = 10 * SECOND;

/// Whether it is time to look again, or much has come. Rows are counted as they are written: a look at the tables in each of the many rounds of a busy database
/// would cost as much as adding up.
pub fn due() -> bool {
    let (look_at, added) = NEXT.get();
    let new = workers::counted_to_add().wrapping_sub(added);
    let wait = if new == 0 { LOOK_SELDOM - LOOK_EVERY } else { 0 };
    new >= SOON as u64 || Instant::now().0 >= look_at.saturating_add(wait)
}

/// One round for the maintenance worker. Does not wait: where another session holds the roll-up lock, that one does the work.
pub fn step() -> bool {
    let now = Instant::now();
    let counted = workers::counted_to_add();
    NEXT.set((now.plus(LOOK_EVERY).0, counted));
    connect(|session| {
        if !object_lock::take(Lock::RollUps, true) {
            return false;
        }
        let pending = pending(session);
        if pending.copied {
            return false;
        }
        if pending.rows >= SOON || pending.rows > 0 && pending.last.is_none_or(|last| last.plus(AT_LATEST) <= now || last > now) {
            add(session, now, false);
        } else {
            NEXT.set((now.plus(LOOK_EVERY).0, counted.wrapping_sub(pending.rows as u64)));
        }
        let more = coarsen(session, now);
        if more {
            NEXT.set((i64::MIN, counted));
        }
        more
    })
}

/// See the SQL COMMENT of stint.roll_up.
#[pg_extern(sql = false)]
fn roll_up() -> TableIterator<'static, (name!(attempts, i64), name!(tasks, i64))> {
    crate::shmem::required();
    object_lock::refuse_written("roll up", "stint.roll_up()");
    let now = Instant::now();
    let _owner = Identity::owner();
    TableIterator::once(connect(|session| {
        epoch::refuse_in_copy(session);
        object_lock::take(Lock::RollUps, false);
        let added = if pending(session).rows > 0 { add(session, now, false) } else { (0, 0) };
        while coarsen(session, now) {}
        added
    }))
}

/// The incarnations whose rows are here and of which no roll-up is known: a database was copied whose worker never came to make one.
static ADOPT: Statement = Statement::new(
    c"with recursive attempts as (
          (select t.incarnation from stint.task_attempts t order by t.incarnation limit 1)
          union all
          select (select t.incarnation from stint.task_attempts t where t.incarnation > a.incarnation order by t.incarnation limit 1)
          from attempts a where a.incarnation is not null
      ), outcomes as (
          (select t.incarnation from stint.task_outcomes t where t.xact is not null order by t.incarnation limit 1)
          union all
          select (select t.incarnation from stint.task_outcomes t where t.xact is not null and t.incarnation > o.incarnation order by t.incarnation limit 1)
          from outcomes o where o.incarnation is not null
      )
      insert into stint.rollup_epochs (incarnation, snapshot)
      select i.incarnation, '1:1:'::pg_snapshot
      from (select a.incarnation from attempts a union select o.incarnation from outcomes o) i
      where i.incarnation <> stint.incarnation() and not exists (select from stint.last_rollups e where e.incarnation = i.incarnation)",
    &[],
);

/// In a copy: adds up what its original had not, and goes on from there with transaction ids of its own.
pub fn activate(session: &Session) {
    let (now, written) = (Instant::now(), object_lock::written());
    object_lock::take(Lock::RollUps, false);
    session.run(&ADOPT, &[]);
    if pending(session).copied {
        if written {
            object_lock::refuse("activate a copy", "has written something", "stint.activate()")
        }
        add(session, now, true);
    }
}

static OF_QUEUE: [Statement; 2] = [
    Statement::new(c"delete from stint.usage_rollups r where r.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_rollups r where r.queue = $1", &[pg_sys::TEXTOID]),
];

/// Removes the sums of a queue whose rows are gone. Waits for a roll-up under way, which may have seen them, and keeps others out until the end.
pub fn drop_queue(session: &Session, name: &str) {
    object_lock::take(Lock::RollUps, false);
    for delete in &OF_QUEUE {
        session.run(delete, &[arg(name)]);
    }
}

/// See the SQL COMMENT of stint.incarnation.
#[pg_extern(sql = false)]
pub fn incarnation() -> i32 {
    // SAFETY: constants of this backend and its cluster.
    unsafe { stint_core::rollup::incarnation(pg_sys::GetSystemIdentifier(), pg_sys::MyDatabaseId.to_u32()) }
}
