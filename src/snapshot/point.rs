//! Where a tag, a position or an instant lies, seen from one table: what as-of reads and differences compare changes with.

use super::tag;
use crate::errors::{self, Fault};
use crate::spi::{Rows, Session, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;
use stint_core::snapshot::{Point, Snapshot};

/// A point as a user names it.
#[derive(Clone, Debug, PartialEq)]
pub enum Name {
    /// A tag.
    Tag(String),
    /// A position of the changelog.
    Pos(i64),
    /// The last tick at or before an instant.
    At(i64),
}

static TAG: Statement = Statement::new(
    c"SELECT p.epoch, p.snapshot::text, NULL::text, 0::bigint, p.high FROM stint.tag_list t JOIN stint.pins p USING (pin) WHERE t.tag = $1",
    &[pg_sys::TEXTOID],
);

/// A position lies in the first tick that ends at or after it.
static POS: Statement = Statement::new(
    c"SELECT t.epoch, t.snapshot::text,
             CASE WHEN t.end_pos > $1 THEN coalesce(p.snapshot, '1:1:')::text END,
             CASE WHEN t.end_pos > $1 THEN
                 (SELECT x.seq
                  FROM (SELECT l.seq, row_number() OVER (ORDER BY l.seq) AS ordinal FROM stint.change_log l
                        WHERE l.epoch = t.epoch
                          AND (l.xid >= pg_snapshot_xmax(coalesce(p.snapshot, '1:1:')) AND l.xid < pg_snapshot_xmax(t.snapshot)
                               OR l.xid IN (SELECT pg_snapshot_xip(p.snapshot)))
                          AND pg_visible_in_snapshot(l.xid, t.snapshot)) x
                  WHERE x.ordinal = $1 - coalesce((SELECT max(e.end_pos) FROM stint.ticks e WHERE e.end_pos < t.end_pos), 0)) END,
             t.high
      FROM (SELECT * FROM stint.ticks s WHERE s.end_pos >= $1 ORDER BY s.end_pos LIMIT 1) t
      LEFT JOIN stint.ticks p ON p.epoch = t.epoch AND p.number = t.number - 1",
    &[pg_sys::INT8OID],
);
static AT: Statement = Statement::new(
    c"SELECT t.epoch, t.snapshot::text, NULL::text, 0::bigint, t.high, t.end_pos FROM stint.ticks t WHERE t.at <= $1 ORDER BY t.at DESC, t.end_pos DESC LIMIT 1",
    &[pg_sys::TIMESTAMPTZOID],
);
static LAST: Statement = Statement::new(c"SELECT coalesce(max(t.end_pos), 0) FROM stint.ticks t", &[]);
static FIRST_TICK: Statement =
    Statement::new(c"SELECT coalesce('at ' || (SELECT t.at FROM stint.ticks t ORDER BY t.at LIMIT 1)::text, 'not made yet')", &[]);

/// Since when a table is captured, and from where on its changes are kept.
static CAPTURED: Statement = Statement::new(
    c"SELECT c.epoch, c.xid, c.floor_pos, (SELECT min(t.at)::text FROM stint.ticks t WHERE t.end_pos >= c.floor_pos) FROM stint.captures c WHERE c.relation = $1",
    &[pg_sys::OIDOID],
);

/// The name given by the arguments of `<table>_as_of`; an error unless exactly one is.
pub fn named(tag: Option<String>, pos: Option<i64>, at: Option<Instant>) -> Name {
    match (tag, pos, at) {
        (Some(tag), None, None) => Name::Tag(tag),
        (None, Some(pos), None) => Name::Pos(pos),
        (None, None, Some(at)) => Name::At(at.0),
        (None, None, None) => errors::invalid(
            "one of the arguments \"tag\", \"pos\" and \"at\" must be given",
            "Write tag => 'name', pos => number or at => timestamp.",
        ),
        _ => errors::invalid("only one of the arguments \"tag\", \"pos\" and \"at\" may be given", "Name the point by one of them."),
    }
}

/// Finds a point of a captured table, with the snapshot of the calling query.
pub fn resolve(session: &Session, relation: pg_sys::Oid, table: &str, name: &Name) -> Point {
    let captured = session.read(&CAPTURED, &[arg(relation)]);
    let floor: i64 = captured.must(0, 3);
    let found = match name {
        Name::Tag(tag) => {
            let found = session.read(&TAG, &[arg(tag.as_str())]);
            if found.is_empty() {
                tag::unknown(session, tag)
            }
            found
        }
        Name::Pos(pos) => {
            let last: i64 = session.read(&LAST, &[]).must(0, 1);
            if *pos < 0 || *pos > last {
                errors::invalid(
                    format!("argument \"pos\" is {pos}; positions go from 0 to {last}"),
                    "Give a position that stint.changes, stint.poll or stint.tick returned.",
                )
            }
            if *pos < floor {
                below(&captured, table, &format!("position {pos}"))
            }
            session.read(&POS, &[arg(*pos)])
        }
        Name::At(at) => {
            let found = session.read(&AT, &[arg(Instant(*at))]);
            if found.is_empty() {
                let first: String = session.read(&FIRST_TICK, &[]).must(0, 1);
                errors::invalid(
                    "argument \"at\" lies before the first tick, so nothing is known of that time",
                    format!("Give a later time; the first tick was {first}."),
                )
            }
            if found.must::<i64>(0, 6) < floor {
                below(&captured, table, "that time")
            }
            found
        }
    };
    let declared: i32 = captured.must(0, 1);
    match (!found.is_empty()).then(|| read(&found)) {
        Some(point) if point.epoch > declared || point.epoch == declared && point.seen.sees(xid(&captured, 0, 2)) => point,
        _ => {
            errors::invalid(format!("{table} was not a state table yet at that point"), "Give a tag, a position or a time after stint.create_state.")
        }
    }
}

fn read(found: &Rows) -> Point {
    let snapshot = |text: String| Snapshot::parse(&text).unwrap_or_else(|| errors::internal("a snapshot could not be read"));
    Point {
        epoch: found.must(0, 1),
        seen: snapshot(found.must(0, 2)),
        settled: found.get(0, 3).map(snapshot),
        bound: found.get(0, 4).unwrap_or(0),
        high: found.must(0, 5),
    }
}

/// A column of type xid8.
pub fn xid(rows: &Rows, row: usize, column: usize) -> u64 {
    rows.lift(row, column).map_or(0, |datum| datum.value() as u64)
}

fn below(captured: &Rows, table: &str, what: &str) -> ! {
    let floor: i64 = captured.must(0, 3);
    let since = captured.get::<String>(0, 4).map_or(String::new(), |at| format!(", of {at}"));
    Fault::new(
        PgSqlErrorCode::ERRCODE_SNAPSHOT_TOO_OLD,
        format!("the changes that lead back to {what} of {table} are no longer kept; the earliest that can be read is position {floor}{since}"),
    )
    .hint("A tag made in time keeps what it needs; stint.set_history says for how long changes are kept.")
    .raise()
}
