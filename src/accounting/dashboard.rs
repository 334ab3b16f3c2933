//! `stint.dashboard`: everything a page shows, of one snapshot.

use super::filter::{ENDED, Filter, sql, task_rows, types, usage_rows};
use super::tasks::{LIVE, live_counts};
use crate::spi::{self, Statement, arg};
use crate::values::{Instant, RawJsonb, SECOND};
use crate::{errors, shmem};
use pgrx::prelude::*;
use stint_core::rollup::Level;

const PAGE_TYPES: [pg_sys::Oid; 13] = types(&[pg_sys::TEXTOID, pg_sys::BOOLOID, pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID]);

/// Rows are read once, added up by queue, agent and model, and that is added up further. $10: the format of a span of the series; $11: whether live tasks
/// belong to it; $12: most agents; $13: since when hours are kept.
static PAGE: Statement = Statement::new(
    sql(concat!(
        "with usage as materialized (",
        usage_rows!(),
        "), tasks as materialized (",
        task_rows!(),
        "), used as materialized (
             select s.queue, s.agent, s.model, sum(s.attempts) as attempts, sum(s.input_tokens) as input_tokens, sum(s.cached_tokens) as cached_tokens,
                    sum(s.output_tokens) as output_tokens, sum(s.model_cost) as model_cost, sum(s.compute_cost) as compute_cost,
                    stint.histogram('duration', array_agg(s.wait) filter (where s.wait is not null), array_agg(s.one_wait) filter (where s.one_wait is not null)) as wait,
                    stint.histogram('duration', array_agg(s.run) filter (where s.run is not null), array_agg(s.one_run) filter (where s.one_run is not null)) as run,
                    stint.histogram('share', array_agg(s.confidence) filter (where s.confidence is not null),
                                    array_agg(s.one_confidence) filter (where s.one_confidence is not null)) as confidence
             from usage s
             group by s.queue, s.agent, s.model
         ), finished as materialized (
             select s.queue, s.agent, s.outcome, sum(s.tasks)::bigint as tasks, sum(s.attempts)::bigint as attempts, sum(s.model_cost + s.compute_cost) as cost,
                    sum(s.retried_attempts)::bigint as retried_attempts, sum(s.retried_cost) as retried_cost
             from tasks s
             group by s.queue, s.agent, s.outcome
         ), live as materialized (select l.* from (", live_counts!(), ") l where $11),
         sums as (
             select g.by, g.name, sum(u.attempts)::bigint as attempts, sum(u.input_tokens) as input_tokens, sum(u.cached_tokens) as cached_tokens,
                    sum(u.output_tokens) as output_tokens, sum(u.model_cost) as model_cost, sum(u.compute_cost) as compute_cost,
                    sum(u.model_cost + u.compute_cost) as cost, stint.histogram('duration', array_agg(u.wait)) as wait,
                    stint.histogram('duration', array_agg(u.run)) as run, stint.histogram('share', array_agg(u.confidence)) as confidence
             from used u
             cross join lateral (values ('all', null), ('queue', u.queue), ('agent', nullif(u.agent, '')), ('model', nullif(u.model, ''))) as g (by, name)
             group by g.by, g.name
             union all
             select 'all', null, 0, 0, 0, 0, 0, 0, 0, null, null, null where not exists (select from used)
         ), lines as (
             select s.by, row_number() over (partition by s.by order by s.cost desc, s.attempts desc, s.name) as place,
                    jsonb_build_object('attempts', s.attempts, 'input_tokens', s.input_tokens, 'cached_tokens', s.cached_tokens, 'output_tokens', s.output_tokens,
                                       'model_cost', s.model_cost, 'compute_cost', s.compute_cost, 'cost', s.cost,
                                       'median_confidence', stint.quantile('share', s.confidence),
                                       'median_wait_ms', stint.quantile('duration', s.wait) / 1000, 'p95_wait_ms', stint.quantile('duration', s.wait, 0.95) / 1000,
                                       'p99_wait_ms', stint.quantile('duration', s.wait, 0.99) / 1000,
                                       'median_run_ms', stint.quantile('duration', s.run) / 1000, 'p95_run_ms', stint.quantile('duration', s.run, 0.95) / 1000,
                                       'p99_run_ms', stint.quantile('duration', s.run, 0.99) / 1000)
                    || case when s.by = 'all' then '{}' else jsonb_build_object(s.by, s.name) end as line
             from sums s
         ), bins as (
             select coalesce(a.bin, t.bin) as bin, a.attempts, a.tokens, a.cost, t.completed, t.failed, t.cancelled
             from (select date_bin(case when s.since < $13 then interval '1 day' else interval '1 hour' end, s.since, '2000-01-01 00:00:00+00') as bin, sum(s.attempts) as attempts,
                          sum(s.input_tokens + s.output_tokens) as tokens, sum(s.model_cost + s.compute_cost) as cost
                   from usage s group by 1) a
             full join (select date_bin(case when s.since < $13 then interval '1 day' else interval '1 hour' end, s.since, '2000-01-01 00:00:00+00') as bin,
                               sum(s.tasks) filter (where s.outcome = 'completed') as completed, sum(s.tasks) filter (where s.outcome = 'failed') as failed,
                               sum(s.tasks) filter (where s.outcome = 'cancelled') as cancelled
                        from tasks s group by 1) t on t.bin = a.bin
         ), series as (
             select to_char(b.bin at time zone 'UTC', $10) as at, coalesce(sum(b.attempts), 0)::bigint as attempts, coalesce(sum(b.tokens), 0) as tokens,
                    coalesce(sum(b.cost), 0) as cost, coalesce(sum(b.completed), 0)::bigint as completed, coalesce(sum(b.failed), 0)::bigint as failed,
                    coalesce(sum(b.cancelled), 0)::bigint as cancelled
             from bins b
             group by 1
         )
         select jsonb_build_object(
             'since', case when isfinite($4) then $4 end, 'until', case when isfinite($5) then $5 end,
             'rolled_up_at', (select e.rolled_up_at from stint.last_rollups e where e.incarnation = stint.incarnation()),
             'tasks', (select coalesce(jsonb_object_agg(c.status, c.tasks), '{}')
                       from (select b.status, sum(b.tasks)::bigint as tasks
                             from (select f.outcome as status, f.tasks from finished f union all select l.status, l.tasks from live l) b
                             group by b.status having sum(b.tasks) <> 0) c),
             'tasks_by_queue', (select coalesce(jsonb_object_agg(q.queue, q.tasks), '{}')
                                from (select c.queue, jsonb_object_agg(c.status, c.tasks) as tasks
                                      from (select b.queue, b.status, sum(b.tasks)::bigint as tasks
                                            from (select f.queue, f.outcome as status, f.tasks from finished f union all select l.queue, l.status, l.tasks from live l) b
                                            group by b.queue, b.status having sum(b.tasks) <> 0) c
                                      group by c.queue) q),
             'usage', (select l.line from lines l where l.by = 'all'),
             'queues', (select coalesce(jsonb_agg(l.line order by l.place), '[]') from lines l where l.by = 'queue'),
             'agents', (select coalesce(jsonb_agg(l.line order by l.place), '[]') from lines l where l.by = 'agent' and l.place <= $12),
             'models', (select coalesce(jsonb_agg(l.line order by l.place), '[]') from lines l where l.by = 'model' and l.place <= $12),
             'failed', (select jsonb_build_object('tasks', coalesce(sum(f.tasks) filter (where f.outcome = 'failed'), 0),
                                                  'attempts', coalesce(sum(f.attempts) filter (where f.outcome = 'failed'), 0),
                                                  'cost', coalesce(sum(f.cost) filter (where f.outcome = 'failed'), 0),
                                                  'retried_attempts', coalesce(sum(f.retried_attempts), 0), 'retried_cost', coalesce(sum(f.retried_cost), 0))
                        from finished f),
             'series', (select coalesce(jsonb_agg(to_jsonb(s) order by s.at), '[]') from series s),
             'error', jsonb_build_object('latency', 0.025, 'confidence', 0.005))\0"
    )),
    &PAGE_TYPES,
);

/// Agents and models on a page.
const MOST_LINES: i64 = 50;

const DAY: i64 = 24 * 3600 * SECOND;

/// See the SQL COMMENT of stint.dashboard.
#[pg_extern(sql = false)]
fn dashboard(since: Option<Instant>, until: Option<Instant>, status: Option<&str>, agent: Option<&str>, queue: Option<&str>) -> RawJsonb {
    shmem::required();
    let filter = Filter { since, until, status, agent, queue, model: None }.checked(&[LIVE, ENDED].concat());
    let now = Instant::now();
    let span = until.unwrap_or(now).0.min(now.0).saturating_sub(since.map_or(i64::MIN, |since| since.0));
    let (coarsest, format) = match span {
        span if span <= 3 * DAY => (Level::Hour, "YYYY-MM-DD HH24:00"),
        span if span <= 100 * DAY => (Level::Day, "YYYY-MM-DD"),
        _ => (Level::Month, "YYYY-MM"),
    };
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let asked = filter.asked(session, coarsest);
        let live = asked.since <= now && now < asked.until;
        let page = session.read(&PAGE, &asked.with(&[arg(format), arg(live), arg(MOST_LINES), arg(asked.hours_from)]));
        RawJsonb(page.lift(0, 1).unwrap_or_else(|| errors::internal("there is no page")))
    })
}
