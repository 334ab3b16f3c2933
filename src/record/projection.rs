//! `create_projection` and `drop_projection`.

use super::config::{self, lacks_key, raise};
use super::{append, rebuild};
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::spi::{self, Identity, Prepared, Session, Statement, arg};
use crate::state::declare::json_text;
use crate::state::plans::{self, Steps};
use crate::state::rights;
use crate::values::{RawInterval, RawJsonb};
use crate::{guc, input, shmem};
use pgrx::prelude::*;
use stint_core::names::nearest;
use stint_core::record::map::{self, FIELDS};
use stint_core::state::compile::{KINDS, Kind};

static OF_TABLE: Statement = Statement::new(
    c"SELECT c.name::text, c.freshness = $2, c.freshness::text FROM stint.projection_config c WHERE c.relation = $1 ORDER BY c.name",
    &[pg_sys::OIDOID, pg_sys::INTERVALOID],
);
static INSERT: Statement = Statement::new(
    c"INSERT INTO stint.projection_config (name, relation, types, columns, kind, freshness, on_error)
      VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (name) DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::OIDOID, pg_sys::TEXTARRAYOID, pg_sys::JSONBOID, pg_sys::TEXTOID, pg_sys::INTERVALOID, pg_sys::TEXTOID],
);
static FIND: Statement = Statement::new(
    c"SELECT c.relation::oid, EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation), (SELECT count(*) FROM stint.projection_config o WHERE o.relation = c.relation)
      FROM stint.projection_config c WHERE c.name = $1",
    &[pg_sys::TEXTOID],
);
static NAMES: Statement = Statement::new(c"SELECT c.name::text FROM stint.projection_config c", &[]);
static DELETE: Statement = Statement::new(c"DELETE FROM stint.projection_config c WHERE c.name = $1", &[pg_sys::TEXTOID]);
static FORGET_POSITIONS: Statement = Statement::new(c"DELETE FROM stint.projection_positions p WHERE p.relation = $1", &[pg_sys::OIDOID]);
static FORGET_ASIDE: Statement = Statement::new(c"DELETE FROM stint.events_aside a WHERE a.relation = $1", &[pg_sys::OIDOID]);
static FORGET_BASE: Statement = Statement::new(c"DELETE FROM stint.base_images b WHERE b.relation = $1", &[pg_sys::OIDOID]);
// A table dropped without ceremony leaves its projections behind; its oid may come back.
static FORGET_DROPPED: Statement =
    Statement::new(c"DELETE FROM stint.projection_config c WHERE NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)", &[]);
static RECORDED: Statement =
    Statement::new(c"SELECT EXISTS (SELECT FROM unnest($1) t (type) JOIN stint.event_log l ON l.type = t.type)", &[pg_sys::TEXTARRAYOID]);
static SKIP: Statement =
    Statement::new(c"UPDATE stint.events_aside a SET state = 'skipped' WHERE a.relation = $1 AND a.seq = $2", &[pg_sys::OIDOID, pg_sys::INT8OID]);

/// The words of `on_error`.
const ON_ERROR: [&str; 2] = ["set_aside", "refuse"];

/// Keeps recorders out until the transaction ends, so that each event meets the projections as they were or as they will be.
fn hold_record() {
    // SAFETY: a lock that ends with the transaction.
    unsafe { pg_sys::LockRelationOid(append::log(), pg_sys::ShareRowExclusiveLock as i32) };
}

fn word<'a>(argument: &str, given: Option<&'a str>, known: &[&'static str]) -> &'a str {
    let given = input::given(argument, given);
    if !known.contains(&given) {
        let hint = match nearest(given, known.iter().copied()) {
            Some(near) => format!("Did you mean \"{near}\"?"),
            None => format!("It is one of {}.", known.join(", ")),
        };
        errors::invalid(format!("argument \"{argument}\" is \"{given}\""), hint);
    }
    given
}

fn has_rows(session: &Session, relation: &Relation) -> bool {
    let _restricted = Identity::restricted(relation.owner);
    session.run_prepared_latest(&Prepared::new(&format!("SELECT EXISTS (SELECT FROM {})", relation.qualified), &[]), &[]).must(0, 1)
}

fn check_kind(plans: &plans::Plans, kind: &str) {
    let of = KINDS.iter().find(|known| known.word() == kind).copied().unwrap_or(Kind::Upsert);
    if let Steps::Refused = plans.steps(of) {
        Fault::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("argument \"kind\" is \"{kind}\", which state table {} does not accept", plans.relation.qualified),
        )
        .hint("Declare the table with another policy for deletes, or give another kind.")
        .raise();
    }
}

fn check_feeds(session: &Session, relation: &Relation, freshness: RawInterval, replace: bool) -> bool {
    let others = session.run(&OF_TABLE, &[arg(relation.oid), arg(freshness)]);
    if others.is_empty() {
        let filled = has_rows(session, relation);
        if filled && !replace {
            Fault::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("{} has rows, which do not come from the record", relation.qualified),
            )
            .detail("A table with projections holds what the record says and nothing else.")
            .hint("Give replace_rows => true to have them replaced by what the record says; or record them as events first.")
            .raise();
        }
        return filled;
    }
    if !others.must::<bool>(0, 2) {
        let (name, other): (String, String) = (others.must(0, 1), others.must(0, 3));
        errors::invalid(
            format!("argument \"freshness\" differs from that of projection \"{name}\" of {}, which is {other}", relation.qualified),
            "The projections of one table fold in one order, so they share one freshness.",
        );
    }
    true
}

#[pg_extern(sql = false)]
#[allow(clippy::too_many_arguments)]
fn create_projection(
    name: Option<&str>,
    relation: Option<pg_sys::Oid>,
    types: Option<Vec<Option<String>>>,
    columns: Option<RawJsonb>,
    kind: Option<&str>,
    freshness: Option<RawInterval>,
    on_error: Option<&str>,
    replace_rows: Option<bool>,
) {
    shmem::required();
    let name = input::name("name", name);
    let Some(oid) = relation else { errors::missing("relation", "Name the state table that the events go into.") };
    let types = input::names("types", Some(input::given("types", types)));
    if types.is_empty() {
        errors::invalid("argument \"types\" is empty", "Name at least one type of events.");
    }
    let columns = input::given("columns", columns);
    input::json("columns", Some(columns));
    let kind = word("kind", kind, &KINDS.map(Kind::word));
    let freshness = input::given("freshness", freshness);
    let lag = input::duration("freshness", freshness, 0, guc::max_delay_s(), "stint.max_delay");
    let on_error = word("on_error", on_error, &ON_ERROR);
    let replace = input::given("replace_rows", replace_rows);
    if lag > 0 && on_error == "refuse" {
        errors::invalid(
            "argument \"on_error\" is \"refuse\", but with a freshness above zero events are recorded before they are projected",
            "Give freshness => '0', or on_error => 'set_aside'.",
        );
    }
    let identity = Identity::owner();
    spi::connect(|session| {
        rights::require_ownership(session, &Relation::load(session, oid), identity.caller());
        hold_record();
        session.execute_once(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", Relation::load(session, oid).qualified));
        let plans = plans::of(session, oid);
        let relation = &plans.relation;
        let fields: Vec<&str> = plans.fields.iter().map(String::as_str).collect();
        let what = || format!("projection \"{name}\" of {}", relation.qualified);
        let map = match map::parse(&json_text(session, columns), &fields, &FIELDS) {
            Ok(map) => map,
            Err(refusal) => raise(refusal, &what()),
        };
        if let Some(lacking) = lacks_key(relation, &map) {
            errors::invalid(
                format!("argument \"columns\" says nothing of \"{lacking}\", a column of the primary key"),
                "Every row needs its whole primary key.",
            );
        }
        check_kind(&plans, kind);
        let anew = check_feeds(session, relation, freshness, replace);
        session.run(&FORGET_DROPPED, &[]);
        let declared = [arg(name), arg(oid), arg(types.clone()), arg(columns), arg(kind), arg(freshness), arg(on_error)];
        if session.run(&INSERT, &declared).is_empty() {
            errors::exists("projection", name, "Drop it first with stint.drop_projection(…), or choose another name.");
        }
        let projected = config::required(session, relation);
        // An empty table that may lag is left to the worker, which begins at the beginning.
        if anew || (projected.immediate && session.run(&RECORDED, &[arg(types)]).must::<bool>(0, 1)) {
            rebuild::run(session, &projected, true);
        }
        // SAFETY: every backend's compiled merges of the table become stale when this transaction commits.
        unsafe { pg_sys::CacheInvalidateRelcacheByRelid(oid) };
    });
}

#[pg_extern(sql = false)]
fn drop_projection(name: Option<&str>) {
    shmem::required();
    let name = input::name("name", name);
    let identity = Identity::owner();
    spi::connect(|session| {
        hold_record();
        let found = session.run_latest(&FIND, &[arg(name)]);
        if found.is_empty() {
            let known = session.run(&NAMES, &[]);
            let known: Vec<String> = (0..known.len()).map(|row| known.must(row, 1)).collect();
            errors::unknown("projection", name, nearest(name, known.iter().map(String::as_str)), "stint.projections lists those there are.");
        }
        let (oid, there, of_table): (pg_sys::Oid, bool, i64) = (found.must(0, 1), found.must(0, 2), found.must(0, 3));
        if there {
            let relation = Relation::load_unfit(session, oid);
            rights::require_ownership(session, &relation, identity.caller());
            session.execute_once(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", relation.qualified));
        }
        session.run(&DELETE, &[arg(name)]);
        if of_table == 1 {
            session.run(&FORGET_POSITIONS, &[arg(oid)]);
            session.run(&FORGET_ASIDE, &[arg(oid)]);
            session.run(&FORGET_BASE, &[arg(oid)]);
        }
        if there {
            // SAFETY: as in create_projection.
            unsafe { pg_sys::CacheInvalidateRelcacheByRelid(oid) };
        }
    });
}

#[pg_extern(sql = false)]
fn skip_event(relation: Option<pg_sys::Oid>, seq: Option<i64>) {
    shmem::required();
    let Some(oid) = relation else { errors::missing("relation", "Name the table that the event does not fit.") };
    let seq = input::given("seq", seq);
    let identity = Identity::owner();
    spi::connect(|session| {
        let relation = Relation::load_unfit(session, oid);
        rights::require_ownership(session, &relation, identity.caller());
        if session.run(&SKIP, &[arg(oid), arg(seq)]).is_empty() {
            errors::unknown(
                "poisoned event",
                &seq.to_string(),
                None,
                &format!("No event of that number is set aside for {}; stint.poisoned_events lists those that are.", relation.qualified),
            );
        }
    });
}
