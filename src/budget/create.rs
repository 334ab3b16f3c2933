//! `stint.create_budget`: a named limit that tasks draw on.

use super::settings::{Settings, TYPES};
use crate::errors::Fault;
use crate::shmem::{self, config};
use crate::spi::{self, Session, Statement, arg};
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

static COUNT: Statement = Statement::new(c"select count(*) from stint.budget_config", &[]);

/// Refuses a budget whose live usage would find no room in shared memory, even if no other database had one.
fn check_room(session: &Session, name: &str) {
    let budgets: i64 = session.run(&COUNT, &[]).must(0, 1);
    let room = i64::try_from(shmem::budgets_of_one_database()).unwrap_or(i64::MAX);
    if budgets > room {
        Fault::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!("budget \"{name}\" cannot be made: there is room for {room} in this database"),
        )
        .hint("Drop budgets that nothing draws on, or raise the setting stint.max_budgets and restart the server.")
        .raise();
    }
}

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
        check_room(session, name);
        config::changed();
    });
}
