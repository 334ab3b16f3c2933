//! Which event of the record a change comes from. A write that folds events into a state table says so for as long as it runs, and the capture triggers look
//! the causes up by key; nobody else pays for it.

use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

/// What causes the changes of one table's keys, keys written as [`super::images::key_sql`] writes them.
struct Causes {
    relation: pg_sys::Oid,
    keys: Vec<String>,
    events: Vec<i64>,
}

thread_local! {
    /// The innermost last: a state table's own trigger may write to another one.
    static SET: RefCell<Vec<Causes>> = const { RefCell::new(Vec::new()) };
}

/// Takes the innermost causes away again, also when an error unwinds.
struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        SET.with_borrow_mut(|set| set.pop());
    }
}

/// Runs `work`; what it changes in `relation` is caused, key by key, by the events given. Of two events for one key the later in the list counts.
#[allow(dead_code)] // called by the writers of projections
pub fn during<R>(relation: pg_sys::Oid, causes: Vec<(String, i64)>, work: impl FnOnce() -> R) -> R {
    let (keys, events) = causes.into_iter().collect::<HashMap<String, i64>>().into_iter().unzip();
    SET.with_borrow_mut(|set| set.push(Causes { relation, keys, events }));
    let _guard = Guard;
    work()
}

/// The causes in force for changes of a table: keys and their events.
pub fn of(relation: pg_sys::Oid) -> Option<(Vec<String>, Vec<i64>)> {
    SET.with_borrow(|set| set.iter().rev().find(|causes| causes.relation == relation).map(|causes| (causes.keys.clone(), causes.events.clone())))
}
