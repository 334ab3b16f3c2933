//! What an attempt used, as its callback reports it: checked, carried untouched into the attempt's row, or, when the attempt has ended already, kept once
//! beside it.

use crate::budget::live::{self, Used};
use crate::spi::{Param, Session, Statement, arg};
use crate::values::{Instant, RawJsonb, RawNumeric};
use crate::{errors, input};
use pgrx::prelude::*;

static LATE: Statement = Statement::new(
    c"insert into stint.usage_late
             (queue, id, attempt, key, recorded_at,
              run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)
      on conflict (queue, id, attempt, key) do nothing",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::TEXTOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::NUMERICOID,
        pg_sys::NUMERICOID,
        pg_sys::FLOAT4OID,
        pg_sys::JSONBOID,
    ],
);

/// The key under which a late callback's own usage is kept.
pub const CALLBACK: &str = "callback";

/// The usage arguments of `complete` and `fail`.
#[derive(Clone, Copy, Default)]
pub struct Usage<'a> {
    /// The run's id on the job platform.
    pub run_id: Option<&'a str>,
    /// The trace's id.
    pub trace_id: Option<&'a str>,
    /// The model used.
    pub model: Option<&'a str>,
    /// Tokens read.
    pub input_tokens: Option<i64>,
    /// Of them, tokens the provider had cached.
    pub cached_tokens: Option<i64>,
    /// Tokens written.
    pub output_tokens: Option<i64>,
    /// What the model cost.
    pub model_cost: Option<RawNumeric>,
    /// What computing cost.
    pub compute_cost: Option<RawNumeric>,
    /// The agent's confidence, 0 to 1.
    pub confidence: Option<f32>,
    /// Anything else.
    pub meta: Option<RawJsonb>,
}

impl<'a> Usage<'a> {
    /// The same, once every value is within its bounds.
    pub fn checked(self) -> Self {
        input::reference("run_id", self.run_id);
        input::reference("trace_id", self.trace_id);
        input::reference("model", self.model);
        input::tokens("input_tokens", self.input_tokens);
        input::tokens("cached_tokens", self.cached_tokens);
        input::tokens("output_tokens", self.output_tokens);
        if let (Some(input), Some(cached)) = (self.input_tokens, self.cached_tokens)
            && cached > input
        {
            errors::invalid(
                format!("argument \"cached_tokens\" is {cached}, more than \"input_tokens\", which is {input}"),
                "Cached tokens are part of the input: pass in input_tokens all that were read, cached or not.",
            )
        }
        input::money("model_cost", self.model_cost);
        input::money("compute_cost", self.compute_cost);
        if let Some(confidence) = self.confidence {
            // By its text, so that an error shows what was given: 1.0001 as it is, and not the nearest double of the nearest float.
            input::number("confidence", confidence.to_string().parse().unwrap_or(f64::NAN), 0.0, 1.0);
        }
        input::json("meta", self.meta);
        self
    }

    /// The same, with the run and trace ids that a heartbeat gave before, where this call gives none.
    pub fn or_known(self, run_id: Option<&'a str>, trace_id: Option<&'a str>) -> Self {
        Usage { run_id: self.run_id.or(run_id), trace_id: self.trace_id.or(trace_id), ..self }
    }

    /// What budgets are settled with.
    pub fn used(&self) -> Used {
        Used {
            input: self.input_tokens,
            cached: self.cached_tokens,
            output: self.output_tokens,
            cost: live::micros(self.model_cost).saturating_add(live::micros(self.compute_cost)),
        }
    }

    /// The ten values as statement arguments, in the tables' column order.
    pub fn params(&self) -> [Param; 10] {
        [
            arg(self.run_id),
            arg(self.trace_id),
            arg(self.model),
            arg(self.input_tokens),
            arg(self.cached_tokens),
            arg(self.output_tokens),
            arg(self.model_cost),
            arg(self.compute_cost),
            arg(self.confidence),
            arg(self.meta),
        ]
    }

    /// Whether nothing is said at all.
    pub fn is_empty(&self) -> bool {
        self.params().iter().all(Option::is_none)
    }

    /// Keeps the usage of an attempt that had ended before its callback came; a repeated callback adds nothing.
    pub fn keep_late(&self, session: &Session, name: &str, id: pgrx::Uuid, attempt: i32, now: Instant) {
        if !self.is_empty() {
            self.keep(session, name, id, attempt, CALLBACK, now);
        }
    }

    /// Keeps usage beside the attempt, once for each key. False where the key is there already.
    pub fn keep(&self, session: &Session, name: &str, id: pgrx::Uuid, attempt: i32, key: &str, now: Instant) -> bool {
        let place = [arg(name), arg(id), arg(attempt), arg(key), arg(now)];
        !session.run(&LATE, &[place.as_slice(), &self.params()].concat()).is_empty()
    }
}
