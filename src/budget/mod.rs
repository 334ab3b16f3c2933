//! Budgets: what may run at once. Limits are rows of `stint.budget_config`; live usage is shared memory derived from `stint.place_running`.

pub mod create;
pub mod live;
