//! Makes the tables of a leaf. Each is made by itself and then attached, which locks its parent for SHARE UPDATE EXCLUSIVE only: nobody who reads or writes history
//! waits. Two sessions that need the same leaf line up on that lock on `stint.task_facts`; the later one finds what the earlier one committed, or makes it.

use super::relation;
use crate::settings::Settings;
use crate::spi::Session;
use pgrx::prelude::*;
use stint_core::history::{Leaf, PARTS};

/// What each table of a leaf has beside what `LIKE` takes over from its parent: the key, which a table partitioned by an expression cannot have, and other indexes.
struct Own {
    key: &'static str,
    indexes: &'static [&'static str],
}

/// For each of [`PARTS`].
const OWN: [Own; 3] = [
    Own { key: "(queue, id)", indexes: &[] },
    // The first is read once after a start, to rebuild the budgets' windows; as small as an index on rows that come in the order of time can be. By the other, what
    // came is found that is not added up yet.
    Own { key: "(queue, id, attempt)", indexes: &["using brin (ended_at)", "(incarnation, xact)"] },
    // The same for tasks that finished otherwise than by an attempt that completed.
    Own { key: "(queue, id)", indexes: &["(incarnation, xact) where xact is not null"] },
];

/// Gives a table of a leaf its key and indexes.
pub fn index(session: &Session, part: &str, table: &str) {
    for (_, own) in PARTS.iter().zip(&OWN).filter(|(name, _)| **name == part) {
        session.execute_once(&format!("alter table stint.{table} add primary key {}", own.key));
        for index in own.indexes {
            session.execute_once(&format!("create index on stint.{table} {index}"));
        }
    }
}

/// Whether a query of this session is at work on the table, outside of us: then PostgreSQL lets nobody change it.
fn in_use(oid: pg_sys::Oid) -> bool {
    // SAFETY: the table is locked by this transaction; the reference is given back.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return false;
        }
        let used = (*relation).rd_refcnt > 1;
        pg_sys::RelationClose(relation);
        used
    }
}

/// Attaches a table to its parent, unless a query of this session reads that just now: the maintenance worker then does it a moment later, and until then views
/// do not show what is in it.
fn attach(session: &Session, parent: &str, child: &str, values: &str) {
    if relation(parent).is_some_and(|parent| !in_use(parent)) {
        session.execute_once(&format!("alter table stint.{parent} attach partition stint.{child} for values {values}"));
    }
}

/// The bounds of a leaf within its class.
pub fn range(leaf: Leaf) -> String {
    let (least, next) = leaf.bounds();
    format!("from ('{least}') to ('{next}')")
}

/// Makes what is missing of the tables of a leaf.
pub fn make(session: &Session, leaf: Leaf) {
    if let Some(root) = relation(PARTS[0]) {
        // SAFETY: an ordinary relation lock.
        unsafe { pg_sys::LockRelationOid(root, pg_sys::ShareUpdateExclusiveLock as i32) };
    }
    // Tables belong where those of an extension do, not where the caller's session makes its own.
    session.pin();
    let _settings = Settings::set(&[(c"default_tablespace", c"")]);
    for part in PARTS {
        let (class, table) = (format!("{part}_c{}", leaf.class), format!("{part}_{}", leaf.suffix()));
        if relation(&class).is_none() {
            session.execute_once(&format!("create table stint.{class} (like stint.{part} including all) partition by range (id)"));
            attach(session, part, &class, &format!("in ({})", leaf.class));
        }
        if relation(&table).is_none() {
            session.execute_once(&format!("create table stint.{table} (like stint.{part} including all) using heap"));
            index(session, part, &table);
            attach(session, &class, &table, &range(leaf));
        }
    }
}

/// Attaches a table that could not be when it was made; one whose name is none of ours is left alone.
pub fn attach_later(session: &Session, table: &str) {
    let Some(part) = PARTS.iter().find(|part| table.starts_with(&format!("{part}_c"))) else { return };
    let suffix = &table[part.len() + 1..];
    if let Some(leaf) = Leaf::parse(suffix) {
        attach(session, &format!("{part}_c{}", leaf.class), table, &range(leaf));
    } else if let Ok(class) = suffix[1..].parse::<u8>() {
        attach(session, part, table, &format!("in ({class})"));
    }
}
