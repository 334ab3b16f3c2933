//! `stint.extend`: the heartbeat. Moves the end of a lease, keeps progress and run ids, and brings the news that the task was cancelled or lost.

use super::config;
use super::late;
use crate::answer::Table;
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb};
use crate::{input, shmem};
use pgrx::prelude::*;

/// A lease past its time but not yet swept is still the live one. `least` and `greatest` leave nulls out. It is renewed by microseconds: a day of an interval is not always 24 hours.
static EXTEND: Statement = Statement::new(
    c"update stint.place_running r
      set extended_until = least($4 + interval '1 microsecond' * coalesce($5, (extract(epoch from r.expires_at - r.started_at) * 1000000)::bigint), r.deadline),
          heartbeat_at = $4,
          heartbeat_gap = greatest(r.heartbeat_gap, $4 - coalesce(r.heartbeat_at, r.started_at)),
          progress = coalesce($6, r.progress),
          run_id = coalesce($7, r.run_id),
          trace_id = coalesce($8, r.trace_id)
      where r.queue = $1 and r.id = $2 and r.lease = $3
      returning r.cancel_requested, r.extended_until",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID, pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID, pg_sys::JSONBOID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// See the SQL COMMENT of stint.extend.
#[pg_extern(sql = false)]
fn extend(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    duration: Option<RawInterval>,
    progress: Option<RawJsonb>,
    run_id: Option<&str>,
    trace_id: Option<&str>,
) -> Table<(name!(status, String), name!(expires_at, Option<Instant>), name!(expires_in_ms, Option<i64>))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let duration = duration.map(|duration| input::lease("duration", duration));
    input::json("progress", progress);
    input::reference("run_id", run_id);
    input::reference("trace_id", trace_id);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        config::find(session, name);
        let row = session.run(&EXTEND, &[arg(name), arg(id), arg(lease), arg(now), arg(duration), arg(progress), arg(run_id), arg(trace_id)]);
        if row.is_empty() {
            late::known(session, name, id);
            return ("lost".to_string(), None, None);
        }
        let status = if row.must(0, 1) { "cancel_requested" } else { "held" };
        let until: Instant = row.must(0, 2);
        (status.to_string(), Some(until), Some(until.ms_since(now)))
    });
    Table::one(answer)
}
