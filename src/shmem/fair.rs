//! What the groups of fair queues have got: one entry for each (database, extension instance, queue, group) with its time (tokens by weight, see
//! `stint_core::fair`), and one for each queue with its floor, the time from which a group goes on that had nothing to claim.
//!
//! A claim charges in one step that no other session sees half done, an abort gives back, and the end of an attempt settles to what it used once its commit is
//! visible. Nothing here is a promise that a crash could break: after a restart all is empty and all groups start equal.
//!
//! The table is bounded. An entry that is not above its queue's floor says no more than no entry, so such entries make room for others; groups that find none
//! share their queue's entry, so they have their turns as one. What an entry says is also published in atomics, and a claim looks at a thousand of them
//! without a lock.

use super::{Instance, Lock};
use crate::guc;
use crate::values::{Instant, SECOND};
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::{Cell, UnsafeCell};
use std::os::raw::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

unsafe extern "C" {
    /// The server's own hash of bytes, which pgrx does not bind. It raises nothing.
    fn hash_bytes_extended(key: *const u8, length: std::os::raw::c_int, seed: u64) -> u64;
}

/// A group's name in shared memory: a hash of 128 bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group([u64; 2]);

impl Group {
    /// Of a group key, or of the tasks without one.
    pub fn of(key: Option<&str>) -> Self {
        let hash = |seed| {
            key.map_or(0, |key| {
                // SAFETY: reads the bytes of the key.
                unsafe { hash_bytes_extended(key.as_ptr(), key.len() as i32, seed) }
            })
        };
        Group([hash(1), hash(2)])
    }
}

/// What an entry is of.
const QUEUE: i32 = 1;
const GROUP: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    instance: Instance,
    queue: i32,
    kind: i32,
    group: Group,
}

impl Key {
    fn queue(instance: Instance, queue: i32) -> Self {
        Key { instance, queue, kind: QUEUE, group: Group([0, 0]) }
    }

    fn group(instance: Instance, queue: i32, group: Group) -> Self {
        Key { instance, queue, kind: GROUP, group }
    }
}

#[repr(C)]
struct Entry {
    key: Key,
    /// The time; of a queue's entry, that of the groups that share it.
    at: f64,
    /// How much of it transactions still open have charged.
    open: f64,
    /// Tokens charged and settled since the entry was made.
    tokens: i64,
    /// When a queue was last claimed from.
    used: i64,
    shown_at: AtomicU64,
    shown_open: AtomicU64,
    /// The queue's floor, as the bits of a number that is never negative: they are in its order.
    floor: AtomicU64,
}

impl Entry {
    fn show(&self) {
        self.shown_at.store(self.at.to_bits(), Ordering::Release);
        self.shown_open.store(self.open.to_bits(), Ordering::Release);
    }

    fn floor(&self) -> f64 {
        f64::from_bits(self.floor.load(Ordering::Acquire))
    }
}

/// In shared memory, the table guarded by [`Lock::Fair`].
#[repr(C)]
pub struct Shared {
    entries: AtomicUsize,
    /// When room was last looked for.
    cleared: UnsafeCell<i64>,
    /// Entries that came or went: what was not found is not there while this stays.
    changes: AtomicU64,
}

// SAFETY: what is not atomic is touched only under Lock::Fair.
unsafe impl Sync for Shared {}

static TABLE: AtomicPtr<pg_sys::HTAB> = AtomicPtr::new(null_mut());

pub(super) fn table_size() -> usize {
    // SAFETY: arithmetic.
    unsafe { pg_sys::hash_estimate_size(guc::max_groups() as _, size_of::<Entry>()) as usize }
}

pub(super) fn attach_table() {
    let capacity = guc::max_groups() as i64;
    // SAFETY: runs in the start-up hook under the add-in lock.
    unsafe {
        let mut info = pg_sys::HASHCTL { keysize: size_of::<Key>(), entrysize: size_of::<Entry>(), ..Default::default() };
        let flags = (pg_sys::HASH_ELEM | pg_sys::HASH_BLOBS) as i32;
        TABLE.store(pg_sys::ShmemInitHash(c"pg_stint groups".as_ptr(), capacity, capacity, &mut info, flags), Ordering::Release);
    }
}

/// What a transaction did to an entry.
#[derive(Clone, Copy)]
enum What {
    /// Charged by a claim: given back at abort.
    Charged,
    /// The end of an attempt: settled at commit.
    Ended,
}

/// One such change.
#[derive(Clone, Copy)]
pub struct Move {
    key: Key,
    time: f64,
    tokens: i64,
    what: What,
}

thread_local! {
    /// What this transaction charged and what it will settle.
    pub static PENDING: Pending<Move> = const { Pending::new() };
}

fn search(key: &Key, action: pg_sys::HASHACTION::Type) -> *mut Entry {
    let mut found = false;
    // SAFETY: the table is attached and the lock held; the key is of the declared size; no action used here raises.
    unsafe { pg_sys::hash_search(TABLE.load(Ordering::Acquire), (&raw const *key).cast::<c_void>(), action, &mut found) }.cast::<Entry>()
}

fn full(shared: &super::Shared) -> bool {
    shared.fair.entries.load(Ordering::Acquire) >= guc::max_groups()
}

/// The entry of that name, under the lock; with `make`, made where the table has room.
fn entry(shared: &super::Shared, key: Key, make: bool) -> Option<&'static mut Entry> {
    let at = search(&key, pg_sys::HASHACTION::HASH_FIND);
    if !at.is_null() {
        // SAFETY: an entry of the table, which never moves; the lock makes it ours.
        return Some(unsafe { &mut *at });
    }
    if !make || full(shared) {
        return None;
    }
    let at = search(&key, pg_sys::HASHACTION::HASH_ENTER_NULL);
    if at.is_null() {
        return None;
    }
    shared.fair.entries.fetch_add(1, Ordering::AcqRel);
    shared.fair.changes.fetch_add(1, Ordering::AcqRel);
    let zero = || AtomicU64::new(0);
    // SAFETY: a new entry of the table, whose body dynahash leaves as it was.
    unsafe {
        at.write(Entry { key, at: 0.0, open: 0.0, tokens: 0, used: 0, shown_at: zero(), shown_open: zero(), floor: zero() });
        Some(&mut *at)
    }
}

/// The entry that a group goes by: its own, or else its queue's.
fn place(shared: &super::Shared, key: Key) -> Option<&'static mut Entry> {
    match entry(shared, key, true) {
        None => entry(shared, Key::queue(key.instance, key.queue), true),
        own => own,
    }
}

/// How long a queue that nobody claims from is remembered, in microseconds: then it is as after a restart.
const REMEMBERED: i64 = 3600 * SECOND;

/// Makes room in a full table, at most once in a second: entries go that say no more than no entry. The lock is held; `stale` has room for every entry.
fn clear(shared: &super::Shared, stale: &mut Vec<Key>, now: i64) {
    // SAFETY: the lock is held.
    let cleared = unsafe { &mut *shared.fair.cleared.get() };
    if !full(shared) || now.saturating_sub(*cleared) < SECOND {
        return;
    }
    *cleared = now;
    // SAFETY: the lock is held for the whole scan, which runs to its end and changes nothing.
    unsafe {
        let mut scan = pg_sys::HASH_SEQ_STATUS::default();
        pg_sys::hash_seq_init(&mut scan, TABLE.load(Ordering::Acquire));
        loop {
            let at = pg_sys::hash_seq_search(&mut scan).cast::<Entry>();
            if at.is_null() {
                break;
            }
            let seen = &*at;
            let queue = search(&Key::queue(seen.key.instance, seen.key.queue), pg_sys::HASHACTION::HASH_FIND);
            let known = !queue.is_null() && now.saturating_sub((*queue).used) < REMEMBERED;
            let tells = seen.key.kind == QUEUE || seen.open > 0.0 || !queue.is_null() && seen.at > (*queue).floor();
            if stale.len() < stale.capacity() && !(known && tells) {
                stale.push(seen.key);
            }
        }
    }
    for key in stale.drain(..) {
        if !search(&key, pg_sys::HASHACTION::HASH_REMOVE).is_null() {
            shared.fair.entries.fetch_sub(1, Ordering::AcqRel);
        }
    }
    shared.fair.changes.fetch_add(1, Ordering::AcqRel);
}

/// Where a backend remembers an entry.
#[derive(Clone)]
pub struct Handle {
    entry: Cell<*const Entry>,
    /// The count of changes when it was looked for and not found.
    missed: Cell<Option<u64>>,
}

impl Default for Handle {
    fn default() -> Self {
        Handle { entry: Cell::new(null()), missed: Cell::new(None) }
    }
}

/// A group as a backend knows it.
#[derive(Clone)]
pub struct Seat {
    /// Its name.
    pub group: Group,
    /// Its entry.
    pub handle: Handle,
}

/// Where a group stands.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Its time, not below the queue's floor.
    pub at: f64,
    /// The same without what transactions still open have charged.
    pub firm: f64,
}

fn standing(at: f64, open: f64, floor: f64) -> Standing {
    Standing { at: at.max(floor), firm: (at - open).max(floor) }
}

/// Looks at groups of a queue in passing. Those never seen are looked up, and made, under one lock.
pub fn glance(shared: &super::Shared, instance: Instance, queue: i32, of_queue: &Handle, seats: &[&Seat], now: Instant) -> Vec<Standing> {
    let key = Key::queue(instance, queue);
    let changes = shared.fair.changes.load(Ordering::Acquire);
    // SAFETY: entries lie in shared memory for good. One that was removed and used again has another key, and is looked up anew.
    let known = |handle: &Handle, key: &Key| unsafe { handle.entry.get().as_ref().filter(|entry| (&raw const entry.key).read_volatile() == *key) };
    let number = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Acquire));
    // Where all are known, or known not to be there: their standings.
    let look = |changes: u64| {
        let own = known(of_queue, &key)?;
        let floor = own.floor();
        let stands = |entry: &Entry| standing(number(&entry.shown_at), number(&entry.shown_open), floor);
        let mut standings = Vec::with_capacity(seats.len());
        for seat in seats {
            match known(&seat.handle, &Key::group(instance, queue, seat.group)) {
                Some(entry) => standings.push(stands(entry)),
                None if seat.handle.missed.get() == Some(changes) => standings.push(stands(own)),
                None => return None,
            }
        }
        Some(standings)
    };
    look(changes).unwrap_or_else(|| {
        let unknown = |seat: &&&Seat| known(&seat.handle, &Key::group(instance, queue, seat.group)).is_none();
        let mut stale = Vec::with_capacity(if full(shared) { guc::max_groups() } else { 0 });
        let held = super::lock(Lock::Fair);
        clear(shared, &mut stale, now.0);
        if let Some(own) = entry(shared, key, true) {
            own.used = now.0;
            of_queue.entry.set(&raw const *own);
        }
        for seat in seats.iter().filter(unknown) {
            let found = entry(shared, Key::group(instance, queue, seat.group), true).map_or(null(), |entry| &raw const *entry);
            seat.handle.entry.set(found);
        }
        let changes = shared.fair.changes.load(Ordering::Acquire);
        seats.iter().filter(|seat| seat.handle.entry.get().is_null()).for_each(|seat| seat.handle.missed.set(Some(changes)));
        drop(held);
        // A table that is full to the last entry knows nothing of this queue.
        look(changes).unwrap_or_else(|| vec![standing(0.0, 0.0, 0.0); seats.len()])
    })
}

/// Lets `decide` look at the times of groups, and charges each of them what it says, in tokens, as time of its weight. That is this transaction's: given back if
/// it aborts, kept if it commits.
pub fn charge<R>(
    shared: &super::Shared,
    instance: Instance,
    queue: i32,
    seats: &[(&Seat, f64)],
    now: Instant,
    decide: impl FnOnce(&[f64]) -> (R, Vec<i64>),
) -> R {
    PENDING.with(|p| p.make_room(seats.len()));
    let mut times = Vec::with_capacity(seats.len());
    let _held = super::lock(Lock::Fair);
    let mut floor = 0.0;
    if let Some(own) = entry(shared, Key::queue(instance, queue), true) {
        own.used = now.0;
        floor = own.floor();
    }
    for (seat, _) in seats {
        times.push(place(shared, Key::group(instance, queue, seat.group)).map_or(floor, |entry| entry.at.max(floor)));
    }
    let (answer, tokens) = decide(&times);
    for ((seat, weight), tokens) in seats.iter().zip(tokens).filter(|(_, tokens)| *tokens != 0) {
        let Some(entry) = place(shared, Key::group(instance, queue, seat.group)) else { continue };
        let time = stint_core::fair::time(tokens, *weight);
        entry.at = entry.at.max(floor) + time;
        entry.open += time;
        entry.tokens = entry.tokens.saturating_add(tokens);
        entry.show();
        PENDING.with(|p| p.push(Move { key: entry.key, time, tokens, what: What::Charged }));
    }
    answer
}

/// Raises a queue's floor, if it is not there already.
pub fn raise(of_queue: &Handle, instance: Instance, queue: i32, floor: f64) {
    // SAFETY: as in `glance`.
    let entry = unsafe { of_queue.entry.get().as_ref().filter(|entry| (&raw const entry.key).read_volatile() == Key::queue(instance, queue)) };
    if let Some(entry) = entry.filter(|_| floor.is_finite() && floor > 0.0) {
        entry.floor.fetch_max(floor.to_bits(), Ordering::AcqRel);
    }
}

/// Charges a group the difference between what it was charged and what its attempt used, when this transaction commits.
pub fn settle(instance: Instance, queue: i32, group: Group, tokens: i64, weight: f64) {
    let key = Key::group(instance, queue, group);
    PENDING.with(|p| p.push(Move { key, time: stint_core::fair::time(tokens, weight), tokens, what: What::Ended }));
}

/// What a group was charged and its time, not below its queue's floor; `None` where nothing is remembered of it.
pub fn look(shared: &super::Shared, instance: Instance, queue: i32, group: Group) -> Option<(i64, f64)> {
    let _held = super::lock(Lock::Fair);
    let floor = entry(shared, Key::queue(instance, queue), false)?.floor();
    Some(entry(shared, Key::group(instance, queue, group), false).map_or((0, floor), |entry| (entry.tokens, entry.at.max(floor))))
}

/// At commit. Allocates nothing and raises nothing.
pub fn commit(moved: &Move) {
    let Some(shared) = super::get() else { return };
    let _held = super::lock(Lock::Fair);
    match moved.what {
        What::Charged => {
            if let Some(entry) = entry(shared, moved.key, false) {
                entry.open = (entry.open - moved.time).max(0.0);
                entry.show();
            }
        }
        What::Ended => {
            let floor = entry(shared, Key::queue(moved.key.instance, moved.key.queue), false).map_or(0.0, |queue| queue.floor());
            let known = entry(shared, moved.key, false).is_some();
            if let Some(entry) = place(shared, moved.key) {
                // One whose entry made room for another stood at the floor.
                entry.at = if known { entry.at + moved.time } else { entry.at.max(floor) + moved.time };
                entry.tokens = entry.tokens.saturating_add(moved.tokens);
                entry.show();
            }
        }
    }
}

/// At abort: what was charged was never got.
pub fn abort(moved: &Move) {
    let Some(shared) = super::get() else { return };
    if matches!(moved.what, What::Charged) {
        let _held = super::lock(Lock::Fair);
        if let Some(entry) = entry(shared, moved.key, false) {
            entry.at -= moved.time;
            entry.open = (entry.open - moved.time).max(0.0);
            entry.tokens = entry.tokens.saturating_sub(moved.tokens);
            entry.show();
        }
    }
}
