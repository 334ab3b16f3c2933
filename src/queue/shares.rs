//! The shares of a fair queue's groups: their weights, what they got, and the lanes that come and go with them.

use super::config;
use crate::budget::live::Used;
use crate::input;
use crate::shmem::{self, Instance, config as generation, fair, heads};
use crate::spi::{self, Param, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;
use stint_core::budget::Weights;

/// Has a group charged at commit what an attempt used instead of what it was charged when it was claimed, or nothing where it was `released`. Without reported
/// tokens the charge stays: nothing is known that would be truer.
pub fn settle(session: &Session, name: &str, lane: i32, charged: i64, released: bool, used: Used) {
    let Some(queue) = config::lookup(session, name) else { return };
    let actual = if released { 0 } else { Weights::default().weigh(used.input, used.cached, used.output).unwrap_or(charged) };
    if actual != charged {
        let (group, weight) = config::group_of(session, name, &queue, lane);
        fair::settle(Instance::here(), queue.number, group, actual.saturating_sub(charged), weight);
    }
}

static SET: Statement = Statement::new(
    c"insert into stint.group_weights as w (queue, group_key, weight) values ($1, $2, $3)
      on conflict (queue, group_key) do update set weight = excluded.weight",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::FLOAT8OID],
);

static UNSET: Statement =
    Statement::new(c"delete from stint.group_weights w where w.queue = $1 and w.group_key = $2", &[pg_sys::TEXTOID, pg_sys::TEXTOID]);

/// The bounds of a weight: a thousand times more or less than the weight of a group that has none set.
const LEAST_WEIGHT: f64 = 0.001;
const MOST_WEIGHT: f64 = 1000.0;

/// See the SQL COMMENT of stint.set_weight.
#[pg_extern(sql = false)]
fn set_weight(queue: Option<&str>, group_key: Option<&str>, weight: Option<f64>) {
    shmem::required();
    let name = input::name("queue", queue);
    let group = input::given("group_key", input::reference("group_key", group_key));
    let weight = weight.map(|weight| input::number("weight", weight, LEAST_WEIGHT, MOST_WEIGHT));
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        config::find(session, name);
        match weight {
            Some(weight) => session.run(&SET, &[arg(name), arg(group), arg(weight)]),
            None => session.run(&UNSET, &[arg(name), arg(group)]),
        };
        generation::changed();
    });
}

static GROUPS: Statement = Statement::new(
    c"select q.queue::text, q.number, g.group_key::text
      from stint.queue_config q
      cross join lateral (
            select null as group_key
            union
            select l.group_key from stint.lanes l where l.queue = q.queue
            union
            select w.group_key from stint.group_weights w where w.queue = q.queue) as g
      where q.fair
      order by q.queue, g.group_key nulls first",
    &[],
);

/// See the SQL COMMENT of stint.group_usage.
#[pg_extern(sql = false)]
fn group_usage()
-> TableIterator<'static, (name!(queue, String), name!(group_key, Option<String>), name!(tokens, Option<i64>), name!(virtual_time, Option<f64>))> {
    let _owner = spi::Identity::owner();
    let instance = Instance::here();
    TableIterator::new(spi::connect(|session| {
        let rows = session.run(&GROUPS, &[]);
        let row = |at| {
            let (number, key): (i32, Option<String>) = (rows.must(at, 2), rows.get(at, 3));
            let seen = shmem::get().and_then(|shared| fair::look(shared, instance, number, fair::Group::of(key.as_deref())));
            let (tokens, time) = seen.unzip();
            (rows.must(at, 1), key, tokens, time)
        };
        (0..rows.len()).map(row).collect::<Vec<_>>()
    }))
}

/// Lanes of groups in which no live task is: those that are open; and those that nothing can bring a task to any more, since whoever might have known them
/// open is over. In one snapshot, or a task could be on its way from one place to the other.
static IDLE: Statement = Statement::new(
    c"with used as materialized (
            select s.lane from stint.place_scheduled s
            union
            select b.lane from stint.place_blocked b
            union
            select r.lane from stint.place_running r)
      select l.lane, l.closed is null, (select q.number from stint.queue_config q where q.queue = l.queue)
      from stint.lanes l
      left join used u on u.lane = l.lane
      where l.group_key is not null and u.lane is null
        and (l.closed is null or l.closed > '0' and l.closed <= pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()))
        and (select true from stint.place_ready w where w.lane = l.lane limit 1) is null",
    &[],
);

static REMOVE: Statement = Statement::new(c"delete from stint.lanes l where l.lane = any ($1)", &[pg_sys::INT4ARRAYOID]);

/// $1: the next transaction id.
static CLOSED: Statement = Statement::new(c"select from stint.lanes l where l.closed = '0' or l.closed > $1 limit 1", &[pg_sys::XID8OID]);

/// Lanes that were closed, and of which every backend has been told: from now on whoever enqueues knows it. The second condition is of a database that came from
/// another server.
static TOLD: Statement = Statement::new(c"update stint.lanes l set closed = $1 where l.closed = '0' or l.closed > $1", &[pg_sys::XID8OID]);

/// The id that the next transaction to write gets: of all that have one, none is above it. A snapshot's upper bound will not do, since it only knows that nothing
/// from there on has ended.
fn next_transaction() -> Param {
    // SAFETY: reads shared memory.
    Some(pg_sys::Datum::from(unsafe { pg_sys::ReadNextFullTransactionId() }.value))
}

static CLOSE: Statement =
    Statement::new(c"update stint.lanes l set closed = '0' where l.lane = any ($1) and l.closed is null", &[pg_sys::INT4ARRAYOID]);

static ANY: Statement = Statement::new(c"select from stint.lanes l where l.group_key is not null limit 1", &[]);

/// Removes lanes of groups that no live task uses, in three steps of three calls.
///
/// 1. Such lanes are closed: an enqueue that looks makes another.
/// 2. Backends remember lanes, so all are told to look anew. One that did not hear it yet has a transaction id already (`config::group_lane`), so it is older
///    than every transaction to come.
/// 3. When all that are older are over, and no live task is in the lane, none will ever be: only an enqueue and a retry bring tasks to a lane, and both look.
///
/// Returns how many were removed, and whether the next step is worth a call. Without `close` the first step is left out.
fn tidy(close: bool) -> (i64, bool) {
    spi::connect(|session| {
        if session.run(&ANY, &[]).is_empty() {
            return (0, false);
        }
        let idle = session.run_latest(&IDLE, &[]);
        let (mut open, mut over) = (Vec::new(), Vec::new());
        for at in 0..idle.len() {
            let lane: i32 = idle.must(at, 1);
            if idle.must(at, 2) {
                open.push(lane);
                continue;
            }
            over.push(lane);
            heads::gone(Instance::here(), lane);
            if let Some(queue) = idle.get(at, 3) {
                generation::group_lane_changed(queue);
            }
        }
        let removed = over.len() as i64;
        if !over.is_empty() {
            session.run_latest(&REMOVE, &[arg(over)]);
        }
        let told = !session.run_latest(&CLOSED, &[next_transaction()]).is_empty();
        if told {
            generation::move_on();
            session.run_latest(&TOLD, &[next_transaction()]);
        }
        let close = close && !open.is_empty();
        if close {
            session.run_latest(&CLOSE, &[arg(open)]);
        }
        (removed, told || close)
    })
}

/// See the SQL COMMENT of stint.tidy_lanes.
#[pg_extern(sql = false)]
fn tidy_lanes() -> i64 {
    shmem::required();
    let _owner = spi::Identity::owner();
    tidy(true).0
}

/// How often the maintenance worker looks for lanes that no task uses, in microseconds.
const TIDY_EVERY: i64 = 60 * SECOND;

thread_local! {
    /// When it looks next, and when it takes the next step with those it found.
    static NEXT: Cell<(i64, i64)> = const { Cell::new((i64::MIN, i64::MAX)) };
}

/// Whether it is time to look, or to take the next step.
pub fn due() -> bool {
    let (look, step) = NEXT.get();
    Instant::now().0 >= look.min(step)
}

/// One round for the maintenance worker.
pub fn step() -> bool {
    let now = Instant::now();
    let (look, _) = NEXT.get();
    let close = now.0 >= look;
    let look = if close { now.plus(TIDY_EVERY).0 } else { look };
    NEXT.set((look, i64::MAX));
    if tidy(close).1 {
        NEXT.set((look, now.plus(SECOND).0));
    }
    false
}
