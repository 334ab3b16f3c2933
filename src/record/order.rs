//! The order of the keys of a projected table.
//!
//! An event draws its number while it holds the keys it touches, to the end of its transaction: so for each key the numbers rise in the order of commits, and
//! the fold of the record by number is what the table went through. Keys are hashed into a bounded number of slots per table, taken in ascending order; who
//! needs many takes the whole table. The locks are object locks under sub-ids that nothing else uses: they write nothing and users cannot take them.

use crate::spi::home;
use pgrx::prelude::*;

/// Slots of a table, a power of two.
pub const SLOTS: i32 = 256;
/// From this many on the whole table is locked instead.
const MANY: usize = 32;
/// The sub-ids: the table as a whole, the one session that folds it, and the first slot.
const WHOLE: u16 = 1;
const FOLDER: u16 = 2;
const FIRST: u16 = 16;

fn lock(relation: pg_sys::Oid, sub: u16, mode: u32, conditional: bool) -> bool {
    // SAFETY: a lock tag as SET_LOCKTAG_OBJECT makes it. The class is our schema's oid, which no catalogue has, so that nothing of PostgreSQL's meets it.
    unsafe {
        let tag = pg_sys::LOCKTAG {
            locktag_field1: pg_sys::MyDatabaseId.to_u32(),
            locktag_field2: home().schema.to_u32(),
            locktag_field3: relation.to_u32(),
            locktag_field4: sub,
            locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        };
        pg_sys::LockAcquire(&tag, mode as i32, false, conditional) != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
    }
}

/// Takes the order of some keys of a table until the transaction ends; `slots` ascend.
pub fn keys(relation: pg_sys::Oid, slots: &[i32]) {
    if slots.len() >= MANY {
        return all(relation);
    }
    lock(relation, WHOLE, pg_sys::RowExclusiveLock, false);
    for slot in slots {
        lock(relation, FIRST + u16::try_from(*slot).unwrap_or(0), pg_sys::ExclusiveLock, false);
    }
}

/// Takes the order of all keys of a table until the transaction ends.
pub fn all(relation: pg_sys::Oid) {
    lock(relation, WHOLE, pg_sys::ExclusiveLock, false);
}

/// Becomes the one session that folds events into a table outside of the transactions that record them. Answers false where another is and `conditional` says
/// not to wait.
pub fn folder(relation: pg_sys::Oid, conditional: bool) -> bool {
    lock(relation, FOLDER, pg_sys::ExclusiveLock, conditional)
}
