//! `create_state` and `drop_state`: what makes a table a state table.

use super::rights;
use crate::changelog::{capture, retention};
use crate::errors::{self, Fault};
use crate::input;
use crate::relation::{Column, Relation};
use crate::snapshot::as_of;
use crate::spi::{self, Identity, Session, Statement, arg};
use crate::values::{RawInterval, RawJsonb};
use pgrx::prelude::*;
use stint_core::state::declare::{Declaration, Refusal, Why};
use stint_core::state::{self, compile};

static OPERATORS: Statement = Statement::new(
    c"SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname) FROM pg_operator o JOIN pg_namespace n ON n.oid = o.oprnamespace WHERE o.oid = $1",
    &[pg_sys::OIDOID],
);
static JSON_TEXT: Statement = Statement::new(c"SELECT $1::text", &[pg_sys::JSONBOID]);
static INSERT: Statement = Statement::new(
    c"INSERT INTO stint.state_config (relation, engine, sequence, groups, deletes)
      VALUES ($1, $2, $3, $4, $5) ON CONFLICT (relation) DO NOTHING",
    &[pg_sys::OIDOID, pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::JSONBOID, pg_sys::TEXTOID],
);
static SET_TOMBSTONES: Statement = Statement::new(
    c"UPDATE stint.state_config SET tombstones = to_regclass($2)::oid WHERE relation = $1 RETURNING tombstones::oid",
    &[pg_sys::OIDOID, pg_sys::TEXTOID],
);
static DELETE: Statement = Statement::new(
    c"DELETE FROM stint.state_config c WHERE relation = $1
      RETURNING (SELECT format('%I.%I', n.nspname, t.relname) FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace WHERE t.oid = c.tombstones)",
    &[pg_sys::OIDOID],
);
// A table dropped without drop_state leaves its declaration behind; its oid may come back.
static FORGET_DROPPED: Statement =
    Statement::new(c"DELETE FROM stint.state_config c WHERE NOT EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation)", &[]);
static BESIDE: Statement = Statement::new(
    c"SELECT format('%I.%I', $1, $2), to_regclass(format('%I.%I', $1, $2)) IS NOT NULL,
             format('%I', (SELECT rolname FROM pg_roles WHERE oid = $3))",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::OIDOID],
);

/// The table as the compiler wants it.
pub fn describe(session: &Session, relation: &Relation, tombstones: Option<String>) -> state::Table {
    state::Table {
        qualified: relation.qualified.clone(),
        columns: relation.columns.iter().enumerate().map(|(index, column)| describe_column(session, column, relation.key.contains(&index))).collect(),
        key: relation.key.clone(),
        partitioned: relation.partitioned,
        tombstones,
    }
}

fn describe_column(session: &Session, column: &Column, in_key: bool) -> state::Column {
    let flags = pg_sys::TYPECACHE_LT_OPR | pg_sys::TYPECACHE_EQ_OPR;
    // SAFETY: the entry lives as long as the backend; its two oids are read at once.
    let (less, equal) = unsafe {
        let entry = pg_sys::lookup_type_cache(column.type_oid, flags as i32);
        ((*entry).lt_opr, (*entry).eq_opr)
    };
    let operator = |oid: pg_sys::Oid| if oid == pg_sys::InvalidOid { None } else { session.run(&OPERATORS, &[arg(oid)]).get(0, 1) };
    state::Column {
        name: column.name.clone(),
        quoted: column.quoted.clone(),
        type_sql: match &column.collation {
            Some(collation) => format!("{} COLLATE {collation}", column.type_name),
            None => column.type_name.clone(),
        },
        // An identity column is left alone, unless it is the key and lets itself be named.
        written: !column.generated && (column.identity.is_none() || (in_key && column.identity == Some('d'))),
        less: operator(less),
        equal: operator(equal),
    }
}

/// Raises a refusal of the core with the SQLSTATE that fits.
pub fn raise(refusal: Refusal, relation: &Relation) -> ! {
    let code = match refusal.why {
        Why::Column => PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
        Why::Value => PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
        Why::Table => PgSqlErrorCode::ERRCODE_INVALID_TABLE_DEFINITION,
    };
    Fault::new(code, refusal.message).detail(format!("The table is {}.", relation.qualified)).hint(refusal.hint).raise()
}

/// Text of a jsonb declaration; only declarations are ever read in Rust, never rows.
pub fn json_text(session: &Session, value: RawJsonb) -> String {
    session.run(&JSON_TEXT, &[arg(value)]).must(0, 1)
}

#[pg_extern(sql = false)]
fn create_state(
    relation: Option<pg_sys::Oid>,
    engine: Option<&str>,
    sequence: Option<Vec<Option<String>>>,
    groups: Option<RawJsonb>,
    deletes: Option<&str>,
    changelog: Option<bool>,
    history: Option<RawInterval>,
) {
    const NAME_IT: &str = "Name the table, as in stint.create_state('shop.goods', 'partial-update').";
    let Some(oid) = relation else { errors::missing("relation", NAME_IT) };
    let Some(engine) = engine else { errors::missing("engine", "Give 'deduplicate' or 'partial-update'.") };
    let sequence = sequence.map(no_nulls);
    let changelog = input::given("changelog", changelog);
    if !changelog && history.is_some() {
        errors::invalid("argument \"history\" is given, but changelog is false", "Leave history out, or let the table keep a changelog.")
    }
    crate::shmem::required();
    let identity = Identity::owner();
    spi::connect(|session| {
        let history = retention::checked_history(session, history);
        let relation = Relation::load(session, oid);
        rights::require_ownership(session, &relation, identity.caller());
        // Nobody alters or writes the table while it is read again and its triggers are made.
        session.execute_once(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", relation.qualified));
        let relation = Relation::load(session, oid);
        let table = describe(session, &relation, None);
        let text = groups.map(|value| json_text(session, value));
        let declaration = match Declaration::check(&table, engine, sequence.as_deref(), text.as_deref(), deletes) {
            Ok(declaration) => declaration,
            Err(refusal) => raise(refusal, &relation),
        };
        session.run(&FORGET_DROPPED, &[]);
        let policy = declaration.deletes.word();
        if session.run(&INSERT, &[arg(oid), arg(engine), arg(sequence), arg(groups), arg(policy)]).is_empty() {
            errors::exists("state table", &relation.qualified, "Run stint.drop_state(…) first to declare it anew; its rows stay.");
        }
        if declaration.remembers() {
            create_tombstones(session, &relation, &table, &declaration);
        }
        if changelog {
            capture::install(session, &relation, history.and_then(arg));
            as_of::install(session, &relation);
        }
        // SAFETY: every backend's compiled merges of the table become stale when this transaction commits.
        unsafe { pg_sys::CacheInvalidateRelcacheByRelid(oid) };
    });
}

fn no_nulls(names: Vec<Option<String>>) -> Vec<String> {
    let given = names.len();
    let names: Vec<String> = names.into_iter().flatten().collect();
    if names.len() < given {
        errors::missing("sequence", "Name columns only; an element is null.");
    }
    names
}

/// Makes the table that remembers the sequences of deleted keys beside the state table: of the same owner, because merges run with the owner's rights, and
/// dropped with it.
fn create_tombstones(session: &Session, relation: &Relation, table: &state::Table, declaration: &Declaration) {
    const SUFFIX: &str = "_tombstones";
    let mut base = relation.name.clone();
    while base.len() + SUFFIX.len() > 63 {
        base.pop();
    }
    let rows = session.run(&BESIDE, &[arg(relation.schema.as_str()), arg(format!("{base}{SUFFIX}")), arg(relation.owner)]);
    let (name, there, owner): (String, bool, String) = (rows.must(0, 1), rows.must(0, 2), rows.must(0, 3));
    if there {
        errors::exists("relation", &name, "Rename it: a state table with a sequence keeps the sequences of its deleted keys there.");
    }
    session.execute_once(&compile::create_tombstones(table, declaration, &name));
    session.execute_once(&format!("ALTER TABLE {name} OWNER TO {owner}"));
    let comment =
        format!("Sequences of the deleted keys of {}, so that an older row cannot bring one back. Kept by stint.merge.", relation.qualified);
    session.execute_once(&format!("COMMENT ON TABLE {name} IS '{}'", comment.replace('\'', "''")));
    let tombstones: pg_sys::Oid = session.run(&SET_TOMBSTONES, &[arg(relation.oid), arg(name)]).must(0, 1);
    let address = |oid: pg_sys::Oid| pg_sys::ObjectAddress { classId: pg_sys::RelationRelationId, objectId: oid, objectSubId: 0 };
    let (dependent, on) = (address(tombstones), address(relation.oid));
    // SAFETY: both objects exist and are locked by this transaction.
    unsafe { pg_sys::recordDependencyOn(&dependent, &on, pg_sys::DependencyType::DEPENDENCY_AUTO) };
}

#[pg_extern(sql = false)]
fn drop_state(relation: Option<pg_sys::Oid>) {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.drop_state('shop.goods').") };
    crate::shmem::required();
    let identity = Identity::owner();
    spi::connect(|session| {
        let relation = Relation::load_unfit(session, oid);
        rights::require_ownership(session, &relation, identity.caller());
        session.execute_once(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", relation.qualified));
        let rows = session.run(&DELETE, &[arg(oid)]);
        if rows.is_empty() {
            not_declared(&relation);
        }
        if capture::is_captured(session, oid) {
            as_of::remove(session, &relation);
            capture::remove(session, &relation);
        }
        if let Some(tombstones) = rows.get::<String>(0, 1) {
            session.execute_once(&format!("DROP TABLE {tombstones}"));
        }
        // SAFETY: as in create_state.
        unsafe { pg_sys::CacheInvalidateRelcacheByRelid(oid) };
    });
}

/// The table is not a state table.
pub fn not_declared(relation: &Relation) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("table {} is not a state table", relation.qualified))
        .hint("Declare it with stint.create_state(…); stint.states lists those declared.")
        .raise()
}
