//! The settings of a budget, as `create_budget` and `alter_budget` take them, and their rules.

use super::live;
use crate::spi::{Param, Rows, arg};
use crate::values::{RawInterval, RawNumeric, SECOND};
use crate::{errors, guc, input};
use pgrx::prelude::*;

/// The types of [`Settings::params`], in their order, and of the budget's name.
pub static TYPES: [pg_sys::Oid; 11] = [
    pg_sys::INT4OID,
    pg_sys::INT8OID,
    pg_sys::INT8OID,
    pg_sys::INT8OID,
    pg_sys::INTERVALOID,
    pg_sys::INT8OID,
    pg_sys::NUMERICOID,
    pg_sys::FLOAT8OID,
    pg_sys::FLOAT8OID,
    pg_sys::FLOAT8OID,
    pg_sys::TEXTOID,
];

/// Settings that `alter_budget` may remove.
pub const REMOVABLE: [&str; 7] = ["max_running", "max_tokens", "max_requests", "max_window_tokens", "per", "default_tokens", "max_cost"];

/// The shortest window, in microseconds.
const SHORTEST_WINDOW: i64 = SECOND;
/// The most that a token may count.
const HEAVIEST: f64 = 1e6;

/// What a budget limits; `None` is not limited, or, to `alter_budget`, not changed.
#[derive(Clone, Copy)]
pub struct Settings {
    /// Most tasks running.
    pub max_running: Option<i32>,
    /// Most tokens in flight.
    pub max_tokens: Option<i64>,
    /// Most requests within the window.
    pub max_requests: Option<i64>,
    /// Most tokens within the window.
    pub max_window_tokens: Option<i64>,
    /// The window.
    pub per: Option<RawInterval>,
    /// Tokens of a task without a prediction.
    pub default_tokens: Option<i64>,
    /// Most money within the window.
    pub max_cost: Option<RawNumeric>,
    /// What a token read counts.
    pub input_weight: Option<f64>,
    /// What a cached one counts.
    pub cached_weight: Option<f64>,
    /// What a token written counts.
    pub output_weight: Option<f64>,
}

impl Settings {
    /// Of a row's first ten columns.
    pub fn of_row(row: &Rows) -> Self {
        Settings {
            max_running: row.get(0, 1),
            max_tokens: row.get(0, 2),
            max_requests: row.get(0, 3),
            max_window_tokens: row.get(0, 4),
            per: row.get(0, 5),
            default_tokens: row.get(0, 6),
            max_cost: row.get(0, 7),
            input_weight: row.get(0, 8),
            cached_weight: row.get(0, 9),
            output_weight: row.get(0, 10),
        }
    }

    /// As statement arguments.
    pub fn params(&self) -> [Param; 10] {
        [
            arg(self.max_running),
            arg(self.max_tokens),
            arg(self.max_requests),
            arg(self.max_window_tokens),
            arg(self.per),
            arg(self.default_tokens),
            arg(self.max_cost),
            arg(self.input_weight),
            arg(self.cached_weight),
            arg(self.output_weight),
        ]
    }

    /// Whether it gives a value for one of [`REMOVABLE`].
    pub fn gives(&self, setting: &str) -> bool {
        match setting {
            "max_running" => self.max_running.is_some(),
            "max_tokens" => self.max_tokens.is_some(),
            "max_requests" => self.max_requests.is_some(),
            "max_window_tokens" => self.max_window_tokens.is_some(),
            "per" => self.per.is_some(),
            "default_tokens" => self.default_tokens.is_some(),
            _ => self.max_cost.is_some(),
        }
    }

    /// These, and where they give no value, those of `before` but for what `unset` names.
    pub fn over(self, before: Settings, unset: &[String]) -> Self {
        let keeps = |setting: &str| !unset.iter().any(|name| name == setting);
        Settings {
            max_running: self.max_running.or(before.max_running.filter(|_| keeps("max_running"))),
            max_tokens: self.max_tokens.or(before.max_tokens.filter(|_| keeps("max_tokens"))),
            max_requests: self.max_requests.or(before.max_requests.filter(|_| keeps("max_requests"))),
            max_window_tokens: self.max_window_tokens.or(before.max_window_tokens.filter(|_| keeps("max_window_tokens"))),
            per: self.per.or(before.per.filter(|_| keeps("per"))),
            default_tokens: self.default_tokens.or(before.default_tokens.filter(|_| keeps("default_tokens"))),
            max_cost: self.max_cost.or(before.max_cost.filter(|_| keeps("max_cost"))),
            input_weight: self.input_weight.or(before.input_weight),
            cached_weight: self.cached_weight.or(before.cached_weight),
            output_weight: self.output_weight.or(before.output_weight),
        }
    }

    /// Checks each value by itself.
    pub fn check_values(&self) {
        if let Some(running) = self.max_running {
            input::at_least("max_running", running, 0);
        }
        input::tokens("max_tokens", self.max_tokens);
        if let Some(requests) = self.max_requests {
            input::at_least("max_requests", requests, 0);
        }
        input::tokens("max_window_tokens", self.max_window_tokens);
        if let Some(per) = self.per {
            input::duration("per", per, SHORTEST_WINDOW, guc::max_delay_s(), "stint.max_delay");
        }
        if let Some(tokens) = input::tokens("default_tokens", self.default_tokens) {
            input::at_least("default_tokens", tokens, 1);
        }
        input::money("max_cost", self.max_cost);
        if live::micros(self.max_cost) == stint_core::window::MOST {
            errors::invalid("argument \"max_cost\" is above 10^12", "A limit that can never be reached is none: leave it out.");
        }
        for (name, weight) in [("input_weight", self.input_weight), ("cached_weight", self.cached_weight), ("output_weight", self.output_weight)] {
            if let Some(weight) = weight {
                input::number(name, weight, 0.0, HEAVIEST);
            }
        }
    }

    /// Checks them against each other.
    pub fn check_together(&self, name: &str) {
        let windowed = [
            ("max_requests", self.max_requests.is_some()),
            ("max_window_tokens", self.max_window_tokens.is_some()),
            ("max_cost", self.max_cost.is_some()),
        ];
        if self.max_running.is_none() && self.max_tokens.is_none() && windowed.iter().all(|(_, given)| !given) {
            errors::invalid(
                format!("budget \"{name}\" limits nothing"),
                "Give it at least one of max_running, max_tokens, and, with per, max_requests, max_window_tokens and max_cost.",
            );
        }
        if let Some((limit, _)) = windowed.iter().find(|(_, given)| *given)
            && self.per.is_none()
        {
            errors::invalid(format!("budget \"{name}\" has {limit} but no window"), "Say within what time: per => '1 minute'.");
        }
        for (limit, max) in [("max_tokens", self.max_tokens), ("max_window_tokens", self.max_window_tokens)] {
            if let (Some(tokens), Some(max)) = (self.default_tokens, max)
                && tokens > max
            {
                errors::invalid(
                    format!("budget \"{name}\": default_tokens {tokens} is above {limit} {max}"),
                    format!("A task without a prediction could never run; lower default_tokens or raise {limit}."),
                );
            }
        }
    }
}
