//! `stint.checkpoint` and `stint.checkpoints`: steps a task has finished, kept from one attempt to the next.

use super::{config, late};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawJsonb};
use crate::{input, shmem};
use pgrx::prelude::*;

/// The live attempt of a lease, which stays the live one until this transaction ends: an end of the attempt waits, a sweep steps over it.
static HOLD: Statement = Statement::new(
    c"select r.attempt from stint.place_running r where r.queue = $1 and r.id = $2 and r.lease = $3 for key share",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID],
);

static SAVE: Statement = Statement::new(
    c"insert into stint.task_checkpoints (queue, id, step, value, attempt, saved_at) values ($1, $2, $3, $4, $5, $6)
      on conflict (queue, id, step) do nothing",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID, pg_sys::JSONBOID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID],
);

static KEPT: Statement = Statement::new(
    c"select c.value from stint.task_checkpoints c where c.queue = $1 and c.id = $2 and c.step = $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID],
);

static ALL: Statement = Statement::new(
    c"select c.step::text, c.value, c.attempt, c.saved_at
      from stint.task_checkpoints c
      where c.queue = $1 and c.id = $2
      order by c.saved_at, c.step",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// Keeps the value of a step; false where it has one already.
pub fn save(session: &Session, name: &str, id: pgrx::Uuid, step: &str, value: Option<RawJsonb>, attempt: i32, now: Instant) -> bool {
    !session.run(&SAVE, &[arg(name), arg(id), arg(step), arg(value), arg(attempt), arg(now)]).is_empty()
}

/// What is kept of a step: `None` where nothing is, `Some(None)` where it has no value.
pub fn kept(session: &Session, name: &str, id: pgrx::Uuid, step: &str) -> Option<Option<RawJsonb>> {
    let row = session.run(&KEPT, &[arg(name), arg(id), arg(step)]);
    (!row.is_empty()).then(|| row.lift(0, 1).map(RawJsonb))
}

/// See the SQL COMMENT of stint.checkpoint.
#[pg_extern(sql = false)]
fn checkpoint(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    step: Option<&str>,
    value: Option<RawJsonb>,
) -> TableIterator<'static, (name!(status, String), name!(value, Option<RawJsonb>))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let step = input::given("step", input::reference("step", step));
    let value = input::given("value", input::json("value", value));
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        config::find(session, name);
        let live = session.run(&HOLD, &[arg(name), arg(id), arg(lease)]);
        if live.is_empty() {
            late::known(session, name, id);
            return ("lost", None);
        }
        if save(session, name, id, step, Some(value), live.must(0, 1), now) {
            return ("saved", Some(value));
        }
        ("kept", kept(session, name, id, step).flatten())
    });
    TableIterator::once((answer.0.to_string(), answer.1))
}

/// See the SQL COMMENT of stint.checkpoints.
#[pg_extern(sql = false)]
fn checkpoints(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
) -> TableIterator<'static, (name!(step, String), name!(value, Option<RawJsonb>), name!(attempt, i32), name!(saved_at, Instant))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let _owner = spi::Identity::owner();
    let steps: Vec<_> = spi::connect(|session| {
        config::find(session, name);
        late::known(session, name, id);
        let rows = session.run(&ALL, &[arg(name), arg(id)]);
        (0..rows.len()).map(|at| (rows.must(at, 1), rows.lift(at, 2).map(RawJsonb), rows.must(at, 3), rows.must(at, 4))).collect()
    });
    TableIterator::new(steps)
}
