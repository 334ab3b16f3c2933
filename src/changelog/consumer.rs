//! Consumers: named readers of the changelog whose position is committed in their own transactions.
//!
//! Positions are rows of an insert-only table, the highest of which is valid. The consumer's row is locked while one is added, so two sessions that advance one
//! consumer go one after the other; and a session that polled before the other committed is told (40001), since it dealt with the same changes.

use super::capture;
use super::page::Seen;
use super::reader::{self, Change};
use super::seen::{self, Sight};
use crate::errors::{self, Fault};
use crate::shmem::waiters::{self, Waiter};
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::values::{Instant, RawInterval, RawJsonb, SECOND};
use crate::{guc, horizon, input};
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};

static FIND: Statement = Statement::new(
    c"SELECT c.relations::oid[], coalesce((SELECT max(m.pos) FROM stint.consumer_commits m WHERE m.consumer = c.consumer), c.start_pos),
             c.start_epoch, c.start_snapshot
      FROM stint.consumer_config c WHERE c.consumer = $1",
    &[pg_sys::TEXTOID],
);
static LOCK: Statement = Statement::new(c"SELECT FROM stint.consumer_config c WHERE c.consumer = $1 FOR NO KEY UPDATE", &[pg_sys::TEXTOID]);
static NAMES: Statement = Statement::new(c"SELECT c.consumer FROM stint.consumer_config c ORDER BY 1", &[]);
static CREATE: Statement = Statement::new(
    c"INSERT INTO stint.consumer_config (consumer, relations, start_pos, start_epoch, start_snapshot) VALUES ($1, $2::regclass[], $3, $4, $5::pg_snapshot)
      ON CONFLICT DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::OIDARRAYOID, pg_sys::INT8OID, pg_sys::INT4OID, pg_sys::TEXTOID],
);
static DROP: Statement = Statement::new(c"DELETE FROM stint.consumer_config WHERE consumer = $1", &[pg_sys::TEXTOID]);
/// What it committed, once nobody commits any more.
static FORGET: Statement = Statement::new(c"DELETE FROM stint.consumer_commits WHERE consumer = $1", &[pg_sys::TEXTOID]);
static COMMIT: Statement = Statement::new(c"INSERT INTO stint.consumer_commits (consumer, pos) VALUES ($1, $2)", &[pg_sys::TEXTOID, pg_sys::INT8OID]);
static TRIM: Statement = Statement::new(
    c"DELETE FROM stint.consumer_commits m
      WHERE m.pos < (SELECT max(n.pos) FROM stint.consumer_commits n WHERE n.consumer = m.consumer)",
    &[],
);

/// A poll of this session: by which transaction (its start), of which consumer, from which position, and how far it looked.
struct Polled {
    transaction: pg_sys::TimestampTz,
    consumer: String,
    from: i64,
    reached: i64,
}

thread_local! {
    static POLLED: RefCell<Vec<Polled>> = const { RefCell::new(Vec::new()) };
}

fn transaction() -> pg_sys::TimestampTz {
    // SAFETY: reads this backend's transaction state.
    unsafe { pg_sys::GetCurrentTransactionStartTimestamp() }
}

/// A consumer as it stands.
struct Consumer {
    /// Its tables, which the caller may read. Those that were dropped are left out.
    relations: Vec<pg_sys::Oid>,
    /// Its committed position.
    pos: i64,
    /// What it had before its first poll, where it started from a snapshot.
    has: Option<Seen>,
}

/// Looks a consumer up; an error where there is none, or where the caller may not read its tables.
fn find(session: &Session, caller: pg_sys::Oid, consumer: &str, latest: bool) -> Consumer {
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
    let has = found.get(0, 3).map(|epoch| Seen { epoch, snapshot: found.lift(0, 4) });
    Consumer { relations, pos: found.must(0, 2), has }
}

/// Where a new consumer begins.
enum Start {
    /// With the first change that is kept.
    Earliest,
    /// With what is ticked from now on.
    Latest,
    /// With what the calling transaction does not see.
    Snapshot,
}

/// What the transaction sees in all its statements: the rows it reads of a table are the ones that a consumer goes on from. The last tick it sees was
/// committed before its snapshot was taken, so that one sees all of the tick's changes, and more of them are told apart one by one.
fn own_sight(session: &Session) -> Sight {
    // SAFETY: reads this transaction's isolation level.
    if unsafe { pg_sys::XactIsoLevel } < pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "a consumer can start from a snapshot only in a transaction that keeps one")
            .hint("BEGIN ISOLATION LEVEL REPEATABLE READ, create the consumer, read the tables, and COMMIT.")
            .raise()
    }
    seen::by_transaction(session, "start a consumer from its snapshot")
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
    let hint = "Give 'earliest', 'latest' or 'snapshot'.";
    let start = match start.unwrap_or_else(|| errors::missing("start", hint)) {
        "earliest" => Start::Earliest,
        "latest" => Start::Latest,
        "snapshot" => Start::Snapshot,
        other => errors::invalid(format!("argument \"start\" is \"{other}\""), hint),
    };
    connect(|session| {
        let identity = Identity::owner();
        for relation in &relations {
            capture::required(session, identity.caller(), *relation);
        }
        let (from, epoch, snapshot) = match start {
            Start::Earliest => (reader::floor(session, &relations), None, None),
            Start::Latest => (reader::last(session), None, None),
            Start::Snapshot => {
                let sight = own_sight(session);
                (sight.pos, arg(sight.epoch), arg(sight.snapshot))
            }
        };
        if session.run(&CREATE, &[arg(name), arg(relations), arg(from), epoch, snapshot]).is_empty() {
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
        // Also what was committed since the snapshot that the transaction keeps.
        session.run_latest(&FORGET, &[arg(name)]);
    });
}

/// Looks once for changes, and notes for `commit` what the transaction has looked at. `reached`, of an earlier look from the same position, says how far
/// there is nothing.
fn look(caller: pg_sys::Oid, name: &str, max: i32, reached: &mut Option<(i64, i64)>) -> Vec<Change> {
    connect(|session| {
        let consumer = find(session, caller, name, false);
        let from = consumer.pos;
        let since = reached.filter(|(of, _)| *of == from).map_or(from, |(_, reached)| reached);
        let found = reader::after(session, &consumer.relations, since, max, consumer.has.as_ref());
        // After the look: what was let go of meanwhile raised the floor with the same commit.
        reader::refuse_below_floor(session, &consumer.relations, from, Some(name));
        *reached = Some((from, found.reached));
        POLLED.with_borrow_mut(|polled| {
            let now = transaction();
            polled.retain(|p| p.transaction == now && p.consumer != name);
            polled.push(Polled { transaction: now, consumer: name.to_string(), from, reached: found.reached });
        });
        found.changes
    })
}

/// `stint.poll`.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn poll(
    consumer: Option<&str>,
    max: Option<i32>,
    wait: Option<RawInterval>,
    fcinfo: pg_sys::FunctionCallInfo,
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
    let wait = wait.map_or(0, |wait| input::duration("wait", wait, 0, guc::max_wait_s(), "stint.max_wait"));
    // SAFETY: reads this transaction's isolation level.
    if wait > 0 && unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "poll cannot wait in a transaction that keeps one snapshot")
            .hint("Use READ COMMITTED, or leave out wait: a REPEATABLE READ transaction would never see what ends the wait.")
            .raise()
    }
    let identity = Identity::owner();
    let mut reached = None;
    let mut look = || look(identity.caller(), name, max, &mut reached);
    let found = if wait > 0 {
        let until = Instant::now().plus(wait);
        let waiter = Waiter::join(waiters::TICKS, 0);
        loop {
            let found = look();
            let left = until.ms_since(Instant::now());
            if !found.is_empty() || left <= 0 {
                break found;
            }
            if horizon::may_let_go(fcinfo) {
                horizon::let_go();
            }
            waiter.sleep(left, 0);
        }
    } else {
        look()
    };
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
        let committed = find(session, identity.caller(), name, true).pos;
        let polled =
            POLLED.with_borrow(|polled| polled.iter().find(|p| p.transaction == transaction() && p.consumer == name).map(|p| (p.from, p.reached)));
        let pos = match (pos, polled) {
            (Some(pos), _) => reader::checked_pos(session, "pos", Some(pos)),
            (None, Some((_, reached))) => reached,
            (None, None) => errors::missing(
                "pos",
                "Give the last pos you have dealt with. It may be left out in the transaction that polled, for all the poll looked at.",
            ),
        };
        if polled.is_some_and(|(from, _)| from != committed) {
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

/// How often the maintenance worker trims.
const TRIM_EVERY: i64 = 60 * SECOND;

thread_local! {
    static NEXT: Cell<Instant> = const { Cell::new(Instant(0)) };
}

/// Whether it is time again to trim.
pub fn due() -> bool {
    Instant::now() >= NEXT.get()
}

/// Trims. For the worker.
pub fn step() -> bool {
    NEXT.set(Instant::now().plus(TRIM_EVERY));
    trim();
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
