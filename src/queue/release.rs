//! `stint.release`: gives a task back without counting the attempt.

use super::late::{self, Answer, Late};
use super::store::{self, Outcome};
use super::usage::Usage;
use super::{config, finish};
use crate::answer::Table;
use crate::spi;
use crate::values::Instant;
use crate::{input, shmem};
use pgrx::prelude::*;
use stint_core::verdict::Call;

/// See the SQL COMMENT of stint.release.
#[pg_extern(sql = false)]
fn release(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
) -> Table<(name!(outcome, String), name!(first, bool), name!(status, String))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        let queue = config::find(session, name);
        late::decide(|| {
            let Some(ran) = finish::end(session, name, id, lease) else {
                let usage = &Usage::default();
                let late = Late { name, queue: &queue, id, lease, now, call: Call::Release, result: None, patient: true, usage };
                return late::call(session, &late, &mut Vec::new());
            };
            let usage = Usage::default().or_known(ran.run_id.as_deref(), ran.trace_id.as_deref());
            if ran.cancel_requested {
                store::attempt(session, name, &ran.attempt(lease), "cancelled", now, None, &usage);
                let reason = ran.reason.as_deref();
                let outcome = Outcome { outcome: "cancelled", attempt: ran.ticket.attempt, lease: Some(lease), error: reason, result: None };
                store::outcome(session, name, id, now, &outcome);
                store::announce(&queue, 0);
                return Some(Answer::first("cancelled", None, "cancelled"));
            }
            store::attempt(session, name, &ran.attempt(lease), "released", now, None, &usage);
            store::back_to_ready(session, name, &ran.ticket, ran.seq);
            store::announce(&queue, 1);
            Some(Answer::first("released", None, "ready"))
        })
    });
    Table::one((answer.outcome.to_string(), answer.first, answer.status))
}
