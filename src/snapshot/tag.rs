//! `stint.tag` and `stint.drop_tag`.

use super::pin;
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::{errors, input};
use pgrx::prelude::*;

static PIN: Statement = Statement::new(c"SELECT FROM stint.pins p WHERE p.pin = $1", &[pg_sys::INT8OID]);
static TAG: Statement = Statement::new(
    c"INSERT INTO stint.tag_list (tag, pin, comment) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::TEXTOID],
);
static DROP: Statement = Statement::new(c"DELETE FROM stint.tag_list WHERE tag = $1", &[pg_sys::TEXTOID]);
static NAMES: Statement = Statement::new(c"SELECT t.tag FROM stint.tag_list t ORDER BY 1", &[]);

/// There is no such tag.
pub fn unknown(session: &Session, tag: &str) -> ! {
    let names = session.read(&NAMES, &[]);
    let names: Vec<String> = (0..names.len()).map(|row| names.must(row, 1)).collect();
    let similar = stint_core::names::nearest(tag, names.iter().map(String::as_str));
    errors::unknown("tag", tag, similar, "Make it with stint.tag, or look at stint.tags.")
}

/// `stint.tag`.
#[pg_extern(sql = false)]
fn tag(name: Option<&str>, pin: Option<i64>, comment: Option<&str>) {
    crate::shmem::required();
    let name = input::name("name", name);
    let comment = input::text("comment", comment);
    connect(|session| {
        let _owner = Identity::owner();
        let pin = match pin {
            Some(pin) if session.run(&PIN, &[arg(pin)]).is_empty() => {
                errors::unknown("pin", &pin.to_string(), None, "Give a number that stint.pin returned.")
            }
            Some(pin) => pin,
            None => pin::make(session, None),
        };
        if session.run(&TAG, &[arg(name), arg(pin), comment.and_then(arg)]).is_empty() {
            errors::exists("tag", name, "A tag is immutable: choose another name, or drop it with stint.drop_tag.")
        }
    });
}

/// `stint.drop_tag`.
#[pg_extern(sql = false)]
fn drop_tag(name: Option<&str>) {
    crate::shmem::required();
    let name = input::name("name", name);
    connect(|session| {
        let _owner = Identity::owner();
        if session.run(&DROP, &[arg(name)]).is_empty() {
            unknown(session, name)
        }
    });
}
