//! `stint.alter_queue`, `stint.pause_queue` and `stint.resume_queue`: a queue's settings, changed while it works.

use super::config;
use super::create::{SETTING_TYPES, Settings};
use super::factors;
use crate::changelog::feed;
use crate::history::classes;
use crate::input;
use crate::shmem::{self, config as generation, waiters};
use crate::spi::{self, Statement, arg};
use crate::values::RawInterval;
use pgrx::prelude::*;

/// Null keeps what is there; an empty duration or text takes it away where a queue can be without.
static UPDATE: Statement = Statement::new(
    c"update stint.queue_config q
      set lease_for = coalesce($2, q.lease_for),
          max_attempts = coalesce($3, q.max_attempts),
          backoff_base = coalesce($4, q.backoff_base),
          backoff_factor = coalesce($5, q.backoff_factor),
          backoff_max = coalesce($6, q.backoff_max),
          backoff_jitter = coalesce($7, q.backoff_jitter),
          budgets = coalesce($8, q.budgets),
          key_retention = coalesce($9, q.key_retention),
          late_result = coalesce($10, q.late_result),
          notify = coalesce($11, q.notify),
          max_run_time = nullif(coalesce($12, q.max_run_time), interval '0'),
          paused = coalesce($13, q.paused),
          comment = nullif(coalesce($14, q.comment), ''),
          fair = coalesce($15, q.fair),
          correct_predictions = coalesce($16, q.correct_predictions),
          events = coalesce($17, q.events)
      where q.queue = $1",
    &SETTING_TYPES,
);

static PAUSE: Statement =
    Statement::new(c"update stint.queue_config q set paused = $2 where q.queue = $1 and q.paused <> $2", &[pg_sys::TEXTOID, pg_sys::BOOLOID]);

/// Every session that waits for tasks of the queue looks again once this commits: there may be any number of tasks for them.
fn wake(queue: &config::Queue) {
    waiters::ready(queue.number, usize::MAX);
}

/// See the SQL COMMENT of stint.alter_queue.
#[pg_extern(sql = false)]
fn alter_queue(
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
    fair: Option<bool>,
    correct_predictions: Option<bool>,
    history_retention: Option<RawInterval>,
    history_archive: Option<&str>,
    events: Option<bool>,
) {
    shmem::required();
    let name = input::name("queue", queue);
    let settings = Settings {
        queue: name,
        lease_for,
        max_attempts,
        backoff_base,
        backoff_factor,
        backoff_max,
        backoff_jitter,
        budgets,
        key_retention,
        late_result,
        notify,
        max_run_time,
        paused,
        comment,
        fair,
        correct_predictions,
        events,
    };
    settings.check();
    classes::check(history_retention, history_archive, true);
    if let Some(longest) = max_run_time.filter(|longest| longest.micros() != 0) {
        input::run_time("max_run_time", longest);
    }
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let queue = config::find(session, name);
        session.run(&UPDATE, &settings.params(session));
        if events == Some(true) && !queue.events {
            feed::begin(session, name);
        }
        if history_retention.is_some() || history_archive.is_some() {
            classes::change(session, name, history_retention, history_archive);
        }
        generation::changed();
        if correct_predictions == Some(true) {
            factors::refresh(session, name);
        }
        wake(&queue);
    });
}

fn set_paused(name: Option<&str>, paused: bool) -> bool {
    shmem::required();
    let name = input::name("queue", name);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let queue = config::find(session, name);
        let changed = !session.run(&PAUSE, &[arg(name), arg(paused)]).is_empty();
        if changed {
            generation::changed();
            if !paused {
                wake(&queue);
            }
        }
        changed
    })
}

/// See the SQL COMMENT of stint.pause_queue.
#[pg_extern(sql = false)]
fn pause_queue(queue: Option<&str>) -> bool {
    set_paused(queue, true)
}

/// See the SQL COMMENT of stint.resume_queue.
#[pg_extern(sql = false)]
fn resume_queue(queue: Option<&str>) -> bool {
    set_paused(queue, false)
}
