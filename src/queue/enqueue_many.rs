//! `stint.enqueue_many`: a batch of tasks, each element an object with `enqueue`'s arguments. All or none.

use super::config::{self, Queue};
use super::elements::{self, Fields, Now, Shape};
use super::enqueue::{Entry, Request};
use super::flow::enter::{self, OnFailure};
use super::rows::facts;
use super::{keys, store};
use crate::answer::Table;
use crate::spi::{self, Session, arg};
use crate::values::{Instant, RawJsonb};
use crate::{errors, input, shmem};
use pgrx::prelude::*;

static SHAPE: Shape<15> = Shape {
    argument: "tasks",
    element: "task",
    example: "[{\"payload\": …}, …]",
    fields: FIELDS,
    hint: "Each element is an object with the arguments of stint.enqueue, of which payload must be there.",
};

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

const PAYLOAD: usize = 0;
const PRIORITY: usize = 1;
const TOKENS: usize = 6;
const BUDGETS: usize = 7;
const MAX_ATTEMPTS: usize = 8;
const DEPENDS_ON: usize = 12;

/// A whole number.
fn number<T: std::str::FromStr>(now: &Now, fields: &Fields<15>, field: usize) -> Option<T> {
    let text = fields.text(field)?;
    now.field(field, || match text.parse() {
        Ok(number) => Some(number),
        Err(_) => errors::invalid(
            format!("\"{text}\" is not a whole number of the type that stint.enqueue takes"),
            "Pass a JSON number without a fraction.",
        ),
    })
}

/// The elements of an array.
fn texts(now: &Now, at: usize, fields: &Fields<15>, field: usize) -> Option<Vec<Option<String>>> {
    let value = fields.some(field)?;
    value.texts().or_else(|| {
        now.none();
        SHAPE.faulty(at, &format!("has a field \"{}\" that is not an array", FIELDS[field]))
    })
}

fn request(session: &Session, task: &Now, at: usize, fields: &Fields<15>) -> Request {
    let Some(payload) = fields.get(PAYLOAD) else {
        task.none();
        SHAPE.faulty(at, "has no field \"payload\"")
    };
    let interval = |field| task.value(fields, field, pg_sys::F_INTERVAL_IN);
    let depends_on = texts(task, at, fields, DEPENDS_ON);
    let request = Request {
        payload: payload.json(),
        priority: number(task, fields, PRIORITY).unwrap_or(0),
        run_at: task.value(fields, 2, pg_sys::F_TIMESTAMPTZ_IN),
        delay: interval(3),
        key: fields.text(4),
        agent: fields.text(5),
        tokens: number(task, fields, TOKENS),
        budgets: config::budget_numbers(session, &input::names("budgets", texts(task, at, fields, BUDGETS))),
        max_attempts: number(task, fields, MAX_ATTEMPTS),
        lease_for: interval(9),
        labels: fields.json(10),
        group_key: fields.text(11),
        depends_on: task.field(DEPENDS_ON, || {
            let read = |text: Option<String>| text.and_then(|text| elements::read(text, pg_sys::F_UUID_IN));
            enter::ids(depends_on.map(|texts| texts.into_iter().map(read).collect()))
        }),
        on_dependency_failure: fields.text(13).map_or(OnFailure::Fail, |word| OnFailure::argument(&word)),
        max_run_time: interval(14),
    };
    request.check();
    request
}

/// A task's number from 1, its id, and whether it is new.
type Stored = (i32, pgrx::Uuid, bool);

/// Writes the tasks, apart from those whose key is held.
fn store_all(session: &Session, name: &str, queue: &Queue, requests: &[Request], task: &Now, now: Instant) -> Vec<Stored> {
    let ids = requests.iter().map(|_| pgrx::Uuid::from_bytes(stint_core::ids::task(queue.history_class)));
    let mut stored: Vec<Stored> = (1..).zip(ids).map(|(ordinality, id)| (ordinality, id, true)).collect();
    // Keys in one order, so that two batches that share keys wait for each other in a line and not in a ring.
    let mut keyed: Vec<(&str, usize)> = requests.iter().enumerate().filter_map(|(at, request)| Some((request.key.as_deref()?, at))).collect();
    keyed.sort_unstable();
    for (key, at) in keyed {
        if let Some(earlier) = keys::hold(session, name, queue, key, stored[at].1, now) {
            stored[at] = (stored[at].0, earlier, false);
        }
    }
    let new = || requests.iter().zip(&stored).enumerate().filter(|(_, (_, (_, _, new)))| *new).map(|(at, (request, (_, id, _)))| (at, request, *id));
    let mut gate = enter::hold(session, name, queue, new().map(|(_, request, _)| request.wait()));
    let (queue_name, count) = (arg(name), new().count());
    config::keep_from_dropping();
    let mut facts = facts::TABLE.batch(count);
    let write_facts = |(at, request, id)| {
        task.at(at);
        let entry = Entry::new(session, name, queue, id, request, now);
        entry.write_facts(session, queue_name, request, now, Some(&mut facts));
        entry
    };
    let entries: Vec<Entry> = new().map(write_facts).collect();
    task.none();
    facts.write();
    config::still_stands(session, name, queue);
    let mut ready = store::NewReady::new(session, name, queue, count);
    let mut claimable = 0;
    for ((at, request, _), entry) in new().zip(entries) {
        task.at(at);
        claimable += usize::from(entry.place(session, name, &mut gate, request, now, |ticket, agent| ready.push(ticket, agent)));
    }
    task.none();
    ready.write();
    gate.leave(session, name);
    if count > 0 {
        store::announce(queue, claimable);
    }
    stored
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
        let elements = SHAPE.check(tasks);
        let task = Now::default();
        SHAPE.naming(&task, || {
            let mut requests = Vec::with_capacity(elements.count);
            SHAPE.each(&elements, |at, fields| {
                task.at(at);
                requests.push(request(session, &task, at, fields));
                task.none();
            });
            store_all(session, name, &queue, &requests, &task, now)
        })
    });
    Table::of(stored)
}
