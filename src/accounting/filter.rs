//! What the dashboard functions are asked for: a span of time and filters, checked, and the sums that make it up.

use super::roll_up;
use crate::queue::config;
use crate::spi::{Param, Session, arg};
use crate::values::Instant;
use crate::{errors, input};
use pgrx::prelude::*;
use std::ffi::CStr;
use stint_core::rollup::Level;

/// How attempts end.
pub const ENDED: &[&str] = &["completed", "failed", "cancelled", "released", "snoozed", "awaiting", "lapsed"];

/// A span of time and filters; null takes everything.
#[derive(Clone, Copy, Default)]
pub struct Filter<'a> {
    /// From here, to the minute.
    pub since: Option<Instant>,
    /// To here, to the minute.
    pub until: Option<Instant>,
    /// How an attempt or task ended.
    pub status: Option<&'a str>,
    /// The agent.
    pub agent: Option<&'a str>,
    /// The queue.
    pub queue: Option<&'a str>,
    /// The model.
    pub model: Option<&'a str>,
}

/// The types of [`Filter::params`].
pub const TYPES: [pg_sys::Oid; 9] = [
    pg_sys::INT4ARRAYOID,
    pg_sys::TIMESTAMPTZARRAYOID,
    pg_sys::TIMESTAMPTZARRAYOID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::TEXTOID,
    pg_sys::TEXTOID,
    pg_sys::TEXTOID,
    pg_sys::TEXTOID,
];

impl Filter<'_> {
    /// The same, once every value is within its bounds; `words` are those a status can be.
    pub fn checked(self, words: &[&str]) -> Self {
        input::optional_name("queue", self.queue);
        input::optional_name("agent", self.agent);
        input::reference("model", self.model);
        if let Some(status) = self.status {
            one_of("status", status, words);
        }
        self
    }

    /// What that means in sums, as the calling query sees them. `coarsest`: no sums of longer spans than these, where there are finer ones.
    pub fn asked(&self, session: &Session, coarsest: Level) -> Asked {
        if let Some(queue) = self.queue {
            config::find(session, queue);
        }
        let marks = roll_up::marks(session);
        let (since, until) = marks.widen(self.since.map_or(i64::MIN, |at| at.0), self.until.map_or(i64::MAX, |at| at.0));
        let spans = marks.cover(since, until, coarsest);
        let levels: Vec<i32> = spans.iter().map(|span| span.level as i32).collect();
        let starts: Vec<Instant> = spans.iter().map(|span| Instant(span.since)).collect();
        let ends: Vec<Instant> = spans.iter().map(|span| Instant(span.until)).collect();
        let (since, until) = (Instant(since), Instant(until));
        let params =
            [arg(levels), arg(starts), arg(ends), arg(since), arg(until), arg(self.queue), arg(self.agent), arg(self.model), arg(self.status)];
        Asked { since, until, hours_from: Instant(marks.hours_from), params }
    }
}

/// A filter, ready for a statement.
pub struct Asked {
    /// From here, widened.
    pub since: Instant,
    /// To here, widened.
    pub until: Instant,
    /// Since when hours can be told apart.
    pub hours_from: Instant,
    params: [Param; 9],
}

impl Asked {
    /// The arguments `$1` to `$9` that the sources below take, and those that a statement has beside them.
    pub fn with(&self, more: &[Param]) -> Vec<Param> {
        [self.params.as_slice(), more].concat()
    }
}

/// [`TYPES`] and those that a statement has beside them.
pub const fn types<const N: usize>(more: &[pg_sys::Oid]) -> [pg_sys::Oid; N] {
    let mut all = [pg_sys::TEXTOID; N];
    let mut at = 0;
    while at < N {
        all[at] = if at < TYPES.len() { TYPES[at] } else { more[at - TYPES.len()] };
        at += 1;
    }
    all
}

/// A word that must be one of some; an error that names the nearest.
pub fn one_of(argument: &str, word: &str, words: &[&str]) {
    if !words.contains(&word) {
        let near = stint_core::names::nearest(word, words.iter().copied()).map(|near| format!("Did you mean \"{near}\"? ")).unwrap_or_default();
        errors::invalid(format!("argument \"{argument}\" is \"{word}\""), format!("{near}It can be {}.", words.join(", ")))
    }
}

/// SQL made of parts, with the zero byte that ends it.
pub const fn sql(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(sql) => sql,
        Err(_) => c"the text of a statement must end with a zero byte, and only there",
    }
}

/// What attempts used: sums of the spans `$1` to `$3`, and from `$4` to `$5` what is not added up.
macro_rules! usage_rows {
    () => {
        "select r.since, r.queue, r.agent, r.model, r.ended, r.attempts, r.input_tokens, r.cached_tokens, r.output_tokens, r.model_cost, r.compute_cost,
                r.predicted_tokens, r.measured_tokens, r.wait, r.run, r.confidence,
                null::float8 as one_wait, null::float8 as one_run, null::float8 as one_confidence
         from unnest($1, $2, $3) as g (level, since, until)
         cross join lateral (select * from stint.usage_rollups u where u.level = g.level and u.since >= g.since and u.since < g.until offset 0) r
         where ($6 is null or r.queue = $6) and ($7 is null or r.agent = $7) and ($8 is null or r.model = $8) and ($9 is null or r.ended = $9)
         union all
         select t.since, t.queue, t.agent, t.model, t.ended, t.attempts, t.input_tokens, t.cached_tokens, t.output_tokens, t.model_cost, t.compute_cost,
                t.predicted_tokens, t.measured_tokens, null, null, null, t.wait, t.run, t.confidence
         from stint.usage_tail t
         where t.since >= $4 and t.since < $5
           and ($6 is null or t.queue = $6) and ($7 is null or t.agent = $7) and ($8 is null or t.model = $8) and ($9 is null or t.ended = $9)"
    };
}

/// Finished tasks, in the same way.
macro_rules! task_rows {
    () => {
        "select r.since, r.queue, r.agent, r.model, r.outcome, r.tasks, r.attempts, r.input_tokens, r.cached_tokens, r.output_tokens, r.model_cost,
                r.compute_cost, r.retried_attempts, r.retried_cost
         from unnest($1, $2, $3) as g (level, since, until)
         cross join lateral (select * from stint.task_rollups u where u.level = g.level and u.since >= g.since and u.since < g.until offset 0) r
         where ($6 is null or r.queue = $6) and ($7 is null or r.agent = $7) and ($8 is null or r.model = $8) and ($9 is null or r.outcome = $9)
         union all
         select t.since, t.queue, t.agent, t.model, t.outcome, t.tasks, t.attempts, t.input_tokens, t.cached_tokens, t.output_tokens, t.model_cost,
                t.compute_cost, t.retried_attempts, t.retried_cost
         from stint.task_tail t
         where t.since >= $4 and t.since < $5
           and ($6 is null or t.queue = $6) and ($7 is null or t.agent = $7) and ($8 is null or t.model = $8) and ($9 is null or t.outcome = $9)"
    };
}

/// What rows `s` are grouped by: `$10` says what, `$11` is the time zone, `$12` since when hours are kept; `$word` is the column of how they ended. A row falls where
/// the sums that it is in, or will be in, fall.
macro_rules! group_key {
    ($word:literal) => {
        concat!(
            "(case $10 when 'agent' then nullif(s.agent, '') when 'model' then nullif(s.model, '') when 'queue' then s.queue when 'status' then s.",
            $word,
            " else to_char(date_bin(case when s.since < $12 then interval '1 day' else interval '1 hour' end, s.since, '2000-01-01 00:00:00+00') at time zone $11,
                      case $10 when 'hour' then 'YYYY-MM-DD HH24:00' when 'day' then 'YYYY-MM-DD' when 'month' then 'YYYY-MM' end) end) collate \"C\""
        )
    };
}

pub(crate) use {group_key, task_rows, usage_rows};
