//! `stint.retry` and `stint.retry_failed`: a finished task becomes live again. Its outcome moves to `task_retries`, its attempts stay, and those that counted count
//! no more. It waits again for those of its dependencies that are live again, and in a strict group it stands at the end of the line: its turn has passed. So what
//! it waits for never waits for it.
//!
//! Locks in order: outcomes by id, keys in their order, then those of an enqueue.

use super::config::{self, Queue};
use super::flow::enter::{self, Gate, OnFailure, Wait};
use super::store::{self, Ticket};
use super::{keys, late};
use crate::history::{self, LeafStatement};
use crate::spi::{self, Session, Statement, arg};
use crate::values::Instant;
use crate::{input, shmem};
use pgrx::prelude::*;
use std::collections::{BTreeSet, HashSet};

static TASK: LeafStatement = LeafStatement::new(
    "select o.outcome::text, f.key::text, f.group_key::text, f.group_seq is not null, coalesce(f.depends_on, '{}'), f.on_dependency_failure::text,
             f.lane, f.priority, f.tokens
      from {facts} f
      left join {outcomes} o on o.queue = f.queue and o.id = f.id
      where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static LOCK: LeafStatement =
    LeafStatement::new("select from {outcomes} o where o.queue = $1 and o.id = $2 for update", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

static TAKE_BACK: LeafStatement = LeafStatement::new(
    "delete from {outcomes} o
      where o.queue = $1 and o.id = $2 and o.outcome in ('failed', 'cancelled')
      returning o.outcome::text, o.attempt, o.lease, o.finished_at, o.error, o.incarnation, o.xact",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static FORGIVE: Statement = Statement::new(c"delete from stint.follow_ups u where u.queue = $1 and u.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// Keeps what is owed from being paid until this transaction ends: whoever pays it then sees that the task is live again.
static PUT_OFF: Statement =
    Statement::new(c"select from stint.follow_ups u where u.queue = $1 and u.id = $2 for update", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

static RECORD: Statement = Statement::new(
    c"insert into stint.task_retries (queue, id, retry, retried_at, outcome, attempt, lease, finished_at, error, outcome_incarnation, outcome_xact)
      select $1, $2, coalesce(max(t.retry), 0) + 1, $3, $4, $5, $6, $7, $8, $9, $10
      from stint.task_retries t
      where t.queue = $1 and t.id = $2",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::INT4OID,
        pg_sys::UUIDOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::INT4OID,
        pg_sys::XID8OID,
    ],
);

/// In the order of their ids, as every verb that takes several.
static FAILED: Statement = Statement::new(
    c"select o.id, f.lane, f.group_key::text
      from stint.task_outcomes o
      join stint.task_facts f on f.queue = o.queue and f.id = o.id and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(o.id), 15)
      where o.queue = $1 and o.outcome = 'failed' and o.finished_at >= coalesce($2, '-infinity') and ($3 is null or f.agent = $3)
      order by o.id
      limit $4
      for update of o skip locked",
    &[pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// A finished task about to become live again.
struct Finished {
    id: pgrx::Uuid,
    outcome: String,
    key: Option<String>,
    /// Its group.
    group_key: Option<String>,
    /// Whether groups were strict when it was enqueued.
    strict: bool,
    depends_on: Vec<pgrx::Uuid>,
    on_failure: OnFailure,
    /// Where it stands, but for its attempt.
    ticket: Ticket,
}

impl Finished {
    /// The group in which it waits for its turn.
    fn strict_group(&self) -> Option<&str> {
        self.group_key.as_deref().filter(|_| self.strict)
    }
}

/// What is known of a task; `None` where it has no outcome.
fn finished(session: &Session, name: &str, id: pgrx::Uuid) -> Option<Finished> {
    let row = history::read(session, &TASK, id, &[arg(name), arg(id)]);
    if row.is_empty() {
        late::unknown_task(session, name, id);
    }
    let depends_on: Vec<pgrx::Uuid> = row.must(0, 5);
    // Those that are not known any more hold up nothing.
    let gone = enter::unknown(session, name, &depends_on);
    Some(Finished {
        id,
        outcome: row.get(0, 1)?,
        key: row.get(0, 2),
        group_key: row.get(0, 3),
        strict: row.must(0, 4),
        depends_on: depends_on.into_iter().filter(|on| !gone.iter().any(|gone| gone.as_bytes() == on.as_bytes())).collect(),
        on_failure: row.get::<String>(0, 6).and_then(|word| OnFailure::parse(&word)).unwrap_or(OnFailure::Fail),
        ticket: Ticket { id, lane: row.must(0, 7), priority: row.must(0, 8), tokens: row.get(0, 9), attempt: 0, counted: 0 },
    })
}

/// Whether the task has its key, or takes it again.
fn has_key(session: &Session, name: &str, queue: &Queue, task: &Finished, now: Instant) -> bool {
    let holder = task.key.as_ref().and_then(|key| keys::hold(session, name, queue, key, task.id, now));
    holder.is_none_or(|holder| holder.as_bytes() == task.id.as_bytes())
}

/// Makes tasks live again whose outcomes are locked and whose keys are theirs. Returns the status of each, and how many are ready.
fn revive(session: &Session, name: &str, queue: &Queue, tasks: &[Finished], now: Instant) -> (Vec<&'static str>, usize) {
    let own: HashSet<[u8; 16]> = tasks.iter().map(|task| *task.id.as_bytes()).collect();
    // Those that are retried in the same call are live again, whatever their rows still say.
    let others: Vec<Vec<pgrx::Uuid>> =
        tasks.iter().map(|task| task.depends_on.iter().filter(|on| !own.contains(on.as_bytes())).copied().collect()).collect();
    let waits = tasks.iter().zip(&others).map(|(task, others)| Wait { depends_on: others, group_key: task.strict_group(), budgets: None });
    // Lanes of groups are made in one order, as everywhere.
    let places: BTreeSet<(&str, i32)> = tasks.iter().filter_map(|task| Some((task.group_key.as_deref()?, task.ticket.lane))).collect();
    for (group, lane) in places {
        config::lane_again(session, name, queue, lane, Some(group));
    }
    let mut gate = enter::hold(session, name, queue, waits);
    let statuses: Vec<&'static str> = tasks.iter().map(|task| revive_one(session, name, queue, &mut gate, task, now)).collect();
    gate.leave(session, name);
    let ready = statuses.iter().filter(|status| **status == "ready").count();
    (statuses, ready)
}

fn revive_one(session: &Session, name: &str, queue: &Queue, gate: &mut Gate, task: &Finished, now: Instant) -> &'static str {
    let id = task.id;
    let row = history::read(session, &TAKE_BACK, id, &[arg(name), arg(id)]);
    let group = task.strict_group().filter(|_| queue.strict_groups);
    // What waits for it and was not moved yet goes on waiting. But the turn it had in its group is still to be handed on: it stands at the end of the line.
    session.run(if group.is_some() { &PUT_OFF } else { &FORGIVE }, &[arg(name), arg(id)]);
    let attempt: i32 = row.must(0, 2);
    session.run(
        &RECORD,
        &[
            arg(name),
            arg(id),
            arg(now),
            arg(row.get::<String>(0, 1)),
            arg(attempt),
            arg(row.get::<pgrx::Uuid>(0, 3)),
            arg(row.get::<Instant>(0, 4)),
            arg(row.get::<String>(0, 5)),
            row.lift(0, 6),
            row.lift(0, 7),
        ],
    );
    let lane = config::lane_again(session, name, queue, task.ticket.lane, task.group_key.as_deref());
    let ticket = Ticket { attempt, lane, ..task.ticket };
    // Whoever retries it has seen how they ended: only those that live again count again.
    let open = gate.open(&task.depends_on);
    let behind = group.filter(|key| !gate.take_turn(key)).map(|key| (key, store::next_seq()));
    if open.is_empty() && behind.is_none() {
        store::to_ready(session, name, &ticket);
        return "ready";
    }
    store::to_blocked(session, name, &ticket, None, behind);
    enter::depend(session, name, id, open, task.on_failure);
    "blocked"
}

/// Retries one task. Answers what came of it and the task's status; `None` where the task moved meanwhile.
fn retry_one(session: &Session, name: &str, queue: &Queue, id: pgrx::Uuid, now: Instant) -> Option<(&'static str, String)> {
    let Some(task) = finished(session, name, id) else { return Some(("not_finished", live_status(session, name, id)?)) };
    if task.outcome == "completed" {
        return Some(("already_completed", task.outcome));
    }
    if history::read(session, &LOCK, id, &[arg(name), arg(id)]).is_empty() {
        return None;
    }
    if !has_key(session, name, queue, &task, now) {
        return Some(("key_taken", task.outcome));
    }
    let (statuses, ready) = revive(session, name, queue, &[task], now);
    store::announce(queue, ready);
    Some(("retried", statuses.first()?.to_string()))
}

static STATUS: Statement =
    Statement::new(c"select t.status from stint.tasks t where t.queue = $1 and t.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// The status of a task that has no outcome; `None` where it moved meanwhile.
fn live_status(session: &Session, name: &str, id: pgrx::Uuid) -> Option<String> {
    session.run(&STATUS, &[arg(name), arg(id)]).get(0, 1)
}

/// See the SQL COMMENT of stint.retry.
#[pg_extern(sql = false)]
fn retry(queue: Option<&str>, id: Option<pgrx::Uuid>) -> TableIterator<'static, (name!(outcome, String), name!(status, String))> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let (outcome, status) = spi::connect(|session| {
        let queue = config::find(session, name);
        config::keep_from_dropping();
        late::decide(|| retry_one(session, name, &queue, id, now))
    });
    TableIterator::once((outcome.to_string(), status))
}

/// See the SQL COMMENT of stint.retry_failed.
#[pg_extern(sql = false)]
fn retry_failed(queue: Option<&str>, since: Option<Instant>, agent: Option<&str>, max: Option<i32>) -> i64 {
    shmem::required();
    let name = input::name("queue", queue);
    let agent = input::optional_name("agent", agent);
    let max = input::batch("max", max);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let queue = config::find(session, name);
        config::keep_from_dropping();
        let failed = session.run(&FAILED, &[arg(name), arg(since), arg(agent), arg(max as i64)]);
        let mut tasks: Vec<Finished> = (0..failed.len()).filter_map(|at| finished(session, name, failed.must(at, 1))).collect();
        // Keys in one order, as a batch of enqueues takes them.
        tasks.sort_by(|a, b| a.key.cmp(&b.key));
        tasks.retain(|task| has_key(session, name, &queue, task, now));
        tasks.sort_unstable_by_key(|task| *task.id.as_bytes());
        if tasks.is_empty() {
            return 0;
        }
        let (statuses, ready) = revive(session, name, &queue, &tasks, now);
        store::announce(&queue, ready);
        statuses.len() as i64
    })
}
