//! `stint.tag`, `stint.drop_tag` and `stint.release_hold`.

use super::pin;
use crate::errors::{self, Fault};
use crate::input;
use crate::object_lock::{self, Lock};
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;

static PIN: Statement = Statement::new(c"SELECT FROM stint.pins p WHERE p.pin = $1", &[pg_sys::INT8OID]);
/// State tables whose changes after the pin are not all kept any more: a transaction whose changes went with the tick at their floor is one
/// that the pin does not see.
static BELOW_FLOOR: Statement = Statement::new(
    c"SELECT c.relation::text
      FROM stint.captures c, stint.pins p
      WHERE p.pin = $1 AND (c.floor_epoch > p.epoch
                            OR c.floor_epoch = p.epoch AND (c.floor_xid >= pg_snapshot_xmax(p.snapshot)
                                                            OR EXISTS (SELECT FROM pg_snapshot_xip(p.snapshot) x
                                                                       WHERE x <= c.floor_xid AND pg_visible_in_snapshot(x, c.floor_seen))))
      ORDER BY 1 LIMIT 1",
    &[pg_sys::INT8OID],
);
static TAG: Statement = Statement::new(
    c"INSERT INTO stint.tag_list (tag, pin, comment, hold) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::TEXTOID, pg_sys::BOOLOID],
);
static LOCK: Statement = Statement::new(c"SELECT t.hold, t.pin FROM stint.tag_list t WHERE t.tag = $1 FOR UPDATE", &[pg_sys::TEXTOID]);
static DROP: Statement = Statement::new(c"DELETE FROM stint.tag_list WHERE tag = $1", &[pg_sys::TEXTOID]);
static DROPPED: Statement = Statement::new(c"INSERT INTO stint.dropped_tags (pin) VALUES ($1)", &[pg_sys::INT8OID]);
static RELEASE: Statement = Statement::new(c"UPDATE stint.tag_list SET hold = false WHERE tag = $1 AND hold", &[pg_sys::TEXTOID]);
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
fn tag(name: Option<&str>, pin: Option<i64>, comment: Option<&str>, hold: Option<bool>) {
    crate::shmem::required();
    let name = input::name("name", name);
    let comment = input::text("comment", comment);
    let hold = input::given("hold", hold);
    connect(|session| {
        let _owner = Identity::owner();
        // What goes, goes before the pin is looked at or after the tag is seen.
        object_lock::share(Lock::Retention);
        let pin = match pin {
            Some(pin) if session.run(&PIN, &[arg(pin)]).is_empty() => {
                errors::unknown("pin", &pin.to_string(), None, "Give a number that stint.pin returned.")
            }
            Some(pin) => pin,
            None => pin::make(session, None),
        };
        refuse_below_floor(session, pin);
        if session.run(&TAG, &[arg(name), arg(pin), comment.and_then(arg), arg(hold)]).is_empty() {
            errors::exists("tag", name, "A tag is immutable: choose another name, or drop it with stint.drop_tag.")
        }
    });
}

fn refuse_below_floor(session: &Session, pin: i64) {
    // Also under REPEATABLE READ: what went since the snapshot is gone for the tag.
    let below = session.run_latest(&BELOW_FLOOR, &[arg(pin)]);
    if !below.is_empty() {
        Fault::new(
            PgSqlErrorCode::ERRCODE_SNAPSHOT_TOO_OLD,
            format!("pin {pin} can no longer be tagged: changes of {} after it are no longer kept", below.must::<String>(0, 1)),
        )
        .hint("Tag a pin before its changes are past the history given to stint.create_state; a tag keeps what it needs.")
        .raise()
    }
}

/// `stint.drop_tag`.
#[pg_extern(sql = false)]
fn drop_tag(name: Option<&str>) {
    crate::shmem::required();
    let name = input::name("name", name);
    connect(|session| {
        let _owner = Identity::owner();
        let found = session.run(&LOCK, &[arg(name)]);
        if found.is_empty() {
            unknown(session, name)
        }
        if found.must(0, 1) {
            Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("tag \"{name}\" is held"))
                .hint("Run stint.release_hold first, if nobody needs it any more.")
                .raise()
        }
        session.run(&DROP, &[arg(name)]);
        session.run(&DROPPED, &[found.lift(0, 2)]);
    });
}

/// `stint.release_hold`.
#[pg_extern(sql = false)]
fn release_hold(name: Option<&str>) -> bool {
    crate::shmem::required();
    let name = input::name("name", name);
    connect(|session| {
        let _owner = Identity::owner();
        if session.run(&LOCK, &[arg(name)]).is_empty() {
            unknown(session, name)
        }
        !session.run(&RELEASE, &[arg(name)]).is_empty()
    })
}
