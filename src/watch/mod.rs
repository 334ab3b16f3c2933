//! Watches: conditions on the net change of a transaction, which make tasks as it commits. [`declare`] takes and checks declarations, [`catalogue`] tells the
//! compiler of conditions what the server knows, [`compiled`] keeps what was compiled, [`fire`] runs it at commit, [`log`] writes down what came of it.
//!
//! Evaluation stands in the callback before commit and not in a deferred trigger: by then every deferred trigger of the users has run, SET CONSTRAINTS does not
//! reach it, what savepoints took back is gone from the changelog, and a transaction pays once however many statements it had.

mod catalogue;
mod compiled;
pub mod declare;
pub mod fire;
pub mod log;
