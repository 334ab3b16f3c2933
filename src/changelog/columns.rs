//! Since when each column of a captured table is there. PostgreSQL fills a new column in all rows with its default, which no change tells; a read as of a point
//! before it came must not show that. What an image calls its columns is another thing: see `stint.image_layouts`.
//!
//! Columns are told apart by number, which a rename leaves alone, and remembered by name, which a dump carries over.

use super::epoch;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;

static FORGET: Statement = Statement::new(c"DELETE FROM stint.captured_columns WHERE relation = $1", &[pg_sys::OIDOID]);
/// Earlier points than the declaration cannot be read, so its columns were always there.
static DECLARE: Statement = Statement::new(
    c"INSERT INTO stint.captured_columns (relation, name, attnum, epoch, xid, seq)
      SELECT c.relation, a.attname, a.attnum, c.epoch, c.xid, 0
      FROM stint.captures c JOIN pg_attribute a ON a.attrelid = c.relation AND a.attnum > 0 AND NOT a.attisdropped WHERE c.relation = $1",
    &[pg_sys::OIDOID],
);
static DROPPED: Statement = Statement::new(
    c"DELETE FROM stint.captured_columns k
      WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = k.relation AND a.attnum = k.attnum AND NOT a.attisdropped)",
    &[],
);
static RENAMED: Statement = Statement::new(
    c"UPDATE stint.captured_columns k SET name = a.attname
      FROM pg_attribute a WHERE a.attrelid = k.relation AND a.attnum = k.attnum AND k.name <> a.attname",
    &[],
);
static CAME: Statement = Statement::new(
    c"INSERT INTO stint.captured_columns (relation, name, attnum, epoch, xid, seq)
      SELECT c.relation, a.attname, a.attnum, $1, pg_current_xact_id(), nextval('stint.change_seq')
      FROM stint.captures c JOIN pg_attribute a ON a.attrelid = c.relation AND a.attnum > 0 AND NOT a.attisdropped
      WHERE NOT EXISTS (SELECT FROM stint.captured_columns k WHERE k.relation = c.relation AND k.name = a.attname)",
    &[pg_sys::INT4OID],
);
static UNKNOWN: Statement = Statement::new(
    c"DELETE FROM stint.captured_columns k
      WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = k.relation AND a.attname = k.name AND NOT a.attisdropped)",
    &[],
);
static RENUMBER: Statement = Statement::new(
    c"UPDATE stint.captured_columns k SET attnum = a.attnum
      FROM pg_attribute a WHERE a.attrelid = k.relation AND a.attname = k.name AND k.attnum <> a.attnum",
    &[],
);

/// Notes the columns of a table that is captured from now on.
pub fn declare(session: &Session, relation: pg_sys::Oid) {
    forget(session, relation);
    session.run(&DECLARE, &[arg(relation)]);
}

/// The table is captured no longer.
pub fn forget(session: &Session, relation: pg_sys::Oid) {
    session.run(&FORGET, &[arg(relation)]);
}

/// Follows a command that may have altered captured tables. In a copy that was not activated numbers are those of the original: there [`renumber`] follows.
pub fn follow(session: &Session) {
    if let Some((epoch, true)) = epoch::current(session) {
        session.run(&DROPPED, &[]);
        session.run(&RENAMED, &[]);
        session.run(&CAME, &[arg(epoch)]);
    }
}

/// Gives the columns the numbers they have in a restored database, whose epoch is opened.
pub fn renumber(session: &Session, epoch: i32) {
    session.run(&UNKNOWN, &[]);
    session.run(&RENUMBER, &[]);
    session.run(&CAME, &[arg(epoch)]);
}
