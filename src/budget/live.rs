//! Live usage beside the rows it is derived from: loading it after a start, settling the end of an attempt, reconciling it, showing it.
//!
//! The lock on `stint.budget_config` orders the two: ROW EXCLUSIVE for whoever reserves or releases, SHARE for whoever adds up the rows.

use crate::errors::Fault;
use crate::queue::config;
use crate::shmem::budgets::Derived;
use crate::shmem::{self, Instance, budgets, waiters};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawNumeric, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;
use stint_core::budget::{Settlement, Usage};
use stint_core::window::{Spent, Window};

static SUMS: Statement = Statement::new(
    c"select d.budget, count(*), coalesce(sum(d.tokens), 0)::bigint
      from stint.place_running r
      cross join lateral unnest(r.budgets, r.reserved) as d (budget, tokens)
      group by d.budget
      order by d.budget",
    &[],
);

static BUDGETS: Statement = Statement::new(
    c"select b.number, b.budget::text, coalesce((extract(epoch from b.per) * 1000000)::bigint, 0)
      from stint.budget_config b
      order by b.budget",
    &[],
);

/// What was spent of each budget with a window, by slots of the window, oldest first: what a running attempt reserved, and of one that ended what it used of
/// its reservation when it began and what it used above that, and its money, when it ended. Instants are counted from 2000 on, as the slots are.
static SPENT: Statement = Statement::new(
    c"with windows as (
            select b.number, (extract(epoch from b.per) * 1000000)::bigint as per, ceil(extract(epoch from b.per) * 1000000 / 60) as width
            from stint.budget_config b
            where b.per is not null),
      since as (
            select $1 - interval '1 microsecond' * (max(w.per) * 1.1) as instant from windows w),
      ended as (
            select a.started_at, a.ended_at, d.budget, d.reserved, d.charged,
                   least(ceil(coalesce(a.model_cost, 0) * 1000000), 1e18) + least(ceil(coalesce(a.compute_cost, 0) * 1000000), 1e18) as cost
            from stint.task_attempts a
            cross join lateral unnest(a.budgets, a.reserved, a.charged) as d (budget, reserved, charged)
            where a.ended_at >= (select s.instant from since s)),
      events as (
            select d.budget, r.started_at as at, 1 as requests, d.reserved::numeric as tokens, 0::numeric as cost
            from stint.place_running r
            cross join lateral unnest(r.budgets, r.reserved) as d (budget, reserved)
            union all
            select e.budget, e.started_at, 1, least(e.reserved, e.charged), 0
            from ended e
            union all
            select e.budget, e.ended_at, 0, greatest(e.charged - e.reserved, 0), e.cost
            from ended e
            where e.charged > e.reserved or e.cost > 0)
      select e.budget, min(e.at), sum(e.requests)::bigint, least(sum(e.tokens), 9e18)::bigint, least(sum(e.cost), 9e18)::bigint
      from events e
      join windows w on w.number = e.budget
      group by e.budget, floor((extract(epoch from e.at) - 946684800) * 1000000 / w.width)
      order by 2",
    &[pg_sys::TIMESTAMPTZOID],
);

thread_local! {
    /// The instance this backend has seen loaded, and after how many unloads: a crash that empties shared memory ends the backend too.
    static SEEN: Cell<Option<(Instance, u64)>> = const { Cell::new(None) };
    /// When the maintenance worker reconciles next.
    static NEXT: Cell<i64> = const { Cell::new(i64::MIN) };
}

/// What a running row reserved.
pub struct Held {
    /// The numbers of the budgets.
    pub budgets: Vec<i32>,
    /// The tokens of each.
    pub reserved: Vec<i64>,
}

impl Held {
    /// Of the two columns of a running row.
    pub fn new(budgets: Option<Vec<i32>>, reserved: Option<Vec<i64>>) -> Option<Self> {
        budgets.zip(reserved).map(|(budgets, reserved)| Held { budgets, reserved })
    }
}

/// What an attempt used, as far as budgets know it.
#[derive(Clone, Copy, Default)]
pub struct Used {
    /// Tokens read.
    pub input: Option<i64>,
    /// Of them, cached ones.
    pub cached: Option<i64>,
    /// Tokens written.
    pub output: Option<i64>,
    /// What the model and computing cost, in millionths.
    pub cost: i64,
}

/// Money in millionths, rounded up; so much at the most that sums do not overflow.
pub fn micros(amount: Option<RawNumeric>) -> i64 {
    amount.map_or(0, |amount| stint_core::window::micros(&amount.text()))
}

/// Has what a running row of a queue reserved released when this transaction commits, and its windows settled with what the attempt used, or with nothing where
/// it was `released`: as if it had never begun. A waiter of each queue that draws on them then looks for what has room. Returns what each budget is charged. Without reported
/// tokens the reservation stays charged: nothing is known that would be truer.
pub fn settle(session: &Session, name: &str, held: &Held, began: Instant, ended: Instant, released: bool, used: Used) -> Vec<i64> {
    enter();
    let instance = Instance::here();
    let queue = config::lookup(session, name);
    let limits = match &queue {
        Some(queue) => config::read_or_known(session, queue, held.budgets.clone()),
        None => config::read_budgets(session, held.budgets.clone()),
    };
    let mut charges = Vec::with_capacity(held.budgets.len());
    for (number, reserved) in held.budgets.iter().zip(&held.reserved) {
        let weights = limits.iter().find(|budget| budget.number == *number).map(|budget| budget.limit.weights).unwrap_or_default();
        let charged = weights.weigh(used.input, used.cached, used.output).unwrap_or(*reserved);
        let settlement = if released { Settlement::released(*reserved) } else { Settlement::of(*reserved, charged, used.cost) };
        budgets::release(instance, *number, Usage { running: 1, tokens: *reserved }, began, ended, settlement);
        charges.push(charged);
    }
    waiters::room(&held.budgets);
    charges
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

/// Holds up whoever reserves, releases or reads limits until this transaction ends, and waits for those who did.
pub fn shut_gate() {
    // SAFETY: an ordinary relation lock.
    unsafe { pg_sys::LockRelationOid(gate(), pg_sys::AccessExclusiveLock as i32) };
}

/// Where budgets stand, each given with the length of its window: as claims see it, or, before that was loaded, as the rows say.
pub fn stand(session: &Session, budgets: &[(i32, i64)], now: Instant) -> Vec<(Usage, Window)> {
    let (shared, instance) = (shmem::required(), Instance::here());
    if budgets::loaded(shared, instance) {
        return budgets.iter().map(|(number, per)| budgets::look(shared, instance, *number, *per, now.0)).collect();
    }
    let truth = derive(session, &known(session), true);
    let of = |number: i32| truth.iter().find(|derived| derived.budget == number);
    budgets
        .iter()
        .map(|(number, _)| of(*number).map_or_else(Default::default, |derived| (derived.usage, derived.window.unwrap_or_default())))
        .collect()
}

/// What the running rows of the moment add up to, whatever snapshot the transaction keeps.
fn sums(session: &Session) -> Vec<(i32, Usage)> {
    let rows = session.run_latest(&SUMS, &[]);
    (0..rows.len()).map(|at| (rows.must(at, 1), Usage { running: rows.must(at, 2), tokens: rows.must(at, 3) })).collect()
}

/// A budget, its name, and the length of its window in microseconds, 0 where it has none.
struct Known {
    number: i32,
    name: String,
    per: i64,
}

fn known(session: &Session) -> Vec<Known> {
    let rows = session.run_latest(&BUDGETS, &[]);
    (0..rows.len()).map(|at| Known { number: rows.must(at, 1), name: rows.must(at, 2), per: rows.must(at, 3) }).collect()
}

/// What the rows of the moment say of every budget there is; of the windows only where that is asked.
fn derive(session: &Session, known: &[Known], windows: bool) -> Vec<Derived> {
    let sums = sums(session);
    let usage = |number| sums.iter().find(|(budget, _)| *budget == number).map_or(Usage::default(), |(_, usage)| *usage);
    let window = windows.then(Window::default);
    let mut truth: Vec<Derived> = known.iter().map(|budget| Derived { budget: budget.number, usage: usage(budget.number), window }).collect();
    if windows && known.iter().any(|budget| budget.per > 0) {
        let now = Instant::now();
        let rows = session.run_latest(&SPENT, &[arg(now)]);
        for at in 0..rows.len() {
            let (number, instant): (i32, Instant) = (rows.must(at, 1), rows.must(at, 2));
            let spent = Spent { requests: rows.must(at, 3), tokens: rows.must(at, 4), cost: rows.must(at, 5) };
            if let Some(place) = known.iter().position(|budget| budget.number == number)
                && let Some(window) = &mut truth[place].window
            {
                window.remember(known[place].per, instant.0, spent);
            }
        }
        for (derived, budget) in truth.iter_mut().zip(known) {
            if let Some(window) = derived.window.as_mut().filter(|_| budget.per > 0) {
                window.advance(budget.per, now.0);
            }
        }
    }
    truth
}

/// Adds up the rows and makes that the live usage. SHARE on the gate is held. Returns the budgets that had drifted.
fn load(session: &Session, instance: Instance, windows: bool) -> Vec<i32> {
    let shared = shmem::required();
    budgets::forget_dropped(shared);
    let unloads = budgets::unloads(shared);
    let mut truth = derive(session, &known(session), windows);
    // What this transaction has ended itself becomes free when it commits, not before.
    budgets::add_unreleased(instance, &mut truth);
    let drifted = budgets::load(shared, instance, &truth);
    SEEN.set(Some((instance, unloads)));
    drifted
}

/// Makes sure that the live usage has been derived since the server started or rows came by other ways than the verbs, before a budgeted claim is answered.
pub fn ensure_loaded(session: &Session, instance: Instance) {
    let unloads = budgets::unloads(shmem::required());
    if SEEN.get() == Some((instance, unloads)) {
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
            SEEN.set(Some((instance, unloads)));
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
                load(session, instance, true);
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

/// Whether live usage has to be loaded, or is to be looked over again.
pub fn due() -> bool {
    !budgets::loaded(shmem::required(), Instance::here()) || Instant::now().0 >= NEXT.get()
}

/// One round for the maintenance worker: loads after a start, and from time to time sets right what somebody's direct change of the rows made wrong. Never
/// waits.
pub fn step() -> bool {
    let instance = Instance::here();
    let now = Instant::now();
    let loaded = budgets::loaded(shmem::required(), instance);
    let share = pg_sys::ShareLock as i32;
    // SAFETY: ordinary relation locks; the worker's transaction is READ COMMITTED and has written nothing.
    unsafe {
        if !pg_sys::ConditionalLockRelationOid(gate(), share) {
            return false;
        }
        // What was spent within windows only the verbs move; it is read once, not every minute.
        let drifted = spi::connect(|session| load(session, instance, !loaded));
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
fn budget_usage() -> TableIterator<
    'static,
    (
        name!(budget, String),
        name!(running, i64),
        name!(tokens, i64),
        name!(derived, bool),
        name!(requests, Option<i64>),
        name!(window_tokens, Option<i64>),
        name!(window_cost_micros, Option<i64>),
        name!(refills_at, Option<Instant>),
    ),
> {
    let _owner = spi::Identity::owner();
    let instance = Instance::here();
    let now = Instant::now();
    // Without shared memory, or before it was loaded, the rows themselves are all there is.
    let live = shmem::get().filter(|shared| budgets::loaded(shared, instance));
    let (known, truth) = spi::connect(|session| {
        let known = known(session);
        let truth = derive(session, &known, live.is_none());
        (known, truth)
    });
    let rows: Vec<_> = known
        .into_iter()
        .zip(truth)
        .map(|(Known { number, name, per }, derived)| {
            let (usage, window) = match live {
                Some(shared) => budgets::look(shared, instance, number, per, now.0),
                None => (derived.usage, derived.window.unwrap_or_default()),
            };
            let spent = window.total();
            let shown = |figure: i64| (per > 0).then_some(figure);
            let right = usage == derived.usage;
            (name, usage.running, usage.tokens, right, shown(spent.requests), shown(spent.tokens), shown(spent.cost), window.next().map(Instant))
        })
        .collect();
    TableIterator::new(rows)
}
