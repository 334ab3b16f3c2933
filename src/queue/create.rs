//! `stint.create_queue`: a queue and its settings. [`Settings`] checks them for `alter_queue` too.

use super::config;
use crate::changelog::{epoch, feed};
use crate::history::classes;
use crate::shmem::{self, config as generation};
use crate::spi::{self, Param, Session, Statement, arg};
use crate::values::RawInterval;
use crate::{errors, guc, input};
use pgrx::prelude::*;

static INSERT: Statement = Statement::new(
    c"insert into stint.queue_config
             (queue, lease_for, max_attempts, backoff_base, backoff_factor, backoff_max, backoff_jitter, budgets, key_retention, late_result, notify,
              max_run_time, paused, comment, fair, correct_predictions, events, strict_groups)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
      on conflict (queue) do nothing",
    &INSERT_TYPES,
);

static FIRST_LANE: Statement = Statement::new(c"insert into stint.lanes (queue, budgets) values ($1, '{}')", &[pg_sys::TEXTOID]);

/// The types of the queue's name and its settings, in the order of [`Settings::params`].
pub const SETTING_TYPES: [pg_sys::Oid; 17] = [
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
    pg_sys::INTERVALOID,
    pg_sys::BOOLOID,
    pg_sys::TEXTOID,
    pg_sys::BOOLOID,
    pg_sys::BOOLOID,
    pg_sys::BOOLOID,
];

/// The same and whether groups are strict, which never changes.
const INSERT_TYPES: [pg_sys::Oid; 18] = {
    let mut types = [pg_sys::BOOLOID; 18];
    let mut at = 0;
    while at < SETTING_TYPES.len() {
        types[at] = SETTING_TYPES[at];
        at += 1;
    }
    types
};

/// A queue's settings as given.
pub struct Settings<'a> {
    /// The queue's name.
    pub queue: &'a str,
    /// Lease.
    pub lease_for: Option<RawInterval>,
    /// Attempts a task may use up.
    pub max_attempts: Option<i32>,
    /// The first wait.
    pub backoff_base: Option<RawInterval>,
    /// How it grows.
    pub backoff_factor: Option<f64>,
    /// The longest wait.
    pub backoff_max: Option<RawInterval>,
    /// How much it varies.
    pub backoff_jitter: Option<f64>,
    /// Budgets that every task draws on.
    pub budgets: Option<Vec<Option<String>>>,
    /// How long keys are kept.
    pub key_retention: Option<RawInterval>,
    /// Whether a lapsed lease's result is taken.
    pub late_result: Option<&'a str>,
    /// Whether the doorbell rings.
    pub notify: Option<bool>,
    /// How long an attempt may run.
    pub max_run_time: Option<RawInterval>,
    /// Whether claims find nothing.
    pub paused: Option<bool>,
    /// What it is for.
    pub comment: Option<&'a str>,
    /// Whether groups share it by weight.
    pub fair: Option<bool>,
    /// Whether claims correct predictions.
    pub correct_predictions: Option<bool>,
    /// Whether changes of status are kept as events.
    pub events: Option<bool>,
}

impl Settings<'_> {
    /// Checks every value that is given and needs no table.
    pub fn check(&self) {
        if let Some(lease) = self.lease_for {
            input::lease("lease_for", lease);
        }
        if let Some(attempts) = self.max_attempts {
            input::at_least("max_attempts", attempts, 1);
        }
        if let Some(base) = self.backoff_base {
            input::delay("backoff_base", base);
        }
        if let Some(factor) = self.backoff_factor {
            input::number("backoff_factor", factor, 1.0, 1000.0);
        }
        if let Some(max) = self.backoff_max {
            input::delay("backoff_max", max);
        }
        if let Some(jitter) = self.backoff_jitter {
            input::number("backoff_jitter", jitter, 0.0, 1.0);
        }
        if let Some(retention) = self.key_retention {
            input::duration("key_retention", retention, 0, guc::max_delay_s(), "stint.max_delay");
        }
        if let Some(late) = self.late_result
            && !["accept", "reject"].contains(&late)
        {
            errors::invalid(format!("late_result \"{late}\" is not known"), "Use 'accept' or 'reject'.");
        }
        input::text("comment", self.comment);
    }

    /// The statement's arguments; an error naming a budget that does not exist.
    pub fn params(self, session: &Session) -> [Param; 17] {
        let budgets = self.budgets.map(|budgets| input::names("budgets", Some(budgets)));
        if let Some(budgets) = &budgets {
            config::budget_numbers(session, budgets);
        }
        [
            arg(self.queue),
            arg(self.lease_for),
            arg(self.max_attempts),
            arg(self.backoff_base),
            arg(self.backoff_factor),
            arg(self.backoff_max),
            arg(self.backoff_jitter),
            arg(budgets),
            arg(self.key_retention),
            arg(self.late_result),
            arg(self.notify),
            arg(self.max_run_time),
            arg(self.paused),
            arg(self.comment),
            arg(self.fair),
            arg(self.correct_predictions),
            arg(self.events),
        ]
    }
}

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
    comment: Option<&str>,
    max_run_time: Option<RawInterval>,
    paused: Option<bool>,
    strict_groups: Option<bool>,
    fair: Option<bool>,
    correct_predictions: Option<bool>,
    history_retention: Option<RawInterval>,
    history_archive: Option<&str>,
    events: Option<bool>,
) {
    shmem::required();
    let settings = Settings {
        queue: input::name("queue", queue),
        lease_for: Some(input::given("lease_for", lease_for)),
        max_attempts: Some(input::given("max_attempts", max_attempts)),
        backoff_base: Some(input::given("backoff_base", backoff_base)),
        backoff_factor: Some(input::given("backoff_factor", backoff_factor)),
        backoff_max: Some(input::given("backoff_max", backoff_max)),
        backoff_jitter: Some(input::given("backoff_jitter", backoff_jitter)),
        budgets: Some(budgets.unwrap_or_default()),
        key_retention: Some(input::given("key_retention", key_retention)),
        late_result: Some(input::given("late_result", late_result)),
        notify: Some(input::given("notify", notify)),
        max_run_time,
        paused: Some(input::given("paused", paused)),
        comment,
        fair: Some(input::given("fair", fair)),
        correct_predictions: Some(input::given("correct_predictions", correct_predictions)),
        events: Some(input::given("events", events)),
    };
    settings.check();
    if let Some(longest) = max_run_time {
        input::run_time("max_run_time", longest);
    }
    let strict_groups = input::given("strict_groups", strict_groups);
    let history_archive = input::given("history_archive", history_archive);
    classes::check(history_retention, Some(history_archive), false);
    let queue = settings.queue;

    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        // So that a copy of this database is known as one.
        epoch::required(session);
        let params: Vec<Param> = settings.params(session).into_iter().chain([arg(strict_groups)]).collect();
        if session.run(&INSERT, &params).is_empty() {
            errors::exists("queue", queue, "Use another name, or the queue that is there: the view stint.queues shows its settings.");
        }
        session.run(&FIRST_LANE, &[arg(queue)]);
        if events == Some(true) {
            feed::begin(session, queue);
        }
        classes::change(session, queue, history_retention, Some(history_archive));
        generation::changed();
    });
}
