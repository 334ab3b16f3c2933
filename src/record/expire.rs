//! `stint.expire_record`: old events go, and what they amounted to stays.
//!
//! What goes is what a moment shows up to a number. Per key that is a beginning of the record, since a transaction that commits later has drawn a higher number
//! for each key it touches; so the fold of what is left over what was stored is the fold of the whole.

use super::append::hold_projections;
use super::config;
use super::order;
use super::position::Position;
use super::shadow::{Extent, Point, Reading, Shadow};
use crate::changelog::epoch;
use crate::spi::{Identity, Moment, Session, Statement, arg, connect};
use crate::values::Instant;
use crate::{input, object_lock, shmem};
use pgrx::prelude::*;

/// The last number that may go: below the first event that is too young, and below all that are poisoned; of not more events than $2, if given.
static LAST: Statement = Statement::new(
    c"SELECT least((SELECT min(l.seq) - 1 FROM stint.event_log l WHERE l.recorded_at >= $1),
                   (SELECT min(a.seq) - 1 FROM stint.events_aside a WHERE a.state = 'poisoned'),
                   CASE WHEN $2 IS NULL THEN (SELECT max(l.seq) FROM stint.event_log l)
                        ELSE (SELECT max(n.seq) FROM (SELECT l.seq FROM stint.event_log l ORDER BY l.seq LIMIT $2) n) END)",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID],
);
static TABLES: Statement =
    Statement::new(c"SELECT DISTINCT c.relation::oid FROM stint.projection_config c JOIN pg_class t ON t.oid = c.relation ORDER BY 1", &[]);
static FIRST: Statement = Statement::new(c"SELECT min(l.seq) FROM stint.event_log l", &[]);
static REMOVE: Statement = Statement::new(c"DELETE FROM stint.event_log l WHERE l.seq <= $1", &[pg_sys::INT8OID]);
static FORGET_SKIPPED: Statement = Statement::new(
    c"DELETE FROM stint.events_aside a WHERE a.seq <= $1 AND a.state = 'skipped' AND NOT EXISTS (SELECT FROM stint.event_log l WHERE l.seq = a.seq)",
    &[pg_sys::INT8OID],
);

fn remove(session: &Session, before: Instant, max: Option<i64>) -> i64 {
    let epoch = epoch::required(session);
    hold_projections();
    let tables = session.run_latest(&TABLES, &[]);
    let projected: Vec<_> = (0..tables.len()).filter_map(|row| config::of(session, tables.must(row, 1))).collect();
    projected.iter().for_each(|table| {
        order::folder(table.relation.oid, false);
    });
    let moment = Moment::now();
    let Some(mut last) = session.run_at(&moment, &LAST, &[arg(before), max.and_then(arg)]).get::<i64>(0, 1) else { return 0 };
    for table in projected.iter().filter(|table| !table.immediate) {
        let base = Position::now(session, table.relation.oid).base();
        let reading = Reading { types: &table.types, extent: &Extent::default(), since: Some(&base), aside: None };
        last = reading.start(session, &moment).map_or(last, |done| last.min(done));
    }
    // The folds below cost as much as the tables are large.
    if session.run_at(&moment, &FIRST, &[]).get::<i64>(0, 1).is_none_or(|first| first > last) {
        return 0;
    }
    let here = Point::of(session, &moment, epoch);
    // Nothing but what the moment shows, up to the number.
    let extent =
        Extent { epoch: Some(-1), base: Some("1:1:".to_string()), target_epoch: Some(here.epoch), target: Some(here.snapshot), seq: Some(last) };
    for table in &projected {
        let mut shadow = Shadow::make(session, &table.relation);
        shadow.fold(session, table, &moment, &extent, None, false);
        shadow.keep(session, &table.relation);
        shadow.drop(session);
    }
    let removed = session.run_at(&moment, &REMOVE, &[arg(last)]).len();
    session.run(&FORGET_SKIPPED, &[arg(last)]);
    i64::try_from(removed).unwrap_or(i64::MAX)
}

#[pg_extern(sql = false)]
fn expire_record(before: Option<Instant>, max: Option<i64>) -> i64 {
    shmem::required();
    let before = input::given("before", before);
    let max = max.map(|max| input::at_least("max", max, 1));
    object_lock::refuse_written("expire the record", "stint.expire_record(…)");
    let _owner = Identity::owner();
    connect(|session| remove(session, before, max))
}
