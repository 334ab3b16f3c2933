//! The projections of a table, compiled, kept per backend until one of them or the table changes.

use crate::errors::{self, Fault};
use crate::relation::{Column, Relation};
use crate::savepoint::isolated;
use crate::spi::{self, Prepared, Rows, Session, Statement, arg};
use crate::state::declare::json_text;
use crate::state::plans;
use crate::values::RawJsonb;
use pgrx::prelude::*;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::names::nearest;
use stint_core::record::compile::{self, Key, Projection};
use stint_core::record::map::{self, FIELDS, Source};
use stint_core::state::compile::{KINDS, Kind};

// By table, so that locks are taken in one order. The fingerprint changes with every projection that comes or goes. A table that was dropped without
// drop_state takes no events any more, and keeps nobody from recording.
static TABLES: Statement = Statement::new(
    c"SELECT c.relation::oid, extract(epoch FROM min(c.freshness)) = 0, bool_or(c.on_error = 'refuse')
      FROM stint.projection_config c
      WHERE EXISTS (SELECT FROM stint.projection_config p WHERE p.relation = c.relation AND p.types && $1)
        AND EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)
      GROUP BY c.relation::oid ORDER BY c.relation::oid",
    &[pg_sys::TEXTARRAYOID],
);
static OF_TABLE: Statement = Statement::new(
    c"SELECT c.name::text, c.types, c.columns, c.kind, md5(c::text), extract(epoch FROM c.freshness) = 0
      FROM stint.projection_config c WHERE c.relation = $1 ORDER BY c.created_at, c.name",
    &[pg_sys::OIDOID],
);

/// A table that events of given types go into.
pub struct Target {
    /// The table.
    pub relation: pg_sys::Oid,
    /// Whether it changes in the transaction that records.
    pub immediate: bool,
    /// Whether an event that does not fit may not be recorded.
    pub refuses: bool,
}

/// The tables into which events of these types go, by oid. Looks at what is committed: who records holds the record against changes of projections.
pub fn targets(session: &Session, types: &[String]) -> Vec<Target> {
    let rows = session.run_latest(&TABLES, &[arg(types.to_vec())]);
    (0..rows.len()).map(|row| Target { relation: rows.must(row, 1), immediate: rows.must(row, 2), refuses: rows.must(row, 3) }).collect()
}

/// A statement prepared at its first run.
pub struct Lazy {
    sql: String,
    types: &'static [pg_sys::Oid],
    plan: OnceCell<Prepared>,
}

impl Lazy {
    /// A statement with arguments of these types.
    pub fn new(sql: String, types: &'static [pg_sys::Oid]) -> Self {
        Lazy { sql, types, plan: OnceCell::new() }
    }

    /// The kept plan.
    pub fn plan(&self) -> &Prepared {
        self.plan.get_or_init(|| Prepared::new(&self.sql, self.types))
    }
}

/// A projected table, compiled.
pub struct Projected {
    /// The table.
    pub relation: Relation,
    /// All types of events it takes.
    pub types: Vec<String>,
    /// How many rows one event can become.
    pub per_event: usize,
    /// Whether it changes in the transaction that records.
    pub immediate: bool,
    /// Rows, kinds and events of a stretch of a batch.
    pub batch: Lazy,
    /// The slots of the keys of a stretch of a batch; none where no two events share a key.
    pub slots: Option<Lazy>,
    /// The texts of the keys of a stretch of a batch with their last events; none where a key's type could run somebody's code.
    pub causes: Option<Lazy>,
    /// Whether a key has a type that cannot be hashed, so that the whole table is one.
    pub unhashable: bool,
    /// The types of events that may delete rows which others insert under their own numbers, and so without a slot.
    pub strays: Vec<String>,
    fingerprint: String,
    plans: Rc<plans::Plans>,
}

thread_local! {
    static KEPT: RefCell<HashMap<u32, Rc<Projected>>> = RefCell::new(HashMap::new());
}

/// The projections of a table; none where it has none.
pub fn of(session: &Session, relation: pg_sys::Oid) -> Option<Rc<Projected>> {
    let rows = session.run_latest(&OF_TABLE, &[arg(relation)]);
    if rows.is_empty() {
        KEPT.with_borrow_mut(|kept| kept.remove(&relation.to_u32()));
        return None;
    }
    let plans = plans::of(session, relation);
    let fingerprint = fingerprint(&rows);
    if let Some(known) = known(relation, &fingerprint, &plans) {
        return Some(known);
    }
    let made = Rc::new(Projected::compile(session, &rows, plans, fingerprint));
    KEPT.with_borrow_mut(|kept| kept.insert(relation.to_u32(), Rc::clone(&made)));
    Some(made)
}

/// As [`of`], for who records: a declaration that does not fit its table any more is told, and not raised.
pub fn fitting(session: &Session, relation: pg_sys::Oid) -> Result<Option<Rc<Projected>>, (PgSqlErrorCode, String)> {
    // Who finds all compiled needs no subtransaction.
    let rows = session.run_latest(&OF_TABLE, &[arg(relation)]);
    let known = plans::kept(relation).and_then(|plans| known(relation, &fingerprint(&rows), &plans));
    if known.is_some() { Ok(known) } else { isolated(|| spi::connect(|session| of(session, relation))) }
}

fn fingerprint(rows: &Rows) -> String {
    (0..rows.len()).map(|row| rows.must::<String>(row, 5)).collect()
}

fn known(relation: pg_sys::Oid, fingerprint: &str, plans: &Rc<plans::Plans>) -> Option<Rc<Projected>> {
    let known = KEPT.with_borrow(|kept| kept.get(&relation.to_u32()).cloned());
    known.filter(|known| known.fingerprint == fingerprint && Rc::ptr_eq(&known.plans, plans))
}

/// The projections of a table; an error where it has none.
pub fn required(session: &Session, relation: &Relation) -> Rc<Projected> {
    let Some(projected) = of(session, relation.oid) else {
        Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("table {} has no projection", relation.qualified))
            .hint("Declare one with stint.create_projection(…); stint.projections lists those declared.")
            .raise()
    };
    projected
}

const BATCH: &[pg_sys::Oid] = &[pg_sys::JSONBOID, pg_sys::INT8OID, pg_sys::INT8OID];
const SLOTS: &[pg_sys::Oid] = &[pg_sys::JSONBOID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::INT4OID];

impl Projected {
    fn compile(session: &Session, rows: &Rows, plans: Rc<plans::Plans>, fingerprint: String) -> Self {
        let relation = plans.relation.clone();
        let fields: Vec<&str> = plans.fields.iter().map(String::as_str).collect();
        let mut projections = Vec::new();
        for row in 0..rows.len() {
            let map = json_text(session, rows.must::<RawJsonb>(row, 3));
            let columns = match map::parse(&map, &fields, &FIELDS) {
                Ok(columns) => columns,
                Err(refusal) => misfit(&rows.must::<String>(row, 1), &relation, refusal.column, &refusal.message),
            };
            if let Some(lacking) = lacks_key(&relation, &columns) {
                misfit(&rows.must::<String>(row, 1), &relation, false, &format!("it says nothing of \"{lacking}\", a column of the primary key"));
            }
            projections.push(Projection { types: given(rows.must(row, 2)), map, columns, kind: number_of(&rows.must::<String>(row, 4)) });
        }
        let mut types: Vec<String> = projections.iter().flat_map(|projection| projection.types.clone()).collect();
        types.sort();
        types.dedup();
        let kinds: Vec<String> = relation
            .key_columns()
            .map(|column| match &column.collation {
                Some(collation) => format!("{} COLLATE {collation}", column.type_name),
                None => column.type_name.clone(),
            })
            .collect();
        let key = Key { columns: relation.key_columns().zip(&kinds).map(|(c, kind)| (c.name.as_str(), c.quoted.as_str(), kind.as_str())).collect() };
        let slots = compile::slots(&projections, &key).map(|sql| Lazy::new(sql, SLOTS));
        let stray = |p: &&Projection| kind_of(p.kind) != Kind::Upsert && !p.numbers(&key);
        let strays = if projections.iter().any(|p| p.numbers(&key)) {
            projections.iter().filter(stray).flat_map(|p| p.types.clone()).collect()
        } else {
            Vec::new()
        };
        let unhashable = relation.key_columns().any(|column| !hashable(column.type_oid));
        let bases: Option<Vec<String>> = relation.key_columns().map(plain).collect();
        let causes = bases.map(|bases| {
            let key =
                Key { columns: relation.key_columns().zip(&bases).map(|(c, kind)| (c.name.as_str(), c.quoted.as_str(), kind.as_str())).collect() };
            Lazy::new(compile::causes(&projections, &key), BATCH)
        });
        Projected {
            causes,
            per_event: projections.len().max(1),
            immediate: rows.must(0, 6),
            batch: Lazy::new(compile::batch(&projections), BATCH),
            slots,
            unhashable,
            strays,
            types,
            fingerprint,
            relation,
            plans,
        }
    }
}

fn hashable(type_oid: pg_sys::Oid) -> bool {
    // SAFETY: the entry lives as long as the backend; one oid is read at once.
    unsafe { (*pg_sys::lookup_type_cache(type_oid, pg_sys::TYPECACHE_HASH_PROC as i32)).hash_proc != pg_sys::InvalidOid }
}

/// The type under a domain as SQL writes it, if reading a value of it runs no code but its own input function.
fn plain(column: &Column) -> Option<String> {
    // SAFETY: system cache look-ups; the text is palloc'd and copied.
    unsafe {
        let mut type_mod = -1;
        let base = pg_sys::getBaseTypeAndTypmod(column.type_oid, &mut type_mod);
        let kind = pg_sys::get_typtype(base) as u8;
        if !(kind == pg_sys::TYPTYPE_BASE || kind == pg_sys::TYPTYPE_ENUM) || pg_sys::get_element_type(base) != pg_sys::InvalidOid {
            return None;
        }
        if base == column.type_oid {
            return Some(column.type_name.clone());
        }
        Some(std::ffi::CStr::from_ptr(pg_sys::format_type_with_typemod(base, type_mod)).to_string_lossy().into_owned())
    }
}

fn given(names: Vec<Option<String>>) -> Vec<String> {
    names.into_iter().flatten().collect()
}

fn number_of(word: &str) -> i32 {
    KINDS.iter().position(|kind| kind.word() == word).and_then(|place| i32::try_from(place).ok()).unwrap_or(0)
}

/// The kind that a compiled batch names by its number.
pub fn kind_of(number: i32) -> Kind {
    match usize::try_from(number).ok().and_then(|place| KINDS.get(place)) {
        Some(kind) => *kind,
        None => errors::internal("a batch names a kind that does not exist"),
    }
}

/// There is no projection or lookup of this name; `known`: the names of those there are.
pub fn unknown(kind: &str, name: &str, known: &Rows, hint: &str) -> ! {
    let known: Vec<String> = (0..known.len()).map(|row| known.must(row, 1)).collect();
    errors::unknown(kind, name, nearest(name, known.iter().map(String::as_str)), hint)
}

/// Raises a refusal of the core.
pub fn raise(refusal: map::Refusal, what: &str) -> ! {
    let code = if refusal.column { PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN } else { PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE };
    Fault::new(code, format!("argument \"columns\": {}", refusal.message)).detail(format!("It is for {what}.")).hint(refusal.hint).raise()
}

/// A projection was declared for the table as it was before.
fn misfit(name: &str, relation: &Relation, column: bool, message: &str) -> ! {
    let code = if column { PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN } else { PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE };
    Fault::new(code, format!("projection \"{name}\" no longer fits {}: {message}", relation.qualified))
        .hint("The table was altered after it was declared: undo that and run stint.rebuild(…), or drop the projection and declare it anew with replace_rows => true.")
        .raise()
}

/// Whether every column of the key is in a map.
pub fn lacks_key<'a>(relation: &'a Relation, columns: &[(String, Source)]) -> Option<&'a str> {
    relation.key_columns().map(|column| column.name.as_str()).find(|name| !columns.iter().any(|(mapped, _)| mapped == name))
}
