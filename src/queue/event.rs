//! `stint.await` and `stint.emit`: tasks that wait for something from outside.
//!
//! An awaiting task stands in `place_scheduled` until its timeout, with the event's name: promotion at that time is the timeout. An event is one row, made by
//! whoever comes first, the one who awaits it or the one who emits it, and they meet on its lock: a task that is about to wait holds the row weakly until it
//! stands there for all to see, so an emit that comes meanwhile waits and then finds it; a task that comes while an emit is under way waits to see whether that
//! commits. The answer is kept as a checkpoint under the event's name, so every later attempt gets the same.

use super::checkpoint;
use super::config;
use super::finish;
use super::late;
use super::store::{self, Outcome, Ticket};
use super::usage::Usage;
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb, SECOND};
use crate::{guc, input, shmem};
use pgrx::prelude::*;
use std::collections::BTreeMap;

static LIVE: Statement = Statement::new(
    c"select r.attempt from stint.place_running r where r.queue = $1 and r.id = $2 and r.lease = $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID],
);

static LOCK: Statement = Statement::new(
    c"select r.attempt from stint.place_running r where r.queue = $1 and r.id = $2 and r.lease = $3 for update",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID],
);

static EXPECT: Statement = Statement::new(c"insert into stint.events (event) values ($1) on conflict (event) do nothing", &[pg_sys::TEXTOID]);

static LOOK: Statement =
    Statement::new(c"select e.emitted_at is not null, e.payload from stint.events e where e.event = $1 for share", &[pg_sys::TEXTOID]);

static EMIT: Statement = Statement::new(
    c"insert into stint.events as e (event, payload, emitted_at) values ($1, $2, $3)
      on conflict (event) do update set payload = excluded.payload, emitted_at = excluded.emitted_at where e.emitted_at is null",
    &[pg_sys::TEXTOID, pg_sys::JSONBOID, pg_sys::TIMESTAMPTZOID],
);

static STORED: Statement = Statement::new(c"select e.payload from stint.events e where e.event = $1", &[pg_sys::TEXTOID]);

/// In the order of their ids, as an enqueue holds what it depends on.
static LOCK_AWAITING: Statement =
    Statement::new(c"select from stint.place_scheduled s where s.event = $1 order by s.queue, s.id for update", &[pg_sys::TEXTOID]);

static WAKE: Statement = Statement::new(
    c"delete from stint.place_scheduled s
      where s.event = $1
      returning s.queue::text, s.id, s.lane, s.priority, s.tokens, s.attempt, s.counted",
    &[pg_sys::TEXTOID],
);

/// See the SQL COMMENT of stint.await. `await` is a word of Rust.
#[pg_extern(sql = false)]
fn await_event(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    event: Option<&str>,
    timeout: Option<RawInterval>,
) -> TableIterator<'static, (name!(status, String), name!(payload, Option<RawJsonb>))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let event = input::given("event", input::reference("event", event));
    let timeout = timeout.map_or_else(|| guc::max_delay_s().saturating_mul(SECOND), |timeout| input::delay("timeout", timeout));
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let (status, payload) = spi::connect(|session| {
        let queue = config::find(session, name);
        let task = [arg(name), arg(id), arg(lease)];
        let answered = || {
            checkpoint::kept(session, name, id, event).map(|kept| match kept {
                Some(payload) => ("emitted", Some(payload)),
                None => ("timed_out", None),
            })
        };
        if session.run(&LIVE, &task).is_empty() {
            late::known(session, name, id);
            return ("lost", None);
        }
        if let Some(answer) = answered() {
            return answer;
        }
        // The event before the task, as an emit takes them. An old event may be let go of between the two.
        let row = late::decide(|| {
            session.run(&EXPECT, &[arg(event)]);
            Some(session.run(&LOOK, &[arg(event)])).filter(|row| !row.is_empty())
        });
        let live = session.run(&LOCK, &task);
        if live.is_empty() {
            return ("lost", None);
        }
        if let Some(answer) = answered() {
            return answer;
        }
        if row.get(0, 1) == Some(true) {
            let payload = row.lift(0, 2).map(RawJsonb);
            checkpoint::save(session, name, id, event, payload, live.must(0, 1), now);
            return ("emitted", payload);
        }
        let Some(ran) = finish::end(session, name, id, lease) else { return ("lost", None) };
        let usage = Usage::default().or_known(ran.run_id.as_deref(), ran.trace_id.as_deref());
        store::announce(&queue, 0);
        if ran.cancel_requested {
            store::attempt(session, name, &ran.attempt(lease), "cancelled", now, None, &usage);
            let reason = ran.reason.as_deref();
            let outcome = Outcome { outcome: "cancelled", attempt: ran.ticket.attempt, lease: Some(lease), error: reason, result: None };
            store::outcome(session, name, id, now, &outcome);
            return ("cancelled", None);
        }
        store::attempt(session, name, &ran.attempt(lease), "awaiting", now, None, &usage);
        store::to_awaiting(session, name, &ran.ticket, now.plus(timeout), Some(event));
        ("waiting", None)
    });
    TableIterator::once((status.to_string(), payload))
}

/// See the SQL COMMENT of stint.emit.
#[pg_extern(sql = false)]
fn emit(
    event: Option<&str>,
    payload: Option<RawJsonb>,
) -> TableIterator<'static, (name!(first, bool), name!(woken, i32), name!(payload, Option<RawJsonb>))> {
    shmem::required();
    let event = input::given("event", input::reference("event", event));
    let payload = input::given("payload", input::json("payload", payload));
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        if session.run(&EMIT, &[arg(event), arg(payload), arg(now)]).is_empty() {
            return (false, 0, session.run_latest(&STORED, &[arg(event)]).lift(0, 1).map(RawJsonb));
        }
        session.run_latest(&LOCK_AWAITING, &[arg(event)]);
        let rows = session.run_latest(&WAKE, &[arg(event)]);
        let mut woken: Vec<(String, Ticket)> = (0..rows.len())
            .map(|at| {
                let ticket = Ticket {
                    id: rows.must(at, 2),
                    lane: rows.must(at, 3),
                    priority: rows.must(at, 4),
                    tokens: rows.get(at, 5),
                    attempt: rows.must(at, 6),
                    counted: rows.must(at, 7),
                };
                (rows.must(at, 1), ticket)
            })
            .collect();
        woken.sort_by_key(|(_, ticket)| *ticket.id.as_bytes());
        let mut ready: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, ticket) in &woken {
            // It has its answer from now on, also if the event is let go of before it asks again.
            checkpoint::save(session, name, ticket.id, event, Some(payload), ticket.attempt.saturating_add(1), now);
            store::to_ready(session, name, ticket);
            *ready.entry(name).or_default() += 1;
        }
        for (name, tasks) in ready {
            if let Some(queue) = config::lookup(session, name) {
                store::announce(&queue, tasks);
            }
        }
        (true, i32::try_from(woken.len()).unwrap_or(i32::MAX), Some(payload))
    });
    TableIterator::once(answer)
}
