//! Events of tasks: `record`, which every change of status calls, and `stint.task_events`, which reads them back in the order of commits.

use super::config;
use crate::errors::{self, Fault};
use crate::shmem::{self, waiters};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawInterval};
use crate::{guc, horizon, input};
use pgrx::prelude::*;

static RECORD: Statement = Statement::new(
    c"insert into stint.task_event_log (queue, epoch, xid, seq, at, id, status, attempt, worker, why)
      select $1, m.epoch, pg_current_xact_id(), nextval('stint.task_event_seq'), clock_timestamp(),
             $2, $3, $4, $5, $6
      from stint.meta m",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// A change of status.
pub struct Change<'a> {
    /// The task.
    pub id: pgrx::Uuid,
    /// Its status now.
    pub status: &'a str,
    /// The number of its last attempt.
    pub attempt: i32,
    /// Who runs it.
    pub worker: Option<&'a str>,
    /// Why, where that is known.
    pub why: Option<&'a str>,
}

/// Notes a change of status, where the queue keeps events. Called while the task's row is held, so the numbers of one task's events rise in commit order.
pub fn record(session: &Session, name: &str, change: &Change) {
    if config::lookup(session, name).is_none_or(|queue| !queue.events) {
        return;
    }
    let Change { id, status, attempt, worker, why } = *change;
    session.run(&RECORD, &[arg(name), arg(id), arg(status), arg(attempt), arg(worker), arg(why)]);
}

/// Where the feed begins and ends: positions up to the first are not kept, those after the last were not given yet.
static BOUNDS: Statement = Statement::new(
    c"select f.start_pos,
             greatest(f.start_pos, (select t.end_pos
                                    from stint.task_event_ticks t
                                    where t.queue = f.queue and t.xid is distinct from pg_current_xact_id_if_assigned()
                                    order by t.end_pos desc
                                    limit 1))
      from stint.task_feeds f
      where f.queue = $1",
    &[pg_sys::TEXTOID],
);

/// Ticks that reach beyond a position, each with the one before it. One that this transaction made itself does not count: it may be rolled back, and its positions
/// given to other events.
static TICKS: Statement = Statement::new(
    c"select t.end_pos - t.events, t.end_pos, t.epoch, coalesce(case when p.epoch = t.epoch then p.snapshot end, '1:1:'::pg_snapshot)::text, t.snapshot::text
      from (select *
            from stint.task_event_ticks s
            where s.queue = $1 and s.end_pos > $2 and s.xid is distinct from pg_current_xact_id_if_assigned()
            order by s.end_pos
            limit 16) t
      left join lateral (select * from stint.task_event_ticks p where p.queue = $1 and p.end_pos < t.end_pos order by p.end_pos desc limit 1) p on true
      order by t.end_pos",
    &[pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// The events of one tick (epoch $2, from snapshot $3 to $4, positions after $5) that lie after position $6.
static EVENTS: Statement = Statement::new(
    c"select e.pos, e.id, e.status::text, e.attempt, e.worker::text, e.why, e.at
      from (select $5 + row_number() over (order by x.seq) as pos, x.*
            from (select l.*
                  from stint.task_event_log l
                  where l.queue = $1 and l.epoch = $2 and l.xid >= pg_snapshot_xmax($3::pg_snapshot) and l.xid < pg_snapshot_xmax($4::pg_snapshot)
                  union all
                  select r.*
                  from pg_snapshot_xip($3::pg_snapshot) i,
                       lateral (select l.* from stint.task_event_log l where l.queue = $1 and l.epoch = $2 and l.xid = i offset 0) r) x
            where pg_visible_in_snapshot(x.xid, $4::pg_snapshot)) e
      where e.pos > $6
      order by e.pos
      limit $7",
    &[pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// One row, as users see it.
type Event = (i64, pgrx::Uuid, String, i32, Option<String>, Option<String>, Instant);

/// What lies after a position, at most `max` rows.
fn read(session: &Session, name: &str, after: i64, max: usize) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let mut reached = after;
    while events.len() < max {
        let ticks = session.run(&TICKS, &[arg(name), arg(reached)]);
        if ticks.is_empty() {
            break;
        }
        for tick in 0..ticks.len() {
            let left = (max - events.len()) as i64;
            let from: i64 = ticks.must(tick, 1);
            let rows = session.run(
                &EVENTS,
                &[arg(name), arg(ticks.must::<i32>(tick, 3)), ticks.lift(tick, 4), ticks.lift(tick, 5), arg(from), arg(after), arg(left)],
            );
            events.extend((0..rows.len()).map(|at| {
                (rows.must(at, 1), rows.must(at, 2), rows.must(at, 3), rows.must(at, 4), rows.get(at, 5), rows.get(at, 6), rows.must(at, 7))
            }));
            reached = ticks.must(tick, 2);
            if events.len() == max {
                break;
            }
        }
    }
    events
}

/// Reads, and only then looks whether what was asked for was still kept: what a trim took away meanwhile, it has said by then.
fn look(name: &str, after: i64, max: usize) -> Vec<Event> {
    spi::connect(|session| {
        let mut start = checked_start(session, name, after);
        loop {
            let events = read(session, name, if after == 0 { start } else { after }, max);
            let now = checked_start(session, name, after);
            if now == start {
                return events;
            }
            start = now;
        }
    })
}

/// Where what is kept begins; an error where the position lies before it, or was never given.
fn checked_start(session: &Session, name: &str, after: i64) -> i64 {
    let row = session.run(&BOUNDS, &[arg(name)]);
    if row.is_empty() {
        config::find(session, name);
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("queue \"{name}\" keeps no events"))
            .hint(format!("SELECT stint.alter_queue('{}', events => true) has it keep them from now on.", name.replace('\'', "''")))
            .raise()
    }
    let (start, end): (i64, i64) = (row.must(0, 1), row.must(0, 2));
    if after > end {
        errors::invalid(
            format!("argument \"after\" is {after}, beyond the last position {end} of queue \"{name}\""),
            "Give the pos of the last row that stint.task_events returned, or 0.",
        )
    }
    if after != 0 && after < start {
        Fault::new(
            PgSqlErrorCode::ERRCODE_SNAPSHOT_TOO_OLD,
            format!("events of queue \"{name}\" after position {after} are not kept any more: what is kept begins after {start}"),
        )
        .hint("Look at stint.tasks for how things stand, and go on with after => 0. stint.task_event_retention says how long events are kept.")
        .raise()
    }
    start
}

/// See the SQL COMMENT of stint.task_events.
#[pg_extern(sql = false)]
fn task_events(
    queue: Option<&str>,
    after: Option<i64>,
    max: Option<i32>,
    wait: Option<RawInterval>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> TableIterator<
    'static,
    (
        name!(pos, i64),
        name!(id, pgrx::Uuid),
        name!(status, String),
        name!(attempt, i32),
        name!(worker, Option<String>),
        name!(why, Option<String>),
        name!(changed_at, Instant),
    ),
> {
    shmem::required();
    let name = input::name("queue", queue);
    let after = input::at_least("after", input::given("after", after), 0);
    let max = input::batch("max", max);
    let wait = wait.map(|wait| input::duration("wait", wait, 0, guc::max_wait_s(), "stint.max_wait"));
    // SAFETY: reads this transaction's isolation level.
    if wait.is_some() && unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "task_events cannot wait in a transaction that keeps one snapshot")
            .hint("Use READ COMMITTED, or leave out wait: a REPEATABLE READ transaction would never see what ends the wait.")
            .raise()
    }
    let _owner = spi::Identity::owner();
    let until = wait.map(|wait| Instant::now().plus(wait));
    loop {
        let events = look(name, after, max);
        let left = until.map_or(0, |until| until.ms_since(Instant::now()));
        if !events.is_empty() || left <= 0 {
            return TableIterator::new(events);
        }
        if horizon::may_let_go(fcinfo) {
            horizon::let_go();
        }
        waiters::doze(left);
    }
}
