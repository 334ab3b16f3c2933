//! Batches that one statement cannot take: rows of several kinds, or keys that come again where the order of their rows matters more than a fold can keep. They go
//! in rounds, each a statement over many keys, that do to every key what its rows do one by one.

use super::merge::{Counts, apply, count_keys, kind_named};
use super::plans::{Plans, Steps};
use crate::errors;
use crate::relation::Relation;
use crate::spi::{Rows, Session, Statement, arg};
use crate::values::RawJsonb;
use pgrx::prelude::*;
use stint_core::state::compile::Kind;

static KINDS_OF_ROWS: Statement = Statement::new(
    c"SELECT array_agg(e.row ->> $2 ORDER BY e.ord) FROM jsonb_array_elements($1) WITH ORDINALITY e (row, ord)",
    &[pg_sys::JSONBOID, pg_sys::TEXTOID],
);

/// The kind of each row as its field `name` says; `otherwise` where it says nothing.
pub fn kinds_of_rows(session: &Session, relation: &Relation, rows: RawJsonb, name: &str, otherwise: Kind) -> Vec<Kind> {
    let told: Vec<Option<String>> = session.run(&KINDS_OF_ROWS, &[arg(rows), arg(name)]).get(0, 1).unwrap_or_default();
    let read = |(n, word): (usize, Option<String>)| match word.as_deref() {
        None => otherwise,
        Some("+I" | "+U") => Kind::Upsert,
        Some("-U") => Kind::Retract,
        Some("-D") => Kind::Delete,
        Some(other) => errors::invalid(
            format!("row {} for {} has the kind \"{other}\" in field \"{name}\"", n + 1, relation.qualified),
            "The kinds are +I, +U, -U and -D.",
        ),
    };
    told.into_iter().enumerate().map(read).collect()
}

/// One round: its number, the kind of its rows, the rows and how many they are.
pub struct Round {
    /// From 1.
    pub number: i64,
    /// Of its rows.
    pub kind: Kind,
    /// As a batch.
    pub rows: RawJsonb,
    /// Of the batch.
    pub length: i32,
}

/// Cuts a batch of `length` rows into rounds; `kinds` names the kind of each row, or the one of all. Keys do not touch each other, so within a round the rows may
/// go in any order.
pub fn cut(session: &Session, plans: &Plans, rows: RawJsonb, kinds: &[Kind], length: i32) -> Vec<Round> {
    let [first, others @ ..] = kinds else { return Vec::new() };
    if others.iter().any(|kind| kind != first) {
        return runs(session, plans, rows, kinds);
    }
    match plans.steps(*first) {
        Steps::Remove { folds: false, .. } if count_keys(session, plans, &[arg(rows)], length) < i64::from(length) => {
            occurrences(session, plans, *first, rows)
        }
        _ => vec![Round { number: 1, kind: *first, rows, length }],
    }
}

fn rounds(cut: &Rows, kind: impl Fn(usize) -> Kind) -> Vec<Round> {
    let round = |n: usize| Round { number: cut.must(n, 1), kind: kind(n), rows: cut.must(n, 3), length: cut.must(n, 4) };
    (0..cut.len()).map(round).collect()
}

/// A batch of several kinds: round i holds the i-th run of rows of one kind of each key.
fn runs(session: &Session, plans: &Plans, rows: RawJsonb, kinds: &[Kind]) -> Vec<Round> {
    let words: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
    let cut = session.run_prepared(plans.runs.plan(), &[arg(rows), arg(words)]);
    rounds(&cut, |n| kind_named(cut.get::<String>(n, 2).as_deref()))
}

/// A batch of one kind in which keys come again: round i holds the i-th row of each key, so the first has every key and takes them in order.
pub fn occurrences(session: &Session, plans: &Plans, kind: Kind, rows: RawJsonb) -> Vec<Round> {
    let cut = session.run_prepared(plans.occurrences.plan(), &[arg(rows)]);
    rounds(&cut, |_| kind)
}

/// Does one round after the other.
pub fn go(session: &Session, plans: &Plans, rounds: &[Round]) -> Counts {
    let mut counts = Counts::default();
    for round in rounds {
        counts += apply(session, plans, round.kind, round.rows, round.length);
    }
    counts
}
