//! A call whose lease is not the live one: what `stint_core::verdict` decides is looked up, and where a late result is accepted, done.

use super::config::Queue;
use super::flow::leave::{self, End};
use super::store::{self, Outcome};
use super::usage::Usage;
use crate::errors::Fault;
use crate::history::{self, LeafStatement};
use crate::shmem::{self, heads};
use crate::spi::{Session, Statement, arg};
use crate::values::{Instant, RawJsonb};
use pgrx::prelude::*;
use stint_core::verdict::{Call, Ended, Place, Verdict, late_call};

/// Everything known of the task and of the lease, in one snapshot.
static LOOK: LeafStatement = LeafStatement::new(
    "select f.id is not null,
             coalesce(w.attempt, s.attempt, b.attempt),
             case when w.id is not null then 'ready' when s.id is not null then 'scheduled' when b.id is not null then 'blocked' when r.id is not null then 'running' else o.outcome end,
             r.id is not null,
             o.lease is not distinct from $3,
             a.attempt,
             a.ended::text,
             o.result
      from (values ($1, $2)) as t (queue, id)
      left join {facts} f on f.queue = t.queue and f.id = t.id
      left join lateral (
            select x.id, x.attempt from stint.place_ready x where x.queue = t.queue and x.id >= t.id and x.id <= t.id order by x.id limit 1) as w on true
      left join stint.place_scheduled s on s.queue = t.queue and s.id = t.id
      left join stint.place_blocked b on b.queue = t.queue and b.id = t.id
      left join stint.place_running r on r.queue = t.queue and r.id = t.id
      left join {outcomes} o on o.queue = t.queue and o.id = t.id
      left join {attempts} a on a.queue = t.queue and a.id = t.id and a.lease = $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDOID],
);

static LEAVE_READY: Statement = Statement::new(
    c"delete from stint.place_ready w
      where w.attempt = $3
        and w.ctid = any (array(
            select d.ctid from stint.place_ready d where d.queue = $1 and d.id >= $2 and d.id <= $2 order by d.id limit 1 for update))
      returning w.lane, w.priority, w.seq",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID],
);

static LEAVE_SCHEDULED: Statement = Statement::new(
    c"delete from stint.place_scheduled s where s.queue = $1 and s.id = $2 and s.attempt = $3",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::INT4OID],
);

/// What a call that ends an attempt answers.
pub struct Answer {
    /// What became of the call.
    pub outcome: &'static str,
    /// The stored result.
    pub result: Option<RawJsonb>,
    /// Whether this call was the one that decided.
    pub first: bool,
    /// The task's status now.
    pub status: String,
    /// When and in how many milliseconds the task is tried again.
    pub retry: Option<(Instant, i64)>,
}

impl Answer {
    /// The answer of the call that decided.
    pub fn first(outcome: &'static str, result: Option<RawJsonb>, status: &str) -> Self {
        Answer { outcome, result, first: true, status: status.to_string(), retry: None }
    }
}

/// A call under a lease that is not the live one.
pub struct Late<'a> {
    /// The queue's name.
    pub name: &'a str,
    /// The queue.
    pub queue: &'a Queue,
    /// The task.
    pub id: pgrx::Uuid,
    /// The lease given.
    pub lease: pgrx::Uuid,
    /// The verb's one reading of the clock.
    pub now: Instant,
    /// Which call.
    pub call: Call,
    /// Its result.
    pub result: Option<RawJsonb>,
    /// Whether to wait for what else has to move when it completes a blocked task.
    pub patient: bool,
    /// Its usage.
    pub usage: &'a Usage<'a>,
}

/// How often a call looks again when the task moved between its statements.
const TRIES: usize = 100;

/// Repeats `attempt` until it decides. It answers `None` when the task moved under it; each try sees a fresh snapshot.
pub fn decide<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    for _ in 0..TRIES {
        if let Some(answer) = attempt() {
            return answer;
        }
    }
    Fault::new(PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, "the task keeps changing its place").hint("Repeat the transaction.").raise()
}

static KNOWN: LeafStatement = LeafStatement::new("select from {facts} f where f.queue = $1 and f.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// An error where the queue does not know the task.
pub fn known(session: &Session, name: &str, id: pgrx::Uuid) {
    if history::read(session, &KNOWN, id, &[arg(name), arg(id)]).is_empty() {
        unknown_task(session, name, id);
    }
}

/// The error for a task that the queue does not know.
pub fn unknown_task(session: &Session, name: &str, id: pgrx::Uuid) -> ! {
    let fault = Fault::new(PgSqlErrorCode::ERRCODE_NO_DATA_FOUND, format!("queue \"{name}\" has no task {id}"));
    match history::removed(session, id) {
        Some(partition) => fault
            .detail(format!("A task of this id would be in {partition}, which is not there: if there was one, its history was removed after the queue's history_retention."))
            .hint("Enqueue the work anew; stint.queues shows how long each queue keeps its history.")
            .raise(),
        None => fault.hint("Check the queue and the id; the view stint.tasks lists the tasks.").raise(),
    }
}

/// Decides a late call; `None` when the task moved meanwhile. A task that it completes is put among `ends` where others wait for its end.
pub fn call(session: &Session, late: &Late, ends: &mut Vec<End<'static>>) -> Option<Answer> {
    let row = history::read(session, &LOOK, late.id, &[arg(late.name), arg(late.id), arg(late.lease)]);
    if !row.get(0, 1).unwrap_or(false) {
        unknown_task(session, late.name, late.id);
    }
    let waiting: Option<i32> = row.get(0, 2);
    let status: String = row.get(0, 3)?; // in no place: it moved between two snapshots of other sessions
    let running: bool = row.must(0, 4);
    let place = match waiting {
        Some(last) => Place::Waiting { last },
        None if running => Place::Running,
        None => Place::Finished { here: row.must(0, 5) },
    };
    let attempt = row.get::<i32>(0, 6).and_then(|number| Some((number, Ended::parse(&row.get::<String>(0, 7)?)?)));
    let (verdict, keep_usage) = late_call(late.call, place, attempt, late.queue.late_accepted);

    if verdict == Verdict::Accept {
        let number = waiting?;
        let key = [arg(late.name), arg(late.id), arg(number)];
        let outcome = Outcome { outcome: "completed", attempt: number, lease: Some(late.lease), error: None, result: late.result };
        if status == "blocked" {
            leave::leave_blocked(session, late.name, late.queue, late.id, &outcome, late.now, late.patient)?;
        } else {
            let left = session.run(&LEAVE_READY, &key);
            if !left.is_empty() {
                let (instance, lane) = (shmem::Instance::here(), left.must(0, 1));
                heads::stir(instance, lane);
                heads::taken(instance, lane, left.must(0, 2), left.must(0, 3));
            } else if session.run(&LEAVE_SCHEDULED, &key).is_empty() {
                return None;
            }
            store::outcome_of_batch(session, late.name, late.id, late.now, &outcome, ends);
        }
        store::announce(late.queue, 0);
    }
    if let (true, Some((number, _))) = (keep_usage, attempt) {
        late.usage.keep_late(session, late.name, late.id, number, late.now);
    }
    let stored = || row.lift(0, 8).map(RawJsonb);
    Some(match verdict {
        Verdict::Accept => Answer::first("completed", late.result, "completed"),
        Verdict::Superseded => told("superseded", None, status),
        Verdict::AlreadyCompleted => told("already_completed", stored(), status),
        Verdict::AlreadyFailed => told("already_failed", None, status),
        Verdict::AlreadyFinished => told("already_finished", None, status),
        Verdict::UnknownLease => told("unknown_lease", None, status),
    })
}

fn told(outcome: &'static str, result: Option<RawJsonb>, status: String) -> Answer {
    Answer { outcome, result, first: false, status, retry: None }
}
