//! `stint.complete_many`: ends a batch of attempts as completed, each with an answer of its own.

use super::config;
use super::finish::{self, Completion};
use super::flow::leave;
use super::usage::Usage;
use crate::answer::Table;
use crate::errors::Fault;
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::{Instant, RawJsonb};
use crate::{errors, input, shmem};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::collections::HashSet;
use std::ffi::CString;
use std::panic::AssertUnwindSafe;

/// The fields an element may have, in the order of the columns of [`ITEMS`].
const FIELDS: [&str; 13] = [
    "id",
    "lease",
    "result",
    "run_id",
    "trace_id",
    "model",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "model_cost",
    "compute_cost",
    "confidence",
    "meta",
];

/// The first element that is no item: its number, its unknown field if that is what is wrong, else what is.
static FAULTY: Statement = Statement::new(
    c"select e.at::int, e.field, e.problem
      from (select i.at,
                   case when jsonb_typeof(i.item) = 'object'
                        then (select f.field from jsonb_object_keys(i.item) as f (field) where f.field <> all ($2) limit 1) end as field,
                   case when jsonb_typeof(i.item) <> 'object' then 'is not an object but of type ' || jsonb_typeof(i.item)
                        when i.item ->> 'id' is null then 'has no field \"id\"'
                        when i.item ->> 'lease' is null then 'has no field \"lease\"' end as problem
            from jsonb_array_elements($1) with ordinality as i (item, at)) as e
      where e.field is not null or e.problem is not null
      order by e.at
      limit 1",
    &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);

/// The fields as text, but for jsonb: what they mean is read element by element, so that an error can say which one it was.
static ITEMS: Statement = Statement::new(
    c"select i.item ->> 'id', i.item ->> 'lease', nullif(i.item -> 'result', 'null'),
             i.item ->> 'run_id', i.item ->> 'trace_id', i.item ->> 'model',
             i.item ->> 'input_tokens', i.item ->> 'cached_tokens', i.item ->> 'output_tokens',
             i.item ->> 'model_cost', i.item ->> 'compute_cost', i.item ->> 'confidence', nullif(i.item -> 'meta', 'null')
      from jsonb_array_elements($1) with ordinality as i (item, at)
      order by i.at",
    &[pg_sys::JSONBOID],
);

static BLOCKED: Statement = Statement::new(
    c"select b.id
      from unnest($2) as u (id)
      cross join lateral (select t.id from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1) as b",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static ARRAY_LENGTH: Statement = Statement::new(c"select case when jsonb_typeof($1) = 'array' then jsonb_array_length($1) end", &[pg_sys::JSONBOID]);

const SHAPE: &str = "Each element is an object with the arguments of stint.complete, of which id and lease must be there.";

fn check_shape(session: &Session, items: RawJsonb) {
    match session.run(&ARRAY_LENGTH, &[arg(items)]).get::<i32>(0, 1) {
        None => errors::invalid("argument \"items\" is not an array", "Pass an array of objects: '[{\"id\": …, \"lease\": …, \"result\": …}, …]'."),
        Some(length) => input::batch_size("items", usize::try_from(length).unwrap_or(0)),
    };
    let faulty = session.run(&FAULTY, &[arg(items), arg(FIELDS.map(str::to_string).to_vec())]);
    if faulty.is_empty() {
        return;
    }
    let at: i32 = faulty.must(0, 1);
    if let Some(field) = faulty.get::<String>(0, 2) {
        let near = stint_core::names::nearest(&field, FIELDS).map_or(String::new(), |near| format!("Did you mean \"{near}\"? "));
        errors::invalid(format!("item {at} has the unknown field \"{field}\""), format!("{near}The fields are {}.", FIELDS.join(", ")))
    }
    errors::invalid(format!("item {at} {}", faulty.must::<String>(0, 3)), SHAPE)
}

/// Does what concerns element `at`, counted from 0; an error names it, and the field where one is given.
fn of_item<T>(at: usize, field: Option<&str>, work: impl FnOnce() -> T) -> T {
    PgTryBuilder::new(AssertUnwindSafe(work))
        .catch_others(|error| match error {
            CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => {
                let field = field.map_or(String::new(), |field| format!(", field \"{field}\""));
                let fault = Fault::new(report.sql_error_code(), format!("item {}{field}: {}", at + 1, report.message()));
                let fault = report.detail().into_iter().fold(fault, |fault, detail| fault.detail(detail));
                fault.hint(report.hint().unwrap_or(SHAPE)).raise()
            }
            other => other.rethrow(),
        })
        .execute()
}

/// Field `column` of element `at`, read by the input function of its type.
fn value<T: FromDatum>(rows: &Rows, at: usize, column: usize, input: u32) -> Option<T> {
    let text: String = rows.get(at, column)?;
    of_item(at, Some(FIELDS[column - 1]), || {
        let text = CString::new(text).ok()?;
        // SAFETY: an input function of a type whose values T takes; it reads the text and leaves it as it is.
        unsafe {
            let datum = pg_sys::OidInputFunctionCall(pg_sys::Oid::from(input), text.as_ptr().cast_mut(), pg_sys::InvalidOid, -1);
            T::from_datum(datum, false)
        }
    })
}

/// The texts of an element, owned here while the completions borrow them.
struct Texts {
    run_id: Option<String>,
    trace_id: Option<String>,
    model: Option<String>,
}

fn completion<'a>(rows: &Rows, at: usize, texts: &'a Texts) -> Completion<'a> {
    let tokens = |column| value::<i64>(rows, at, column, pg_sys::F_INT8IN);
    let id = value(rows, at, 1, pg_sys::F_UUID_IN);
    let lease = value(rows, at, 2, pg_sys::F_UUID_IN);
    let usage = Usage {
        run_id: texts.run_id.as_deref(),
        trace_id: texts.trace_id.as_deref(),
        model: texts.model.as_deref(),
        input_tokens: tokens(7),
        cached_tokens: tokens(8),
        output_tokens: tokens(9),
        model_cost: value(rows, at, 10, pg_sys::F_NUMERIC_IN),
        compute_cost: value(rows, at, 11, pg_sys::F_NUMERIC_IN),
        confidence: value(rows, at, 12, pg_sys::F_FLOAT4IN),
        meta: rows.get(at, 13),
    };
    let result: Option<RawJsonb> = rows.get(at, 3);
    of_item(at, None, || {
        input::json("result", result);
        Completion { id: input::given("id", id), lease: input::given("lease", lease), result, usage: usage.checked() }
    })
}

/// One element's answer.
type Answered = (i32, pgrx::Uuid, String, Option<RawJsonb>, bool, String);

/// See the SQL COMMENT of stint.complete_many.
#[pg_extern(sql = false)]
fn complete_many(
    queue: Option<&str>,
    items: Option<RawJsonb>,
) -> Table<(
    name!(ordinality, i32),
    name!(id, pgrx::Uuid),
    name!(outcome, String),
    name!(result, Option<RawJsonb>),
    name!(first, bool),
    name!(status, String),
)> {
    shmem::required();
    let name = input::name("queue", queue);
    let items = input::given("items", items);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let answers = spi::connect(|session| {
        let queue = config::find(session, name);
        check_shape(session, items);
        let rows = session.run(&ITEMS, &[arg(items)]);
        let texts: Vec<Texts> =
            (0..rows.len()).map(|at| Texts { run_id: rows.get(at, 4), trace_id: rows.get(at, 5), model: rows.get(at, 6) }).collect();
        let mut completions: Vec<(usize, Completion)> = texts.iter().enumerate().map(|(at, texts)| (at, completion(&rows, at, texts))).collect();
        // In the order of their ids, and what follows their ends at the end, so that two that share tasks wait for each other in a line and not in a ring. What is
        // blocked (after a retry) has its rows in another place of that line: it comes last, and is not waited for.
        let ids: Vec<pgrx::Uuid> = completions.iter().map(|(_, completion)| completion.id).collect();
        let blocked = session.run(&BLOCKED, &[arg(name), arg(ids)]);
        let blocked: HashSet<[u8; 16]> = (0..blocked.len()).map(|at| *blocked.must::<pgrx::Uuid>(at, 1).as_bytes()).collect();
        completions.sort_by_key(|(_, completion)| (blocked.contains(completion.id.as_bytes()), *completion.id.as_bytes()));
        let waiting = completions.iter().filter(|(_, completion)| !blocked.contains(completion.id.as_bytes())).count();
        let mut ends = Vec::new();
        let mut answers: Vec<Answered> = Vec::with_capacity(completions.len());
        for (number, (at, completion)) in completions.iter().enumerate() {
            if number == waiting {
                leave::follow(session, name, std::mem::take(&mut ends), now);
            }
            let answer = of_item(*at, None, || finish::complete_in_batch(session, name, &queue, completion, now, false, &mut ends));
            // This call's own result goes back as it came in; SPI's memory does not outlive this block.
            let result = if answer.first { rows.lift(*at, 3).map(RawJsonb) } else { answer.result };
            answers.push((*at as i32 + 1, completion.id, answer.outcome.to_string(), result, answer.first, answer.status));
        }
        leave::follow(session, name, ends, now);
        answers.sort_unstable_by_key(|answer| answer.0);
        answers
    });
    Table::of(answers)
}
