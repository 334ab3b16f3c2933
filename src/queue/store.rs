//! The inserts that several verbs share: a task into a place, an attempt when it ends, an outcome when the task does.

use super::config::{self, Queue};
use super::flow::leave::{self, End};
use super::rows::{ATTEMPTS, OUTCOMES, dependencies, ready};
use super::shares;
use super::task_events::{self, Change};
use super::usage::Usage;
use crate::accounting::roll_up;
use crate::budget::live::{self, Held};
use crate::direct::{Batch, Condition, Scan};
use crate::history::{self, LeafBatch, LeafStatement};
use crate::shmem::{Instance, bells, heads, waiters, workers};
use crate::spi::{Param, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb};
use pgrx::prelude::*;

static TO_READY: LeafStatement = LeafStatement::new(
    "insert into stint.place_ready (queue, id, lane, priority, tokens, attempt, counted, seq, agent)
      values ($1, $2, $3, $4, $5, $6, $7, $8, (select f.agent from {facts} f where f.queue = $1 and f.id = $2))",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID],
);

/// The same for a task whose agent is at hand, which saves the look at its facts.
static NEW_TO_READY: Statement = Statement::new(
    c"insert into stint.place_ready (queue, id, lane, priority, tokens, attempt, counted, seq, agent) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::TEXTOID,
    ],
);

static TO_SCHEDULED: Statement = Statement::new(
    c"insert into stint.place_scheduled (queue, id, lane, priority, tokens, attempt, counted, run_at, event) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID],
);

static TO_BLOCKED: Statement = Statement::new(
    c"insert into stint.place_blocked (queue, id, lane, priority, tokens, attempt, counted, run_at, group_key, group_seq) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
    ],
);

static ATTEMPT: LeafStatement = LeafStatement::new(
    "insert into {attempts}
             (queue, id, attempt, lease, started_at, ended_at, ended, worker, heartbeat_gap, error,
              run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta, budgets, reserved, charged)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::UUIDOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::INTERVALOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::NUMERICOID,
        pg_sys::NUMERICOID,
        pg_sys::FLOAT4OID,
        pg_sys::JSONBOID,
        pg_sys::INT4ARRAYOID,
        pg_sys::INT8ARRAYOID,
        pg_sys::INT8ARRAYOID,
    ],
);

static OUTCOME: LeafStatement = LeafStatement::new(
    "insert into {outcomes} (queue, id, outcome, attempt, lease, finished_at, error, result, incarnation, xact)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
      returning (select true from stint.task_dependencies d where d.queue = $1 and d.on_id >= $2 and d.on_id <= $2 order by d.on_id limit 1)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::TEXTOID,
        pg_sys::INT4OID,
        pg_sys::UUIDOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::JSONBOID,
        pg_sys::INT4OID,
        pg_sys::XID8OID,
    ],
);

/// A live task on its way to a place.
#[derive(Clone, Copy)]
pub struct Ticket {
    /// The task.
    pub id: pgrx::Uuid,
    /// Its lane.
    pub lane: i32,
    /// Its priority.
    pub priority: i32,
    /// Its predicted tokens.
    pub tokens: Option<i64>,
    /// The number of its last attempt.
    pub attempt: i32,
    /// How many of its attempts count.
    pub counted: i32,
}

impl Ticket {
    fn params(&self, name: &str) -> [Param; 7] {
        self.params_of(arg(name))
    }

    fn params_of(&self, queue: Param) -> [Param; 7] {
        [queue, arg(self.id), arg(self.lane), arg(self.priority), arg(self.tokens), arg(self.attempt), arg(self.counted)]
    }
}

unsafe extern "C-unwind" {
    /// PostgreSQL's own, which the function `nextval` calls too.
    fn nextval_internal(sequence: pg_sys::Oid, check_permissions: bool) -> i64;
}

/// The sequence that gives the order of tasks.
fn sequence() -> pg_sys::Oid {
    // SAFETY: a system cache look-up.
    unsafe { pg_sys::get_relname_relid(c"task_seq".as_ptr(), pg_sys::Oid::from(Instance::here().schema)) }
}

fn draw(sequence: pg_sys::Oid) -> i64 {
    // SAFETY: a call of PostgreSQL behind its guard; the owner's rights are in force.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| nextval_internal(sequence, true)) }
}

/// The next number of the order of tasks.
pub fn next_seq() -> i64 {
    draw(sequence())
}

/// Puts a task that is being enqueued for that agent at the end of its line.
pub fn new_to_ready(session: &Session, name: &str, ticket: &Ticket, agent: Option<&str>) {
    let seq = next_seq();
    let [a, b, c, d, e, f, g] = ticket.params(name);
    let row = [a, b, c, d, e, f, g, arg(seq), arg(agent)];
    match ready::TABLE.open(pg_sys::RowExclusiveLock) {
        Some(table) => table.insert(row),
        None => {
            session.run(&NEW_TO_READY, &row);
        }
    }
    heads::lower(Instance::here(), ticket.lane, ticket.priority, seq);
    changed(session, name, ticket, "ready", None);
}

/// Tasks that are being enqueued, on their way to the end of their lines.
pub struct NewReady<'a> {
    session: &'a Session,
    name: &'a str,
    queue: Param,
    sequence: pg_sys::Oid,
    events: bool,
    batch: Option<Batch>,
}

impl<'a> NewReady<'a> {
    /// About `expected` of them.
    pub fn new(session: &'a Session, name: &'a str, queue: &Queue, expected: usize) -> Self {
        let batch = ready::TABLE.open(pg_sys::RowExclusiveLock).map(|table| Batch::new(table, expected));
        NewReady { session, name, queue: arg(name), sequence: sequence(), events: queue.events, batch }
    }

    /// Adds one, as [`new_to_ready`] does.
    pub fn push(&mut self, ticket: &Ticket, agent: Option<&str>) {
        let Some(batch) = &mut self.batch else { return new_to_ready(self.session, self.name, ticket, agent) };
        let seq = draw(self.sequence);
        batch.push(ticket.params_of(self.queue).into_iter().chain([arg(seq), arg(agent)]));
        heads::lower(Instance::here(), ticket.lane, ticket.priority, seq);
        if self.events {
            changed(self.session, self.name, ticket, "ready", None);
        }
    }

    /// Writes them.
    pub fn write(self) {
        if let Some(batch) = self.batch {
            batch.write();
        }
    }
}

/// Puts a task at the end of its line.
pub fn to_ready(session: &Session, name: &str, ticket: &Ticket) {
    back_to_ready(session, name, ticket, next_seq());
}

/// Puts a task back where it stood in its line.
pub fn back_to_ready(session: &Session, name: &str, ticket: &Ticket, seq: i64) {
    place_ready(session, name, ticket, seq);
    changed(session, name, ticket, "ready", None);
}

/// Notes that a task waits, in another way than before.
fn changed(session: &Session, name: &str, ticket: &Ticket, status: &str, why: Option<&str>) {
    task_events::record(session, name, &Change { id: ticket.id, status, attempt: ticket.attempt, worker: None, why });
}

/// The row of a ready task: where it was ready before, its status does not change.
pub fn place_ready(session: &Session, name: &str, ticket: &Ticket, seq: i64) {
    let [a, b, c, d, e, f, g] = ticket.params(name);
    history::write(session, &TO_READY, ticket.id, &[a, b, c, d, e, f, g, arg(seq)]);
    heads::lower(Instance::here(), ticket.lane, ticket.priority, seq);
}

/// Has a task wait until `run_at`.
pub fn to_scheduled(session: &Session, name: &str, ticket: &Ticket, run_at: Instant) {
    to_awaiting(session, name, ticket, run_at, None);
}

/// Has a task wait for other tasks; `behind` is its group and its place there, where it has not its turn.
pub fn to_blocked(session: &Session, name: &str, ticket: &Ticket, run_at: Option<Instant>, behind: Option<(&str, i64)>) {
    place_blocked(session, name, ticket, run_at, behind);
    changed(session, name, ticket, "blocked", None);
}

/// The row of a blocked task: where it was blocked before, its status does not change.
pub fn place_blocked(session: &Session, name: &str, ticket: &Ticket, run_at: Option<Instant>, behind: Option<(&str, i64)>) {
    let [a, b, c, d, e, f, g] = ticket.params(name);
    let (key, seq) = behind.unzip();
    session.run(&TO_BLOCKED, &[a, b, c, d, e, f, g, arg(run_at), arg(key), arg(seq)]);
}

/// Has a task wait for an event, at most until `run_at`.
pub fn to_awaiting(session: &Session, name: &str, ticket: &Ticket, run_at: Instant, event: Option<&str>) {
    place_scheduled(session, name, ticket, run_at, event);
    changed(session, name, ticket, "scheduled", event.map(|event| format!("awaits event \"{event}\"")).as_deref());
}

/// The row of a scheduled task: where it was scheduled before, its status does not change.
pub fn place_scheduled(session: &Session, name: &str, ticket: &Ticket, run_at: Instant, event: Option<&str>) {
    let [a, b, c, d, e, f, g] = ticket.params(name);
    session.run(&TO_SCHEDULED, &[a, b, c, d, e, f, g, arg(run_at), arg(event)]);
    heads::lower(Instance::here(), heads::SCHEDULED, 0, run_at.0);
}

/// An attempt that has ended.
pub struct Attempt<'a> {
    /// The task.
    pub id: pgrx::Uuid,
    /// Its number.
    pub attempt: i32,
    /// The lease it ran under.
    pub lease: pgrx::Uuid,
    /// When it was claimed.
    pub started_at: Instant,
    /// Who claimed it.
    pub worker: &'a str,
    /// The longest time between two of its heartbeats, if there were any.
    pub heartbeat_gap: Option<RawInterval>,
    /// What it reserved of budgets.
    pub held: Option<&'a Held>,
    /// The lane its task stood in.
    pub lane: i32,
    /// What its group of a fair queue was charged.
    pub share: Option<i64>,
}

/// Writes the row of an ended attempt and has its budgets and its group's share released and settled at commit: this is the one place where that happens. One that ended `released`
/// or `snoozed` is as if it had never begun, so its row names no budget.
pub fn attempt(session: &Session, name: &str, attempt: &Attempt, ended: &str, at: Instant, error: Option<&str>, usage: &Usage) {
    let row = attempt_row(session, name, arg(name), attempt, arg(ended), at, arg(error), usage, matches!(ended, "released" | "snoozed"));
    workers::to_add(Instance::here().database, 1);
    match ATTEMPTS.to_write(session, attempt.id) {
        Some(table) => table.insert(row.into_iter().chain(stamp())),
        None => {
            history::write(session, &ATTEMPT, attempt.id, &row);
        }
    }
}

/// The row of an attempt that has ended, once its budgets and its group's share are noted to be settled.
fn attempt_row(
    session: &Session,
    name: &str,
    queue: Param,
    attempt: &Attempt,
    ended: Param,
    at: Instant,
    error: Param,
    usage: &Usage,
    released: bool,
) -> [Param; 23] {
    let [run_id, trace_id, model, input, cached, output, model_cost, compute_cost, confidence, meta] = usage.params();
    let charged = attempt.held.map(|held| live::settle(session, name, held, attempt.started_at, at, released, usage.used()));
    if let Some(charged) = attempt.share {
        shares::settle(session, name, attempt.lane, charged, released, usage.used());
    }
    let kept = attempt.held.filter(|_| !released);
    [
        queue,
        arg(attempt.id),
        arg(attempt.attempt),
        arg(attempt.lease),
        arg(attempt.started_at),
        arg(at),
        ended,
        arg(attempt.worker),
        arg(attempt.heartbeat_gap),
        error,
        run_id,
        trace_id,
        model,
        input,
        cached,
        output,
        model_cost,
        compute_cost,
        confidence,
        meta,
        arg(kept.map(|held| held.budgets.clone())),
        arg(kept.map(|held| held.reserved.clone())),
        arg(charged.filter(|_| !released)),
    ]
}

/// Attempts of different tasks that ended as completed, and with them their tasks.
pub struct Completions<'a> {
    session: &'a Session,
    name: &'a str,
    queue: &'a Queue,
    at: Instant,
    /// Texts that stand in every row.
    words: [Param; 2],
    stamp: [Param; 2],
    attempts: LeafBatch,
    outcomes: LeafBatch,
    ended: Vec<(pgrx::Uuid, i32)>,
}

impl<'a> Completions<'a> {
    /// About `expected` of them.
    pub fn new(session: &'a Session, name: &'a str, queue: &'a Queue, at: Instant, expected: usize) -> Self {
        let words = [arg(name), arg(COMPLETED)];
        let (attempts, outcomes) = (ATTEMPTS.batch(expected), OUTCOMES.batch(expected));
        Completions { session, name, queue, at, words, stamp: stamp(), attempts, outcomes, ended: Vec::with_capacity(expected) }
    }

    /// Adds one, as [`attempt`] and [`outcome_of_batch`] do.
    pub fn push(&mut self, attempt: &Attempt, usage: &Usage, result: Option<RawJsonb>) {
        let Completions { session, at, words: [queue, completed], .. } = *self;
        let row = attempt_row(session, self.name, queue, attempt, completed, at, None, usage, false);
        if !self.attempts.push(session, attempt.id, row.into_iter().chain(self.stamp)) {
            history::write(session, &ATTEMPT, attempt.id, &row);
        }
        let row = [queue, arg(attempt.id), completed, arg(attempt.attempt), arg(attempt.lease), arg(at), None, arg(result), None, None];
        if !self.outcomes.push(session, attempt.id, row) {
            history::write_latest(session, &OUTCOME, attempt.id, &row);
        }
        self.ended.push((attempt.id, attempt.attempt));
    }

    /// Writes them. Tasks whose end others wait for are put among `ends`.
    pub fn write(self, ends: &mut Vec<End<'static>>) {
        let Completions { session, name, queue, attempts, outcomes, ended, .. } = self;
        attempts.write();
        outcomes.write();
        workers::to_add(Instance::here().database, ended.len());
        let end = |id| End { id, outcome: COMPLETED, turn: true };
        if queue.strict_groups {
            ends.extend(ended.iter().map(|(id, _)| end(*id)));
        } else {
            let ids: Vec<pgrx::Uuid> = ended.iter().map(|(id, _)| *id).collect();
            ends.extend(depended_on(self.words[0], &ids).unwrap_or(ids).into_iter().map(end));
        }
        if queue.events {
            for (id, attempt) in ended {
                task_events::record(session, name, &Change { id, status: COMPLETED, attempt, worker: None, why: None });
            }
        }
        announce(queue, 0);
    }
}

/// Those of the tasks, in the order of their ids, on which others depend. `None` where that cannot be looked up here: [`leave::follow`] then finds out.
fn depended_on(queue: Param, ids: &[pgrx::Uuid]) -> Option<Vec<pgrx::Uuid>> {
    let table = dependencies::TABLE.open(pg_sys::AccessShareLock)?;
    let mut found = Vec::new();
    let mut look = || {
        table.find_all(&dependencies::KEY, queue, dependencies::ON_ID, ids, |at, row| {
            found.extend(row.is_some().then(|| ids[at]));
            true
        })
    };
    (table.is_empty() || look()).then_some(found)
}

/// The columns by which what finished is added up once: the defaults of `incarnation` and `xact`. An outcome that comes with a completed attempt has none, since it
/// is found by that one's.
fn stamp() -> [Param; 2] {
    // SAFETY: gives this transaction an id, if it has none.
    let xact = unsafe { pg_sys::GetTopFullTransactionId() }.value;
    [arg(roll_up::incarnation()), Some(pg_sys::Datum::from(xact))]
}

const COMPLETED: &str = "completed";

/// How a task finished.
#[derive(Clone, Copy)]
pub struct Outcome<'a> {
    /// `completed`, `failed` or `cancelled`.
    pub outcome: &'static str,
    /// The number of its last attempt.
    pub attempt: i32,
    /// The lease that finished it, if one did.
    pub lease: Option<pgrx::Uuid>,
    /// Why, where it did not complete.
    pub error: Option<&'a str>,
    /// The result.
    pub result: Option<RawJsonb>,
}

impl<'a> Outcome<'a> {
    /// Of a task that ends while it waits, by no lease.
    pub fn waiting(outcome: &'static str, error: Option<&'a str>) -> Self {
        Outcome { outcome, attempt: 0, lease: None, error, result: None }
    }
}

/// Writes a task's outcome, and moves the tasks that waited for its end.
pub fn outcome(session: &Session, name: &str, id: pgrx::Uuid, at: Instant, outcome: &Outcome) {
    let mut ends = Vec::new();
    outcome_of_batch(session, name, id, at, outcome, &mut ends);
    leave::follow(session, name, ends, at);
}

/// Writes a task's outcome; where others waited for its end, it is put among `ends`: whoever ends several follows them up together, when no more rows of tasks are
/// to be taken, and so keeps to the order of locks.
pub fn outcome_of_batch(session: &Session, name: &str, id: pgrx::Uuid, at: Instant, outcome: &Outcome, ends: &mut Vec<End<'static>>) {
    if write_outcome(session, name, id, at, outcome) || grouped(session, name) {
        ends.push(End { id, outcome: outcome.outcome, turn: true });
    }
}

/// The same for a task of which this transaction has written an attempt that ended completed.
pub fn completion(
    session: &Session,
    name: &str,
    id: pgrx::Uuid,
    at: Instant,
    ran: &Ticket,
    lease: pgrx::Uuid,
    result: Option<RawJsonb>,
    ends: &mut Vec<End<'static>>,
) {
    let outcome = Outcome { outcome: COMPLETED, attempt: ran.attempt, lease: Some(lease), error: None, result };
    if write_stamped(session, name, id, at, &outcome, [None, None]) || grouped(session, name) {
        ends.push(End { id, outcome: COMPLETED, turn: true });
    }
}

/// Writes a task's outcome, and leaves the tasks that waited for its end to the maintenance worker: for one who ends many and must not wait for anybody.
pub fn outcome_of_many(session: &Session, name: &str, id: pgrx::Uuid, at: Instant, outcome: &Outcome) {
    if write_outcome(session, name, id, at, outcome) || grouped(session, name) {
        leave::owe(session, name, id);
    }
}

fn grouped(session: &Session, name: &str) -> bool {
    config::lookup(session, name).is_some_and(|queue| queue.strict_groups)
}

/// Writes a task's outcome and nothing else. Returns whether other tasks depend on it.
pub fn write_outcome(session: &Session, name: &str, id: pgrx::Uuid, at: Instant, outcome: &Outcome) -> bool {
    write_stamped(session, name, id, at, outcome, stamp())
}

fn write_stamped(session: &Session, name: &str, id: pgrx::Uuid, at: Instant, outcome: &Outcome, [incarnation, xact]: [Param; 2]) -> bool {
    let row = [
        arg(name),
        arg(id),
        arg(outcome.outcome),
        arg(outcome.attempt),
        arg(outcome.lease),
        arg(at),
        arg(outcome.error),
        arg(outcome.result),
        incarnation,
        xact,
    ];
    let depended_on = write_outcome_directly(session, name, id, &row)
        .unwrap_or_else(|| history::write_latest(session, &OUTCOME, id, &row).get(0, 1).unwrap_or(false));
    let Outcome { outcome: status, attempt, error: why, .. } = *outcome;
    task_events::record(session, name, &Change { id, status, attempt, worker: None, why });
    depended_on
}

/// As [`OUTCOME`], without the executor; `None` where the statement has to be run. Whether others depend on the task is looked up last, when its row is no longer
/// there for them to hold.
fn write_outcome_directly(session: &Session, name: &str, id: pgrx::Uuid, row: &[Param]) -> Option<bool> {
    let dependencies = dependencies::TABLE.open(pg_sys::AccessShareLock)?;
    OUTCOMES.to_write(session, id)?.insert(row.iter().copied());
    if dependencies.is_empty() {
        return Some(false);
    }
    let mut rows = dependencies.scan(&dependencies::KEY, &[Condition::text(arg(name)), Condition::uuid(arg(id))]);
    rows.as_mut().map(Scan::advance).or(Some(true))
}

/// Tells the world at commit that something of the queue changed place or ended, and wakes one waiter for each of `ready` tasks that became claimable.
pub fn announce(queue: &Queue, ready: usize) {
    if ready > 0 {
        waiters::ready(queue.number, ready);
    }
    if queue.notify {
        bells::ring(Instance::here(), bells::Kind::Queue, queue.number.unsigned_abs());
    }
}
