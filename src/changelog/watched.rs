//! Which tables have watches, and which of them the transaction has changed: all that capturing knows of watches. What becomes of it at commit is in `crate::watch`.

use crate::relation;
use crate::spi::{Session, Statement, arg};
use crate::xact::Pending;
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

static WATCHED: Statement = Statement::new(c"SELECT EXISTS (SELECT FROM stint.watch_config w WHERE w.relation = $1)", &[pg_sys::OIDOID]);
static FORGET: [Statement; 3] = [
    Statement::new(c"DELETE FROM stint.watch_log l USING stint.watch_config c WHERE l.watch = c.watch AND c.relation = $1", &[pg_sys::OIDOID]),
    Statement::new(c"DELETE FROM stint.watch_disarmed d USING stint.watch_config c WHERE d.watch = c.watch AND c.relation = $1", &[pg_sys::OIDOID]),
    Statement::new(c"DELETE FROM stint.watch_config c WHERE c.relation = $1", &[pg_sys::OIDOID]),
];

thread_local! {
    /// Watched tables that the transaction has changed.
    pub static PENDING: Pending<pg_sys::Oid> = const { Pending::new() };
    /// Captured tables this backend met, and whether they have watches.
    static KNOWN: RefCell<HashMap<pg_sys::Oid, bool>> = RefCell::new(HashMap::new());
    static VERSION: Cell<u64> = const { Cell::new(0) };
    static LISTENING: Cell<bool> = const { Cell::new(false) };
}

/// Notes that a table has changed, for the end of the transaction. Runs with the rights of the extension's owner. The answer for a table without watches is kept
/// until PostgreSQL tells that the table changed: a watch is declared under a lock that keeps writers out.
pub fn note(session: &Session, relation: pg_sys::Oid) {
    listen();
    let watched = KNOWN.with_borrow(|known| known.get(&relation).copied()).unwrap_or_else(|| {
        let version = VERSION.get();
        let watched = session.run(&WATCHED, &[arg(relation)]).must(0, 1);
        if VERSION.get() == version {
            KNOWN.with_borrow_mut(|known| known.insert(relation, watched));
        }
        watched
    });
    if watched {
        note_watched(relation);
    }
}

/// Notes that a watched table is to be looked at when the transaction ends.
pub fn note_watched(relation: pg_sys::Oid) {
    PENDING.with(|pending| {
        if !pending.any(|noted| *noted == relation) {
            pending.push(relation);
        }
    });
}

/// Removes the watches of a table that is no state table any more.
pub fn forget(session: &Session, relation: pg_sys::Oid) {
    for statement in &FORGET {
        session.run(statement, &[arg(relation)]);
    }
}

/// A number that grows when what is known of the tables met here may have become stale.
pub fn version() -> u64 {
    VERSION.get()
}

/// Has [`version`] grow from now on when this table changes: for who is about to read and keep what it has.
pub fn meet(relation: pg_sys::Oid) {
    listen();
    KNOWN.with_borrow_mut(|known| known.insert(relation, true));
}

/// Registers the callbacks once per backend.
fn listen() {
    if LISTENING.get() {
        return;
    }
    relation::on_change(Some(relation_changed), Some(schema_changed));
    LISTENING.set(true);
}

#[pg_guard]
unsafe extern "C-unwind" fn relation_changed(_arg: pg_sys::Datum, oid: pg_sys::Oid) {
    // Nothing here holds the map while PostgreSQL could call.
    let met = KNOWN.with_borrow_mut(|known| {
        if oid == pg_sys::InvalidOid {
            known.clear();
            return true;
        }
        known.remove(&oid).is_some()
    });
    if met {
        VERSION.set(VERSION.get() + 1);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn schema_changed(_arg: pg_sys::Datum, _cache: i32, _hash: u32) {
    VERSION.set(VERSION.get() + 1);
}
