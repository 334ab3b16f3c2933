//! `stint.create_budget`: a named limit that tasks draw on.

use crate::errors;
use crate::input;
use crate::shmem::{self, config};
use crate::spi::{self, Statement, arg};
use pgrx::prelude::*;

static INSERT: Statement = Statement::new(
    c"insert into stint.budget_config (budget, max_running, max_tokens, default_tokens) values ($1, $2, $3, $4) on conflict (budget) do nothing",
    &[pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// See the SQL COMMENT of stint.create_budget.
#[pg_extern(sql = false)]
fn create_budget(name: Option<&str>, max_running: Option<i32>, max_tokens: Option<i64>, default_tokens: Option<i64>) {
    shmem::required();
    let name = input::name("name", name);
    if max_running.is_none() && max_tokens.is_none() {
        errors::invalid(format!("budget \"{name}\" limits nothing"), "Give it max_running, max_tokens or both.");
    }
    if let Some(running) = max_running {
        input::at_least("max_running", running, 0);
    }
    input::tokens("max_tokens", max_tokens);
    if let Some(tokens) = input::tokens("default_tokens", default_tokens) {
        input::at_least("default_tokens", tokens, 1);
        if max_tokens.is_some_and(|max| tokens > max) {
            errors::invalid(
                format!("budget \"{name}\": default_tokens {tokens} is above max_tokens"),
                "A task without a prediction could never run; lower default_tokens or raise max_tokens.",
            );
        }
    }
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let made = session.run(&INSERT, &[arg(name), arg(max_running), arg(max_tokens), arg(default_tokens)]);
        if made.is_empty() {
            errors::exists("budget", name, "Use another name, or the budget that is there: the view stint.budgets shows its limits.");
        }
        config::changed();
    });
}
