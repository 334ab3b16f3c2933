//! The same for many rows at a time: one snapshot, one opening of the table and of each index, one WAL record for the rows of a page, and index entries index by
//! index, in the order of the rows.

use super::{Condition, Index, Opened, Scan, WIDEST, guarded, info_of, raw};
use crate::spi::{Param, Row};
use pgrx::prelude::*;
use std::ffi::c_int;
use std::ptr::null_mut;

/// More of PostgreSQL's own functions without a guard each, for [`guarded`].
mod many {
    use pgrx::pg_sys::*;
    use std::ffi::c_int;

    unsafe extern "C-unwind" {
        pub fn MakeSingleTupleTableSlot(descriptor: TupleDesc, kind: *const TupleTableSlotOps) -> *mut TupleTableSlot;
        pub fn ExecStoreHeapTuple(tuple: HeapTuple, slot: *mut TupleTableSlot, free: bool) -> *mut TupleTableSlot;
        pub fn heap_multi_insert(
            relation: Relation,
            slots: *mut *mut TupleTableSlot,
            count: c_int,
            cid: CommandId,
            options: c_int,
            bistate: BulkInsertState,
        );
    }
}

/// How many rows are made before they are written.
const CHUNK: usize = 100;

/// Rows on their way into a table.
pub struct Batch {
    table: Opened,
    /// Each row's columns, one row after the other.
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    tids: Vec<pg_sys::ItemPointerData>,
}

impl Batch {
    /// Takes rows for that table, about `expected` of them.
    pub fn new(table: Opened, expected: usize) -> Self {
        let width = table.known.width;
        Batch { table, values: Vec::with_capacity(expected * width), nulls: Vec::with_capacity(expected * width), tids: Vec::with_capacity(expected) }
    }

    /// Adds a row of these values of the table's columns, in their order; those left out at the end are null. What they point to must last until [`Batch::write`].
    pub fn push(&mut self, values: impl IntoIterator<Item = Param>) {
        let known = &*self.table.known;
        let start = self.values.len();
        self.values.resize(start + known.width, pg_sys::Datum::from(0usize));
        self.nulls.resize(start + known.width, true);
        self.tids.push(pg_sys::ItemPointerData::default());
        let (row, nulls) = (&mut self.values[start..], &mut self.nulls[start..]);
        for (place, value) in known.places.iter().zip(values) {
            if let Some(value) = value {
                row[*place] = value;
                nulls[*place] = false;
            }
        }
    }

    /// Writes the rows, which are there for all that follows.
    pub fn write(mut self) {
        let known = &*self.table.known;
        let (relation, width, count) = (self.table.relation, known.width, self.tids.len());
        if count == 0 {
            return;
        }
        let (values, nulls, tids) = (&mut self.values[..], &mut self.nulls[..], &mut self.tids[..]);
        // SAFETY: calls of `raw` and `many` only, on an open table; the values are of the columns' types, as `learn` compared them. A slot frees the row it held
        // when it gets another.
        unsafe {
            guarded(|| {
                let mut slots = [null_mut(); CHUNK];
                for slot in &mut slots[..count.min(CHUNK)] {
                    *slot = many::MakeSingleTupleTableSlot((*relation).rd_att, &raw const pg_sys::TTSOpsHeapTuple);
                }
                let cid = raw::GetCurrentCommandId(true);
                for from in (0..count).step_by(CHUNK) {
                    let until = count.min(from + CHUNK);
                    for (at, slot) in (from..until).zip(slots) {
                        let row = raw::heap_form_tuple((*relation).rd_att, values[at * width..].as_mut_ptr(), nulls[at * width..].as_mut_ptr());
                        (*row).t_tableOid = known.oid;
                        many::ExecStoreHeapTuple(row, slot, true);
                    }
                    many::heap_multi_insert(relation, slots.as_mut_ptr(), (until - from) as c_int, cid, 0, null_mut());
                    for (at, slot) in (from..until).zip(slots) {
                        tids[at] = (*slot).tts_tid;
                    }
                }
                for slot in &slots[..count.min(CHUNK)] {
                    raw::ExecDropSingleTupleTableSlot(*slot);
                }
                for index in known.indexes.iter().filter(|index| index.ready) {
                    enter_all(relation, index, width, values, nulls, tids);
                }
                raw::CommandCounterIncrement();
            });
        }
    }
}

/// Makes the entries of rows in an index.
///
/// # Safety
/// Within [`guarded`], on an open table.
unsafe fn enter_all(
    relation: pg_sys::Relation,
    index: &Index,
    width: usize,
    values: &[pg_sys::Datum],
    nulls: &[bool],
    tids: &mut [pg_sys::ItemPointerData],
) {
    // SAFETY: calls of `raw` only.
    unsafe {
        let (mut keys, mut key_nulls) = ([pg_sys::Datum::from(0usize); WIDEST], [false; WIDEST]);
        let mut open: pg_sys::Relation = null_mut();
        let mut info = info_of(index);
        let unique = if index.unique { pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES } else { pg_sys::IndexUniqueCheck::UNIQUE_CHECK_NO };
        let mut last: Option<(u16, u16)> = None;
        for (at, tid) in tids.iter_mut().enumerate() {
            let (row, nulls) = (&values[at * width..][..width], &nulls[at * width..][..width]);
            if index.unless_null.is_some_and(|place| nulls[place]) {
                continue;
            }
            if open.is_null() {
                open = raw::index_open(index.oid, pg_sys::RowExclusiveLock as i32);
            }
            let mut same = true;
            for (key, place) in index.columns.iter().enumerate() {
                same &= keys[key] == row[*place] && key_nulls[key] == nulls[*place];
                keys[key] = row[*place];
                key_nulls[key] = nulls[*place];
            }
            // The values of the row before, in the same page, are in the summary already.
            let page = (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo);
            if last.replace(page) == Some(page) && same && index.summarizes {
                continue;
            }
            raw::index_insert(open, keys.as_mut_ptr(), key_nulls.as_mut_ptr(), tid, relation, unique, false, &raw mut info);
        }
        if !open.is_null() {
            #[cfg(any(feature = "pg17", feature = "pg18"))]
            raw::index_insert_cleanup(open, &raw mut info);
            raw::index_close(open, pg_sys::NoLock as i32);
        }
    }
}

/// So many ids are looked up in one go at first, and at the most.
const FIRST_GO: usize = 16;
const LONGEST_GO: usize = 1024;
/// Where of so many rows found more than one was met that nobody asked for, what is left is looked up one by one.
const STRAY: usize = 2;

impl Opened {
    /// Finds the rows with these ids, which must not fall, through the index on exactly these columns, of which the first has the value `of` and the second is the id;
    /// `id` is its number among the table's columns. `each` is given the place of each id in the list, and its row or that there is none, and says whether to go
    /// on. Returns whether there is such an index.
    ///
    /// Ids of one batch lie side by side more often than not, so it goes along the index from one to another, and descends for each only where too much lies
    /// between them.
    pub fn find_all(
        &self,
        columns: &[usize],
        of: Param,
        id: usize,
        ids: &[pgrx::Uuid],
        mut each: impl FnMut(usize, Option<&mut Scan>) -> bool,
    ) -> bool {
        let Some(first) = ids.first() else { return true };
        let (queue, id_datum) = (Condition::text(of), |id: &pgrx::Uuid| pg_sys::Datum::from(id.as_bytes().as_ptr()));
        let range = |procedure, strategy, id| Condition { procedure, strategy, value: id_datum(id) };
        let low = |id| range(pg_sys::F_UUID_GE, pg_sys::BTGreaterEqualStrategyNumber, id);
        let high = |id| range(pg_sys::F_UUID_LE, pg_sys::BTLessEqualStrategyNumber, id);
        // Opened on the first; each go then sets its own bounds.
        let Some(mut rows) = self.scan(columns, &[queue, low(first), high(first)]) else { return false };
        // SAFETY: keys for which `scan` has found that they fit the index.
        let mut keys: [pg_sys::ScanKeyData; 3] = unsafe { std::mem::zeroed() };
        for ((key, condition), column) in keys.iter_mut().zip([queue, low(first), high(first)]).zip([1, 2, 2]) {
            let (strategy, procedure) = (condition.strategy as pg_sys::StrategyNumber, pg_sys::Oid::from(condition.procedure));
            // SAFETY: calls of `raw` only.
            unsafe { guarded(|| raw::ScanKeyInit(key, column, strategy, procedure, condition.value)) };
        }
        let (mut at, mut go, mut dense) = (0, FIRST_GO, true);
        while at < ids.len() {
            let end = ids.len().min(at + go);
            (keys[1].sk_argument, keys[2].sk_argument) = (id_datum(&ids[at]), id_datum(&ids[end - 1]));
            let scan = rows.scan;
            // SAFETY: calls of `raw` only; the scan copies the keys, and what these point to outlives it.
            unsafe { guarded(|| raw::index_rescan(scan, keys.as_mut_ptr(), keys.len() as c_int, null_mut(), 0)) };
            let (start, mut strays) = (at, 0);
            loop {
                let found = rows.advance().then(|| rows.must::<pgrx::Uuid>(id));
                while at < end && found.is_none_or(|found| ids[at].as_bytes() < found.as_bytes()) {
                    if !each(at, None) {
                        return true;
                    }
                    at += 1;
                }
                let Some(found) = found else { break };
                if at < end && ids[at].as_bytes() == found.as_bytes() {
                    if !each(at, Some(&mut rows)) {
                        return true;
                    }
                    at += 1;
                    if at == end {
                        break;
                    }
                } else {
                    strays += 1;
                    if strays > (end - start).max(FIRST_GO) {
                        break;
                    }
                }
            }
            dense &= strays * STRAY <= at - start;
            go = if dense { (go * 4).min(LONGEST_GO) } else { 1 };
        }
        true
    }
}
