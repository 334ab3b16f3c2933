//! One page of a tick: the statement that walks its changes in order, nets them and shows them.
//!
//! What a transaction did to a key counts as one change, at the position of the last: it goes from the image before the first to the image after the last. A
//! key born and dead in one transaction, or back to where it was, gives nothing. The changes of the key next to it are looked up by index, so a page costs what a
//! page holds, however large the transaction was.
//!
//! A tick's changes lie between its first and its last seq, among those of transactions that other ticks hold. Where they are dense, or many, the statement
//! walks them by seq, from the last place that this session remembers; few changes that lie far apart are found by their transactions and sorted.

use super::documents;
use super::shape::Shape;
use crate::shmem::Instance;
use crate::spi::{Param, Prepared, Rows, Session, arg};
use crate::values::Instant;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A tick and what its changes are to be told from.
pub struct Tick {
    /// Its epoch.
    pub epoch: i32,
    /// Its number in the epoch.
    pub number: i64,
    /// When it was made: one that was rolled back left its number to another.
    pub at: Instant,
    /// The snapshot of the tick before, as a datum.
    pub previous: Param,
    /// Its own snapshot, as a datum.
    pub snapshot: Param,
    /// Where the tick before ends.
    pub start_pos: i64,
    /// Where it ends.
    pub end_pos: i64,
    /// The least seq of its changes.
    pub first_seq: i64,
    /// The greatest.
    pub last_seq: i64,
}

/// What a reader had before it began: the transactions that a snapshot sees.
pub struct Seen {
    /// The epoch whose transactions it names.
    pub epoch: i32,
    /// The snapshot, as a datum.
    pub snapshot: Param,
}

/// How rows are shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Key, before and after as objects.
    Jsonb,
    /// Key, before and after as arrays of text, with the names of the columns that before and after had.
    Text,
}

/// How the changes of a tick are found.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Way {
    BySeq,
    ByTransaction,
}

impl Tick {
    fn way(&self) -> Way {
        /// Sorting so many for each page is no burden.
        const FEW: i64 = 2_000;
        let changes = self.end_pos - self.start_pos;
        let dense = self.last_seq.saturating_sub(self.first_seq) <= changes.saturating_mul(4);
        if dense || changes > FEW { Way::BySeq } else { Way::ByTransaction }
    }
}

/// What tables' pages look like: their statements, as long as their columns stay as they are.
struct Compiled {
    text: String,
    statement: Rc<Prepared>,
}

/// Where a position lies.
#[derive(Clone)]
struct Place {
    instance: Instance,
    epoch: i32,
    number: i64,
    at: Instant,
    pos: i64,
    seq: i64,
}

thread_local! {
    static COMPILED: RefCell<HashMap<(Vec<u32>, Way, Form), Compiled>> = RefCell::new(HashMap::new());
    static PLACES: RefCell<Vec<Place>> = const { RefCell::new(Vec::new()) };
}

/// Places remembered by a session: as many readers may take turns in it.
const PLACES_KEPT: usize = 64;

/// The nearest place at or before `since` that this session knows of: a position in the tick and its seq.
fn recall(tick: &Tick, since: i64) -> (i64, i64) {
    let instance = Instance::here();
    PLACES.with_borrow(|places| {
        places
            .iter()
            .filter(|p| p.instance == instance && (p.epoch, p.number, p.at) == (tick.epoch, tick.number, tick.at) && p.pos <= since)
            .map(|p| (p.pos, p.seq))
            .max()
            .unwrap_or((tick.start_pos, tick.first_seq - 1))
    })
}

/// Remembers where in a tick a position lies.
fn remember(tick: &Tick, pos: i64, seq: i64) {
    let place = Place { instance: Instance::here(), epoch: tick.epoch, number: tick.number, at: tick.at, pos, seq };
    PLACES.with_borrow_mut(|places| {
        if places.len() == PLACES_KEPT {
            places.remove(0);
        }
        places.push(place);
    });
}

/// The columns of a page's rows.
pub mod column {
    /// The position.
    pub const POS: usize = 1;
    /// The table.
    pub const RELATION: usize = 3;
    /// `I`, `U` or `D`.
    pub const KIND: usize = 4;
    /// The key.
    pub const KEY: usize = 5;
    /// The row before.
    pub const BEFORE: usize = 6;
    /// The row after.
    pub const AFTER: usize = 7;
    /// When the last statement ended.
    pub const AT: usize = 8;
    /// The event of the last.
    pub const CAUSE: usize = 9;
    /// In [`super::Form::Text`], the names of the places of before.
    pub const BEFORE_NAMES: usize = 10;
    /// In [`super::Form::Text`], the names of the places of after.
    pub const AFTER_NAMES: usize = 11;
    pub(super) const SEQ: usize = 2;
}

/// What a reader wants of each tick.
pub struct Pages {
    relations: Vec<(pg_sys::Oid, Shape)>,
    form: Form,
    statements: HashMap<Way, Rc<Prepared>>,
}

impl Pages {
    /// Of some tables, in a form.
    pub fn of(session: &Session, relations: &[pg_sys::Oid], form: Form) -> Self {
        let relations = relations.iter().map(|oid| (*oid, Shape::load(session, *oid))).collect();
        Pages { relations, form, statements: HashMap::new() }
    }

    /// At most `max` net changes of a tick that lie after `since` and are not in what the reader `has`; columns as in [`column`].
    pub fn read(&mut self, session: &Session, tick: &Tick, since: i64, max: i64, has: Option<&Seen>) -> Rows {
        let way = tick.way();
        let (pos, seq) = match way {
            Way::BySeq => recall(tick, since),
            Way::ByTransaction => (tick.start_pos, tick.first_seq - 1),
        };
        let (relations, form) = (&self.relations, self.form);
        let rows = session.run_own(
            self.statements.entry(way).or_insert_with(|| statement(relations, way, form)),
            &[
                arg(tick.epoch),
                tick.previous,
                tick.snapshot,
                arg(seq),
                arg(tick.last_seq),
                arg(pos),
                arg(since),
                arg(relations.iter().map(|(oid, _)| *oid).collect::<Vec<_>>()),
                arg(max),
                has.filter(|seen| seen.epoch == tick.epoch).and_then(|seen| seen.snapshot),
            ],
        );
        if let Some(last) = rows.len().checked_sub(1)
            && way == Way::BySeq
        {
            remember(tick, rows.must(last, column::POS), rows.must(last, column::SEQ));
        }
        rows
    }
}

fn statement(relations: &[(pg_sys::Oid, Shape)], way: Way, form: Form) -> Rc<Prepared> {
    let text = sql(relations, way, form);
    let name = (relations.iter().map(|(oid, _)| oid.to_u32()).collect(), way, form);
    COMPILED.with_borrow_mut(|all| {
        if let Some(known) = all.get(&name)
            && known.text == text
        {
            return Rc::clone(&known.statement);
        }
        let types = [
            pg_sys::INT4OID,
            pg_sys::PG_SNAPSHOTOID,
            pg_sys::PG_SNAPSHOTOID,
            pg_sys::INT8OID,
            pg_sys::INT8OID,
            pg_sys::INT8OID,
            pg_sys::INT8OID,
            pg_sys::OIDARRAYOID,
            pg_sys::INT8OID,
            pg_sys::PG_SNAPSHOTOID,
        ];
        let statement = Rc::new(Prepared::new(&text, &types));
        all.insert(name, Compiled { text, statement: Rc::clone(&statement) });
        statement
    })
}

/// `$1` epoch, `$2` snapshot before, `$3` snapshot, `$4` walk after this seq, `$5` to this one, `$6` position of `$4`, `$7` since, `$8` tables, `$9` how
/// many, `$10` what the reader has.
fn sql(relations: &[(pg_sys::Oid, Shape)], way: Way, form: Form) -> String {
    let names = |layout: &str| format!("(SELECT i.columns FROM stint.image_layouts i WHERE i.layout = {layout})");
    let each = |document: &dyn Fn(&Shape) -> String| {
        let cases: Vec<String> = relations.iter().map(|(oid, shape)| format!("WHEN {} THEN {}", oid.to_u32(), document(shape))).collect();
        format!("CASE c.relation::oid {} END", cases.join(" "))
    };
    let (key, before, after, more) = match form {
        Form::Jsonb => (
            each(&|shape| documents::key_sql(shape, "c.key")),
            each(&|shape| documents::image_sql(shape, "f.before")),
            each(&|shape| documents::image_sql(shape, "c.after")),
            String::new(),
        ),
        Form::Text => {
            let (key, before, after) = ("c.key::text[]", "f.before", "c.after");
            (key.to_string(), before.to_string(), after.to_string(), format!(", {}, {}", names("f.layout"), names("c.layout")))
        }
    };
    let source = match way {
        Way::BySeq => {
            "SELECT l.* FROM stint.change_log l
             WHERE l.epoch = $1 AND l.seq > $4 AND l.seq <= $5
               AND pg_visible_in_snapshot(l.xid, $3) AND NOT pg_visible_in_snapshot(l.xid, $2)"
        }
        // The upper bound tells the planner that the range is narrow.
        Way::ByTransaction => {
            "SELECT x.* FROM (SELECT l.* FROM stint.change_log l
                   WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2) AND l.xid < pg_snapshot_xmax($3)
                   UNION ALL
                   SELECT r.* FROM pg_snapshot_xip($2) i, LATERAL (SELECT l.* FROM stint.change_log l WHERE l.epoch = $1 AND l.xid = i OFFSET 0) r) x
             WHERE pg_visible_in_snapshot(x.xid, $3) AND x.seq > $4 AND x.seq <= $5"
        }
    };
    // A key's changes of one transaction follow each other among all of that key, since it held the row. The look-ups have a LIMIT, so that the planner asks the
    // index for each change and does not join.
    let of_key = |row: &str| {
        format!(
            "FROM stint.change_log {row}
             WHERE {row}.relation = c.relation AND hashtextextended({row}.key, 0) = hashtextextended(c.key, 0) AND {row}.key = c.key AND {row}.epoch = c.epoch"
        )
    };
    format!(
        "SELECT c.pos, c.seq, c.relation::oid, CASE WHEN f.before IS NULL THEN 'I' WHEN c.after IS NULL THEN 'D' ELSE 'U' END,
                {key}, {before}, {after}, c.at, c.cause{more}
         FROM (SELECT $6 + row_number() OVER (ORDER BY l.seq) AS pos, l.* FROM ({source}) l) c
         CROSS JOIN LATERAL (
             SELECT (SELECT p.xid {previous} AND p.seq < c.seq ORDER BY p.seq DESC LIMIT 1) IS NOT DISTINCT FROM c.xid AS again OFFSET 0) a
         CROSS JOIN LATERAL (
             SELECT c.before, c.layout WHERE NOT a.again
             UNION ALL
             (SELECT o.before, o.layout {first} AND a.again
                 AND o.seq > coalesce((SELECT b.seq {other} AND b.seq < c.seq AND b.xid <> c.xid ORDER BY b.seq DESC LIMIT 1), 0)
              ORDER BY o.seq LIMIT 1)) f
         WHERE c.pos > $7 AND c.relation = ANY ($8::regclass[]) AND ($10 IS NULL OR NOT pg_visible_in_snapshot(c.xid, $10))
           AND (SELECT n.xid {next} AND n.seq > c.seq ORDER BY n.seq LIMIT 1) IS DISTINCT FROM c.xid
           AND f.before IS DISTINCT FROM c.after
         ORDER BY c.seq
         LIMIT $9",
        previous = of_key("p"),
        first = of_key("o"),
        other = of_key("b"),
        next = of_key("n"),
    )
}
