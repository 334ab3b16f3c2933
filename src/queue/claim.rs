//! `stint.claim`: takes tasks under a lease.
//!
//! A queue's lanes are merged by priority and enqueue order. Where no lane draws on a budget there is one lane, and a claim is three statements: take from
//! ready (from the head of its line on, see `shmem::heads`), read the facts, put into running. Where lanes draw on budgets, the claim first looks at what stands at the head of each lane that has room, reserves
//! for what it may take in one step in shared memory, and only then touches rows. docs/locks.md says which locks it takes.

use super::config::{self, Queue};
use super::horizon;
use super::lines;
use super::store::{self, Ticket};
use crate::budget::live;
use crate::errors::Fault;
use crate::shmem::heads::Head;
use crate::shmem::{self, Instance, waiters};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb};
use crate::{guc, input};
use pgrx::prelude::*;
use std::collections::HashMap;
use stint_core::budget::{Candidate, Usage, admit};

/// Takes the first rows of a lane's priority, from its head on, that no other session holds. The inner scan locks, the outer deletes exactly those by their place in the heap.
static TAKE: Statement = Statement::new(
    c"delete from stint.place_ready r
      where r.ctid = any (array(
            select h.ctid
            from stint.place_ready h
            where h.queue = $1 and h.lane = $2 and h.priority = $3 and h.seq >= $4
            order by h.seq
            limit $5
            for update skip locked))
      returning r.id, r.lane, r.priority, r.seq, r.tokens, r.attempt, r.counted",
    &[pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// Looks, without locking, at what stands first in each of the lanes and priorities, from their heads on.
static FIRST: Statement = Statement::new(
    c"select l.lane, r.tokens
      from unnest($2, $3, $4) as l (lane, priority, head)
      cross join lateral (
            select h.seq, h.tokens
            from stint.place_ready h
            where h.queue = $1 and h.lane = l.lane and h.priority = l.priority and h.seq >= l.head
            order by h.seq
            limit $5) as r
      order by l.priority desc, r.seq",
    &[pg_sys::TEXTOID, pg_sys::INT4ARRAYOID, pg_sys::INT4ARRAYOID, pg_sys::INT8ARRAYOID, pg_sys::INT8OID],
);

/// Looked up one by one: with `id = any ($2)` a plan made while the table was small reads all tasks of the queue, for as long as it is kept.
static FACTS: Statement = Statement::new(
    c"select f.id, f.payload, f.labels, f.agent::text, f.enqueued_at, (extract(epoch from f.lease_for) * 1e6)::bigint
      from unnest($2) as w (id)
      cross join lateral (select * from stint.task_facts t where t.queue = $1 and t.id = w.id limit 1) as f",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static RUN: Statement = Statement::new(
    c"insert into stint.place_running
             (queue, id, lease, lane, priority, seq, tokens, attempt, counted, started_at, expires_at, budgets, reserved, worker)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::INT4ARRAYOID,
        pg_sys::INT8ARRAYOID,
        pg_sys::TEXTOID,
    ],
);

/// A row taken from ready.
struct Taken {
    ticket: Ticket,
    seq: i64,
}

/// A claimed task, as the caller gets it.
type Claimed = (String, pgrx::Uuid, i32, pgrx::Uuid, Option<RawJsonb>, i32, Option<String>, Option<i64>, Option<RawJsonb>, Instant, Instant, i64);

fn take(session: &Session, name: &str, lane: i32, head: Head, max: usize) -> Vec<Taken> {
    let rows = session.run(&TAKE, &[arg(name), arg(lane), arg(head.priority), arg(head.at), arg(max as i64)]);
    (0..rows.len())
        .map(|at| Taken {
            ticket: Ticket {
                id: rows.must(at, 1),
                lane: rows.must(at, 2),
                priority: rows.must(at, 3),
                tokens: rows.get(at, 5),
                attempt: rows.must(at, 6),
                counted: rows.must(at, 7),
            },
            seq: rows.must(at, 4),
        })
        .collect()
}

/// Takes at most `max` rows of a lane in their order.
fn take_lane(session: &Session, name: &str, lane: i32, max: usize) -> Vec<Taken> {
    let heads = lines::heads(session, name, lane);
    let mut taken = Vec::new();
    for head in &heads {
        taken.extend(take(session, name, lane, *head, max - taken.len()));
        if taken.len() == max {
            break;
        }
    }
    if !taken.is_empty() {
        shmem::heads::took(shmem::required(), Instance::here(), lane, taken.len());
    } else if !heads.is_empty() {
        lines::exhausted(session, name, lane);
    }
    sort(&mut taken);
    taken
}

/// Priority descending, then enqueue order.
fn sort(taken: &mut [Taken]) {
    taken.sort_unstable_by_key(|row| (std::cmp::Reverse(row.ticket.priority), row.seq));
}

/// Takes at most `max` tasks, reserving their budgets.
fn take_any(session: &Session, name: &str, queue: &Queue, max: usize) -> Vec<Taken> {
    match queue.lanes.as_slice() {
        [only] if only.draws.is_empty() => take_lane(session, name, only.lane, max),
        _ => take_budgeted(session, name, queue, max),
    }
}

fn take_budgeted(session: &Session, name: &str, queue: &Queue, max: usize) -> Vec<Taken> {
    live::ensure_loaded(session, Instance::here());
    let mut open: Vec<&config::Lane> = queue.lanes.iter().collect();
    let mut all = Vec::new();
    // What stood first in a lane may be held by another session: the claim then turns to the other lanes, instead of going away empty past tasks that wait there.
    while all.len() < max && !open.is_empty() {
        let (taken, short) = take_round(session, name, queue, &mut open, max - all.len());
        all.extend(taken);
        if short.is_empty() {
            break;
        }
        open.retain(|lane| !short.contains(&lane.lane));
    }
    sort(&mut all);
    if !all.is_empty() {
        // What one ended attempt gave back may be room for more than one task: each claim that found some sends the next waiter to look.
        waiters::ready(queue.number, 1);
    }
    all
}

/// Takes what now stands first in the open lanes and has room, and names the lanes that yielded less than they showed. Lanes without room are closed.
fn take_round(session: &Session, name: &str, queue: &Queue, open: &mut Vec<&config::Lane>, max: usize) -> (Vec<Taken>, Vec<i32>) {
    let instance = Instance::here();
    let shared = shmem::required();
    let nothing = (Vec::new(), Vec::new());
    let numbers: Vec<i32> = queue.budgets.iter().map(|budget| budget.number).collect();
    let limits: Vec<_> = queue.budgets.iter().map(|budget| budget.limit).collect();

    // A lane none of whose budgets has room for another running task is not looked at at all.
    let usage = shmem::budgets::usage(shared, instance, &numbers);
    let one = Usage { running: 1, tokens: 0 };
    open.retain(|lane| lane.draws.iter().all(|budget| limits[*budget].holds(usage[*budget].plus(one))));
    if open.is_empty() {
        return nothing;
    }
    let heads: Vec<(i32, Head)> =
        open.iter().flat_map(|lane| lines::heads(session, name, lane.lane).into_iter().map(|head| (lane.lane, head))).collect();
    if heads.is_empty() {
        return nothing;
    }
    let (lanes, priorities): (Vec<i32>, Vec<i32>) = heads.iter().map(|(lane, head)| (*lane, head.priority)).unzip();
    let starts: Vec<i64> = heads.iter().map(|(_, head)| head.at).collect();
    let first = session.run(&FIRST, &[arg(name), arg(lanes.clone()), arg(priorities), arg(starts), arg(max as i64)]);
    let candidates: Vec<Candidate> = (0..first.len())
        .filter_map(|at| {
            let lane: i32 = first.must(at, 1);
            Some(Candidate { lane: open.iter().position(|l| l.lane == lane)?, tokens: first.get(at, 2) })
        })
        .collect();
    if candidates.is_empty() {
        lanes.into_iter().for_each(|lane| lines::exhausted(session, name, lane));
        return nothing;
    }
    let draws: Vec<Vec<usize>> = open.iter().map(|lane| lane.draws.clone()).collect();
    live::enter();
    let admitted = shmem::budgets::reserve(shared, instance, &numbers, |usage| admit(usage, &limits, &draws, &candidates, max));

    // The rows a lane yields may be others than those seen at its head, since another session may hold these: what they cost is settled row by row.
    let (mut all, mut short) = (Vec::with_capacity(admitted.len()), Vec::new());
    for (at, lane) in open.iter().enumerate() {
        let promised: Vec<Candidate> = admitted.iter().map(|index| candidates[*index]).filter(|candidate| candidate.lane == at).collect();
        if promised.is_empty() {
            continue;
        }
        let rows = take_lane(session, name, lane.lane, promised.len());
        let waiting: Vec<Candidate> = rows.iter().map(|row| Candidate { lane: 0, tokens: row.ticket.tokens }).collect();
        let kept = shmem::budgets::reserve(shared, instance, &numbers, |usage| {
            for candidate in &promised {
                for budget in &lane.draws {
                    usage[*budget] = usage[*budget].minus(limits[*budget].cost(candidate.tokens));
                }
            }
            admit(usage, &limits, std::slice::from_ref(&lane.draws), &waiting, waiting.len()).len()
        });
        if kept < promised.len() {
            short.push(lane.lane);
        }
        let mut rows = rows.into_iter();
        all.extend(rows.by_ref().take(kept));
        for row in rows {
            store::back_to_ready(session, name, &row.ticket, row.seq);
        }
    }
    (all, short)
}

/// What a running row keeps of the budgets it reserved: their numbers and the tokens of each.
fn reservation(queue: &Queue, ticket: &Ticket) -> (Option<Vec<i32>>, Option<Vec<i64>>) {
    let Some(lane) = queue.lane(ticket.lane).filter(|lane| !lane.draws.is_empty()) else { return (None, None) };
    let draws = lane.draws.iter().map(|at| &queue.budgets[*at]);
    (Some(draws.clone().map(|budget| budget.number).collect()), Some(draws.map(|budget| budget.limit.cost(ticket.tokens).tokens).collect()))
}

/// Starts an attempt of each taken task.
fn start(session: &Session, name: &str, queue: &Queue, taken: &[Taken], worker: &str, lease_for: Option<i64>, now: Instant) -> Vec<Claimed> {
    let facts = session.run(&FACTS, &[arg(name), arg(taken.iter().map(|row| row.ticket.id).collect::<Vec<_>>())]);
    let by_id: HashMap<[u8; 16], usize> = (0..facts.len()).map(|at| (*facts.must::<pgrx::Uuid>(at, 1).as_bytes(), at)).collect();
    taken
        .iter()
        .filter_map(|Taken { ticket, seq }| {
            let at = *by_id.get(ticket.id.as_bytes())?;
            let lease = pgrx::Uuid::from_bytes(stint_core::ids::lease());
            let attempt = ticket.attempt.saturating_add(1);
            let lasts = lease_for.or_else(|| facts.get(at, 6)).unwrap_or(queue.lease);
            let expires = now.plus(lasts);
            let (budgets, reserved) = reservation(queue, ticket);
            shmem::heads::lower(Instance::here(), shmem::heads::RUNNING, 0, expires.0);
            session.run(
                &RUN,
                &[
                    arg(name),
                    arg(ticket.id),
                    arg(lease),
                    arg(ticket.lane),
                    arg(ticket.priority),
                    arg(*seq),
                    arg(ticket.tokens),
                    arg(attempt),
                    arg(ticket.counted),
                    arg(now),
                    arg(expires),
                    arg(budgets),
                    arg(reserved),
                    arg(worker),
                ],
            );
            Some((
                name.to_string(),
                ticket.id,
                attempt,
                lease,
                facts.lift(at, 2).map(RawJsonb),
                ticket.priority,
                facts.get(at, 4),
                ticket.tokens,
                facts.lift(at, 3).map(RawJsonb),
                facts.must(at, 5),
                expires,
                lasts / 1000,
            ))
        })
        .collect()
}

/// One try: claims what is there now.
fn try_claim(name: &str, queue: &Queue, worker: &str, max: usize, lease_for: Option<i64>) -> Vec<Claimed> {
    spi::connect(|session| {
        let taken = take_any(session, name, queue, max);
        if taken.is_empty() {
            return Vec::new();
        }
        waiters::taken(queue.number, taken.len());
        store::announce(queue, 0);
        start(session, name, queue, &taken, worker, lease_for, Instant::now())
    })
}

/// Claims, sleeping in the server until something is there or the wait is over.
fn wait_and_claim(name: &str, worker: &str, max: usize, lease_for: Option<i64>, wait: i64, fcinfo: pg_sys::FunctionCallInfo) -> Vec<Claimed> {
    // SAFETY: reads this transaction's isolation level.
    if unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "claim cannot wait in a transaction that keeps one snapshot")
            .hint("Use READ COMMITTED, or leave out wait: a REPEATABLE READ transaction would never see the task that ends the wait.")
            .raise()
    }
    let until = Instant::now().plus(wait);
    let number = spi::connect(|session| config::find(session, name).number);
    let waiter = waiters::Waiter::join(number);
    loop {
        let queue = spi::connect(|session| config::find(session, name));
        let claimed = try_claim(name, &queue, worker, max, lease_for);
        let left = until.ms_since(Instant::now());
        if !claimed.is_empty() || left <= 0 {
            return claimed;
        }
        // A try may have taken a transaction id, with rows that it had to put back.
        if horizon::may_let_go(fcinfo) {
            horizon::let_go();
        }
        waiter.sleep(left);
    }
}

/// See the SQL COMMENT of stint.claim.
#[pg_extern(sql = false)]
fn claim(
    queue: Option<&str>,
    worker: Option<&str>,
    max: Option<i32>,
    lease_for: Option<RawInterval>,
    wait: Option<RawInterval>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> TableIterator<
    'static,
    (
        name!(queue, String),
        name!(id, pgrx::Uuid),
        name!(attempt, i32),
        name!(lease, pgrx::Uuid),
        name!(payload, Option<RawJsonb>),
        name!(priority, i32),
        name!(agent, Option<String>),
        name!(tokens, Option<i64>),
        name!(labels, Option<RawJsonb>),
        name!(enqueued_at, Instant),
        name!(expires_at, Instant),
        name!(expires_in_ms, i64),
    ),
> {
    shmem::required();
    let name = input::name("queue", queue);
    let worker = input::name("worker", worker);
    let max = input::batch("max", max);
    let lease_for = lease_for.map(|lease| input::lease("lease_for", lease));
    let wait = wait.map_or(0, |wait| input::duration("wait", wait, 0, guc::max_wait_s(), "stint.max_wait"));
    let _owner = spi::Identity::owner();
    let claimed = if wait > 0 {
        wait_and_claim(name, worker, max, lease_for, wait, fcinfo)
    } else {
        let queue = spi::connect(|session| config::find(session, name));
        try_claim(name, &queue, worker, max, lease_for)
    };
    TableIterator::new(claimed)
}
