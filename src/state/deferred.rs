//! What a table defers to the commit. A merge runs as the table's owner in a restricted context, which PostgreSQL lets leave no check for later: the commit would run
//! it with other rights. So the table's deferrable constraints are IMMEDIATE while something is written for its owner.

use crate::errors::Fault;
use crate::relation::Relation;
use crate::spi::{Identity, Session, Statement, arg};
use pgrx::prelude::*;

/// Whether a table or a partition of it has deferrable constraints, constraint triggers and foreign keys that refer to it included.
static ANY: Statement = Statement::new(
    c"SELECT EXISTS (SELECT FROM (SELECT $1 UNION SELECT p.relid FROM pg_partition_tree($1) p) m (relid) JOIN pg_trigger t ON t.tgrelid = m.relid
                     WHERE t.tgdeferrable)",
    &[pg_sys::OIDOID],
);

/// These constraints, those to be deferred again, and one of the same name that is not of the table: SET CONSTRAINTS knows constraints by schema and name alone.
static NAMES: Statement = Statement::new(
    c"WITH RECURSIVE own (oid) AS (
          SELECT t.tgconstraint FROM (SELECT $1 UNION SELECT p.relid FROM pg_partition_tree($1) p) m (relid) JOIN pg_trigger t ON t.tgrelid = m.relid
          WHERE t.tgdeferrable
          UNION SELECT c.oid FROM own o JOIN pg_constraint c ON c.conparentid = o.oid),
      named AS (
          SELECT c.connamespace, c.conname, bool_or(c.condeferred) AS deferred, format('%I.%I', n.nspname, c.conname) AS name
          FROM own o JOIN pg_constraint c ON c.oid = o.oid JOIN pg_namespace n ON n.oid = c.connamespace
          WHERE c.condeferrable GROUP BY c.connamespace, c.conname, n.nspname)
      SELECT string_agg(n.name, ', ' ORDER BY n.name), string_agg(n.name, ', ' ORDER BY n.name) FILTER (WHERE n.deferred),
             (SELECT format('%s of %s', s.name, c.conrelid::regclass) FROM named s JOIN pg_constraint c ON c.connamespace = s.connamespace AND c.conname = s.conname
              WHERE c.oid NOT IN (SELECT o.oid FROM own o) ORDER BY 1 LIMIT 1)
      FROM named n",
    &[pg_sys::OIDOID],
);

/// Whether [`checked_at_once`] has anything to do.
pub fn any(session: &Session, relation: pg_sys::Oid) -> bool {
    session.run(&ANY, &[arg(relation)]).must(0, 1)
}

/// Runs `work` as the owner of the table, whose deferrable constraints are checked by each statement. Afterwards those that are declared INITIALLY DEFERRED are
/// deferred again; what the transaction had set cannot be asked for.
pub fn checked_at_once<R>(session: &Session, relation: &Relation, work: impl FnOnce() -> R) -> R {
    // Tables may have come since the transaction's snapshot and been written in it.
    let found = session.run_latest(&NAMES, &[arg(relation.oid)]);
    let (names, again): (Option<String>, Option<String>) = (found.get(0, 1), found.get(0, 2));
    if let Some(other) = found.get::<String>(0, 3) {
        // It would be set as well, and what it has put off would run with the rights of this table's owner.
        Fault::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("cannot write {}: it has a deferrable constraint with the name of another table's", relation.qualified),
        )
        .detail(format!("The other is {other}; SET CONSTRAINTS would set both."))
        .hint("Rename one of them, or declare the constraint NOT DEFERRABLE.")
        .raise();
    }
    let _restricted = Identity::restricted(relation.owner);
    if let Some(names) = names {
        session.execute_once(&format!("SET CONSTRAINTS {names} IMMEDIATE"));
    }
    let result = work();
    if let Some(again) = again {
        session.execute_once(&format!("SET CONSTRAINTS {again} DEFERRED"));
    }
    result
}
