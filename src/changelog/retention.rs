//! Letting changes go when they are past their tables' history.
//!
//! Ticks go whole, since a position is an ordinal within its tick: all changes of a tick or none, when every table that changed in it is past its history, and
//! never before an earlier tick of one of these tables. So of each key the changes that are gone are older than those that are there.
//!
//! A tag needs of each key the first change after it, whose before image the row is. Before a tick goes, those changes of it that some tag needs are kept as
//! images; a change is the first one after every tag that lies between it and the key's change before. So tags share images, and the images a tag needs are
//! among at most one for each key. A tag is made under the same lock, shared: either it is seen here, or it sees the floor that was raised.

use super::epoch;
use super::gone;
use crate::errors;
use crate::input;
use crate::object_lock::{self, Lock};
use crate::spi::{Identity, Prepared, Session, Statement, arg, connect};
use crate::values::{Instant, RawInterval, SECOND};
use crate::{guc, shmem};
use pgrx::prelude::*;
use std::cell::Cell;
use std::collections::HashSet;

/// How far back each table with a history is kept. A table that is no state table any more keeps nothing.
static HISTORIES: Statement =
    Statement::new(c"SELECT c.relation::oid, clock_timestamp() - c.history, c.floor_pos FROM stint.captures c WHERE c.history IS NOT NULL", &[]);
static FOREVER: Statement = Statement::new(c"SELECT c.relation::oid FROM stint.captures c WHERE c.history IS NULL", &[]);

/// Ticks after a position that may go: older than the latest of the tables' limits, and with changes of one of these tables.
static CANDIDATES: Statement = Statement::new(
    c"SELECT t.epoch, t.number, t.end_pos, t.at, t.relations::oid[], coalesce(p.snapshot, '1:1:')::text, t.snapshot::text
      FROM stint.ticks t LEFT JOIN stint.ticks p ON p.epoch = t.epoch AND p.number = t.number - 1
      WHERE t.end_pos > $1 AND t.end_pos <= (SELECT e.end_pos FROM stint.ticks e WHERE e.at < $2 ORDER BY e.at DESC, e.end_pos DESC LIMIT 1)
        AND NOT t.expired AND t.relations && $3::regclass[]
      ORDER BY t.end_pos LIMIT 256",
    &[pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID, pg_sys::OIDARRAYOID],
);

/// Removes the changes of one tick (epoch $1, from snapshot $2 to $3) and keeps those that a tag needs. Answers how many went, how many were kept, the keys
/// whose last change among them was their deletion, and the last transaction among theirs.
static EXPIRE: Statement = Statement::new(
    c"WITH gone AS (
          DELETE FROM stint.change_log d
          WHERE d.ctid = ANY (ARRAY(
              SELECT x.ctid
              FROM (SELECT l.ctid, l.xid FROM stint.change_log l
                    WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2::pg_snapshot) AND l.xid < pg_snapshot_xmax($3::pg_snapshot)
                    UNION ALL
                    SELECT r.* FROM pg_snapshot_xip($2::pg_snapshot) i,
                                    LATERAL (SELECT l.ctid, l.xid FROM stint.change_log l WHERE l.epoch = $1 AND l.xid = i OFFSET 0) r) x
              WHERE pg_visible_in_snapshot(x.xid, $3::pg_snapshot)))
          RETURNING d.relation, d.key, d.epoch, d.xid, d.seq, d.layout, d.kind, d.before),
      lined AS MATERIALIZED (
          SELECT g.*, lag(g.xid) OVER w AS previous, lead(g.seq) OVER w IS NULL AS last
          FROM gone g WINDOW w AS (PARTITION BY g.relation, g.key ORDER BY g.seq)),
      kept AS (
          INSERT INTO stint.kept_images (relation, key, epoch, xid, seq, layout, before)
          SELECT c.relation, c.key, c.epoch, c.xid, c.seq, c.layout, c.before
          FROM lined c
          WHERE EXISTS (
              SELECT FROM (SELECT DISTINCT p.epoch, p.snapshot::text AS snapshot FROM stint.tag_list t JOIN stint.pins p USING (pin)) p
              WHERE (p.epoch < c.epoch OR p.epoch = c.epoch AND NOT pg_visible_in_snapshot(c.xid, p.snapshot::pg_snapshot))
                AND CASE WHEN c.previous IS NOT NULL THEN p.epoch = c.epoch AND pg_visible_in_snapshot(c.previous, p.snapshot::pg_snapshot)
                         ELSE NOT EXISTS (SELECT FROM stint.kept_images k
                                          WHERE k.relation = c.relation AND hashtextextended(k.key, 0) = hashtextextended(c.key, 0) AND k.key = c.key
                                            AND (k.epoch > p.epoch OR k.epoch = p.epoch AND NOT pg_visible_in_snapshot(k.xid, p.snapshot::pg_snapshot))) END)
          RETURNING 1)
      SELECT (SELECT count(*) FROM lined), (SELECT count(*) FROM kept),
             (SELECT coalesce(array_agg(c.relation::oid ORDER BY c.seq), '{}') FROM lined c WHERE c.last AND c.kind = 'D'),
             (SELECT coalesce(array_agg(c.key ORDER BY c.seq), '{}') FROM lined c WHERE c.last AND c.kind = 'D'),
             (SELECT c.xid::text FROM lined c ORDER BY c.xid DESC LIMIT 1)",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);
static RAISE_FLOOR: Statement = Statement::new(
    c"UPDATE stint.captures SET floor_pos = $2, floor_epoch = $3, floor_seen = $4::pg_snapshot, floor_xid = $5::xid8 WHERE relation = ANY ($1::regclass[])",
    &[pg_sys::OIDARRAYOID, pg_sys::INT8OID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);
static EXPIRED: Statement =
    Statement::new(c"UPDATE stint.ticks SET expired = true WHERE epoch = $1 AND number = $2", &[pg_sys::INT4OID, pg_sys::INT8OID]);

/// A tick stays while the next one begins where it ends.
static FORGET_TICKS: Statement = Statement::new(
    c"DELETE FROM stint.ticks t
      WHERE t.expired AND (SELECT n.expired FROM stint.ticks n WHERE n.end_pos > t.end_pos ORDER BY n.end_pos LIMIT 1)",
    &[],
);

/// That a key was not there need not be kept where it is not there afterwards either: its next change, if there is one, says the same.
static FORGET_ABSENT: Statement = Statement::new(
    c"DELETE FROM stint.kept_images k
      USING unnest($1::regclass[], $2::text[]) d (relation, key)
      WHERE k.relation = d.relation AND hashtextextended(k.key, 0) = hashtextextended(d.key COLLATE \"C\", 0) AND k.key = d.key AND k.before IS NULL
        AND NOT EXISTS (SELECT FROM stint.kept_images n
                        WHERE n.relation = k.relation AND hashtextextended(n.key, 0) = hashtextextended(k.key, 0) AND n.key = k.key
                          AND (n.epoch, n.seq) > (k.epoch, k.seq) AND n.before IS NOT NULL)",
    &[pg_sys::OIDARRAYOID, pg_sys::TEXTARRAYOID],
);

static ANY_DROPPED: Statement = Statement::new(c"SELECT FROM stint.dropped_tags LIMIT 1", &[]);
/// Removes at most $1 images that are the first after no tag, and answers their keys.
static UNNEEDED: Statement = Statement::new(
    c"WITH lined AS MATERIALIZED (
          SELECT k.ctid, k.epoch, k.xid, lag(k.epoch) OVER w AS previous_epoch, lag(k.xid) OVER w AS previous
          FROM stint.kept_images k WINDOW w AS (PARTITION BY k.relation, k.key ORDER BY k.epoch, k.seq))
      DELETE FROM stint.kept_images k
      WHERE k.ctid = ANY (ARRAY(
          SELECT c.ctid FROM lined c
          WHERE NOT EXISTS (
              SELECT FROM stint.tag_list t JOIN stint.pins p USING (pin)
              WHERE (p.epoch < c.epoch OR p.epoch = c.epoch AND NOT pg_visible_in_snapshot(c.xid, p.snapshot))
                AND (c.previous IS NULL OR p.epoch > c.previous_epoch OR p.epoch = c.previous_epoch AND pg_visible_in_snapshot(c.previous, p.snapshot)))
          LIMIT $1))
      RETURNING k.relation::oid, k.key",
    &[pg_sys::INT8OID],
);
static NONE_DROPPED: Statement = Statement::new(c"DELETE FROM stint.dropped_tags", &[]);

/// What was done.
#[derive(Default)]
struct Done {
    removed: i64,
    kept: i64,
    images: i64,
    more: bool,
}

/// `stint.expire_changes`.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn expire_changes(max: Option<i32>) -> TableIterator<'static, (name!(removed, i64), name!(kept, i64), name!(images, i64), name!(more, bool))> {
    shmem::required();
    let max = input::batch("max", max) as i64;
    object_lock::refuse_written("expire changes", "stint.expire_changes()");
    let done = connect(|session| {
        let _owner = Identity::owner();
        epoch::refuse_in_copy(session);
        object_lock::take(Lock::Retention, false);
        expire(session, max)
    });
    TableIterator::once((done.removed, done.kept, done.images, done.more))
}

/// How often the maintenance worker looks.
const EVERY: i64 = 10 * SECOND;

thread_local! {
    static NEXT: Cell<Instant> = const { Cell::new(Instant(0)) };
}

/// Whether it is time again, or there is more.
pub fn due() -> bool {
    Instant::now() >= NEXT.get()
}

/// One bounded part. For the worker, inside a transaction of its own.
pub fn step() -> bool {
    object_lock::refuse_written("expire changes", "stint.expire_changes()");
    let more = connect(|session| {
        let _owner = Identity::owner();
        epoch::own(session) && object_lock::take(Lock::Retention, true) && expire(session, i64::from(guc::max_batch())).more
    });
    if !more {
        NEXT.set(Instant::now().plus(EVERY));
    }
    more
}

/// Lets go of at least `max` changes, if there are so many. The retention lock is held.
fn expire(session: &Session, max: i64) -> Done {
    let mut done = Done::default();
    let limits = session.run(&HISTORIES, &[]);
    let mut after = (0..limits.len()).map(|row| limits.must::<i64>(row, 3)).min().unwrap_or(0);
    let limits: Vec<(pg_sys::Oid, Instant)> = (0..limits.len()).map(|row| (limits.must(row, 1), limits.must(row, 2))).collect();
    let forever = session.run(&FOREVER, &[]);
    // Tables of which no further tick may go, because an earlier one stays.
    let mut blocked: HashSet<u32> = (0..forever.len()).map(|row| forever.must::<pg_sys::Oid>(row, 1).to_u32()).collect();
    'ticks: while let Some(latest) = limits.iter().filter(|(table, _)| !blocked.contains(&table.to_u32())).map(|(_, limit)| *limit).max() {
        let open: Vec<pg_sys::Oid> = limits.iter().map(|(table, _)| *table).filter(|table| !blocked.contains(&table.to_u32())).collect();
        let ticks = session.run(&CANDIDATES, &[arg(after), arg(latest), arg(open)]);
        if ticks.is_empty() {
            break;
        }
        for row in 0..ticks.len() {
            after = ticks.must(row, 3);
            let (at, tables): (Instant, Vec<pg_sys::Oid>) = (ticks.must(row, 4), ticks.must(row, 5));
            let stays =
                |table: &pg_sys::Oid| blocked.contains(&table.to_u32()) || limits.iter().any(|(limited, limit)| limited == table && at >= *limit);
            if tables.iter().any(stays) {
                blocked.extend(tables.iter().map(|table| table.to_u32()));
                continue;
            }
            let gone = session.run(&EXPIRE, &[ticks.lift(row, 1), ticks.lift(row, 6), ticks.lift(row, 7)]);
            done.removed += gone.must::<i64>(0, 1);
            done.kept += gone.must::<i64>(0, 2);
            session.run(&RAISE_FLOOR, &[ticks.lift(row, 5), arg(after), ticks.lift(row, 1), ticks.lift(row, 7), gone.lift(0, 5)]);
            session.run(&EXPIRED, &[ticks.lift(row, 1), ticks.lift(row, 2)]);
            let dead: (Vec<pg_sys::Oid>, Vec<String>) = (gone.must(0, 3), gone.must(0, 4));
            session.run(&FORGET_ABSENT, &[arg(dead.0.clone()), arg(dead.1.clone())]);
            forget_keys(session, dead.0.into_iter().zip(dead.1).collect());
            if done.removed >= max {
                done.more = true;
                break 'ticks;
            }
        }
    }
    if done.removed > 0 {
        session.run(&FORGET_TICKS, &[]);
    }
    if !session.run(&ANY_DROPPED, &[]).is_empty() {
        let images = session.run(&UNNEEDED, &[arg(max)]);
        done.images = images.len() as i64;
        forget_keys(session, (0..images.len()).map(|row| (images.must(row, 1), images.must(row, 2))).collect());
        if done.images < max {
            session.run(&NONE_DROPPED, &[]);
        } else {
            done.more = true;
        }
    }
    done
}

/// Takes keys of deleted rows of which no change and no image is left out of the tables of such keys.
fn forget_keys(session: &Session, keys: Vec<(pg_sys::Oid, String)>) {
    let tables: HashSet<pg_sys::Oid> = keys.iter().map(|(table, _)| *table).collect();
    for table in tables {
        let Some((_, name)) = gone::find(session, table) else { continue };
        let keys: Vec<String> = keys.iter().filter(|(of, _)| *of == table).map(|(_, key)| key.clone()).collect();
        let none = |of: &str| {
            format!(
                "NOT EXISTS (SELECT FROM {of} l WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended(g.key, 0) AND l.key = g.key)"
            )
        };
        // A row that a writer takes out at this moment is left to it.
        let statement = format!(
            "DELETE FROM {name} d WHERE d.ctid = ANY (ARRAY(
                 SELECT g.ctid FROM {name} g
                 WHERE hashtextextended(g.key, 0) = ANY (SELECT hashtextextended(k COLLATE \"C\", 0) FROM unnest($2::text[]) k) AND {} AND {}
                 FOR UPDATE SKIP LOCKED))",
            none("stint.change_log"),
            none("stint.kept_images")
        );
        session.run_own(&Prepared::new(&statement, &[pg_sys::OIDOID, pg_sys::TEXTARRAYOID]), &[arg(table), arg(keys)]);
    }
}

static POSITIVE: Statement = Statement::new(c"SELECT $1 > interval '0'", &[pg_sys::INTERVALOID]);

/// A history as the arguments give it: positive, or null for ever.
pub fn positive(session: &Session, argument: &str, keep: Option<RawInterval>) -> Option<RawInterval> {
    if let Some(keep) = keep
        && !session.run(&POSITIVE, &[arg(keep)]).must::<bool>(0, 1)
    {
        errors::invalid(format!("argument \"{argument}\" is not positive"), "Give for how long to keep it, such as '30 days', or null for ever.")
    }
    keep
}
