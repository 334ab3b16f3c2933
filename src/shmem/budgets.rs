//! Live usage of budgets: one entry for each (database, extension instance, budget) with the tasks running and the tokens in flight. The truth is the rows of
//! `stint.place_running`; this is what they add up to, plus what transactions still open have reserved.
//!
//! A claim reserves before it touches rows and an abort gives back; the end of an attempt releases when its commit is visible and never before. So at any
//! commit point the running rows use no more than the limit. Every transaction that reserves or releases first takes ROW EXCLUSIVE on
//! `stint.budget_config` (cheap: a fast-path lock) and keeps it past these callbacks; [`load`] is called under SHARE on it, when nothing can be in flight, and
//! then the sums over committed rows are exact. After a crash all entries are gone, also the mark that says "loaded", and the first budgeted claim loads.

use super::{Instance, Lock};
use crate::errors::Fault;
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::UnsafeCell;
use std::os::raw::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use stint_core::budget::Usage;

/// The number under which an instance's "loaded" mark stands; budgets count from 1.
const LOADED: i32 = 0;

#[repr(C)]
#[derive(Clone, Copy)]
struct Key {
    instance: Instance,
    budget: i32,
}

#[repr(C)]
struct Entry {
    key: Key,
    usage: Usage,
}

/// In shared memory, guarded by [`Lock::Budgets`].
#[repr(C)]
pub struct Shared {
    /// How many entries the table holds: PostgreSQL's own limit is not one.
    entries: UnsafeCell<usize>,
}

// SAFETY: touched only under Lock::Budgets.
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

/// Usage moved by a transaction, settled when it ends.
#[derive(Clone, Copy)]
pub struct Move {
    instance: Instance,
    budget: i32,
    usage: Usage,
    release: bool,
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
    // SAFETY: a new entry of the table; dynahash leaves its body as it was.
    let entry = unsafe { &mut *at };
    entry.usage = Usage::default();
    Some(entry)
}

fn table_full() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED, "shared memory has no room for the live usage of another budget")
        .hint("Raise the setting stint.max_budgets and restart the server.")
        .raise()
}

/// Whether this instance's usage has been derived from the running rows since the server started.
pub fn loaded(shared: &super::Shared, instance: Instance) -> bool {
    let _held = super::lock(Lock::Budgets);
    entry(shared, instance, LOADED, false).is_some()
}

/// Has the usage derived anew before the next budgeted claim is answered. Called at commit.
pub fn unload(shared: &super::Shared, instance: Instance) {
    let _held = super::lock(Lock::Budgets);
    remove(shared, &[Key { instance, budget: LOADED }]);
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

/// Adds what this transaction will release at its commit to sums that no longer show the rows it ended.
pub fn add_unreleased(instance: Instance, sums: &mut Vec<(i32, Usage)>) {
    PENDING.with(|p| {
        p.each(|moved| {
            if moved.release && moved.instance == instance {
                match sums.iter_mut().find(|(budget, _)| *budget == moved.budget) {
                    Some((_, usage)) => *usage = usage.plus(moved.usage),
                    None => sums.push((moved.budget, moved.usage)),
                }
            }
        })
    });
}

/// Sets the usage of this instance to what the running rows add up to, and marks it loaded. Entries of earlier instances in this database go. The caller holds
/// SHARE on `stint.budget_config`. Returns the budgets whose usage was something else.
pub fn load(shared: &super::Shared, instance: Instance, truth: &[(i32, Usage)]) -> Vec<i32> {
    let mut stale: Vec<Key> = Vec::with_capacity(super::budget_capacity());
    let mut drifted = Vec::with_capacity(super::budget_capacity());
    let mut full = false;
    {
        // The vectors have room for every entry: nothing allocates under the lock.
        let _held = super::lock(Lock::Budgets);
        each_entry(|entry| {
            if entry.key.instance.database != instance.database {
                return;
            }
            if entry.key.instance != instance {
                stale.push(entry.key);
            } else if entry.key.budget != LOADED {
                let real = truth.iter().find(|(budget, _)| *budget == entry.key.budget).map_or(Usage::default(), |(_, usage)| *usage);
                if entry.usage != real {
                    drifted.push(entry.key.budget);
                    entry.usage = real;
                }
            }
        });
        remove(shared, &stale);
        for (budget, usage) in truth {
            match entry(shared, instance, *budget, true) {
                Some(entry) => entry.usage = *usage,
                None => full = true,
            }
        }
        full |= entry(shared, instance, LOADED, true).is_none();
    }
    if full {
        table_full();
    }
    drifted
}

/// Live usage of the given budgets, in their order.
pub fn usage(shared: &super::Shared, instance: Instance, budgets: &[i32]) -> Vec<Usage> {
    let mut seen = Vec::with_capacity(budgets.len());
    let _held = super::lock(Lock::Budgets);
    seen.extend(budgets.iter().map(|budget| entry(shared, instance, *budget, false).map_or(Usage::default(), |entry| entry.usage)));
    seen
}

/// Lets `decide` look at the live usage of `budgets` and change it, in one step that no other session sees half done. What it adds is reserved by this
/// transaction: given back if it aborts, kept if it commits.
pub fn reserve<R>(shared: &super::Shared, instance: Instance, budgets: &[i32], decide: impl FnOnce(&mut [Usage]) -> R) -> R {
    let mut before = vec![Usage::default(); budgets.len()];
    let mut usage = Vec::with_capacity(budgets.len());
    PENDING.with(|p| p.make_room(budgets.len()));
    let answer;
    {
        let mut look = || {
            let held = super::lock(Lock::Budgets);
            let all =
                budgets.iter().enumerate().all(|(at, budget)| entry(shared, instance, *budget, true).map(|entry| before[at] = entry.usage).is_some());
            all.then_some(held)
        };
        let held = look().or_else(|| {
            forget_dropped(shared);
            look()
        });
        let Some(_held) = held else { table_full() };
        usage.extend_from_slice(&before);
        answer = decide(&mut usage);
        for (at, budget) in budgets.iter().enumerate() {
            if let Some(entry) = entry(shared, instance, *budget, false) {
                entry.usage = usage[at];
            }
        }
        for (at, budget) in budgets.iter().enumerate() {
            let moved = usage[at].minus(before[at]);
            if moved != Usage::default() {
                PENDING.with(|p| p.push(Move { instance, budget: *budget, usage: moved, release: false }));
            }
        }
    }
    answer
}

/// Releases usage of an ended attempt when this transaction commits.
pub fn release(instance: Instance, budget: i32, usage: Usage) {
    PENDING.with(|p| p.push(Move { instance, budget, usage, release: true }));
}

fn subtract(moved: &Move) {
    let Some(shared) = super::get() else { return };
    let _held = super::lock(Lock::Budgets);
    if let Some(entry) = entry(shared, moved.instance, moved.budget, false) {
        entry.usage = entry.usage.minus(moved.usage);
    }
}

/// At commit: what was reserved is now the rows' own, what was released is free.
pub fn commit(moved: &Move) {
    if moved.release {
        subtract(moved);
    }
}

/// At abort: what was reserved is free again.
pub fn abort(moved: &Move) {
    if !moved.release {
        subtract(moved);
    }
}
