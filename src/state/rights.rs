//! What a caller may do with a state table: the ordinary grants on it decide.

use crate::errors::Fault;
use crate::relation::Relation;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;

static OWNS: Statement = Statement::new(c"SELECT pg_has_role($1, $2, 'USAGE')", &[pg_sys::OIDOID, pg_sys::OIDOID]);

/// Refuses a caller without one of the rights on the table, naming the right.
pub fn require(relation: &Relation, caller: pg_sys::Oid, rights: &[(u32, &str)]) {
    for (right, word) in rights {
        // SAFETY: a look-up in the system caches.
        let answer = unsafe { pg_sys::pg_class_aclcheck(relation.oid, caller, *right) };
        if answer != pg_sys::AclResult::ACLCHECK_OK {
            Fault::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, format!("permission denied: {word} on {} is missing", relation.qualified))
                .hint(format!("Let its owner run GRANT {word} ON {} TO the role that merges.", relation.qualified))
                .raise();
        }
    }
}

/// Refuses a caller who does not own the table.
pub fn require_ownership(session: &Session, relation: &Relation, caller: pg_sys::Oid) {
    if !session.run(&OWNS, &[arg(caller), arg(relation.owner)]).must::<bool>(0, 1) {
        Fault::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, format!("must be owner of table {}", relation.qualified))
            .hint("Run it as the table's owner.")
            .raise();
    }
}
