//! `stint.retry` and `stint.retry_failed`: a finished task becomes live again. Its outcome moves to `task_retries`, its attempts stay, and those that counted count
//! no more.

use super::config::{self, Queue};
use super::store::{self, Ticket};
use super::{keys, late};
use crate::errors::Fault;
use crate::history::{self, LeafStatement};
use crate::spi::{self, Session, Statement, arg};
use crate::values::Instant;
use crate::{input, shmem};
use pgrx::prelude::*;
use std::collections::BTreeSet;

/// The key first: a task whose key has passed to another stays as it is.
static KEY: LeafStatement = LeafStatement::new(
    "select f.key::text, o.outcome::text, f.group_seq is not null
      from {facts} f
      left join {outcomes} o on o.queue = f.queue and o.id = f.id
      where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static TAKE_BACK: LeafStatement = LeafStatement::new(
    "delete from {outcomes} o
      where o.queue = $1 and o.id = $2 and o.outcome in ('failed', 'cancelled')
      returning o.outcome::text, o.attempt, o.lease, o.finished_at, o.error, o.incarnation, o.xact",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static FORGIVE: Statement = Statement::new(c"delete from stint.follow_ups u where u.queue = $1 and u.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

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

static FACTS: LeafStatement = LeafStatement::new(
    "select f.lane, f.priority, f.tokens, f.group_key::text from {facts} f where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// In the order of their ids, as every verb that takes several.
static FAILED: Statement = Statement::new(
    c"select o.id, f.lane, f.group_key::text
      from stint.task_outcomes o
      join stint.task_facts f on f.queue = o.queue and f.id = o.id and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(o.id), 15)
      where o.queue = $1 and o.outcome = 'failed' and o.finished_at >= coalesce($2, '-infinity') and ($3 is null or f.agent = $3) and f.group_seq is null
      order by o.id
      limit $4
      for update of o skip locked",
    &[pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// Retries one task. Answers what came of it and the task's status; `None` where the task moved meanwhile.
fn retry_one(session: &Session, name: &str, queue: &Queue, id: pgrx::Uuid, now: Instant) -> Option<(&'static str, String)> {
    let task = history::read(session, &KEY, id, &[arg(name), arg(id)]);
    if task.is_empty() {
        late::unknown_task(session, name, id);
    }
    let status = match task.get::<String>(0, 2).as_deref() {
        None => return Some(("not_finished", live_status(session, name, id)?)),
        Some("completed") => return Some(("already_completed", "completed".to_string())),
        Some(status) => status.to_string(),
    };
    if task.must(0, 3) {
        Fault::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("cannot retry task {id}: its group is strict and its turn has passed"))
            .hint("Enqueue the work again with the same group_key: it runs after those of the group that wait.")
            .raise()
    }
    if let Some(key) = task.get::<String>(0, 1)
        && keys::hold(session, name, queue, &key, id, now).is_some_and(|holder| holder.as_bytes() != id.as_bytes())
    {
        return Some(("key_taken", status));
    }
    let row = history::read(session, &TAKE_BACK, id, &[arg(name), arg(id)]);
    if row.is_empty() {
        return None;
    }
    // What waits for it and was not moved yet goes on waiting.
    session.run(&FORGIVE, &[arg(name), arg(id)]);
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
    let facts = history::read(session, &FACTS, id, &[arg(name), arg(id)]);
    let lane = config::lane_again(session, name, queue, facts.must(0, 1), facts.get::<String>(0, 4).as_deref());
    let ticket = Ticket { id, lane, priority: facts.must(0, 2), tokens: facts.get(0, 3), attempt, counted: 0 };
    store::to_ready(session, name, &ticket);
    Some(("retried", "ready".to_string()))
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
        let answer = late::decide(|| retry_one(session, name, &queue, id, now));
        if answer.0 == "retried" {
            store::announce(&queue, 1);
        }
        answer
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
        let ids: Vec<pgrx::Uuid> = (0..failed.len()).map(|at| failed.must(at, 1)).collect();
        // Lanes of groups are made in one order, as everywhere.
        let places: BTreeSet<(String, i32)> = (0..failed.len()).filter_map(|at| Some((failed.get(at, 3)?, failed.must(at, 2)))).collect();
        for (group, lane) in &places {
            config::lane_again(session, name, &queue, *lane, Some(group));
        }
        let retried =
            ids.into_iter().filter(|id| retry_one(session, name, &queue, *id, now).is_some_and(|(outcome, _)| outcome == "retried")).count();
        if retried > 0 {
            store::announce(&queue, retried);
        }
        retried as i64
    })
}
