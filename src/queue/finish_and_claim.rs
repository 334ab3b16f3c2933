//! `stint.finish_and_claim`: ends one attempt as completed and claims the next tasks in the same commit.

use super::claim::{self, Wish};
use super::config;
use super::finish::{self, Completion};
use super::usage::Usage;
use crate::answer::Table;
use crate::spi;
use crate::values::{Instant, RawInterval, RawJsonb, RawNumeric, RawText};
use crate::{input, shmem};
use pgrx::prelude::*;

/// One row: the finished task's, or a claimed one's. What belongs to the other kind is null.
type Row = (
    &'static str,
    pgrx::Uuid,
    Option<String>,
    Option<RawJsonb>,
    Option<bool>,
    Option<String>,
    Option<i32>,
    Option<pgrx::Uuid>,
    Option<RawJsonb>,
    Option<i32>,
    Option<RawText>,
    Option<i64>,
    Option<RawJsonb>,
    Option<Instant>,
    Option<Instant>,
    Option<i64>,
);

/// See the SQL COMMENT of stint.finish_and_claim.
#[pg_extern(sql = false)]
fn finish_and_claim(
    queue: Option<&str>,
    id: Option<pgrx::Uuid>,
    lease: Option<pgrx::Uuid>,
    worker: Option<&str>,
    result: Option<RawJsonb>,
    max: Option<i32>,
    lease_for: Option<RawInterval>,
    agents: Option<Vec<Option<String>>>,
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
    name!(kind, &'static str),
    name!(id, pgrx::Uuid),
    name!(outcome, Option<String>),
    name!(result, Option<RawJsonb>),
    name!(first, Option<bool>),
    name!(status, Option<String>),
    name!(attempt, Option<i32>),
    name!(lease, Option<pgrx::Uuid>),
    name!(payload, Option<RawJsonb>),
    name!(priority, Option<i32>),
    name!(agent, Option<RawText>),
    name!(tokens, Option<i64>),
    name!(labels, Option<RawJsonb>),
    name!(enqueued_at, Option<Instant>),
    name!(expires_at, Option<Instant>),
    name!(expires_in_ms, Option<i64>),
)> {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let lease = input::given("lease", lease);
    let wish = Wish {
        worker: input::name("worker", worker),
        max: input::batch("max", max),
        lease_for: lease_for.map(|lease| input::lease("lease_for", lease)),
        agents: claim::checked_agents(agents),
        hand_on: true,
    };
    input::json("result", result);
    let usage = Usage { run_id, trace_id, model, input_tokens, cached_tokens, output_tokens, model_cost, compute_cost, confidence, meta }.checked();
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let rows = spi::connect(|session| {
        let queue = config::find(session, name);
        let answer = finish::complete_one(session, name, &queue, &Completion { id, lease, result, usage }, now);
        let mut rows: Vec<Row> = vec![(
            "finished",
            id,
            Some(answer.outcome.to_string()),
            answer.result,
            Some(answer.first),
            Some(answer.status),
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )];
        let claimed = claim::try_claim(session, name, &queue, &wish);
        rows.extend(claimed.into_iter().map(
            |(id, attempt, lease, payload, priority, agent, tokens, labels, enqueued_at, expires_at, expires_in_ms)| {
                (
                    "claimed",
                    id,
                    None,
                    None,
                    None,
                    Some("running".to_string()),
                    Some(attempt),
                    Some(lease),
                    payload,
                    Some(priority),
                    agent,
                    tokens,
                    labels,
                    Some(enqueued_at),
                    Some(expires_at),
                    Some(expires_in_ms),
                )
            },
        ));
        rows
    });
    Table::of(rows)
}
