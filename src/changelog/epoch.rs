//! Epochs: transaction ids, leases and schedules mean something in the database they were given out in. A restored or cloned database has those of another one,
//! so nothing is claimed, swept, fired, captured, ticked or pinned there until `stint.activate()` closes that epoch and opens its own; what there is stays readable.

use super::feed;
use crate::accounting::roll_up;
use crate::errors::Fault;
use crate::input;
use crate::object_lock::{self, Lock};
use crate::shmem::{self, Instance, config, heads};
use crate::snapshot::as_of;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;
use std::cell::Cell;

static CURRENT: Statement =
    Statement::new(c"SELECT m.epoch, m.database = $1 AND m.system_identifier = $2 FROM stint.meta m", &[pg_sys::OIDOID, pg_sys::INT8OID]);
static OPEN_FIRST: Statement = Statement::new(
    c"INSERT INTO stint.meta (epoch, system_identifier, database) VALUES (1, $2, $1) ON CONFLICT DO NOTHING",
    &[pg_sys::OIDOID, pg_sys::INT8OID],
);

/// The last tick of an epoch, which sees every row it has: nobody adds one any more.
static CLOSE: Statement = Statement::new(
    c"INSERT INTO stint.ticks (epoch, number, snapshot, end_pos, relations, first_seq, last_seq, high)
      SELECT c.epoch, c.number + 1, format('%s:%s:', c.xid, c.xid)::pg_snapshot, c.end_pos + c.changes, c.relations, c.first_seq, c.last_seq, c.last_seq
      FROM (SELECT m.epoch, coalesce(p.number, 0) AS number, count(*) AS changes, min(l.seq) AS first_seq, max(l.seq) AS last_seq, array_agg(DISTINCT l.relation::oid)::regclass[] AS relations,
                   coalesce((SELECT max(e.end_pos) FROM stint.ticks e), 0) AS end_pos,
                   greatest(max(l.xid::text::numeric) + 1, pg_snapshot_xmax(p.snapshot::pg_snapshot)::text::numeric) AS xid
            FROM stint.meta m
            LEFT JOIN LATERAL (SELECT t.number, t.snapshot::text FROM stint.ticks t WHERE t.epoch = m.epoch ORDER BY t.number DESC LIMIT 1) p ON true
            JOIN stint.change_log l ON l.epoch = m.epoch AND NOT pg_visible_in_snapshot(l.xid, coalesce(p.snapshot, '1:1:')::pg_snapshot)
            GROUP BY m.epoch, p.number, p.snapshot) c",
    &[],
);
static OPEN_NEXT: Statement = Statement::new(
    c"UPDATE stint.meta SET epoch = epoch + 1, database = $1, system_identifier = $2, since = clock_timestamp() RETURNING epoch",
    &[pg_sys::OIDOID, pg_sys::INT8OID],
);

/// Ends the leases that another database gave: their names match nothing any more, and the next sweep takes the tasks back.
static END_LEASES: Statement =
    Statement::new(c"UPDATE stint.place_running SET lease = gen_random_uuid(), expires_at = clock_timestamp(), extended_until = NULL", &[]);

thread_local! {
    /// The instance this backend has found to be in its own database, and the configuration's generation then.
    static OWN: Cell<Option<(Instance, u64)>> = const { Cell::new(None) };
}

fn here() -> [crate::spi::Param; 2] {
    // SAFETY: constants of this backend and its cluster.
    unsafe { [arg(pg_sys::MyDatabaseId), arg(pg_sys::GetSystemIdentifier() as i64)] }
}

/// The epoch, and whether it is this database's own; `None` before the first queue and the first state table.
pub fn current(session: &Session) -> Option<(i32, bool)> {
    let rows = session.run(&CURRENT, &here());
    (!rows.is_empty()).then(|| (rows.must(0, 1), rows.must(0, 2)))
}

/// The epoch of this database, opened if there was none; an error in a copy of another database.
pub fn required(session: &Session) -> i32 {
    if current(session).is_none() {
        session.run(&OPEN_FIRST, &here());
    }
    match current(session) {
        Some((epoch, true)) => epoch,
        _ => refuse_copy(),
    }
}

/// Whether what there is here was made here, or there is nothing yet.
pub fn own(session: &Session) -> bool {
    let seen = (Instance::here(), config::generation(shmem::required()));
    if OWN.get() == Some(seen) {
        return true;
    }
    let found = current(session);
    if matches!(found, Some((_, true))) {
        OWN.set(Some(seen));
    }
    found.is_none_or(|(_, own)| own)
}

/// An error in a copy of another database.
pub fn refuse_in_copy(session: &Session) {
    if !own(session) {
        refuse_copy()
    }
}

fn refuse_copy() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "this database is a copy of another one, whose tasks and state it holds")
        .detail("Its leases, its schedules and the transaction ids in its changelog belong to the other one.")
        .hint("Run SELECT stint.activate() if this database is to be worked in.")
        .raise()
}

/// `stint.activate`.
#[pg_extern(sql = false)]
fn activate(keep_leases: Option<bool>) -> i32 {
    shmem::required();
    let keep_leases = input::given("keep_leases", keep_leases);
    connect(|session| {
        let _owner = Identity::owner();
        object_lock::take(Lock::Ticks, false);
        roll_up::activate(session);
        match current(session) {
            Some((_, false)) => {
                session.run(&CLOSE, &[]);
                feed::close(session);
                if !keep_leases {
                    session.run(&END_LEASES, &[]);
                }
                heads::rescan(Instance::here(), true);
                config::changed();
                let opened = session.run(&OPEN_NEXT, &here()).must(0, 1);
                as_of::refresh_all(session);
                opened
            }
            _ => required(session),
        }
    })
}
