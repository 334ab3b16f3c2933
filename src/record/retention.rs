//! How long events are kept, and the worker's step that lets older ones go.

use crate::changelog::retention::positive;
use crate::shmem;
use crate::spi::{Identity, Statement, arg, connect};
use crate::values::{Instant, RawInterval, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;

static SET: Statement = Statement::new(
    c"INSERT INTO stint.record_retention (keep) VALUES ($1) ON CONFLICT (one) DO UPDATE SET keep = excluded.keep",
    &[pg_sys::INTERVALOID],
);
static KEEP_ALL: Statement = Statement::new(c"DELETE FROM stint.record_retention", &[]);
/// Before which time events go; whether the oldest is past that by so much that it is worth the while, or is older at all ($1).
static DUE: Statement = Statement::new(
    c"SELECT now() - r.keep, coalesce((SELECT min(l.recorded_at) FROM stint.event_log l) < now() - r.keep * CASE WHEN $1 THEN 1 ELSE 1.125 END, false)
      FROM stint.record_retention r",
    &[pg_sys::BOOLOID],
);
// By the function as users call it, which has the settings that texts of values depend on.
static EXPIRE: Statement = Statement::new(c"SELECT stint.expire_record($1, $2)", &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID]);

/// Events that go at once: as many as are folded without holding up a table for long.
const AT_ONCE: i64 = 100_000;
/// How often the worker looks.
const EVERY: i64 = 10 * SECOND;

thread_local! {
    static NEXT: Cell<Instant> = const { Cell::new(Instant(0)) };
    /// Whether it has begun to let events go, and goes on until no older one is left.
    static AT_IT: Cell<bool> = const { Cell::new(false) };
}

/// Whether it is time again, or the worker is at it.
pub fn due() -> bool {
    Instant::now() >= NEXT.get()
}

/// For the maintenance worker: one bounded part. True if there is more.
pub fn step() -> bool {
    NEXT.set(Instant::now().plus(EVERY));
    connect(|session| {
        let due = session.run(&DUE, &[arg(AT_IT.get())]);
        if due.is_empty() {
            return false;
        }
        let removed = if due.must(0, 2) { session.run(&EXPIRE, &[arg(due.must::<Instant>(0, 1)), arg(AT_ONCE)]).must::<i64>(0, 1) } else { 0 };
        AT_IT.set(removed == AT_ONCE);
        if AT_IT.get() {
            NEXT.set(Instant(0));
        }
        AT_IT.get()
    })
}

#[pg_extern(sql = false)]
fn set_record_retention(keep: Option<RawInterval>) {
    shmem::required();
    let _owner = Identity::owner();
    connect(|session| {
        match positive(session, "keep", keep) {
            Some(keep) => session.run(&SET, &[arg(keep)]),
            None => session.run(&KEEP_ALL, &[]),
        };
    });
}
