//! The worker's step that folds events into tables that may lag, and `stint.project`, which does it for one table now.
//!
//! A pass goes from the point up to which everything is done to a snapshot taken when the pass begins: its events are those that the snapshot shows and that
//! point did not, in the order of their numbers. A pass too large for one write goes on where the last one ended. Since numbers of one key rise in the order of
//! commits, each key sees its events in order, across passes, too.

use super::append::events_at_once;
use super::config::{self, Projected};
use super::position::Position;
use super::shadow::{Extent, Point, Reading};
use super::{apply, order};
use crate::changelog::epoch;
use crate::direct;
use crate::relation::Relation;
use crate::spi::{Identity, Moment, Session, Statement, arg, connect};
use crate::values::{Instant, SECOND};
use crate::{errors, input, object_lock, shmem};
use pgrx::prelude::*;
use std::cell::Cell;

static TABLES: Statement = Statement::new(
    c"SELECT DISTINCT c.relation::oid, extract(epoch FROM c.freshness)::float8
      FROM stint.projection_config c JOIN pg_class t ON t.oid = c.relation
      WHERE c.freshness > '0' ORDER BY 1",
    &[],
);

/// Events since a point: of the table's types how many, the lowest number and the earliest time, and how many of any type.
static WAITING: Statement = Statement::new(
    c"SELECT count(*) FILTER (WHERE w.type = ANY ($3)), min(w.seq) FILTER (WHERE w.type = ANY ($3)), min(w.recorded_at) FILTER (WHERE w.type = ANY ($3)), count(*)
      FROM (SELECT l.type, l.seq, l.recorded_at FROM stint.event_log l WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2::pg_snapshot)
            UNION ALL
            SELECT r.*
            FROM pg_snapshot_xip($2::pg_snapshot) x,
                 LATERAL (SELECT l.type, l.seq, l.recorded_at FROM stint.event_log l WHERE l.epoch = $1 AND l.xid = x OFFSET 0) r
            UNION ALL
            SELECT l.type, l.seq, l.recorded_at FROM stint.event_log l WHERE l.epoch > $1) w",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTARRAYOID],
);

/// From so many events of other types on the point is moved past them, so that they are not counted again and again.
const MANY_OTHERS: i64 = 10_000;

/// Folds what is due, at most `max` events. Returns how many, and whether there is more. `due_at`: only if the oldest event was recorded by then.
fn project(session: &Session, projected: &Projected, max: i32, due_at: Option<Instant>) -> (i64, bool) {
    let relation = projected.relation.oid;
    let epoch = epoch::required(session);
    let position = Position::now(session, relation);
    let moment = Moment::now();
    let (target, after, waiting) = match position.target() {
        Some(target) => (target, position.extent.seq.unwrap_or(0), None),
        None => {
            let base = position.base();
            let seen = session.run_at(&moment, &WAITING, &[arg(base.epoch), arg(base.snapshot), arg(projected.types.clone())]);
            let here = Point::of(session, &moment, epoch);
            let (waiting, all): (i64, i64) = (seen.must(0, 1), seen.must(0, 4));
            let Some(first) = seen.get::<i64>(0, 2) else {
                if all >= MANY_OTHERS {
                    position.finish(session, relation, &here);
                }
                return (0, false);
            };
            if due_at.is_some_and(|due| seen.get::<Instant>(0, 3).is_some_and(|oldest| oldest > due)) {
                return (0, false);
            }
            (here, first - 1, Some(waiting))
        }
    };
    let extent = Extent { epoch: Some(target.epoch), base: Some(target.snapshot.clone()), ..Extent::default() };
    let at_most = events_at_once(projected.per_event).min(max);
    let reading = Reading { types: &projected.types, extent: &extent, since: Some(&position.base()), aside: Some((relation, false)) };
    let seqs = reading.next(session, &moment, after, at_most);
    drop(moment);
    let poisoned = apply::fold(projected, relation, apply::documents(session, &seqs), &seqs);
    apply::set_aside(session, relation, &poisoned);
    let folded = i64::try_from(seqs.len()).unwrap_or(0);
    match seqs.last() {
        Some(last) if i32::try_from(seqs.len()).is_ok_and(|read| read >= at_most) => {
            let behind = waiting.map_or(0, |waiting| waiting - folded);
            position.go_on(session, relation, &target, *last, behind);
            (folded, true)
        }
        _ => {
            position.finish(session, relation, &target);
            // The end of a pass that brought nothing says nothing of what came since it began.
            if folded == 0 && waiting.is_none() { project(session, projected, max, due_at) } else { (folded, false) }
        }
    }
}

thread_local! {
    /// The table that the last step looked at: a table that fails keeps no other from its turn.
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Whether there may be projections.
pub fn due() -> bool {
    direct::has_pages(c"projection_config")
}

/// For the maintenance worker: one table after the other, each in a transaction of its own. True if there is more to do.
pub fn step() -> bool {
    connect(|session| {
        let tables = session.run(&TABLES, &[]);
        let all: Vec<(pg_sys::Oid, f64)> = (0..tables.len()).map(|row| (tables.must(row, 1), tables.must(row, 2))).collect();
        let Some((relation, freshness)) = all.iter().find(|(relation, _)| relation.to_u32() > LAST.get()) else {
            LAST.set(0);
            return false;
        };
        LAST.set(relation.to_u32());
        let others = all.last().is_some_and(|(last, _)| last != relation);
        if !others {
            LAST.set(0);
        }
        // Half of the lag is for gathering events into one write, the other half for the write.
        let due = Instant::now().plus(-((freshness / 2.0 * SECOND as f64) as i64));
        let more = match config::of(session, *relation) {
            Some(projected) if order::folder(*relation, true) => project(session, &projected, i32::MAX, Some(due)).1,
            _ => false,
        };
        others || more
    })
}

#[pg_extern(sql = false, name = "project")]
fn project_now(relation: Option<pg_sys::Oid>, max: Option<i32>) -> i64 {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.project('shop.goods').") };
    let max = input::batch("max", max);
    shmem::required();
    object_lock::refuse_written("project events", "stint.project(…)");
    let _owner = Identity::owner();
    connect(|session| {
        let relation = Relation::load_unfit(session, oid);
        let projected = config::required(session, &relation);
        if projected.immediate {
            return 0;
        }
        order::folder(oid, false);
        project(session, &projected, i32::try_from(max).unwrap_or(i32::MAX), None).0
    })
}
