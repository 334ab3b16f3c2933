//! `stint.pin`: keeps the calling transaction's snapshot.

use crate::changelog::epoch;
use crate::errors::{self, Fault};
use crate::input;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;

/// The snapshot, and the last tick that is in it. The transaction's own id, if it has one, counts as running in its snapshot: what it will change after the pin lies after the pin.
static NOW: Statement = Statement::new(
    c"SELECT m.epoch, pg_current_snapshot()::text, pg_current_xact_id_if_assigned()::text,
             EXISTS (SELECT FROM stint.change_log l WHERE l.epoch = m.epoch AND l.xid = pg_current_xact_id_if_assigned()),
             coalesce((SELECT max(t.end_pos) FROM stint.ticks t), 0)
      FROM stint.meta m",
    &[],
);
/// Numbers above `high` are drawn from now on, by transactions that the snapshot, which is older, does not see.
static PIN: Statement = Statement::new(
    c"INSERT INTO stint.pins (epoch, snapshot, comment, pos, high) SELECT $1, $2::pg_snapshot, $3, $4, q.last_value FROM stint.change_seq q RETURNING pin",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// Pins what the transaction sees. Runs with the rights of the extension's owner.
pub fn make(session: &Session, comment: Option<&str>) -> i64 {
    let now = session.run(&NOW, &[]);
    if now.is_empty() {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "there is no state table to pin")
            .hint("Declare one with stint.create_state.")
            .raise();
    }
    epoch::refuse_in_copy(session);
    if now.must(0, 4) {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "cannot pin in a transaction that has changed a state table")
            .detail("No other reader ever sees what this transaction sees now.")
            .hint("Commit first, and pin in the next transaction.")
            .raise();
    }
    let seen: String = now.must(0, 2);
    let snapshot = match now.get::<String>(0, 3) {
        Some(own) => stint_core::snapshot::with_running(&seen, &own).unwrap_or_else(|| errors::internal("a snapshot could not be read")),
        None => seen,
    };
    session.run(&PIN, &[arg(now.must::<i32>(0, 1)), arg(snapshot), comment.and_then(arg), arg(now.must::<i64>(0, 5))]).must(0, 1)
}

/// `stint.pin`.
#[pg_extern(sql = false)]
fn pin(comment: Option<&str>) -> i64 {
    crate::shmem::required();
    let comment = input::text("comment", comment);
    connect(|session| {
        let _owner = Identity::owner();
        make(session, comment)
    })
}
