//! Reading ticked changes with their positions, for `changes` and for consumers.

use super::capture;
pub use super::documents::quote;
use super::page::{Form, Pages, Seen, Tick, column};
use crate::errors::{self, Fault};
use crate::guc;
use crate::spi::{Identity, Rows, Session, Statement, arg, connect};
use crate::values::{Instant, RawJsonb};
use pgrx::prelude::*;

static LAST: Statement = Statement::new(c"SELECT coalesce(max(t.end_pos), 0) FROM stint.ticks t", &[]);

/// Ticks after a position that hold changes of some tables, each with the one before it.
static TICKS: Statement = Statement::new(
    c"SELECT t.epoch, t.number, t.at, coalesce(p.snapshot, '1:1:'), t.snapshot,
             coalesce((SELECT max(e.end_pos) FROM stint.ticks e WHERE e.end_pos < t.end_pos), 0), t.end_pos, t.first_seq, t.last_seq
      FROM (SELECT s.* FROM stint.ticks s WHERE s.end_pos > $1 AND s.relations && $2::regclass[] ORDER BY s.end_pos LIMIT 64) t
      LEFT JOIN stint.ticks p ON p.epoch = t.epoch AND p.number = t.number - 1
      ORDER BY t.end_pos",
    &[pg_sys::INT8OID, pg_sys::OIDARRAYOID],
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
    /// The event of the record it comes from.
    pub cause: Option<i64>,
}

/// The last position there is.
pub fn last(session: &Session) -> i64 {
    session.run(&LAST, &[]).must(0, 1)
}

static FLOOR: Statement = Statement::new(
    c"SELECT p.relation::oid, p.floor_pos FROM stint.captures p WHERE p.relation = ANY ($1::regclass[]) ORDER BY p.floor_pos DESC LIMIT 1",
    &[pg_sys::OIDARRAYOID],
);

/// The position up to which changes of some of the tables may be gone.
pub fn floor(session: &Session, relations: &[pg_sys::Oid]) -> i64 {
    let found = session.run(&FLOOR, &[arg(relations.to_vec())]);
    if found.is_empty() { 0 } else { found.must(0, 2) }
}

/// An error where changes after `since` may be gone: a reader, a consumer if it has a name, gets every change or is told.
pub fn refuse_below_floor(session: &Session, relations: &[pg_sys::Oid], since: i64, consumer: Option<&str>) {
    let found = session.run(&FLOOR, &[arg(relations.to_vec())]);
    if found.is_empty() || found.must::<i64>(0, 2) <= since {
        return;
    }
    let (table, floor): (Option<String>, i64) = (capture::name_of(session, found.must(0, 1)), found.must(0, 2));
    let gone = format!("changes of {} up to position {floor} are not kept any more", table.unwrap_or_default());
    let (message, hint) = match consumer {
        Some(name) => (
            format!("consumer \"{name}\" must refetch: {gone}, and it has read up to {since}"),
            "In a REPEATABLE READ transaction drop it, create it again with start => 'snapshot', and read the tables anew.".to_string(),
        ),
        None => (format!("{gone}: position {since} lies before what is"), format!("Give {floor} or a later position.")),
    };
    Fault::new(PgSqlErrorCode::ERRCODE_SNAPSHOT_TOO_OLD, message).hint(hint).raise()
}

/// What was found after a position.
pub struct Found {
    /// The changes, an update as two rows.
    pub changes: Vec<Change>,
    /// How far the search came: what lies between the position and here is in `changes`, and there is no more of it.
    pub reached: i64,
}

/// At most `max` net changes of `relations` after position `since`, in order, but for what the reader `has` already. Runs with the rights of the extension's owner.
pub fn after(session: &Session, relations: &[pg_sys::Oid], since: i64, max: i32, has: Option<&Seen>) -> Found {
    let mut changes = Vec::new();
    let reached = walk(session, relations, since, max, has, Form::Jsonb, |rows, row| show(rows, row, &mut changes));
    Found { changes, reached }
}

/// Shows `each` at most `max` net changes of `relations` after position `since`, in order; answers how far that is, past which there may be more.
pub fn walk(
    session: &Session,
    relations: &[pg_sys::Oid],
    since: i64,
    max: i32,
    has: Option<&Seen>,
    form: Form,
    mut each: impl FnMut(&Rows, usize),
) -> i64 {
    // Read first: what is ticked later lies beyond it.
    let last = last(session).max(since);
    let mut pages = Pages::of(session, relations, form);
    let mut left = i64::from(max);
    let mut reached = since;
    loop {
        let ticks = session.run(&TICKS, &[arg(reached), arg(relations.to_vec())]);
        if ticks.is_empty() {
            return reached.max(last);
        }
        for tick in (0..ticks.len()).map(|row| tick(&ticks, row)) {
            let rows = pages.read(session, &tick, since, left, has);
            (0..rows.len()).for_each(|row| each(&rows, row));
            left -= i64::try_from(rows.len()).unwrap_or(i64::MAX);
            if left <= 0 {
                return rows.must(rows.len() - 1, column::POS);
            }
            reached = tick.end_pos;
        }
    }
}

fn tick(ticks: &Rows, row: usize) -> Tick {
    Tick {
        epoch: ticks.must(row, 1),
        number: ticks.must(row, 2),
        at: ticks.must(row, 3),
        previous: ticks.lift(row, 4),
        snapshot: ticks.lift(row, 5),
        start_pos: ticks.must(row, 6),
        end_pos: ticks.must(row, 7),
        first_seq: ticks.must(row, 8),
        last_seq: ticks.must(row, 9),
    }
}

/// Adds a net change as its one or two rows.
fn show(rows: &Rows, row: usize, changes: &mut Vec<Change>) {
    let [key, before, after] = [column::KEY, column::BEFORE, column::AFTER].map(|column| rows.lift(row, column).map(RawJsonb));
    let change = |kind, before, after| Change {
        pos: rows.must(row, column::POS),
        relation: rows.must(row, column::RELATION),
        kind,
        key,
        before,
        after,
        at: rows.must(row, column::AT),
        cause: rows.get(row, column::CAUSE),
    };
    match rows.must::<String>(row, column::KIND).as_str() {
        "I" => changes.push(change("+I", None, after)),
        "D" => changes.push(change("-D", before, None)),
        _ => changes.extend([change("-U", before, None), change("+U", before, after)]),
    }
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
        name!(cause, Option<i64>),
    ),
> {
    crate::shmem::required();
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.orders'."));
    let max = checked_max(max);
    let found = connect(|session| {
        let identity = Identity::owner();
        capture::required(session, identity.caller(), relation);
        let since = checked_pos(session, "since_pos", since_pos);
        let found = after(session, &[relation], since, max, None);
        refuse_below_floor(session, &[relation], since, None);
        found.changes
    });
    TableIterator::new(found.into_iter().map(|c| (c.pos, c.kind, c.key, c.before, c.after, c.at, c.cause)))
}
