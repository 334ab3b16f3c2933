//! `stint.enqueue_once`: one task for a key, and the news whether this call made it.

use super::enqueue::{self, Request};
use super::flow::enter::{self, OnFailure};
use crate::errors::{self, Fault};
use crate::history::{self, LeafStatement};
use crate::spi::{self, Session, arg};
use crate::values::{Instant, RawInterval, RawJsonb};
use crate::{input, shmem};
use pgrx::prelude::*;

/// Whether the task that holds the key has another payload. Looks at what is committed now: whoever held the key may have come after the snapshot.
static DIFFERS: LeafStatement = LeafStatement::new(
    "select from {facts} f where f.queue = $1 and f.id = $2 and f.payload <> $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::JSONBOID],
);

fn refuse_other_payload(session: &Session, name: &str, earlier: pgrx::Uuid, request: &Request) {
    if !history::read_latest(session, &DIFFERS, earlier, &[arg(name), arg(earlier), arg(request.payload)]).is_empty() {
        let key = request.key.as_deref().unwrap_or_default();
        Fault::new(PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION, format!("key \"{key}\" of queue \"{name}\" is held by a task with another payload"))
            .detail(format!("The task is {earlier}."))
            .hint("Use another key for other work, or conflict => 'return' to get the task that is there.")
            .raise()
    }
}

/// See the SQL COMMENT of stint.enqueue_once.
#[pg_extern(sql = false)]
fn enqueue_once(
    queue: Option<&str>,
    payload: Option<RawJsonb>,
    key: Option<&str>,
    conflict: Option<&str>,
    priority: Option<i32>,
    run_at: Option<Instant>,
    delay: Option<RawInterval>,
    agent: Option<&str>,
    tokens: Option<i64>,
    budgets: Option<Vec<Option<String>>>,
    max_attempts: Option<i32>,
    lease_for: Option<RawInterval>,
    labels: Option<RawJsonb>,
    max_run_time: Option<RawInterval>,
    group_key: Option<&str>,
    depends_on: Option<Vec<Option<pgrx::Uuid>>>,
    on_dependency_failure: Option<&str>,
) -> TableIterator<'static, (name!(id, pgrx::Uuid), name!(created, bool))> {
    shmem::required();
    let name = input::name("queue", queue);
    let refuse = match input::given("conflict", conflict) {
        "return" => false,
        "error" => true,
        other => errors::invalid(format!("conflict \"{other}\" is not known"), "Use 'return' or 'error'."),
    };
    let request = Request {
        payload: input::given("payload", payload),
        priority: input::given("priority", priority),
        run_at,
        delay,
        key: Some(input::given("key", key).to_string()),
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
    TableIterator::once(spi::connect(|session| {
        enqueue::add(session, name, request, &budgets, now, |earlier, request| {
            if refuse {
                refuse_other_payload(session, name, earlier, request);
            }
        })
    }))
}
