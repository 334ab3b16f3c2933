//! `stint.record_usage`: usage that comes by another way than the call that ended the attempt.

use crate::errors::{self, Fault};
use crate::history::{self, LeafStatement};
use crate::queue::usage::{CALLBACK, Usage};
use crate::queue::{config, late};
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, RawJsonb, RawNumeric};
use crate::{input, shmem};
use pgrx::prelude::*;

/// Keeps the task's rows from being dropped, with their queue or by age, until this transaction ends.
static HOLD: LeafStatement =
    LeafStatement::new("select from {facts} f where f.queue = $1 and f.id = $2 for key share", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// Whether the task has such an attempt, ended or running.
static ATTEMPT: LeafStatement = LeafStatement::new(
    "select exists (select from {attempts} a where a.queue = $1 and a.id = $2 and a.attempt = $3)
             or exists (select from stint.place_running r where r.queue = $1 and r.id = $2 and r.attempt = $3)",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID],
);

static SAME: Statement = Statement::new(
    c"select u.run_id is not distinct from $5 and u.trace_id is not distinct from $6 and u.model is not distinct from $7
             and u.input_tokens is not distinct from $8 and u.cached_tokens is not distinct from $9 and u.output_tokens is not distinct from $10
             and u.model_cost is not distinct from $11 and u.compute_cost is not distinct from $12 and u.confidence is not distinct from $13
             and u.meta is not distinct from $14
      from stint.usage_late u
      where u.queue = $1 and u.id = $2 and u.attempt = $3 and u.key = $4",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
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
    ],
);

/// See the SQL COMMENT of stint.record_usage.
#[pg_extern(sql = false)]
fn record_usage(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    attempt: Option<i32>,
    key: Option<&str>,
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
) -> bool {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let attempt = input::at_least("attempt", input::given("attempt", attempt), 1);
    let key = input::given("key", input::reference("key", key));
    if key == CALLBACK {
        errors::invalid(
            format!("argument \"key\" is \"{key}\", under which late callbacks are kept"),
            "Use another key, such as the bill's own number.",
        )
    }
    let usage = Usage { run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta }.checked();
    if usage.is_empty() {
        errors::invalid(
            format!("the bill \"{key}\" says nothing"),
            "Pass at least one of run_id, trace_id, model, tokens, costs, confidence and meta.",
        )
    }
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        config::find(session, name);
        if history::read(session, &HOLD, id, &[arg(name), arg(id)]).is_empty() {
            late::unknown_task(session, name, id)
        }
        if !history::read(session, &ATTEMPT, id, &[arg(name), arg(id), arg(attempt)]).must::<bool>(0, 1) {
            Fault::new(PgSqlErrorCode::ERRCODE_NO_DATA_FOUND, format!("task {id} of queue \"{name}\" has no attempt {attempt}"))
                .hint("Attempts are numbered from 1, as stint.claim returned them; the view stint.attempts lists those that ended.")
                .raise()
        }
        if usage.keep(session, name, id, attempt, key, now) {
            return true;
        }
        let place = [arg(name), arg(id), arg(attempt), arg(key)];
        let same = session.run_latest(&SAME, &[place.as_slice(), &usage.params()].concat());
        if !same.get::<bool>(0, 1).unwrap_or(false) {
            Fault::new(PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION, format!("attempt {attempt} of task {id} has another bill with the key \"{key}\""))
                .hint("A bill never changes: record a correction under a key of its own.")
                .raise()
        }
        false
    })
}
