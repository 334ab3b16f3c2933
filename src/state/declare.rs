//! `create_state` and `drop_state`: what makes a table a state table.

use super::config::Config;
use super::feed;
use super::merge::{explaining, unreadable};
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
use stint_core::state::{self, Family, compile};

static OPERATORS: Statement = Statement::new(
    c"SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname) FROM pg_operator o JOIN pg_namespace n ON n.oid = o.oprnamespace WHERE o.oid = $1",
    &[pg_sys::OIDOID],
);
static TYPE: Statement = Statement::new(
    c"SELECT t.typname::text, n.nspname = 'pg_catalog', quote_ident(n.nspname), t.typcategory = 'A' AND t.typsubscript = 'array_subscript_handler'::regproc,
             EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                     WHERE d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
                       AND e.extname = t.typname)
      FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE t.oid = $1",
    &[pg_sys::OIDOID],
);
static JSON_TEXT: Statement = Statement::new(c"SELECT $1::text", &[pg_sys::JSONBOID]);
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
// A table of that name with the comment that create_state writes, and that no declaration names, was left behind when the extension was dropped.
static BESIDE: Statement = Statement::new(
    c"SELECT b.name, t.oid IS NOT NULL, format('%I', (SELECT rolname FROM pg_roles WHERE oid = $3)),
             coalesce(t.relowner = $3 AND obj_description(t.oid, 'pg_class') LIKE 'Sequences of the deleted keys of % Kept by stint.merge.'
                      AND NOT EXISTS (SELECT FROM stint.state_config c WHERE c.tombstones = t.oid), false)
      FROM (SELECT format('%I.%I', $1, $2) AS name) b LEFT JOIN pg_class t ON t.oid = to_regclass(b.name)",
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
    let (family, schema) = family(session, column.type_oid);
    state::Column {
        name: column.name.clone(),
        quoted: column.quoted.clone(),
        type_sql: match &column.collation {
            Some(collation) => format!("{} COLLATE {collation}", column.type_name),
            None => column.type_name.clone(),
        },
        bare: column.type_name.clone(),
        family,
        schema,
        default: None,
        null_sets: false,
        // An identity column is left alone, unless it is the key and lets itself be named.
        written: !column.generated && (column.identity.is_none() || (in_key && column.identity == Some('d'))),
        less: operator(less),
        equal: operator(equal),
    }
}

/// What functions may know of a type, and the schema of its operators; of a domain, its base type's.
fn family(session: &Session, type_oid: pg_sys::Oid) -> (Family, String) {
    // SAFETY: a look-up in the system caches.
    let base = unsafe { pg_sys::getBaseType(type_oid) };
    let rows = session.run(&TYPE, &[arg(base)]);
    let (name, builtin, schema): (String, bool, String) = (rows.must(0, 1), rows.must(0, 2), rows.must(0, 3));
    let family = match (name.as_str(), builtin) {
        _ if rows.must(0, 4) => Family::Array,
        ("int2" | "int4" | "int8", true) => Family::Integer,
        ("numeric", true) => Family::Numeric,
        ("float4" | "float8", true) => Family::Float,
        ("interval", true) => Family::Interval,
        ("bool", true) => Family::Boolean,
        ("text" | "varchar", true) => Family::Text,
        ("jsonb", true) => Family::Jsonb,
        ("hstore", false) if rows.must(0, 5) => Family::Hstore,
        ("hll", false) if rows.must(0, 5) => Family::Hll,
        _ => Family::Other,
    };
    (family, schema)
}

/// Checks a declaration against the table and tells the columns how their nulls are read.
pub fn check(relation: &Relation, table: &mut state::Table, config: &Config) -> Declaration {
    checked(table, config).unwrap_or_else(|refusal| raise(refusal, relation))
}

/// As [`check`], for a table that was declared before and may have been altered since.
pub fn check_again(relation: &Relation, table: &mut state::Table, config: &Config) -> Declaration {
    checked(table, config).unwrap_or_else(|refusal| {
        let hint = "The table was altered after it was declared: undo that, or run stint.drop_state and declare it anew; its rows stay.";
        raise(Refusal { hint: hint.into(), ..refusal }, relation)
    })
}

fn checked(table: &mut state::Table, config: &Config) -> Result<Declaration, Refusal> {
    let declaration = Declaration::check(table, &config.told())?;
    for (column, field) in table.columns.iter_mut().zip(&declaration.fields) {
        column.default.clone_from(&field.default);
        column.null_sets = field.null_sets;
    }
    Ok(declaration)
}

/// Has PostgreSQL read the defaults as the columns' types, as every merge will.
pub fn check_defaults(session: &Session, relation: &Relation, table: &state::Table) {
    let Some(sql) = compile::read_defaults(table) else { return };
    let _restricted = Identity::restricted(relation.owner);
    let hint = |code| unreadable(code).then_some("Write each default in fields as PostgreSQL writes a value of the column's type.");
    explaining(&format!("The defaults are for {}.", relation.qualified), hint, || session.execute_once(&sql));
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
#[allow(clippy::too_many_arguments)]
fn create_state(
    relation: Option<pg_sys::Oid>,
    engine: Option<&str>,
    sequence: Option<Vec<Option<String>>>,
    groups: Option<RawJsonb>,
    deletes: Option<&str>,
    fields: Option<RawJsonb>,
    rowkind: Option<&str>,
    changelog: Option<bool>,
    history: Option<RawInterval>,
) {
    const NAME_IT: &str = "Name the table, as in stint.create_state('shop.goods', 'partial-update').";
    let Some(oid) = relation else { errors::missing("relation", NAME_IT) };
    let Some(engine) = engine else { errors::missing("engine", "Give 'deduplicate', 'first-row', 'aggregation' or 'partial-update'.") };
    let sequence = sequence.map(no_nulls);
    let changelog = input::given("changelog", changelog);
    if !changelog && history.is_some() {
        errors::invalid("argument \"history\" is given, but changelog is false", "Leave history out, or let the table keep a changelog.")
    }
    crate::shmem::required();
    let identity = Identity::owner();
    spi::connect(|session| {
        let history = retention::positive(session, "history", history);
        let relation = lock_own_table(session, oid, &identity);
        let config = Config {
            engine: engine.to_string(),
            sequence,
            groups: groups.map(|value| json_text(session, value)),
            deletes: deletes.map(str::to_string),
            fields: fields.map(|value| json_text(session, value)),
            rowkind: rowkind.map(str::to_string),
        };
        let mut table = describe(session, &relation, None);
        let declaration = check(&relation, &mut table, &config);
        check_defaults(session, &relation, &table);
        session.run(&FORGET_DROPPED, &[]);
        if !config.insert(session, oid, &declaration) {
            errors::exists("state table", &relation.qualified, "Run stint.drop_state(…) first to declare it anew; its rows stay.");
        }
        if declaration.remembers() {
            create_tombstones(session, &relation, &table, &declaration);
        }
        if changelog {
            capture::install(session, &relation, history.and_then(arg));
            as_of::install(session, &relation);
        }
        recompile(oid);
    });
}

/// The table, which the caller must own, locked so that nobody alters or writes it.
pub fn lock_own_table(session: &Session, oid: pg_sys::Oid, identity: &Identity) -> Relation {
    let relation = Relation::load(session, oid);
    rights::require_ownership(session, &relation, identity.caller());
    session.execute_once(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", relation.qualified));
    Relation::load(session, oid)
}

/// Makes every backend's compiled merges of the table stale when this transaction commits.
pub fn recompile(oid: pg_sys::Oid) {
    // SAFETY: sends an invalidation of a relation that is locked.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(oid) };
}

/// Names without a null among them.
pub fn no_nulls(names: Vec<Option<String>>) -> Vec<String> {
    let given = names.len();
    let names: Vec<String> = names.into_iter().flatten().collect();
    if names.len() < given {
        errors::missing("sequence", "Name columns only; an element is null.");
    }
    names
}

/// Makes the table that remembers the sequences of deleted keys beside the state table: of the same owner, because merges run with the owner's rights, and
/// dropped with it.
pub fn create_tombstones(session: &Session, relation: &Relation, table: &state::Table, declaration: &Declaration) {
    const SUFFIX: &str = "_tombstones";
    let mut base = relation.name.clone();
    while base.len() + SUFFIX.len() > 63 {
        base.pop();
    }
    let rows = session.run(&BESIDE, &[arg(relation.schema.as_str()), arg(format!("{base}{SUFFIX}")), arg(relation.owner)]);
    let (name, there, owner): (String, bool, String) = (rows.must(0, 1), rows.must(0, 2), rows.must(0, 3));
    if rows.must(0, 4) {
        session.execute_once(&format!("DROP TABLE {name}"));
    } else if there {
        errors::exists("relation", &name, "Rename it: a state table with a sequence keeps the sequences of its deleted keys there.");
    }
    session.execute_once(&compile::create_tombstones(table, declaration, &name));
    session.execute_once(&format!("ALTER TABLE {name} OWNER TO {owner}"));
    let comment =
        format!("Sequences of the deleted keys of {}, so that an older row cannot bring one back. Kept by stint.merge.", relation.qualified);
    session.execute_once(&format!("COMMENT ON TABLE {name} IS '{}'", comment.replace('\'', "''")));
    let tombstones: pg_sys::Oid = session.run(&SET_TOMBSTONES, &[arg(relation.oid), arg(name)]).must(0, 1);
    relation.takes_along(tombstones);
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
        feed::refuse_projected(&relation, &feed::names_of(session, oid), "drop the declaration of", "Run stint.drop_projection(…) first.");
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
        recompile(oid);
    });
}

/// The table is not a state table.
pub fn not_declared(relation: &Relation) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("table {} is not a state table", relation.qualified))
        .hint("Declare it with stint.create_state(…); stint.states lists those declared.")
        .raise()
}
