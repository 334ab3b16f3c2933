//! Accounting: what finished tasks and ended attempts used. Sums by minute, hour, day and month are made of them in the background; every answer is those sums
//! and what is not in them yet, in one snapshot (docs/accounting.md). The nouns are in `sql/60_accounting.sql`.

mod bill;
mod dashboard;
mod filter;
mod histogram;
pub mod roll_up;
mod tasks;
mod usage;
