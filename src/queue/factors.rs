//! What predictions turn out to be: a factor for each agent of a queue that corrects them, found from its latest attempts every minute and kept in a small table
//! that backends read with the queue's settings. So a claim multiplies, and never reads history.

use crate::shmem::{self, config as generation};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;

/// The attempts of the latest tasks, and of these the latest of each agent. Tasks are numbered in the order of time, so the index on attempts ends with them.
static LATEST: Statement = Statement::new(
    c"with latest as materialized (
            select a.id, a.ended, a.ended_at, a.input_tokens, a.output_tokens
            from stint.task_attempts a
            where a.queue = $1
            order by a.id desc, a.attempt desc
            limit $2),
      samples as (
            select coalesce(f.agent, '') as agent, f.tokens::numeric as predicted,
                   (coalesce(l.input_tokens, 0) + coalesce(l.output_tokens, 0))::numeric as actual,
                   row_number() over (partition by f.agent order by l.ended_at desc) as place
            from latest l
            cross join lateral (select t.agent, t.tokens from stint.task_facts t where t.queue = $1 and t.id = l.id limit 1) as f
            where f.tokens > 0 and l.ended in ('completed', 'failed') and (l.input_tokens is not null or l.output_tokens is not null))
      select s.agent::text, count(*), round(least(greatest(sum(s.actual) / sum(s.predicted), 0.25), 4), 3)::double precision
      from samples s
      where s.place <= $3
      group by s.agent
      having count(*) >= $4
      order by s.agent",
    &[pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// So many attempts of a queue are looked at, of each agent so many counted, and fewer than the least say nothing.
const LOOKED_AT: i64 = 10_000;
const COUNTED: i64 = 1_000;
const LEAST: i64 = 20;

static KEEP: Statement = Statement::new(
    c"insert into stint.prediction_factors as p (queue, agent, attempts, factor, refreshed_at)
      select $1, u.agent, u.attempts, u.factor, $5 from unnest($2, $3, $4) as u (agent, attempts, factor)
      on conflict (queue, agent) do update set attempts = excluded.attempts, factor = excluded.factor, refreshed_at = excluded.refreshed_at
      where p.factor <> excluded.factor",
    &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::INT8ARRAYOID, pg_sys::FLOAT8ARRAYOID, pg_sys::TIMESTAMPTZOID],
);

static FORGET: Statement =
    Statement::new(c"delete from stint.prediction_factors p where p.queue = $1 and p.agent <> all ($2)", &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID]);

static QUEUES: Statement = Statement::new(c"select q.queue::text from stint.queue_config q where q.correct_predictions order by q.queue", &[]);

/// Finds the factors of a queue anew. Returns how many changed.
pub fn refresh(session: &Session, name: &str) -> usize {
    let rows = session.run(&LATEST, &[arg(name), arg(LOOKED_AT), arg(COUNTED), arg(LEAST)]);
    let (mut agents, mut attempts, mut factors): (Vec<String>, Vec<i64>, Vec<f64>) = Default::default();
    for at in 0..rows.len() {
        agents.push(rows.must(at, 1));
        attempts.push(rows.must(at, 2));
        factors.push(rows.must(at, 3));
    }
    let mut changed = session.run(&FORGET, &[arg(name), arg(agents.clone())]).len();
    if !agents.is_empty() {
        changed += session.run(&KEEP, &[arg(name), arg(agents), arg(attempts), arg(factors), arg(Instant::now())]).len();
    }
    if changed > 0 {
        generation::changed();
    }
    changed
}

fn refresh_all() -> i64 {
    spi::connect(|session| {
        let queues = session.run(&QUEUES, &[]);
        (0..queues.len()).map(|at| refresh(session, &queues.must::<String>(at, 1)) as i64).sum()
    })
}

/// See the SQL COMMENT of stint.refresh_factors.
#[pg_extern(sql = false)]
fn refresh_factors() -> i64 {
    shmem::required();
    let _owner = spi::Identity::owner();
    refresh_all()
}

/// How often the maintenance worker does it, in microseconds.
const REFRESH_EVERY: i64 = 60 * SECOND;

thread_local! {
    static NEXT: Cell<i64> = const { Cell::new(i64::MIN) };
}

/// Whether it is time again.
pub fn due() -> bool {
    Instant::now().0 >= NEXT.get()
}

/// One round for the maintenance worker.
pub fn step() -> bool {
    NEXT.set(Instant::now().plus(REFRESH_EVERY).0);
    refresh_all();
    false
}
