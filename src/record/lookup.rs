//! Lookups: when an event is recorded, the present row of a state table is read and kept with it.
//!
//! What was looked up is part of the event: projections use it, and a rebuild uses the same. A lookup runs as the owner of the table, restricted; who declares
//! one must be able to read the table.

use super::append::log;
use super::config::{self, Lazy, raise};
use crate::changelog::capture;
use crate::errors;
use crate::relation::Relation;
use crate::savepoint::isolated;
use crate::spi::{self, Identity, Session, Statement, arg};
use crate::state::declare::json_text;
use crate::state::plans::{self, Plans};
use crate::values::RawJsonb;
use crate::{input, shmem};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::names::nearest;
use stint_core::record::compile::{self, Key, Projection};
use stint_core::record::map::{self, FIELDS};

static INSERT: Statement = Statement::new(
    c"INSERT INTO stint.lookup_config (name, relation, types, key, columns) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (name) DO NOTHING",
    &[pg_sys::TEXTOID, pg_sys::OIDOID, pg_sys::TEXTARRAYOID, pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);
static FIND: Statement = Statement::new(
    c"SELECT c.relation::oid, EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation) FROM stint.lookup_config c WHERE c.name = $1",
    &[pg_sys::TEXTOID],
);
static DELETE: Statement = Statement::new(c"DELETE FROM stint.lookup_config c WHERE c.name = $1", &[pg_sys::TEXTOID]);
static NAMES: Statement = Statement::new(c"SELECT c.name::text FROM stint.lookup_config c", &[]);
static OF_TYPES: Statement = Statement::new(
    c"SELECT c.name::text, c.relation::oid, c.types, c.key, c.columns, md5(c::text)
      FROM stint.lookup_config c JOIN pg_class t ON t.oid = c.relation WHERE c.types && $1 ORDER BY c.name",
    &[pg_sys::TEXTARRAYOID],
);
static ADD: Statement = Statement::new(c"SELECT $1 || jsonb_build_object($2, $3)", &[pg_sys::JSONBOID, pg_sys::TEXTOID, pg_sys::JSONBOID]);
static MERGE: Statement = Statement::new(c"SELECT $1 || $2", &[pg_sys::JSONBOID, pg_sys::JSONBOID]);
static NOTHING: Statement = Statement::new(c"SELECT '{}'::jsonb", &[]);
static NULLS: Statement = Statement::new(
    c"SELECT coalesce(jsonb_object_agg(x.ord, NULL), '{}') FROM jsonb_array_elements($1) WITH ORDINALITY x (event, ord)
      WHERE x.ord = $2 AND x.event ->> 'type' = ANY ($3)",
    &[pg_sys::JSONBOID, pg_sys::INT8OID, pg_sys::TEXTARRAYOID],
);

/// A lookup, compiled.
struct Lookup {
    fingerprint: String,
    types: Vec<String>,
    plans: Rc<Plans>,
    statement: Lazy,
}

thread_local! {
    static KEPT: RefCell<HashMap<String, Rc<Lookup>>> = RefCell::new(HashMap::new());
}

const BATCH: &[pg_sys::Oid] = &[pg_sys::JSONBOID, pg_sys::INT8OID, pg_sys::INT8OID];

fn compiled(
    session: &Session,
    name: &str,
    relation: pg_sys::Oid,
    types: Vec<String>,
    map: RawJsonb,
    columns: &[String],
    fingerprint: String,
) -> Rc<Lookup> {
    let plans = plans::of(session, relation);
    let known = KEPT.with_borrow(|kept| kept.get(name).cloned());
    if let Some(known) = known.filter(|known| known.fingerprint == fingerprint && Rc::ptr_eq(&known.plans, &plans)) {
        return known;
    }
    let relation = &plans.relation;
    let map = json_text(session, map);
    let keys: Vec<&str> = relation.key_columns().map(|column| column.name.as_str()).collect();
    let key = match map::parse(&map, &keys, &FIELDS) {
        Ok(key) => key,
        Err(refusal) => raise(refusal, &format!("lookup \"{name}\" in {}", relation.qualified)),
    };
    let described = crate::state::declare::describe(session, relation, None);
    let typed: Vec<String> = relation.key.iter().map(|at| described.columns[*at].type_sql.clone()).collect();
    let on = relation
        .key_columns()
        .zip(&relation.key)
        .map(|(column, at)| format!("t.{0} {1} k.{0}", column.quoted, described.columns[*at].equal.as_deref().unwrap_or("=")));
    let wanted = relation.columns.iter().filter(|column| columns.contains(&column.name)).map(|column| format!("t.{}", column.quoted));
    let sql = compile::lookup(
        &Projection { types: types.clone(), map, columns: key, kind: 0 },
        &Key { columns: relation.key_columns().zip(&typed).map(|(c, kind)| (c.name.as_str(), c.quoted.as_str(), kind.as_str())).collect() },
        &format!("SELECT {} FROM {} t WHERE {}", wanted.collect::<Vec<_>>().join(", "), relation.qualified, on.collect::<Vec<_>>().join(" AND ")),
    );
    let made = Rc::new(Lookup { fingerprint, types, plans: Rc::clone(&plans), statement: Lazy::new(sql, BATCH) });
    KEPT.with_borrow_mut(|kept| kept.insert(name.to_string(), Rc::clone(&made)));
    made
}

/// What is looked up for events, given as documents: for each lookup an object of what was found by the place of the event, null where there is no row or
/// the event names none.
pub fn of(session: &Session, types: &[String], documents: impl Fn() -> RawJsonb, count: i64) -> RawJsonb {
    let lookups = session.run_latest(&OF_TYPES, &[arg(types.to_vec())]);
    let mut all: RawJsonb = session.run(&NOTHING, &[]).must(0, 1);
    if lookups.is_empty() {
        return all;
    }
    let documents = documents();
    for row in 0..lookups.len() {
        let name: String = lookups.must(row, 1);
        let texts = |column| lookups.must::<Vec<Option<String>>>(row, column).into_iter().flatten().collect::<Vec<String>>();
        let lookup = compiled(session, &name, lookups.must(row, 2), texts(3), lookups.must(row, 4), &texts(5), lookups.must(row, 6));
        let found = look_up(session, &lookup, documents, count);
        all = session.run(&ADD, &[arg(all), arg(name), arg(found)]).must(0, 1);
    }
    all
}

fn look_up(session: &Session, lookup: &Lookup, documents: RawJsonb, count: i64) -> RawJsonb {
    // The value has to outlive the connection of the subtransaction.
    let look = |from: i64, to: i64| {
        isolated(|| {
            spi::connect(|session| {
                let _restricted = Identity::restricted(lookup.plans.relation.owner);
                session.run_prepared_latest(lookup.statement.plan(), &[arg(documents), arg(from), arg(to)]).lift(0, 1)
            })
        })
    };
    if let Ok(Some(found)) = look(1, count) {
        return RawJsonb(found);
    }
    // An event whose key cannot be read has no row.
    let mut all: RawJsonb = session.run(&NOTHING, &[]).must(0, 1);
    for at in 1..=count {
        let found = match look(at, at) {
            Ok(Some(found)) => RawJsonb(found),
            _ => session.run(&NULLS, &[arg(documents), arg(at), arg(lookup.types.clone())]).must(0, 1),
        };
        all = session.run(&MERGE, &[arg(all), arg(found)]).must(0, 1);
    }
    all
}

/// Keeps recorders out until the transaction ends.
fn hold_record() {
    // SAFETY: a lock that ends with the transaction.
    unsafe { pg_sys::LockRelationOid(log(), pg_sys::ShareRowExclusiveLock as i32) };
}

#[pg_extern(sql = false)]
fn create_lookup(
    name: Option<&str>,
    relation: Option<pg_sys::Oid>,
    types: Option<Vec<Option<String>>>,
    key: Option<RawJsonb>,
    columns: Option<Vec<Option<String>>>,
) {
    shmem::required();
    let name = input::name("name", name);
    let Some(oid) = relation else { errors::missing("relation", "Name the state table whose row is looked up.") };
    let types = input::names("types", Some(input::given("types", types)));
    let key = input::given("key", key);
    input::json("key", Some(key));
    let columns = input::names("columns", Some(input::given("columns", columns)));
    if types.is_empty() || columns.is_empty() {
        let which = if types.is_empty() { "types" } else { "columns" };
        errors::invalid(format!("argument \"{which}\" is empty"), "Name at least one.");
    }
    let identity = Identity::owner();
    spi::connect(|session| {
        let plans = plans::of(session, oid);
        let relation = &plans.relation;
        capture::check_readable(identity.caller(), oid, &relation.qualified);
        for column in &columns {
            if !relation.columns.iter().any(|known| known.name == *column) {
                let near = nearest(column, relation.columns.iter().map(|known| known.name.as_str()));
                errors::unknown("column", column, near, &format!("It should be a column of {}.", relation.qualified));
            }
        }
        let keys: Vec<&str> = relation.key_columns().map(|column| column.name.as_str()).collect();
        let fields: Vec<&str> = FIELDS.into_iter().filter(|field| !["seq", "lookups"].contains(field)).collect();
        let map = match map::parse(&json_text(session, key), &keys, &fields) {
            Ok(map) => map,
            Err(refusal) => raise(refusal, &format!("the key of lookup \"{name}\" in {}", relation.qualified)),
        };
        if let Some(lacking) = super::config::lacks_key(relation, &map) {
            errors::invalid(format!("argument \"key\" says nothing of \"{lacking}\", a column of the primary key"), "A lookup names one row.");
        }
        hold_record();
        if session.run(&INSERT, &[arg(name), arg(oid), arg(types), arg(key), arg(columns)]).is_empty() {
            errors::exists("lookup", name, "Drop it first with stint.drop_lookup(…), or choose another name.");
        }
    });
}

#[pg_extern(sql = false)]
fn drop_lookup(name: Option<&str>) {
    shmem::required();
    let name = input::name("name", name);
    let identity = Identity::owner();
    spi::connect(|session| {
        hold_record();
        let found = session.run_latest(&FIND, &[arg(name)]);
        if found.is_empty() {
            config::unknown("lookup", name, &session.run(&NAMES, &[]), "stint.lookups lists those there are.");
        }
        if found.must::<bool>(0, 2) {
            let relation = Relation::load_unfit(session, found.must(0, 1));
            capture::check_readable(identity.caller(), relation.oid, &relation.qualified);
        }
        session.run(&DELETE, &[arg(name)]);
    });
}
