//! `stint.create_queue`: a queue and its settings.

use super::config;
use crate::shmem::{self, config as generation};
use crate::spi::{self, Statement, arg};
use crate::values::RawInterval;
use crate::{errors, guc, input};
use pgrx::prelude::*;

static INSERT: Statement = Statement::new(
    c"insert into stint.queue_config
             (queue, lease_for, max_attempts, backoff_base, backoff_factor, backoff_max, backoff_jitter, budgets, key_retention, late_result, notify, strict_groups, comment)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
      on conflict (queue) do nothing",
    &[
        pg_sys::TEXTOID,
        pg_sys::INTERVALOID,
        pg_sys::INT4OID,
        pg_sys::INTERVALOID,
        pg_sys::FLOAT8OID,
        pg_sys::INTERVALOID,
        pg_sys::FLOAT8OID,
        pg_sys::TEXTARRAYOID,
        pg_sys::INTERVALOID,
        pg_sys::TEXTOID,
        pg_sys::BOOLOID,
        pg_sys::BOOLOID,
        pg_sys::TEXTOID,
    ],
);

static FIRST_LANE: Statement = Statement::new(c"insert into stint.lanes (queue, budgets) values ($1, '{}')", &[pg_sys::TEXTOID]);

/// See the SQL COMMENT of stint.create_queue.
#[pg_extern(sql = false)]
fn create_queue(
    queue: Option<&str>,
    lease_for: Option<RawInterval>,
    max_attempts: Option<i32>,
    backoff_base: Option<RawInterval>,
    backoff_factor: Option<f64>,
    backoff_max: Option<RawInterval>,
    backoff_jitter: Option<f64>,
    budgets: Option<Vec<Option<String>>>,
    key_retention: Option<RawInterval>,
    late_result: Option<&str>,
    notify: Option<bool>,
    strict_groups: Option<bool>,
    comment: Option<&str>,
) {
    shmem::required();
    let queue = input::name("queue", queue);
    let lease_for = input::given("lease_for", lease_for);
    input::lease("lease_for", lease_for);
    let max_attempts = input::at_least("max_attempts", input::given("max_attempts", max_attempts), 1);
    let backoff_base = input::given("backoff_base", backoff_base);
    input::delay("backoff_base", backoff_base);
    let backoff_factor = input::number("backoff_factor", input::given("backoff_factor", backoff_factor), 1.0, 1000.0);
    let backoff_max = input::given("backoff_max", backoff_max);
    input::delay("backoff_max", backoff_max);
    let backoff_jitter = input::number("backoff_jitter", input::given("backoff_jitter", backoff_jitter), 0.0, 1.0);
    let budgets = input::names("budgets", budgets);
    let key_retention = input::given("key_retention", key_retention);
    input::duration("key_retention", key_retention, 0, guc::max_delay_s(), "stint.max_delay");
    let late_result = input::given("late_result", late_result);
    if !["accept", "reject"].contains(&late_result) {
        errors::invalid(format!("late_result \"{late_result}\" is not known"), "Use 'accept' or 'reject'.");
    }
    let notify = input::given("notify", notify);
    let strict_groups = input::given("strict_groups", strict_groups);
    input::text("comment", comment);

    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        config::budget_numbers(session, &budgets);
        let made = session.run(
            &INSERT,
            &[
                arg(queue),
                arg(lease_for),
                arg(max_attempts),
                arg(backoff_base),
                arg(backoff_factor),
                arg(backoff_max),
                arg(backoff_jitter),
                arg(budgets),
                arg(key_retention),
                arg(late_result),
                arg(notify),
                arg(strict_groups),
                arg(comment),
            ],
        );
        if made.is_empty() {
            errors::exists("queue", queue, "Use another name, or the queue that is there: the view stint.queues shows its settings.");
        }
        session.run(&FIRST_LANE, &[arg(queue)]);
        generation::changed();
    });
}
