//! What the install script asks of the library, and what the library says of itself.

use crate::shmem::{self, workers};
use pgrx::prelude::*;

/// Fails where the library was not preloaded, and otherwise asks for this database's worker when the transaction commits. Called by the install script.
#[pg_extern(sql = false)]
fn require_preload() {
    shmem::required();
    workers::ask();
}

/// The version of the library this session runs.
#[pg_extern(sql = false)]
fn library_version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
