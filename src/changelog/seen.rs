//! What a transaction sees of the state tables, as a snapshot that can be kept: for pins, and for readers that start from rows.

use super::epoch;
use crate::errors::{self, Fault};
use crate::spi::{Session, Statement};
use pgrx::prelude::*;

/// The transaction's own id, if it has one, counts as running in its snapshot: what it will change later lies after what is kept.
static NOW: Statement = Statement::new(
    c"SELECT m.epoch, pg_current_snapshot()::text, pg_current_xact_id_if_assigned()::text,
             EXISTS (SELECT FROM stint.change_log l WHERE l.epoch = m.epoch AND l.xid = pg_current_xact_id_if_assigned()),
             coalesce((SELECT max(t.end_pos) FROM stint.ticks t), 0)
      FROM stint.meta m",
    &[],
);

/// What a transaction sees.
pub struct Sight {
    /// The epoch whose transactions the snapshot names.
    pub epoch: i32,
    /// The snapshot, as text.
    pub snapshot: String,
    /// The end of the last tick that is in it.
    pub pos: i64,
}

/// What the transaction sees now. Runs with the rights of the extension's owner.
pub fn by_transaction(session: &Session, purpose: &str) -> Sight {
    let now = session.run(&NOW, &[]);
    if now.is_empty() {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("there is no state table to {purpose}"))
            .hint("Declare one with stint.create_state.")
            .raise();
    }
    epoch::refuse_in_copy(session);
    if now.must(0, 4) {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, format!("cannot {purpose} in a transaction that has changed a state table"))
            .detail("No other reader ever sees what this transaction sees now.")
            .hint("Commit first, and do it in the next transaction.")
            .raise();
    }
    let seen: String = now.must(0, 2);
    let snapshot = match now.get::<String>(0, 3) {
        Some(own) => stint_core::snapshot::with_running(&seen, &own).unwrap_or_else(|| errors::internal("a snapshot could not be read")),
        None => seen,
    };
    Sight { epoch: now.must(0, 1), snapshot, pos: now.must(0, 5) }
}
