//! `stint.drop_queue`: removes a queue and everything of it.
//!
//! What finished tasks left is removed first, while everybody works on. The rest needs that nobody is about to add to the queue: EXCLUSIVE on the tables
//! through which tasks come and move, waited for on one table at a time while none of the others is held, so that no ring of waits can form with transactions that use
//! several. Whoever read the queue before and writes after finds the configuration's generation moved (`config::still_stands`).

use super::config;
use crate::accounting::roll_up;
use crate::budget::live::{self, Held, Used};
use crate::errors::Fault;
use crate::input;
use crate::shmem::{self, Instance, config as generation, heads};
use crate::spi::{self, Session, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;

/// Two drops do not wait for each other's table locks, but for this.
static ONE_DROP: &str = "lock table stint.queue_config in share update exclusive mode";

static HOLDS: Statement = Statement::new(
    c"select count(*), count(*) filter (where not exists (select from stint.task_outcomes o
                                         where o.queue = f.queue and o.id = f.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(f.id), 15)))
      from stint.task_facts f
      where f.queue = $1",
    &[pg_sys::TEXTOID],
);

/// What finished tasks left. The outcomes go last: they tell which those are.
static FINISHED: [Statement; 6] = [
    Statement::new(
        c"delete from stint.task_checkpoints c
          where c.queue = $1 and exists (select from stint.task_outcomes o
                                         where o.queue = c.queue and o.id = c.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(c.id), 15))",
        &[pg_sys::TEXTOID],
    ),
    Statement::new(
        c"delete from stint.usage_late u
          where u.queue = $1 and exists (select from stint.task_outcomes o
                                         where o.queue = u.queue and o.id = u.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(u.id), 15))",
        &[pg_sys::TEXTOID],
    ),
    Statement::new(
        c"delete from stint.task_attempts a
          where a.queue = $1 and exists (select from stint.task_outcomes o
                                         where o.queue = a.queue and o.id = a.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(a.id), 15))",
        &[pg_sys::TEXTOID],
    ),
    Statement::new(
        c"delete from stint.task_retries t
          where t.queue = $1 and exists (select from stint.task_outcomes o
                                         where o.queue = t.queue and o.id = t.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(t.id), 15))",
        &[pg_sys::TEXTOID],
    ),
    Statement::new(
        c"delete from stint.task_facts f
          where f.queue = $1 and exists (select from stint.task_outcomes o
                                         where o.queue = f.queue and o.id = f.id and get_byte(uuid_send(o.id), 15) = get_byte(uuid_send(f.id), 15))",
        &[pg_sys::TEXTOID],
    ),
    Statement::new(c"delete from stint.task_outcomes o where o.queue = $1", &[pg_sys::TEXTOID]),
];

static RUNNING: Statement =
    Statement::new(c"delete from stint.place_running r where r.queue = $1 returning r.budgets, r.reserved, r.started_at", &[pg_sys::TEXTOID]);

/// Everything else, once nobody else writes.
static REST: [Statement; 19] = [
    // The feed's own row first: a tick holds it while it adds to the others.
    Statement::new(c"delete from stint.task_feeds e where e.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_event_log e where e.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_event_ticks e where e.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.place_ready w where w.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.place_scheduled s where s.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.place_blocked b where b.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_dependencies d where d.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.group_turns g where g.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.follow_ups u where u.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_checkpoints c where c.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_keys k where k.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.usage_late u where u.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_attempts a where a.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_retries t where t.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_outcomes o where o.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.task_facts f where f.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.group_weights w where w.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.prediction_factors f where f.queue = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"delete from stint.queue_config q where q.queue = $1", &[pg_sys::TEXTOID]),
];

static LANES: Statement = Statement::new(c"delete from stint.lanes l where l.queue = $1 returning l.lane", &[pg_sys::TEXTOID]);

/// Every verb that makes, moves or retries a task writes to one of these before anything else, locks rows of one, or locks one (`config::keep_from_dropping`).
const LIVE: [&std::ffi::CStr; 6] = [c"place_ready", c"place_scheduled", c"place_running", c"place_blocked", c"group_turns", c"follow_ups"];

/// Locks the tables of live tasks against writers and those who lock rows until the transaction ends.
fn keep_writers_out() {
    let mode = pg_sys::ExclusiveLock as i32;
    let tables = LIVE.map(|name| {
        // SAFETY: a system cache look-up.
        unsafe { pg_sys::get_relname_relid(name.as_ptr(), pg_sys::Oid::from(Instance::here().schema)) }
    });
    let mut first = 0;
    loop {
        check_for_interrupts!();
        // SAFETY: ordinary relation locks on tables of ours.
        unsafe {
            pg_sys::LockRelationOid(tables[first], mode);
            let busy = (0..tables.len()).filter(|at| *at != first).find(|at| !pg_sys::ConditionalLockRelationOid(tables[*at], mode));
            let Some(busy) = busy else { return };
            (0..busy).filter(|at| *at != first).chain([first]).for_each(|at| pg_sys::UnlockRelationOid(tables[at], mode));
            first = busy;
        }
    }
}

/// What makes tasks in the queue by itself; it is not removed with the queue, whatever `force` says.
static FED_BY: Statement = Statement::new(
    c"select string_agg(f.what, ', ' order by f.what)
      from (select format('schedule %I', c.schedule) as what from stint.schedule_config c where c.into_queue = $1
            union all
            select format('watch %I', w.watch) from stint.watch_config w where w.into_queue = $1
            order by 1
            limit 10) f",
    &[pg_sys::TEXTOID],
);

fn refuse_fed(session: &Session, name: &str) {
    if let Some(feeders) = session.run_latest(&FED_BY, &[arg(name)]).get::<String>(0, 1) {
        Fault::new(PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST, format!("cannot drop queue \"{name}\": tasks are made in it"))
            .detail(format!("They come from {feeders}."))
            .hint("Use stint.drop_schedule and stint.drop_watch first.")
            .raise()
    }
}

fn refuse_full(session: &Session, name: &str) {
    let holds = session.run_latest(&HOLDS, &[arg(name)]);
    let (tasks, live): (i64, i64) = (holds.must(0, 1), holds.must(0, 2));
    if tasks > 0 {
        Fault::new(PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST, format!("cannot drop queue \"{name}\": it has tasks"))
            .detail(format!("{live} live and {} finished tasks.", tasks - live))
            .hint("Use force => true to remove them all with their history.")
            .raise()
    }
}

/// See the SQL COMMENT of stint.drop_queue.
#[pg_extern(sql = false)]
fn drop_queue(queue: Option<&str>, force: Option<bool>) {
    shmem::required();
    let name = input::name("queue", queue);
    let force = input::given("force", force);
    // SAFETY: reads this transaction's isolation level.
    if unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "cannot drop a queue in a transaction that keeps one snapshot")
            .hint("Use READ COMMITTED: under REPEATABLE READ tasks that came since could not be seen, and would stay without a queue.")
            .raise()
    }
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        session.execute_once(ONE_DROP);
        config::find(session, name);
        refuse_fed(session, name);
        if force {
            for delete in &FINISHED {
                session.run(delete, &[arg(name)]);
            }
        } else {
            refuse_full(session, name);
        }
        keep_writers_out();
        refuse_fed(session, name);
        if !force {
            refuse_full(session, name);
        }
        let running = session.run(&RUNNING, &[arg(name)]);
        let now = Instant::now();
        for at in 0..running.len() {
            // Nobody reports what these used: their reservation stays charged.
            if let Some(held) = Held::new(running.get(at, 1), running.get(at, 2)) {
                live::settle(session, name, &held, running.must(at, 3), now, false, Used::default());
            }
        }
        for delete in &REST {
            session.run(delete, &[arg(name)]);
        }
        roll_up::drop_queue(session, name);
        // Should this be undone, the rows are there again.
        heads::rescan(Instance::here(), false);
        let lanes = session.run(&LANES, &[arg(name)]);
        for at in 0..lanes.len() {
            heads::gone(Instance::here(), lanes.must(at, 1));
        }
        generation::changed();
    });
}
