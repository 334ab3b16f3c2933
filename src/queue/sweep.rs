//! `stint.sweep`: takes back the tasks of workers that died. A lapsed attempt counts; the task is claimable again at once, or fails when its attempts are used
//! up, or is cancelled when that was asked.

use super::store::{self, Attempt, Outcome, Ticket};
use super::usage::Usage;
use super::{config, finish, lines};
use crate::budget::live::Held;
use crate::shmem::{self, heads};
use crate::spi::{self, Statement, arg};
use crate::values::Instant;
use crate::{guc, input};
use pgrx::prelude::*;
use std::collections::HashMap;

/// Deletes lapsed running rows that no other session holds: a heartbeat or a callback under way wins, since the row is looked at again once locked.
static LAPSED: Statement = Statement::new(
    c"delete from stint.place_running r
      where r.ctid = any (array(
            select d.ctid
            from stint.place_running d
            where d.expires_at >= $3 and d.expires_at <= $1 and coalesce(d.extended_until, d.expires_at) <= $1
            order by d.expires_at
            limit $2
            for update skip locked))
      returning r.queue::text, r.id, r.lease, r.lane, r.priority, r.seq, r.tokens, r.attempt, r.counted, r.started_at, r.worker::text,
                r.cancel_requested, r.reason, r.budgets, r.reserved, r.run_id::text, r.trace_id::text",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID],
);

static FIRST: Statement = Statement::new(
    c"select r.expires_at from stint.place_running r where r.expires_at >= $1 order by r.expires_at limit 1",
    &[pg_sys::TIMESTAMPTZOID],
);

/// What a round did.
#[derive(Default)]
struct Swept {
    lapsed: i32,
    retried: i32,
    failed: i32,
    cancelled: i32,
}

const LAPSE: &str = "the lease ran out before the worker answered";

fn sweep_lapsed(max: usize) -> Swept {
    let now = Instant::now();
    let mut swept = Swept::default();
    spi::connect(|session| {
        let Some(first) = lines::first_instant(session, heads::RUNNING, &FIRST).filter(|first| *first <= now.0) else { return };
        let rows = session.run(&LAPSED, &[arg(now), arg(max as i64), arg(Instant(first))]);
        let mut ready: HashMap<String, usize> = HashMap::new();
        for at in 0..rows.len() {
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
            let (lease, started_at) = (rows.must(at, 3), rows.must(at, 10));
            let attempt = Attempt { id: ticket.id, attempt: ticket.attempt, lease, started_at, worker: &worker, held: held.as_ref() };
            let usage = Usage::default().or_known(run_id.as_deref(), trace_id.as_deref());
            store::attempt(session, &name, &attempt, "lapsed", now, Some(LAPSE), &usage);
            swept.lapsed += 1;
            let again = ready.entry(name.clone()).or_default();
            // A queue whose settings are gone (deleted by hand) still gets its tasks back.
            let queue = config::lookup(session, &name);
            let max_attempts = queue.map_or(i32::MAX, |queue| finish::max_attempts(session, &name, &queue, ticket.id));
            let reason: Option<String> = rows.get(at, 13);
            if rows.must(at, 12) {
                let outcome = Outcome { outcome: "cancelled", attempt: ticket.attempt, lease: None, error: reason.as_deref(), result: None };
                store::outcome(session, &name, ticket.id, now, &outcome);
                swept.cancelled += 1;
            } else if ticket.counted >= max_attempts {
                let outcome = Outcome { outcome: "failed", attempt: ticket.attempt, lease: None, error: Some(LAPSE), result: None };
                store::outcome(session, &name, ticket.id, now, &outcome);
                swept.failed += 1;
            } else {
                store::back_to_ready(session, &name, &ticket, rows.must(at, 6));
                swept.retried += 1;
                *again += 1;
            }
        }
        for (name, tasks) in ready {
            if let Some(queue) = config::lookup(session, &name) {
                store::announce(&queue, tasks);
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
    let swept = sweep_lapsed(max);
    TableIterator::once((swept.lapsed, swept.retried, swept.failed, swept.cancelled))
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    sweep_lapsed(usize::try_from(guc::max_batch()).unwrap_or(1)).lapsed > 0
}
