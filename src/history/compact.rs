//! Copies what a partition still needs into a new table, so that the old one can be dropped as a whole. The copies are frozen: they are visible to every snapshot, however old,
//! as the rows they were made of are. That holds only for rows that every snapshot sees, so a partition with a row that came, or went, too recently is left for later.

use pgrx::PgRelation;
use pgrx::prelude::*;
use std::collections::HashSet;

/// A snapshot is open that does not see all rows of the table as they are now.
pub struct TooRecent;

/// Whether every snapshot sees that the row is there.
unsafe fn settled(tuple: &pg_sys::HeapTupleData, oldest: pg_sys::TransactionId) -> bool {
    // SAFETY: the caller's tuple is in a pinned buffer.
    unsafe {
        let header = &*tuple.t_data;
        let frozen = pg_sys::HEAP_XMIN_FROZEN as u16;
        header.t_infomask & frozen == frozen || pg_sys::TransactionIdPrecedes(header.t_choice.t_heap.t_xmin, oldest)
    }
}

/// Copies the rows of `keep` from one table to another of the same columns. Both are locked against everybody else.
pub fn copy(from: pg_sys::Oid, to: pg_sys::Oid, keep: &HashSet<[u8; 16]>) -> Result<(), TooRecent> {
    // SAFETY: both tables are ours, ordinary heaps and locked until the transaction ends, so they stay as they are; an abort closes what an error leaves open.
    unsafe {
        let (old, new) = (PgRelation::open(from), PgRelation::open(to));
        let (columns, copied) = (old.tuple_desc(), new.tuple_desc());
        let kept: Vec<usize> = (0..columns.len()).filter(|at| columns.get(*at).is_some_and(|column| !column.attisdropped)).collect();
        let id = pg_sys::get_attnum(from, c"id".as_ptr()) as usize - 1;
        let oldest = pg_sys::GetOldestNonRemovableTransactionId(old.as_ptr());
        let flags = pg_sys::ScanOptions::SO_TYPE_SEQSCAN | pg_sys::ScanOptions::SO_ALLOW_STRAT;
        let scan = pg_sys::heap_beginscan(old.as_ptr(), &raw mut pg_sys::SnapshotAnyData, 0, std::ptr::null_mut(), std::ptr::null_mut(), flags);
        let command = pg_sys::GetCurrentCommandId(true);
        let mut values = vec![pg_sys::Datum::from(0usize); columns.len()];
        let mut nulls = vec![false; columns.len()];
        let mut all_settled = true;
        while all_settled {
            pg_sys::check_for_interrupts!();
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let buffer = (*scan.cast::<pg_sys::HeapScanDescData>()).rs_cbuf;
            pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
            let state = pg_sys::HeapTupleSatisfiesVacuum(tuple, oldest, buffer);
            pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
            match state {
                pg_sys::HTSV_Result::HEAPTUPLE_DEAD => continue,
                pg_sys::HTSV_Result::HEAPTUPLE_LIVE => all_settled = settled(&*tuple, oldest),
                _ => all_settled = false,
            }
            pg_sys::heap_deform_tuple(tuple, columns.as_ptr(), values.as_mut_ptr(), nulls.as_mut_ptr());
            let of: Option<pgrx::Uuid> = FromDatum::from_datum(values[id], nulls[id]);
            if all_settled && of.is_some_and(|of| keep.contains(of.as_bytes())) {
                let mut row: Vec<pg_sys::Datum> = kept.iter().map(|at| values[*at]).collect();
                let mut absent: Vec<bool> = kept.iter().map(|at| nulls[*at]).collect();
                let copy = pg_sys::heap_form_tuple(copied.as_ptr(), row.as_mut_ptr(), absent.as_mut_ptr());
                pg_sys::heap_insert(new.as_ptr(), copy, command, pg_sys::HEAP_INSERT_FROZEN as i32, std::ptr::null_mut());
                pg_sys::heap_freetuple(copy);
            }
        }
        pg_sys::heap_endscan(scan);
        if all_settled { Ok(()) } else { Err(TooRecent) }
    }
}
