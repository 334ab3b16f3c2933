//! `stint.histogram` and `stint.quantile`: `stint_core::histogram` for SQL.

use crate::errors;
use crate::input;
use pgrx::prelude::*;
use stint_core::histogram::{Histogram, Scale};

fn scale(name: Option<&str>) -> Scale {
    let name = input::given("scale", name);
    Scale::parse(name).unwrap_or_else(|| errors::invalid(format!("argument \"scale\" is \"{name}\""), "Pass 'duration' or 'share'."))
}

/// Adds what stored bytes count.
pub fn merge(histogram: &mut Histogram, argument: &str, bytes: &[u8]) {
    if !histogram.merge(bytes) {
        errors::invalid(format!("argument \"{argument}\" holds bytes that are no histogram"), "Pass what stint.histogram returned.")
    }
}

/// See the SQL COMMENT of stint.histogram.
#[pg_extern(sql = false)]
fn histogram(scale: Option<&str>, parts: Option<Array<'_, &[u8]>>, measures: Option<Array<'_, f64>>) -> Option<Vec<u8>> {
    let scale = self::scale(scale);
    let mut sum = Histogram::default();
    for part in parts.iter().flat_map(|parts| parts.iter()).flatten() {
        merge(&mut sum, "parts", part);
    }
    measures.iter().flat_map(|measures| measures.iter()).flatten().for_each(|measure| sum.add(scale, measure));
    (!sum.is_empty()).then(|| sum.encode())
}

/// See the SQL COMMENT of stint.quantile.
#[pg_extern(sql = false)]
fn quantile(scale: Option<&str>, histogram: Option<&[u8]>, share: Option<f64>) -> Option<f64> {
    let scale = self::scale(scale);
    let share = input::number("share", input::given("share", share), 0.0, 1.0);
    let mut all = Histogram::default();
    merge(&mut all, "histogram", histogram?);
    all.quantile(scale, share)
}
