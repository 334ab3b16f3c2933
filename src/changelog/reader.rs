//! Reading ticked changes with their positions, for `changes` and for consumers.

use super::capture;
use super::shape::{Column, Shape};
use crate::spi::{Identity, Prepared, Session, Statement, arg, connect};
use crate::values::{Instant, RawJsonb};
use crate::{errors, guc};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
pub use stint_core::sql::literal as quote;

static LAST: Statement = Statement::new(c"SELECT coalesce(max(t.end_pos), 0) FROM stint.ticks t", &[]);

/// Ticks after a position that hold changes of some tables, each with the one before it.
static TICKS: Statement = Statement::new(
    c"SELECT t.epoch, coalesce(p.snapshot, '1:1:')::text, t.snapshot::text, t.end_pos,
             coalesce((SELECT max(e.end_pos) FROM stint.ticks e WHERE e.end_pos < t.end_pos), 0)
      FROM (SELECT s.* FROM stint.ticks s WHERE s.end_pos > $1 AND s.relations && $2::regclass[] ORDER BY s.end_pos LIMIT 64) t
      LEFT JOIN stint.ticks p ON p.epoch = t.epoch AND p.number = t.number - 1
      ORDER BY t.end_pos",
    &[pg_sys::INT8OID, pg_sys::OIDARRAYOID],
);

/// The changes of one tick (epoch $1, from snapshot $2 to $3, positions after $4) that lie after position $5 and belong to the tables $6.
static CHANGES: Statement = Statement::new(
    c"SELECT c.pos, c.relation::oid, c.kind::text, c.key, c.before, c.after, c.at
      FROM (SELECT $4 + row_number() OVER (ORDER BY x.seq) AS pos, x.*
            FROM (SELECT l.* FROM stint.change_log l
                  WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2::pg_snapshot) AND l.xid < pg_snapshot_xmax($3::pg_snapshot)
                  UNION ALL
                  SELECT r.*
                  FROM pg_snapshot_xip($2::pg_snapshot) i, LATERAL (SELECT l.* FROM stint.change_log l WHERE l.epoch = $1 AND l.xid = i OFFSET 0) r) x
            WHERE pg_visible_in_snapshot(x.xid, $3::pg_snapshot)) c
      WHERE c.pos > $5 AND c.relation = ANY ($6::regclass[])
      ORDER BY c.pos
      LIMIT $7",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::OIDARRAYOID, pg_sys::INT8OID],
);

/// One row as users see it.
pub struct Change {
    /// Its position.
    pub pos: i64,
    /// The table.
    pub relation: pg_sys::Oid,
    /// `+I`, `-U`, `+U` or `-D`.
    pub kind: &'static str,
    /// The primary key.
    pub key: Option<RawJsonb>,
    /// The row before.
    pub before: Option<RawJsonb>,
    /// The row after.
    pub after: Option<RawJsonb>,
    /// When the statement ended.
    pub at: Instant,
}

/// The last position there is.
pub fn last(session: &Session) -> i64 {
    session.run(&LAST, &[]).must(0, 1)
}

/// At most `max` changes of `relations` after position `since`, in order; an update makes two rows. Runs with the rights of the extension's owner.
pub fn after(session: &Session, relations: &[pg_sys::Oid], since: i64, max: i32) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut left = i64::from(max);
    let mut reached = since;
    let mut documents = HashMap::new();
    while left > 0 {
        let ticks = session.run(&TICKS, &[arg(reached), arg(relations.to_vec())]);
        if ticks.is_empty() {
            break;
        }
        for tick in 0..ticks.len() {
            let rows = session.run(
                &CHANGES,
                &[
                    arg(ticks.must::<i32>(tick, 1)),
                    ticks.lift(tick, 2),
                    ticks.lift(tick, 3),
                    arg(ticks.must::<i64>(tick, 5)),
                    arg(since),
                    arg(relations.to_vec()),
                    arg(left),
                ],
            );
            for row in 0..rows.len() {
                let relation: pg_sys::Oid = rows.must(row, 2);
                let document = documents.entry(relation.to_u32()).or_insert_with(|| document(session, relation));
                let made = session.run_prepared(document, &[rows.lift(row, 4), rows.lift(row, 5), rows.lift(row, 6)]);
                let [key, before, after] = [1, 2, 3].map(|column| made.lift(0, column).map(RawJsonb));
                let change = |kind, before, after| Change { pos: rows.must(row, 1), relation, kind, key, before, after, at: rows.must(row, 7) };
                match rows.must::<String>(row, 3).as_str() {
                    "I" => changes.push(change("+I", None, after)),
                    "D" => changes.push(change("-D", before, None)),
                    _ => changes.extend([change("-U", before, None), change("+U", before, after)]),
                }
            }
            left -= i64::try_from(rows.len()).unwrap_or(i64::MAX);
            reached = ticks.must(tick, 4);
            if left <= 0 {
                break;
            }
        }
    }
    changes
}

thread_local! {
    static DOCUMENTS: RefCell<HashMap<u32, (String, Rc<Prepared>)>> = RefCell::new(HashMap::new());
}

/// The statement that makes jsonb of a table's key ($1), before image ($2) and after image ($3).
pub fn document(session: &Session, relation: pg_sys::Oid) -> Rc<Prepared> {
    let shape = Shape::load(session, relation);
    let key = object(shape.key_columns().enumerate().map(|(place, column)| (column, format!("($1::text[])[{}]", place + 1))));
    let image = |param: &str| object(shape.columns.iter().map(|column| (column, format!("({param})[{}]", column.attnum))));
    let sql = format!("SELECT {key}, CASE WHEN $2 IS NOT NULL THEN {} END, CASE WHEN $3 IS NOT NULL THEN {} END", image("$2"), image("$3"));
    DOCUMENTS.with_borrow_mut(|all| {
        if let Some((text, statement)) = all.get(&relation.to_u32())
            && *text == sql
        {
            return Rc::clone(statement);
        }
        let statement = Rc::new(Prepared::new(&sql, &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::TEXTARRAYOID]));
        all.insert(relation.to_u32(), (sql, Rc::clone(&statement)));
        statement
    })
}

fn object<'a>(members: impl Iterator<Item = (&'a Column, String)>) -> String {
    // A function takes at most 100 arguments, two of which make a member.
    const CHUNK: usize = 45;
    let members: Vec<String> = members.map(|(column, text)| format!("{}, {}", quote(&column.name), value(column.type_oid, &text))).collect();
    match members.len() {
        0 => "'{}'::jsonb".to_string(),
        _ => members.chunks(CHUNK).map(|chunk| format!("jsonb_build_object({})", chunk.join(", "))).collect::<Vec<_>>().join(" || "),
    }
}

/// SQL that makes jsonb of an image's text. Only PostgreSQL's own types are cast to: a user's type could bring code along.
fn value(type_oid: pg_sys::Oid, text: &str) -> String {
    // SAFETY: system cache look-ups.
    let (base, element) = unsafe {
        let base = pg_sys::getBaseType(type_oid);
        (base, pg_sys::get_element_type(base))
    };
    if element != pg_sys::InvalidOid {
        // SAFETY: as above.
        return match unsafe { pg_sys::getBaseType(element) } {
            pg_sys::BOXOID => text.to_string(), // its arrays are separated by semicolons
            pg_sys::BOOLOID => format!("to_jsonb({text}::bool[])"),
            pg_sys::JSONOID | pg_sys::JSONBOID => format!("to_jsonb({text}::jsonb[])"),
            number if is_number(number) => format!("to_jsonb({text}::numeric[])"),
            _ => format!("to_jsonb({text}::text[])"),
        };
    }
    match base {
        pg_sys::BOOLOID => format!("{text}::bool"),
        pg_sys::JSONOID | pg_sys::JSONBOID => format!("{text}::jsonb"),
        // jsonb has no infinite numbers and no NaN; to_jsonb makes strings of them.
        number if is_number(number) => format!("to_jsonb({text}::numeric)"),
        _ => text.to_string(),
    }
}

fn is_number(type_oid: pg_sys::Oid) -> bool {
    matches!(
        type_oid,
        pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID | pg_sys::NUMERICOID | pg_sys::FLOAT4OID | pg_sys::FLOAT8OID | pg_sys::OIDOID
    )
}

/// The number of changes to return, checked.
pub fn checked_max(max: Option<i32>) -> i32 {
    let hint = "Give the most changes to return, 1 or more.";
    let max = max.unwrap_or_else(|| errors::missing("max", hint));
    if max < 1 {
        errors::invalid(format!("argument \"max\" is {max}"), hint)
    }
    if max > guc::max_batch() {
        errors::over_limit(format!("argument \"max\" is {max}, more than {}", guc::max_batch()), "stint.max_batch")
    }
    max
}

/// A position that was given, checked against the last there is.
pub fn checked_pos(session: &Session, argument: &str, pos: Option<i64>) -> i64 {
    let hint = "Give a position that stint.changes, stint.poll or stint.tick returned.";
    let pos = pos.unwrap_or_else(|| errors::missing(argument, hint));
    if pos < 0 {
        errors::invalid(format!("argument \"{argument}\" is {pos}: positions are not negative"), hint)
    }
    let last = last(session);
    if pos > last {
        errors::invalid(format!("argument \"{argument}\" is {pos}, beyond the last position {last}"), hint)
    }
    pos
}

/// `stint.changes`.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn changes(
    relation: Option<pg_sys::Oid>,
    since_pos: Option<i64>,
    max: Option<i32>,
) -> TableIterator<
    'static,
    (
        name!(pos, i64),
        name!(kind, &'static str),
        name!(key, Option<RawJsonb>),
        name!(before, Option<RawJsonb>),
        name!(after, Option<RawJsonb>),
        name!(changed_at, Instant),
    ),
> {
    crate::shmem::required();
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.orders'."));
    let max = checked_max(max);
    let found = connect(|session| {
        let identity = Identity::owner();
        capture::required(session, identity.caller(), relation);
        let since = checked_pos(session, "since_pos", since_pos);
        after(session, &[relation], since, max)
    });
    TableIterator::new(found.into_iter().map(|c| (c.pos, c.kind, c.key, c.before, c.after, c.at)))
}
