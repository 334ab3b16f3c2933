//! `stint.purge_queue`: cancels the waiting tasks of a queue.

use super::config::{self, Queue};
use super::flow::leave;
use super::store::{self, Outcome};
use crate::shmem::{self, Instance, heads};
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::Instant;
use crate::{guc, input};
use pgrx::prelude::*;

static FROM_READY: Statement = Statement::new(
    c"delete from stint.place_ready w
      where w.ctid = any (array(select d.ctid from stint.place_ready d where d.queue = $1 order by d.id limit $2 for update skip locked))
      returning w.id, w.attempt, w.lane, w.priority, w.seq",
    &[pg_sys::TEXTOID, pg_sys::INT8OID],
);

static FROM_SCHEDULED: Statement = Statement::new(
    c"delete from stint.place_scheduled s
      where s.ctid = any (array(select d.ctid from stint.place_scheduled d where d.queue = $1 order by d.id limit $2 for update skip locked))
      returning s.id, s.attempt, null::int, null::int, null::bigint",
    &[pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// The latest first: none of them then ends because one it depends on did.
static BLOCKED: Statement = Statement::new(
    c"select b.id from stint.place_blocked b where b.queue = $1 and b.id <= $2 order by b.id desc limit $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT8OID],
);

/// Why, where the caller gives no reason.
const PURGE: &str = "the queue was purged";

fn cancel_all(session: &Session, name: &str, rows: &Rows, reason: &str, now: Instant) {
    for at in 0..rows.len() {
        let outcome = Outcome { outcome: "cancelled", attempt: rows.must(at, 2), lease: None, error: Some(reason), result: None };
        store::outcome_of_many(session, name, rows.must(at, 1), now, &outcome);
        if let Some(lane) = rows.get(at, 3) {
            heads::stir(Instance::here(), lane);
            heads::taken(Instance::here(), lane, rows.must(at, 4), rows.must(at, 5));
        }
    }
    leave::settle(session, rows.len());
}

/// Cancels at most `max` waiting tasks, in batches, so that memory stays bounded whatever `max` is. Returns how many.
fn purge(name: &str, queue: &Queue, max: i64, reason: &str) -> i64 {
    let batch = i64::from(guc::max_batch());
    let now = Instant::now();
    let mut left = max;
    let outcome = Outcome::waiting("cancelled", Some(reason));
    let mut next = Some(pgrx::Uuid::from_bytes([0xff; 16]));
    while let Some(from) = next.take().filter(|_| left > 0) {
        let page: Vec<pgrx::Uuid> = spi::connect(|session| {
            let rows = session.run(&BLOCKED, &[arg(name), arg(from), arg(left.min(batch))]);
            (0..rows.len()).map(|at| rows.must(at, 1)).collect()
        });
        for id in &page {
            // What another session holds stays; its turn comes when what it waits for has ended.
            left -= i64::from(spi::connect(|session| leave::leave_blocked(session, name, queue, *id, &outcome, now, false)).is_some());
        }
        next = page.last().copied().filter(|last| last.as_bytes() != from.as_bytes());
    }
    for statement in [&FROM_READY, &FROM_SCHEDULED] {
        while left > 0 {
            let gone = spi::connect(|session| {
                let rows = session.run(statement, &[arg(name), arg(left.min(batch))]);
                cancel_all(session, name, &rows, reason, now);
                rows.len() as i64
            });
            left -= gone;
            if gone == 0 {
                break;
            }
        }
    }
    max - left
}

/// See the SQL COMMENT of stint.purge_queue.
#[pg_extern(sql = false)]
fn purge_queue(queue: Option<&str>, max: Option<i64>, reason: Option<&str>) -> i64 {
    shmem::required();
    let name = input::name("queue", queue);
    let max = max.map_or(i64::MAX, |max| input::at_least("max", max, 1));
    let reason = input::text("reason", reason).unwrap_or(PURGE);
    let _owner = spi::Identity::owner();
    let queue = spi::connect(|session| config::find(session, name));
    let cancelled = purge(name, &queue, max, reason);
    if cancelled > 0 {
        store::announce(&queue, 0);
    }
    cancelled
}
