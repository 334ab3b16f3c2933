//! `stint.alter_budget` and `stint.throttle`: changes of a budget that is in use. Running work goes on; only what starts next is affected.

use super::settings::{REMOVABLE, Settings, TYPES};
use crate::queue::config::unknown_budget;
use crate::shmem::{self, Instance, config, waiters};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawNumeric};
use crate::{errors, guc, input};
use pgrx::prelude::*;

static LOOK: Statement = Statement::new(
    c"select b.max_running, b.max_tokens, b.max_requests, b.max_window_tokens, b.per, b.default_tokens, b.max_cost,
             b.input_weight, b.cached_weight, b.output_weight
      from stint.budget_config b
      where b.budget = $1
      for update",
    &[pg_sys::TEXTOID],
);

static UPDATE: Statement = Statement::new(
    c"update stint.budget_config
      set max_running = $1, max_tokens = $2, max_requests = $3, max_window_tokens = $4, per = $5, default_tokens = $6, max_cost = $7,
          input_weight = $8, cached_weight = $9, output_weight = $10
      where budget = $11",
    &TYPES,
);

/// A throttle is never shortened but by one of no length, which ends it.
static THROTTLE: Statement = Statement::new(
    c"update stint.budget_config b
      set throttled_until = case when $2 is not null then greatest(b.throttled_until, $2) end
      where b.budget = $1
      returning b.throttled_until",
    &[pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID],
);

static NUMBER: Statement = Statement::new(c"select b.number from stint.budget_config b where b.budget = $1", &[pg_sys::TEXTOID]);

/// Has a waiter of each queue concerned look for what has room now, when the change is committed.
fn wake(session: &Session, name: &str) {
    waiters::room(&[session.run(&NUMBER, &[arg(name)]).must(0, 1)]);
}

/// See the SQL COMMENT of stint.alter_budget.
#[pg_extern(sql = false)]
fn alter_budget(
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
    unset: Option<Vec<Option<String>>>,
) {
    shmem::required();
    let name = input::name("name", name);
    let change = Settings {
        max_running,
        max_tokens,
        max_requests,
        max_window_tokens,
        per,
        default_tokens,
        max_cost,
        input_weight,
        cached_weight,
        output_weight,
    };
    change.check_values();
    let unset = input::names("unset", unset);
    for setting in &unset {
        if !REMOVABLE.contains(&setting.as_str()) {
            let hint = match stint_core::names::nearest(setting, REMOVABLE) {
                Some(near) => format!("Did you mean \"{near}\"? It may name {}.", REMOVABLE.join(", ")),
                None => format!("It may name {}.", REMOVABLE.join(", ")),
            };
            errors::invalid(format!("argument \"unset\" names \"{setting}\", which is no limit that can be removed"), hint);
        }
        if change.gives(setting) {
            errors::invalid(format!("\"{setting}\" is both given and in unset"), "Do one of them.");
        }
    }
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let row = session.run(&LOOK, &[arg(name)]);
        if row.is_empty() {
            unknown_budget(session, name);
        }
        let before = Settings::of_row(&row);
        let after = change.over(before, &unset);
        after.check_together(name);
        let [a, b, c, d, e, f, g, h, i, j] = after.params();
        session.run(&UPDATE, &[a, b, c, d, e, f, g, h, i, j, arg(name)]);
        config::changed();
        if before.per.map(RawInterval::micros) != after.per.map(RawInterval::micros) {
            config::window_changed(Instance::here());
        }
        wake(session, name);
    });
}

/// See the SQL COMMENT of stint.throttle.
#[pg_extern(sql = false)]
fn throttle(budget: Option<&str>, duration: Option<RawInterval>) -> Option<Instant> {
    shmem::required();
    let name = input::name("budget", budget);
    let lasts = input::duration("duration", input::given("duration", duration), 0, guc::max_delay_s(), "stint.max_delay");
    let until = (lasts > 0).then(|| Instant::now().plus(lasts));
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let row = session.run(&THROTTLE, &[arg(name), arg(until)]);
        if row.is_empty() {
            unknown_budget(session, name);
        }
        config::changed();
        if until.is_none() {
            wake(session, name);
        }
        row.get(0, 1)
    })
}
