//! `stint.reprioritize`: moves a waiting task up or down. Its facts stay as they were; its place carries the priority that claims go by.

use super::config;
use super::late;
use super::store::{self, Ticket};
use crate::history::{self, LeafStatement};
use crate::input;
use crate::shmem::{self, Instance, heads};
use crate::spi::{self, Rows, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;

static FROM_READY: Statement = Statement::new(
    c"delete from stint.place_ready w
      where w.ctid = any (array(
            select d.ctid from stint.place_ready d where d.queue = $1 and d.id >= $2 and d.id <= $2 order by d.id limit 1 for update))
      returning w.lane, w.tokens, w.attempt, w.counted, w.seq, w.priority",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static FROM_SCHEDULED: Statement = Statement::new(
    c"delete from stint.place_scheduled s where s.queue = $1 and s.id = $2 and s.event is null returning s.lane, s.tokens, s.attempt, s.counted, s.run_at",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

// In place: an emit, or whoever ends what the task waits for, then finds it however they meet.
static AWAITING: Statement = Statement::new(
    c"update stint.place_scheduled s set priority = $3 where s.queue = $1 and s.id = $2 and s.event is not null",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID],
);
static BLOCKED: Statement = Statement::new(
    c"update stint.place_blocked b set priority = $3 where b.queue = $1 and b.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID],
);

static STATE: LeafStatement = LeafStatement::new(
    "select r.id is not null, o.outcome::text
      from {facts} f
      left join stint.place_running r on r.queue = f.queue and r.id = f.id
      left join {outcomes} o on o.queue = f.queue and o.id = f.id
      where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

fn ticket(row: &Rows, id: pgrx::Uuid, priority: i32) -> Ticket {
    Ticket { id, lane: row.must(0, 1), priority, tokens: row.get(0, 2), attempt: row.must(0, 3), counted: row.must(0, 4) }
}

/// See the SQL COMMENT of stint.reprioritize.
#[pg_extern(sql = false)]
fn reprioritize(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    priority: Option<i32>,
) -> TableIterator<'static, (name!(outcome, String), name!(status, String))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let priority = input::given("priority", priority);
    let _owner = spi::Identity::owner();
    let (outcome, status) = spi::connect(|session| {
        let queue = config::find(session, name);
        late::decide(|| {
            let key = [arg(name), arg(id)];
            let ready = session.run(&FROM_READY, &key);
            if !ready.is_empty() {
                heads::taken(Instance::here(), ready.must(0, 1), ready.must(0, 6), ready.must(0, 5));
                // Where it stood in its line: among the tasks of its new priority it keeps its age.
                store::place_ready(session, name, &ticket(&ready, id, priority), ready.must(0, 5));
                store::announce(&queue, 0);
                return Some(("reprioritized", "ready".to_string()));
            }
            let scheduled = session.run(&FROM_SCHEDULED, &key);
            if !scheduled.is_empty() {
                store::place_scheduled(session, name, &ticket(&scheduled, id, priority), scheduled.must::<Instant>(0, 5), None);
                return Some(("reprioritized", "scheduled".to_string()));
            }
            for (statement, status) in [(&AWAITING, "scheduled"), (&BLOCKED, "blocked")] {
                if !session.run(statement, &[arg(name), arg(id), arg(priority)]).is_empty() {
                    return Some(("reprioritized", status.to_string()));
                }
            }
            let state = history::read(session, &STATE, id, &key);
            if state.is_empty() {
                late::unknown_task(session, name, id);
            }
            if state.must(0, 1) {
                return Some(("already_running", "running".to_string()));
            }
            Some(("already_finished", state.get::<String>(0, 2)?))
        })
    });
    TableIterator::once((outcome.to_string(), status))
}
