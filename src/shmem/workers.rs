//! Which database has a maintenance worker, and its latch to wake it. The launcher's only memory, so that it survives the launcher itself.

/// In shared memory.
#[repr(C)]
pub struct Shared {
    _reserved: u64,
}

/// Wakes the maintenance worker of a database, if it has one. Called in commit callbacks: neither allocates nor raises.
pub fn wake(_shared: &super::Shared, _database: u32) {}
