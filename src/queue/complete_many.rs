//! `stint.complete_many`: ends a batch of attempts as completed, each with an answer of its own.

use super::config::{self, Queue};
use super::elements::{Fields, Now, Shape};
use super::finish::{self, Completion};
use super::flow::leave;
use super::late::Answer;
use super::rows::blocked;
use super::usage::Usage;
use crate::answer::Table;
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawJsonb, RawText};
use crate::{input, shmem};
use pgrx::prelude::*;
use std::collections::HashSet;

static SHAPE: Shape<13> = Shape {
    argument: "items",
    element: "item",
    example: "[{\"id\": …, \"lease\": …, \"result\": …}, …]",
    fields: FIELDS,
    hint: "Each element is an object with the arguments of stint.complete, of which id and lease must be there.",
};

/// The fields an element may have.
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
const ID: usize = 0;
const LEASE: usize = 1;
const RESULT: usize = 2;

static BLOCKED: Statement = Statement::new(
    c"select b.id
      from unnest($2) as u (id)
      cross join lateral (select t.id from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1) as b",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// Those of the tasks, in the order of their ids, that are blocked.
fn blocked(session: &Session, name: &str, ids: &[pgrx::Uuid]) -> HashSet<[u8; 16]> {
    let mut blocked = HashSet::new();
    let directly = blocked::TABLE.open(pg_sys::AccessShareLock).is_some_and(|table| {
        let mut look = || {
            table.find_all(&blocked::KEY, arg(name), blocked::ID, ids, |at, row| {
                blocked.extend(row.is_some().then(|| *ids[at].as_bytes()));
                true
            })
        };
        table.is_empty() || look()
    });
    if !directly {
        let rows = session.run(&BLOCKED, &[arg(name), arg(ids.to_vec())]);
        blocked.extend((0..rows.len()).map(|at| *rows.must::<pgrx::Uuid>(at, 1).as_bytes()));
    }
    blocked
}

/// The texts of an element, owned here while its completion borrows them.
struct Texts {
    run_id: Option<String>,
    trace_id: Option<String>,
    model: Option<String>,
}

impl Texts {
    fn of(fields: &Fields<13>) -> Self {
        Texts { run_id: fields.text(3), trace_id: fields.text(4), model: fields.text(5) }
    }
}

/// An element as it was read; its texts follow.
fn completion(now: &Now, at: usize, fields: &Fields<13>) -> Completion<'static> {
    for field in [ID, LEASE] {
        if fields.some(field).is_none() {
            now.none();
            SHAPE.faulty(at, &format!("has no field \"{}\"", FIELDS[field]))
        }
    }
    let tokens = |field| now.value(fields, field, pg_sys::F_INT8IN);
    let (id, lease) = (now.id(fields, ID), now.id(fields, LEASE));
    let usage = Usage {
        run_id: None,
        trace_id: None,
        model: None,
        input_tokens: tokens(6),
        cached_tokens: tokens(7),
        output_tokens: tokens(8),
        model_cost: now.value(fields, 9, pg_sys::F_NUMERIC_IN),
        compute_cost: now.value(fields, 10, pg_sys::F_NUMERIC_IN),
        confidence: now.value(fields, 11, pg_sys::F_FLOAT4IN),
        meta: fields.json(12),
    };
    Completion { id: input::given("id", id), lease: input::given("lease", lease), result: fields.json(RESULT), usage }
}

/// The same with its texts, once every value is within its bounds.
fn checked<'a>(now: &Now, at: usize, (completion, texts): &'a (Completion<'static>, Texts)) -> Completion<'a> {
    let Completion { id, lease, result, usage } = *completion;
    now.at(at);
    input::json("result", result);
    let (run_id, trace_id, model) = (texts.run_id.as_deref(), texts.trace_id.as_deref(), texts.model.as_deref());
    Completion { id, lease, result, usage: Usage { run_id, trace_id, model, ..usage }.checked() }
}

/// Ends the attempts, in the order of their ids, and what follows their ends at the end, so that two that share tasks wait for each other in a line and not in a ring.
/// What is blocked (after a retry) has its rows in another place of that line: it comes last, and is not waited for. Returns the answers; none for those that
/// were the ones that decided, and had not to be looked into.
fn complete_all(session: &Session, name: &str, queue: &Queue, completions: &[Completion], now: Instant, item: &Now) -> Vec<Option<Answer>> {
    let id = |at: &usize| *completions[*at].id.as_bytes();
    let mut order: Vec<usize> = (0..completions.len()).collect();
    order.sort_by_key(id);
    let mut ids: Vec<pgrx::Uuid> = order.iter().map(|at| completions[*at].id).collect();
    let blocked = blocked(session, name, &ids);
    if !blocked.is_empty() {
        order.sort_by_key(|at| blocked.contains(&id(at)));
        ids.retain(|id| !blocked.contains(id.as_bytes()));
    }
    let waiting = ids.len();
    let mut answers: Vec<Option<Answer>> = completions.iter().map(|_| None).collect();
    let (mut ends, mut done) = (Vec::new(), 0);
    while done < order.len() {
        if done < waiting {
            let next = &order[done..waiting];
            let name_item = |nth: Option<usize>| nth.map_or_else(|| item.none(), |nth| item.at(next[nth]));
            done += finish::complete_first(session, name, queue, &ids[done..], next.iter().map(|at| &completions[*at]), now, &mut ends, name_item);
        }
        if done == waiting {
            item.none();
            leave::follow(session, name, std::mem::take(&mut ends), now);
        }
        if let Some(at) = order.get(done) {
            item.at(*at);
            answers[*at] = Some(finish::complete_in_batch(session, name, queue, &completions[*at], now, false, &mut ends));
            done += 1;
        }
    }
    item.none();
    leave::follow(session, name, ends, now);
    answers
}

/// See the SQL COMMENT of stint.complete_many.
#[pg_extern(sql = false)]
fn complete_many(
    queue: Option<&str>,
    items: Option<RawJsonb>,
) -> Table<(
    name!(ordinality, i32),
    name!(id, pgrx::Uuid),
    name!(outcome, RawText),
    name!(result, Option<RawJsonb>),
    name!(first, bool),
    name!(status, RawText),
)> {
    shmem::required();
    let name = input::name("queue", queue);
    let items = input::given("items", items);
    let now = Instant::now();
    let _owner = spi::Identity::owner();
    let queue = spi::connect(|session| config::find(session, name));
    // What is read here goes back to the caller, and so outlives SPI's memory.
    let elements = SHAPE.check(items);
    let item = Now::default();
    let rows = SHAPE.naming(&item, || {
        let mut read: Vec<(Completion, Texts)> = Vec::with_capacity(elements.count);
        SHAPE.each(&elements, |at, fields| {
            item.at(at);
            read.push((completion(&item, at, fields), Texts::of(fields)));
            item.none();
        });
        let completions: Vec<Completion> = read.iter().enumerate().map(|(at, read)| checked(&item, at, read)).collect();
        item.none();
        let answers = spi::connect(|session| complete_all(session, name, &queue, &completions, now, &item));
        let completed = RawText::of("completed");
        let row = |(at, (completion, answer)): (usize, (&Completion, Option<Answer>))| match answer {
            None => (at as i32 + 1, completion.id, completed, completion.result, true, completed),
            Some(Answer { outcome, result, first, status, .. }) => {
                (at as i32 + 1, completion.id, RawText::of(outcome), result, first, RawText::of(&status))
            }
        };
        completions.iter().zip(answers).enumerate().map(row).collect()
    });
    Table::of(rows)
}
