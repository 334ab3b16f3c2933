//! `stint.promote`: moves scheduled tasks whose time has come to ready, in the order of their times.

use super::checkpoint;
use super::config;
use super::lines::{self, Eye};
use super::store::{self, Ticket};
use crate::changelog::epoch;
use crate::shmem::{self, heads};
use crate::spi::{self, Statement, arg};
use crate::values::Instant;
use crate::{guc, input};
use pgrx::prelude::*;
use std::collections::HashMap;

static DUE: Statement = Statement::new(
    c"delete from stint.place_scheduled s
      where s.ctid = any (array(
            select d.ctid
            from stint.place_scheduled d
            where d.run_at >= $3 and d.run_at <= $1
            order by d.run_at
            limit $2
            for update skip locked))
      returning s.queue::text, s.id, s.lane, s.priority, s.tokens, s.attempt, s.counted, s.run_at, s.event::text",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID],
);

static FIRST: Statement =
    Statement::new(c"select s.run_at from stint.place_scheduled s where s.run_at >= $1 order by s.run_at limit 1", &[pg_sys::TIMESTAMPTZOID]);

fn promote_due(max: usize) -> i32 {
    spi::connect(|session| {
        let now = Instant::now();
        let Some(first) = lines::first_instant(session, heads::SCHEDULED, &FIRST).filter(|first| *first <= now.0) else { return 0 };
        let rows = session.run(&DUE, &[arg(now), arg(max as i64), arg(Instant(first))]);
        let mut due: Vec<(Instant, String, Ticket, Option<String>)> = (0..rows.len())
            .map(|at| {
                let ticket = Ticket {
                    id: rows.must(at, 2),
                    lane: rows.must(at, 3),
                    priority: rows.must(at, 4),
                    tokens: rows.get(at, 5),
                    attempt: rows.must(at, 6),
                    counted: rows.must(at, 7),
                };
                (rows.must(at, 8), rows.must(at, 1), ticket, rows.get(at, 9))
            })
            .collect();
        due.sort_by_key(|(run_at, _, ticket, _)| (run_at.0, *ticket.id.as_bytes()));
        let mut ready: HashMap<&str, usize> = HashMap::new();
        for (_, name, ticket, event) in &due {
            if let Some(event) = event {
                // The wait timed out; an event that is emitted later changes nothing about that.
                checkpoint::save(session, name, ticket.id, event, None, ticket.attempt, now);
            }
            store::to_ready(session, name, ticket);
            *ready.entry(name).or_default() += 1;
        }
        for (name, tasks) in ready {
            if let Some(queue) = config::lookup(session, name) {
                store::announce(&queue, tasks);
            }
        }
        i32::try_from(due.len()).unwrap_or(i32::MAX)
    })
}

/// See the SQL COMMENT of stint.promote.
#[pg_extern(sql = false)]
fn promote(max: Option<i32>) -> i32 {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = spi::Identity::owner();
    spi::connect(epoch::refuse_in_copy);
    promote_due(max)
}

thread_local! {
    static EYE: Eye = Eye::on(heads::SCHEDULED);
}

/// Whether a scheduled task's time may have come.
pub fn due() -> bool {
    EYE.with(Eye::due)
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    promote_due(usize::try_from(guc::max_batch()).unwrap_or(1)) > 0
}
