//! The locks of a merge, in the one order of docs/locks.md: the removals of the table, the table, its rows by key. The table is locked once and as strongly as it
//! will be needed, before any row is: two that held a weaker lock on it, or rows, while they waited for the stronger one would wait for each other.

use super::plans::{Plans, Steps};
use super::rounds::Round;
use crate::errors::Fault;
use crate::savepoint;
use crate::spi::{self, Session, arg};
use crate::values::RawJsonb;
use pgrx::prelude::*;
use stint_core::state::compile::Kind;

/// Who else may write the keys of a batch meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// Whoever else merges.
    Shared,
    /// Nobody: the order of the keys is held, or the one right to fold the table is, and nothing but events is written to it.
    Ordered,
}

/// Takes what the rounds of a batch need, so that none of them has to wait out of order.
pub fn take(session: &Session, plans: &Plans, rows: RawJsonb, rounds: &[Round], keys: Keys) {
    if rounds.iter().all(|round| round.length == 0) {
        return;
    }
    let removes = rounds.iter().any(|round| matches!(plans.steps(round.kind), Steps::Remove { .. }));
    // One round of upserts takes its rows in order by itself.
    if !removes && rounds.len() == 1 {
        if keys == Keys::Shared && rounds[0].kind == Kind::Upsert {
            share_table(plans);
        }
        return;
    }
    let batch = [arg(rows)];
    let remembers = removes && plans.tombstones.is_some();
    match keys {
        Keys::Ordered => {
            lock_rows(session, plans, &batch);
        }
        Keys::Shared => table_and_rows(session, plans, &batch, rounds, remembers),
    }
    if remembers && keeps_snapshot() {
        let latest: i64 = session.run_prepared_latest(plans.count_absent_and_present.plan(), &batch).must(0, 1);
        if absent_and_present(session, plans, &batch).0 != latest {
            serialization_failure(plans);
        }
    }
}

/// How often a batch lets go what it has locked and begins anew before it keeps other writers out.
const ATTEMPTS: usize = 3;

/// Locks table and rows. A row that somebody else is inserting cannot be locked or waited for in key order, nor does its writer see the tombstone of its key: where
/// that matters and a key has no row yet, other writers are kept out.
fn table_and_rows(session: &Session, plans: &Plans, batch: &[spi::Param], rounds: &[Round], remembers: bool) {
    let inserts = |round: &Round| matches!(plans.steps(round.kind), Steps::Upsert { .. } | Steps::Remove { owe: Some(_), .. });
    let inserts = rounds.iter().any(inserts);
    let absent = || absent_and_present(session, plans, batch).0 > 0;
    if remembers {
        order_removals(plans);
    }
    // A key that one round deletes is absent in the next.
    let deletes_again = remembers && rounds.iter().any(|round| round.number > 1);
    let exclude = deletes_again || ((remembers || inserts) && absent());
    if exclude || !beside_others(session, plans, batch, rounds, (inserts, remembers)) {
        session.execute_once(&plans.lock_table);
        lock_rows(session, plans, batch);
    }
}

/// Locks table and rows so that others may go on writing. False where that cannot be: with nothing locked, but after somebody has deleted past us.
fn beside_others(session: &Session, plans: &Plans, batch: &[spi::Param], rounds: &[Round], (inserts, remembers): (bool, bool)) -> bool {
    let lock = || {
        share_table(plans);
        lock_rows(session, plans, batch)
    };
    // Where no merge takes a row away meanwhile, those that are there stay; and with one key there is no order.
    if remembers || plans.owes || rounds.iter().map(|round| round.length).sum::<i32>() == 1 {
        lock();
        return !(remembers && absent_and_present(session, plans, batch).0 > 0);
    }
    // Rows may have gone and come while we waited. To lock those that came would be out of order now, so all are let go first.
    let attempt = || {
        let locked = lock();
        let (absent, present) = absent_and_present(session, plans, batch);
        (usize::try_from(present) == Ok(locked) && !(inserts && absent > 0)).then_some(())
    };
    (0..if inserts { 1 } else { ATTEMPTS }).any(|_| savepoint::attempt(session, attempt).is_some())
}

/// The lock that writing rows wants.
fn share_table(plans: &Plans) {
    // SAFETY: an ordinary relation lock; it ends with the transaction.
    unsafe { pg_sys::LockRelationOid(plans.relation.oid, pg_sys::RowExclusiveLock as i32) };
}

/// Removals of one table that remembers sequences go one after the other, so that none takes away a row another has just looked for. Upserts are not held up.
fn order_removals(plans: &Plans) {
    // SAFETY: a lock that ends with the transaction; it stands for nothing but this, and conflicts with no lock on the table itself.
    unsafe { pg_sys::LockDatabaseObject(pg_sys::RelationRelationId, plans.relation.oid, 0, pg_sys::ExclusiveLock as i32) };
}

/// Locks the rows in key order, so that the snapshot of a removal shows them as they are. Returns how many there are.
pub fn lock_rows(session: &Session, plans: &Plans, batch: &[spi::Param]) -> usize {
    session.run_prepared(plans.lock_rows.plan(), batch).len()
}

/// How many keys have no row, and how many have one.
fn absent_and_present(session: &Session, plans: &Plans, batch: &[spi::Param]) -> (i64, i64) {
    let counted = session.run_prepared(plans.count_absent_and_present.plan(), batch);
    (counted.must(0, 1), counted.must(0, 2))
}

/// Whether the transaction's statements all see one snapshot (REPEATABLE READ, SERIALIZABLE) and so cannot look again.
pub fn keeps_snapshot() -> bool {
    // SAFETY: a plain int of this backend.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// The error where it cannot see what it would have to look at.
pub fn serialization_failure(plans: &Plans) -> ! {
    Fault::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        format!("could not serialize access to {} due to a concurrent merge", plans.relation.qualified),
    )
    .hint("Repeat the transaction.")
    .raise()
}
