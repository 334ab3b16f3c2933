//! Ticks: the moment at which committed changes get their positions.
//!
//! The tick lock is taken first and the snapshot then, so each tick's snapshot includes the one before. The transaction has no id of its own when the snapshot
//! is taken: its own id would count as ended in it.

use super::{epoch, feed};
use crate::direct;
use crate::object_lock::{self, Lock};
use crate::shmem::waiters;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;

static PREVIOUS: Statement = Statement::new(
    c"SELECT m.epoch,
             coalesce(t.snapshot, '1:1:')::text,
             coalesce((SELECT max(e.end_pos) FROM stint.ticks e), 0),
             coalesce((SELECT max(n.number) FROM stint.ticks n WHERE n.epoch = m.epoch), 0)
      FROM stint.meta m
      LEFT JOIN LATERAL (SELECT p.snapshot FROM stint.ticks p WHERE p.epoch = m.epoch ORDER BY p.number DESC LIMIT 1) t ON true",
    &[],
);

/// What this statement's own snapshot sees and the previous tick's did not: transactions that were running then, and later ones. The upper bound is true for
/// every visible row; it tells the planner that the range is narrow.
static CHANGED: Statement = Statement::new(
    c"SELECT pg_current_snapshot()::text, count(*), coalesce(array_agg(DISTINCT c.relation), '{}')::oid[], min(c.seq), max(c.seq)
      FROM (SELECT l.relation, l.seq FROM stint.change_log l
            WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2::pg_snapshot) AND l.xid < pg_snapshot_xmax(pg_current_snapshot())
            UNION ALL
            SELECT r.relation, r.seq
            FROM pg_snapshot_xip($2::pg_snapshot) x,
                 LATERAL (SELECT l.relation, l.seq FROM stint.change_log l WHERE l.epoch = $1 AND l.xid = x OFFSET 0) r) c",
    &[pg_sys::INT4OID, pg_sys::TEXTOID],
);
/// Numbers above `high` are drawn from now on, by transactions that the snapshot, which is older, does not see.
static TICK: Statement = Statement::new(
    c"INSERT INTO stint.ticks (epoch, number, snapshot, end_pos, relations, first_seq, last_seq, high)
      SELECT $1, $2, $3::pg_snapshot, $4, $5, $6, $7, q.last_value FROM stint.change_seq q",
    &[pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::OIDARRAYOID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// Whether there may be changes to give positions to.
pub fn due() -> bool {
    direct::has_pages(c"change_log")
}

/// Makes a tick if something was committed since the last. For the worker, inside a transaction of its own that has written nothing. Answers false, since one
/// tick takes everything there is. Does not wait: where another session holds the tick lock, that one ticks.
pub fn step() -> bool {
    object_lock::refuse_written("tick", "stint.tick()");
    connect(|session| {
        let _owner = Identity::owner();
        if epoch::current(session).is_some() && object_lock::take(Lock::Ticks, true) {
            advance(session);
        }
    });
    false
}

/// `stint.tick()`.
#[pg_extern(sql = false)]
fn tick() -> i64 {
    crate::shmem::required();
    object_lock::refuse_written("tick", "stint.tick()");
    connect(|session| {
        let _owner = Identity::owner();
        epoch::refuse_in_copy(session);
        object_lock::take(Lock::Ticks, false);
        let snapshot = feed::snapshot(session);
        let end = advance(session);
        feed::advance(session, &snapshot);
        end
    })
}

/// Makes a tick if there is something to give positions to, and answers the last position. The tick lock is held.
fn advance(session: &Session) -> i64 {
    let previous = session.run(&PREVIOUS, &[]);
    if previous.is_empty() {
        return 0; // no state table was ever declared
    }
    let (epoch, before, end, number): (i32, String, i64, i64) = (previous.must(0, 1), previous.must(0, 2), previous.must(0, 3), previous.must(0, 4));
    let changed = session.run(&CHANGED, &[arg(epoch), arg(before)]);
    let count: i64 = changed.must(0, 2);
    if count == 0 {
        return end;
    }
    let snapshot: String = changed.must(0, 1);
    let span = [changed.lift(0, 4), changed.lift(0, 5)];
    session.run(&TICK, &[arg(epoch), arg(number + 1), arg(snapshot), arg(end + count), changed.lift(0, 3), span[0], span[1]]);
    waiters::ticked();
    end + count
}
