//! One page of a tick: the statement that walks its changes in order, nets them and shows them.
//!
//! What a transaction did to a key counts as one change, at the position of the last: it goes from the image before the first to the image after the last. A
//! key born and dead in one transaction, or back to where it was, gives nothing. The other changes of the key are looked up by index, so a page costs what a
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
    static COMPILED: RefCell<HashMap<(Vec<u32>, Way), Compiled>> = RefCell::new(HashMap::new());
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
    /// The key as an object.
    pub const KEY: usize = 5;
    /// The row before as an object.
    pub const BEFORE: usize = 6;
    /// The row after as an object.
    pub const AFTER: usize = 7;
    /// When the last statement ended.
    pub const AT: usize = 8;
    /// The event of the last.
    pub const CAUSE: usize = 9;
    pub(super) const SEQ: usize = 2;
}

/// At most `max` net changes of a tick that lie after `since`, belong to `relations` and are not in what the reader `has`; columns as in [`column`].
pub fn read(session: &Session, tick: &Tick, relations: &[(pg_sys::Oid, Shape)], since: i64, max: i64, has: Option<&Seen>) -> Rows {
    let way = tick.way();
    let (pos, seq) = match way {
        Way::BySeq => recall(tick, since),
        Way::ByTransaction => (tick.start_pos, tick.first_seq - 1),
    };
    let oids: Vec<pg_sys::Oid> = relations.iter().map(|(oid, _)| *oid).collect();
    let rows = session.run_own(
        &statement(relations, way),
        &[
            arg(tick.epoch),
            tick.previous,
            tick.snapshot,
            arg(seq),
            arg(tick.last_seq),
            arg(pos),
            arg(since),
            arg(oids),
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

fn statement(relations: &[(pg_sys::Oid, Shape)], way: Way) -> Rc<Prepared> {
    let text = sql(relations, way);
    let name = (relations.iter().map(|(oid, _)| oid.to_u32()).collect(), way);
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
fn sql(relations: &[(pg_sys::Oid, Shape)], way: Way) -> String {
    let each = |document: &dyn Fn(&Shape) -> String| {
        let cases: Vec<String> = relations.iter().map(|(oid, shape)| format!("WHEN {} THEN {}", oid.to_u32(), document(shape))).collect();
        format!("CASE c.relation::oid {} END", cases.join(" "))
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
    // Both look-ups have a LIMIT, so that the planner asks the index for each change and does not join.
    format!(
        "SELECT c.pos, c.seq, c.relation::oid, CASE WHEN f.before IS NULL THEN 'I' WHEN c.after IS NULL THEN 'D' ELSE 'U' END,
                {key}, {before}, {after}, c.at, c.cause
         FROM (SELECT $6 + row_number() OVER (ORDER BY l.seq) AS pos, l.* FROM ({source}) l) c
         CROSS JOIN LATERAL (
             SELECT o.before FROM stint.change_log o
             WHERE o.relation = c.relation AND hashtextextended(o.key, 0) = hashtextextended(c.key, 0) AND o.key = c.key AND o.epoch = c.epoch AND o.xid = c.xid
             ORDER BY o.seq LIMIT 1) f
         WHERE c.pos > $7 AND c.relation = ANY ($8::regclass[]) AND ($10 IS NULL OR NOT pg_visible_in_snapshot(c.xid, $10))
           AND (SELECT n.seq FROM stint.change_log n
                WHERE n.relation = c.relation AND hashtextextended(n.key, 0) = hashtextextended(c.key, 0) AND n.key = c.key AND n.epoch = c.epoch
                  AND n.xid = c.xid AND n.seq > c.seq
                ORDER BY n.seq LIMIT 1) IS NULL
           AND f.before IS DISTINCT FROM c.after
         ORDER BY c.seq
         LIMIT $9",
        key = each(&|shape| documents::key_sql(shape, "c.key")),
        before = each(&|shape| documents::image_sql(shape, "f.before")),
        after = each(&|shape| documents::image_sql(shape, "c.after")),
    )
}
