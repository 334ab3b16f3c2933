//! Where claims, sweeps and promotions begin to look: the heads in shared memory, found anew where they are not known and raised where it pays.

use super::claim;
use crate::shmem::heads::{self, Glimpse, Head, Look, NOTHING};
use crate::shmem::{self, Instance, config};
use crate::spi::{self, Row, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;

/// The priorities that have rows in a lane, each found by one descent of the index, and the first row of each.
static PRIORITIES: Statement = Statement::new(
    c"with recursive found as (
            (select r.priority, r.seq from stint.place_ready r where r.lane = $1 order by r.priority desc, r.seq limit 1)
            union all
            select n.priority, n.seq
            from found
            cross join lateral (
                  select m.priority, m.seq
                  from stint.place_ready m
                  where m.lane = $1 and m.priority < found.priority
                  order by m.priority desc, m.seq
                  limit 1) as n)
      select found.priority, found.seq from found",
    &[pg_sys::INT4OID],
);

/// The first row of a priority that a plain read shows, from its head on.
static FIRST: Statement = Statement::new(
    c"select r.seq
      from stint.place_ready r
      where r.lane = $1 and r.priority = $2 and r.seq >= $3
      order by r.seq
      limit 1",
    &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID],
);

/// Rows taken from a lane, by claims that may not raise heads themselves, after which these are worth raising: so many dead entries a claim walks at the most,
/// give or take what is under way.
const WORTH_RAISING: usize = 64;

/// Where a claim begins to look in a lane.
pub struct Start {
    /// Each priority that has rows and where it begins, highest first.
    pub heads: Vec<Head>,
    /// To be given back with what the claim sees from there on, where that may raise heads.
    look: Option<Look>,
}

impl Start {
    /// Raises heads to the first rows that the claim's plain reads showed.
    pub fn rise(&self, lane: i32, seen: &[Head]) -> bool {
        let Some(look) = self.look.filter(|_| !seen.is_empty()) else { return false };
        heads::rise(shmem::required(), Instance::here(), lane, look, seen, false);
        true
    }
}

/// Where each priority of a lane that has rows begins, highest first.
pub fn heads(session: &Session, lane: i32) -> Start {
    let shared = shmem::required();
    let instance = Instance::here();
    let may_rise = heads::may_tell(shared);
    let line = heads::look(shared, instance, lane);
    if line.complete {
        let live = live(&line);
        if line.taken < WORTH_RAISING || live.is_empty() || !may_rise {
            return Start { heads: live, look: may_rise.then_some(line.look) };
        }
    }
    let line = heads::look_long(shared, instance, lane, may_rise);
    let found = if line.complete { raise(session, lane, &line) } else { find(session, lane, &line, may_rise) };
    let mut heads: Vec<Head> = found.into_iter().filter(|head| head.at != NOTHING).collect();
    heads.sort_unstable_by_key(|head| std::cmp::Reverse(head.priority));
    Start { heads, look: may_rise.then_some(line.look) }
}

fn live(line: &heads::Line) -> Vec<Head> {
    line.heads.iter().filter(|head| head.at != NOTHING).copied().collect()
}

/// Looks for every priority there is, from the very beginning.
fn find(session: &Session, lane: i32, line: &heads::Line, may_rise: bool) -> Vec<Head> {
    let rows = session.run(&PRIORITIES, &[arg(lane)]);
    let mut found: Vec<Head> = rows.iter().map(|row| Head { priority: row.must(0), at: row.must(1) }).collect();
    if may_rise {
        // A priority that stands in the entry but has no rows must not stay at a head of its own making: it ends with NOTHING.
        let gone = line.heads.iter().filter(|known| !found.iter().any(|head| head.priority == known.priority));
        let gone: Vec<Head> = gone.map(|known| Head { at: NOTHING, ..*known }).collect();
        found.extend(gone);
        heads::rise(shmem::required(), Instance::here(), lane, line.look, &found, true);
    }
    found
}

/// Looks for the first row of each priority from its head on, however far that is, and raises the heads to them.
fn raise(session: &Session, lane: i32, line: &heads::Line) -> Vec<Head> {
    let first = |head: Head| {
        let at = claim::first_to_stay(lane, head).unwrap_or_else(|| {
            let row = session.run(&FIRST, &[arg(lane), arg(head.priority), arg(head.at)]);
            row.iter().next().map(|row| row.must(0))
        });
        Head { at: at.unwrap_or(NOTHING), ..head }
    };
    let found: Vec<Head> = live(line).into_iter().map(first).collect();
    heads::rise(shmem::required(), Instance::here(), lane, line.look, &found, false);
    found
}

/// After a claim found nothing in a lane: if nothing is there at all, the next claim need not look.
pub fn exhausted(session: &Session, lane: i32) {
    let shared = shmem::required();
    let instance = Instance::here();
    let line = heads::look(shared, instance, lane);
    if line.complete && heads::may_tell(shared) && !live(&line).is_empty() {
        let line = heads::look_long(shared, instance, lane, true);
        raise(session, lane, &line);
    }
}

/// A line of time as the maintenance worker keeps an eye on it.
pub struct Eye {
    line: i32,
    entry: heads::Handle,
    seen: Cell<Glimpse>,
}

impl Eye {
    /// On a line that was never looked at.
    pub fn on(line: i32) -> Self {
        Eye { line, entry: heads::Handle::default(), seen: Cell::new(Glimpse::Unknown) }
    }

    /// Whether the line is worth a look: something in it may be due; or rows came since, so that its head may be raised past what went meanwhile, bit by bit and
    /// not all at once when its time has come.
    pub fn due(&self) -> bool {
        let instance = Instance::here();
        let now = heads::glimpse(instance, self.line, &self.entry);
        let before = self.seen.replace(now);
        match now {
            Glimpse::Empty => false,
            Glimpse::Moves(_) if now == before => begins(&heads::look(shmem::required(), instance, self.line)) <= Instant::now().0,
            Glimpse::Moves(_) | Glimpse::Unknown => true,
        }
    }
}

/// Where the live rows of a line of time begin, at the earliest.
fn begins(line: &heads::Line) -> i64 {
    line.heads.first().filter(|_| line.complete).map_or(i64::MIN, |head| head.at)
}

/// The first instant of a line of time that a plain read shows, with `first` to read it from its head on; raises the head to it. `None` where nothing is left.
pub fn first_instant(session: &Session, line: i32, first: &Statement) -> Option<i64> {
    let shared = shmem::required();
    let instance = Instance::here();
    if begins(&heads::look(shared, instance, line)) == NOTHING {
        return None;
    }
    let may_rise = heads::may_rise(shared);
    let known = heads::look_long(shared, instance, line, may_rise);
    let from = begins(&known);
    let row = session.run(first, &[arg(Instant(from))]);
    let at = row.get::<Instant>(0, 1).map(|instant| instant.0);
    if may_rise {
        let head = Head { priority: 0, at: at.unwrap_or(NOTHING) };
        heads::rise(shared, instance, line, known.look, &[head], true);
    }
    at
}

/// Notes that this transaction starts an attempt under a lease until then.
pub fn runs_until(expires: Instant) {
    heads::lower(Instance::here(), heads::RUNNING, 0, expires.0);
    heads::lower(Instance::here(), heads::SWEPT, 0, expires.0);
}

static PREPARED: Statement = Statement::new(c"select count(*) from pg_catalog.pg_prepared_xacts", &[]);

/// How often the maintenance worker has all heads found anew, in microseconds: so long at the most a row that was inserted by hand behind a head stays unseen.
const FORGET_EVERY: i64 = 600 * SECOND;

thread_local! {
    static FORGET_NEXT: Cell<i64> = const { Cell::new(i64::MIN) };
}

/// Whether a prepared transaction keeps heads down, or they are to be forgotten.
pub fn due() -> bool {
    heads::prepared_since(shmem::required()).is_some() || Instant::now().0 >= FORGET_NEXT.get()
}

/// One round for the maintenance worker: lets heads rise again once no prepared transaction is about, and forgets them from time to time.
pub fn step() -> bool {
    let shared = shmem::required();
    if let Some(prepared) = heads::prepared_since(shared)
        && spi::connect(|session| session.run(&PREPARED, &[]).must::<i64>(0, 1)) == 0
    {
        heads::all_over(shared, prepared);
    }
    let now = Instant::now();
    if now.0 >= FORGET_NEXT.get() {
        heads::forget(shared, Instance::here());
        FORGET_NEXT.set(now.plus(FORGET_EVERY).0);
    }
    false
}

/// See the SQL COMMENT of stint.rescan.
#[pg_extern(sql = false)]
fn rescan() {
    shmem::required();
    heads::rescan(Instance::here(), false);
    config::changed();
}

/// The record that tells PostgreSQL how a hand-written C function is called.
static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// See [`placed_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_placed_wrapper() -> &'static pg_sys::Pg_finfo_record {
    &CALLED_BY_V1
}

/// `stint.placed`, the statement trigger of the places. By hand, because it fires at every claim and must cost next to nothing there.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn placed_wrapper(_fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    if !spi::in_own_statement() && shmem::get().is_some() {
        heads::rescan(Instance::here(), true);
    }
    pg_sys::Datum::from(0usize)
}
