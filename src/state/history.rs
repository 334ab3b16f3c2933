//! `stint.set_history`: how long a state table's changes are kept.

use super::rights;
use crate::changelog::{capture, retention};
use crate::errors;
use crate::relation::Relation;
use crate::spi::{Identity, Statement, arg, connect};
use crate::values::RawInterval;
use pgrx::prelude::*;

static SET: Statement = Statement::new(c"UPDATE stint.captures SET history = $2 WHERE relation = $1", &[pg_sys::OIDOID, pg_sys::INTERVALOID]);

/// `stint.set_history`.
#[pg_extern(sql = false)]
fn set_history(relation: Option<pg_sys::Oid>, history: Option<RawInterval>) {
    crate::shmem::required();
    let oid = relation.unwrap_or_else(|| errors::missing("relation", "Name the table, as in stint.set_history('shop.goods', '30 days')."));
    connect(|session| {
        let identity = Identity::owner();
        let relation = Relation::load_unfit(session, oid);
        rights::require_ownership(session, &relation, identity.caller());
        capture::required(session, identity.caller(), oid);
        let history = retention::positive(session, "history", history);
        session.run(&SET, &[arg(oid), history.and_then(arg)]);
    });
}
