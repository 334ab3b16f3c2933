//! What watches did: a row for each task made or missed, trimmed by the maintenance worker.

use crate::changelog::epoch;
use crate::shmem;
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;

static ADD: Statement = Statement::new(
    c"INSERT INTO stint.watch_log (watch, seq, key, fired_at, queue_was, id, error) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID],
);

/// All but the newest rows of each watch, which are counted with it.
static TRIM: Statement = Statement::new(
    c"WITH gone AS (
          DELETE FROM stint.watch_log l
          USING (SELECT w.watch, (SELECT m.seq FROM stint.watch_log m WHERE m.watch = w.watch ORDER BY m.seq DESC OFFSET 1000 LIMIT 1) AS seq
                 FROM stint.watch_config w) o
          WHERE l.watch = o.watch AND l.seq <= o.seq
          RETURNING l.watch, l.id
      ), counted AS (
          UPDATE stint.watch_config c
          SET fired_before = c.fired_before + g.fired, failed_before = c.failed_before + g.failed
          FROM (SELECT watch, count(id) AS fired, count(*) - count(id) AS failed FROM gone GROUP BY watch) g
          WHERE c.watch = g.watch
      )
      SELECT count(*) FROM gone",
    &[],
);

/// A table dropped without drop_state leaves its watches behind, and its oid may come back.
static FORGET_DROPPED: [Statement; 3] = [
    Statement::new(
        c"DELETE FROM stint.watch_log l USING stint.watch_config c WHERE l.watch = c.watch AND NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)",
        &[],
    ),
    Statement::new(
        c"DELETE FROM stint.watch_disarmed d USING stint.watch_config c WHERE d.watch = c.watch AND NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)",
        &[],
    ),
    Statement::new(c"DELETE FROM stint.watch_config c WHERE NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)", &[]),
];

/// One row of the log.
pub struct Entry<'a> {
    /// The watch.
    pub watch: &'a str,
    /// The change's number.
    pub seq: i64,
    /// The row's key.
    pub key: Option<&'a str>,
    /// The queue.
    pub queue: &'a str,
    /// The task it made, or why it made none.
    pub came: Result<pgrx::Uuid, &'a str>,
}

/// Writes it.
pub fn add(session: &Session, entry: &Entry<'_>, now: Instant) {
    let (id, error) = (entry.came.ok(), entry.came.err());
    session.run(&ADD, &[arg(entry.watch), arg(entry.seq), arg(entry.key), arg(now), arg(entry.queue), arg(id), arg(error)]);
}

/// Forgets the watches of tables that are gone.
pub fn forget_dropped(session: &Session) -> usize {
    FORGET_DROPPED.iter().map(|statement| session.run(statement, &[]).len()).sum()
}

fn trim(session: &Session) -> i64 {
    let forgotten = i64::try_from(forget_dropped(session)).unwrap_or(i64::MAX);
    session.run(&TRIM, &[]).must::<i64>(0, 1) + forgotten
}

/// `stint.trim_watches`.
#[pg_extern(sql = false)]
fn trim_watches() -> i64 {
    shmem::required();
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        epoch::refuse_in_copy(session);
        trim(session)
    })
}

/// How often the maintenance worker trims.
const TRIM_EVERY: i64 = 60 * SECOND;

thread_local! {
    static NEXT: Cell<Instant> = const { Cell::new(Instant(0)) };
}

/// Whether it is time again to trim.
pub fn due() -> bool {
    Instant::now() >= NEXT.get()
}

/// For the maintenance worker.
pub fn step() -> bool {
    NEXT.set(Instant::now().plus(TRIM_EVERY));
    spi::connect(trim);
    false
}
