//! `stint.export_changes`: net changes with exact text, for COPY. They are read a page at a time, as PostgreSQL asks for more.

use super::page::{Form, column};
use super::{capture, reader};
use crate::errors;
use crate::spi::{Identity, Rows, connect};
use crate::values::Instant;
use pgrx::prelude::*;
use std::collections::VecDeque;

/// One row: a change, or one of the two of an update. It outlives the page's memory, so everything in it is a copy.
struct Exported {
    pos: i64,
    kind: &'static str,
    key: Vec<Option<String>>,
    columns: Vec<String>,
    image: Vec<Option<String>>,
    at: Instant,
    cause: Option<i64>,
}

/// The rows of a table between two positions.
struct Export {
    relation: pg_sys::Oid,
    since: i64,
    until: i64,
    page: VecDeque<Exported>,
}

impl Export {
    /// Reads the next page.
    fn read(&mut self) {
        const CHANGES: i32 = 1000;
        let (relation, until, page) = (self.relation, self.until, &mut self.page);
        self.since = connect(|session| {
            let _owner = Identity::owner();
            let reached = reader::walk(session, &[relation], self.since, CHANGES, None, Form::Text, |rows, row| {
                if rows.must::<i64>(row, column::POS) <= until {
                    show(rows, row, page);
                }
            });
            reader::refuse_below_floor(session, &[relation], self.since, None);
            reached
        });
    }
}

impl Iterator for Export {
    type Item = Exported;

    fn next(&mut self) -> Option<Exported> {
        while self.page.is_empty() && self.since < self.until {
            self.read();
        }
        self.page.pop_front()
    }
}

/// Adds a net change as its one or two rows.
fn show(rows: &Rows, row: usize, page: &mut VecDeque<Exported>) {
    let mut add = |kind, image: usize, names: usize| {
        let image: Vec<Option<String>> = rows.get(row, image).unwrap_or_default();
        let names: Vec<Option<String>> = rows.get(row, names).unwrap_or_default();
        // A place without a name was a dropped column's.
        let places = names.into_iter().enumerate().filter_map(|(place, name)| Some((name?, image.get(place).cloned().flatten())));
        let (columns, image) = places.unzip();
        page.push_back(Exported {
            pos: rows.must(row, column::POS),
            kind,
            key: rows.must(row, column::KEY),
            columns,
            image,
            at: rows.must(row, column::AT),
            cause: rows.get(row, column::CAUSE),
        });
    };
    match rows.must::<String>(row, column::KIND).as_str() {
        "I" => add("+I", column::AFTER, column::AFTER_NAMES),
        "D" => add("-D", column::BEFORE, column::BEFORE_NAMES),
        _ => {
            add("-U", column::BEFORE, column::BEFORE_NAMES);
            add("+U", column::AFTER, column::AFTER_NAMES);
        }
    }
}

/// See the SQL COMMENT of stint.export_changes.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn export_changes(
    relation: Option<pg_sys::Oid>,
    since_pos: Option<i64>,
    until_pos: Option<i64>,
) -> TableIterator<
    'static,
    (
        name!(pos, i64),
        name!(kind, &'static str),
        name!(key, Vec<Option<String>>),
        name!(columns, Vec<String>),
        name!(image, Vec<Option<String>>),
        name!(changed_at, Instant),
        name!(cause, Option<i64>),
    ),
> {
    crate::shmem::required();
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.orders'."));
    let (since, until) = connect(|session| {
        let identity = Identity::owner();
        capture::required(session, identity.caller(), relation);
        let since = reader::checked_pos(session, "since_pos", since_pos);
        let until = until_pos.map_or_else(|| reader::last(session), |pos| reader::checked_pos(session, "until_pos", Some(pos)));
        if until < since {
            errors::invalid(
                format!("argument \"until_pos\" is {until}, before since_pos, which is {since}"),
                "Give the later of the two as until_pos.",
            )
        }
        (since, until)
    });
    let export = Export { relation, since, until, page: VecDeque::new() };
    TableIterator::new(export.map(|e| (e.pos, e.kind, e.key, e.columns, e.image, e.at, e.cause)))
}
