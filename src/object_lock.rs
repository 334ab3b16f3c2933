//! Locks that line up what must not run twice at once and has no row to lock: object locks on the schema, under sub-ids that nothing else uses. They take no
//! transaction id, write nothing, disturb no vacuum, and cannot be taken by users.

use crate::errors::Fault;
use crate::spi::home;
use pgrx::prelude::*;

/// What is locked.
#[derive(Clone, Copy)]
#[repr(u16)]
pub enum Lock {
    /// Making ticks.
    Ticks = 1,
    /// Making roll-ups.
    RollUps = 2,
    /// Letting changes go, against which tags take it shared.
    Retention = 5,
}

/// Takes a lock until the transaction ends. Answers false where it is held and `conditional` says not to wait.
pub fn take(lock: Lock, conditional: bool) -> bool {
    acquire(lock, pg_sys::ExclusiveLock as i32, conditional)
}

/// Takes a lock beside others that share it, until the transaction ends; waits for one who holds it alone.
pub fn share(lock: Lock) {
    acquire(lock, pg_sys::ShareLock as i32, false);
}

fn acquire(lock: Lock, mode: i32, conditional: bool) -> bool {
    // SAFETY: a lock tag as SET_LOCKTAG_OBJECT makes it.
    unsafe {
        let tag = pg_sys::LOCKTAG {
            locktag_field1: pg_sys::MyDatabaseId.to_u32(),
            locktag_field2: pg_sys::NamespaceRelationId.to_u32(),
            locktag_field3: home().schema.to_u32(),
            locktag_field4: lock as u16,
            locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        };
        let got = pg_sys::LockAcquire(&tag, mode, false, conditional);
        got != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
    }
}

/// Whether the transaction has written something: then its own id would count as ended in a snapshot taken now.
pub fn written() -> bool {
    // SAFETY: reads this backend's transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// An error in a transaction that has written, or that keeps one snapshot.
pub fn refuse_written(what: &str, call: &str) {
    if written() {
        refuse(what, "has written something", call)
    }
    // SAFETY: as above.
    if unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        refuse(what, "does not run under READ COMMITTED", call)
    }
}

/// The error for a transaction in which something cannot be done.
pub fn refuse(what: &str, why: &str, call: &str) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, format!("cannot {what} in a transaction that {why}"))
        .hint(format!("Call {call} in a transaction of its own under READ COMMITTED."))
        .raise()
}
