//! Sessions that wait for work in the server. Those of one queue sleep on one condition variable; a committed enqueue signals one waiter for each task. A
//! signal that reaches a session which is then cancelled is passed on, and a claim that rolls back signals again, so no wake-up is lost. Room in a budget
//! signals one waiter of every queue that draws on it, and a tick of the changelog all who wait for one. What nothing reports is found by looking now and then:
//! the room that time makes in a budget each second, what came by COMMIT PREPARED more seldom.

use super::Lock;
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Stands for no queue: who waits for the changelog's next tick.
pub const TICKS: i32 = i32::MAX;

const SLOTS: usize = 1024;
/// How far from its home a queue's slot may lie. Where all in reach are taken, waiters sleep without a signal and only look each second.
const PROBES: usize = 32;
/// Longest sleep between two looks, in milliseconds, where time alone may make room: in a queue that draws on budgets, which have windows and throttles.
const LOOK_MS: i64 = 1000;
/// And where all but COMMIT PREPARED is signalled. Many workers that wait in a quiet database cost little more than these looks.
const SELDOM_MS: i64 = 10_000;

/// Where the waiters of one queue sleep.
#[repr(C)]
struct Slot {
    variable: pg_sys::ConditionVariable,
    /// Database and number of the queue that uses the slot, or used it last.
    queue: AtomicU64,
    /// How many of its sessions wait. Others may take the slot when there are none.
    sleepers: AtomicU32,
    /// The budgets that the queue draws on, as [`budget_bits`], as the sleeper saw it that looked last.
    budgets: AtomicU64,
}

/// In shared memory. Slots are given under [`Lock::Waiters`] and found without it: a signal is sent in a commit callback.
#[repr(C)]
pub struct Shared {
    slots: [Slot; SLOTS],
    /// How many sleepers wait in queues that draw on budgets: while there are none, nobody looks through the slots for them.
    budgeted: AtomicU32,
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
    /// Made room in budgets.
    Room {
        /// The budgets, as [`budget_bits`].
        budgets: u64,
    },
    /// Reserved of budgets, which have room again if it aborts.
    Reserved {
        /// The budgets, as [`budget_bits`].
        budgets: u64,
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
    static WAITING_IN: Cell<Option<(usize, bool)>> = const { Cell::new(None) };
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

/// Notes that this transaction makes a tick, for all who wait for one.
pub fn ticked() {
    ready(TICKS, usize::MAX);
}

/// One bit for each budget's number, shared by every 64th: a signal too many is a look too many, no more.
pub fn budget_bits(numbers: impl Iterator<Item = i32>) -> u64 {
    numbers.fold(0, |bits, number| bits | 1 << (number.unsigned_abs() % u64::BITS))
}

/// Notes that these budgets have room when this transaction commits.
pub fn room(numbers: &[i32]) {
    PENDING.with(|p| p.push(Event::Room { budgets: budget_bits(numbers.iter().copied()) }));
}

/// Notes that this transaction reserved of these budgets.
pub fn reserved(budgets: u64) {
    PENDING.with(|p| p.push(Event::Reserved { budgets }));
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

/// Wakes one waiter of each queue of this database that draws on one of the budgets.
fn signal_room(budgets: u64) {
    let Some(shared) = super::get() else { return };
    if shared.waiters.budgeted.load(Ordering::SeqCst) == 0 {
        return;
    }
    let here = key(0);
    for slot in &shared.waiters.slots {
        let draws = slot.budgets.load(Ordering::SeqCst) & budgets != 0 && slot.queue.load(Ordering::SeqCst) & !u64::from(u32::MAX) == here;
        if draws && slot.sleepers.load(Ordering::SeqCst) > 0 {
            // SAFETY: a condition variable in shared memory; signalling neither allocates nor raises.
            unsafe { pg_sys::ConditionVariableSignal(variable(slot)) };
        }
    }
}

/// At commit: wakes one waiter for each task made ready, and one of each queue for room in a budget.
pub fn commit(event: &Event) {
    match event {
        Event::Ready { queue, tasks } => signal(*queue, *tasks),
        Event::Room { budgets } => signal_room(*budgets),
        Event::Reserved { .. } | Event::Taken { .. } => {}
    }
}

/// At abort: what was taken is there again, and so is the room.
pub fn abort(event: &Event) {
    match event {
        Event::Taken { queue, tasks } => signal(*queue, *tasks),
        Event::Reserved { budgets } => signal_room(*budgets),
        Event::Ready { .. } | Event::Room { .. } => {}
    }
}

/// Notes that a sleeper's queue draws on budgets, or no longer does.
fn count_budgeted(was: bool, is: bool) {
    let Some(shared) = super::get() else { return };
    shared.waiters.budgeted.fetch_add(u32::from(is), Ordering::SeqCst);
    shared.waiters.budgeted.fetch_sub(u32::from(was), Ordering::SeqCst);
}

/// Gives up this session's place among the sleepers, if it has one; returns where it was.
fn leave() -> Option<&'static Slot> {
    let (at, budgeted) = WAITING_IN.with(Cell::take)?;
    let shared = super::get()?;
    let slot = &shared.waiters.slots[at];
    slot.sleepers.fetch_sub(1, Ordering::SeqCst);
    count_budgeted(budgeted, false);
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

#[cfg(target_os = "linux")]
mod raw {
    unsafe extern "C-unwind" {
        /// Whether the client is there as far as the socket tells. May reset the latch.
        pub fn pq_check_connection() -> bool;
    }
}

/// Ends the session where its client has gone meanwhile: it shall not take a task that nobody will hear of, and a signal that it got is passed on. PostgreSQL by
/// itself notices when it sends the answer.
fn leave_if_client_has() {
    // SAFETY: this backend's own variables and socket; a background worker has none.
    unsafe {
        #[cfg(target_os = "linux")]
        if !pg_sys::MyProcPort.is_null() && !pg_sys::ffi::pg_guard_ffi_boundary(|| raw::pq_check_connection()) {
            pg_sys::ClientConnectionLost = 1;
            pg_sys::InterruptPending = 1;
        }
    }
    check_for_interrupts!();
}

/// The event by which a sleeper learns that its client has gone; 0 where PostgreSQL has none.
#[cfg(all(target_os = "linux", not(feature = "pg14")))]
const CLIENT_GONE: u32 = pg_sys::WL_SOCKET_CLOSED;
#[cfg(not(all(target_os = "linux", not(feature = "pg14"))))]
const CLIENT_GONE: u32 = 0;

/// Sleeps until the latch is set or the client has gone, at most `ms`. Check for interrupts afterwards.
fn rest(ms: i64) {
    // SAFETY: this backend's own latch and socket; a background worker has no socket. It is the first member of struct Port, of which pgrx knows no more.
    unsafe {
        let port = pg_sys::MyProcPort.cast::<pg_sys::pgsocket>();
        let (client, socket) = if port.is_null() { (0, pg_sys::PGINVALID_SOCKET) } else { (CLIENT_GONE, port.read()) };
        let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH | client;
        pg_sys::WaitLatchOrSocket(pg_sys::MyLatch, events as i32, socket, ms.max(1) as _, pg_sys::PG_WAIT_EXTENSION);
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

/// How long a session that takes no wake-ups sleeps between two looks, in milliseconds.
const DOZE_MS: i64 = 100;

/// Sleeps without a place among the sleepers, at most `left_ms`. Cancel, shutdown and a client that has gone end it at once.
pub fn doze(left_ms: i64) {
    rest(left_ms.min(DOZE_MS));
    leave_if_client_has();
}

/// A place among the sleepers of a queue, taken before the first look at the table so that no wake-up falls between.
pub struct Waiter {
    slot: Option<&'static Slot>,
}

impl Waiter {
    /// Joins the sleepers of `queue`, which draws on `budgets`.
    pub fn join(queue: i32, budgets: u64) -> Self {
        // An error that left a place behind within this transaction was caught.
        pass_on();
        let at = Self::take_place(key(queue), budgets);
        WAITING_IN.with(|waiting| waiting.set(at.map(|at| (at, budgets != 0))));
        let slot = at.and_then(slot);
        if let Some(slot) = slot {
            // SAFETY: a condition variable in shared memory; cancelled in Drop and by any abort.
            unsafe { pg_sys::ConditionVariablePrepareToSleep(variable(slot)) };
        }
        Waiter { slot }
    }

    /// Counts this session in at the queue's slot, or at one in reach that nobody uses.
    fn take_place(key: u64, budgets: u64) -> Option<usize> {
        let shared = super::get()?;
        let slots = &shared.waiters.slots;
        let _held = super::lock(Lock::Waiters);
        let unused = |at: &usize| slots[*at].sleepers.load(Ordering::SeqCst) == 0;
        let at = reach(key).find(|at| slots[*at].queue.load(Ordering::SeqCst) == key).or_else(|| reach(key).find(unused))?;
        slots[at].queue.store(key, Ordering::SeqCst);
        slots[at].budgets.store(budgets, Ordering::SeqCst);
        slots[at].sleepers.fetch_add(1, Ordering::SeqCst);
        count_budgeted(false, budgets != 0);
        Some(at)
    }

    /// Sleeps until signalled, at most `left_ms` and until it is time for a look. `budgets` are those that the queue draws on as this session's last look saw it:
    /// with a task a budget may have come that it did not draw on before. Cancel, shutdown and a client that has gone end it at once.
    pub fn sleep(&self, left_ms: i64, budgets: u64) {
        let Some(slot) = self.slot else {
            rest(left_ms.min(LOOK_MS));
            return leave_if_client_has();
        };
        if let Some((at, was)) = WAITING_IN.get() {
            count_budgeted(was, budgets != 0);
            WAITING_IN.set(Some((at, budgets != 0)));
        }
        // Room in a budget that is new here was signalled to nobody until now, so that look came too early.
        if budgets & !slot.budgets.swap(budgets, Ordering::SeqCst) != 0 {
            return;
        }
        if in_line(slot) {
            rest(left_ms.min(if budgets == 0 { SELDOM_MS } else { LOOK_MS }));
            in_line(slot);
        }
        leave_if_client_has();
    }
}

/// Whether this session still stands in line for a signal. If not, because one came or because it had to wait for something else meanwhile, it does from now on,
/// and should look.
fn in_line(slot: &Slot) -> bool {
    // SAFETY: a condition variable in shared memory; the sleep of no time at all leaves it to `rest` to wait also for the client.
    unsafe { pg_sys::ConditionVariableTimedSleep(variable(slot), 0, pg_sys::PG_WAIT_EXTENSION) }
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
