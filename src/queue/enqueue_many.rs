//! `stint.enqueue_many`: a batch of tasks, each element an object with `enqueue`'s arguments. All or none.

use super::enqueue::{Request, store as store_task};
use super::flow::enter::{self, OnFailure};
use super::{config, keys, store};
use crate::answer::Table;
use crate::errors::Fault;
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::{Instant, RawJsonb};
use crate::{errors, input, shmem};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::ffi::CString;
use std::panic::AssertUnwindSafe;

/// The fields an element may have.
const FIELDS: [&str; 15] = [
    "payload",
    "priority",
    "run_at",
    "delay",
    "key",
    "agent",
    "tokens",
    "budgets",
    "max_attempts",
    "lease_for",
    "labels",
    "group_key",
    "depends_on",
    "on_dependency_failure",
    "max_run_time",
];

/// The first element that is no task: its number, and its unknown field if that is what is wrong.
static FAULTY: Statement = Statement::new(
    c"select e.at::int,
             case when jsonb_typeof(e.task) = 'object'
                  then (select f.field from jsonb_object_keys(e.task) as f (field) where f.field <> all ($2) limit 1) end,
             case when jsonb_typeof(e.task) <> 'object' then 'is not an object but of type ' || jsonb_typeof(e.task)
                  when e.task -> 'payload' is null then 'has no field \"payload\"'
                  when jsonb_typeof(e.task -> 'budgets') not in ('array', 'null') then 'has a field \"budgets\" that is not an array'
                  when jsonb_typeof(e.task -> 'depends_on') not in ('array', 'null') then 'has a field \"depends_on\" that is not an array' end
      from jsonb_array_elements($1) with ordinality as e (task, at)
      where case when jsonb_typeof(e.task) <> 'object' then true
                 else e.task -> 'payload' is null
                      or jsonb_typeof(e.task -> 'budgets') not in ('array', 'null')
                      or jsonb_typeof(e.task -> 'depends_on') not in ('array', 'null')
                      or exists (select from jsonb_object_keys(e.task) as f (field) where f.field <> all ($2)) end
      order by e.at
      limit 1",
    &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);

/// The fields as text: what they mean is read element by element, so that an error can say which one it was.
static TASKS: Statement = Statement::new(
    c"select e.task -> 'payload',
             e.task ->> 'priority',
             e.task ->> 'run_at',
             e.task ->> 'delay',
             e.task ->> 'key',
             e.task ->> 'agent',
             e.task ->> 'tokens',
             case when jsonb_typeof(e.task -> 'budgets') = 'array' then array(select jsonb_array_elements_text(e.task -> 'budgets')) end,
             e.task ->> 'max_attempts',
             e.task ->> 'lease_for',
             nullif(e.task -> 'labels', 'null'),
             e.task ->> 'group_key',
             case when jsonb_typeof(e.task -> 'depends_on') = 'array' then array(select jsonb_array_elements_text(e.task -> 'depends_on')) end,
             e.task ->> 'on_dependency_failure',
             e.task ->> 'max_run_time'
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

/// Does what concerns element `at`, counted from 0; an error names it, and the field where one is given.
fn of_task<T>(at: usize, field: Option<&str>, work: impl FnOnce() -> T) -> T {
    PgTryBuilder::new(AssertUnwindSafe(work))
        .catch_others(|error| match error {
            CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => {
                let field = field.map_or(String::new(), |field| format!(", field \"{field}\""));
                let fault = Fault::new(report.sql_error_code(), format!("task {}{field}: {}", at + 1, report.message()));
                let fault = report.detail().into_iter().fold(fault, |fault, detail| fault.detail(detail));
                fault.hint(report.hint().unwrap_or("Each element is an object with the arguments of stint.enqueue, of the same types.")).raise()
            }
            other => other.rethrow(),
        })
        .execute()
}

/// A whole number in field `column` of element `at`.
fn number<T: std::str::FromStr>(rows: &Rows, at: usize, column: usize) -> Option<T> {
    let text: String = rows.get(at, column)?;
    match text.parse() {
        Ok(number) => Some(number),
        Err(_) => errors::invalid(
            format!("task {}, field \"{}\": \"{text}\" is not a whole number of the type that stint.enqueue takes", at + 1, FIELDS[column - 1]),
            "Pass a JSON number without a fraction.",
        ),
    }
}

/// A text as the input function of its type reads it.
fn read<T: FromDatum>(text: String, input: u32) -> Option<T> {
    let text = CString::new(text).ok()?;
    // SAFETY: an input function of a type whose values T takes; it reads the text and leaves it as it is.
    unsafe {
        let datum = pg_sys::OidInputFunctionCall(pg_sys::Oid::from(input), text.as_ptr().cast_mut(), pg_sys::InvalidOid, -1);
        T::from_datum(datum, false)
    }
}

/// Field `column` of element `at`, read by the input function of its type.
fn value<T: FromDatum>(rows: &Rows, at: usize, column: usize, input: u32) -> Option<T> {
    let text: String = rows.get(at, column)?;
    of_task(at, Some(FIELDS[column - 1]), || read(text, input))
}

/// The ids in field `column` of element `at`.
fn ids(rows: &Rows, at: usize, column: usize) -> Vec<pgrx::Uuid> {
    let Some(texts) = rows.get::<Vec<Option<String>>>(at, column) else { return Vec::new() };
    of_task(at, Some(FIELDS[column - 1]), || {
        enter::ids(Some(texts.into_iter().map(|text| text.and_then(|text| read(text, pg_sys::F_UUID_IN))).collect()))
    })
}

fn request(session: &Session, rows: &Rows, at: usize) -> Request {
    let numbers = (number(rows, at, 2), number(rows, at, 7), number(rows, at, 9));
    let (run_at, delay) = (value(rows, at, 3, pg_sys::F_TIMESTAMPTZ_IN), value(rows, at, 4, pg_sys::F_INTERVAL_IN));
    let (lease_for, max_run_time) = (value(rows, at, 10, pg_sys::F_INTERVAL_IN), value(rows, at, 15, pg_sys::F_INTERVAL_IN));
    let depends_on = ids(rows, at, 13);
    of_task(at, None, || {
        let budgets = input::names("budgets", rows.get(at, 8));
        let request = Request {
            payload: rows.must(at, 1),
            priority: numbers.0.unwrap_or(0),
            run_at,
            delay,
            key: rows.get(at, 5),
            agent: rows.get(at, 6),
            tokens: numbers.1,
            budgets: config::budget_numbers(session, &budgets),
            max_attempts: numbers.2,
            lease_for,
            labels: rows.get(at, 11),
            group_key: rows.get(at, 12),
            depends_on,
            on_dependency_failure: rows.get::<String>(at, 14).map_or(OnFailure::Fail, |word| OnFailure::argument(&word)),
            max_run_time,
        };
        request.check();
        request
    })
}

/// See the SQL COMMENT of stint.enqueue_many.
#[pg_extern(sql = false)]
fn enqueue_many(queue: Option<&str>, tasks: Option<RawJsonb>) -> Table<(name!(ordinality, i32), name!(id, pgrx::Uuid), name!(created, bool))> {
    shmem::required();
    let name = input::name("queue", queue);
    let tasks = input::given("tasks", tasks);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let stored = spi::connect(|session| {
        let queue = config::find(session, name);
        check_shape(session, tasks);
        let rows = session.run(&TASKS, &[arg(tasks)]);
        let requests: Vec<Request> = (0..rows.len()).map(|at| request(session, &rows, at)).collect();
        let mut stored: Vec<(i32, pgrx::Uuid, bool)> = (1..)
            .take(requests.len())
            .map(|ordinality| (ordinality, pgrx::Uuid::from_bytes(stint_core::ids::task(queue.history_class)), true))
            .collect();
        // Keys in one order, so that two batches that share keys wait for each other in a line and not in a ring.
        let mut keyed: Vec<(&str, usize)> = requests.iter().enumerate().filter_map(|(at, request)| Some((request.key.as_deref()?, at))).collect();
        keyed.sort_unstable();
        for (key, at) in keyed {
            if let Some(earlier) = keys::hold(session, name, &queue, key, stored[at].1, now) {
                stored[at] = (stored[at].0, earlier, false);
            }
        }
        let made = requests.iter().zip(&stored).filter(|(_, (_, _, created))| *created).map(|(request, _)| request.wait());
        let mut gate = enter::hold(session, name, &queue, made);
        let mut ready = 0;
        for (at, (request, (_, id, created))) in requests.iter().zip(&stored).enumerate() {
            if *created {
                ready += usize::from(of_task(at, None, || store_task(session, name, &queue, &mut gate, *id, request, now)));
            }
        }
        gate.leave(session, name);
        if stored.iter().any(|(_, _, created)| *created) {
            store::announce(&queue, ready);
        }
        stored
    });
    Table::of(stored)
}
