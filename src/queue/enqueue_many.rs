//! `stint.enqueue_many`: a batch of tasks, each element an object with `enqueue`'s arguments. All or none.

use super::enqueue::{Request, store as store_task};
use super::{config, keys, store};
use crate::errors::Fault;
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::{Instant, RawJsonb};
use crate::{errors, input, shmem};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;

/// The fields an element may have.
const FIELDS: [&str; 11] = ["payload", "priority", "run_at", "delay", "key", "agent", "tokens", "budgets", "max_attempts", "lease_for", "labels"];

/// The first element that is no task: its number, and its unknown field if that is what is wrong.
static FAULTY: Statement = Statement::new(
    c"select e.at::int,
             case when jsonb_typeof(e.task) = 'object'
                  then (select f.field from jsonb_object_keys(e.task) as f (field) where f.field <> all ($2) limit 1) end,
             case when jsonb_typeof(e.task) <> 'object' then 'is not an object but of type ' || jsonb_typeof(e.task)
                  when e.task -> 'payload' is null then 'has no field \"payload\"'
                  when jsonb_typeof(e.task -> 'budgets') not in ('array', 'null') then 'has a field \"budgets\" that is not an array' end
      from jsonb_array_elements($1) with ordinality as e (task, at)
      where case when jsonb_typeof(e.task) <> 'object' then true
                 else e.task -> 'payload' is null
                      or jsonb_typeof(e.task -> 'budgets') not in ('array', 'null')
                      or exists (select from jsonb_object_keys(e.task) as f (field) where f.field <> all ($2)) end
      order by e.at
      limit 1",
    &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);

static TASKS: Statement = Statement::new(
    c"select e.task -> 'payload',
             coalesce((e.task ->> 'priority')::int, 0),
             (e.task ->> 'run_at')::timestamptz,
             (e.task ->> 'delay')::interval,
             e.task ->> 'key',
             e.task ->> 'agent',
             (e.task ->> 'tokens')::bigint,
             case when jsonb_typeof(e.task -> 'budgets') = 'array' then array(select jsonb_array_elements_text(e.task -> 'budgets')) end,
             (e.task ->> 'max_attempts')::int,
             (e.task ->> 'lease_for')::interval,
             nullif(e.task -> 'labels', 'null')
      from jsonb_array_elements($1) with ordinality as e (task, at)
      order by e.at",
    &[pg_sys::JSONBOID],
);

static ARRAY_LENGTH: Statement = Statement::new(c"select case when jsonb_typeof($1) = 'array' then jsonb_array_length($1) end", &[pg_sys::JSONBOID]);

fn check_shape(session: &Session, tasks: RawJsonb) {
    let length = session.run(&ARRAY_LENGTH, &[arg(tasks)]);
    match length.get::<i32>(0, 1) {
        None => errors::invalid("argument \"tasks\" is not an array", "Pass an array of objects: '[{\"payload\": …}, …]'."),
        Some(length) => input::batch_size("tasks", usize::try_from(length).unwrap_or(0)),
    };
    let faulty = session.run(&FAULTY, &[arg(tasks), arg(FIELDS.map(str::to_string).to_vec())]);
    if faulty.is_empty() {
        return;
    }
    let at: i32 = faulty.must(0, 1);
    if let Some(field) = faulty.get::<String>(0, 2) {
        let hint = match stint_core::names::nearest(&field, FIELDS) {
            Some(near) => format!("Did you mean \"{near}\"? The fields are {}.", FIELDS.join(", ")),
            None => format!("The fields are {}.", FIELDS.join(", ")),
        };
        errors::invalid(format!("task {at} has the unknown field \"{field}\""), hint)
    }
    let problem: String = faulty.must(0, 3);
    errors::invalid(format!("task {at} {problem}"), "Each element is an object with the arguments of stint.enqueue, of which payload must be there.")
}

/// Reads the elements; what PostgreSQL says of a value it cannot read is kept, with where to look.
fn read(session: &Session, tasks: RawJsonb) -> Rows {
    PgTryBuilder::new(|| session.run(&TASKS, &[arg(tasks)]))
        .catch_others(|error| match error {
            CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => {
                Fault::new(report.sql_error_code(), format!("a task in argument \"tasks\" cannot be read: {}", report.message()))
                    .hint("Each element is an object with the arguments of stint.enqueue, of the same types.")
                    .raise()
            }
            other => other.rethrow(),
        })
        .execute()
}

fn request(session: &Session, rows: &Rows, at: usize) -> Request {
    let budgets = input::names("budgets", rows.get(at, 8));
    let request = Request {
        payload: rows.must(at, 1),
        priority: rows.must(at, 2),
        run_at: rows.get(at, 3),
        delay: rows.get(at, 4),
        key: rows.get(at, 5),
        agent: rows.get(at, 6),
        tokens: rows.get(at, 7),
        budgets: config::budget_numbers(session, &budgets),
        max_attempts: rows.get(at, 9),
        lease_for: rows.get(at, 10),
        labels: rows.get(at, 11),
    };
    request.check();
    request
}

/// See the SQL COMMENT of stint.enqueue_many.
#[pg_extern(sql = false)]
fn enqueue_many(
    queue: Option<&str>,
    tasks: Option<RawJsonb>,
) -> TableIterator<'static, (name!(ordinality, i32), name!(id, pgrx::Uuid), name!(created, bool))> {
    shmem::required();
    let name = input::name("queue", queue);
    let tasks = input::given("tasks", tasks);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let stored = spi::connect(|session| {
        let queue = config::find(session, name);
        check_shape(session, tasks);
        let rows = read(session, tasks);
        let requests: Vec<Request> = (0..rows.len()).map(|at| request(session, &rows, at)).collect();
        let mut stored: Vec<(i32, pgrx::Uuid, bool)> =
            (1..).take(requests.len()).map(|ordinality| (ordinality, pgrx::Uuid::from_bytes(stint_core::ids::task()), true)).collect();
        // Keys in one order, so that two batches that share keys wait for each other in a line and not in a ring.
        let mut keyed: Vec<(&str, usize)> = requests.iter().enumerate().filter_map(|(at, request)| Some((request.key.as_deref()?, at))).collect();
        keyed.sort_unstable();
        for (key, at) in keyed {
            if let Some(earlier) = keys::hold(session, name, &queue, key, stored[at].1, now) {
                stored[at] = (stored[at].0, earlier, false);
            }
        }
        let mut ready = 0;
        for (request, (_, id, created)) in requests.iter().zip(&stored) {
            if *created {
                ready += usize::from(store_task(session, name, &queue, *id, request, now));
            }
        }
        if stored.iter().any(|(_, _, created)| *created) {
            store::announce(&queue, ready);
        }
        stored
    });
    TableIterator::new(stored)
}
