//! `stint.task_counts` and `stint.cost_of_failed`.

use super::filter::{Filter, TYPES, one_of, sql, task_rows, types};
use crate::shmem;
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, RawNumeric};
use pgrx::prelude::*;
use stint_core::rollup::Level;

/// Where a live task is.
pub const LIVE: &[&str] = &["scheduled", "blocked", "ready", "running"];

/// How a task finishes.
pub const OUTCOMES: &[&str] = &["completed", "failed", "cancelled"];

static FINISHED: Statement = Statement::new(
    sql(concat!(
        "select s.queue, s.outcome, sum(s.tasks)::bigint from (",
        task_rows!(),
        ") s group by s.queue, s.outcome having sum(s.tasks) <> 0 order by 1, 2\0"
    )),
    &TYPES,
);

/// Live tasks by queue and status, with the filters of `filter`. Each place is counted along its own index.
macro_rules! live_counts {
    () => {
        "select l.queue, l.status, count(*) as tasks
         from (select w.queue, 'ready' as status from stint.place_ready w
               where ($9 is null or $9 = 'ready') and ($6 is null or w.queue = $6) and ($7 is null or w.agent = $7)
               union all
               select s.queue, 'scheduled' from stint.place_scheduled s
               where ($9 is null or $9 = 'scheduled') and ($6 is null or s.queue = $6)
                 and ($7 is null or (select f.agent from stint.task_facts f where f.queue = s.queue and f.id = s.id
                                      and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(s.id), 15)) = $7)
               union all
               select b.queue, 'blocked' from stint.place_blocked b
               where ($9 is null or $9 = 'blocked') and ($6 is null or b.queue = $6)
                 and ($7 is null or (select f.agent from stint.task_facts f where f.queue = b.queue and f.id = b.id
                                      and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(b.id), 15)) = $7)
               union all
               select r.queue, 'running' from stint.place_running r
               where ($9 is null or $9 = 'running') and ($6 is null or r.queue = $6)
                 and ($7 is null or (select f.agent from stint.task_facts f where f.queue = r.queue and f.id = r.id
                                      and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(r.id), 15)) = $7)) l
         group by l.queue, l.status"
    };
}

pub(crate) use live_counts;

static NOW: Statement = Statement::new(sql(concat!(live_counts!(), "\0")), &TYPES);

/// See the SQL COMMENT of stint.task_counts.
#[pg_extern(sql = false)]
fn task_counts(
    since: Option<Instant>,
    until: Option<Instant>,
    status: Option<&str>,
    agent: Option<&str>,
    queue: Option<&str>,
) -> TableIterator<'static, (name!(queue, String), name!(status, String), name!(tasks, i64))> {
    shmem::required();
    let filter = Filter { since, until, status, agent, queue, model: None }.checked(&[LIVE, OUTCOMES].concat());
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        let asked = filter.asked(session, Level::Month);
        let mut all: Vec<(String, String, i64)> = Vec::new();
        if asked.since <= now && now < asked.until {
            let rows = session.read(&NOW, &asked.with(&[]));
            all.extend((0..rows.len()).map(|at| (rows.must(at, 1), rows.must(at, 2), rows.must(at, 3))));
        }
        let rows = session.read(&FINISHED, &asked.with(&[]));
        all.extend((0..rows.len()).map(|at| (rows.must(at, 1), rows.must(at, 2), rows.must(at, 3))));
        all.sort();
        all
    }))
}

static COST: Statement = Statement::new(
    sql(concat!(
        "select s.queue, nullif(s.agent, ''), sum(s.tasks) filter (where f.ok)::bigint, sum(s.attempts) filter (where f.ok)::bigint,
                coalesce(sum(s.input_tokens) filter (where f.ok), 0), coalesce(sum(s.cached_tokens) filter (where f.ok), 0),
                coalesce(sum(s.output_tokens) filter (where f.ok), 0), coalesce(sum(s.model_cost) filter (where f.ok), 0),
                coalesce(sum(s.compute_cost) filter (where f.ok), 0), coalesce(sum(s.model_cost + s.compute_cost) filter (where f.ok), 0),
                sum(s.retried_attempts)::bigint, sum(s.retried_cost)
         from (",
        task_rows!(),
        ") s cross join lateral (select s.outcome = any ($10) as ok) f
         group by s.queue, s.agent
         having coalesce(sum(s.tasks) filter (where f.ok), 0) <> 0 or sum(s.retried_attempts) <> 0
         order by 10 desc, 1, 2 nulls first\0"
    )),
    &types::<10>(&[pg_sys::TEXTARRAYOID]),
);

/// See the SQL COMMENT of stint.cost_of_failed.
#[pg_extern(sql = false)]
fn cost_of_failed(
    since: Option<Instant>,
    until: Option<Instant>,
    status: Option<&str>,
    agent: Option<&str>,
    queue: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(queue, String),
        name!(agent, Option<String>),
        name!(tasks, i64),
        name!(attempts, i64),
        name!(input_tokens, Option<RawNumeric>),
        name!(cached_tokens, Option<RawNumeric>),
        name!(output_tokens, Option<RawNumeric>),
        name!(model_cost, Option<RawNumeric>),
        name!(compute_cost, Option<RawNumeric>),
        name!(cost, Option<RawNumeric>),
        name!(retried_attempts, i64),
        name!(retried_cost, Option<RawNumeric>),
    ),
> {
    shmem::required();
    let words = match status {
        Some(status) => {
            one_of("status", status, &["failed", "cancelled"]);
            vec![status.to_string()]
        }
        None => vec!["failed".to_string(), "cancelled".to_string()],
    };
    // Completed tasks are read too, for what their failed attempts cost.
    let filter = Filter { since, until, status: None, agent, queue, model: None }.checked(OUTCOMES);
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        let rows = session.read(&COST, &filter.asked(session, Level::Month).with(&[arg(words)]));
        let row = |at| {
            let [input, cached, output, model_cost, compute_cost, cost] = [5, 6, 7, 8, 9, 10].map(|column| rows.lift(at, column).map(RawNumeric));
            let [tasks, attempts] = [3, 4].map(|column| rows.get(at, column).unwrap_or(0));
            let retried = rows.lift(at, 12).map(RawNumeric);
            (rows.must(at, 1), rows.get(at, 2), tasks, attempts, input, cached, output, model_cost, compute_cost, cost, rows.must(at, 11), retried)
        };
        (0..rows.len()).map(row).collect::<Vec<_>>()
    }))
}
