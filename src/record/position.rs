//! How far a table that may lag is folded: which events are done.

use super::shadow::{Extent, Point};
use crate::spi::{Moment, Rows, Session, Statement, arg};
use pgrx::prelude::*;

static LAST: Statement = Statement::new(
    c"SELECT p.epoch, p.base::text, p.target_epoch, p.target::text, p.seq, p.number
      FROM stint.projection_positions p WHERE p.relation = $1 ORDER BY p.number DESC LIMIT 1",
    &[pg_sys::OIDOID],
);
static ADVANCE: Statement = Statement::new(
    c"INSERT INTO stint.projection_positions (relation, number, epoch, base, target_epoch, target, seq, behind)
      VALUES ($1, $2, $3, $4::pg_snapshot, $5, $6::pg_snapshot, $7, $8)",
    &[pg_sys::OIDOID, pg_sys::INT8OID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::INT8OID],
);
static TRIM: Statement =
    Statement::new(c"DELETE FROM stint.projection_positions p WHERE p.relation = $1 AND p.number < $2", &[pg_sys::OIDOID, pg_sys::INT8OID]);

/// What sees nothing.
const NOTHING: &str = "1:1:";

/// A table's position.
pub struct Position {
    /// What is done.
    pub extent: Extent,
    number: i64,
}

impl Position {
    fn of(rows: &Rows) -> Self {
        if rows.is_empty() {
            let extent = Extent { epoch: Some(0), base: Some(NOTHING.to_string()), ..Extent::default() };
            return Position { extent, number: 0 };
        }
        let extent =
            Extent { epoch: rows.get(0, 1), base: rows.get(0, 2), target_epoch: rows.get(0, 3), target: rows.get(0, 4), seq: rows.get(0, 5) };
        Position { extent, number: rows.must(0, 6) }
    }

    /// The table's position as it is now; the caller is the one who folds it.
    pub fn now(session: &Session, relation: pg_sys::Oid) -> Self {
        Position::of(&session.run_latest(&LAST, &[arg(relation)]))
    }

    /// The point before which everything is done.
    pub fn base(&self) -> Point {
        Point { epoch: self.extent.epoch.unwrap_or(0), snapshot: self.extent.base.clone().unwrap_or_else(|| NOTHING.to_string()) }
    }

    /// The point up to which the pass at hand goes, if one is.
    pub fn target(&self) -> Option<Point> {
        Some(Point { epoch: self.extent.target_epoch?, snapshot: self.extent.target.clone()? })
    }

    /// Up to `target` everything is done.
    pub fn finish(&self, session: &Session, relation: pg_sys::Oid, target: &Point) {
        self.advance(session, relation, target, None, 0, 0);
    }

    /// Of the pass to `target` everything up to `seq` is done, and `behind` events are left.
    pub fn go_on(&self, session: &Session, relation: pg_sys::Oid, target: &Point, seq: i64, behind: i64) {
        self.advance(session, relation, &self.base(), Some(target), seq, behind);
    }

    fn advance(&self, session: &Session, relation: pg_sys::Oid, base: &Point, target: Option<&Point>, seq: i64, behind: i64) {
        let params = [
            arg(relation),
            arg(self.number + 1),
            arg(base.epoch),
            arg(base.snapshot.as_str()),
            target.and_then(|point| arg(point.epoch)),
            target.and_then(|point| arg(point.snapshot.as_str())),
            arg(seq),
            arg(behind),
        ];
        session.run(&ADVANCE, &params);
        session.run(&TRIM, &[arg(relation), arg(self.number + 1)]);
    }
}

/// The extent of a table's fold at a moment.
pub fn at(session: &Session, moment: &Moment, relation: pg_sys::Oid) -> Extent {
    Position::of(&session.run_at(moment, &LAST, &[arg(relation)])).extent
}

/// The table holds what the record says at a point.
pub fn restart(session: &Session, relation: pg_sys::Oid, point: &Point) {
    Position::now(session, relation).finish(session, relation, point);
}
