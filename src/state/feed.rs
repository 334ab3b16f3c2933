//! One feed for each state table: what `merge` writes, or the record through projections. Whether a table has projections is asked here, since merges must know;
//! what projections are is the record's.

use crate::errors::Fault;
use crate::relation::Relation;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;

static NAMES_OF: Statement =
    Statement::new(c"SELECT c.name::text FROM stint.projection_config c WHERE c.relation = $1 ORDER BY c.name", &[pg_sys::OIDOID]);

/// The names of a table's projections.
pub fn names_of(session: &Session, relation: pg_sys::Oid) -> Vec<String> {
    let rows = session.run_latest(&NAMES_OF, &[arg(relation)]);
    (0..rows.len()).map(|row| rows.must(row, 1)).collect()
}

/// Refuses another feed, or the end of the declaration, for a table that has projections.
pub fn refuse_projected(relation: &Relation, projections: &[String], what: &str, hint: &str) {
    if projections.is_empty() {
        return;
    }
    Fault::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot {what} {}: it is projected from the record", relation.qualified),
    )
    .detail(format!("Its projections are {}.", projections.join(", ")))
    .hint(hint)
    .raise();
}
