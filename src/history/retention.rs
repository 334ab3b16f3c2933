//! Retention: leaves past theirs go, one at a time, each in a transaction of its own, so that no lock is held for longer than one takes. And events past theirs.

use super::expire::{self, Done};
use super::{ahead, ms};
use crate::changelog::epoch;
use crate::guc;
use crate::savepoint;
use crate::shmem::{self, Instance};
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use stint_core::history::{Leaf, PARTS};

static CLASSES: Statement = Statement::new(
    c"select h.class::int, (extract(epoch from h.retention) * 1e6)::bigint, h.archive = 'detach' from stint.history_classes h where h.retention is not null",
    &[],
);

/// The facts of leaves that are in their place, by name.
static LEAVES: Statement = Statement::new(
    c"select c.relname::text
      from pg_catalog.pg_class c
      where c.relnamespace = $1 and c.relispartition and c.relkind = 'r' and c.relname ~ '^task_facts_c[0-9]+_[0-9]+$'",
    &[pg_sys::OIDOID],
);

/// Events emitted long ago, and those that nobody awaits any more and nobody emitted. Whoever is about to await one holds its row.
static LET_GO: Statement = Statement::new(
    c"delete from stint.events e
      where e.ctid = any (array(
            select d.ctid from stint.events d where d.emitted_at < $1 order by d.emitted_at limit $2 for update skip locked))",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID],
);
static LET_GO_UNUSED: Statement = Statement::new(
    c"delete from stint.events e
      where e.ctid = any (array(
            select d.ctid
            from stint.events d
            where d.emitted_at is null and not exists (select from stint.place_scheduled s where s.event = d.event)
            limit $1
            for update skip locked))",
    &[pg_sys::INT8OID],
);

/// How often the worker looks for leaves that are past their retention.
const EVERY: i64 = 10 * SECOND;
/// How long it leaves one alone that could not be locked.
const AGAIN: i64 = 5 * SECOND;
/// One that somebody reads in an old snapshot, or in a query of this session.
const LATER: i64 = 60 * SECOND;
/// And one that still holds much that must be kept, or that something stands in the way of.
const MUCH_LATER: i64 = 600 * SECOND;

thread_local! {
    static NEXT: Cell<Instant> = const { Cell::new(Instant(0)) };
    static NEXT_EVENTS: Cell<Instant> = const { Cell::new(Instant(0)) };
    /// Leaves that are left alone, and until when.
    static ASIDE: RefCell<HashMap<Leaf, Instant>> = RefCell::new(HashMap::new());
}

/// What a round did.
#[derive(Default)]
struct Round {
    dropped: i32,
    detached: i32,
    compacted: i32,
    held_up: i32,
    postponed: i32,
    /// Whether some of what hangs on old tasks was deleted.
    trimmed: bool,
}

/// A leaf that is over for longer than its retention, the instant before which its tasks must have finished to go, and whether it is kept in the archive.
type Expired = (Leaf, Instant, bool);

fn expired(now: Instant) -> Vec<Expired> {
    spi::connect(|session| {
        // Nothing is removed in a copy of another database.
        if !epoch::own(session) {
            return Vec::new();
        }
        let classes = session.run(&CLASSES, &[]);
        let classes: HashMap<i32, (i64, bool)> =
            (0..classes.len()).map(|at| (classes.must(at, 1), (classes.must(at, 2), classes.must(at, 3)))).collect();
        if classes.is_empty() {
            return Vec::new();
        }
        let leaves = session.run(&LEAVES, &[arg(pg_sys::Oid::from(Instance::here().schema))]);
        let mut expired: Vec<Expired> = (0..leaves.len())
            .filter_map(|at| {
                let name: String = leaves.must(at, 1);
                let leaf = Leaf::parse(name.strip_prefix(PARTS[0])?.strip_prefix('_')?)?;
                let (retention, detach) = *classes.get(&i32::from(leaf.class))?;
                let cutoff = now.plus(-retention);
                (leaf.ends_ms() <= ms(cutoff)).then_some((leaf, cutoff, detach))
            })
            .collect();
        expired.sort_unstable_by_key(|(leaf, ..)| (leaf.starts_ms, leaf.class));
        expired
    })
}

/// Deals with expired leaves, oldest first, until one was removed; leaves the others to the next call, since its locks are held until the transaction ends. Those that `aside` says are
/// passed over.
fn round(now: Instant, aside: impl Fn(&Leaf) -> bool) -> Round {
    let mut round = Round::default();
    for (leaf, cutoff, detach) in expired(now).into_iter().filter(|(leaf, ..)| !aside(leaf)) {
        let done = savepoint::isolated(|| {
            let _settings = ahead::impatient();
            expire::expire(leaf, cutoff, detach)
        });
        let (count, wait) = match done {
            Ok(Done::Dropped) => (&mut round.dropped, None),
            Ok(Done::Detached) => (&mut round.detached, None),
            Ok(Done::Compacted) => (&mut round.compacted, None),
            Ok(Done::HeldUp) => (&mut round.held_up, Some(MUCH_LATER)),
            Ok(Done::Trimmed) => {
                round.trimmed = true;
                break;
            }
            Err((PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, _)) => (&mut round.postponed, Some(AGAIN)),
            Err((PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, _)) => (&mut round.postponed, Some(LATER)),
            Err((code, why)) => {
                ereport!(
                    PgLogLevel::WARNING,
                    code,
                    format!("pg_stint: history partition stint.{}_{} could not be removed", PARTS[0], leaf.suffix()),
                    why
                );
                (&mut round.postponed, Some(MUCH_LATER))
            }
        };
        *count += 1;
        match wait {
            Some(wait) => ASIDE.with_borrow_mut(|aside| aside.insert(leaf, now.plus(wait))),
            None => break,
        };
    }
    round
}

/// Lets go of old events. Returns how many.
fn events(now: Instant) -> usize {
    let Some(retention) = guc::event_retention_s() else { return 0 };
    let max = i64::from(guc::max_batch());
    spi::connect(|session| {
        session.run(&LET_GO, &[arg(now.plus(-retention.saturating_mul(SECOND))), arg(max)]).len() + session.run(&LET_GO_UNUSED, &[arg(max)]).len()
    })
}

/// See the SQL COMMENT of stint.maintain_history.
#[pg_extern(sql = false)]
fn maintain_history() -> TableIterator<
    'static,
    (
        name!(made, i32),
        name!(dropped, i32),
        name!(detached, i32),
        name!(compacted, i32),
        name!(held_up, i32),
        name!(postponed, i32),
        name!(more, bool),
    ),
> {
    shmem::required();
    let _owner = spi::Identity::owner();
    let now = Instant::now();
    let made = ahead::make(now);
    let round = round(now, |_| false);
    let more = round.trimmed || round.dropped + round.detached + round.compacted > 0;
    TableIterator::once((made.leaves, round.dropped, round.detached, round.compacted, round.held_up, round.postponed, more))
}

/// Whether it is time again.
pub fn due() -> bool {
    Instant::now() >= NEXT.get()
}

/// One round for the maintenance worker.
pub fn step() -> bool {
    let now = Instant::now();
    ASIDE.with_borrow_mut(|aside| aside.retain(|_, until| *until > now));
    let round = round(now, |leaf| ASIDE.with_borrow(|aside| aside.contains_key(leaf)));
    let more = round.trimmed || round.dropped + round.detached + round.compacted > 0;
    if !more {
        NEXT.set(now.plus(if round.postponed > 0 { AGAIN } else { EVERY }));
    }
    more
}

/// Whether it is time again to let events go.
pub fn events_due() -> bool {
    Instant::now() >= NEXT_EVENTS.get()
}

/// One bounded round for the maintenance worker.
pub fn let_go_of_events() -> bool {
    let now = Instant::now();
    let more = events(now) > 0;
    if !more {
        NEXT_EVENTS.set(now.plus(EVERY));
    }
    more
}
