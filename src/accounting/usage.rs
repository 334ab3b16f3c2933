//! `stint.usage_by` and `stint.latency`.

use super::filter::{ENDED, Filter, group_key, group_label, one_of, sql, task_rows, types, usage_rows};
use super::histogram;
use crate::spi::{self, Rows, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawNumeric, SECOND};
use crate::{errors, input, savepoint, shmem};
use pgrx::prelude::*;
use std::collections::HashMap;
use stint_core::histogram::{DURATION_ERROR, Histogram, SHARE_ERROR, Scale};
use stint_core::rollup::Level;

const GROUPED: [pg_sys::Oid; 12] = types(&[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TIMESTAMPTZOID]);

static USAGE: Statement = Statement::new(
    sql(concat!(
        "select ",
        group_label!(),
        ", sum(k.attempts)::bigint, sum(k.input_tokens), sum(k.cached_tokens), sum(k.output_tokens), sum(k.model_cost), sum(k.compute_cost),
          sum(k.model_cost + k.compute_cost), stint.histogram('share', array_agg(k.confidence))
          from (select ",
        group_key!("ended"),
        ", sum(s.attempts) as attempts, sum(s.input_tokens) as input_tokens, sum(s.cached_tokens) as cached_tokens, sum(s.output_tokens) as output_tokens,
           sum(s.model_cost) as model_cost, sum(s.compute_cost) as compute_cost,
           stint.histogram('share', array_agg(s.confidence) filter (where s.confidence is not null),
                           array_agg(s.one_confidence) filter (where s.one_confidence is not null)) as confidence
           from (",
        usage_rows!(),
        ") s group by 1, 2) k group by 1\0"
    )),
    &GROUPED,
);

static TASKS: Statement = Statement::new(
    sql(concat!(
        "select ",
        group_label!(),
        ", sum(k.tasks)::bigint from (select ",
        group_key!("outcome"),
        ", sum(s.tasks) as tasks from (",
        task_rows!(),
        ") s group by 1, 2) k group by 1\0"
    )),
    &GROUPED,
);

static LATENCY: Statement = Statement::new(
    sql(concat!(
        "select ",
        group_label!(),
        ", stint.histogram('duration', array_agg(k.wait)), stint.histogram('duration', array_agg(k.run)) from (select ",
        group_key!("ended"),
        ", stint.histogram('duration', array_agg(s.wait) filter (where s.wait is not null), array_agg(s.one_wait) filter (where s.one_wait is not null)) as wait,
           stint.histogram('duration', array_agg(s.run) filter (where s.run is not null), array_agg(s.one_run) filter (where s.one_run is not null)) as run
           from (",
        usage_rows!(),
        ") s group by 1, 2) k group by 1\0"
    )),
    &GROUPED,
);

/// What can be grouped by.
const BY: &[&str] = &["agent", "model", "queue", "status", "hour", "day", "month"];

/// The longest spans that can be told apart by a grouping. In a time zone of its own, days and months begin at any hour.
fn coarsest(by: Option<&str>, zone: &str) -> Level {
    match by {
        Some("hour") => Level::Hour,
        Some("day" | "month") if !zone.eq_ignore_ascii_case("UTC") => Level::Hour,
        Some("day") => Level::Day,
        _ => Level::Month,
    }
}

/// Raises an error where PostgreSQL does not know the zone.
static ZONE: Statement = Statement::new(c"select now() at time zone $1", &[pg_sys::TEXTOID]);
static ZONE_NAMES: Statement = Statement::new(c"select n.name from pg_timezone_names n where n.name !~ '^(posix|right)/'", &[]);

fn checked_zone<'a>(session: &Session, zone: Option<&'a str>) -> &'a str {
    let zone = input::given("time_zone", zone);
    let known = savepoint::isolated(|| spi::connect(|session| session.read(&ZONE, &[arg(zone)]).len()));
    if known.is_err() {
        unknown_zone(session, zone)
    }
    zone
}

fn unknown_zone(session: &Session, zone: &str) -> ! {
    let rows = session.read(&ZONE_NAMES, &[]);
    let names: Vec<String> = (0..rows.len()).map(|row| rows.must(row, 1)).collect();
    let near =
        stint_core::names::nearest(zone, names.iter().map(String::as_str)).map(|near| format!("Did you mean \"{near}\"? ")).unwrap_or_default();
    errors::invalid(
        format!("time zone \"{zone}\" is not known"),
        format!("{near}Names are those of the IANA database, such as 'Europe/Berlin' or 'UTC'; the view pg_timezone_names has all."),
    )
}

/// See the SQL COMMENT of stint.usage_by.
#[pg_extern(sql = false)]
fn usage_by(
    by: Option<&str>,
    since: Option<Instant>,
    until: Option<Instant>,
    status: Option<&str>,
    agent: Option<&str>,
    queue: Option<&str>,
    model: Option<&str>,
    time_zone: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(key, Option<String>),
        name!(tasks, i64),
        name!(attempts, i64),
        name!(input_tokens, Option<RawNumeric>),
        name!(cached_tokens, Option<RawNumeric>),
        name!(output_tokens, Option<RawNumeric>),
        name!(model_cost, Option<RawNumeric>),
        name!(compute_cost, Option<RawNumeric>),
        name!(cost, Option<RawNumeric>),
        name!(median_confidence, Option<f64>),
        name!(confidence_error, f64),
    ),
> {
    shmem::required();
    if let Some(by) = by {
        one_of("by", by, BY);
    }
    let filter = Filter { since, until, status, agent, queue, model }.checked(ENDED);
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        let zone = checked_zone(session, time_zone);
        let asked = filter.asked(session, coarsest(by, zone));
        let params = asked.with(&[arg(by), arg(zone), arg(asked.hours_from)]);
        let finished = session.read(&TASKS, &params);
        let mut tasks: HashMap<Option<String>, i64> = (0..finished.len()).map(|at| (finished.get(at, 1), finished.must(at, 2))).collect();
        let rows = session.read(&USAGE, &params);
        let mut all: Vec<_> = (0..rows.len())
            .map(|at| {
                let key: Option<String> = rows.get(at, 1);
                let tasks = tasks.remove(&key).unwrap_or(0);
                let [input, cached, output, model_cost, compute_cost, cost] = [3, 4, 5, 6, 7, 8].map(|column| rows.lift(at, column).map(RawNumeric));
                let median = stored(&rows, at, 9).quantile(Scale::Share, 0.5);
                (key, tasks, rows.must(at, 2), input, cached, output, model_cost, compute_cost, cost, median, SHARE_ERROR)
            })
            .collect();
        // Tasks that were cancelled before anybody claimed them.
        tasks.retain(|_, count| *count != 0);
        let zero = session.read(&ZERO, &[]);
        let zero = || zero.lift(0, 1).map(RawNumeric);
        all.extend(tasks.into_iter().map(|(key, tasks)| (key, tasks, 0, zero(), zero(), zero(), zero(), zero(), zero(), None, SHARE_ERROR)));
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    }))
}

static ZERO: Statement = Statement::new(c"select 0::numeric", &[]);

fn stored(rows: &Rows, at: usize, column: usize) -> Histogram {
    let mut all = Histogram::default();
    if let Some(bytes) = rows.get::<Vec<u8>>(at, column) {
        histogram::merge(&mut all, "histogram", &bytes);
    }
    all
}

static DURATION: Statement = Statement::new(c"select make_interval(secs => $1)", &[pg_sys::FLOAT8OID]);

/// See the SQL COMMENT of stint.latency.
#[pg_extern(sql = false)]
fn latency(
    since: Option<Instant>,
    until: Option<Instant>,
    status: Option<&str>,
    agent: Option<&str>,
    queue: Option<&str>,
    model: Option<&str>,
    by: Option<&str>,
    time_zone: Option<&str>,
) -> TableIterator<
    'static,
    (
        name!(key, Option<String>),
        name!(measure, &'static str),
        name!(attempts, i64),
        name!(median, Option<RawInterval>),
        name!(p95, Option<RawInterval>),
        name!(p99, Option<RawInterval>),
        name!(median_ms, Option<f64>),
        name!(p95_ms, Option<f64>),
        name!(p99_ms, Option<f64>),
        name!(error, f64),
    ),
> {
    shmem::required();
    if let Some(by) = by {
        one_of("by", by, BY);
    }
    let filter = Filter { since, until, status, agent, queue, model }.checked(ENDED);
    let _owner = spi::Identity::owner();
    TableIterator::new(spi::connect(|session| {
        let zone = checked_zone(session, time_zone);
        let asked = filter.asked(session, coarsest(by, zone));
        let rows = session.read(&LATENCY, &asked.with(&[arg(by), arg(zone), arg(asked.hours_from)]));
        let mut all: Vec<(
            Option<String>,
            &str,
            i64,
            Option<RawInterval>,
            Option<RawInterval>,
            Option<RawInterval>,
            Option<f64>,
            Option<f64>,
            Option<f64>,
            f64,
        )> = Vec::new();
        for at in 0..rows.len() {
            let key: Option<String> = rows.get(at, 1);
            for (measure, column) in [("wait", 2), ("run", 3)] {
                let counted = stored(&rows, at, column);
                let micros = [0.5, 0.95, 0.99].map(|share| counted.quantile(Scale::Duration, share));
                let [median, p95, p99] = micros.map(|micros| {
                    let made = session.read(&DURATION, &[arg(micros? / SECOND as f64)]);
                    made.lift(0, 1).map(RawInterval)
                });
                let [median_ms, p95_ms, p99_ms] = micros.map(|micros| micros.map(|micros| micros / 1000.0));
                let attempts = i64::try_from(counted.total()).unwrap_or(i64::MAX);
                all.push((key.clone(), measure, attempts, median, p95, p99, median_ms, p95_ms, p99_ms, DURATION_ERROR));
            }
        }
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    }))
}
