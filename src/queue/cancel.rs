//! `stint.cancel`: a waiting task ends at once; a running one is asked to, and its worker learns of it from `extend`.

use super::config;
use super::flow::leave;
use super::late;
use super::store::{self, Outcome};
use crate::history::{self, LeafStatement};
use crate::input;
use crate::shmem::{self, heads};
use crate::spi::{self, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;

static FROM_READY: Statement = Statement::new(
    c"delete from stint.place_ready w
      where w.ctid = any (array(
            select d.ctid from stint.place_ready d where d.queue = $1 and d.id >= $2 and d.id <= $2 order by d.id limit 1 for update))
      returning w.attempt, w.lane, w.priority, w.seq",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static FROM_SCHEDULED: Statement =
    Statement::new(c"delete from stint.place_scheduled s where s.queue = $1 and s.id = $2 returning s.attempt", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

static BLOCKED: Statement =
    Statement::new(c"select from stint.place_blocked b where b.queue = $1 and b.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

static ASK: Statement = Statement::new(
    c"update stint.place_running r set cancel_requested = true, reason = coalesce($3, r.reason) where r.queue = $1 and r.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID],
);

static STATE: LeafStatement = LeafStatement::new(
    "select o.outcome::text
      from {facts} f
      left join {outcomes} o on o.queue = f.queue and o.id = f.id
      where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// See the SQL COMMENT of stint.cancel.
#[pg_extern(sql = false)]
fn cancel(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    reason: Option<&str>,
) -> TableIterator<'static, (name!(outcome, String), name!(status, String))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let reason = input::text("reason", reason);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let (outcome, status) = spi::connect(|session| {
        let queue = config::find(session, name);
        late::decide(|| {
            let key = [arg(name), arg(id)];
            let mut waited = session.run(&FROM_READY, &key);
            if waited.is_empty() {
                waited = session.run(&FROM_SCHEDULED, &key);
            } else {
                let (instance, lane) = (shmem::Instance::here(), waited.must(0, 2));
                heads::stir(instance, lane);
                heads::taken(instance, lane, waited.must(0, 3), waited.must(0, 4));
            }
            if waited.is_empty() && !session.run(&BLOCKED, &key).is_empty() {
                leave::leave_blocked(session, name, &queue, id, &Outcome::waiting("cancelled", reason), now, true)?;
                return Some(("cancelled", "cancelled".to_string()));
            }
            if !waited.is_empty() {
                let outcome = Outcome { outcome: "cancelled", attempt: waited.must(0, 1), lease: None, error: reason, result: None };
                store::outcome(session, name, id, now, &outcome);
                store::announce(&queue, 0);
                return Some(("cancelled", "cancelled".to_string()));
            }
            if !session.run(&ASK, &[arg(name), arg(id), arg(reason)]).is_empty() {
                return Some(("cancel_requested", "running".to_string()));
            }
            let state = history::read(session, &STATE, id, &key);
            if state.is_empty() {
                late::unknown_task(session, name, id);
            }
            Some(("already_finished", state.get::<String>(0, 1)?))
        })
    });
    TableIterator::once((outcome.to_string(), status))
}
