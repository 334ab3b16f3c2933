//! Consumers: named readers of the changelog whose position is committed in their own transactions.
//!
//! Positions are rows of an insert-only table, the highest of which is valid. The consumer's row is locked while one is added, so two sessions that advance one
//! consumer go one after the other; and a session that polled before the other committed is told (40001), since it dealt with the same changes.

use super::{capture, reader};
use crate::errors::{self, Fault};
use crate::input;
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::values::{Instant, RawJsonb};
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};

static FIND: Statement = Statement::new(
    c"SELECT c.relations::oid[], coalesce((SELECT max(m.pos) FROM stint.consumer_commits m WHERE m.consumer = c.consumer), c.start_pos)
      FROM stint.consumer_config c WHERE c.consumer = $1",
    &[pg_sys::TEXTOID],
);
static LOCK: Statement = Statement::new(c"SELECT FROM stint.consumer_config c WHERE c.consumer = $1 FOR NO KEY UPDATE", &[pg_sys::TEXTOID]);
static NAMES: Statement = Statement::new(c"SELECT c.consumer FROM stint.consumer_config c ORDER BY 1", &[]);
static CREATE: Statement = Statement::new(
    c"INSERT INTO stint.consumer_config (consumer, relations, start_pos) VALUES ($1, $2::regclass[], $3) ON CONFLICT DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::OIDARRAYOID, pg_sys::INT8OID],
);
static DROP: Statement = Statement::new(c"DELETE FROM stint.consumer_config WHERE consumer = $1", &[pg_sys::TEXTOID]);
static COMMIT: Statement = Statement::new(c"INSERT INTO stint.consumer_commits (consumer, pos) VALUES ($1, $2)", &[pg_sys::TEXTOID, pg_sys::INT8OID]);
static TRIM: Statement = Statement::new(
    c"DELETE FROM stint.consumer_commits m
      WHERE m.pos < (SELECT max(n.pos) FROM stint.consumer_commits n WHERE n.consumer = m.consumer)",
    &[],
);

/// A poll of this session: by which transaction (its start), of which consumer, from which position.
struct Polled {
    transaction: pg_sys::TimestampTz,
    consumer: String,
    from: i64,
}

thread_local! {
    static POLLED: RefCell<Vec<Polled>> = const { RefCell::new(Vec::new()) };
}

fn transaction() -> pg_sys::TimestampTz {
    // SAFETY: reads this backend's transaction state.
    unsafe { pg_sys::GetCurrentTransactionStartTimestamp() }
}

/// A consumer's tables, which the caller may read, and its committed position. Tables that were dropped are left out.
fn find(session: &Session, caller: pg_sys::Oid, consumer: &str, latest: bool) -> (Vec<pg_sys::Oid>, i64) {
    let found = if latest { session.run_latest(&FIND, &[arg(consumer)]) } else { session.run(&FIND, &[arg(consumer)]) };
    if found.is_empty() {
        let names = session.run(&NAMES, &[]);
        let names: Vec<String> = (0..names.len()).map(|row| names.must(row, 1)).collect();
        let similar = stint_core::names::nearest(consumer, names.iter().map(String::as_str));
        errors::unknown("consumer", consumer, similar, "Create it with stint.create_consumer, or look at stint.consumers.")
    }
    let mut relations: Vec<pg_sys::Oid> = found.must(0, 1);
    relations.retain(|relation| match capture::name_of(session, *relation) {
        Some(name) => {
            capture::check_readable(caller, *relation, &name);
            true
        }
        None => false,
    });
    (relations, found.must(0, 2))
}

/// `stint.create_consumer`.
#[pg_extern(sql = false)]
fn create_consumer(consumer: Option<&str>, relations: Option<Vec<Option<pg_sys::Oid>>>, start: Option<&str>) {
    crate::shmem::required();
    let name = input::name("consumer", consumer);
    let hint = "Give the state tables, as in ARRAY['shop.orders']::regclass[].";
    let mut relations: Vec<pg_sys::Oid> = relations
        .unwrap_or_else(|| errors::missing("relations", hint))
        .into_iter()
        .map(|relation| relation.unwrap_or_else(|| errors::invalid("argument \"relations\" contains a null", hint)))
        .collect();
    relations.sort_unstable_by_key(|relation| relation.to_u32());
    relations.dedup();
    if relations.is_empty() {
        errors::invalid("argument \"relations\" is empty", hint)
    }
    let hint = "Give 'earliest' or 'latest'.";
    let earliest = match start.unwrap_or_else(|| errors::missing("start", hint)) {
        "earliest" => true,
        "latest" => false,
        other => errors::invalid(format!("argument \"start\" is \"{other}\""), hint),
    };
    connect(|session| {
        let identity = Identity::owner();
        for relation in &relations {
            capture::required(session, identity.caller(), *relation);
        }
        let from = if earliest { 0 } else { reader::last(session) };
        if session.run(&CREATE, &[arg(name), arg(relations), arg(from)]).is_empty() {
            errors::exists("consumer", name, "Choose another name, or drop it with stint.drop_consumer.")
        }
    });
}

/// `stint.drop_consumer`.
#[pg_extern(sql = false)]
fn drop_consumer(consumer: Option<&str>) {
    crate::shmem::required();
    let name = input::name("consumer", consumer);
    connect(|session| {
        let identity = Identity::owner();
        find(session, identity.caller(), name, false);
        session.run(&DROP, &[arg(name)]);
    });
}

/// `stint.poll`.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn poll(
    consumer: Option<&str>,
    max: Option<i32>,
) -> TableIterator<
    'static,
    (
        name!(pos, i64),
        name!(relation, pg_sys::Oid),
        name!(kind, &'static str),
        name!(key, Option<RawJsonb>),
        name!(before, Option<RawJsonb>),
        name!(after, Option<RawJsonb>),
        name!(changed_at, Instant),
        name!(cause, Option<i64>),
    ),
> {
    crate::shmem::required();
    let name = input::name("consumer", consumer);
    let max = reader::checked_max(max);
    let found = connect(|session| {
        let identity = Identity::owner();
        let (relations, from) = find(session, identity.caller(), name, false);
        POLLED.with_borrow_mut(|polled| {
            let now = transaction();
            polled.retain(|p| p.transaction == now && p.consumer != name);
            polled.push(Polled { transaction: now, consumer: name.to_string(), from });
        });
        reader::after(session, &relations, from, max)
    });
    TableIterator::new(found.into_iter().map(|c| (c.pos, c.relation, c.kind, c.key, c.before, c.after, c.at, c.cause)))
}

/// `stint.commit`.
#[pg_extern(sql = false)]
fn commit(consumer: Option<&str>, pos: Option<i64>) {
    crate::shmem::required();
    let name = input::name("consumer", consumer);
    connect(|session| {
        let identity = Identity::owner();
        session.run(&LOCK, &[arg(name)]);
        let (_, committed) = find(session, identity.caller(), name, true);
        let pos = reader::checked_pos(session, "pos", pos);
        let polled_from = POLLED.with_borrow(|polled| polled.iter().find(|p| p.transaction == transaction() && p.consumer == name).map(|p| p.from));
        if polled_from.is_some_and(|from| from != committed) {
            Fault::new(
                PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
                format!("consumer \"{name}\" was advanced to position {committed} by another session since this transaction polled it"),
            )
            .hint("Roll back and poll again.")
            .raise();
        }
        if pos < committed {
            errors::invalid(
                format!("argument \"pos\" is {pos}, but consumer \"{name}\" has committed position {committed}"),
                "A position is only moved forwards; create another consumer to read again.",
            )
        }
        if pos > committed {
            session.run(&COMMIT, &[arg(name), arg(pos)]);
            POLLED.with_borrow_mut(|polled| polled.retain(|p| p.consumer != name));
        }
    });
}

thread_local! {
    /// When this worker trimmed last.
    static TRIMMED: Cell<Instant> = const { Cell::new(Instant(0)) };
}

/// Trims once a minute. For the worker.
pub fn step() -> bool {
    const EVERY_MS: i64 = 60_000;
    let now = Instant::now();
    if now.ms_since(TRIMMED.get()) >= EVERY_MS {
        TRIMMED.set(now);
        trim();
    }
    false
}

/// Deletes positions that consumers have passed; answers how many.
fn trim() -> i64 {
    connect(|session| {
        let _owner = Identity::owner();
        i64::try_from(session.run(&TRIM, &[]).len()).unwrap_or(i64::MAX)
    })
}

/// `stint.trim_consumers`.
#[pg_extern(sql = false)]
fn trim_consumers() -> i64 {
    crate::shmem::required();
    trim()
}
