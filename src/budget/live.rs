//! Live usage beside the rows it is derived from: loading it after a start, reconciling it, showing it.
//!
//! The lock on `stint.budget_config` orders the two: ROW EXCLUSIVE for whoever reserves or releases, SHARE for whoever adds up the rows.

use crate::errors::Fault;
use crate::shmem::{self, Instance, budgets, waiters};
use crate::spi::{self, Session, Statement};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;
use stint_core::budget::Usage;

static SUMS: Statement = Statement::new(
    c"select d.budget, count(*), coalesce(sum(d.tokens), 0)::bigint
      from stint.place_running r
      cross join lateral unnest(r.budgets, r.reserved) as d (budget, tokens)
      group by d.budget
      order by d.budget",
    &[],
);

static NUMBERS: Statement = Statement::new(c"select b.number, b.budget::text from stint.budget_config b order by b.budget", &[]);

thread_local! {
    /// When the maintenance worker reconciles next.
    static NEXT: Cell<i64> = const { Cell::new(i64::MIN) };
}

/// Has what a running row of a queue reserved released when this transaction commits, and a waiter of the queue look for what then has room.
pub fn release(queue: i32, budgets: Option<Vec<i32>>, reserved: Option<Vec<i64>>) {
    let (Some(numbers), Some(reserved)) = (budgets, reserved) else { return };
    enter();
    let instance = Instance::here();
    for (budget, tokens) in numbers.into_iter().zip(reserved) {
        budgets::release(instance, budget, Usage { running: 1, tokens });
    }
    waiters::ready(queue, 1);
}

/// How long a claim waits for the usage to be loaded when it may not wait for the lock itself, in milliseconds.
const PATIENCE_MS: i64 = 10_000;

fn gate() -> pg_sys::Oid {
    // SAFETY: a system cache look-up.
    unsafe { pg_sys::get_relname_relid(c"budget_config".as_ptr(), pg_sys::Oid::from(Instance::here().schema)) }
}

/// Announces that this transaction reserves or releases. Held to its end, past the callbacks that settle it.
pub fn enter() {
    // SAFETY: an ordinary relation lock.
    unsafe { pg_sys::LockRelationOid(gate(), pg_sys::RowExclusiveLock as i32) };
}

/// What the running rows of the moment add up to, whatever snapshot the transaction keeps.
fn sums(session: &Session) -> Vec<(i32, Usage)> {
    let rows = session.run_latest(&SUMS, &[]);
    (0..rows.len()).map(|at| (rows.must(at, 1), Usage { running: rows.must(at, 2), tokens: rows.must(at, 3) })).collect()
}

/// Adds up the running rows and makes that the live usage. SHARE on the gate is held. Returns the budgets that had drifted.
fn load(session: &Session, instance: Instance) -> Vec<i32> {
    let shared = shmem::required();
    budgets::forget_dropped(shared);
    let mut truth = sums(session);
    // What this transaction has ended itself becomes free when it commits, not before.
    budgets::add_unreleased(instance, &mut truth);
    let drifted = budgets::load(shared, instance, &truth);
    drifted
}

/// Makes sure that the live usage has been derived since the server started or rows came by other ways than the verbs, before a budgeted claim is answered.
pub fn ensure_loaded(session: &Session, instance: Instance) {
    if budgets::loaded(shmem::required(), instance) {
        return;
    }
    // SAFETY: a standby cannot take the lock below, and says so less clearly; the read is of this backend's own state.
    let idle = unsafe {
        pg_sys::PreventCommandDuringRecovery(c"stint.claim()".as_ptr());
        pg_sys::GetTopTransactionIdIfAny() == pg_sys::InvalidTransactionId
    };
    let share = pg_sys::ShareLock as i32;
    for _ in 0..PATIENCE_MS / 10 {
        if budgets::loaded(shmem::required(), instance) {
            return;
        }
        // A transaction that has written may hold the gate itself, and two such would wait for each other: it leaves the work to the maintenance worker or to
        // another session while anybody else holds the gate.
        // SAFETY: as above.
        unsafe {
            if idle {
                pg_sys::LockRelationOid(gate(), share);
            } else if !pg_sys::ConditionalLockRelationOid(gate(), share) {
                pg_sys::WaitLatch(
                    pg_sys::MyLatch,
                    (pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH) as i32,
                    10,
                    pg_sys::PG_WAIT_EXTENSION,
                );
                pg_sys::ResetLatch(pg_sys::MyLatch);
                check_for_interrupts!();
                continue;
            }
            if !budgets::loaded(shmem::required(), instance) {
                load(session, instance);
            }
            pg_sys::UnlockRelationOid(gate(), share);
        }
    }
    Fault::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, "the live usage of budgets has not been derived from the running tasks yet")
        .hint("Repeat the claim in a transaction of its own; stint.doctor() tells whether the maintenance worker runs.")
        .raise()
}

/// How often the maintenance worker adds up the running rows again, in microseconds.
const RECONCILE_EVERY: i64 = 60 * SECOND;

/// One round for the maintenance worker: loads after a start, and from time to time sets right what somebody's direct change of the rows made wrong. Never
/// waits.
pub fn step() -> bool {
    let instance = Instance::here();
    let now = Instant::now();
    if budgets::loaded(shmem::required(), instance) && now.0 < NEXT.get() {
        return false;
    }
    let share = pg_sys::ShareLock as i32;
    // SAFETY: ordinary relation locks; the worker's transaction is READ COMMITTED and has written nothing.
    unsafe {
        if !pg_sys::ConditionalLockRelationOid(gate(), share) {
            return false;
        }
        let drifted = spi::connect(|session| load(session, instance));
        pg_sys::UnlockRelationOid(gate(), share);
        NEXT.set(now.plus(RECONCILE_EVERY).0);
        if !drifted.is_empty() {
            ereport!(
                PgLogLevel::WARNING,
                PgSqlErrorCode::ERRCODE_WARNING,
                format!("pg_stint: live usage of {} budgets was not what their running tasks reserve; set right", drifted.len())
            );
        }
        !drifted.is_empty()
    }
}

/// See the SQL COMMENT of stint.budget_usage.
#[pg_extern(sql = false)]
fn budget_usage() -> TableIterator<'static, (name!(budget, String), name!(running, i64), name!(tokens, i64), name!(derived, bool))> {
    let _owner = spi::Identity::owner();
    let (names, truth) = spi::connect(|session| {
        let rows = session.run(&NUMBERS, &[]);
        let names: Vec<(i32, String)> = (0..rows.len()).map(|at| (rows.must(at, 1), rows.must(at, 2))).collect();
        (names, sums(session))
    });
    let numbers: Vec<i32> = names.iter().map(|(number, _)| *number).collect();
    let instance = Instance::here();
    // Without shared memory, or before it was loaded, the rows themselves are all there is.
    let live = match shmem::get() {
        Some(shared) if budgets::loaded(shared, instance) => Some(budgets::usage(shared, instance, &numbers)),
        _ => None,
    };
    let rows: Vec<_> = names
        .into_iter()
        .enumerate()
        .map(|(at, (number, name))| {
            let derived = truth.iter().find(|(budget, _)| *budget == number).map_or(Usage::default(), |(_, usage)| *usage);
            let shown = live.as_ref().map_or(derived, |live| live[at]);
            (name, shown.running, shown.tokens, shown == derived)
        })
        .collect();
    TableIterator::new(rows)
}
