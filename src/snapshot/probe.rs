//! The first change of a key after a point: one look into the index, whatever the number of changes before and after.
//!
//! Per key, numbers rise in commit order, so of a key's changes in one epoch those that a point sees come first. Numbers above the point's `high` are not seen;
//! what remains are changes of one transaction that ran when the point was made, among which halving finds the first.

use super::layout::{Image, Layouts};
use super::point::xid;
use crate::spi::{Rows, Session, Statement, arg};
use pgrx::prelude::*;
use stint_core::snapshot::Point;

const KEYED: &[pg_sys::Oid] = &[pg_sys::OIDOID, pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::INT8OID];

static LOG_ABOVE: Statement = Statement::new(
    c"SELECT l.epoch, l.xid, l.seq, l.layout, l.before FROM stint.change_log l
      WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended($2 COLLATE \"C\", 0) AND l.key = $2 AND (l.epoch, l.seq) > ($3, $4)
      ORDER BY l.epoch, l.seq LIMIT 1",
    KEYED,
);
static LOG_BELOW: Statement = Statement::new(
    c"SELECT l.epoch, l.xid, l.seq, l.layout, l.before FROM stint.change_log l
      WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended($2 COLLATE \"C\", 0) AND l.key = $2 AND l.epoch = $3 AND l.seq <= $4
      ORDER BY l.seq DESC LIMIT 1",
    KEYED,
);
static KEPT_ABOVE: Statement = Statement::new(
    c"SELECT l.epoch, l.xid, l.seq, l.layout, l.before FROM stint.kept_images l
      WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended($2 COLLATE \"C\", 0) AND l.key = $2 AND (l.epoch, l.seq) > ($3, $4)
      ORDER BY l.epoch, l.seq LIMIT 1",
    KEYED,
);
static KEPT_BELOW: Statement = Statement::new(
    c"SELECT l.epoch, l.xid, l.seq, l.layout, l.before FROM stint.kept_images l
      WHERE l.relation = $1 AND hashtextextended(l.key, 0) = hashtextextended($2 COLLATE \"C\", 0) AND l.key = $2 AND l.epoch = $3 AND l.seq <= $4
      ORDER BY l.seq DESC LIMIT 1",
    KEYED,
);
static ANY_KEPT: Statement = Statement::new(c"SELECT EXISTS (SELECT FROM stint.kept_images k WHERE k.relation = $1)", &[pg_sys::OIDOID]);

/// Hashes of the keys that changed after a point (epoch $2, snapshot $3 and its limits $4 and $5), at most $6 and one. The upper limit is true for every
/// transaction; with it the planner takes the range for a narrow one, and so the index.
static CHANGED: Statement = Statement::new(
    c"SELECT c.hash
      FROM (SELECT hashtextextended(l.key, 0) AS hash FROM stint.change_log l
            WHERE l.relation = $1 AND l.epoch = $2 AND l.xid >= $3::xid8 AND l.xid < '9223372036854775807'
            UNION ALL
            SELECT hashtextextended(l.key, 0) FROM stint.change_log l WHERE l.relation = $1 AND l.epoch > $2
            UNION ALL
            SELECT hashtextextended(k.key, 0) FROM stint.kept_images k WHERE k.relation = $1) c
      LIMIT $4 + 1",
    &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

mod raw {
    unsafe extern "C" {
        // Not in pgrx's bindings. It raises nothing.
        pub fn hash_bytes_extended(key: *const u8, length: std::os::raw::c_int, seed: u64) -> u64;
    }
}

/// As hashtextextended of a text with a deterministic collation.
fn hash(key: &str) -> i64 {
    let length = i32::try_from(key.len()).unwrap_or(i32::MAX);
    // SAFETY: reads that many bytes of the key.
    unsafe { raw::hash_bytes_extended(key.as_ptr(), length, 0) as i64 }
}

struct Found {
    rows: Rows,
    epoch: i32,
    xid: u64,
    seq: i64,
}

impl Found {
    fn of(rows: Rows) -> Option<Self> {
        (!rows.is_empty()).then(|| Found { epoch: rows.must(0, 1), xid: xid(&rows, 0, 2), seq: rows.must(0, 3), rows })
    }

    fn follows(&self, point: &Point) -> bool {
        point.precedes(self.epoch, self.xid, self.seq)
    }
}

/// The first change of a key after a point.
pub struct Change {
    /// Its epoch and number.
    pub number: (i32, i64),
    /// The row before it, in today's order of columns and as it was at the point; `None` where it was not there.
    pub before: Option<Image>,
}

/// Looks keys of one table up at one point, with the snapshot of the calling query.
pub struct Probe {
    relation: pg_sys::Oid,
    point: Point,
    layouts: Layouts,
    /// The places of the columns that were not there yet at the point.
    absent: Vec<usize>,
    /// Whether images of the table were kept when changes went.
    kept: bool,
    /// Keys looked up so far, and how many of them make it worth while to read which keys changed at all.
    asked: usize,
    next_look: usize,
    changed: Option<std::collections::HashSet<i64>>,
}

impl Probe {
    /// For a table and a point of it.
    pub fn new(session: &Session, relation: pg_sys::Oid, point: Point) -> Self {
        let kept = session.read(&ANY_KEPT, &[arg(relation)]).must(0, 1);
        let layouts = Layouts::new(session, relation);
        let absent = layouts.absent_at(&point);
        Probe { relation, point, layouts, absent, kept, asked: 0, next_look: 4096, changed: None }
    }

    /// The key's first change after the point; `None` where it did not change.
    pub fn first_change(&mut self, session: &Session, key: &str) -> Option<Change> {
        if !self.may_have_changed(session, key) {
            return None;
        }
        // What was kept is older than what is still in the log.
        let kept = if self.kept { self.first(session, &KEPT_ABOVE, &KEPT_BELOW, key) } else { None };
        let found = kept.or_else(|| self.first(session, &LOG_ABOVE, &LOG_BELOW, key))?;
        let image: Option<Image> = found.rows.get(0, 5);
        let before = image.map(|image| {
            let image = self.layouts.today(session, image, found.rows.must(0, 4), found.epoch);
            self.without_absent(image)
        });
        Some(Change { number: (found.epoch, found.seq), before })
    }

    /// The places of the columns that were not there yet at the point.
    pub fn absent(&self) -> &[usize] {
        &self.absent
    }

    /// An image as it was at the point: null in columns that were not there yet.
    pub fn without_absent(&self, mut image: Image) -> Image {
        for place in &self.absent {
            if let Some(value) = image.get_mut(*place) {
                *value = None;
            }
        }
        image
    }

    fn first(&self, session: &Session, above: &'static Statement, below: &'static Statement, key: &str) -> Option<Found> {
        let point = &self.point;
        let look = |statement, seq: i64| Found::of(session.read(statement, &[arg(self.relation), arg(key), arg(point.epoch), arg(seq)]));
        let Some(mut first) = look(below, point.high).filter(|found| found.follows(point)) else {
            return look(above, point.high);
        };
        // No change up to `seen` follows the point, and `first` is the next one after `until`.
        let (mut seen, mut until) = (0, first.seq - 1);
        while seen < until {
            let middle = seen + (until - seen) / 2;
            match look(above, middle) {
                Some(found) if found.follows(point) => (first, until) = (found, middle),
                Some(found) => seen = found.seq,
                None => break,
            }
        }
        Some(first)
    }

    /// False only for a key without a change after the point. Whoever reads many rows first learns which keys changed, if those are not too many.
    fn may_have_changed(&mut self, session: &Session, key: &str) -> bool {
        const PER_KEY_ASKED: usize = 32;
        self.asked += 1;
        if self.asked == self.next_look && self.changed.is_none() {
            self.next_look = self.next_look.saturating_mul(16);
            let most = self.asked.saturating_mul(PER_KEY_ASKED).min(4_000_000);
            let oldest = self.point.oldest_unseen().to_string();
            let rows = session.read(&CHANGED, &[arg(self.relation), arg(self.point.epoch), arg(oldest), arg(most as i64)]);
            if rows.len() <= most {
                self.changed = Some((0..rows.len()).map(|row| rows.must(row, 1)).collect());
            }
        }
        match &self.changed {
            Some(changed) => changed.contains(&hash(key)),
            None => true,
        }
    }
}
