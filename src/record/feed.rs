//! `stint.events_after`: the record followed from outside, by a cursor that skips nothing when commits overlap.
//!
//! A cursor is a position as tables have it that lag: the point up to which everything was read, the point up to which the pass at hand goes, and the number
//! reached in it. It is written as text, `epoch/snapshot` or `epoch/snapshot/epoch/snapshot/number`, and means the same in every session.

use super::shadow::{Extent, Point, Reading};
use crate::changelog::epoch;
use crate::spi::{Identity, Moment, Statement, arg, connect};
use crate::values::{Instant, RawJsonb};
use crate::{errors, input, shmem};
use pgrx::prelude::*;
use stint_core::record::cursor::Cursor;

/// Every type there is, from one to the next in the index.
static TYPES: Statement = Statement::new(
    c"WITH RECURSIVE t (type) AS (
          (SELECT l.type FROM stint.event_log l ORDER BY l.type LIMIT 1)
          UNION ALL
          SELECT (SELECT l.type FROM stint.event_log l WHERE l.type > t.type ORDER BY l.type LIMIT 1) FROM t WHERE t.type IS NOT NULL)
      SELECT coalesce(array_agg(t.type) FILTER (WHERE t.type IS NOT NULL), '{}') FROM t",
    &[],
);
static EVENTS: Statement = Statement::new(
    c"SELECT l.seq, l.source::text, l.type::text, l.event_id::text, l.occurred_at, l.recorded_at, l.payload, l.lookups
      FROM stint.event_log l WHERE l.seq = ANY ($1) ORDER BY l.seq",
    &[pg_sys::INT8ARRAYOID],
);

fn cursor(after: Option<&str>) -> Cursor {
    let Some(text) = after else { return Cursor::start() };
    match Cursor::read(text) {
        Some(cursor) => cursor,
        None => errors::invalid(
            format!("argument \"after\" is \"{text}\", which is no position"),
            "Pass the last pos you were given, or null for the beginning.",
        ),
    }
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn events_after(
    types: Option<Vec<Option<String>>>,
    after: Option<&str>,
    max: Option<i32>,
) -> TableIterator<
    'static,
    (
        name!(pos, String),
        name!(seq, i64),
        name!(source, String),
        name!(kind, String),
        name!(event_id, Option<String>),
        name!(occurred_at, Instant),
        name!(recorded_at, Instant),
        name!(payload, RawJsonb),
        name!(lookups, Option<RawJsonb>),
    ),
> {
    shmem::required();
    let given = types.map(|types| input::names("types", Some(types)));
    let at_most = i32::try_from(input::batch("max", max)).unwrap_or(i32::MAX);
    let mut cursor = cursor(after);
    let _owner = Identity::owner();
    let events = connect(|session| {
        let epoch = epoch::required(session);
        let types = given.unwrap_or_else(|| session.run_latest(&TYPES, &[]).must::<Vec<Option<String>>>(0, 1).into_iter().flatten().collect());
        let mut events = Vec::new();
        // What is left of the pass at hand, then a new one.
        loop {
            let last_pass = cursor.pass.is_none();
            let wanted = at_most - i32::try_from(events.len()).unwrap_or(at_most);
            let moment = Moment::now();
            let base = Point { epoch: cursor.base.0, snapshot: cursor.base.1.clone() };
            let target = match &cursor.pass {
                Some((epoch, snapshot, _)) => Point { epoch: *epoch, snapshot: snapshot.clone() },
                None => Point::of(session, &moment, epoch),
            };
            let extent = Extent { epoch: Some(target.epoch), base: Some(target.snapshot.clone()), ..Extent::default() };
            let reading = Reading { types: &types, extent: &extent, since: Some(&base), aside: None };
            let from = cursor.pass.as_ref().map(|(.., seq)| *seq).or_else(|| reading.start(session, &moment));
            let seqs = from.map(|from| reading.next(session, &moment, from, wanted)).unwrap_or_default();
            let ended = i32::try_from(seqs.len()).is_ok_and(|read| read < wanted);
            let last = seqs.last().copied().filter(|_| ended);
            let rows = session.run_at(&moment, &EVENTS, &[arg(seqs)]);
            for row in 0..rows.len() {
                let seq: i64 = rows.must(row, 1);
                cursor.pass = (Some(seq) != last).then(|| (target.epoch, target.snapshot.clone(), seq));
                if cursor.pass.is_none() {
                    cursor.base = (target.epoch, target.snapshot.clone());
                }
                let Some(payload) = rows.lift(row, 7) else { continue };
                events.push((
                    cursor.text(),
                    seq,
                    rows.must(row, 2),
                    rows.must(row, 3),
                    rows.get(row, 4),
                    rows.must(row, 5),
                    rows.must(row, 6),
                    RawJsonb(payload),
                    rows.lift(row, 8).map(RawJsonb),
                ));
            }
            if last_pass || !ended {
                break;
            }
            cursor = Cursor { base: (target.epoch, target.snapshot), pass: None };
        }
        events
    });
    TableIterator::new(events)
}
