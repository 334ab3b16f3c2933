//! Every setting of the extension, read through accessors. Limits are enforced before work starts.

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};
use pgrx::pg_sys;

static MAX_BUDGETS: GucSetting<i32> = GucSetting::<i32>::new(1024);
static MAX_LANES: GucSetting<i32> = GucSetting::<i32>::new(8192);
static MAX_GROUPS: GucSetting<i32> = GucSetting::<i32>::new(8192);
static MAX_DATABASES: GucSetting<i32> = GucSetting::<i32>::new(64);
static MAX_PAYLOAD_KB: GucSetting<i32> = GucSetting::<i32>::new(1024);
static MAX_BATCH: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static MAX_NAME_BYTES: GucSetting<i32> = GucSetting::<i32>::new(63);
static MAX_LEASE_S: GucSetting<i32> = GucSetting::<i32>::new(24 * 3600);
static MAX_DELAY_S: GucSetting<i32> = GucSetting::<i32>::new(366 * 24 * 3600);
static MAX_WAIT_S: GucSetting<i32> = GucSetting::<i32>::new(60);
static ALLOW_DROP: GucSetting<bool> = GucSetting::<bool>::new(false);
static NAPTIME_MS: GucSetting<i32> = GucSetting::<i32>::new(500);
static TASK_EVENT_RETENTION_S: GucSetting<i32> = GucSetting::<i32>::new(7 * 24 * 3600);
static DOORBELL_MS: GucSetting<i32> = GucSetting::<i32>::new(50);
static HISTORY_LOCK_MS: GucSetting<i32> = GucSetting::<i32>::new(200);
static EVENT_RETENTION_S: GucSetting<i32> = GucSetting::<i32>::new(0);

/// Registers the settings. Called once, from `_PG_init`.
pub fn init() {
    let flags = GucFlags::default();
    // Defining one of these in a session that loads the library late would end the session.
    // SAFETY: a flag of the postmaster.
    if unsafe { pg_sys::process_shared_preload_libraries_in_progress } {
        sizes_of_shared_memory(flags);
    }
    GucRegistry::define_int_guc(
        c"stint.max_payload",
        c"Largest payload, result, progress, labels or meta value.",
        c"Enforced before anything is written.",
        &MAX_PAYLOAD_KB,
        1,
        1_000_000,
        GucContext::Suset,
        GucFlags::UNIT_KB,
    );
    GucRegistry::define_bool_guc(
        c"stint.allow_drop",
        c"Whether DROP EXTENSION pg_stint passes although there are tasks or state tables.",
        c"Off, it is refused.",
        &ALLOW_DROP,
        GucContext::Userset,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_batch",
        c"Most tasks, rows or ids one call may name.",
        c"Applies to enqueue_many, claim, sweep, promote, merge and poll.",
        &MAX_BATCH,
        1,
        1_000_000,
        GucContext::Suset,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_name_length",
        c"Longest name of a queue, budget, worker, agent, consumer or tag, in bytes.",
        c"Keys, run ids and trace ids may be four times as long.",
        &MAX_NAME_BYTES,
        1,
        1024,
        GucContext::Suset,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_lease",
        c"Longest lease a claim or an extend may ask for.",
        c"A longer lease is refused.",
        &MAX_LEASE_S,
        1,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"stint.max_delay",
        c"Furthest a task may be scheduled or a retry postponed.",
        c"A longer delay is refused.",
        &MAX_DELAY_S,
        1,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"stint.max_wait",
        c"Longest a claim, a poll or task_events may wait in the server.",
        c"A longer wait is refused; call again instead.",
        &MAX_WAIT_S,
        1,
        3600,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"stint.naptime",
        c"Time between two rounds of the maintenance worker.",
        c"A lapsed lease is swept, and a due task promoted, at most this much late.",
        &NAPTIME_MS,
        10,
        60_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"stint.task_event_retention",
        c"How long events of tasks are kept.",
        c"A reader that asks for older ones is refused, so that it never misses any unawares.",
        &TASK_EVENT_RETENTION_S,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"stint.doorbell_interval",
        c"Shortest time between two notifications of one doorbell channel.",
        c"Commits in between are told by one notification.",
        &DOORBELL_MS,
        1,
        60_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"stint.history_lock_timeout",
        c"Longest the upkeep of history partitions waits for a lock.",
        c"What it does not get in this time it tries again later; others wait behind it no longer than this. Keep it below deadlock_timeout.",
        &HISTORY_LOCK_MS,
        1,
        60_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"stint.event_retention",
        c"How long emitted events are kept; 0: for ever.",
        c"An event that was let go of can be emitted anew. What a task awaited stays with the task.",
        &EVENT_RETENTION_S,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
}

/// Settings that can only be had while the server starts.
fn sizes_of_shared_memory(flags: GucFlags) {
    GucRegistry::define_int_guc(
        c"stint.max_budgets",
        c"Budgets of all databases whose live usage fits in shared memory.",
        c"A budgeted claim that finds the table full is refused.",
        &MAX_BUDGETS,
        16,
        1_000_000,
        GucContext::Postmaster,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_lanes",
        c"Lanes (queues and sets of budgets, of fair queues also groups) of all databases whose heads fit in shared memory.",
        c"A lane beyond it works, but its claims are not protected against a held snapshot.",
        &MAX_LANES,
        16,
        10_000_000,
        GucContext::Postmaster,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_groups",
        c"Groups of fair queues of all databases whose share fits in shared memory.",
        c"Groups beyond it have their turns together, as one group of their queue.",
        &MAX_GROUPS,
        16,
        10_000_000,
        GucContext::Postmaster,
        flags,
    );
    GucRegistry::define_int_guc(
        c"stint.max_databases",
        c"Databases of the cluster that can have a maintenance worker.",
        c"A database beyond it has none; stint.doctor() says so.",
        &MAX_DATABASES,
        1,
        1024,
        GucContext::Postmaster,
        flags,
    );
}

fn at_least_zero(value: i32) -> usize {
    usize::try_from(value).unwrap_or(0)
}

/// `stint.max_budgets`.
pub fn max_budgets() -> usize {
    at_least_zero(MAX_BUDGETS.get())
}

/// `stint.max_lanes`.
pub fn max_lanes() -> usize {
    at_least_zero(MAX_LANES.get())
}

/// `stint.max_groups`.
pub fn max_groups() -> usize {
    at_least_zero(MAX_GROUPS.get())
}

/// `stint.max_databases`.
pub fn max_databases() -> usize {
    at_least_zero(MAX_DATABASES.get())
}

/// `stint.allow_drop`.
pub fn allow_drop() -> bool {
    ALLOW_DROP.get()
}

/// `stint.max_payload` in bytes.
pub fn max_payload() -> usize {
    at_least_zero(MAX_PAYLOAD_KB.get()) * 1024
}

/// `stint.max_batch`.
pub fn max_batch() -> i32 {
    MAX_BATCH.get()
}

/// `stint.max_name_length` in bytes.
pub fn max_name() -> usize {
    at_least_zero(MAX_NAME_BYTES.get())
}

/// `stint.max_lease` in seconds.
pub fn max_lease_s() -> i64 {
    i64::from(MAX_LEASE_S.get())
}

/// `stint.max_delay` in seconds.
pub fn max_delay_s() -> i64 {
    i64::from(MAX_DELAY_S.get())
}

/// `stint.max_wait` in seconds.
pub fn max_wait_s() -> i64 {
    i64::from(MAX_WAIT_S.get())
}

/// `stint.naptime` in milliseconds.
pub fn naptime_ms() -> i64 {
    i64::from(NAPTIME_MS.get())
}

/// `stint.task_event_retention` in seconds.
pub fn task_event_retention_s() -> i64 {
    i64::from(TASK_EVENT_RETENTION_S.get())
}

/// `stint.doorbell_interval` in milliseconds.
pub fn doorbell_ms() -> i64 {
    i64::from(DOORBELL_MS.get())
}

/// `stint.history_lock_timeout` in milliseconds.
pub fn history_lock_timeout_ms() -> i32 {
    HISTORY_LOCK_MS.get()
}

/// `stint.event_retention` in seconds; none where events are kept for ever.
pub fn event_retention_s() -> Option<i64> {
    Some(i64::from(EVENT_RETENTION_S.get())).filter(|seconds| *seconds > 0)
}
