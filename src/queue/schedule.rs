//! Schedules: `create_schedule`, `pause_schedule`, `resume_schedule`, `drop_schedule`, `fire_schedules`, `next_fire`. When a slot is due is decided in
//! `stint_core::cron`; here a slot becomes a row and a task in one transaction.
//!
//! Locks in order: the schedule's row (skipped where another session has it), the slot's key, then those of an enqueue. What fires reads the latest slot after it
//! has the schedule's row, so sessions that fire one schedule take turns; the slot's key would stop them if they did not.

use super::config;
use super::enqueue::{self, Request};
use super::flow::enter::OnFailure;
use crate::changelog::epoch;
use crate::direct;
use crate::errors;
use crate::savepoint;
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb, SECOND};
use crate::{guc, input, shmem};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::cron::{self, CatchUp, Cron};

static INSERT: Statement = Statement::new(
    c"insert into stint.schedule_config
             (schedule, cron, time_zone, into_queue, payload, priority, delay, key, agent, tokens, budgets, max_attempts, lease_for, labels,
              catch_up, paused, since, comment, group_key)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
      on conflict (schedule) do nothing",
    &[
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::JSONBOID,
        pg_sys::INT4OID,
        pg_sys::INTERVALOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::TEXTARRAYOID,
        pg_sys::INT4OID,
        pg_sys::INTERVALOID,
        pg_sys::JSONBOID,
        pg_sys::TEXTOID,
        pg_sys::BOOLOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
    ],
);
static PAUSE: Statement = Statement::new(c"update stint.schedule_config set paused = true where schedule = $1 and not paused", &[pg_sys::TEXTOID]);
static RESUME: Statement = Statement::new(
    c"update stint.schedule_config set paused = false, since = $2 where schedule = $1 and paused",
    &[pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID],
);
static DROP: Statement = Statement::new(c"delete from stint.schedule_config where schedule = $1", &[pg_sys::TEXTOID]);
static DROP_SLOTS: Statement = Statement::new(c"delete from stint.schedule_slots where schedule = $1", &[pg_sys::TEXTOID]);
static NAMES: Statement = Statement::new(c"select c.schedule::text from stint.schedule_config c order by c.schedule", &[]);

/// What is in force, and up to when each has fired.
static IN_FORCE: Statement = Statement::new(
    c"select c.schedule::text, c.cron, c.time_zone, c.catch_up,
             greatest(c.since, (select s.slot from stint.schedule_slots s where s.schedule = c.schedule order by s.slot desc limit 1))
      from stint.schedule_config c
      where not c.paused
      order by c.schedule",
    &[],
);
static LOCK: Statement = Statement::new(
    c"select c.into_queue::text, c.payload, c.priority, c.delay, c.key::text, c.agent::text, c.tokens, c.budgets::text[], c.max_attempts, c.lease_for,
             c.labels, c.since, c.group_key::text
      from stint.schedule_config c
      where c.schedule = $1 and not c.paused
      for no key update skip locked",
    &[pg_sys::TEXTOID],
);
static LATEST: Statement =
    Statement::new(c"select s.slot from stint.schedule_slots s where s.schedule = $1 order by s.slot desc limit 1", &[pg_sys::TEXTOID]);
static SLOT: Statement = Statement::new(
    c"insert into stint.schedule_slots (schedule, slot, fired_at, queue_was, id, error) values ($1, $2, $3, $4, $5, $6)
      on conflict (schedule, slot) do nothing",
    &[pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID, pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TEXTOID],
);
static TRIM: Statement = Statement::new(
    c"delete from stint.schedule_slots o
      where o.schedule = $1
        and o.slot <= (select s.slot from stint.schedule_slots s where s.schedule = $1 order by s.slot desc offset 100 limit 1)",
    &[pg_sys::TEXTOID],
);

/// Seconds from 1970 to 2000, from where `timestamptz` counts.
const EPOCH_2000: i64 = 946_684_800;

fn seconds(instant: Instant) -> i64 {
    instant.0.div_euclid(SECOND) + EPOCH_2000
}

fn instant(seconds: i64) -> Instant {
    Instant((seconds - EPOCH_2000).saturating_mul(SECOND))
}

/// The parsed text; an error that names what is wrong with it.
fn parse(text: &str, zone: &str) -> Cron {
    match Cron::new(text, zone) {
        Ok(cron) => cron,
        Err(cron::Fault::Text(problem)) => errors::invalid(
            format!("cron \"{text}\" is not understood: {}", problem.trim_end_matches('.')),
            "Give five fields: minute, hour, day of month, month, day of week, such as '30 4 * * MON-FRI'; or @hourly, @daily, @weekly, @monthly, @yearly.",
        ),
        Err(cron::Fault::Never) => {
            errors::invalid(format!("cron \"{text}\" never fires"), "It names a day that no month has. Change the day of month or the month.")
        }
        Err(cron::Fault::Zone(near)) => errors::invalid(
            format!("time zone \"{zone}\" is not known"),
            match near {
                Some(near) => format!("Did you mean \"{near}\"? Names are those of the IANA database, such as 'Europe/Berlin'."),
                None => "Names are those of the IANA database, such as 'Europe/Berlin' or 'UTC'.".to_string(),
            },
        ),
    }
}

/// See the SQL COMMENT of stint.create_schedule.
#[pg_extern(sql = false)]
fn create_schedule(
    queue: Option<&str>,
    name: Option<&str>,
    cron: Option<&str>,
    payload: Option<RawJsonb>,
    time_zone: Option<&str>,
    priority: Option<i32>,
    delay: Option<RawInterval>,
    key: Option<&str>,
    agent: Option<&str>,
    tokens: Option<i64>,
    budgets: Option<Vec<Option<String>>>,
    max_attempts: Option<i32>,
    lease_for: Option<RawInterval>,
    labels: Option<RawJsonb>,
    catch_up: Option<&str>,
    paused: Option<bool>,
    comment: Option<&str>,
    group_key: Option<&str>,
) {
    shmem::required();
    let queue = input::name("queue", queue);
    let name = input::name("name", name);
    let text = input::given("cron", input::reference("cron", cron));
    let zone = input::given("time_zone", input::reference("time_zone", time_zone));
    let parsed = parse(text, zone);
    let zone = parsed.zone_name().unwrap_or(zone);
    let budget_names = input::names("budgets", budgets);
    let mut request = Request {
        payload: input::given("payload", payload),
        priority: input::given("priority", priority),
        run_at: None,
        delay,
        key: key.map(str::to_string),
        agent: agent.map(str::to_string),
        tokens,
        budgets: Vec::new(),
        group_key: group_key.map(str::to_string),
        depends_on: Vec::new(),
        on_dependency_failure: OnFailure::Fail,
        max_attempts,
        lease_for,
        labels,
        max_run_time: None,
    };
    request.check();
    let catch_up = input::given("catch_up", catch_up);
    if CatchUp::named(catch_up).is_none() {
        errors::invalid(format!("catch_up \"{catch_up}\" is not known"), "Use 'none', 'last' or 'all'.");
    }
    let paused = input::given("paused", paused);
    input::text("comment", comment);

    let now = Instant::now();
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let found = config::find(session, queue);
        request.budgets = config::budget_numbers(session, &budget_names);
        enqueue::check_capacity(session, &found, &request);
        config::keep_from_dropping();
        let made = session.run(
            &INSERT,
            &[
                arg(name),
                arg(text),
                arg(zone),
                arg(queue),
                arg(request.payload),
                arg(request.priority),
                arg(delay),
                arg(key),
                arg(agent),
                arg(tokens),
                arg(budget_names),
                arg(max_attempts),
                arg(lease_for),
                arg(labels),
                arg(catch_up),
                arg(paused),
                arg(now),
                arg(comment),
                arg(group_key),
            ],
        );
        if made.is_empty() {
            errors::exists("schedule", name, "Use another name, or drop the schedule that is there: the view stint.schedules shows it.");
        }
        config::still_stands(session, queue, &found);
    });
}

fn names(session: &Session) -> Vec<String> {
    let rows = session.run(&NAMES, &[]);
    (0..rows.len()).map(|row| rows.must(row, 1)).collect()
}

/// Runs a change of one schedule; an error where there is none of that name.
fn change(name: Option<&str>, statement: &Statement, more: &[spi::Param]) {
    shmem::required();
    let name = input::name("name", name);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        let params: Vec<spi::Param> = [arg(name)].into_iter().chain(more.iter().copied()).collect();
        if session.run(statement, &params).is_empty() {
            let names = names(session);
            if !names.iter().any(|known| known == name) {
                let near = stint_core::names::nearest(name, names.iter().map(String::as_str));
                errors::unknown("schedule", name, near, "The view stint.schedules lists them; stint.create_schedule makes one.");
            }
        }
    });
}

/// See the SQL COMMENT of stint.pause_schedule.
#[pg_extern(sql = false)]
fn pause_schedule(name: Option<&str>) {
    change(name, &PAUSE, &[]);
}

/// See the SQL COMMENT of stint.resume_schedule.
#[pg_extern(sql = false)]
fn resume_schedule(name: Option<&str>) {
    change(name, &RESUME, &[arg(Instant::now())]);
}

/// See the SQL COMMENT of stint.drop_schedule.
#[pg_extern(sql = false)]
fn drop_schedule(name: Option<&str>) {
    change(name, &DROP, &[]);
    let _owner = spi::Identity::owner();
    spi::connect(|session| session.run(&DROP_SLOTS, &[arg(name)]));
}

/// See the SQL COMMENT of stint.next_fire.
#[pg_extern(sql = false)]
fn next_fire(cron: Option<&str>, time_zone: Option<&str>, since: Option<Instant>) -> Option<Instant> {
    let text = input::given("cron", input::reference("cron", cron));
    let zone = input::given("time_zone", input::reference("time_zone", time_zone));
    let since = input::given("since", since);
    parse(text, zone).next(seconds(since)).map(instant)
}

/// What this process worked out of a schedule, so that a round in which nothing is due parses nothing.
struct Known {
    text: String,
    zone: String,
    last: i64,
    next: Option<i64>,
    cron: Rc<Cron>,
}

thread_local! {
    static KNOWN: RefCell<HashMap<String, Known>> = RefCell::new(HashMap::new());
}

/// A schedule with a slot that is due.
struct Due {
    schedule: String,
    cron: Rc<Cron>,
    catch_up: CatchUp,
}

/// The schedules that have a slot between their last and now, by name.
fn slots(session: &Session, now: i64) -> Vec<Due> {
    let rows = session.run(&IN_FORCE, &[]);
    let mut before = KNOWN.take();
    let mut known = HashMap::with_capacity(rows.len());
    let mut due = Vec::new();
    for at in 0..rows.len() {
        let (schedule, text, zone): (String, String, String) = (rows.must(at, 1), rows.must(at, 2), rows.must(at, 3));
        let last = seconds(rows.must(at, 5));
        let entry = match before.remove(&schedule).filter(|entry| (&entry.text, &entry.zone) == (&text, &zone)) {
            Some(entry) if entry.last == last => entry,
            Some(entry) => Known { last, next: entry.cron.next(last), ..entry },
            None => match Cron::new(&text, &zone) {
                Ok(cron) => Known { next: cron.next(last), text, zone, last, cron: Rc::new(cron) },
                // It was right when it was created; the server's time zones have changed.
                Err(_) => {
                    warn(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, &schedule, format!("time zone \"{zone}\" is not known any more"));
                    continue;
                }
            },
        };
        if entry.next.is_some_and(|next| next <= now)
            && let Some(catch_up) = CatchUp::named(&rows.must::<String>(at, 4))
        {
            due.push(Due { schedule: schedule.clone(), cron: entry.cron.clone(), catch_up });
        }
        known.insert(schedule, entry);
    }
    KNOWN.set(known);
    due
}

fn warn(code: PgSqlErrorCode, schedule: &str, problem: String) {
    ErrorReport::new(code, format!("schedule \"{schedule}\" could not fire"), "pg_stint")
        .set_detail(problem)
        .set_hint("It is tried again; the other schedules go on.")
        .report(PgLogLevel::WARNING);
}

/// Fires the next due slot of one schedule. False where nothing is due or another session has it in hand.
fn fire_one(session: &Session, due: &Due, now: Instant) -> bool {
    let row = session.run(&LOCK, &[arg(&*due.schedule)]);
    if row.is_empty() {
        return false;
    }
    // Only now, with the row locked, is the latest slot what it will stay.
    let latest = session.run(&LATEST, &[arg(&*due.schedule)]);
    let last = latest.get::<Instant>(0, 1).into_iter().fold(row.must(0, 12), Instant::max);
    let Some(slot) = due.cron.due(seconds(last), seconds(now), due.catch_up).map(instant) else { return false };
    let queue: String = row.must(0, 1);
    let note = |id: Option<pgrx::Uuid>, error: Option<&str>| {
        let fired = session.run(&SLOT, &[arg(&*due.schedule), arg(slot), arg(now), arg(&*queue), arg(id), arg(error)]);
        !fired.is_empty()
    };
    let made = savepoint::isolated(|| {
        let request = Request {
            payload: row.must(0, 2),
            priority: row.must(0, 3),
            run_at: None,
            delay: row.get(0, 4),
            key: row.get(0, 5),
            agent: row.get(0, 6),
            tokens: row.get(0, 7),
            budgets: Vec::new(),
            group_key: row.get(0, 13),
            depends_on: Vec::new(),
            on_dependency_failure: OnFailure::Fail,
            max_attempts: row.get(0, 9),
            lease_for: row.get(0, 10),
            labels: row.get(0, 11),
            max_run_time: None,
        };
        // The limits may be others than when the schedule was created.
        request.check();
        let budget_names: Vec<String> = row.must(0, 8);
        note(Some(enqueue::add(session, &queue, request, &budget_names, now, |_, _| ()).0), None)
            || errors::internal("a slot fired without its schedule's lock")
    });
    match made {
        Ok(fired) => fired,
        Err((code, message)) if errors::passes_by_itself(code) => {
            warn(code, &due.schedule, message);
            false
        }
        Err((_, message)) => note(None, Some(&message)),
    }
}

/// Fires at most `max` due slots.
fn fire(session: &Session, max: usize) -> usize {
    let now = Instant::now();
    let mut fired = 0;
    for due in slots(session, seconds(now)) {
        let before = fired;
        while fired < max && fire_one(session, &due, now) {
            fired += 1;
        }
        if fired > before {
            session.run(&TRIM, &[arg(&*due.schedule)]);
        }
    }
    fired
}

/// See the SQL COMMENT of stint.fire_schedules.
#[pg_extern(sql = false)]
fn fire_schedules(max: Option<i32>) -> i32 {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = spi::Identity::owner();
    spi::connect(|session| {
        epoch::refuse_in_copy(session);
        i32::try_from(fire(session, max)).unwrap_or(i32::MAX)
    })
}

/// Whether there may be schedules.
pub fn due() -> bool {
    direct::has_pages(c"schedule_config")
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    let max = usize::try_from(guc::max_batch()).unwrap_or(1);
    spi::connect(|session| fire(session, max) == max)
}
