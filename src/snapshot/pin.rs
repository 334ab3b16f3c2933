//! `stint.pin`: keeps the calling transaction's snapshot.

use crate::changelog::seen;
use crate::input;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;

/// Numbers above `high` are drawn from now on, by transactions that the snapshot, which is older, does not see.
static PIN: Statement = Statement::new(
    c"INSERT INTO stint.pins (epoch, snapshot, comment, pos, high) SELECT $1, $2::pg_snapshot, $3, $4, q.last_value FROM stint.change_seq q RETURNING pin",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// Pins what the transaction sees. Runs with the rights of the extension's owner.
pub fn make(session: &Session, comment: Option<&str>) -> i64 {
    let now = seen::by_transaction(session, "pin");
    session.run(&PIN, &[arg(now.epoch), arg(now.snapshot), comment.and_then(arg), arg(now.pos)]).must(0, 1)
}

/// `stint.pin`.
#[pg_extern(sql = false)]
fn pin(comment: Option<&str>) -> i64 {
    crate::shmem::required();
    let comment = input::text("comment", comment);
    connect(|session| {
        let _owner = Identity::owner();
        make(session, comment)
    })
}
