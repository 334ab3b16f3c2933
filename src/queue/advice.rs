//! `stint.lease_advice` and `stint.prediction_advice`: what the attempts of a queue say about its lease and its predictions.

use super::config;
use crate::spi::{self, Statement, arg};
use crate::values::{RawInterval, RawNumeric};
use crate::{input, shmem};
use pgrx::prelude::*;

/// Attempts below which nothing is advised: a 99th percentile of fewer is chance.
static LEASE: Statement = Statement::new(
    c"select o.agent, o.attempts, o.lapsed, o.run50, o.run99, o.gap50, o.gap99, q.lease_for,
             case when o.attempts - o.lapsed < 20 then 'too few attempts to tell'
                  when o.beating * 2 >= o.attempts and o.gap99 * 2 > q.lease_for
                  then 'heartbeats come up to ' || o.gap99 || ' apart: send them more often, or lease for more than ' || o.gap99 * 3
                  when o.beating * 2 < o.attempts and o.run99 > q.lease_for
                  then 'attempts run longer than the lease without heartbeats: send them, or lease for more than ' || o.run99 * 1.5
                  when o.lapsed * 100 > o.attempts then 'more than one attempt in a hundred lapses: workers die, or pause for longer than the lease'
                  when o.beating * 2 < o.attempts and o.run99 * 10 < q.lease_for
                  then 'a dead worker is noticed late: a lease of ' || greatest(o.run99 * 3, interval '1 second') || ' would do'
                  else 'the lease fits' end
      from (select f.agent::text as agent, count(*) as attempts, count(*) filter (where a.ended = 'lapsed') as lapsed,
                   count(a.heartbeat_gap) as beating,
                   percentile_disc(0.5) within group (order by a.ended_at - a.started_at) filter (where a.ended <> 'lapsed') as run50,
                   percentile_disc(0.99) within group (order by a.ended_at - a.started_at) filter (where a.ended <> 'lapsed') as run99,
                   percentile_disc(0.5) within group (order by a.heartbeat_gap) as gap50,
                   percentile_disc(0.99) within group (order by a.heartbeat_gap) as gap99
            from stint.task_attempts a
            join stint.task_facts f on f.queue = a.queue and f.id = a.id and get_byte(uuid_send(f.id), 15) = get_byte(uuid_send(a.id), 15)
            where a.queue = $1 and a.ended in ('completed', 'failed', 'lapsed')
            group by f.agent) as o
      join stint.queue_config q on q.queue = $1
      order by o.agent nulls first",
    &[pg_sys::TEXTOID],
);

static PREDICTION: Statement = Statement::new(
    c"select o.agent, o.attempts, o.predicted, o.actual, round(o.actual / o.predicted, 3), round(o.p50, 3), round(o.p99, 3),
             case when o.attempts < 20 then 'too few attempts to tell'
                  when o.p50 > 1.2 then 'predicts too little, budgets are overshot: multiply predictions by ' || round(o.p50, 2)
                  when o.p50 < 0.8 then 'predicts too much, budgets are left unused: multiply predictions by ' || round(o.p50, 2)
                  when o.p99 > 3 then 'right in the middle, but one attempt in a hundred uses more than ' || round(o.p99, 1) || ' times its prediction'
                  else 'the predictions fit' end
      from (select t.agent, count(*) as attempts, sum(t.predicted) as predicted, sum(t.actual) as actual,
                   percentile_disc(0.5) within group (order by t.actual / t.predicted) as p50,
                   percentile_disc(0.99) within group (order by t.actual / t.predicted) as p99
            from (select v.agent::text as agent, v.predicted_tokens::numeric as predicted,
                         (coalesce(v.input_tokens, 0) + coalesce(v.output_tokens, 0))::numeric as actual
                  from stint.attempts v
                  where v.queue = $1 and v.predicted_tokens > 0 and v.ended in ('completed', 'failed')
                    and (v.input_tokens is not null or v.output_tokens is not null)) as t
            group by t.agent) as o
      order by o.agent nulls first",
    &[pg_sys::TEXTOID],
);

/// See the SQL COMMENT of stint.lease_advice.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // the row type, written out as pgrx wants it
fn lease_advice(
    queue: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(agent, Option<String>),
        name!(attempts, i64),
        name!(lapsed, i64),
        name!(run_time_p50, Option<RawInterval>),
        name!(run_time_p99, Option<RawInterval>),
        name!(heartbeat_gap_p50, Option<RawInterval>),
        name!(heartbeat_gap_p99, Option<RawInterval>),
        name!(lease_for, Option<RawInterval>),
        name!(advice, String),
    ),
> {
    shmem::required();
    let name = input::name("queue", queue);
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        config::find(session, name);
        let rows = session.run(&LEASE, &[arg(name)]);
        let interval = |at, column| rows.lift(at, column).map(RawInterval);
        let row = |at| {
            let [run50, run99, gap50, gap99, lease] = [4, 5, 6, 7, 8].map(|column| interval(at, column));
            (rows.get(at, 1), rows.must(at, 2), rows.must(at, 3), run50, run99, gap50, gap99, lease, rows.must(at, 9))
        };
        (0..rows.len()).map(row).collect::<Vec<_>>()
    }))
}

/// See the SQL COMMENT of stint.prediction_advice.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // as above
fn prediction_advice(
    queue: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(agent, Option<String>),
        name!(attempts, i64),
        name!(predicted_tokens, Option<RawNumeric>),
        name!(actual_tokens, Option<RawNumeric>),
        name!(factor, Option<RawNumeric>),
        name!(factor_p50, Option<RawNumeric>),
        name!(factor_p99, Option<RawNumeric>),
        name!(advice, String),
    ),
> {
    shmem::required();
    let name = input::name("queue", queue);
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        config::find(session, name);
        let rows = session.run(&PREDICTION, &[arg(name)]);
        let row = |at| {
            let [predicted, actual, factor, p50, p99] = [3, 4, 5, 6, 7].map(|column| rows.lift(at, column).map(RawNumeric));
            (rows.get(at, 1), rows.must(at, 2), predicted, actual, factor, p50, p99, rows.must(at, 8))
        };
        (0..rows.len()).map(row).collect::<Vec<_>>()
    }))
}
