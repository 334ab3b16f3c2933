//! Where claims, sweeps and promotions begin to look: the heads in shared memory, found anew where they are not known and raised where it pays.

use crate::shmem::heads::{self, Head, NOTHING};
use crate::shmem::{self, Instance, config};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;

/// The priorities that have rows in a lane, each found by one descent of the index.
static PRIORITIES: Statement = Statement::new(
    c"with recursive found as (
            (select r.priority from stint.place_ready r where r.lane = $1 order by r.priority desc limit 1)
            union all
            select (select n.priority
                    from stint.place_ready n
                    where n.lane = $1 and n.priority < found.priority
                    order by n.priority desc
                    limit 1)
            from found
            where found.priority is not null)
      select found.priority from found where found.priority is not null",
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
    pub generation: Option<u64>,
}

impl Start {
    /// Raises heads to the first rows that the claim's plain reads showed.
    pub fn rise(&self, lane: i32, seen: &[Head]) -> bool {
        let Some(generation) = self.generation.filter(|_| !seen.is_empty()) else { return false };
        heads::rise(shmem::required(), Instance::here(), lane, generation, seen, false);
        true
    }
}

/// Where each priority of a lane that has rows begins, highest first.
pub fn heads(session: &Session, lane: i32) -> Start {
    let shared = shmem::required();
    let instance = Instance::here();
    let line = heads::look(shared, instance, lane);
    let may_rise = heads::may_rise(shared);
    if line.complete {
        let generation = may_rise.then_some(line.generation);
        let live: Vec<Head> = line.heads.iter().filter(|head| head.at != NOTHING).copied().collect();
        if line.taken < WORTH_RAISING || live.is_empty() || !may_rise {
            return Start { heads: live, generation };
        }
        let found = first_rows(session, lane, &live);
        heads::rise(shared, instance, lane, line.generation, &found, false);
        return Start { heads: found.into_iter().filter(|head| head.at != NOTHING).collect(), generation };
    }
    let rows = session.run(&PRIORITIES, &[arg(lane)]);
    // A priority that stands in the entry but has no rows must not stay at a head of its own making: it ends with NOTHING.
    let mut found: Vec<Head> = (0..rows.len()).map(|at| Head { priority: rows.must(at, 1), at: 0 }).collect();
    if may_rise {
        let gone = line.heads.iter().filter(|known| !found.iter().any(|head| head.priority == known.priority));
        let all: Vec<Head> = found.iter().copied().chain(gone.map(|known| Head { at: NOTHING, ..*known })).collect();
        heads::rise(shared, instance, lane, line.generation, &all, true);
    }
    found.sort_unstable_by_key(|head| std::cmp::Reverse(head.priority));
    Start { heads: found, generation: may_rise.then_some(line.generation) }
}

fn first_rows(session: &Session, lane: i32, from: &[Head]) -> Vec<Head> {
    from.iter()
        .map(|head| {
            let row = session.run(&FIRST, &[arg(lane), arg(head.priority), arg(head.at)]);
            Head { at: if row.is_empty() { NOTHING } else { row.must(0, 1) }, ..*head }
        })
        .collect()
}

/// After a claim found nothing in a lane: if nothing is there at all, the next claim need not look.
pub fn exhausted(session: &Session, lane: i32) {
    let shared = shmem::required();
    let instance = Instance::here();
    let line = heads::look(shared, instance, lane);
    if !line.complete || !heads::may_rise(shared) {
        return;
    }
    let live: Vec<Head> = line.heads.iter().filter(|head| head.at != NOTHING).copied().collect();
    if !live.is_empty() {
        let found = first_rows(session, lane, &live);
        heads::rise(shared, instance, lane, line.generation, &found, false);
    }
}

/// The first instant of a line of time that a plain read shows, with `first` to read it from its head on; raises the head to it. `None` where nothing is left.
pub fn first_instant(session: &Session, line: i32, first: &Statement) -> Option<i64> {
    let shared = shmem::required();
    let instance = Instance::here();
    let known = heads::look(shared, instance, line);
    let from = known.heads.first().map_or(i64::MIN, |head| head.at);
    if known.complete && from == NOTHING {
        return None;
    }
    let from = if known.complete { from } else { i64::MIN };
    let may_rise = heads::may_rise(shared);
    let row = session.run(first, &[arg(Instant(from))]);
    let at = row.get::<Instant>(0, 1).map(|instant| instant.0);
    if may_rise {
        let head = Head { priority: 0, at: at.unwrap_or(NOTHING) };
        heads::rise(shared, instance, line, known.generation, &[head], true);
    }
    at
}

static PREPARED: Statement = Statement::new(c"select count(*) from pg_catalog.pg_prepared_xacts", &[]);

/// How often the maintenance worker has all heads found anew, in microseconds: so long at the most a row that was inserted by hand behind a head stays unseen.
const FORGET_EVERY: i64 = 600 * SECOND;

thread_local! {
    static FORGET_NEXT: Cell<i64> = const { Cell::new(i64::MIN) };
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
