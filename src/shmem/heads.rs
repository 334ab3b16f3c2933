//! Heads: below which point of an ordered index nothing is left.
//!
//! A queue's index collects entries of rows that are gone, at its front, exactly where the next claim looks; while somebody holds an old snapshot, vacuum can
//! not remove them, and a claim that walks them all gets slower with every task done. So each line remembers where its live rows begin, and a claim starts
//! there. A line is one (lane, priority) of `place_ready`, ordered by seq, or one of the lines of time: `place_running` by expiry, `place_scheduled` by due
//! time, `task_keys` by the end of their retention.
//!
//! A head may only rise to the first row that a plain read with a fresh snapshot still shows: SKIP LOCKED would hide rows that another session locks and will
//! let go of. And only past what was lowered to meanwhile: either nothing was, which the line's generation tells, read before that snapshot is taken; or the
//! looker had the line watched, which keeps the least that anybody lowered it to, and rises to that at the most. Without a watch a look that takes long would
//! never raise a head that others lower all the time, and so always take long. Whoever inserts a row lowers the line to it when the insert commits, after the
//! row is visible. So a late committer neither blocks a head nor is missed: between its commit and its callback the row is skipped, and found from then on.
//!
//! Of a lane, rows that an open transaction has taken are passed, too, whoever took them: a worker that claims, works and completes in one transaction would
//! hold the head back for as long. Whoever takes a row out of a lane lowers the line to it when that is undone, by the abort of a transaction or a savepoint.
//!
//! COMMIT PREPARED runs no callback: PREPARE itself lowers, and no head rises while a prepared transaction is about. After a restart all is zero and rises
//! again.

use super::{Instance, Lock};
use crate::guc;
use crate::values::{Instant, SECOND};
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::Cell;
use std::os::raw::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

unsafe extern "C" {
    /// The server's setting max_prepared_transactions, which pgrx does not bind.
    static max_prepared_xacts: std::os::raw::c_int;
}

/// Priorities of a lane that have a head each; a lane with more is searched without.
const PRIORITIES: usize = 16;
/// The head of a line in which nothing is left.
pub const NOTHING: i64 = i64::MAX;
/// The line of `place_running`, by expiry in microseconds; lanes count from 1.
pub const RUNNING: i32 = -1;
/// The line of `place_scheduled`, by due time in microseconds.
pub const SCHEDULED: i32 = -2;
/// The line of `task_keys`, by the time until which they are kept.
pub const KEYS: i32 = -4;
/// The line of `place_running` as the maintenance worker's sweep has it: it knows the rows before the head one by one (`queue::sweep`).
pub const SWEPT: i32 = -3;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    instance: Instance,
    lane: i32,
}

/// Where the live rows of one priority begin.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The priority; 0 in a line of time.
    pub priority: i32,
    /// The least seq (or instant) that may still be there.
    pub at: i64,
}

#[repr(C)]
struct Entry {
    key: Key,
    generation: u64,
    /// Rows that came or went, as far as anybody told: what was seen at the front of the line holds while this stays.
    moves: u64,
    /// `moves`, and in the lowest bit whether nothing is left: for whoever looks without the lock.
    shown: AtomicU64,
    /// Whether every priority that has rows is listed.
    complete: bool,
    /// Rows taken since the heads rose.
    taken: usize,
    /// The number of the look that has the line watched; 0 while none has.
    watch: u64,
    count: usize,
    heads: [Head; PRIORITIES],
    /// The least that each of the heads was lowered to since that look began.
    lowered: [i64; PRIORITIES],
}

impl Entry {
    /// Where a priority's head stands among the heads.
    fn find(&self, priority: i32) -> Option<usize> {
        self.heads[..self.count].iter().position(|known| known.priority == priority)
    }

    fn show(&self) {
        let empty = self.complete && self.heads[..self.count].iter().all(|head| head.at == NOTHING);
        self.shown.store(self.moves << 1 | u64::from(empty), Ordering::Release);
    }
}

/// In shared memory, beside the table.
#[repr(C)]
pub struct Shared {
    entries: AtomicU64,
    /// Transactions prepared since the start, and how many of them are known to be over.
    prepared: AtomicU64,
    over: AtomicU64,
    /// Watches given out.
    watches: AtomicU64,
}

impl Shared {
    pub(super) fn init(&mut self) {
        // Transactions prepared before the start may still be about.
        self.prepared = AtomicU64::new(1);
    }
}

static TABLE: AtomicPtr<pg_sys::HTAB> = AtomicPtr::new(null_mut());

pub(super) fn table_size() -> usize {
    // SAFETY: arithmetic.
    unsafe { pg_sys::hash_estimate_size(guc::max_lanes() as _, size_of::<Entry>()) as usize }
}

pub(super) fn attach_table() {
    let capacity = guc::max_lanes() as i64;
    // SAFETY: runs in the start-up hook under the add-in lock.
    unsafe {
        let mut info = pg_sys::HASHCTL { keysize: size_of::<Key>(), entrysize: size_of::<Entry>(), ..Default::default() };
        let flags = (pg_sys::HASH_ELEM | pg_sys::HASH_BLOBS) as i32;
        TABLE.store(pg_sys::ShmemInitHash(c"pg_stint heads".as_ptr(), capacity, capacity, &mut info, flags), Ordering::Release);
    }
}

/// A row this transaction put into a line.
#[derive(Clone, Copy)]
pub struct Lower {
    instance: Instance,
    lane: i32,
    head: Head,
}

/// A wish to have an instance's lines looked at from the beginning.
#[derive(Clone, Copy)]
pub struct Rescan {
    instance: Instance,
    /// Whether running rows came by other ways than the verbs, so that the live usage of budgets must be derived anew.
    usage: bool,
}

thread_local! {
    /// The lines to lower at commit.
    pub static PENDING: Pending<Lower> = const { Pending::new() };
    /// Lanes this transaction has dropped.
    pub static GONE: Pending<(Instance, i32)> = const { Pending::new() };
    /// Instances this transaction has asked to look from the beginning.
    pub static RESCANS: Pending<Rescan> = const { Pending::new() };
    /// The lines to lower if what this transaction took comes back.
    pub static TAKEN: Pending<Lower> = const { Pending::new() };
    /// The line this session has watched.
    static WATCHING: Cell<Option<(Instance, i32, u64)>> = const { Cell::new(None) };
}

/// Runs `work` on the line's entry under the lock; `None` where the table has no room for it.
fn with_entry<R>(shared: &super::Shared, instance: Instance, lane: i32, make: bool, work: impl FnOnce(&mut Entry) -> R) -> Option<R> {
    let key = Key { instance, lane };
    let table = TABLE.load(Ordering::Acquire);
    let _held = super::lock(Lock::Heads);
    let look = |action| {
        let mut found = false;
        // SAFETY: the table is attached and the lock held; the key is of the declared size; no action used here raises.
        let at = unsafe { pg_sys::hash_search(table, (&raw const key).cast::<c_void>(), action, &mut found) };
        at.cast::<Entry>()
    };
    let mut at = look(pg_sys::HASHACTION::HASH_FIND);
    if at.is_null() {
        if !make || shared.heads.entries.load(Ordering::Relaxed) >= guc::max_lanes() as u64 {
            return None;
        }
        at = look(pg_sys::HASHACTION::HASH_ENTER_NULL);
        if at.is_null() {
            return None;
        }
        shared.heads.entries.fetch_add(1, Ordering::Relaxed);
        let entry = Entry {
            key,
            generation: 1,
            moves: 0,
            shown: AtomicU64::new(0),
            complete: false,
            taken: 0,
            watch: 0,
            count: 0,
            heads: [Head { priority: 0, at: 0 }; PRIORITIES],
            lowered: [NOTHING; PRIORITIES],
        };
        // SAFETY: a new entry, whose body dynahash leaves as it was.
        unsafe { at.write(entry) };
    }
    // SAFETY: an entry of the table, which never moves; the lock makes it ours.
    let entry = unsafe { &mut *at };
    let answer = work(entry);
    entry.show();
    Some(answer)
}

/// Where a backend remembers a line's entry, for [`glimpse`].
#[derive(Clone)]
pub struct Handle(Cell<*const Entry>);

impl Default for Handle {
    fn default() -> Self {
        Handle(Cell::new(null()))
    }
}

/// What somebody passing by sees of a line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Glimpse {
    /// It has to be looked at.
    Unknown,
    /// Nothing is there.
    Empty,
    /// Something may be; what was found at its front holds while this number stays.
    Moves(u64),
}

/// Looks at a line without a lock, this transaction's own rows considered.
pub fn glimpse(instance: Instance, lane: i32, handle: &Handle) -> Glimpse {
    let own = PENDING.with(|p| p.any(|own| own.lane == lane && own.instance == instance));
    if own || RESCANS.with(|p| p.any(|asked| asked.instance == instance)) {
        return Glimpse::Unknown;
    }
    let key = Key { instance, lane };
    // SAFETY: entries lie in shared memory for good. One that was removed and used again has another key, and is looked up anew.
    let known = unsafe { handle.0.get().as_ref().filter(|entry| (&raw const entry.key).read_volatile() == key) };
    let found = known.or_else(|| {
        let table = TABLE.load(Ordering::Acquire);
        let _held = super::lock(Lock::Heads);
        let mut found = false;
        // SAFETY: the table is attached and the lock held; the key is of the declared size.
        let at = unsafe { pg_sys::hash_search(table, (&raw const key).cast::<c_void>(), pg_sys::HASHACTION::HASH_FIND, &mut found) }.cast::<Entry>();
        handle.0.set(at);
        // SAFETY: an entry of the table, or null.
        unsafe { at.as_ref() }
    });
    let Some(shown) = found.map(|entry| entry.shown.load(Ordering::Acquire)) else { return Glimpse::Unknown };
    if shown & 1 == 1 { Glimpse::Empty } else { Glimpse::Moves(shown >> 1) }
}

/// When a line was looked at: to be given back with what was found out.
#[derive(Clone, Copy)]
pub struct Look {
    generation: u64,
    /// 0 where the line is not watched for this look.
    watch: u64,
}

/// A line as a claim finds it.
pub struct Line {
    /// To be given back with what was found out.
    pub look: Look,
    /// Whether `heads` lists every priority that has rows.
    pub complete: bool,
    /// Rows taken since the heads rose.
    pub taken: usize,
    /// The heads, highest priority first.
    pub heads: Vec<Head>,
}

/// Where the live rows of a line begin, this transaction's own included.
pub fn look(shared: &super::Shared, instance: Instance, lane: i32) -> Line {
    look_long(shared, instance, lane, false)
}

/// As [`look`]. With `watch`, what is lowered from now on is watched until [`rise`], unless somebody else has the line watched already.
pub fn look_long(shared: &super::Shared, instance: Instance, lane: i32, watch: bool) -> Line {
    if RESCANS.with(|p| p.any(|asked| asked.instance == instance)) {
        return Line { look: Look { generation: 0, watch: 0 }, complete: false, taken: 0, heads: Vec::new() };
    }
    let mut heads: Vec<Head> = Vec::with_capacity(PRIORITIES * 2);
    let watch = watch && WATCHING.get().is_none();
    let seen = with_entry(shared, instance, lane, true, |entry| {
        heads.extend_from_slice(&entry.heads[..entry.count]);
        let mut look = Look { generation: entry.generation, watch: 0 };
        if watch && entry.watch == 0 {
            look.watch = shared.heads.watches.fetch_add(1, Ordering::Relaxed) + 1;
            entry.watch = look.watch;
            entry.lowered = [NOTHING; PRIORITIES];
        }
        (look, entry.complete, entry.taken)
    });
    let (look, complete, taken) = seen.unwrap_or((Look { generation: 0, watch: 0 }, false, 0));
    if look.watch != 0 {
        WATCHING.set(Some((instance, lane, look.watch)));
    }
    PENDING.with(|p| {
        p.each(|own| {
            if own.instance == instance && own.lane == lane && own.head.at != NOTHING {
                match heads.iter_mut().find(|head| head.priority == own.head.priority) {
                    Some(head) => head.at = head.at.min(own.head.at),
                    None => heads.push(own.head),
                }
            }
        });
    });
    heads.sort_unstable_by_key(|head| std::cmp::Reverse(head.priority));
    Line { look, complete, taken, heads }
}

/// At abort, also of a savepoint: a look that an error ended has nothing to tell.
pub fn look_away() {
    let (Some((instance, lane, watch)), Some(shared)) = (WATCHING.take(), super::get()) else { return };
    with_entry(shared, instance, lane, false, |entry| {
        if entry.watch == watch {
            entry.watch = 0;
        }
    });
}

/// Whether what this transaction reads of a line of time may move its head: as [`may_tell`], and it has written nothing, since what it took away comes back
/// without telling if it aborts.
pub fn may_rise(shared: &super::Shared) -> bool {
    // SAFETY: reads this backend's own state.
    let unwritten = unsafe { pg_sys::GetTopTransactionIdIfAny() == pg_sys::InvalidTransactionId };
    unwritten && may_tell(shared)
}

/// Whether what this transaction reads of a lane may move its heads: its statements take fresh snapshots, and no prepared transaction is about that could bring
/// rows without telling. What it took away itself lowers the line again if that is undone.
pub fn may_tell(shared: &super::Shared) -> bool {
    // SAFETY: reads this backend's own state.
    let (fresh, preparing) = unsafe { (pg_sys::XactIsoLevel < pg_sys::XACT_REPEATABLE_READ as i32, max_prepared_xacts > 0) };
    fresh && (!preparing || prepared_since(shared).is_none())
}

/// Counts rows that a claim took from a line: what they leave behind is in the next claim's way until the head rises.
pub fn took(shared: &super::Shared, instance: Instance, lane: i32, rows: usize) {
    with_entry(shared, instance, lane, false, |entry| entry.taken = entry.taken.saturating_add(rows));
}

/// Raises heads to the first rows that a look showed, or to what the line was lowered to since, if that is known. `complete` says that the look was for every
/// priority there is.
pub fn rise(shared: &super::Shared, instance: Instance, lane: i32, look: Look, found: &[Head], complete: bool) {
    with_entry(shared, instance, lane, false, |entry| {
        let watched = look.watch != 0 && entry.watch == look.watch;
        if !watched && entry.generation != look.generation {
            return;
        }
        let mut all = true;
        for head in found {
            let lowered = entry.find(head.priority).filter(|_| watched).map_or(NOTHING, |place| entry.lowered[place]);
            all &= put(entry, Head { at: head.at.min(lowered), ..*head }, |_, found| found);
        }
        entry.complete |= complete && all;
        entry.taken = 0;
        if watched {
            entry.watch = 0;
        }
    });
    if look.watch != 0 {
        WATCHING.set(None);
    }
}

/// Sets the head of a priority; false where the entry has no room for one more.
fn put(entry: &mut Entry, head: Head, merge: impl FnOnce(i64, i64) -> i64) -> bool {
    let count = entry.count;
    if let Some(place) = entry.find(head.priority) {
        entry.heads[place].at = merge(entry.heads[place].at, head.at);
        return true;
    }
    // A priority in which nothing is left gives its place away.
    let place = if count < PRIORITIES { Some(count) } else { entry.heads.iter().position(|known| known.at == NOTHING) };
    match place {
        Some(place) => {
            entry.heads[place] = head;
            entry.lowered[place] = NOTHING;
            entry.count = count.max(place + 1);
            true
        }
        None => {
            entry.complete = false;
            // What is lowered from here on cannot be told any more.
            entry.watch = 0;
            false
        }
    }
}

/// Notes that this transaction put a row into a line; it lowers the line when it commits.
pub fn lower(instance: Instance, lane: i32, priority: i32, at: i64) {
    let below = |known: &Lower| known.instance == instance && known.lane == lane && known.head.priority == priority && known.head.at <= at;
    PENDING.with(|p| {
        if !p.any_here(below) {
            p.push(Lower { instance, lane, head: Head { priority, at } });
        }
    });
}

/// Notes that this transaction took a row out of a lane; it lowers the line if that is undone.
pub fn taken(instance: Instance, lane: i32, priority: i32, at: i64) {
    let below = |known: &Lower| known.instance == instance && known.lane == lane && known.head.priority == priority && known.head.at <= at;
    TAKEN.with(|p| {
        if !p.any_here(below) {
            p.push(Lower { instance, lane, head: Head { priority, at } });
        }
    });
}

/// At commit, after the row is visible, and at PREPARE; of what was taken, at abort, when it is there again.
pub fn commit(lower: &Lower) {
    let Some(shared) = super::get() else { return };
    // No sweep has looked beyond now, so only a claim that commits after its lease is over comes to stand before where one has.
    if lower.lane == SWEPT && lower.head.at > Instant::now().0.saturating_add(SECOND) {
        return;
    }
    with_entry(shared, lower.instance, lower.lane, true, |entry| {
        entry.moves += 1;
        if lower.head.at != NOTHING {
            entry.generation += 1;
            put(entry, lower.head, i64::min);
            if let Some(place) = entry.find(lower.head.priority) {
                entry.lowered[place] = entry.lowered[place].min(lower.head.at);
            }
        }
    });
}

/// Notes that this transaction dropped a lane; its entry goes when it commits.
pub fn gone(instance: Instance, lane: i32) {
    GONE.with(|p| p.push((instance, lane)));
}

/// At commit: the place of a dropped lane is free for another.
pub fn remove((instance, lane): &(Instance, i32)) {
    let Some(shared) = super::get() else { return };
    let key = Key { instance: *instance, lane: *lane };
    let mut found = false;
    let _held = super::lock(Lock::Heads);
    // SAFETY: the table is attached and the lock held; removing neither allocates nor raises.
    unsafe {
        let table = TABLE.load(Ordering::Acquire);
        pg_sys::hash_search(table, (&raw const key).cast::<c_void>(), pg_sys::HASHACTION::HASH_REMOVE, &mut found);
    }
    shared.heads.entries.fetch_sub(u64::from(found), Ordering::Relaxed);
}

/// Notes that this transaction took a row out of a lane, by whatever way; what was seen at its front is to be looked at again when it commits. No head moves.
pub fn stir(instance: Instance, lane: i32) {
    if !PENDING.with(|p| p.any_here(|known| known.instance == instance && known.lane == lane)) {
        PENDING.with(|p| p.push(Lower { instance, lane, head: Head { priority: 0, at: NOTHING } }));
    }
}

/// Has this transaction look from the beginning, and everybody once it commits.
pub fn rescan(instance: Instance, usage: bool) {
    RESCANS.with(|p| {
        if !p.any_here(|asked| asked.instance == instance && asked.usage >= usage) {
            p.push(Rescan { instance, usage });
        }
    });
}

/// At the end of a transaction that asked for it, also if it aborts: what it had taken away by other ways than the verbs is there again.
pub fn rescanned(asked: &Rescan) {
    if let Some(shared) = super::get() {
        forget(shared, asked.instance);
        // Queues and lanes came by the same ways.
        super::config::move_on();
        if asked.usage {
            super::budgets::unload(shared, asked.instance);
        }
    }
}

/// At PREPARE: no head rises until the worker has seen that no prepared transaction is about.
pub fn prepared() {
    if let Some(shared) = super::get() {
        shared.heads.prepared.fetch_add(1, Ordering::AcqRel);
    }
}

/// How many transactions were prepared so far; `None` where all are known to be over.
pub fn prepared_since(shared: &super::Shared) -> Option<u64> {
    let prepared = shared.heads.prepared.load(Ordering::Acquire);
    (prepared != shared.heads.over.load(Ordering::Acquire)).then_some(prepared)
}

/// Tells that of the first `prepared` prepared transactions none is about any more.
pub fn all_over(shared: &super::Shared, prepared: u64) {
    shared.heads.over.store(prepared, Ordering::Release);
}

/// Forgets every line of this database, so that what is there is found anew, and drops those of earlier instances of the extension. For rows that came by
/// other ways than the verbs.
pub fn forget(shared: &super::Shared, instance: Instance) {
    let table = TABLE.load(Ordering::Acquire);
    let _held = super::lock(Lock::Heads);
    // SAFETY: the lock is held for the whole scan; dynahash lets a scan remove the entry it is at.
    unsafe {
        let mut scan = pg_sys::HASH_SEQ_STATUS::default();
        pg_sys::hash_seq_init(&mut scan, table);
        loop {
            let at = pg_sys::hash_seq_search(&mut scan).cast::<Entry>();
            if at.is_null() {
                break;
            }
            let entry = &mut *at;
            if entry.key.instance == instance {
                entry.generation += 1;
                entry.moves += 1;
                entry.complete = false;
                entry.watch = 0;
                entry.count = 0;
                entry.show();
            } else if entry.key.instance.database == instance.database {
                let key = entry.key;
                let mut found = false;
                pg_sys::hash_search(table, (&raw const key).cast::<c_void>(), pg_sys::HASHACTION::HASH_REMOVE, &mut found);
                shared.heads.entries.fetch_sub(u64::from(found), Ordering::Relaxed);
            }
        }
    }
}
