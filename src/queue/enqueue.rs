//! `stint.enqueue`: one task. What it shares with `enqueue_many` is [`Request`], which checks a task, and [`Entry`], which writes it.

use super::config::{self, Queue};
use super::flow::enter::{self, Gate, OnFailure, Wait};
use super::rows::facts;
use super::store::{self, Outcome, Ticket};
use crate::errors::Fault;
use crate::history::{self, LeafBatch, LeafStatement};
use crate::spi::{self, Param, Session, arg};
use crate::values::{Instant, RawInterval, RawJsonb};
use crate::{errors, guc, input, shmem};
use pgrx::prelude::*;

static FACTS: LeafStatement = LeafStatement::new(
    "insert into {facts} (queue, id, lane, priority, max_attempts, tokens, enqueued_at, run_at, lease_for, agent, key, group_key, group_seq,
              depends_on, on_dependency_failure, labels, payload, max_run_time)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::INTERVALOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::UUIDARRAYOID,
        pg_sys::TEXTOID,
        pg_sys::JSONBOID,
        pg_sys::JSONBOID,
        pg_sys::INTERVALOID,
    ],
);

/// A task as a caller asks for it.
pub struct Request {
    /// What the worker gets; never opened.
    pub payload: RawJsonb,
    /// Higher is sooner.
    pub priority: i32,
    /// Not before this instant.
    pub run_at: Option<Instant>,
    /// Not before this much from now.
    pub delay: Option<RawInterval>,
    /// Idempotency key.
    pub key: Option<String>,
    /// Which agent the work is for.
    pub agent: Option<String>,
    /// Predicted tokens.
    pub tokens: Option<i64>,
    /// Budgets it draws on beside the queue's, as their numbers.
    pub budgets: Vec<i32>,
    /// What it belongs with.
    pub group_key: Option<String>,
    /// Tasks that must end first, sorted.
    pub depends_on: Vec<pgrx::Uuid>,
    /// What becomes of it when one of them does not complete.
    pub on_dependency_failure: OnFailure,
    /// Attempts it may use up, where not the queue's.
    pub max_attempts: Option<i32>,
    /// Its lease, where not the queue's.
    pub lease_for: Option<RawInterval>,
    /// Labels; never opened.
    pub labels: Option<RawJsonb>,
    /// The longest an attempt may run, where not the queue's.
    pub max_run_time: Option<RawInterval>,
}

impl Request {
    /// Checks everything that needs no table.
    pub fn check(&self) {
        input::json("payload", Some(self.payload));
        input::json("labels", self.labels);
        input::reference("key", self.key.as_deref());
        input::reference("group_key", self.group_key.as_deref());
        input::optional_name("agent", self.agent.as_deref());
        input::tokens("tokens", self.tokens);
        if let Some(attempts) = self.max_attempts {
            input::at_least("max_attempts", attempts, 1);
        }
        if let Some(lease) = self.lease_for {
            input::lease("lease_for", lease);
        }
        if let Some(longest) = self.max_run_time {
            input::run_time("max_run_time", longest);
        }
        if let Some(delay) = self.delay {
            input::delay("delay", delay);
            if self.run_at.is_some() {
                errors::invalid("both run_at and delay are given", "Give one of them.");
            }
        }
    }

    /// What it waits for beside a time.
    pub fn wait(&self) -> Wait<'_> {
        Wait { depends_on: &self.depends_on, group_key: self.group_key.as_deref(), budgets: Some(&self.budgets) }
    }

    /// The instant it becomes due, if that is in the future.
    fn due(&self, now: Instant) -> Option<Instant> {
        let due = self.run_at.or_else(|| self.delay.map(|delay| now.plus(delay.micros())))?;
        if due.0 > now.plus(guc::max_delay_s().saturating_mul(crate::values::SECOND)).0 {
            errors::over_limit("argument \"run_at\" is further in the future than the limit allows", "stint.max_delay");
        }
        (due.0 > now.0).then_some(due)
    }
}

/// Refuses a task that could never run under the budgets it draws on.
pub fn check_capacity(session: &Session, queue: &Queue, request: &Request) {
    let mut numbers = queue.own_budgets.clone();
    numbers.extend(&request.budgets);
    numbers.sort_unstable();
    numbers.dedup();
    for budget in config::read_or_known(session, queue, numbers) {
        let limit = budget.limit;
        let Some(max) = limit.capacity() else { continue };
        let (what, setting) = if limit.max_tokens == Some(max) { ("in flight", "max_tokens") } else { ("in its window", "max_window_tokens") };
        match request.tokens.filter(|tokens| *tokens > 0).or(limit.default_tokens) {
            None => Fault::new(
                PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("the task predicts no tokens, but budget \"{}\" limits tokens {what}", budget.name),
            )
            .hint("Pass tokens => …, or give the budget a default: stint.alter_budget(…, default_tokens => …).")
            .raise(),
            Some(tokens) if tokens > max => Fault::new(
                PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                format!("the task predicts {tokens} tokens, but budget \"{}\" allows {max} {what} at all", budget.name),
            )
            .hint(format!("Split the task, or use a budget with a higher {setting}: as it is, the task could never run."))
            .raise(),
            Some(_) => {}
        }
    }
}

/// What is settled of a task before it is written.
pub struct Entry {
    id: pgrx::Uuid,
    /// The lane of its budgets.
    lane: i32,
    due: Option<Instant>,
    group_seq: Option<i64>,
}

impl Entry {
    /// Of a checked task that is new.
    pub fn new(session: &Session, name: &str, queue: &Queue, id: pgrx::Uuid, request: &Request, now: Instant) -> Self {
        check_capacity(session, queue, request);
        let due = request.due(now);
        let lane = config::lane_for(session, name, queue, &request.budgets);
        let group_seq = request.group_key.as_ref().filter(|_| queue.strict_groups).map(|_| store::next_seq());
        Entry { id, lane, due, group_seq }
    }

    /// Writes its facts into the batch, where there is one, or to the table. [`config::keep_from_dropping`] comes before, [`config::still_stands`] after it.
    pub fn write_facts(&self, session: &Session, queue: Param, request: &Request, now: Instant, batch: Option<&mut LeafBatch>) {
        let (depends_on, on_failure) =
            (!request.depends_on.is_empty()).then(|| (request.depends_on.clone(), request.on_dependency_failure.word())).unzip();
        let row = [
            queue,
            arg(self.id),
            arg(self.lane),
            arg(request.priority),
            arg(request.max_attempts),
            arg(request.tokens),
            arg(now),
            arg(self.due),
            arg(request.lease_for),
            arg(request.agent.as_deref()),
            arg(request.key.as_deref()),
            arg(request.group_key.as_deref()),
            arg(self.group_seq),
            arg(depends_on),
            arg(on_failure),
            arg(request.labels),
            arg(request.payload),
            arg(request.max_run_time),
        ];
        let written = match batch {
            Some(batch) => batch.push(session, self.id, row),
            None => facts::TABLE.to_write(session, self.id).map(|table| table.insert(row)).is_some(),
        };
        if !written {
            history::write(session, &FACTS, self.id, &row);
        }
    }

    /// Puts the task into its place; where that is its line, `to_ready` does. Returns whether it is claimable at once.
    pub fn place(
        self,
        session: &Session,
        name: &str,
        gate: &mut Gate,
        request: &Request,
        now: Instant,
        to_ready: impl FnOnce(&Ticket, Option<&str>),
    ) -> bool {
        let Entry { id, lane, due, group_seq } = self;
        let lane = gate.lane(request, lane);
        let ticket = Ticket { id, lane, priority: request.priority, tokens: request.tokens, attempt: 0, counted: 0 };
        if let Some((outcome, error)) = gate.doom(request) {
            store::write_outcome(session, name, id, now, &Outcome::waiting(outcome, Some(&error)));
            return false;
        }
        let open = gate.open(&request.depends_on);
        let behind = request.group_key.as_deref().zip(group_seq).filter(|(key, _)| !gate.take_turn(key));
        if !open.is_empty() || behind.is_some() {
            store::to_blocked(session, name, &ticket, due, behind);
            enter::depend(session, name, id, open, request.on_dependency_failure);
            return false;
        }
        match due {
            Some(due) => store::to_scheduled(session, name, &ticket, due),
            None => to_ready(&ticket, request.agent.as_deref()),
        }
        due.is_none()
    }
}

/// See the SQL COMMENT of stint.enqueue.
#[pg_extern(sql = false)]
fn enqueue(
    queue: Option<&str>,
    payload: Option<RawJsonb>,
    priority: Option<i32>,
    run_at: Option<Instant>,
    delay: Option<RawInterval>,
    key: Option<&str>,
    agent: Option<&str>,
    tokens: Option<i64>,
    budgets: Option<Vec<Option<String>>>,
    group_key: Option<&str>,
    depends_on: Option<Vec<Option<pgrx::Uuid>>>,
    on_dependency_failure: Option<&str>,
    max_attempts: Option<i32>,
    lease_for: Option<RawInterval>,
    labels: Option<RawJsonb>,
    max_run_time: Option<RawInterval>,
) -> pgrx::Uuid {
    shmem::required();
    let name = input::name("queue", queue);
    let request = Request {
        payload: input::given("payload", payload),
        priority: input::given("priority", priority),
        run_at,
        delay,
        key: key.map(str::to_string),
        agent: agent.map(str::to_string),
        tokens,
        budgets: Vec::new(),
        group_key: group_key.map(str::to_string),
        depends_on: enter::ids(depends_on),
        on_dependency_failure: OnFailure::argument(input::given("on_dependency_failure", on_dependency_failure)),
        max_attempts,
        lease_for,
        labels,
        max_run_time,
    };
    let budgets = input::names("budgets", budgets);
    request.check();
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    spi::connect(|session| add(session, name, request, &budgets, now, |_, _| ()).0)
}

/// Adds a checked task, unless its key is held. Returns its id, or that of the task which holds the key after `held` has looked at it, and whether it is new.
pub fn add(
    session: &Session,
    name: &str,
    mut request: Request,
    budgets: &[String],
    now: Instant,
    held: impl FnOnce(pgrx::Uuid, &Request),
) -> (pgrx::Uuid, bool) {
    let queue = config::find(session, name);
    request.budgets = config::budget_numbers(session, budgets);
    let id = pgrx::Uuid::from_bytes(stint_core::ids::task(queue.history_class));
    if let Some(key) = &request.key
        && let Some(earlier) = super::keys::hold(session, name, &queue, key, id, now)
    {
        held(earlier, &request);
        return (earlier, false);
    }
    let mut gate = enter::hold(session, name, &queue, std::iter::once(request.wait()));
    let entry = Entry::new(session, name, &queue, id, &request, now);
    config::keep_from_dropping();
    entry.write_facts(session, arg(name), &request, now, None);
    config::still_stands(session, name, &queue);
    let ready = entry.place(session, name, &mut gate, &request, now, |ticket, agent| store::new_to_ready(session, name, ticket, agent));
    gate.leave(session, name);
    store::announce(&queue, usize::from(ready));
    (id, true)
}
