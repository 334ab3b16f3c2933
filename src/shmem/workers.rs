//! Which database has a maintenance worker, where its latch is, and how its last rounds went. It is the launcher's only memory, so that whatever becomes of the
//! launcher, the workers it started are still supervised. A slot belongs to one database:
//!
//! * `pid` 0: the database asks for a worker, from `retry_at` on;
//! * `pid` set: its worker is there, and gives the slot back, or turns it into a request, when it ends in whatever way.
//!
//! A worker that dies by SIGKILL takes the whole of shared memory with it, so no slot outlives its worker.

use super::Lock;
use crate::guc;
use crate::values::{Instant, SECOND};
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::{Cell, UnsafeCell};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Longest message of a failed step that is kept for `stint.maintenance`, in bytes.
const FAILURE_BYTES: usize = 512;
/// A worker that lived this long has recovered: its next death is followed by the shortest pause again.
const HEALTHY: i64 = 10 * SECOND;
const SHORTEST_PAUSE: i64 = SECOND;
const LONGEST_PAUSE: i64 = 60 * SECOND;

/// In shared memory, beside the slots.
#[repr(C)]
pub struct Shared {
    launcher_pid: AtomicI32,
    launcher_latch: AtomicPtr<pg_sys::Latch>,
    /// When PostgreSQL last had no room for another background worker; 0: never, or it has room again.
    refused_at: AtomicI64,
}

/// One database's worker. Written under [`Lock::Workers`] where more than its own worker writes; read without.
#[repr(C)]
pub struct Slot {
    /// 0: free.
    database: AtomicU32,
    pid: AtomicI32,
    latch: AtomicPtr<pg_sys::Latch>,
    /// Asked for again while a worker is there, which may be about to leave.
    again: AtomicBool,
    /// A doorbell of this database was rung since the worker last looked.
    rung: AtomicBool,
    /// Rows that accounting has to add up, as they are written: it counts those of transactions that abort, too.
    to_add: AtomicU64,
    retry_at: AtomicI64,
    pause: AtomicI64,
    started_at: AtomicI64,
    round_at: AtomicI64,
    clean_round_at: AtomicI64,
    failed_at: AtomicI64,
    /// Guarded by [`Lock::Workers`]: text in UTF-8, ended by a zero byte.
    failure: UnsafeCell<[u8; FAILURE_BYTES]>,
}

// SAFETY: every field is atomic but `failure`, which is touched only under Lock::Workers.
unsafe impl Sync for Slot {}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(null_mut());

thread_local! {
    /// One entry for each CREATE EXTENSION in this transaction.
    pub static PENDING: Pending<()> = const { Pending::new() };
    /// The slot of this process, where it is a worker.
    static MINE: Cell<Option<&'static Slot>> = const { Cell::new(None) };
}

pub(super) fn table_size() -> usize {
    size_of::<Slot>() * guc::max_databases()
}

pub(super) fn attach_table() {
    let mut found = false;
    // SAFETY: runs in the start-up hook under the add-in lock; all zero is a free slot.
    unsafe {
        let slots = pg_sys::ShmemInitStruct(c"pg_stint workers".as_ptr(), table_size() as _, &mut found).cast::<Slot>();
        if !found {
            std::ptr::write_bytes(slots, 0, guc::max_databases());
        }
        SLOTS.store(slots, Ordering::Release);
    }
}

fn slots() -> &'static [Slot] {
    let slots = SLOTS.load(Ordering::Acquire);
    if slots.is_null() {
        return &[];
    }
    // SAFETY: set once at server start with this many slots, never freed; all fields tolerate sharing.
    unsafe { std::slice::from_raw_parts(slots, guc::max_databases()) }
}

fn of(database: u32) -> Option<&'static Slot> {
    slots().iter().find(|slot| slot.database.load(Ordering::Acquire) == database)
}

fn set(latch: &AtomicPtr<pg_sys::Latch>) {
    let latch = latch.load(Ordering::Acquire);
    if !latch.is_null() {
        // SAFETY: the latch of a PGPROC, which lives as long as the server; set late, it wakes a stranger for nothing.
        unsafe { pg_sys::SetLatch(latch) };
    }
}

fn my_latch() -> *mut pg_sys::Latch {
    // SAFETY: this process's own latch, in shared memory once it has a PGPROC.
    unsafe { pg_sys::MyLatch }
}

fn my_pid() -> i32 {
    // SAFETY: set when the process started.
    unsafe { pg_sys::MyProcPid }
}

impl Slot {
    fn claim(&self, database: u32) {
        self.pid.store(0, Ordering::Relaxed);
        self.latch.store(null_mut(), Ordering::Relaxed);
        self.again.store(false, Ordering::Relaxed);
        for time in [&self.retry_at, &self.started_at, &self.round_at, &self.clean_round_at, &self.failed_at] {
            time.store(0, Ordering::Relaxed);
        }
        self.pause.store(SHORTEST_PAUSE, Ordering::Relaxed);
        self.database.store(database, Ordering::Release);
    }

    fn free(&self) {
        self.database.store(0, Ordering::Release);
    }

    fn waits(&self) -> bool {
        self.database.load(Ordering::Acquire) != 0 && self.pid.load(Ordering::Acquire) == 0
    }
}

/// The slot of a database, taken if it has none. `None` where all are taken. The lock is held.
fn claimed(database: u32) -> Option<&'static Slot> {
    of(database).or_else(|| {
        let slot = of(0)?;
        slot.claim(database);
        Some(slot)
    })
}

// What sessions call

/// Counts rows that accounting has to add up.
pub fn to_add(database: u32, rows: usize) {
    if let Some(slot) = of(database) {
        slot.to_add.fetch_add(rows as u64, Ordering::Relaxed);
    }
}

/// Wakes the maintenance worker of a database, if it has one. Called in commit callbacks: neither allocates nor raises.
pub fn wake(_shared: &super::Shared, database: u32) {
    if let Some(slot) = of(database) {
        slot.rung.store(true, Ordering::Release);
        set(&slot.latch);
    }
}

/// Asks for a worker in this database when this transaction commits.
pub fn ask() {
    PENDING.with(|p| p.push(()));
}

/// At commit of CREATE EXTENSION: the launcher starts a worker here. Where all slots are taken nothing happens; `stint.doctor()` tells.
pub fn commit(_: &()) {
    let Some(shared) = super::get() else { return };
    // SAFETY: set for every backend connected to a database.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    {
        let _held = super::lock(Lock::Workers);
        if let Some(slot) = claimed(database) {
            slot.again.store(true, Ordering::Release);
            slot.retry_at.store(0, Ordering::Release);
        }
    }
    set(&shared.workers.launcher_latch);
}

// What the launcher calls

/// Makes this process the launcher that requests wake.
pub fn launcher_is_here(shared: &super::Shared) {
    shared.workers.launcher_latch.store(my_latch(), Ordering::Release);
    shared.workers.launcher_pid.store(my_pid(), Ordering::Release);
}

/// The launcher ends.
pub fn launcher_is_gone() {
    if let Some(shared) = super::get() {
        shared.workers.launcher_latch.store(null_mut(), Ordering::Release);
        shared.workers.launcher_pid.store(0, Ordering::Release);
    }
}

/// Whether a database has a slot: a worker, or a request for one.
pub fn has_slot(database: u32) -> bool {
    of(database).is_some()
}

/// Asks for a worker in a database to see whether it has the extension. False where all slots are taken.
pub fn request(database: u32) -> bool {
    let _held = super::lock(Lock::Workers);
    claimed(database).is_some()
}

/// Takes a request back, unless its worker has come.
pub fn withdraw(database: u32) {
    let _held = super::lock(Lock::Workers);
    if let Some(slot) = of(database)
        && slot.waits()
        && !slot.again.load(Ordering::Acquire)
    {
        slot.free();
    }
}

/// Drops the requests of databases that `exists` does not know any more.
pub fn forget_unless(exists: impl Fn(u32) -> bool) {
    let _held = super::lock(Lock::Workers);
    slots().iter().filter(|slot| slot.waits() && !exists(slot.database.load(Ordering::Acquire))).for_each(Slot::free);
}

/// The databases that ask for a worker, with the time from which on they may have it.
pub fn requests() -> impl Iterator<Item = (u32, Instant)> {
    slots().iter().filter(|slot| slot.waits()).map(|slot| (slot.database.load(Ordering::Acquire), Instant(slot.retry_at.load(Ordering::Acquire))))
}

/// Puts a request off: until then its worker is on its way, or there is no room for it.
pub fn postpone(database: u32, until: Instant) {
    let _held = super::lock(Lock::Workers);
    if let Some(slot) = of(database)
        && slot.waits()
    {
        slot.retry_at.store(until.0, Ordering::Release);
    }
}

/// Notes whether PostgreSQL had room for a worker.
pub fn note_room(shared: &super::Shared, room: bool) {
    shared.workers.refused_at.store(if room { 0 } else { Instant::now().0 }, Ordering::Release);
}

// What a worker calls

/// Makes this process the worker of a database. False where it has one already, or all slots are taken.
pub fn arrive(database: u32) -> bool {
    let _held = super::lock(Lock::Workers);
    let Some(slot) = claimed(database).filter(|slot| slot.waits()) else { return false };
    slot.started_at.store(Instant::now().0, Ordering::Relaxed);
    slot.again.store(false, Ordering::Relaxed);
    slot.round_at.store(0, Ordering::Relaxed);
    slot.clean_round_at.store(0, Ordering::Relaxed);
    // What was rung before it came is not known, so it looks.
    slot.rung.store(true, Ordering::Relaxed);
    slot.latch.store(my_latch(), Ordering::Release);
    slot.pid.store(my_pid(), Ordering::Release);
    MINE.set(Some(slot));
    true
}

/// The worker ends. One that found no extension frees its slot, unless the extension was made anew meanwhile; any other death leaves a request.
pub fn depart(found_no_extension: bool) {
    let Some(slot) = MINE.take() else { return };
    {
        let _held = super::lock(Lock::Workers);
        let now = Instant::now();
        slot.latch.store(null_mut(), Ordering::Release);
        if found_no_extension {
            if slot.again.load(Ordering::Acquire) {
                slot.claim(slot.database.load(Ordering::Acquire));
            } else {
                slot.pid.store(0, Ordering::Release);
                slot.free();
            }
        } else {
            let healthy = now.0 - slot.started_at.load(Ordering::Relaxed) > HEALTHY;
            let pause = if healthy { SHORTEST_PAUSE } else { slot.pause.load(Ordering::Relaxed) };
            slot.retry_at.store(now.plus(pause).0, Ordering::Release);
            slot.pause.store((pause * 2).min(LONGEST_PAUSE), Ordering::Relaxed);
            slot.pid.store(0, Ordering::Release);
        }
    }
    if let Some(shared) = super::get() {
        set(&shared.workers.launcher_latch);
    }
}

/// Forgets that the extension was asked for again: called before looking whether it is there.
pub fn looking() {
    if let Some(slot) = MINE.get() {
        slot.again.store(false, Ordering::Release);
    }
}

/// Whether a doorbell of this worker's database was rung since [`answer`].
pub fn rung() -> bool {
    MINE.get().is_some_and(|slot| slot.rung.load(Ordering::Acquire))
}

/// What [`to_add`] counted in the database of this worker. Meaningful only in comparison.
pub fn counted_to_add() -> u64 {
    MINE.get().map_or(0, |slot| slot.to_add.load(Ordering::Relaxed))
}

/// Called before the rung bells are taken.
pub fn answer() {
    if let Some(slot) = MINE.get() {
        slot.rung.store(false, Ordering::Release);
    }
}

/// Notes a round of this worker, `clean` if no step failed in it.
pub fn note_round(clean: bool) {
    if let Some(slot) = MINE.get() {
        let now = Instant::now().0;
        slot.round_at.store(now, Ordering::Release);
        if clean {
            slot.clean_round_at.store(now, Ordering::Release);
        }
    }
}

/// Notes a failed step of this worker.
pub fn note_failure(what: &str) {
    let Some(slot) = MINE.get() else { return };
    let bytes = &what.as_bytes()[..what.floor_char_boundary(FAILURE_BYTES - 1)];
    slot.failed_at.store(Instant::now().0, Ordering::Release);
    let _held = super::lock(Lock::Workers);
    // SAFETY: the lock is held.
    let text = unsafe { &mut *slot.failure.get() };
    text.fill(0);
    text[..bytes.len()].copy_from_slice(bytes);
}

// What people ask

/// What is known of one database's worker.
pub struct Report {
    /// The database's oid.
    pub database: u32,
    /// The worker's process; `None` where it is asked for and not there.
    pub pid: Option<i32>,
    /// When it started.
    pub started_at: Option<Instant>,
    /// When its last round ended.
    pub round_at: Option<Instant>,
    /// When its last round without a failed step ended.
    pub clean_round_at: Option<Instant>,
    /// When a step last failed.
    pub failed_at: Option<Instant>,
    /// The step and its error.
    pub failure: Option<String>,
}

fn time(at: &AtomicI64) -> Option<Instant> {
    Some(at.load(Ordering::Acquire)).filter(|at| *at != 0).map(Instant)
}

/// All workers, and the databases that ask for one.
pub fn reports() -> Vec<Report> {
    let taken = slots().iter().filter(|slot| slot.database.load(Ordering::Acquire) != 0);
    taken
        .map(|slot| {
            let mut text = [0; FAILURE_BYTES];
            {
                let _held = super::lock(Lock::Workers);
                // SAFETY: the lock is held.
                text.copy_from_slice(unsafe { &*slot.failure.get() });
            }
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(FAILURE_BYTES);
            let failed_at = time(&slot.failed_at);
            Report {
                database: slot.database.load(Ordering::Acquire),
                pid: Some(slot.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0),
                started_at: time(&slot.started_at),
                round_at: time(&slot.round_at),
                clean_round_at: time(&slot.clean_round_at),
                failed_at,
                failure: failed_at.map(|_| String::from_utf8_lossy(&text[..end]).into_owned()),
            }
        })
        .collect()
}

/// The launcher's process, and when PostgreSQL last had no room for a worker.
pub fn launcher() -> (Option<i32>, Option<Instant>) {
    match super::get() {
        Some(shared) => (Some(shared.workers.launcher_pid.load(Ordering::Acquire)).filter(|pid| *pid != 0), time(&shared.workers.refused_at)),
        None => (None, None),
    }
}
