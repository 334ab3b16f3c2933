//! Live usage of budgets: one entry for each (database, extension instance, budget) with the tasks running, the tokens in flight and the window of what was
//! spent. The truth is the rows of `stint.place_running` and `stint.task_attempts`; this is what they add up to, plus what transactions still open have
//! reserved.
//!
//! A claim reserves before it touches rows and an abort gives back; the end of an attempt releases and settles when its commit is visible and never before. So
//! at any commit point the running rows use no more than the limit. Every transaction that reserves or releases first takes ROW EXCLUSIVE on
//! `stint.budget_config` (cheap: a fast-path lock) and keeps it past these callbacks; [`load`] is called under SHARE on it, when nothing can be in flight, and
//! then the sums over committed rows are exact. After a crash all entries are gone, also the mark that says "loaded", and the first budgeted claim loads.
//!
//! What an entry says is also published in atomics: a claim on a queue of many budgets glances at them all without a lock, and takes the lock only for those
//! of the lanes that may have room.

use super::{Instance, Lock};
use crate::errors::Fault;
use crate::values::Instant;
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::{Cell, UnsafeCell};
use std::os::raw::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};
use stint_core::budget::{Settlement, State, Usage};
use stint_core::window::{Spent, Window};

/// The number under which an instance's "loaded" mark stands; budgets count from 1.
const LOADED: i32 = 0;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    instance: Instance,
    budget: i32,
}

#[repr(C)]
struct Entry {
    key: Key,
    usage: Usage,
    window: Window,
    shown: Shown,
}

/// What the entry says, for whoever looks without the lock.
#[repr(C)]
#[derive(Default)]
struct Shown {
    running: AtomicI64,
    tokens: AtomicI64,
    requests: AtomicI64,
    spent: AtomicI64,
    cost: AtomicI64,
    /// From this instant on the window may remember less than is shown.
    until: AtomicI64,
}

impl Entry {
    fn state(&self) -> State {
        State { usage: self.usage, spent: self.window.total() }
    }

    /// Shows what the entry says after a change.
    fn show(&mut self) {
        let State { usage, spent } = self.state();
        self.shown.running.store(usage.running, Ordering::Release);
        self.shown.tokens.store(usage.tokens, Ordering::Release);
        self.shown.requests.store(spent.requests, Ordering::Release);
        self.shown.spent.store(spent.tokens, Ordering::Release);
        self.shown.cost.store(spent.cost, Ordering::Release);
        self.shown.until.store(self.window.next().unwrap_or(i64::MIN), Ordering::Release);
    }
}

/// In shared memory, the table guarded by [`Lock::Budgets`].
#[repr(C)]
pub struct Shared {
    /// How many entries the table holds: PostgreSQL's own limit is not one.
    entries: UnsafeCell<usize>,
    /// How often an instance's "loaded" mark was taken away.
    unloads: AtomicU64,
}

// SAFETY: what is not atomic is touched only under Lock::Budgets.
unsafe impl Sync for Shared {}

static TABLE: AtomicPtr<pg_sys::HTAB> = AtomicPtr::new(null_mut());

pub(super) fn table_size() -> usize {
    // SAFETY: arithmetic.
    unsafe { pg_sys::hash_estimate_size(super::budget_capacity() as _, size_of::<Entry>()) as usize }
}

pub(super) fn attach_table() {
    let capacity = super::budget_capacity() as i64;
    // SAFETY: runs in the start-up hook under the add-in lock.
    unsafe {
        let mut info = pg_sys::HASHCTL { keysize: size_of::<Key>(), entrysize: size_of::<Entry>(), ..Default::default() };
        let table =
            pg_sys::ShmemInitHash(c"pg_stint budgets".as_ptr(), capacity, capacity, &mut info, (pg_sys::HASH_ELEM | pg_sys::HASH_BLOBS) as i32);
        TABLE.store(table, Ordering::Release);
    }
}

/// What a transaction moved, settled when it ends.
#[derive(Clone, Copy)]
enum What {
    /// Reserved at an instant: given back at abort.
    Reserved { at: i64, state: State },
    /// An attempt that began and ended: released and settled at commit.
    Ended { usage: Usage, began: i64, ended: i64, settlement: Settlement },
}

/// One of them, of one budget.
#[derive(Clone, Copy)]
pub struct Move {
    instance: Instance,
    budget: i32,
    what: What,
}

thread_local! {
    /// What this transaction reserved and what it will release.
    pub static PENDING: Pending<Move> = const { Pending::new() };
}

/// The entry of a budget, under the lock. `None` where it is not there (and, with `make`, where the table is full).
fn entry(shared: &super::Shared, instance: Instance, budget: i32, make: bool) -> Option<&'static mut Entry> {
    let key = Key { instance, budget };
    let table = TABLE.load(Ordering::Acquire);
    let look = |action| {
        let mut found = false;
        // SAFETY: the table and the lock are held; the key is of the declared size.
        let at = unsafe { pg_sys::hash_search(table, (&raw const key).cast::<c_void>(), action, &mut found) }.cast::<Entry>();
        (at, found)
    };
    let (at, _) = look(pg_sys::HASHACTION::HASH_FIND);
    if !at.is_null() {
        // SAFETY: an entry of the table, which never moves; the lock makes it ours.
        return Some(unsafe { &mut *at });
    }
    // SAFETY: the lock is held.
    let entries = unsafe { &mut *shared.budgets.entries.get() };
    if !make || *entries >= super::budget_capacity() {
        return None;
    }
    let (at, _) = look(pg_sys::HASHACTION::HASH_ENTER_NULL);
    if at.is_null() {
        return None;
    }
    *entries += 1;
    // SAFETY: a new entry of the table, whose body dynahash leaves as it was.
    unsafe {
        at.write(Entry { key, usage: Usage::default(), window: Window::default(), shown: Shown::default() });
        Some(&mut *at)
    }
}

fn table_full() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED, "shared memory has no room for the live usage of another budget")
        .hint("Raise the setting stint.max_budgets and restart the server.")
        .raise()
}

/// How often a "loaded" mark was taken away since the server started: what was seen loaded is so while this stays.
pub fn unloads(shared: &super::Shared) -> u64 {
    shared.budgets.unloads.load(Ordering::Acquire)
}

/// Whether this instance's usage has been derived from the rows since the server started and since a window's length was changed.
pub fn loaded(shared: &super::Shared, instance: Instance) -> bool {
    let _held = super::lock(Lock::Budgets);
    entry(shared, instance, LOADED, false).is_some_and(|mark| mark.usage.running > 0)
}

/// Has the instance's usage derived from the rows again before the next budgeted claim. Allocates nothing and raises nothing: it is called at commit.
pub fn unload(shared: &super::Shared, instance: Instance) {
    let _held = super::lock(Lock::Budgets);
    if let Some(mark) = entry(shared, instance, LOADED, false) {
        mark.usage.running = 0;
    }
    shared.budgets.unloads.fetch_add(1, Ordering::AcqRel);
}

/// Calls `look` for every entry. The lock is held.
fn each_entry(mut look: impl FnMut(&mut Entry)) {
    // SAFETY: the lock is held for the whole scan, which runs to its end; `look` neither adds nor removes.
    unsafe {
        let mut scan = pg_sys::HASH_SEQ_STATUS::default();
        pg_sys::hash_seq_init(&mut scan, TABLE.load(Ordering::Acquire));
        loop {
            let at = pg_sys::hash_seq_search(&mut scan).cast::<Entry>();
            if at.is_null() {
                break;
            }
            look(&mut *at);
        }
    }
}

/// Removes entries. The lock is held.
fn remove(shared: &super::Shared, keys: &[Key]) {
    // SAFETY: the lock is held; the keys are of the declared size.
    unsafe {
        let entries = &mut *shared.budgets.entries.get();
        for key in keys {
            let mut found = false;
            let table = TABLE.load(Ordering::Acquire);
            pg_sys::hash_search(table, (&raw const *key).cast::<c_void>(), pg_sys::HASHACTION::HASH_REMOVE, &mut found);
            *entries -= usize::from(found);
        }
    }
}

/// Lets go of the entries of databases that were dropped: nobody works in them who could.
pub fn forget_dropped(shared: &super::Shared) {
    let mut foreign: Vec<Key> = Vec::with_capacity(super::budget_capacity());
    // SAFETY: set for every backend connected to a database.
    let here = unsafe { pg_sys::MyDatabaseId }.to_u32();
    {
        let _held = super::lock(Lock::Budgets);
        each_entry(|entry| {
            if entry.key.instance.database != here {
                foreign.push(entry.key);
            }
        });
    }
    // The catalogue is asked without the lock. An oid is not used again for another database while entries of the old one stand.
    foreign.retain(|key| {
        let oid = pg_sys::Datum::from(pg_sys::Oid::from(key.instance.database));
        let none = pg_sys::Datum::from(0usize);
        // SAFETY: a system cache look-up.
        unsafe { !pg_sys::SearchSysCacheExists(pg_sys::SysCacheIdentifier::DATABASEOID as i32, oid, none, none, none) }
    });
    if !foreign.is_empty() {
        let _held = super::lock(Lock::Budgets);
        remove(shared, &foreign);
    }
}

/// What the rows say of a budget.
#[derive(Clone, Copy)]
pub struct Derived {
    /// The budget's number.
    pub budget: i32,
    /// What the running rows reserve.
    pub usage: Usage,
    /// What was spent within its window; `None` where that was not asked.
    pub window: Option<Window>,
}

/// Corrects what this transaction's own rows say to what they said before it ended attempts: that becomes free, and is settled, when it commits.
pub fn add_unreleased(instance: Instance, truth: &mut [Derived]) {
    PENDING.with(|p| {
        p.each(|moved| {
            let What::Ended { usage, began, ended, settlement } = moved.what else { return };
            if moved.instance != instance {
                return;
            }
            if let Some(derived) = truth.iter_mut().find(|derived| derived.budget == moved.budget) {
                derived.usage = derived.usage.plus(usage);
                if let Some(window) = &mut derived.window {
                    window.refund(ended, settlement.debt);
                    window.charge_at(began, settlement.refund);
                }
            }
        })
    });
}

/// Sets the usage of this instance to what the rows say, of every budget there is, and marks it loaded if that includes the windows. Entries of earlier
/// instances in this database and of dropped budgets go. The caller holds SHARE on `stint.budget_config`. Returns the budgets whose usage was something else.
pub fn load(shared: &super::Shared, instance: Instance, truth: &[Derived]) -> Vec<i32> {
    let mut stale: Vec<Key> = Vec::with_capacity(super::budget_capacity());
    let mut drifted = Vec::with_capacity(super::budget_capacity());
    let mut full = false;
    {
        // The vectors have room for every entry: nothing allocates under the lock.
        let _held = super::lock(Lock::Budgets);
        each_entry(|entry| {
            if entry.key.instance.database != instance.database || entry.key.instance == instance && entry.key.budget == LOADED {
                return;
            }
            let real = truth.iter().find(|derived| derived.budget == entry.key.budget).filter(|_| entry.key.instance == instance);
            match real {
                None => stale.push(entry.key),
                Some(real) => {
                    if entry.usage != real.usage {
                        drifted.push(entry.key.budget);
                    }
                }
            }
        });
        remove(shared, &stale);
        let windows = truth.iter().all(|derived| derived.window.is_some());
        for derived in truth {
            // A budget that nothing is known of needs no entry yet.
            let known = derived.usage != Usage::default() || derived.window.is_some_and(|window| window.total() != Spent::default());
            match entry(shared, instance, derived.budget, known) {
                Some(entry) => {
                    entry.usage = derived.usage;
                    entry.window = derived.window.unwrap_or(entry.window);
                    entry.show();
                }
                None => full |= known,
            }
        }
        if windows {
            match entry(shared, instance, LOADED, true) {
                Some(mark) => mark.usage.running = i64::from(!full),
                None => full = true,
            }
        }
    }
    if full {
        table_full();
    }
    drifted
}

/// The window of a budget and what is in use of it, the window moved on to `now` where it has a length.
pub fn look(shared: &super::Shared, instance: Instance, budget: i32, per: i64, now: i64) -> (Usage, Window) {
    let seen = {
        let _held = super::lock(Lock::Budgets);
        entry(shared, instance, budget, false).map(|entry| (entry.usage, entry.window))
    };
    let (usage, mut window) = seen.unwrap_or_default();
    if per > 0 {
        window.advance(per, now);
    } else {
        window = Window::default();
    }
    (usage, window)
}

/// What this transaction releases of each budget when it commits. `finish_and_claim` counts on it: both become visible in one commit.
pub fn released_here(instance: Instance, budgets: &[i32]) -> Vec<Usage> {
    let mut released = vec![Usage::default(); budgets.len()];
    PENDING.with(|p| {
        p.each(|moved| {
            if let What::Ended { usage, .. } = moved.what
                && moved.instance == instance
                && let Some(at) = budgets.iter().position(|budget| *budget == moved.budget)
            {
                released[at] = released[at].plus(usage);
            }
        })
    });
    released
}

/// Where a backend remembers a budget's entry, for [`glance`].
#[derive(Clone)]
pub struct Handle(Cell<*const Entry>);

impl Default for Handle {
    fn default() -> Self {
        Handle(Cell::new(null()))
    }
}

/// Where a budget stands, as somebody passing by sees it: never less room than there was a moment ago, and of the window only what is not about to be
/// forgotten. A hint that saves the lock; what it lets through is decided by [`reserve`].
pub fn glance(shared: &super::Shared, instance: Instance, budget: i32, handle: &Handle, now: i64) -> State {
    let key = Key { instance, budget };
    // SAFETY: entries lie in shared memory for good. One that was removed and used again has another key, and is looked up anew.
    let known = unsafe { handle.0.get().as_ref().filter(|entry| (&raw const entry.key).read_volatile() == key) };
    let found = known.or_else(|| {
        let _held = super::lock(Lock::Budgets);
        let found = entry(shared, instance, budget, false).map(|entry| &*entry);
        handle.0.set(found.map_or(null(), |entry| &raw const *entry));
        found
    });
    let Some(shown) = found.map(|entry| &entry.shown) else { return State::default() };
    let usage = Usage { running: shown.running.load(Ordering::Acquire), tokens: shown.tokens.load(Ordering::Acquire) };
    let spent = if now < shown.until.load(Ordering::Acquire) {
        Spent {
            requests: shown.requests.load(Ordering::Acquire),
            tokens: shown.spent.load(Ordering::Acquire),
            cost: shown.cost.load(Ordering::Acquire),
        }
    } else {
        Spent::default()
    };
    State { usage, spent }
}

/// A budget to reserve of.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Its number.
    pub budget: i32,
    /// The length of its window, 0 where it has none.
    pub per: i64,
}

/// Lets `decide` look at where `budgets` stand at the instant it is given, and add to that, in one step that no other session sees half done. What it adds is
/// reserved by this transaction: given back if it aborts, kept if it commits. Returns the instant too: whatever is started on the reservation started then.
///
/// `instead` is what an earlier call at that instant reserved and this one decides anew: so much of each of `budgets`. `freed` is shown to `decide` as free
/// while others still see it in use: what of each of `budgets` this transaction releases when it commits.
pub fn reserve<R>(
    shared: &super::Shared,
    instance: Instance,
    budgets: &[Wanted],
    instead: Option<(i64, &[State])>,
    freed: &[Usage],
    decide: impl FnOnce(&mut [State], i64) -> R,
) -> (R, Instant) {
    let mut before = vec![State::default(); budgets.len()];
    let mut states = Vec::with_capacity(budgets.len());
    PENDING.with(|p| p.make_room(budgets.len()));
    let look = || {
        let held = super::lock(Lock::Budgets);
        budgets.iter().all(|wanted| entry(shared, instance, wanted.budget, true).is_some()).then_some(held)
    };
    let held = look().or_else(|| {
        forget_dropped(shared);
        look()
    });
    let Some(_held) = held else { table_full() };
    // The clock is read under the lock, so that no decision is dated before one that was made earlier.
    let now = Instant::now();
    for (at, wanted) in budgets.iter().enumerate() {
        let Some(entry) = entry(shared, instance, wanted.budget, false) else { continue };
        if wanted.per > 0 {
            entry.window.advance(wanted.per, now.0);
        }
        if let Some((then, given)) = instead {
            entry.usage = entry.usage.minus(given[at].usage);
            entry.window.refund(then, given[at].spent);
            take_back(instance, wanted.budget, then, given[at]);
        }
        before[at] = State { usage: entry.usage.minus(freed[at]), spent: if wanted.per > 0 { entry.window.total() } else { Spent::default() } };
    }
    states.extend_from_slice(&before);
    let answer = decide(&mut states, now.0);
    for (at, wanted) in budgets.iter().enumerate() {
        let Some(entry) = entry(shared, instance, wanted.budget, false) else { continue };
        let state = states[at].minus(before[at]);
        entry.usage = entry.usage.plus(state.usage);
        entry.window.charge_at(now.0, state.spent);
        entry.show();
        if state != State::default() {
            PENDING.with(|p| p.push(Move { instance, budget: wanted.budget, what: What::Reserved { at: now.0, state } }));
        }
    }
    (answer, now)
}

/// Lessens what this transaction would give back of a reservation it made at that instant.
fn take_back(instance: Instance, budget: i32, at: i64, given: State) {
    let mut left = given;
    PENDING.with(|p| {
        p.each_mut(|moved| {
            if moved.instance == instance
                && moved.budget == budget
                && let What::Reserved { at: then, state } = &mut moved.what
                && *then == at
            {
                let part = State {
                    usage: Usage { running: left.usage.running.min(state.usage.running), tokens: left.usage.tokens.min(state.usage.tokens) },
                    spent: Spent {
                        requests: left.spent.requests.min(state.spent.requests),
                        tokens: left.spent.tokens.min(state.spent.tokens),
                        cost: left.spent.cost.min(state.spent.cost),
                    },
                };
                *state = state.minus(part);
                left = left.minus(part);
            }
        });
    });
}

/// Releases what an attempt used of a budget, and settles it, when this transaction commits.
pub fn release(instance: Instance, budget: i32, usage: Usage, began: Instant, ended: Instant, settlement: Settlement) {
    let what = What::Ended { usage, began: began.0, ended: ended.0, settlement };
    PENDING.with(|p| p.push(Move { instance, budget, what }));
}

fn change(moved: &Move, change: impl FnOnce(&mut Entry)) {
    let Some(shared) = super::get() else { return };
    let _held = super::lock(Lock::Budgets);
    if let Some(entry) = entry(shared, moved.instance, moved.budget, false) {
        change(entry);
        entry.show();
    }
}

/// At commit: what was reserved is now the rows' own, what was released is free.
pub fn commit(moved: &Move) {
    if let What::Ended { usage, began, ended, settlement } = moved.what {
        change(moved, |entry| {
            entry.usage = entry.usage.minus(usage);
            entry.window.refund(began, settlement.refund);
            entry.window.charge_at(ended, settlement.debt);
        });
    }
}

/// At abort: what was reserved is free again.
pub fn abort(moved: &Move) {
    if let What::Reserved { at, state } = moved.what {
        change(moved, |entry| {
            entry.usage = entry.usage.minus(state.usage);
            entry.window.refund(at, state.spent);
        });
    }
}
