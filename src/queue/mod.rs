//! The queue: one file per verb or small family. `config` knows queues, lanes and their budgets; `store` has the inserts that several verbs share.

pub mod cancel;
pub mod claim;
pub mod config;
pub mod create;
pub mod enqueue;
pub mod enqueue_many;
pub mod explain;
pub mod finish;
pub mod horizon;
pub mod keys;
pub mod late;
pub mod lease;
pub mod lines;
pub mod promote;
pub mod release;
pub mod store;
pub mod sweep;
pub mod usage;
