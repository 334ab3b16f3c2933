//! The parts of pg_stint that need no server: arithmetic, decisions and compilers, each with its property tests.

pub mod backoff;
pub mod budget;
pub mod cron;
pub mod fair;
pub mod histogram;
pub mod history;
pub mod ids;
pub mod names;
pub mod record;
pub mod rollup;
pub mod snapshot;
pub mod sql;
pub mod state;
pub mod verdict;
pub mod watch;
pub mod window;
