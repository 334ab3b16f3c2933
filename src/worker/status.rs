//! The state of launcher and workers, read from shared memory for `stint.doctor()` and `stint.maintenance`.

use crate::shmem::{self, workers};
use crate::values::Instant;
use pgrx::prelude::*;

/// One row: whether the library was preloaded, the launcher's process, and when there was last no room for a worker.
#[pg_extern(sql = false)]
fn launcher_state() -> TableIterator<'static, (name!(preloaded, bool), name!(pid, Option<i32>), name!(refused_at, Option<Instant>))> {
    let (pid, refused_at) = workers::launcher();
    TableIterator::once((shmem::get().is_some(), pid, refused_at))
}

/// One row for each database with a worker, or waiting for one.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the columns of the result
fn worker_state() -> TableIterator<
    'static,
    (
        name!(database, pg_sys::Oid),
        name!(pid, Option<i32>),
        name!(started_at, Option<Instant>),
        name!(last_round, Option<Instant>),
        name!(last_clean_round, Option<Instant>),
        name!(last_error, Option<String>),
        name!(last_error_at, Option<Instant>),
    ),
> {
    TableIterator::new(
        workers::reports().into_iter().map(|r| (r.database.into(), r.pid, r.started_at, r.round_at, r.clean_round_at, r.failure, r.failed_at)),
    )
}
