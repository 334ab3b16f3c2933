//! Sessions that wait for work in the server. Each queue hashes to a condition variable; a committed enqueue signals one waiter for each task. A signal that
//! reaches a session which is then cancelled is passed on, and a claim that rolls back signals again, so no wake-up is lost; what no callback reports
//! (COMMIT PREPARED) is found by looking once a second.

use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::Cell;

const SLOTS: usize = 256;
/// Longest sleep between two looks, in milliseconds.
const LOOK_MS: i64 = 1000;

/// In shared memory.
#[repr(C)]
pub struct Shared {
    slots: [pg_sys::ConditionVariable; SLOTS],
}

impl Shared {
    pub(super) fn init(&mut self) {
        for slot in &mut self.slots {
            // SAFETY: memory of this struct, before any backend runs.
            unsafe { pg_sys::ConditionVariableInit(slot) };
        }
    }
}

/// What a transaction did to a slot.
#[derive(Clone, Copy)]
pub enum Event {
    /// Made `tasks` tasks claimable.
    Ready {
        /// The slot.
        slot: usize,
        /// How many.
        tasks: u32,
    },
    /// Took `tasks` tasks, which come back if it aborts.
    Taken {
        /// The slot.
        slot: usize,
        /// How many.
        tasks: u32,
    },
}

thread_local! {
    /// What this transaction did to the slots.
    pub static PENDING: Pending<Event> = const { Pending::new() };
    static WAITING_ON: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The slot of a queue of this database.
pub fn slot(queue: i32) -> usize {
    // SAFETY: set for every backend connected to a database.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    let mixed = u64::from(database).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(queue.unsigned_abs()).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    (mixed >> 32) as usize % SLOTS
}

/// Notes that `tasks` tasks of `queue` become claimable when this transaction commits.
pub fn ready(queue: i32, tasks: usize) {
    PENDING.with(|p| p.push(Event::Ready { slot: slot(queue), tasks: u32::try_from(tasks).unwrap_or(u32::MAX) }));
}

/// Notes that this transaction took `tasks` tasks of `queue`.
pub fn taken(queue: i32, tasks: usize) {
    PENDING.with(|p| p.push(Event::Taken { slot: slot(queue), tasks: u32::try_from(tasks).unwrap_or(u32::MAX) }));
}

fn variable(slot: usize) -> Option<*mut pg_sys::ConditionVariable> {
    super::get().map(|shared| (&raw const shared.waiters.slots[slot]).cast_mut())
}

fn signal(slot: usize, times: u32) {
    if let Some(cv) = variable(slot) {
        for _ in 0..times.min(pg_sys_max_backends()) {
            // SAFETY: a condition variable in shared memory; signalling neither allocates nor raises.
            unsafe { pg_sys::ConditionVariableSignal(cv) };
        }
    }
}

fn pg_sys_max_backends() -> u32 {
    // SAFETY: fixed at server start.
    u32::try_from(unsafe { pg_sys::MaxBackends }).unwrap_or(1)
}

/// At commit: wakes one waiter for each task made ready.
pub fn commit(event: &Event) {
    if let Event::Ready { slot, tasks } = event {
        signal(*slot, *tasks);
    }
}

/// At abort: what was taken is there again.
pub fn abort(event: &Event) {
    if let Event::Taken { slot, tasks } = event {
        signal(*slot, *tasks);
    }
}

/// At abort: a session that was waiting may have swallowed a signal meant for work; the next waiter gets it.
pub fn pass_on() {
    if let Some(slot) = WAITING_ON.with(Cell::take) {
        signal(slot, 1);
    }
}

/// How long a session that takes no wake-ups sleeps between two looks, in milliseconds.
const DOZE_MS: i64 = 100;

/// Sleeps without a place among the sleepers, at most `left_ms`. Cancel and shutdown end it at once.
pub fn doze(left_ms: i64) {
    // SAFETY: this backend's own latch.
    unsafe {
        let events = (pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH) as i32;
        pg_sys::WaitLatch(pg_sys::MyLatch, events, left_ms.clamp(1, DOZE_MS) as _, pg_sys::PG_WAIT_EXTENSION);
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
    check_for_interrupts!();
}

/// A place in a slot's queue of sleepers, taken before the first look at the table so that no wake-up falls between.
pub struct Waiter {
    slot: usize,
}

impl Waiter {
    /// Joins the sleepers of `queue`.
    pub fn join(queue: i32) -> Self {
        let slot = slot(queue);
        if let Some(cv) = variable(slot) {
            // SAFETY: a condition variable in shared memory; cancelled in Drop and by any abort.
            unsafe { pg_sys::ConditionVariablePrepareToSleep(cv) };
        }
        WAITING_ON.with(|w| w.set(Some(slot)));
        Waiter { slot }
    }

    /// Sleeps until signalled, at most `left_ms`, and at most a second. Cancel and shutdown end it at once.
    pub fn sleep(&self, left_ms: i64) {
        if let Some(cv) = variable(self.slot) {
            // SAFETY: prepared by `join`; checks for interrupts itself.
            unsafe { pg_sys::ConditionVariableTimedSleep(cv, left_ms.min(LOOK_MS), pg_sys::PG_WAIT_EXTENSION) };
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // After an error the abort callback passes the signal on; on the normal way out there is nothing to pass.
        if !std::thread::panicking() {
            // SAFETY: leaves the list of sleepers; harmless if another wait already did.
            unsafe { pg_sys::ConditionVariableCancelSleep() };
            WAITING_ON.with(|w| w.set(None));
        }
    }
}
