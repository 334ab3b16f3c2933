//! The configuration's generation: queues, lanes and budgets are cached per backend, and a committed change of any of them moves the generation so that
//! every backend reads them anew at its next call.

use super::{Instance, budgets};
use crate::xact::Pending;
use std::sync::atomic::{AtomicU64, Ordering};

/// In shared memory.
#[repr(C)]
pub struct Shared {
    generation: AtomicU64,
    /// How often lanes of groups came or went, of the queues that share a place here.
    lanes: [AtomicU64; LANE_COUNTS],
}

/// Two queues that share a count only read their lanes more often.
const LANE_COUNTS: usize = 256;

fn lane_count(queue: i32) -> usize {
    queue.unsigned_abs() as usize % LANE_COUNTS
}

impl Shared {
    pub(super) fn init(&mut self) {
        // Zero means "never read" to a backend's cache.
        self.generation = AtomicU64::new(1);
    }
}

thread_local! {
    /// One entry for each change of configuration in this transaction; with the instance where windows must be derived anew.
    pub static PENDING: Pending<Option<Instance>> = const { Pending::new() };
}

thread_local! {
    /// Queues in which this transaction made or removed lanes of groups. These come and go with the groups, so they do not move the generation.
    pub static LANES: Pending<i32> = const { Pending::new() };
}

/// Notes that this transaction made or removed a lane of a group.
pub fn group_lane_changed(queue: i32) {
    LANES.with(|p| {
        if !p.any_here(|known| *known == queue) {
            p.push(queue);
        }
    });
}

/// Whether this transaction has made or removed a lane of a group.
pub fn lanes_changed_here() -> bool {
    LANES.with(|p| p.any(|_| true))
}

/// How often lanes of groups of the queue came or went.
pub fn lanes(shared: &super::Shared, queue: i32) -> u64 {
    shared.config.lanes[lane_count(queue)].load(Ordering::Acquire)
}

/// At commit.
pub fn lanes_changed(queue: &i32) {
    if let Some(shared) = super::get() {
        shared.config.lanes[lane_count(*queue)].fetch_add(1, Ordering::AcqRel);
    }
}

/// Notes that this transaction changed a queue, lane or budget.
pub fn changed() {
    PENDING.with(|p| p.push(None));
}

/// Notes that this transaction changed the length of a budget's window: what was spent within it is derived from the rows again.
pub fn window_changed(instance: Instance) {
    PENDING.with(|p| p.push(Some(instance)));
}

/// Whether this transaction has changed the configuration: then nothing it reads of it may be kept.
pub fn changed_here() -> bool {
    PENDING.with(|p| p.any(|_| true))
}

/// The current generation.
pub fn generation(shared: &super::Shared) -> u64 {
    shared.config.generation.load(Ordering::Acquire)
}

/// Has every backend read the configuration anew, from now on.
pub fn move_on() {
    bump();
}

fn bump() {
    if let Some(shared) = super::get() {
        shared.config.generation.fetch_add(1, Ordering::AcqRel);
    }
}

/// At commit: every backend reads anew.
pub fn commit(windows: &Option<Instance>) {
    bump();
    if let (Some(shared), Some(instance)) = (super::get(), windows) {
        budgets::unload(shared, *instance);
    }
}

/// At abort: this backend may have kept a name that is gone again.
pub fn abort(_: &Option<Instance>) {
    bump();
}
