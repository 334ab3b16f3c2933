//! `stint.annotate`: notes the run and trace id of a running attempt.

use super::{config, late};
use crate::spi::{self, Statement, arg};
use crate::{input, shmem};
use pgrx::prelude::*;

static ANNOTATE: Statement = Statement::new(
    c"update stint.place_running r
      set run_id = coalesce($4, r.run_id), trace_id = coalesce($5, r.trace_id)
      where r.queue = $1 and r.id = $2 and r.lease = $3
      returning r.cancel_requested",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// See the SQL COMMENT of stint.annotate.
#[pg_extern(sql = false)]
fn annotate(queue: Option<&str>, id: Option<pgrx::Uuid>, lease: Option<pgrx::Uuid>, run_id: Option<&str>, trace_id: Option<&str>) -> String {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    input::reference("run_id", run_id);
    input::reference("trace_id", trace_id);
    let _owner = spi::Identity::owner();
    let status = spi::connect(|session| {
        config::find(session, name);
        let row = session.run(&ANNOTATE, &[arg(name), arg(id), arg(lease), arg(run_id), arg(trace_id)]);
        match row.get::<bool>(0, 1) {
            Some(true) => "cancel_requested",
            Some(false) => "held",
            None => {
                late::known(session, name, id);
                "lost"
            }
        }
    });
    status.to_string()
}
