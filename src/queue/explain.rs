//! `stint.explain`: says in words where a task is and why it is not running.

use super::config;
use super::late;
use crate::input;
use crate::shmem::{self, Instance};
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use stint_core::budget::{Limit, Usage};

static LOOK: Statement = Statement::new(
    c"select w.lane, w.priority, w.seq, f.tokens,
             s.run_at, s.attempt,
             r.attempt, r.worker::text, r.started_at, coalesce(r.extended_until, r.expires_at), r.cancel_requested,
             o.outcome::text, o.finished_at, o.attempt, o.error,
             (select a.ended || coalesce(': ' || a.error, '')
              from stint.task_attempts a
              where a.queue = f.queue and a.id = f.id
              order by a.attempt desc
              limit 1),
             s.event::text, b.attempt, b.group_key::text,
             (select string_agg(x.on_id::text, ', ')
              from (select d.on_id from stint.task_dependencies d where d.queue = b.queue and d.id = b.id order by d.spot limit 5) x),
             (select count(*) from (select from stint.task_dependencies d where d.queue = b.queue and d.id = b.id limit 1000) x),
             (select count(*)
              from (select from stint.place_blocked a where a.queue = b.queue and a.group_key = b.group_key and a.group_seq < b.group_seq limit 1000) x)
      from stint.task_facts f
      left join stint.place_ready w on w.queue = f.queue and w.id = f.id
      left join stint.place_scheduled s on s.queue = f.queue and s.id = f.id
      left join stint.place_blocked b on b.queue = f.queue and b.id = f.id
      left join stint.place_running r on r.queue = f.queue and r.id = f.id
      left join stint.task_outcomes o on o.queue = f.queue and o.id = f.id
      where f.queue = $1 and f.id = $2",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// How many tasks stand before this one in its lane, counted up to a thousand.
static AHEAD: Statement = Statement::new(
    c"select count(*)
      from (select from stint.place_ready a
            where a.queue = $1 and a.lane = $2 and (a.priority > $3 or a.priority = $3 and a.seq < $4)
            limit 1000) as ahead",
    &[pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID],
);

fn seconds(micros: i64) -> String {
    format!("{:.1} s", micros as f64 / SECOND as f64)
}

/// Why a budget keeps a task waiting; `None` where it has room.
fn shortage(name: &str, limit: Limit, usage: Usage, tokens: Option<i64>) -> Option<String> {
    let cost = limit.cost(tokens);
    if !limit.could_ever_run(tokens) {
        return Some(match (limit.max_running, limit.max_tokens) {
            (Some(..1), _) => format!("budget \"{name}\" is closed: it allows no running task"),
            (_, max) => {
                format!("held: the task needs {} tokens, but budget \"{name}\" allows {} at all", cost.tokens, max.unwrap_or(0))
            }
        });
    }
    if limit.holds(usage.plus(cost)) {
        return None;
    }
    let running = limit.max_running.filter(|max| usage.running >= *max).map(|max| format!("{} of {max} tasks running", usage.running));
    let in_flight = limit
        .max_tokens
        .filter(|max| usage.tokens.saturating_add(cost.tokens) > *max)
        .map(|max| format!("{} of {max} tokens in flight, the task needs {}", usage.tokens, cost.tokens));
    let parts: Vec<String> = running.into_iter().chain(in_flight).collect();
    Some(format!("budget \"{name}\" has no room: {}", parts.join("; ")))
}

fn why_ready(session: &Session, name: &str, row: &Rows) -> String {
    let (lane, priority, seq): (i32, i32, i64) = (row.must(0, 1), row.must(0, 2), row.must(0, 3));
    let queue = config::find(session, name);
    let ahead: i64 = session.run(&AHEAD, &[arg(name), arg(lane), arg(priority), arg(seq)]).must(0, 1);
    let mut reasons: Vec<String> = Vec::new();
    if queue.paused {
        reasons.push("the queue is paused".to_string());
    }
    if let Some(lane) = queue.lane(lane) {
        let numbers: Vec<i32> = lane.draws.iter().map(|at| queue.budgets[*at].number).collect();
        let usage = match shmem::get() {
            Some(shared) => shmem::budgets::usage(shared, Instance::here(), &numbers),
            None => vec![Usage::default(); numbers.len()],
        };
        for (at, used) in lane.draws.iter().zip(usage) {
            let budget = &queue.budgets[*at];
            reasons.extend(shortage(&budget.name, budget.limit, used, row.get(0, 4)));
        }
    }
    match ahead {
        0 => {}
        1 => reasons.push("1 task stands before it".to_string()),
        1000.. => reasons.push("at least 1000 tasks stand before it".to_string()),
        one_or_more => reasons.push(format!("{one_or_more} tasks stand before it")),
    }
    if reasons.is_empty() { "ready: the next claim gets it".to_string() } else { format!("ready: {}", reasons.join("; ")) }
}

fn why_blocked(row: &Rows) -> String {
    let tasks = row.get::<String>(0, 20).map(|ids| match row.get::<i64>(0, 21).unwrap_or(0) {
        1 => format!("waits for task {ids} to end"),
        few @ 2..=5 => format!("waits for {few} tasks to end: {ids}"),
        1000.. => format!("waits for at least 1000 tasks to end, among them {ids}"),
        many => format!("waits for {many} tasks to end, among them {ids}"),
    });
    let turn = row.get::<String>(0, 19).map(|key| {
        // The one that has its turn is in another place.
        let ahead = row.get::<i64>(0, 22).unwrap_or(0) + 1;
        format!("waits for its turn in group \"{key}\", {}{ahead} before it", if ahead > 1000 { "at least " } else { "" })
    });
    format!("blocked: {}", tasks.into_iter().chain(turn).collect::<Vec<_>>().join("; "))
}

fn describe(session: &Session, name: &str, row: &Rows, now: Instant) -> Option<String> {
    if row.get::<i32>(0, 1).is_some() {
        return Some(why_ready(session, name, row));
    }
    if row.get::<i32>(0, 18).is_some() {
        return Some(why_blocked(row));
    }
    if let Some(run_at) = row.get::<Instant>(0, 5) {
        let left = run_at.0.saturating_sub(now.0);
        if let Some(event) = row.get::<String>(0, 17) {
            return Some(format!("scheduled: awaits event \"{event}\", at most for another {}", seconds(left.max(0))));
        }
        let when = if left > 0 { format!("due in {}", seconds(left)) } else { "due now, the maintenance worker moves it to ready".to_string() };
        let after = row.get::<String>(0, 16).map_or(String::new(), |last| format!("; attempt {} {last}", row.get::<i32>(0, 6).unwrap_or(0)));
        return Some(format!("scheduled: {when}{after}"));
    }
    if let Some(attempt) = row.get::<i32>(0, 7) {
        let (worker, started, until): (String, Instant, Instant) = (row.must(0, 8), row.must(0, 9), row.must(0, 10));
        let left = until.0.saturating_sub(now.0);
        let lease = if left > 0 {
            format!("its lease ends in {}", seconds(left))
        } else {
            format!("its lease lapsed {} ago and waits for the sweep", seconds(-left))
        };
        let cancel = if row.must(0, 11) { "; asked to cancel" } else { "" };
        return Some(format!("running: attempt {attempt} by {worker} for {}, {lease}{cancel}", seconds(now.0.saturating_sub(started.0))));
    }
    let outcome: String = row.get(0, 12)?;
    let error = row.get::<String>(0, 15).map_or(String::new(), |error| format!(": {error}"));
    let ago = seconds(now.0.saturating_sub(row.must::<Instant>(0, 13).0));
    Some(format!("{outcome} {ago} ago after {} attempts{error}", row.must::<i32>(0, 14)))
}

/// See the SQL COMMENT of stint.explain.
#[pg_extern(sql = false)]
fn explain(queue: Option<&str>, id: Option<pgrx::Uuid>) -> String {
    shmem::required();
    let name = input::name("queue", queue);
    let id = input::given("id", id);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        config::find(session, name);
        late::decide(|| {
            let row = session.run(&LOOK, &[arg(name), arg(id)]);
            if row.is_empty() {
                late::unknown_task(name, id);
            }
            describe(session, name, &row, Instant::now())
        })
    })
}
