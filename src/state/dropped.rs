//! Dropped state tables. PostgreSQL's own dependencies would do for the tables beside them, but a dump does not carry those, and rows have none.

use crate::changelog::capture;
use crate::record::projection;
use crate::spi::{self, Identity, Session, Statement, arg};
use pgrx::prelude::*;

static DROPPED: Statement = Statement::new(
    c"SELECT d.objid FROM pg_event_trigger_dropped_objects() d
      WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0
        AND d.objid IN (SELECT s.relation::oid FROM stint.state_config s UNION ALL SELECT c.relation::oid FROM stint.captures c
                        UNION ALL SELECT l.relation::oid FROM stint.lookup_config l)",
    &[],
);
/// The tables beside a state table that are still there.
static BESIDE: Statement = Statement::new(
    c"SELECT format('%I.%I', n.nspname, t.relname)
      FROM (SELECT c.gone_keys::oid AS oid FROM stint.captures c WHERE c.relation = $1
            UNION SELECT s.tombstones::oid FROM stint.state_config s WHERE s.relation = $1) b
      JOIN pg_class t ON t.oid = b.oid JOIN pg_namespace n ON n.oid = t.relnamespace",
    &[pg_sys::OIDOID],
);
static FORGET: [Statement; 3] = [
    Statement::new(c"DELETE FROM stint.lookup_config l WHERE l.relation = $1", &[pg_sys::OIDOID]),
    Statement::new(c"DELETE FROM stint.state_config s WHERE s.relation = $1", &[pg_sys::OIDOID]),
    // Not those that a session is just committing for: it may be about to read the table, and wait for us. Their readers pass over what is gone.
    Statement::new(
        c"UPDATE stint.consumer_config c SET relations = array_remove(c.relations, $1::regclass)
          WHERE c.consumer IN (SELECT o.consumer FROM stint.consumer_config o WHERE $1 = ANY (o.relations) FOR NO KEY UPDATE SKIP LOCKED)",
        &[pg_sys::OIDOID],
    ),
];

fn forget(session: &Session, relation: pg_sys::Oid) {
    let beside = session.run(&BESIDE, &[arg(relation)]);
    projection::forget(session, relation);
    capture::forget(session, relation);
    for statement in &FORGET {
        session.run(statement, &[arg(relation)]);
    }
    for row in 0..beside.len() {
        session.execute_once(&format!("DROP TABLE {}", beside.must::<String>(row, 1)));
    }
}

/// See [`follow_drop_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_follow_drop_wrapper() -> &'static pg_sys::Pg_finfo_record {
    static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &CALLED_BY_V1
}

/// `stint.follow_drop()`, the event trigger.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn follow_drop_wrapper(_fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    let _owner = Identity::owner();
    spi::connect(|session| {
        let dropped = session.run(&DROPPED, &[]);
        for row in 0..dropped.len() {
            forget(session, dropped.must(row, 1));
        }
    });
    pg_sys::Datum::from(0usize)
}
