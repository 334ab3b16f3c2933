//! `record` and `record_many`: events are appended, each once, and what they change at once is changed.

use super::{apply, config, lookup, order};
use crate::changelog::epoch;
use crate::errors::{self, Fault};
use crate::savepoint::isolated;
use crate::spi::{self, Identity, Rows, Session, Statement, arg, home};
use crate::values::{Instant, RawJsonb};
use crate::{guc, input, shmem};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::panic::AssertUnwindSafe;
use stint_core::names::nearest;

/// The fields an element of a batch may have.
const FIELDS: [&str; 5] = ["source", "type", "payload", "event_id", "occurred_at"];

static ONE: Statement = Statement::new(c"SELECT jsonb_build_array(jsonb_build_object('payload', $1))", &[pg_sys::JSONBOID]);
static ARRAY_LENGTH: Statement = Statement::new(c"SELECT CASE WHEN jsonb_typeof($1) = 'array' THEN jsonb_array_length($1) END", &[pg_sys::JSONBOID]);

/// The first element that is no event: its number, its unknown field, or what else is wrong.
static FAULTY: Statement = Statement::new(
    c"SELECT e.ord::int,
             CASE WHEN jsonb_typeof(e.event) = 'object'
                  THEN (SELECT k FROM jsonb_object_keys(e.event) k WHERE k <> ALL ($2) LIMIT 1) END,
             CASE WHEN jsonb_typeof(e.event) <> 'object' THEN 'is not an object but of type ' || jsonb_typeof(e.event)
                  ELSE 'has no field \"payload\"' END
      FROM jsonb_array_elements($1) WITH ORDINALITY e (event, ord)
      WHERE CASE WHEN jsonb_typeof(e.event) = 'object' THEN (e.event - $2) <> '{}' OR e.event -> 'payload' IS NULL ELSE true END
      ORDER BY e.ord LIMIT 1",
    &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);
static FACTS: Statement = Statement::new(
    c"SELECT e.event ->> 'source', e.event ->> 'type', e.event ->> 'event_id', e.event ->> 'occurred_at', e.event -> 'payload'
      FROM jsonb_array_elements($1) WITH ORDINALITY e (event, ord) ORDER BY e.ord",
    &[pg_sys::JSONBOID],
);

/// The events as documents without a number, to tell which keys they touch.
static DOCUMENTS: Statement = Statement::new(
    c"SELECT coalesce(jsonb_agg(jsonb_build_object('source', x.source, 'type', x.type, 'event_id', x.event_id, 'occurred_at', stint.utc_text(x.occurred_at),
                                                   'recorded_at', stint.utc_text($6), 'payload', x.event -> 'payload',
                                                   'lookups', stint.looked_up($7, x.ord)) ORDER BY x.ord), '[]')
      FROM ROWS FROM (jsonb_array_elements($1), unnest($2, $3, $4, $5)) WITH ORDINALITY x (event, source, type, event_id, occurred_at, ord)",
    &[
        pg_sys::JSONBOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TIMESTAMPTZARRAYOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::JSONBOID,
    ],
);

/// Numbers are drawn in the order of the batch; ids are written in their own order, so that two batches that share ids wait for each other in a line.
static APPEND: Statement = Statement::new(
    c"WITH given AS MATERIALIZED (
          SELECT x.*, nextval('stint.event_seq') AS seq
          FROM (SELECT x.ord, x.source, x.type, x.event_id, x.occurred_at, x.event -> 'payload' AS payload
                FROM ROWS FROM (jsonb_array_elements($1), unnest($2, $3, $4, $5)) WITH ORDINALITY x (event, source, type, event_id, occurred_at, ord)
                ORDER BY x.ord OFFSET 0) x
      ), made AS (
          INSERT INTO stint.event_log (seq, epoch, xid, source, type, event_id, occurred_at, recorded_at, recorded_by, payload, lookups)
          SELECT g.seq, $8, pg_current_xact_id(), g.source, g.type, g.event_id, g.occurred_at, $6, pg_get_userbyid($9), g.payload, stint.looked_up($7, g.ord)
          FROM given g ORDER BY g.source, g.event_id, g.ord
          ON CONFLICT (source, event_id) WHERE event_id IS NOT NULL DO NOTHING
          RETURNING seq
      )
      SELECT g.seq, m.seq IS NOT NULL FROM given g LEFT JOIN made m ON m.seq = g.seq ORDER BY g.ord",
    &[
        pg_sys::JSONBOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TIMESTAMPTZARRAYOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::JSONBOID,
        pg_sys::INT4OID,
        pg_sys::OIDOID,
    ],
);

/// The event that has an id already, and what of it differs.
static KNOWN: Statement = Statement::new(
    c"SELECT l.seq,
             CASE WHEN l.type <> $3 THEN format('type \"%s\"', l.type)
                  WHEN l.payload::text <> ($4 -> 'payload')::text THEN 'another payload'
                  WHEN l.occurred_at <> $5 THEN format('occurred_at %s', l.occurred_at) END
      FROM stint.event_log l WHERE l.source = $1 AND l.event_id = $2 AND l.event_id IS NOT NULL",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::JSONBOID, pg_sys::TIMESTAMPTZOID],
);
static ELEMENT: Statement = Statement::new(c"SELECT $1 -> $2", &[pg_sys::JSONBOID, pg_sys::INT4OID]);

/// What is known of an event beside its payload.
struct Facts {
    source: String,
    kind: String,
    id: Option<String>,
    occurred_at: Option<Instant>,
}

/// Keeps projections as they are while events are recorded; who changes them takes the stronger lock.
pub fn hold_projections() {
    // SAFETY: a catalogue look-up and the lock that inserting takes anyway.
    unsafe { pg_sys::LockRelationOid(log(), pg_sys::RowExclusiveLock as i32) };
}

/// The oid of the record's table.
pub fn log() -> pg_sys::Oid {
    // SAFETY: a catalogue look-up.
    unsafe { pg_sys::get_relname_relid(c"event_log".as_ptr(), home().schema) }
}

/// 0001-01-01 in microseconds before 2000-01-01: earlier instants are written with BC.
const EARLIEST: i64 = -730_119 * 86_400 * crate::values::SECOND;

fn moment(value: Option<Instant>) -> Option<Instant> {
    if let Some(at) = value
        && !(EARLIEST..i64::MAX).contains(&at.0)
    {
        errors::invalid(format!("argument \"occurred_at\" is {}", at.text()), "Give a finite time after the birth of Christ, or leave it out.");
    }
    value
}

/// Does what concerns element `at`, counted from 0; an error names it.
fn of_event<T>(at: usize, work: impl FnOnce() -> T) -> T {
    PgTryBuilder::new(AssertUnwindSafe(work))
        .catch_others(|error| match error {
            CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => {
                let fault = Fault::new(report.sql_error_code(), format!("event {}: {}", at + 1, report.message()));
                let fault = report.detail().into_iter().fold(fault, |fault, detail| fault.detail(detail));
                fault.hint(report.hint().unwrap_or("Each element is an object with the arguments of stint.record, of the same types.")).raise()
            }
            other => other.rethrow(),
        })
        .execute()
}

fn check_shape(session: &Session, events: RawJsonb) {
    match session.run(&ARRAY_LENGTH, &[arg(events)]).get::<i32>(0, 1) {
        None => {
            errors::invalid("argument \"events\" is not an array", "Pass an array of objects: '[{\"source\": …, \"type\": …, \"payload\": …}, …]'.")
        }
        Some(length) => input::batch_size("events", usize::try_from(length).unwrap_or(0)),
    };
    let faulty = session.run(&FAULTY, &[arg(events), arg(FIELDS.map(str::to_string).to_vec())]);
    if faulty.is_empty() {
        return;
    }
    let at: i32 = faulty.must(0, 1);
    if let Some(field) = faulty.get::<String>(0, 2) {
        let near = nearest(&field, FIELDS).map(|near| format!("Did you mean \"{near}\"? ")).unwrap_or_default();
        errors::invalid(format!("event {at} has the unknown field \"{field}\""), format!("{near}The fields are {}.", FIELDS.join(", ")))
    }
    errors::invalid(
        format!("event {at} {}", faulty.must::<String>(0, 3)),
        "Each element is an object with the arguments of stint.record, of which source, type and payload must be there.",
    )
}

fn facts(rows: &Rows, at: usize) -> Facts {
    of_event(at, || {
        let (source, kind, id): (Option<String>, Option<String>, Option<String>) = (rows.get(at, 1), rows.get(at, 2), rows.get(at, 3));
        input::name("source", source.as_deref());
        input::name("type", kind.as_deref());
        input::reference("event_id", id.as_deref());
        input::json("payload", rows.get(at, 5));
        let occurred_at = rows.get::<String>(at, 4).map(|text| instant(&text));
        Facts { source: source.unwrap_or_default(), kind: kind.unwrap_or_default(), id, occurred_at: moment(occurred_at) }
    })
}

/// A time as PostgreSQL reads it.
fn instant(text: &str) -> Instant {
    let Ok(text) = std::ffi::CString::new(text) else { errors::internal("a text contains a zero byte") };
    // SAFETY: the input function of timestamptz reads the text and leaves it as it is.
    unsafe {
        let datum = pg_sys::OidInputFunctionCall(pg_sys::Oid::from(pg_sys::F_TIMESTAMPTZ_IN), text.as_ptr().cast_mut(), pg_sys::InvalidOid, -1);
        Instant(datum.value() as i64)
    }
}

/// The order of the keys that the events touch, before they are numbered.
fn take_order(session: &Session, targets: &[config::Target], types: &[String], documents: RawJsonb, count: i64) {
    for target in targets {
        let projected = match config::fitting(session, target.relation) {
            Ok(Some(projected)) => projected,
            Ok(None) => continue,
            Err(_) => {
                // Which keys the events touch cannot be told. What is set aside at once changes nothing; the worker may fold the others once the table fits.
                if !target.immediate {
                    order::all(target.relation);
                }
                continue;
            }
        };
        let Some(slots) = &projected.slots else { continue };
        if projected.unhashable || projected.strays.iter().any(|stray| types.contains(stray)) {
            order::all(target.relation);
            continue;
        }
        let of = |from: i64, to: i64| {
            isolated(|| {
                spi::connect(|session| {
                    // The key's types may be domains, whose checks are the owner's code.
                    let _restricted = Identity::restricted(projected.relation.owner);
                    let found = session.run_prepared(slots.plan(), &[arg(documents), arg(from), arg(to), arg(order::SLOTS - 1)]);
                    found.must::<Vec<Option<i32>>>(0, 1).into_iter().flatten().collect::<Vec<i32>>()
                })
            })
        };
        let slots = of(1, count).unwrap_or_else(|_| {
            // An event whose key cannot be read will not change the table either.
            let mut slots: Vec<i32> = (1..=count).filter_map(|at| of(at, at).ok()).flatten().collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        });
        order::keys(target.relation, &slots);
    }
}

/// Appends events: an array of objects of which Rust knows the facts. Returns number and whether it is new for each, in order.
fn append(session: &Session, caller: pg_sys::Oid, events: RawJsonb, facts: &[Facts], named: bool) -> Vec<(i64, bool)> {
    let epoch = epoch::required(session);
    hold_projections();
    let now = Instant::now();
    let mut types: Vec<String> = facts.iter().map(|fact| fact.kind.clone()).collect();
    types.sort();
    types.dedup();
    let count = i64::try_from(facts.len()).unwrap_or(0);
    let given = || {
        vec![
            arg(events),
            arg(facts.iter().map(|fact| fact.source.clone()).collect::<Vec<_>>()),
            arg(facts.iter().map(|fact| fact.kind.clone()).collect::<Vec<_>>()),
            arg(facts.iter().map(|fact| fact.id.clone()).collect::<Vec<_>>()),
            arg(facts.iter().map(|fact| fact.occurred_at.unwrap_or(now)).collect::<Vec<_>>()),
            arg(now),
        ]
    };
    let documents = |lookups: Option<RawJsonb>| {
        let mut params = given();
        params.push(lookups.and_then(arg));
        session.run(&DOCUMENTS, &params).must(0, 1)
    };
    let lookups = lookup::of(session, &types, || documents(None), count);
    let targets = config::targets(session, &types);
    if !targets.is_empty() {
        take_order(session, &targets, &types, documents(Some(lookups)), count);
    }
    let mut params = given();
    params.push(arg(lookups));
    params.extend([arg(epoch), arg(caller)]);
    let rows = session.run(&APPEND, &params);
    let mut made: Vec<(i64, bool)> = (0..rows.len()).map(|row| (rows.must(row, 1), rows.must(row, 2))).collect();
    for (at, fact) in facts.iter().enumerate() {
        if let (Some(id), (seq, false)) = (&fact.id, &mut made[at]) {
            *seq = if named { of_event(at, || known(session, events, at, fact, id)) } else { known(session, events, at, fact, id) };
        }
    }
    let fresh: Vec<i64> = made.iter().filter(|(_, created)| *created).map(|(seq, _)| *seq).collect();
    if !fresh.is_empty() {
        for target in targets.iter().filter(|target| target.immediate) {
            apply::recorded(session, target, &fresh);
        }
    }
    made
}

/// The number of the event that has this id; an error where it is another event.
fn known(session: &Session, events: RawJsonb, at: usize, fact: &Facts, id: &str) -> i64 {
    let element = session.run(&ELEMENT, &[arg(events), arg(i32::try_from(at).unwrap_or(0))]);
    let there = session.run_latest(
        &KNOWN,
        &[arg(fact.source.as_str()), arg(id), arg(fact.kind.as_str()), arg(element.must::<RawJsonb>(0, 1)), fact.occurred_at.and_then(arg)],
    );
    if there.is_empty() {
        Fault::new(PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, format!("event \"{id}\" of source \"{}\" has just been removed", fact.source))
            .hint("Repeat the transaction.")
            .raise();
    }
    if let Some(other) = there.get::<String>(0, 2) {
        Fault::new(PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION, format!("source \"{}\" has already recorded another event as \"{id}\"", fact.source))
            .detail(format!("The event of that id, number {}, has {other}.", there.must::<i64>(0, 1)))
            .hint("Give each event an id of its own; a repeat must bring the same type, payload and time.")
            .raise();
    }
    there.must(0, 1)
}

#[pg_extern(sql = false)]
fn record(source: Option<&str>, r#type: Option<&str>, payload: Option<RawJsonb>, event_id: Option<&str>, occurred_at: Option<Instant>) -> i64 {
    shmem::required();
    let source = input::name("source", source).to_string();
    let kind = input::name("type", r#type).to_string();
    let payload = input::given("payload", payload);
    input::json("payload", Some(payload));
    let id = input::reference("event_id", event_id).map(str::to_string);
    let occurred_at = moment(occurred_at);
    let identity = Identity::owner();
    spi::connect(|session| {
        let events: RawJsonb = session.run(&ONE, &[arg(payload)]).must(0, 1);
        append(session, identity.caller(), events, &[Facts { source, kind, id, occurred_at }], false)[0].0
    })
}

#[pg_extern(sql = false)]
fn record_many(events: Option<RawJsonb>) -> TableIterator<'static, (name!(ordinality, i32), name!(seq, i64), name!(created, bool))> {
    shmem::required();
    let events = input::given("events", events);
    let identity = Identity::owner();
    let made = spi::connect(|session| {
        check_shape(session, events);
        let rows = session.run(&FACTS, &[arg(events)]);
        let facts: Vec<Facts> = (0..rows.len()).map(|at| facts(&rows, at)).collect();
        if facts.is_empty() { Vec::new() } else { append(session, identity.caller(), events, &facts, true) }
    });
    TableIterator::new((1..).zip(made).map(|(ordinality, (seq, created))| (ordinality, seq, created)))
}

/// How many events one write of a table may take.
pub fn events_at_once(per_event: usize) -> i32 {
    (guc::max_batch() / i32::try_from(per_event).unwrap_or(i32::MAX)).max(1)
}
