//! Sessions that wait for work in the server. Those of one queue sleep on one condition variable; a committed enqueue signals one waiter for each task. A
//! signal that reaches a session which is then cancelled is passed on, and a claim that rolls back signals again, so no wake-up is lost; what no callback
//! reports (COMMIT PREPARED) is found by looking once a second.

use super::Lock;
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SLOTS: usize = 1024;
/// How far from its home a queue's slot may lie. Where all in reach are taken, waiters sleep without a signal and only look each second.
const PROBES: usize = 32;
/// Longest sleep between two looks, in milliseconds.
const LOOK_MS: i64 = 1000;

/// Where the waiters of one queue sleep.
#[repr(C)]
struct Slot {
    variable: pg_sys::ConditionVariable,
    /// Database and number of the queue that uses the slot, or used it last.
    queue: AtomicU64,
    /// How many of its sessions wait. Others may take the slot when there are none.
    sleepers: AtomicU32,
}

/// In shared memory. Slots are given under [`Lock::Waiters`] and found without it: a signal is sent in a commit callback.
#[repr(C)]
pub struct Shared {
    slots: [Slot; SLOTS],
}

impl Shared {
    pub(super) fn init(&mut self) {
        for slot in &mut self.slots {
            // SAFETY: memory of this struct, before any backend runs.
            unsafe { pg_sys::ConditionVariableInit(&mut slot.variable) };
        }
    }
}

/// What a transaction did to a queue.
#[derive(Clone, Copy)]
pub enum Event {
    /// Made `tasks` tasks claimable.
    Ready {
        /// The queue's number.
        queue: i32,
        /// How many.
        tasks: u32,
    },
    /// Took `tasks` tasks, which come back if it aborts.
    Taken {
        /// The queue's number.
        queue: i32,
        /// How many.
        tasks: u32,
    },
}

thread_local! {
    /// What this transaction did to queues.
    pub static PENDING: Pending<Event> = const { Pending::new() };
    static WAITING_IN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A queue of this database among all.
fn key(queue: i32) -> u64 {
    // SAFETY: set for every backend connected to a database.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    u64::from(database) << 32 | u64::from(queue.unsigned_abs())
}

/// The slots in which a queue's waiters may sleep.
fn reach(key: u64) -> impl Iterator<Item = usize> {
    let home = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize;
    (home..home + PROBES).map(|at| at % SLOTS)
}

/// Notes that `tasks` tasks of `queue` become claimable when this transaction commits.
pub fn ready(queue: i32, tasks: usize) {
    PENDING.with(|p| p.push(Event::Ready { queue, tasks: u32::try_from(tasks).unwrap_or(u32::MAX) }));
}

/// Notes that this transaction took `tasks` tasks of `queue`.
pub fn taken(queue: i32, tasks: usize) {
    PENDING.with(|p| p.push(Event::Taken { queue, tasks: u32::try_from(tasks).unwrap_or(u32::MAX) }));
}

fn slot(at: usize) -> Option<&'static Slot> {
    super::get().map(|shared| &shared.waiters.slots[at])
}

/// The variable inside shared memory, as PostgreSQL's functions take it.
fn variable(slot: &Slot) -> *mut pg_sys::ConditionVariable {
    (&raw const slot.variable).cast_mut()
}

/// Wakes as many waiters of a queue as there are tasks. A waiter takes its slot before it looks at the table, so one that is not seen here has yet to look.
fn signal(queue: i32, times: u32) {
    let Some(shared) = super::get() else { return };
    let key = key(queue);
    for at in reach(key) {
        let slot = &shared.waiters.slots[at];
        if slot.queue.load(Ordering::SeqCst) == key {
            for _ in 0..times.min(slot.sleepers.load(Ordering::SeqCst)) {
                // SAFETY: a condition variable in shared memory; signalling neither allocates nor raises.
                unsafe { pg_sys::ConditionVariableSignal(variable(slot)) };
            }
            return;
        }
    }
}

/// At commit: wakes one waiter for each task made ready.
pub fn commit(event: &Event) {
    if let Event::Ready { queue, tasks } = event {
        signal(*queue, *tasks);
    }
}

/// At abort: what was taken is there again.
pub fn abort(event: &Event) {
    if let Event::Taken { queue, tasks } = event {
        signal(*queue, *tasks);
    }
}

/// Gives up this session's place among the sleepers, if it has one; returns where it was.
fn leave() -> Option<&'static Slot> {
    let slot = slot(WAITING_IN.with(Cell::take)?)?;
    slot.sleepers.fetch_sub(1, Ordering::SeqCst);
    Some(slot)
}

/// At abort: a session that was waiting may have swallowed a signal meant for work; the next waiter gets it.
pub fn pass_on() {
    if let Some(slot) = leave() {
        // SAFETY: a condition variable in shared memory; neither call allocates or raises. This session must not get its own signal.
        unsafe {
            pg_sys::ConditionVariableCancelSleep();
            pg_sys::ConditionVariableSignal(variable(slot));
        }
    }
}

/// A place among the sleepers of a queue, taken before the first look at the table so that no wake-up falls between.
pub struct Waiter {
    slot: Option<&'static Slot>,
}

impl Waiter {
    /// Joins the sleepers of `queue`.
    pub fn join(queue: i32) -> Self {
        // An error that left a place behind within this transaction was caught.
        pass_on();
        let at = Self::take_place(key(queue));
        WAITING_IN.with(|waiting| waiting.set(at));
        let slot = at.and_then(slot);
        if let Some(slot) = slot {
            // SAFETY: a condition variable in shared memory; cancelled in Drop and by any abort.
            unsafe { pg_sys::ConditionVariablePrepareToSleep(variable(slot)) };
        }
        Waiter { slot }
    }

    /// Counts this session in at the queue's slot, or at one in reach that nobody uses.
    fn take_place(key: u64) -> Option<usize> {
        let shared = super::get()?;
        let slots = &shared.waiters.slots;
        let _held = super::lock(Lock::Waiters);
        let unused = |at: &usize| slots[*at].sleepers.load(Ordering::SeqCst) == 0;
        let at = reach(key).find(|at| slots[*at].queue.load(Ordering::SeqCst) == key).or_else(|| reach(key).find(unused))?;
        slots[at].queue.store(key, Ordering::SeqCst);
        slots[at].sleepers.fetch_add(1, Ordering::SeqCst);
        Some(at)
    }

    /// Sleeps until signalled, at most `left_ms`, and at most a second. Cancel and shutdown end it at once.
    pub fn sleep(&self, left_ms: i64) {
        let longest = left_ms.min(LOOK_MS);
        // SAFETY: prepared by `join`; checks for interrupts itself. Without a place in reach, an ordinary nap.
        unsafe {
            match self.slot {
                Some(slot) => {
                    pg_sys::ConditionVariableTimedSleep(variable(slot), longest, pg_sys::PG_WAIT_EXTENSION);
                }
                None => {
                    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
                    pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, longest, pg_sys::PG_WAIT_EXTENSION);
                    pg_sys::ResetLatch(pg_sys::MyLatch);
                    check_for_interrupts!();
                }
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // After an error the abort callback leaves and passes the signal on.
        if !std::thread::panicking() {
            // SAFETY: leaves the list of sleepers; harmless if another wait already did.
            unsafe { pg_sys::ConditionVariableCancelSleep() };
            let _left = leave();
            // A second signal may have come while the session claimed. PostgreSQL up to 15 passes it on by itself; a waiter woken for nothing sleeps on.
            #[cfg(not(any(feature = "pg14", feature = "pg15")))]
            if let Some(slot) = _left {
                // SAFETY: a condition variable in shared memory.
                unsafe { pg_sys::ConditionVariableSignal(variable(slot)) };
            }
        }
    }
}
