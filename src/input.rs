//! Checks of what users pass in, made before any work starts: every verb names the argument, says what was wrong with it and what to do.

use crate::values::{RawInterval, RawJsonb, SECOND};
use crate::{errors, guc};

/// Microseconds as people read them: `1h 30min`, `90s`, `250ms`.
fn duration_text(micros: i64) -> String {
    let (hours, minutes, seconds) = (micros / (3600 * SECOND), micros / (60 * SECOND) % 60, micros / SECOND % 60);
    match (hours, minutes, seconds) {
        (0, 0, 0) => format!("{} ms", micros / 1000),
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

/// An argument that must not be null.
pub fn given<T>(argument: &str, value: Option<T>) -> T {
    match value {
        Some(value) => value,
        None => errors::missing(argument, &format!("Pass a value: {argument} => …")),
    }
}

/// A name of a queue, budget, worker, agent, consumer or tag: not null, not empty, not too long, without control characters.
pub fn name<'a>(argument: &str, value: Option<&'a str>) -> &'a str {
    let name = given(argument, value);
    check_text(argument, name, guc::max_name());
    name
}

/// An optional text of the same kind as a name, four times as long: a key, a run id, a trace id.
pub fn reference<'a>(argument: &str, value: Option<&'a str>) -> Option<&'a str> {
    if let Some(text) = value {
        check_text(argument, text, guc::max_name() * 4);
    }
    value
}

/// An optional name.
pub fn optional_name<'a>(argument: &str, value: Option<&'a str>) -> Option<&'a str> {
    value.map(|text| name(argument, Some(text)))
}

fn check_text(argument: &str, text: &str, longest: usize) {
    if text.trim().is_empty() {
        errors::invalid(format!("argument \"{argument}\" is empty"), "Give it at least one character that is not a space.");
    }
    if text.len() > longest {
        errors::over_limit(format!("argument \"{argument}\" has {} bytes, the limit is {longest}", text.len()), "stint.max_name_length");
    }
    if let Some(control) = text.chars().find(|c| c.is_control()) {
        errors::invalid(format!("argument \"{argument}\" contains the control character {control:?}"), "Use printable characters.");
    }
}

/// Free text (an error message, a reason, a comment), limited as payloads are.
pub fn text<'a>(argument: &str, value: Option<&'a str>) -> Option<&'a str> {
    if let Some(text) = value {
        check_size(argument, text.len());
    }
    value
}

/// A jsonb argument within the payload limit; nothing looks inside.
pub fn json(argument: &str, value: Option<RawJsonb>) -> Option<RawJsonb> {
    if let Some(json) = value {
        check_size(argument, json.size());
    }
    value
}

fn check_size(argument: &str, bytes: usize) {
    let limit = guc::max_payload();
    if bytes > limit {
        errors::over_limit(format!("argument \"{argument}\" has {bytes} bytes, the limit is {limit}"), "stint.max_payload");
    }
}

/// A count that must be at least `least`.
pub fn at_least<T: PartialOrd + std::fmt::Display>(argument: &str, value: T, least: T) -> T {
    if value < least {
        errors::invalid(format!("argument \"{argument}\" is {value}, the least is {least}"), format!("Pass {least} or more."));
    }
    value
}

/// A number of items one call may take: from 1 to `stint.max_batch`.
pub fn batch(argument: &str, value: Option<i32>) -> usize {
    let max = at_least(argument, given(argument, value), 1);
    batch_size(argument, usize::try_from(max).unwrap_or(0))
}

/// A number of items one call brings.
pub fn batch_size(argument: &str, items: usize) -> usize {
    let limit = usize::try_from(guc::max_batch()).unwrap_or(0);
    if items > limit {
        errors::over_limit(format!("argument \"{argument}\" asks for {items} items, the limit is {limit}"), "stint.max_batch");
    }
    items
}

/// A duration from `least` microseconds to `longest_s` seconds, in microseconds.
pub fn duration(argument: &str, value: RawInterval, least: i64, longest_s: i64, setting: &str) -> i64 {
    let micros = value.micros();
    if micros < least {
        let (given, needed) = (micros as f64 / 1e6, least as f64 / 1e6);
        errors::invalid(format!("argument \"{argument}\" is {given} s, the least is {needed} s"), "Pass a longer duration, such as '5 minutes'.");
    }
    if micros > longest_s.saturating_mul(SECOND) {
        let longest = duration_text(longest_s.saturating_mul(SECOND));
        errors::over_limit(format!("argument \"{argument}\" is {}, the longest is {longest}", duration_text(micros)), setting);
    }
    micros
}

/// The shortest lease, in microseconds: below it every answer would come late.
const SHORTEST_LEASE: i64 = 100_000;

/// A lease, in microseconds.
pub fn lease(argument: &str, value: RawInterval) -> i64 {
    duration(argument, value, SHORTEST_LEASE, guc::max_lease_s(), "stint.max_lease")
}

/// A delay, in microseconds.
pub fn delay(argument: &str, value: RawInterval) -> i64 {
    duration(argument, value, 0, guc::max_delay_s(), "stint.max_delay")
}

/// Names in an array: no nulls, each a good name, sorted and without repeats.
pub fn names(argument: &str, value: Option<Vec<Option<String>>>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for entry in value.unwrap_or_default() {
        match entry {
            Some(text) => names.push(name(argument, Some(&text)).to_string()),
            None => errors::missing(argument, &format!("The array \"{argument}\" contains a null; leave it out.")),
        }
    }
    names.sort();
    names.dedup();
    names
}

/// A finite number within bounds; NaN and infinities are refused.
pub fn number(argument: &str, value: f64, least: f64, most: f64) -> f64 {
    if !(least..=most).contains(&value) {
        errors::invalid(format!("argument \"{argument}\" is {value}, it must be from {least} to {most}"), "Pass a number within the bounds.");
    }
    value
}

/// The most tokens one number may state: far above any model, far below overflow of their sums.
const MOST_TOKENS: i64 = 1_000_000_000_000_000;

/// Tokens: none, or from 0 to 10^15.
pub fn tokens(argument: &str, value: Option<i64>) -> Option<i64> {
    if let Some(tokens) = value {
        at_least(argument, tokens, 0);
        if tokens > MOST_TOKENS {
            errors::invalid(format!("argument \"{argument}\" is {tokens}, the most is {MOST_TOKENS}"), "Check the unit: it counts tokens.");
        }
    }
    value
}

/// Whether a `numeric` is a finite number of at least zero: money.
pub fn money(argument: &str, value: Option<crate::values::RawNumeric>) -> Option<crate::values::RawNumeric> {
    if let Some(amount) = value {
        let text = amount.text();
        if text.starts_with('-') || text == "NaN" || text == "Infinity" {
            errors::invalid(format!("argument \"{argument}\" is {text}"), "A cost is zero or more and finite.");
        }
    }
    value
}

/// The longest an attempt may run, in microseconds: at least as long as the shortest lease.
pub fn run_time(argument: &str, value: RawInterval) -> i64 {
    duration(argument, value, SHORTEST_LEASE, guc::max_delay_s(), "stint.max_delay")
}
