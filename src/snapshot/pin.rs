//! `stint.pin`: keeps the calling transaction's snapshot.

use crate::changelog::seen;
use crate::input;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;

static PIN: Statement = Statement::new(
    c"INSERT INTO stint.pins (epoch, snapshot, comment) VALUES ($1, $2::pg_snapshot, $3) RETURNING pin",
    &[pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// Pins what the transaction sees. Runs with the rights of the extension's owner.
pub fn make(session: &Session, comment: Option<&str>) -> i64 {
    let (epoch, snapshot) = seen::by_transaction(session, "pin");
    session.run(&PIN, &[arg(epoch), arg(snapshot), comment.and_then(arg)]).must(0, 1)
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
