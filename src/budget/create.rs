//! `stint.create_budget`: a named limit that tasks draw on.

use super::settings::{Settings, TYPES};
use crate::shmem::{self, config};
use crate::spi::{self, Statement, arg};
use crate::values::{RawInterval, RawNumeric};
use crate::{errors, input};
use pgrx::prelude::*;

static INSERT: Statement = Statement::new(
    c"insert into stint.budget_config
             (max_running, max_tokens, max_requests, max_window_tokens, per, default_tokens, max_cost,
              input_weight, cached_weight, output_weight, budget)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
      on conflict (budget) do nothing",
    &TYPES,
);

/// See the SQL COMMENT of stint.create_budget.
#[pg_extern(sql = false)]
fn create_budget(
    name: Option<&str>,
    max_running: Option<i32>,
    max_tokens: Option<i64>,
    max_requests: Option<i64>,
    max_window_tokens: Option<i64>,
    per: Option<RawInterval>,
    default_tokens: Option<i64>,
    max_cost: Option<RawNumeric>,
    input_weight: Option<f64>,
    cached_weight: Option<f64>,
    output_weight: Option<f64>,
) {
    shmem::required();
    let name = input::name("name", name);
    let settings = Settings {
        max_running,
        max_tokens,
        max_requests,
        max_window_tokens,
        per,
        default_tokens,
        max_cost,
        input_weight: Some(input::given("input_weight", input_weight)),
        cached_weight: Some(input::given("cached_weight", cached_weight)),
        output_weight: Some(input::given("output_weight", output_weight)),
    };
    settings.check_values();
    settings.check_together(name);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let [a, b, c, d, e, f, g, h, i, j] = settings.params();
        let made = session.run(&INSERT, &[a, b, c, d, e, f, g, h, i, j, arg(name)]);
        if made.is_empty() {
            errors::exists("budget", name, "Use another name, or the budget that is there: the view stint.budgets shows its limits.");
        }
        config::changed();
    });
}
