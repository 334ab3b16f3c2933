//! `stint.diff`: the rows of a state table that differ between two points.
//!
//! The keys that changed after the earlier point are looked up at both; what reads the same at both is left out.

use super::layout::{Image, Layouts};
use super::point::{self, Name};
use super::probe::{Change, Probe};
use crate::changelog::images::{image_sql, key_sql};
use crate::changelog::shape::Shape;
use crate::changelog::{capture, documents};
use crate::errors;
use crate::spi::{Identity, Prepared, Session, Statement, arg, connect};
use crate::values::RawJsonb;
use pgrx::prelude::*;
use stint_core::snapshot::Point;

/// Keys with a change that may lie after a point: of epoch $2 from transaction $3 on, or of a later epoch.
static KEYS: Statement = Statement::new(
    c"SELECT l.key FROM stint.change_log l WHERE l.relation = $1 AND l.epoch = $2 AND l.xid >= $3::xid8 AND l.xid < '9223372036854775807'
      UNION
      SELECT l.key FROM stint.change_log l WHERE l.relation = $1 AND l.epoch > $2
      UNION
      SELECT k.key FROM stint.kept_images k WHERE k.relation = $1
      ORDER BY 1",
    &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TEXTOID],
);

/// What the changelog says the row of a key is now.
static LAST: Statement = Statement::new(
    c"SELECT l.after, l.layout, l.epoch, l.seq FROM stint.change_log l
      WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended($2 COLLATE \"C\", 0) AND l.key = $2
      ORDER BY l.epoch DESC, l.seq DESC LIMIT 1",
    &[pg_sys::OIDOID, pg_sys::TEXTOID],
);

/// `stint.diff`.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn diff(
    relation: Option<pg_sys::Oid>,
    since_tag: Option<String>,
    until_tag: Option<String>,
    since_pos: Option<i64>,
    until_pos: Option<i64>,
) -> TableIterator<'static, (name!(kind, &'static str), name!(key, Option<RawJsonb>), name!(before, Option<RawJsonb>), name!(after, Option<RawJsonb>))>
{
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.orders'."));
    let since = match (since_tag, since_pos) {
        (Some(tag), None) => Name::Tag(tag),
        (None, Some(pos)) => Name::Pos(pos),
        (Some(_), Some(_)) => {
            errors::invalid("only one of the arguments \"since_tag\" and \"since_pos\" may be given", "Name the earlier point by one of them.")
        }
        (None, None) => {
            errors::invalid("one of the arguments \"since_tag\" and \"since_pos\" must be given", "Name the earlier point by one of them.")
        }
    };
    let until = match (until_tag, until_pos) {
        (None, None) => None,
        (Some(tag), None) => Some(Name::Tag(tag)),
        (None, Some(pos)) => Some(Name::Pos(pos)),
        _ => {
            errors::invalid("both arguments \"until_tag\" and \"until_pos\" are given", "Name the later point by one of them, or by neither for now.")
        }
    };
    let rows = connect(|session| {
        let identity = Identity::owner();
        let table = capture::required(session, identity.caller(), relation);
        let since = point::resolve(session, relation, &table, &since);
        let until = until.map(|name| point::resolve(session, relation, &table, &name));
        if until.as_ref().is_some_and(|until| until.is_before(&since)) {
            errors::invalid("the later of the two points is the earlier one", "Give the earlier point as since_tag or since_pos.")
        }
        rows(session, relation, &table, since, until)
    });
    TableIterator::new(rows)
}

type Row = (&'static str, Option<RawJsonb>, Option<RawJsonb>, Option<RawJsonb>);

fn rows(session: &Session, relation: pg_sys::Oid, table: &str, since: Point, until: Option<Point>) -> Vec<Row> {
    let document = documents::statement(session, relation);
    let keys = session.read(&KEYS, &[arg(relation), arg(since.epoch), arg(since.oldest_unseen().to_string())]);
    let keys: Vec<String> = (0..keys.len()).map(|row| keys.must(row, 1)).collect();
    let mut live = Live::new(session, relation, table);
    let mut then = Probe::new(session, relation, since);
    let mut later = until.map(|until| Probe::new(session, relation, until));
    let mut found = Vec::new();
    for key in keys {
        // A key without a change after the earlier point is the same at both.
        let Some(Change { number, before }) = then.first_change(session, &key) else { continue };
        let after = match later.as_mut() {
            None => live.image(session, &key),
            Some(later) => match later.first_change(session, &key) {
                // So is one that first changed after both.
                Some(change) if change.number == number => continue,
                Some(change) => change.before,
                None => live.image(session, &key).map(|image| later.without_absent(image)),
            },
        };
        if before == after {
            continue;
        }
        let made = session.run_prepared(&document, &[arg(key), before.clone().and_then(arg), after.clone().and_then(arg)]);
        let [key, was, is] = [1, 2, 3].map(|column| made.lift(0, column).map(RawJsonb));
        match (before, after) {
            (None, _) => found.push(("+I", key, None, is)),
            (_, None) => found.push(("-D", key, was, None)),
            _ => found.extend([("-U", key, was, None), ("+U", key, was, is)]),
        }
    }
    found
}

/// The rows as they are now.
struct Live {
    relation: pg_sys::Oid,
    layouts: Layouts,
    statement: Prepared,
}

impl Live {
    fn new(session: &Session, relation: pg_sys::Oid, table: &str) -> Self {
        let shape = Shape::load(session, relation);
        let key = key_sql(shape.key_columns().map(|column| column.quoted.as_str()), "l");
        let places: Vec<String> = (1..=shape.places().len())
            .map(|place| match shape.key_columns().position(|column| usize::try_from(column.attnum) == Ok(place)) {
                Some(part) => format!("($1::text[])[{}]", part + 1),
                None => "NULL".to_string(),
            })
            .collect();
        let same: Vec<String> = shape.key_columns().map(|column| format!("l.{0} = r.{0}", column.quoted)).collect();
        // The key's text reads back as typed values by which the row is found; equal values may differ in text.
        let sql = format!(
            "SELECT {} FROM stint.image_row(NULL::{table}, ARRAY[{}]::text[]) r JOIN {table} l ON {} WHERE {key} = $1",
            image_sql(&shape, "l"),
            places.join(", "),
            same.join(" AND "),
        );
        Live { relation, layouts: Layouts::new(session, relation), statement: Prepared::new(&sql, &[pg_sys::TEXTOID]) }
    }

    fn image(&mut self, session: &Session, key: &str) -> Option<Image> {
        let last = session.read(&LAST, &[arg(self.relation), arg(key)]);
        // PostgreSQL filled columns that came after the change with their defaults.
        if !last.is_empty() && !self.layouts.came_after(last.must(0, 3), last.must(0, 4)) {
            return last.get(0, 1).map(|image| self.layouts.today(session, image, last.must(0, 2), last.must(0, 3)));
        }
        // The changes that made the row may be gone, and only what was kept for tags tells that there were some. Comparing keys and writing values as text runs no
        // code of users.
        let found = session.read_prepared(&self.statement, &[arg(key)]);
        if found.is_empty() { None } else { found.get(0, 1) }
    }
}
