//! Rows of the tables that every task passes through, read and written without the executor: one look into an index, one row written with its index entries.
//! Starting and ending a statement costs several times what these do.
//!
//! It does what the executor does for the same rows (a fresh snapshot for each look, locks on tables and indexes, counters, toast, unique checks, invalidation),
//! and only where there is nothing else to do: in READ COMMITTED, on a heap table of the extension's owner whose columns and indexes are those that the install script
//! made, without constraints to check, rules, row security or triggers of others. Anywhere else [`Table::open`] answers `None`, and the verb runs its statement,
//! as it does where a row turns out to have been changed by somebody at the same time.
//!
//! Calls of PostgreSQL are made in groups, each behind one guard that turns an error into unwinding. Within a group there is no Rust value that has to be
//! dropped, since an error jumps over it. What is open when an error unwinds is released by the end of the (sub)transaction, as everywhere in PostgreSQL.

mod batch;

pub use batch::Batch;

use crate::shmem::Instance;
use crate::spi::{self, Home, Param, Row};
use pgrx::prelude::*;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_int};
use std::ptr::null_mut;
use std::rc::Rc;

/// PostgreSQL's own functions as they are, without a guard each.
mod raw {
    use super::pg_sys::*;
    use std::ffi::c_int;

    unsafe extern "C-unwind" {
        pub fn LockRelationOid(relid: Oid, lockmode: LOCKMODE);
        pub fn relation_open(relid: Oid, lockmode: LOCKMODE) -> Relation;
        pub fn RelationClose(relation: Relation);
        pub fn index_open(relid: Oid, lockmode: LOCKMODE) -> Relation;
        pub fn index_close(relation: Relation, lockmode: LOCKMODE);
        pub fn index_insert(
            index: Relation,
            values: *mut Datum,
            isnull: *mut bool,
            tid: ItemPointer,
            heap: Relation,
            unique: IndexUniqueCheck::Type,
            unchanged: bool,
            info: *mut IndexInfo,
        ) -> bool;
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        pub fn index_insert_cleanup(index: Relation, info: *mut IndexInfo);
        #[cfg(not(feature = "pg18"))]
        pub fn index_beginscan(heap: Relation, index: Relation, snapshot: Snapshot, keys: c_int, orderbys: c_int) -> IndexScanDesc;
        #[cfg(feature = "pg18")]
        pub fn index_beginscan(
            heap: Relation,
            index: Relation,
            snapshot: Snapshot,
            instrument: *mut IndexScanInstrumentation,
            keys: c_int,
            orderbys: c_int,
        ) -> IndexScanDesc;
        pub fn index_rescan(scan: IndexScanDesc, keys: ScanKey, nkeys: c_int, orderbys: ScanKey, norderbys: c_int);
        pub fn index_getnext_slot(scan: IndexScanDesc, direction: ScanDirection::Type, slot: *mut TupleTableSlot) -> bool;
        pub fn index_endscan(scan: IndexScanDesc);
        pub fn ScanKeyInit(entry: ScanKey, attribute: AttrNumber, strategy: StrategyNumber, procedure: RegProcedure, argument: Datum);
        pub fn table_slot_create(relation: Relation, reglist: *mut *mut List) -> *mut TupleTableSlot;
        pub fn slot_getsomeattrs_int(slot: *mut TupleTableSlot, attnum: c_int);
        pub fn ExecDropSingleTupleTableSlot(slot: *mut TupleTableSlot);
        pub fn heap_form_tuple(descriptor: TupleDesc, values: *mut Datum, isnull: *mut bool) -> HeapTuple;
        pub fn heap_freetuple(tuple: HeapTuple);
        pub fn heap_insert(relation: Relation, tuple: HeapTuple, cid: CommandId, options: c_int, bistate: BulkInsertState);
        pub fn heap_delete(
            relation: Relation,
            tid: ItemPointer,
            cid: CommandId,
            crosscheck: Snapshot,
            wait: bool,
            failure: *mut TM_FailureData,
            changing_part: bool,
        ) -> TM_Result::Type;
        pub fn heap_lock_tuple(
            relation: Relation,
            tuple: HeapTuple,
            cid: CommandId,
            mode: LockTupleMode::Type,
            policy: LockWaitPolicy::Type,
            follow_update: bool,
            buffer: *mut Buffer,
            failure: *mut TM_FailureData,
        ) -> TM_Result::Type;
        pub fn ReleaseBuffer(buffer: Buffer);
        pub fn LockBuffer(buffer: Buffer, mode: c_int);
        pub fn TransactionIdIsInProgress(xid: TransactionId) -> bool;
        pub fn GetCurrentCommandId(used: bool) -> CommandId;
        pub fn CommandCounterIncrement();
        pub fn GetTransactionSnapshot() -> Snapshot;
        pub fn PushActiveSnapshot(snapshot: Snapshot);
        pub fn GetActiveSnapshot() -> Snapshot;
        pub fn PopActiveSnapshot();
        pub fn RelationGetNumberOfBlocksInFork(relation: Relation, fork: ForkNumber::Type) -> BlockNumber;
        pub fn ProcessInterrupts();
        pub fn TransactionIdIsCurrentTransactionId(xid: TransactionId) -> bool;
        pub fn XidInMVCCSnapshot(xid: TransactionId, snapshot: Snapshot) -> bool;
        pub fn datumCopy(value: Datum, by_value: bool, length: c_int) -> Datum;
    }
}

/// Runs a group of calls behind one guard.
///
/// # Safety
/// `work` calls functions of [`raw`] only, never one that has a guard of its own, and owns nothing that must be dropped.
unsafe fn guarded<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: as the caller promises; a backend has one thread.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(work) }
}

/// The most columns one of our tables has.
const WIDEST: usize = 32;

/// A column as verbs know it.
pub type Column = (&'static str, pg_sys::Oid);

/// What was found out about a table, until its definition changes.
struct Known {
    /// When, see [`CHANGES`].
    changes: u64,
    oid: pg_sys::Oid,
    /// Whether rows may be read and written here.
    plain: bool,
    /// The place of each of the verb's columns in a row.
    places: Vec<usize>,
    /// How many columns a row has, dropped ones included.
    width: usize,
    indexes: Vec<Index>,
}

/// One of the table's indexes.
struct Index {
    oid: pg_sys::Oid,
    /// Its columns, as places in a row.
    columns: Vec<usize>,
    unique: bool,
    /// Rows where this is null have no entry.
    unless_null: Option<usize>,
    /// It has no entry for each row, but one for a range of pages, of all the values there.
    summarizes: bool,
    ready: bool,
    valid: bool,
}

thread_local! {
    /// Moves when the definition of a table changes that somebody here knows. 0 until the first is known.
    static CHANGES: Cell<u64> = const { Cell::new(0) };
    static WATCHED: RefCell<Vec<pg_sys::Oid>> = const { RefCell::new(Vec::new()) };
}

/// Told by PostgreSQL of every table whose definition changed; runs where an error must not be raised.
unsafe extern "C-unwind" fn relation_changed(_arg: pg_sys::Datum, relation: pg_sys::Oid) {
    let ours = relation == pg_sys::InvalidOid || WATCHED.with(|watched| watched.try_borrow().map_or(true, |watched| watched.contains(&relation)));
    if ours {
        CHANGES.set(CHANGES.get().wrapping_add(1));
    }
}

/// Has changes of a table's definition told from now on; returns the count of them.
pub fn watch(relation: pg_sys::Oid) -> u64 {
    if CHANGES.get() == 0 {
        // SAFETY: registered once in this backend; the function lives as long as the library.
        unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(relation_changed), pg_sys::Datum::from(0usize)) };
        CHANGES.set(1);
    }
    WATCHED.with_borrow_mut(|watched| {
        if !watched.contains(&relation) {
            watched.push(relation);
        }
    });
    CHANGES.get()
}

/// The count of changes as far as this session has heard.
pub fn changes() -> u64 {
    CHANGES.get()
}

/// Whether this transaction works in the way that this module knows.
pub fn usable() -> bool {
    // SAFETY: variables of this backend.
    unsafe { pg_sys::XactIsoLevel == pg_sys::XACT_READ_COMMITTED as i32 && !pg_sys::XactReadOnly && !pg_sys::IsInParallelMode() }
}

/// A table of the schema, by its name. What is known of it is kept; declare it as a `static`, or keep it.
pub struct Table {
    name: Cow<'static, str>,
    columns: &'static [Column],
    known: RefCell<Option<Rc<Known>>>,
}

// SAFETY: a backend runs one thread; forked children start before anything is known.
unsafe impl Sync for Table {}

impl Table {
    /// The table of that name, with these columns.
    pub const fn new(name: &'static str, columns: &'static [Column]) -> Self {
        Table { name: Cow::Borrowed(name), columns, known: RefCell::new(None) }
    }

    /// The same for a name made at run time.
    pub fn named(name: String, columns: &'static [Column]) -> Self {
        Table { name: Cow::Owned(name), columns, known: RefCell::new(None) }
    }

    /// Opens the table under a lock that is held until the transaction ends. `None` where the statement has to be run instead.
    pub fn open(&self, mode: u32) -> Option<Opened> {
        if !usable() {
            return None;
        }
        let mode = mode as pg_sys::LOCKMODE;
        let kept = self.known.borrow().clone().filter(|known| known.changes == CHANGES.get());
        if let Some(known) = kept {
            // SAFETY: calls of `raw` only. News of changes is taken in when the lock is got.
            let relation = unsafe {
                guarded(|| {
                    raw::LockRelationOid(known.oid, mode);
                    if known.changes == CHANGES.get() { raw::relation_open(known.oid, pg_sys::NoLock as i32) } else { null_mut() }
                })
            };
            if !relation.is_null() {
                let opened = Opened { relation, known };
                return opened.known.plain.then_some(opened);
            }
        }
        let name = CString::new(self.name.as_bytes()).ok()?;
        // SAFETY: a system cache look-up, an ordinary relation lock, and a reference that `Opened` gives back.
        unsafe {
            let oid = pg_sys::get_relname_relid(name.as_ptr(), pg_sys::Oid::from(Instance::here().schema));
            if oid == pg_sys::InvalidOid {
                return None;
            }
            let changes = watch(oid);
            pg_sys::LockRelationOid(oid, mode);
            // What waited for the lock may find another table under the name.
            if changes != CHANGES.get() {
                return None;
            }
            let relation = pg_sys::relation_open(oid, pg_sys::NoLock as i32);
            let known = Rc::new(learn(relation, self.columns, changes));
            *self.known.borrow_mut() = Some(known.clone());
            let opened = Opened { relation, known };
            opened.known.plain.then_some(opened)
        }
    }
}

/// Looks a table over.
unsafe fn learn(relation: pg_sys::Relation, columns: &[Column], changes: u64) -> Known {
    // SAFETY: the relation is open and locked, its parts are PostgreSQL's own structs.
    unsafe {
        let rel = &*relation;
        let class = &*rel.rd_rel;
        let descriptor = &*rel.rd_att;
        let width = descriptor.natts as usize;
        let mut places = vec![usize::MAX; columns.len()];
        let mut plain = class.relkind == pg_sys::RELKIND_RELATION as std::ffi::c_char
            && class.relam == pg_sys::HEAP_TABLE_AM_OID
            && class.relowner == spi::home().owner
            && !class.relrowsecurity
            && !class.relforcerowsecurity
            && class.relreplident == b'd' as std::ffi::c_char
            && rel.rd_rules.is_null()
            && width <= WIDEST
            && only_ours_fire(rel.trigdesc);
        if let Some(constraints) = descriptor.constr.as_ref() {
            plain &= constraints.num_check == 0 && !constraints.has_generated_stored;
        }
        for place in 0..width {
            let attribute = &*attribute(rel.rd_att, place);
            if attribute.attisdropped {
                continue;
            }
            let name = CStr::from_ptr(attribute.attname.data.as_ptr()).to_bytes();
            match columns.iter().position(|(known, of_type)| known.as_bytes() == name && *of_type == attribute.atttypid) {
                Some(at) => places[at] = place,
                None => plain = false,
            }
        }
        plain &= places.iter().all(|place| *place != usize::MAX);
        let mut indexes = Vec::new();
        let list = pg_sys::RelationGetIndexList(relation);
        let count = list.as_ref().map_or(0, |list| list.length);
        for at in 0..count {
            let oid = (*(*list).elements.add(at as usize)).oid_value;
            let index = pg_sys::index_open(oid, pg_sys::AccessShareLock as i32);
            match look_at_index(index) {
                Some(index) => indexes.push(index),
                None => plain = false,
            }
            pg_sys::index_close(index, pg_sys::AccessShareLock as i32);
        }
        pg_sys::list_free(list);
        Known { changes, oid: rel.rd_id, plain, places, width, indexes }
    }
}

fn attribute(descriptor: pg_sys::TupleDesc, place: usize) -> *const pg_sys::FormData_pg_attribute {
    // SAFETY: the place is within the descriptor.
    unsafe {
        #[cfg(feature = "pg18")]
        {
            pg_sys::TupleDescAttr(descriptor, place as c_int)
        }
        #[cfg(not(feature = "pg18"))]
        {
            (*descriptor).attrs.as_ptr().add(place)
        }
    }
}

/// Whether no trigger of a table fires but `stint.placed`, which passes the verbs by.
unsafe fn only_ours_fire(triggers: *mut pg_sys::TriggerDesc) -> bool {
    // SAFETY: the relation's own list, of that length.
    unsafe {
        let Some(triggers) = triggers.as_ref() else { return true };
        let Home { schema, .. } = spi::home();
        (0..triggers.numtriggers as usize).all(|at| {
            let function = (*triggers.triggers.add(at)).tgfoid;
            let name = pg_sys::get_func_name(function);
            !name.is_null() && CStr::from_ptr(name) == c"placed" && pg_sys::get_func_namespace(function) == schema
        })
    }
}

/// What there is to know of an index; `None` where entries cannot be made of columns alone.
unsafe fn look_at_index(index: pg_sys::Relation) -> Option<Index> {
    // SAFETY: the index is open and locked; an IndexInfo holds trees of nodes that start with their tag.
    unsafe {
        let form = &*(*index).rd_index;
        let info = &*pg_sys::BuildIndexInfo(index);
        let method = (*(*index).rd_rel).relam;
        let known_method = [pg_sys::BTREE_AM_OID, pg_sys::BRIN_AM_OID].contains(&method);
        if !known_method || !info.ii_Expressions.is_null() || !info.ii_ExclusionOps.is_null() || !form.indimmediate {
            return None;
        }
        let unless_null = match info.ii_Predicate.as_ref() {
            None => None,
            Some(list) if list.length == 1 => Some(not_null((*list.elements).ptr_value.cast())?),
            Some(_) => return None,
        };
        let columns =
            info.ii_IndexAttrNumbers[..info.ii_NumIndexAttrs as usize].iter().map(|attribute| usize::try_from(*attribute).ok()?.checked_sub(1));
        Some(Index {
            oid: (*index).rd_id,
            columns: columns.collect::<Option<Vec<usize>>>()?,
            unique: form.indisunique,
            unless_null,
            summarizes: method == pg_sys::BRIN_AM_OID,
            ready: form.indisready,
            valid: form.indisvalid && method == pg_sys::BTREE_AM_OID,
        })
    }
}

/// The place of the column in a condition `column is not null`; `None` for any other.
unsafe fn not_null(node: *mut pg_sys::Node) -> Option<usize> {
    // SAFETY: a condition's tree; the tag tells the type.
    unsafe {
        if (*node).type_ != pg_sys::NodeTag::T_NullTest {
            return None;
        }
        let test = &*node.cast::<pg_sys::NullTest>();
        if test.nulltesttype != pg_sys::NullTestType::IS_NOT_NULL || test.argisrow || (*test.arg).type_ != pg_sys::NodeTag::T_Var {
            return None;
        }
        usize::try_from((*test.arg.cast::<pg_sys::Var>()).varattno).ok()?.checked_sub(1)
    }
}

/// An open table. Its lock outlives it.
pub struct Opened {
    relation: pg_sys::Relation,
    known: Rc<Known>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: gives back the reference taken; closing raises nothing.
            unsafe { raw::RelationClose(self.relation) };
        }
    }
}

/// Whether one of the extension's tables has a page, and so may have rows. True as well where somebody else holds the table: this never waits.
pub fn has_pages(table: &CStr) -> bool {
    let access = pg_sys::AccessShareLock as i32;
    // SAFETY: a catalogue look-up; what is locked and opened is closed and let go of again.
    unsafe {
        let oid = pg_sys::get_relname_relid(table.as_ptr(), pg_sys::Oid::from(Instance::here().schema));
        if oid == pg_sys::InvalidOid || !pg_sys::ConditionalLockRelationOid(oid, access) {
            return true;
        }
        let relation = pg_sys::table_open(oid, pg_sys::NoLock as i32);
        let pages = pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM);
        pg_sys::table_close(relation, access);
        pages > 0
    }
}

/// A condition on a column of an index.
#[derive(Clone, Copy)]
pub struct Condition {
    procedure: u32,
    strategy: u32,
    value: pg_sys::Datum,
}

impl Condition {
    /// `column = value`, of a type whose equality this is.
    fn equal(procedure: u32, value: Param) -> Self {
        Condition { procedure, strategy: pg_sys::BTEqualStrategyNumber, value: value.unwrap_or(pg_sys::Datum::from(0usize)) }
    }

    /// A text, compared byte by byte.
    pub fn text(value: Param) -> Self {
        Self::equal(pg_sys::F_TEXTEQ, value)
    }

    /// An id.
    pub fn uuid(value: Param) -> Self {
        Self::equal(pg_sys::F_UUID_EQ, value)
    }

    /// An `int`.
    pub fn int4(value: i32) -> Self {
        Self::equal(pg_sys::F_INT4EQ, Some(pg_sys::Datum::from(value)))
    }

    /// A `bigint` below that, on the same column as the condition before.
    pub fn below(value: i64) -> Self {
        Condition { procedure: pg_sys::F_INT8LT, strategy: pg_sys::BTLessStrategyNumber, value: pg_sys::Datum::from(value) }
    }

    /// A `bigint` of at least that.
    pub fn at_least(value: i64) -> Self {
        Condition { procedure: pg_sys::F_INT8GE, strategy: pg_sys::BTGreaterEqualStrategyNumber, value: pg_sys::Datum::from(value) }
    }
}

/// The most conditions on an index.
const CONDITIONS: usize = 5;

/// What became of a row to be deleted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// It is gone.
    Here,
    /// Another session holds it.
    Held,
    /// It was changed or deleted since it was read.
    Changed,
}

impl Opened {
    /// Writes a row of these values of the table's columns, in their order; those left out at the end are null.
    pub fn insert(&self, values: impl IntoIterator<Item = Param>) {
        let known = &*self.known;
        let (mut row, mut nulls) = ([pg_sys::Datum::from(0usize); WIDEST], [true; WIDEST]);
        for (place, value) in known.places.iter().zip(values) {
            if let Some(value) = value {
                row[*place] = value;
                nulls[*place] = false;
            }
        }
        let relation = self.relation;
        // SAFETY: calls of `raw` only, on an open table; the values are of the columns' types, as `learn` compared them.
        unsafe {
            guarded(|| {
                let tuple = raw::heap_form_tuple((*relation).rd_att, row.as_mut_ptr(), nulls.as_mut_ptr());
                (*tuple).t_tableOid = known.oid;
                raw::heap_insert(relation, tuple, raw::GetCurrentCommandId(true), 0, null_mut());
                for index in &known.indexes {
                    if index.ready && !index.unless_null.is_some_and(|place| nulls[place]) {
                        enter(relation, index, &row, &nulls, &raw mut (*tuple).t_self);
                    }
                }
                raw::heap_freetuple(tuple);
                raw::CommandCounterIncrement();
            });
        }
    }

    /// Whether the table has no page at all, and so no row.
    pub fn is_empty(&self) -> bool {
        let relation = self.relation;
        // SAFETY: calls of `raw` only, on an open table.
        unsafe { guarded(|| raw::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM) == 0) }
    }

    /// Looks for rows through the index on exactly these columns, in its order, with what is committed now. The conditions are on its columns one after the other;
    /// one more is on the last of them. `None` where there is no such index.
    pub fn scan(&self, columns: &[usize], conditions: &[Condition]) -> Option<Scan<'_>> {
        let known = &*self.known;
        let like = |index: &&Index| {
            let same = index.columns.iter().zip(columns).all(|(place, column)| *place == known.places[*column]);
            index.valid && index.unless_null.is_none() && index.columns.len() == columns.len() && same
        };
        let index = known.indexes.iter().find(like)?;
        let count = conditions.len().min(CONDITIONS);
        let relation = self.relation;
        // SAFETY: calls of `raw` only; the keys are copied by the scan; what is opened is closed when the scan is dropped.
        let (scan, slot, index) = unsafe {
            guarded(|| {
                let mut keys: [pg_sys::ScanKeyData; CONDITIONS] = std::mem::zeroed();
                for (at, condition) in conditions.iter().take(count).enumerate() {
                    let (strategy, procedure) = (condition.strategy as pg_sys::StrategyNumber, pg_sys::Oid::from(condition.procedure));
                    let column = at.min(columns.len() - 1) as pg_sys::AttrNumber + 1;
                    raw::ScanKeyInit(&raw mut keys[at], column, strategy, procedure, condition.value);
                }
                // As a statement of its own would see it.
                raw::CommandCounterIncrement();
                raw::PushActiveSnapshot(raw::GetTransactionSnapshot());
                let snapshot = raw::GetActiveSnapshot();
                let index = raw::index_open(index.oid, pg_sys::AccessShareLock as i32);
                #[cfg(not(feature = "pg18"))]
                let scan = raw::index_beginscan(relation, index, snapshot, count as c_int, 0);
                #[cfg(feature = "pg18")]
                let scan = raw::index_beginscan(relation, index, snapshot, null_mut(), count as c_int, 0);
                raw::index_rescan(scan, keys.as_mut_ptr(), count as c_int, null_mut(), 0);
                (scan, raw::table_slot_create(relation, null_mut()), index)
            })
        };
        Some(Scan { table: self, scan, slot, index })
    }
}

/// What access methods read of an index that a row is entered in: how many columns it has, and where they may keep what they find out until it is closed.
fn info_of(index: &Index) -> pg_sys::IndexInfo {
    // SAFETY: all zeros is how PostgreSQL makes one.
    let mut info: pg_sys::IndexInfo = unsafe { std::mem::zeroed() };
    info.type_ = pg_sys::NodeTag::T_IndexInfo;
    info.ii_NumIndexAttrs = index.columns.len() as c_int;
    info.ii_NumIndexKeyAttrs = index.columns.len() as c_int;
    info.ii_Unique = index.unique;
    info.ii_ReadyForInserts = true;
    // SAFETY: a variable of this backend.
    info.ii_Context = unsafe { pg_sys::CurrentMemoryContext };
    info
}

/// Makes the entry of a row in an index.
///
/// # Safety
/// Within [`guarded`], on an open table.
unsafe fn enter(relation: pg_sys::Relation, index: &Index, row: &[pg_sys::Datum; WIDEST], nulls: &[bool; WIDEST], tid: *mut pg_sys::ItemPointerData) {
    // SAFETY: calls of `raw` only.
    unsafe {
        let (mut keys, mut key_nulls) = ([pg_sys::Datum::from(0usize); WIDEST], [false; WIDEST]);
        for (at, place) in index.columns.iter().enumerate() {
            keys[at] = row[*place];
            key_nulls[at] = nulls[*place];
        }
        let mut info = info_of(index);
        let unique = if index.unique { pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES } else { pg_sys::IndexUniqueCheck::UNIQUE_CHECK_NO };
        let open = raw::index_open(index.oid, pg_sys::RowExclusiveLock as i32);
        raw::index_insert(open, keys.as_mut_ptr(), key_nulls.as_mut_ptr(), tid, relation, unique, false, &raw mut info);
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        raw::index_insert_cleanup(open, &raw mut info);
        raw::index_close(open, pg_sys::NoLock as i32);
    }
}

/// A look through an index.
pub struct Scan<'t> {
    table: &'t Opened,
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
    index: pg_sys::Relation,
}

impl Drop for Scan<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let Scan { scan, slot, index, .. } = *self;
        // SAFETY: calls of `raw` only; closes what `scan` opened. The index's lock stays, as the executor's does.
        unsafe {
            guarded(|| {
                raw::index_endscan(scan);
                raw::ExecDropSingleTupleTableSlot(slot);
                raw::index_close(index, pg_sys::NoLock as i32);
                raw::PopActiveSnapshot();
            });
        }
    }
}

impl Scan<'_> {
    /// Goes to the next row; false where there is none.
    pub fn advance(&mut self) -> bool {
        let Scan { scan, slot, .. } = *self;
        let width = self.table.known.width as c_int;
        // SAFETY: calls of `raw` only.
        unsafe {
            guarded(|| {
                if pg_sys::InterruptPending != 0 {
                    raw::ProcessInterrupts();
                }
                let found = raw::index_getnext_slot(scan, pg_sys::ScanDirection::ForwardScanDirection, slot);
                if found {
                    raw::slot_getsomeattrs_int(slot, width);
                }
                found
            })
        }
    }

    fn storage(&self, column: usize) -> (bool, c_int) {
        // SAFETY: the place of one of the table's columns.
        let attribute = unsafe { &*attribute((*self.table.relation).rd_att, self.table.known.places[column]) };
        (attribute.attbyval, c_int::from(attribute.attlen))
    }

    /// Deletes the row at hand. Waits for whoever holds it only where `wait` says so.
    pub fn delete(&mut self, wait: bool) -> Deleted {
        let relation = self.table.relation;
        let slot = self.slot;
        // SAFETY: calls of `raw` only, on the row that the slot holds, which is a heap's.
        let result = unsafe {
            guarded(|| {
                let mut failure: pg_sys::TM_FailureData = std::mem::zeroed();
                let tid = &raw mut (*slot).tts_tid;
                let holder = if wait { Holder::Nobody } else { holder(slot, raw::GetActiveSnapshot()) };
                let locked = holder == Holder::Unclear;
                if holder == Holder::Another || locked && !may_lock(relation, tid, &mut failure) {
                    return pg_sys::TM_Result::TM_WouldBlock;
                }
                // For a row that this transaction has locked itself there is nothing to wait for, but that has to be looked at.
                raw::heap_delete(relation, tid, raw::GetCurrentCommandId(true), null_mut(), wait || locked, &mut failure, false)
            })
        };
        match result {
            pg_sys::TM_Result::TM_Ok => Deleted::Here,
            pg_sys::TM_Result::TM_WouldBlock | pg_sys::TM_Result::TM_BeingModified => Deleted::Held,
            _ => Deleted::Changed,
        }
    }
}

impl Scan<'_> {
    /// Whether a transaction that is still open deletes the row at hand: unless that is undone, the row goes.
    pub fn leaving(&self) -> bool {
        let slot = self.slot;
        // SAFETY: calls of `raw` only, on the row that the slot holds, which is a heap's in a pinned buffer.
        unsafe {
            guarded(|| {
                let slot = slot.cast::<pg_sys::BufferHeapTupleTableSlot>();
                let row = (*(*slot).base.tuple).t_data;
                raw::LockBuffer((*slot).buffer, pg_sys::BUFFER_LOCK_SHARE as c_int);
                let marks = u32::from((*row).t_infomask);
                let xmax = (*row).t_choice.t_heap.t_xmax;
                raw::LockBuffer((*slot).buffer, pg_sys::BUFFER_LOCK_UNLOCK as c_int);
                let only_locked = pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_IS_MULTI | pg_sys::HEAP_XMAX_LOCK_ONLY;
                marks & only_locked == 0 && raw::TransactionIdIsInProgress(xmax)
            })
        }
    }
}

impl Row for Scan<'_> {
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        let place = self.table.known.places[column];
        // SAFETY: the slot holds a row whose columns are all read out.
        unsafe { (!*(*self.slot).tts_isnull.add(place)).then(|| *(*self.slot).tts_values.add(place)) }
    }

    fn keep(&self, column: usize) -> Option<pg_sys::Datum> {
        let (by_value, length) = self.storage(column);
        // SAFETY: the datum is of that storage.
        self.datum(column).map(|datum| unsafe { guarded(|| raw::datumCopy(datum, by_value, length)) })
    }

    fn lift(&self, column: usize) -> Option<pg_sys::Datum> {
        let (by_value, length) = self.storage(column);
        // SAFETY: SPI is open while verbs work; the datum is of that storage.
        self.datum(column).map(|datum| unsafe { pg_sys::SPI_datumTransfer(datum, by_value, length) })
    }
}

/// Who locks or deletes a row, as far as can be seen in passing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Nobody,
    /// A transaction that was under way when the snapshot was taken. Had it ended since, the row would be gone, or one to be found by whoever looks next.
    Another,
    /// This transaction, several, or one that ended.
    Unclear,
}

/// Who holds the row. Claims meet each other's rows all the time: to ask the lock manager about each would cost several times what taking a row does.
///
/// # Safety
/// Within [`guarded`]; the slot holds a row of a heap that the snapshot shows.
unsafe fn holder(slot: *mut pg_sys::TupleTableSlot, snapshot: pg_sys::Snapshot) -> Holder {
    // SAFETY: the slot of a heap's index scan starts with a HeapTupleTableSlot, whose tuple lies in a pinned page; the words read are read whole.
    unsafe {
        let header = (*(*slot.cast::<pg_sys::HeapTupleTableSlot>()).tuple).t_data;
        let marks = u32::from((&raw const (*header).t_infomask).read_volatile());
        if marks & pg_sys::HEAP_XMAX_INVALID != 0 {
            return Holder::Nobody;
        }
        let xid = (&raw const (*header).t_choice.t_heap.t_xmax).read_volatile();
        let one = marks & pg_sys::HEAP_XMAX_IS_MULTI == 0 && !raw::TransactionIdIsCurrentTransactionId(xid);
        if one && raw::XidInMVCCSnapshot(xid, snapshot) { Holder::Another } else { Holder::Unclear }
    }
}

/// Locks a row unless another session holds it, which does not take a transaction id.
///
/// # Safety
/// Within [`guarded`], on an open table.
unsafe fn may_lock(relation: pg_sys::Relation, tid: *mut pg_sys::ItemPointerData, failure: &mut pg_sys::TM_FailureData) -> bool {
    // SAFETY: calls of `raw` only; the buffer that comes back is pinned once.
    unsafe {
        let mut tuple: pg_sys::HeapTupleData = std::mem::zeroed();
        tuple.t_self = *tid;
        let mut buffer: pg_sys::Buffer = 0;
        let (mode, policy) = (pg_sys::LockTupleMode::LockTupleExclusive, pg_sys::LockWaitPolicy::LockWaitSkip);
        let result = raw::heap_lock_tuple(relation, &mut tuple, raw::GetCurrentCommandId(true), mode, policy, false, &mut buffer, failure);
        raw::ReleaseBuffer(buffer);
        result == pg_sys::TM_Result::TM_Ok
    }
}
