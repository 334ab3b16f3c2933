//! `stint.sweep`: takes back the tasks of workers that died, and of attempts past their deadline. A lapsed attempt counts; the task is claimable again at once, or
//! fails when its attempts are used up, or is cancelled when that was asked.
//!
//! A round takes lapsed rows in the order of their times, all in one statement. Where one of them cannot be taken back (somebody's trigger raises, a row that a
//! DBA wrote stands in the way), that round is undone and done again row by row, each in a subtransaction: the bad ones are set aside and told in the log, the
//! others are rescued, and so are those behind them, however many bad ones there are.
//!
//! A heartbeat moves a lease without moving its row in the line, so rows of long attempts stay far behind in it, with all that ended since between them and now:
//! entries of rows that are gone, and as long as somebody holds an old snapshot more of them with every task. So the maintenance worker knows the rows that it
//! left in the line one by one, and looks along the line only from where it last looked to, or from where somebody has put a row since.

use super::flow::leave;
use super::lines::{self, Eye};
use super::store::{self, Attempt, Outcome, Ticket};
use super::usage::Usage;
use super::{config, finish};
use crate::budget::live::Held;
use crate::changelog::epoch;
use crate::savepoint;
use crate::shmem::heads::{self, Head};
use crate::shmem::{self, Instance};
use crate::spi::{self, Row, Rows, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use crate::{guc, input};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

/// Deletes lapsed running rows that no other session holds: a heartbeat or a callback under way wins, since the row is looked at again once locked. No heartbeat
/// moves `extended_until` past the deadline of its attempt, so nothing here needs to look at that.
static LAPSED: Statement = Statement::new(
    c"delete from stint.place_running r
      where r.ctid = any (array(
            select d.ctid
            from stint.place_running d
            where d.expires_at >= $3 and d.expires_at <= $1 and coalesce(d.extended_until, d.expires_at) <= $1 and d.id <> all ($4)
            order by d.expires_at
            limit $2
            for update skip locked))
      returning r.queue::text, r.id, r.lease, r.lane, r.priority, r.seq, r.tokens, r.attempt, r.counted, r.started_at, r.worker::text,
                r.cancel_requested, r.reason, r.budgets, r.reserved, r.run_id::text, r.trace_id::text, r.heartbeat_gap, r.deadline, r.share",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID, pg_sys::UUIDARRAYOID],
);

/// The same for one row.
static LAPSED_ONE: Statement = Statement::new(
    c"delete from stint.place_running r
      where r.ctid = any (array(
            select d.ctid
            from stint.place_running d
            where d.queue = $2 and d.id = $3 and coalesce(d.extended_until, d.expires_at) <= $1
            for update skip locked))
      returning r.queue::text, r.id, r.lease, r.lane, r.priority, r.seq, r.tokens, r.attempt, r.counted, r.started_at, r.worker::text,
                r.cancel_requested, r.reason, r.budgets, r.reserved, r.run_id::text, r.trace_id::text, r.heartbeat_gap, r.deadline, r.share",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// Lapsed rows after one of them, in order.
static PAGE: Statement = Statement::new(
    c"select r.queue::text, r.id, r.expires_at
      from stint.place_running r
      where r.expires_at >= $2 and r.expires_at <= $1 and (r.expires_at, r.id) > ($2, $3) and coalesce(r.extended_until, r.expires_at) <= $1
      order by r.expires_at, r.id
      limit $4",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID, pg_sys::UUIDOID, pg_sys::INT8OID],
);

static FIRST: Statement = Statement::new(
    c"select r.expires_at from stint.place_running r where r.expires_at >= $1 order by r.expires_at limit 1",
    &[pg_sys::TIMESTAMPTZOID],
);

/// Rows of the line from $2 to $1, whatever became of their leases.
static LEFT: Statement = Statement::new(
    c"select r.queue::text, r.id, coalesce(r.extended_until, r.expires_at)
      from stint.place_running r
      where r.expires_at >= $2 and r.expires_at <= $1
      order by r.expires_at
      limit $3",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID],
);

/// Until when the leases of these tasks are now, where they are running still.
static NOW_UNTIL: Statement = Statement::new(
    c"select w.at, r.until
      from unnest($1, $2) with ordinality as w (queue, id, at)
      cross join lateral (
            select coalesce(t.extended_until, t.expires_at) as until from stint.place_running t where t.queue = w.queue and t.id = w.id limit 1) as r",
    &[pg_sys::TEXTARRAYOID, pg_sys::UUIDARRAYOID],
);

/// What a round did.
#[derive(Default)]
struct Swept {
    lapsed: i32,
    retried: i32,
    failed: i32,
    cancelled: i32,
    /// Tasks of each queue that are claimable again.
    ready: HashMap<String, usize>,
}

const LAPSE: &str = "the lease ran out before the worker answered";
const OVERRUN: &str = "the attempt ran longer than its max_run_time";

/// How long the maintenance worker leaves a row alone that it could not take back, in microseconds.
const ASIDE_FOR: i64 = 60 * SECOND;

/// An attempt that was left in the line.
struct Left {
    queue: String,
    id: pgrx::Uuid,
    /// Its lease holds at least until then.
    until: Instant,
}

/// What the maintenance worker knows of the line: of what lies before an instant, the rows that are left.
struct Known {
    before: i64,
    left: Vec<Left>,
}

/// So many rows it knows; where more are left it looks along the whole line.
const MOST_LEFT: usize = 10_000;

thread_local! {
    static KNOWN: RefCell<Option<Known>> = const { RefCell::new(None) };
    /// Tasks this backend could not take back, and when it found out.
    static ASIDE: RefCell<Vec<(pgrx::Uuid, Instant)>> = const { RefCell::new(Vec::new()) };
}

/// Finishes or gives back one deleted row.
fn take_back(session: &Session, rows: &Rows, at: usize, now: Instant, swept: &mut Swept) {
    let name: String = rows.must(at, 1);
    let ticket = Ticket {
        id: rows.must(at, 2),
        lane: rows.must(at, 4),
        priority: rows.must(at, 5),
        tokens: rows.get(at, 7),
        attempt: rows.must(at, 8),
        counted: rows.must::<i32>(at, 9).saturating_add(1),
    };
    let worker: String = rows.must(at, 11);
    let (run_id, trace_id): (Option<String>, Option<String>) = (rows.get(at, 16), rows.get(at, 17));
    let held = Held::new(rows.get(at, 14), rows.get(at, 15));
    let attempt = Attempt {
        id: ticket.id,
        attempt: ticket.attempt,
        lease: rows.must(at, 3),
        started_at: rows.must(at, 10),
        worker: &worker,
        heartbeat_gap: rows.get(at, 18),
        held: held.as_ref(),
        lane: ticket.lane,
        share: rows.get(at, 20),
    };
    let why = if rows.get::<Instant>(at, 19).is_some_and(|deadline| deadline <= now) { OVERRUN } else { LAPSE };
    let usage = Usage::default().or_known(run_id.as_deref(), trace_id.as_deref());
    store::attempt(session, &name, &attempt, "lapsed", now, Some(why), &usage);
    // A queue whose settings are gone (deleted by hand) still gets its tasks back.
    let queue = config::lookup(session, &name);
    let max_attempts = queue.map_or(i32::MAX, |queue| finish::max_attempts(session, &name, &queue, ticket.id));
    let reason: Option<String> = rows.get(at, 13);
    let again = swept.ready.entry(name.clone()).or_default();
    swept.lapsed += 1;
    if rows.must(at, 12) {
        let outcome = Outcome { outcome: "cancelled", attempt: ticket.attempt, lease: None, error: reason.as_deref(), result: None };
        store::outcome_of_many(session, &name, ticket.id, now, &outcome);
        swept.cancelled += 1;
    } else if ticket.counted >= max_attempts {
        let outcome = Outcome { outcome: "failed", attempt: ticket.attempt, lease: None, error: Some(why), result: None };
        store::outcome_of_many(session, &name, ticket.id, now, &outcome);
        swept.failed += 1;
    } else {
        store::back_to_ready(session, &name, &ticket, rows.must(at, 6));
        swept.retried += 1;
        *again += 1;
    }
}

fn sweep_batch(first: i64, max: usize, now: Instant) -> Swept {
    let aside = ASIDE.with_borrow(|aside| aside.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    let mut swept = Swept::default();
    spi::connect(|session| {
        let rows = session.run(&LAPSED, &[arg(now), arg(max as i64), arg(Instant(first)), arg(aside)]);
        (0..rows.len()).for_each(|at| take_back(session, &rows, at, now, &mut swept));
    });
    swept
}

/// Row by row, past those that cannot be taken back.
fn sweep_singly(first: i64, max: usize, now: Instant) -> Swept {
    const PAGE_ROWS: usize = 100;
    // So many bad rows one round looks past; the maintenance worker, which remembers them for a while, gets behind any number.
    const MOST_BAD: usize = 1000;
    let mut swept = Swept::default();
    let mut after = (Instant(first), pgrx::Uuid::from_bytes([0; 16]));
    let mut bad: Vec<(String, pgrx::Uuid, String)> = Vec::new();
    loop {
        let page: Vec<(String, pgrx::Uuid, Instant)> = spi::connect(|session| {
            let rows = session.run(&PAGE, &[arg(now), arg(after.0), arg(after.1), arg(PAGE_ROWS as i64)]);
            (0..rows.len()).map(|at| (rows.must(at, 1), rows.must(at, 2), rows.must(at, 3))).collect()
        });
        let more = page.len() == PAGE_ROWS;
        for (name, id, expired) in page {
            after = (expired, id);
            if usize::try_from(swept.lapsed).unwrap_or(0) >= max || bad.len() >= max.max(MOST_BAD) {
                report(&bad);
                return swept;
            }
            sweep_one(name, id, now, &mut swept, &mut bad);
        }
        if !more {
            report(&bad);
            return swept;
        }
    }
}

/// Takes back one task, or sets it aside.
fn sweep_one(name: String, id: pgrx::Uuid, now: Instant, swept: &mut Swept, bad: &mut Vec<(String, pgrx::Uuid, String)>) {
    if ASIDE.with_borrow(|aside| aside.iter().any(|(known, _)| known.as_bytes() == id.as_bytes())) {
        return;
    }
    let taken = savepoint::isolated(|| {
        let mut one = Swept::default();
        spi::connect(|session| {
            let rows = session.run(&LAPSED_ONE, &[arg(now), arg(name.as_str()), arg(id)]);
            (0..rows.len()).for_each(|at| take_back(session, &rows, at, now, &mut one));
        });
        one
    });
    match taken {
        Ok(one) => {
            swept.lapsed += one.lapsed;
            swept.retried += one.retried;
            swept.failed += one.failed;
            swept.cancelled += one.cancelled;
            one.ready.into_iter().for_each(|(name, tasks)| *swept.ready.entry(name).or_default() += tasks);
        }
        Err((_, why)) => {
            ASIDE.with_borrow_mut(|aside| aside.push((id, now)));
            bad.push((name, id, why));
        }
    }
}

/// Tells of tasks that could not be taken back: how many, and the first few by name.
fn report(bad: &[(String, pgrx::Uuid, String)]) {
    const NAMED: usize = 5;
    if bad.is_empty() {
        return;
    }
    let named: Vec<String> = bad.iter().take(NAMED).map(|(name, id, why)| format!("task {id} of queue \"{name}\": {why}")).collect();
    let rest = if bad.len() > NAMED { format!("; and {} more", bad.len() - NAMED) } else { String::new() };
    ereport!(
        PgLogLevel::WARNING,
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("pg_stint: {} lapsed tasks could not be taken back and were set aside", bad.len()),
        format!("{}{rest}", named.join("; "))
    );
}

/// The instant of the first running row, where it lies before now.
fn first_past(now: Instant) -> Option<i64> {
    spi::connect(|session| lines::first_instant(session, heads::RUNNING, &FIRST)).filter(|first| *first <= now.0)
}

/// Takes back what lapsed from an instant on.
fn sweep_from(first: i64, max: usize, now: Instant) -> Swept {
    savepoint::isolated(|| sweep_batch(first, max, now)).unwrap_or_else(|_| sweep_singly(first, max, now))
}

/// As [`sweep_from`] the first row, with what is known of the line; the worker is the only one to know something.
fn sweep_known(first: i64, max: usize, now: Instant) -> Swept {
    let shared = shmem::required();
    let may_rise = heads::may_rise(shared);
    let line = heads::look_long(shared, Instance::here(), heads::SWEPT, may_rise);
    let head = line.heads.first().filter(|_| line.complete).map(|head| head.at);
    let known = head.and_then(|_| KNOWN.take()).filter(|known| known.left.len() <= MOST_LEFT);
    let from = known.as_ref().map_or(first, |known| known.before.min(head.unwrap_or(i64::MIN)).max(first));
    let mut left = known.map_or_else(Vec::new, |known| known.left);
    let mut swept = sweep_left(&mut left, max, now);
    if swept.lapsed == 0 {
        swept = sweep_from(from, max, now);
    }
    // A round that took something back says nothing of the line: it may be undone.
    if swept.lapsed == 0 && heads::may_rise(shared) {
        let new = rows_left(from, now);
        left.retain(|known| !new.iter().any(|row| row.id.as_bytes() == known.id.as_bytes()));
        left.extend(new);
        let before = now.0.saturating_add(1);
        heads::rise(shared, Instance::here(), heads::SWEPT, line.look, &[Head { priority: 0, at: before }], true);
        KNOWN.set(Some(Known { before, left }));
    } else {
        heads::look_away();
        // What was known holds; where nothing was, `first` is before all of it.
        KNOWN.set(head.map(|_| Known { before: from, left }));
    }
    swept
}

/// Takes back those of the rows known to be left whose leases have lapsed since, and forgets those that are gone.
fn sweep_left(left: &mut Vec<Left>, max: usize, now: Instant) -> Swept {
    let mut swept = Swept::default();
    let due: Vec<usize> = (0..left.len()).filter(|at| left[*at].until <= now).collect();
    if due.is_empty() {
        return swept;
    }
    let until: HashMap<usize, Instant> = spi::connect(|session| {
        let queues: Vec<&str> = due.iter().map(|at| left[*at].queue.as_str()).collect();
        let ids: Vec<pgrx::Uuid> = due.iter().map(|at| left[*at].id).collect();
        let rows = session.run(&NOW_UNTIL, &[arg(queues), arg(ids)]);
        rows.iter().filter_map(|row| Some((*due.get(usize::try_from(row.must::<i64>(0)).ok()?.checked_sub(1)?)?, row.must(1)))).collect()
    });
    let mut bad = Vec::new();
    for at in &due {
        // One that is gone is forgotten below.
        let Some(until) = until.get(at) else { continue };
        left[*at].until = *until;
        if *until <= now && usize::try_from(swept.lapsed).unwrap_or(0) < max {
            sweep_one(left[*at].queue.clone(), left[*at].id, now, &mut swept, &mut bad);
        }
    }
    report(&bad);
    let mut at = 0;
    left.retain(|row| {
        at += 1;
        row.until > now || until.contains_key(&(at - 1))
    });
    swept
}

/// The running rows from an instant until now.
fn rows_left(from: i64, now: Instant) -> Vec<Left> {
    spi::connect(|session| {
        let rows = session.run(&LEFT, &[arg(now), arg(Instant(from)), arg(MOST_LEFT as i64 + 1)]);
        rows.iter().map(|row| Left { queue: row.must(0), id: row.must(1), until: row.must(2) }).collect()
    })
}

fn sweep_lapsed(max: usize, sweep: fn(i64, usize, Instant) -> Swept) -> Swept {
    let now = Instant::now();
    let Some(first) = first_past(now) else { return Swept::default() };
    let swept = sweep(first, max, now);
    spi::connect(|session| {
        for (name, tasks) in &swept.ready {
            if let Some(queue) = config::lookup(session, name) {
                store::announce(&queue, *tasks);
            }
        }
    });
    swept
}

/// See the SQL COMMENT of stint.sweep.
#[pg_extern(sql = false)]
fn sweep(max: Option<i32>) -> TableIterator<'static, (name!(lapsed, i32), name!(retried, i32), name!(failed, i32), name!(cancelled, i32))> {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = spi::Identity::owner();
    ASIDE.with_borrow_mut(Vec::clear);
    spi::connect(epoch::refuse_in_copy);
    let swept = sweep_lapsed(max, sweep_from);
    spi::connect(|session| leave::settle(session, max));
    TableIterator::once((swept.lapsed, swept.retried, swept.failed, swept.cancelled))
}

thread_local! {
    static EYE: Eye = Eye::on(heads::RUNNING);
}

/// Whether a lease may have lapsed.
pub fn due() -> bool {
    EYE.with(Eye::due)
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    let now = Instant::now();
    ASIDE.with_borrow_mut(|aside| aside.retain(|(_, since)| since.plus(ASIDE_FOR) > now));
    sweep_lapsed(usize::try_from(guc::max_batch()).unwrap_or(1), sweep_known).lapsed > 0
}
