//! Budgets: what may run at once and within a time. Limits are rows of `stint.budget_config`; live usage is shared memory derived from `stint.place_running` and
//! `stint.task_attempts`.

pub mod alter;
pub mod create;
pub mod drop;
pub mod live;
pub mod settings;
