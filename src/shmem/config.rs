//! The configuration's generation: queues, lanes and budgets are cached per backend, and a committed change of any of them moves the generation so that
//! every backend reads them anew at its next call.

use super::{Instance, budgets};
use crate::xact::Pending;
use std::sync::atomic::{AtomicU64, Ordering};

/// In shared memory.
#[repr(C)]
pub struct Shared {
    generation: AtomicU64,
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
