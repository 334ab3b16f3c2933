//! `stint.drop_budget`: removes a budget that nothing draws on.

use super::live;
use crate::errors::Fault;
use crate::input;
use crate::queue::config::unknown_budget;
use crate::shmem::{self, config};
use crate::spi::{self, Statement, arg};
use pgrx::prelude::*;

/// What draws on the budget: queues, lanes in which a task is alive, and running tasks that reserved of it.
static DRAWN: Statement = Statement::new(
    c"select x.what
      from stint.budget_config b
      cross join lateral (
            select format('queue \"%s\"', q.queue) as what
            from stint.queue_config q
            where b.budget = any (q.budgets)
            union
            select format('tasks of queue \"%s\"', l.queue)
            from stint.lanes l
            where b.number = any (l.budgets)
              and (exists (select from stint.place_ready w where w.lane = l.lane)
                   or exists (select from stint.place_scheduled s where s.queue = l.queue and s.lane = l.lane)
                   or exists (select from stint.place_blocked d where d.queue = l.queue and d.lane = l.lane)
                   or exists (select from stint.place_running r where r.queue = l.queue and r.lane = l.lane))
            union
            select format('running tasks of queue \"%s\"', r.queue)
            from stint.place_running r
            where b.number = any (r.budgets)) as x
      where b.budget = $1
      order by x.what",
    &[pg_sys::TEXTOID],
);

static DELETE: Statement = Statement::new(c"delete from stint.budget_config b where b.budget = $1", &[pg_sys::TEXTOID]);

/// How many of them an error names.
const NAMED: usize = 10;

/// See the SQL COMMENT of stint.drop_budget.
#[pg_extern(sql = false)]
fn drop_budget(name: Option<&str>) {
    shmem::required();
    let name = input::name("name", name);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        // Whoever enqueues a task that names a budget, or makes such a queue, has read the table and holds ACCESS SHARE on it to its end: after this lock what
        // draws on the budget is committed, and whoever comes later does not find it.
        live::shut_gate();
        let drawn = session.run_latest(&DRAWN, &[arg(name)]);
        if !drawn.is_empty() {
            let all: Vec<String> = (0..drawn.len().min(NAMED)).map(|at| drawn.must(at, 1)).collect();
            let more = if drawn.len() > NAMED { format!(" and {} more", drawn.len() - NAMED) } else { String::new() };
            Fault::new(
                PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
                format!("cannot drop budget \"{name}\" because {}{more} draw on it", all.join(", ")),
            )
            .hint("Take it from those queues, and finish, cancel or purge those tasks first.")
            .raise()
        }
        if session.run(&DELETE, &[arg(name)]).is_empty() {
            unknown_budget(session, name);
        }
        config::changed();
    });
}
