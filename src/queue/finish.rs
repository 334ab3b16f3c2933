//! `stint.complete` and `stint.fail`: the end of an attempt. Whoever deletes the running row under its lease decides the attempt; every other call is told what
//! became of it (`late`).

use super::config;
use super::flow::leave::{self, End};
use super::late::{self, Answer, Late};
use super::rows::running;
use super::store::{self, Attempt, Outcome, Ticket};
use super::usage::Usage;
use crate::answer::Table;
use crate::budget::live::Held;
use crate::direct::{Condition, Deleted};
use crate::history::{self, LeafStatement};
use crate::spi::{self, Row, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb, RawNumeric};
use crate::{input, shmem};
use pgrx::prelude::*;
use stint_core::verdict::Call;

/// Ends the live lease. Waits for a heartbeat or a sweep that holds the row, then looks again.
static END: Statement = Statement::new(
    c"delete from stint.place_running r
      where r.queue = $1 and r.id = $2 and r.lease = $3
      returning r.queue, r.id, r.lease, r.lane, r.priority, r.seq, r.tokens, r.attempt, r.counted, r.started_at, r.expires_at, r.budgets, r.reserved,
                r.worker, r.deadline, r.share, r.cancel_requested, r.reason, r.run_id, r.trace_id, r.heartbeat_gap",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID],
);

static MAX_ATTEMPTS: LeafStatement =
    LeafStatement::new("select f.max_attempts from {facts} f where f.queue = $1 and f.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// A running row whose lease was ended just now by this transaction.
pub struct Ran {
    /// The task, ready to go to a place again.
    pub ticket: Ticket,
    /// Where it stood in its line.
    pub seq: i64,
    /// When it was claimed.
    pub started_at: Instant,
    /// Who ran it.
    pub worker: String,
    /// Whether somebody asked to cancel it.
    pub cancel_requested: bool,
    /// Why.
    pub reason: Option<String>,
    /// What it reserved.
    pub held: Option<Held>,
    /// Run id, if a heartbeat gave one.
    pub run_id: Option<String>,
    /// Trace id, likewise.
    pub trace_id: Option<String>,
    /// The longest time between two heartbeats.
    pub heartbeat_gap: Option<RawInterval>,
    /// What its group of a fair queue was charged.
    pub share: Option<i64>,
}

/// Deletes the running row under this lease; whoever does so writes the attempt's row, which settles its budgets. `None` where the lease is not the live one.
pub fn end(session: &Session, name: &str, id: pgrx::Uuid, lease: pgrx::Uuid) -> Option<Ran> {
    end_directly(name, id, lease).unwrap_or_else(|| {
        let rows = session.run(&END, &[arg(name), arg(id), arg(lease)]);
        rows.iter().next().map(|row| Ran::of(&row))
    })
}

/// As [`END`], without the executor; `None` where the statement has to be run, also after somebody changed the row while this waited for it.
fn end_directly(name: &str, id: pgrx::Uuid, lease: pgrx::Uuid) -> Option<Option<Ran>> {
    let table = running::TABLE.open(pg_sys::RowExclusiveLock)?;
    let mut rows = table.scan(&running::KEY, &[Condition::text(arg(name)), Condition::uuid(arg(id))])?;
    if !rows.advance() || rows.must::<pgrx::Uuid>(running::LEASE) != lease {
        return Some(None);
    }
    (rows.delete(true) == Deleted::Here).then(|| Some(Ran::of(&rows)))
}

impl Ran {
    fn of(row: &impl Row) -> Self {
        Ran {
            ticket: Ticket {
                id: row.must(running::ID),
                lane: row.must(running::LANE),
                priority: row.must(running::PRIORITY),
                tokens: row.get(running::TOKENS),
                attempt: row.must(running::ATTEMPT),
                counted: row.must(running::COUNTED),
            },
            seq: row.must(running::SEQ),
            started_at: row.must(running::STARTED_AT),
            worker: row.must(running::WORKER),
            cancel_requested: row.must(running::CANCEL_REQUESTED),
            reason: row.get(running::REASON),
            held: Held::new(row.get(running::BUDGETS), row.get(running::RESERVED)),
            run_id: row.get(running::RUN_ID),
            trace_id: row.get(running::TRACE_ID),
            heartbeat_gap: row.keep(running::HEARTBEAT_GAP).map(RawInterval),
            share: row.get(running::SHARE),
        }
    }
}

impl Ran {
    /// The attempt's row in the making.
    pub fn attempt(&self, lease: pgrx::Uuid) -> Attempt<'_> {
        Attempt {
            id: self.ticket.id,
            attempt: self.ticket.attempt,
            lease,
            started_at: self.started_at,
            worker: &self.worker,
            heartbeat_gap: self.heartbeat_gap,
            held: self.held.as_ref(),
            lane: self.ticket.lane,
            share: self.share,
        }
    }
}

/// How many attempts the task may use up.
pub fn max_attempts(session: &Session, name: &str, queue: &config::Queue, id: pgrx::Uuid) -> i32 {
    let facts = history::read(session, &MAX_ATTEMPTS, id, &[arg(name), arg(id)]);
    if facts.is_empty() { queue.max_attempts } else { facts.get(0, 1).unwrap_or(queue.max_attempts) }
}

/// A completion, as `complete`, `complete_many` and `finish_and_claim` ask for it.
#[derive(Clone, Copy)]
pub struct Completion<'a> {
    /// The task.
    pub id: pgrx::Uuid,
    /// The lease it ran under.
    pub lease: pgrx::Uuid,
    /// What came of it; never opened.
    pub result: Option<RawJsonb>,
    /// What it used.
    pub usage: Usage<'a>,
}

/// Ends an attempt as completed, or says what had become of it.
pub fn complete_one(session: &Session, name: &str, queue: &config::Queue, completion: &Completion, now: Instant) -> Answer {
    let mut ends = Vec::new();
    let answer = complete_in_batch(session, name, queue, completion, now, true, &mut ends);
    leave::follow(session, name, ends, now);
    answer
}

/// As [`complete_one`], but what follows the end of the task is left to the caller, as [`store::outcome_of_batch`] says.
pub fn complete_in_batch(
    session: &Session,
    name: &str,
    queue: &config::Queue,
    completion: &Completion,
    now: Instant,
    patient: bool,
    ends: &mut Vec<End<'static>>,
) -> Answer {
    let Completion { id, lease, result, ref usage } = *completion;
    late::decide(|| {
        if let Some(ran) = end(session, name, id, lease) {
            let usage = usage.or_known(ran.run_id.as_deref(), ran.trace_id.as_deref());
            store::attempt(session, name, &ran.attempt(lease), "completed", now, None, &usage);
            store::completion(session, name, id, now, &ran.ticket, lease, result, ends);
            store::announce(queue, 0);
            return Some(Answer::first("completed", result, "completed"));
        }
        late::call(session, &Late { name, queue, id, lease, now, call: Call::Complete, result, patient, usage }, ends)
    })
}

/// Ends the first of these attempts, which stand in the order of their tasks' ids, as completed, as long as each is under its live lease. Returns how many; what is next,
/// if anything is left, is for [`complete_in_batch`]. `at` is told which one is at hand.
pub fn complete_first<'c>(
    session: &Session,
    name: &str,
    queue: &config::Queue,
    ids: &[pgrx::Uuid],
    completions: impl Iterator<Item = &'c Completion<'c>> + Clone,
    now: Instant,
    ends: &mut Vec<End<'static>>,
    at: impl Fn(Option<usize>),
) -> usize {
    let Some(table) = running::TABLE.open(pg_sys::RowExclusiveLock) else { return 0 };
    let mut ended = Vec::new();
    let mut next = completions.clone();
    table.find_all(&running::KEY, arg(name), running::ID, ids, |number, row| {
        at(Some(number));
        let live = next.next().zip(row).filter(|(completion, row)| row.must::<pgrx::Uuid>(running::LEASE) == completion.lease);
        // One that somebody changed while this waited for it is left to the statement, like one that is late.
        let ran = live.and_then(|(_, row)| (row.delete(true) == Deleted::Here).then(|| Ran::of(row)));
        let here = ran.is_some();
        ended.extend(ran);
        here
    });
    drop(table);
    at(None);
    if ended.is_empty() {
        return 0;
    }
    let mut done = store::Completions::new(session, name, queue, now, ended.len());
    for (number, (ran, Completion { lease, result, usage, .. })) in ended.iter().zip(completions).enumerate() {
        at(Some(number));
        let usage = usage.or_known(ran.run_id.as_deref(), ran.trace_id.as_deref());
        done.push(&ran.attempt(*lease), &usage, *result);
    }
    at(None);
    done.write(ends);
    ended.len()
}

/// See the SQL COMMENT of stint.complete.
#[pg_extern(sql = false)]
fn complete(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    result: Option<RawJsonb>,
    run_id: Option<&str>,
    trace_id: Option<&str>,
    model: Option<&str>,
    input_tokens: Option<i64>,
    cached_tokens: Option<i64>,
    output_tokens: Option<i64>,
    model_cost: Option<RawNumeric>,
    compute_cost: Option<RawNumeric>,
    confidence: Option<f32>,
    meta: Option<RawJsonb>,
) -> Table<(name!(outcome, String), name!(result, Option<RawJsonb>), name!(first, bool), name!(status, String))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    input::json("result", result);
    let usage = Usage { run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta }.checked();
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        let queue = config::find(session, name);
        complete_one(session, name, &queue, &Completion { id, lease, result, usage }, now)
    });
    Table::one((answer.outcome.to_string(), answer.result, answer.first, answer.status))
}

/// See the SQL COMMENT of stint.fail.
#[pg_extern(sql = false)]
fn fail(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    error: Option<&str>,
    retry_in: Option<RawInterval>,
    retryable: Option<bool>,
    run_id: Option<&str>,
    trace_id: Option<&str>,
    model: Option<&str>,
    input_tokens: Option<i64>,
    cached_tokens: Option<i64>,
    output_tokens: Option<i64>,
    model_cost: Option<RawNumeric>,
    compute_cost: Option<RawNumeric>,
    confidence: Option<f32>,
    meta: Option<RawJsonb>,
) -> Table<(
    name!(outcome, String),
    name!(result, Option<RawJsonb>),
    name!(first, bool),
    name!(status, String),
    name!(retry_at, Option<Instant>),
    name!(retry_in_ms, Option<i64>),
)> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let error = input::text("error", error);
    let retry_in = retry_in.map(|wait| input::delay("retry_in", wait));
    let retryable = input::given("retryable", retryable);
    let usage = Usage { run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta }.checked();
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answer = spi::connect(|session| {
        let queue = config::find(session, name);
        late::decide(|| {
            let Some(ran) = end(session, name, id, lease) else {
                return late::call(
                    session,
                    &Late { name, queue: &queue, id, lease, now, call: Call::Fail, result: None, patient: true, usage: &usage },
                    &mut Vec::new(),
                );
            };
            let usage = usage.or_known(ran.run_id.as_deref(), ran.trace_id.as_deref());
            let ended = if ran.cancel_requested { "cancelled" } else { "failed" };
            store::attempt(session, name, &ran.attempt(lease), ended, now, error, &usage);
            let counted = ran.ticket.counted.saturating_add(1);
            let retries = !ran.cancel_requested && retryable && counted < max_attempts(session, name, &queue, id);
            if !retries {
                let error = error.or(ran.reason.as_deref());
                let outcome = Outcome { outcome: ended, attempt: ran.ticket.attempt, lease: Some(lease), error, result: None };
                store::outcome(session, name, id, now, &outcome);
                store::announce(&queue, 0);
                return Some(Answer::first(ended, None, ended));
            }
            let wait = retry_in.unwrap_or_else(|| queue.backoff.wait(counted, stint_core::ids::draw()));
            let ticket = Ticket { counted, ..ran.ticket };
            let at = now.plus(wait);
            if wait > 0 {
                store::to_scheduled(session, name, &ticket, at);
            } else {
                store::to_ready(session, name, &ticket);
            }
            store::announce(&queue, usize::from(wait == 0));
            let status = if wait > 0 { "scheduled" } else { "ready" };
            Some(Answer { retry: Some((at, wait / 1000)), ..Answer::first("retrying", None, status) })
        })
    });
    let (retry_at, retry_in_ms) = answer.retry.unzip();
    Table::one((answer.outcome.to_string(), answer.result, answer.first, answer.status, retry_at, retry_in_ms))
}
