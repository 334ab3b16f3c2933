//! Batches that one statement cannot take: rows of several kinds, or keys that come again where the order of their rows matters more than a fold can keep. They go
//! in rounds, each a statement over many keys, that do to every key what its rows do one by one.

use super::merge::{Counts, apply, kind_named, lock_for_inserts, lock_for_removal, order_removals};
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
struct Round {
    number: i64,
    kind: Kind,
    rows: RawJsonb,
    length: i32,
}

fn rounds(cut: &Rows, kind: impl Fn(usize) -> Kind) -> Vec<Round> {
    let round = |n: usize| Round { number: cut.must(n, 1), kind: kind(n), rows: cut.must(n, 3), length: cut.must(n, 4) };
    (0..cut.len()).map(round).collect()
}

/// A batch of several kinds: round i holds the i-th run of rows of one kind of each key. Keys do not touch each other, so within a round the kinds may go in any
/// order.
pub fn runs(session: &Session, plans: &Plans, rows: RawJsonb, kinds: &[Kind]) -> Counts {
    let words: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
    let cut = session.run_prepared(plans.runs.plan(), &[arg(rows), arg(words)]);
    go(session, plans, rows, &rounds(&cut, |n| kind_named(cut.get::<String>(n, 2).as_deref())))
}

/// A batch of one kind in which keys come again: round i holds the i-th row of each key.
pub fn occurrences(session: &Session, plans: &Plans, kind: Kind, rows: RawJsonb) -> Counts {
    let cut = session.run_prepared(plans.occurrences.plan(), &[arg(rows)]);
    go(session, plans, rows, &rounds(&cut, |_| kind))
}

/// Runs the rounds. The first round of a batch of one kind has every key and takes them in order; otherwise what all rounds will need is locked beforehand in
/// that order, since a round that comes later could not go back.
fn go(session: &Session, plans: &Plans, rows: RawJsonb, rounds: &[Round]) -> Counts {
    if rounds.iter().any(|round| round.kind != Kind::Upsert) {
        lock_for_all(session, plans, rows, rounds);
    }
    let mut counts = Counts::default();
    for round in rounds {
        counts += apply(session, plans, round.kind, round.rows, round.length);
    }
    counts
}

fn lock_for_all(session: &Session, plans: &Plans, rows: RawJsonb, rounds: &[Round]) {
    let batch = [arg(rows)];
    let absent = rounds.iter().find_map(|round| match plans.steps(round.kind) {
        Steps::Remove { absent, .. } => absent.as_ref(),
        _ => None,
    });
    if absent.is_some() {
        order_removals(plans);
    }
    // A key that one round deletes is absent in the next, when it is too late to wait for the table.
    let deletes_again = absent.is_some() && rounds.iter().any(|round| round.number > 1);
    let inserts = |round: &Round| matches!(plans.steps(round.kind), Steps::Upsert { .. } | Steps::Remove { owe: Some(_), .. });
    if deletes_again {
        session.execute_once(&plans.lock_table);
    } else if rounds.iter().any(inserts) {
        lock_for_inserts(session, plans, &batch);
    }
    lock_for_removal(session, plans, absent, &batch);
}
