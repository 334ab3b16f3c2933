//! `<table>_as_of`: the function that `create_state` makes beside a state table.
//!
//! It is plain SQL that PostgreSQL expands into the calling query, with the caller's rights, so that conditions, joins and orders on the key use indexes: the
//! primary key's for rows that are there now, that of the table of deleted keys for those that are not. For each key `stint.row_as_of` says what the row was.
//! `stint.point_is_kept` raises the error where the point cannot be read, also if there are no rows at all.
//! The two parts are of one table each and without conditions of their own, since only such parts of a UNION ALL take part in the planning of the whole query.
//! The columns are spelled out; when the table is altered, the function is made anew.

use crate::changelog::images::key_sql;
use crate::changelog::reader::quote;
use crate::changelog::{columns, epoch, gone};
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::spi::{Identity, Session, Statement, arg, connect};
use pgrx::prelude::*;
use std::cell::Cell;

/// Whether a schema has a function of a name.
static TAKEN: Statement = Statement::new(
    c"SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = $2)",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID],
);
/// A table's as-of function, told by the rows it returns and by its body, since it may have been renamed, as may the table: its schema, name and body, whether
/// its name is that which it got from the table as the body calls it, and whether it is in that table's schema.
static MADE: Statement = Statement::new(
    c"SELECT n.nspname::text, p.proname::text, p.prosrc, p.proname = t.named[2] || '_as_of', n.nspname = t.named[1]
      FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_class c ON c.reltype = p.prorettype
           CROSS JOIN LATERAL (SELECT parse_ident(substring(p.prosrc FROM 'stint.point_is_kept\\(NULL::(.*), \\$1, \\$2, \\$3\\)\n$')) AS named) t
      WHERE c.oid = $1 AND pg_get_function_identity_arguments(p.oid) = 'tag text, pos bigint, at timestamp with time zone' AND t.named IS NOT NULL
      ORDER BY 4 DESC, p.oid LIMIT 1",
    &[pg_sys::OIDOID],
);
/// State tables with a primary key, whose as-of functions may have to be made anew.
static CAPTURED: Statement = Statement::new(
    c"SELECT c.relation::oid FROM stint.captures c
      WHERE EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.relation AND i.indisprimary) AND EXISTS (SELECT FROM pg_class t WHERE t.oid = c.gone_keys)
      ORDER BY 1",
    &[],
);
/// Whether a command altered relations only, none of which is captured: such as the worker, which adds partitions to tables of its own. Of a GRANT and of a
/// dropped type PostgreSQL tells no relation.
static ELSEWHERE: Statement = Statement::new(
    c"SELECT coalesce(bool_and(d.classid = 'pg_class'::regclass AND NOT EXISTS (SELECT FROM stint.captures c WHERE c.relation = d.objid)), false)
      FROM pg_event_trigger_ddl_commands() d",
    &[],
);
/// The columns of the table of deleted keys, the key's text not counted.
static KEYS: Statement = Statement::new(
    c"SELECT format_type(a.atttypid, a.atttypmod) FROM pg_attribute a
      WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> 'key' ORDER BY a.attnum",
    &[pg_sys::OIDOID],
);

/// PostgreSQL's NAMEDATALEN − 1; it would cut a longer name short without an error.
const LONGEST: usize = 63;

fn function_name(relation: &Relation) -> String {
    format!("{}_as_of", relation.name)
}

fn quote_name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn full_name(schema: &str, name: &str) -> String {
    format!("{}.{}", quote_name(schema), quote_name(name))
}

fn is_taken(session: &Session, schema: &str, name: &str) -> bool {
    session.run(&TAKEN, &[arg(schema), arg(name)]).must(0, 1)
}

/// The body; `None` where the key is not the one whose deleted values were gathered.
fn body(session: &Session, relation: &Relation) -> Option<String> {
    let (keys, keys_name) = gone::find(session, relation.oid)?;
    let types = session.run(&KEYS, &[arg(keys)]);
    if types.len() != relation.key.len() {
        return None;
    }
    let table = &relation.qualified;
    let place = |column: usize| relation.key.iter().position(|key| *key == column);
    let columns: Vec<String> = (0..relation.columns.len())
        .map(|column| match place(column) {
            Some(place) => format!("x.k{}", place + 1),
            None => format!("(x.r).{}", relation.columns[column].quoted),
        })
        .collect();
    let live: Vec<String> = relation.key_columns().enumerate().map(|(place, column)| format!("l.{} AS k{}", column.quoted, place + 1)).collect();
    let dead: Vec<String> = relation
        .key_columns()
        .enumerate()
        .map(|(place, column)| {
            // The parts of a UNION ALL must agree in type exactly; the key's type may have been altered since.
            let cast = if types.must::<String>(place, 1) == column.type_name { String::new() } else { format!("::{}", column.type_name) };
            format!("g.k{}{cast}", place + 1)
        })
        .collect();
    Some(format!(
        "
    SELECT {columns}
    FROM (SELECT stint.row_as_of(l.*, {key}, $1, $2, $3) AS r, {live} FROM {table} l
          UNION ALL
          SELECT stint.row_as_of(NULL::{table}, g.key, $1, $2, $3), {dead} FROM {keys_name} g) x
    WHERE (x.r).{present} IS NOT NULL AND stint.point_is_kept(NULL::{table}, $1, $2, $3)
",
        columns = columns.join(", "),
        key = key_sql(relation.key_columns().map(|column| column.quoted.as_str()), "l").replace("::text", "::pg_catalog.text"),
        live = live.join(", "),
        dead = dead.join(", "),
        present = relation.key_columns().next()?.quoted,
    ))
}

/// Makes `<table>_as_of`, owned by the table's owner; called by `create_state`.
pub fn install(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    let name = function_name(relation);
    if name.len() > LONGEST {
        Fault::new(PgSqlErrorCode::ERRCODE_NAME_TOO_LONG, format!("{} cannot be a state table: its name is too long", relation.qualified))
            .detail(format!("The function \"{name}\" would have a name of more than 63 bytes."))
            .hint("Rename the table to at most 57 bytes.")
            .raise();
    }
    if is_taken(session, &relation.schema, &name) {
        errors::exists("function", &format!("{}.{name}", relation.schema), "Rename or drop it: create_state makes a function of that name.")
    }
    let Some(body) = body(session, relation) else { errors::internal("the keys of deleted rows are not those of the table") };
    let function = full_name(&relation.schema, &name);
    create(session, relation, &function, &body);
    comment(session, relation, &function);
    session.execute_once(&format!("ALTER FUNCTION {function} OWNER TO {}", owner_name(relation)));
}

fn create(session: &Session, relation: &Relation, function: &str, body: &str) {
    session.execute_once(&format!(
        "CREATE OR REPLACE FUNCTION {function}(tag text DEFAULT NULL, pos bigint DEFAULT NULL, at timestamptz DEFAULT NULL) RETURNS SETOF {} LANGUAGE sql STABLE AS {}",
        relation.qualified,
        quote(body)
    ));
    // So that DROP EXTENSION leaves no function behind that cannot work, and that stands in the way of the next create_state. Replacing it forgets this.
    session.execute_once(&format!("ALTER FUNCTION {function} DEPENDS ON EXTENSION pg_stint"));
}

fn comment(session: &Session, relation: &Relation, function: &str) {
    session.execute_once(&format!(
        "COMMENT ON FUNCTION {function} IS {}",
        quote(&format!(
            "The rows of {} as a reader saw them at a tag, at a position of the changelog, or at the last tick by a time (give one of the three). Conditions on the key use indexes. \
             Needs SELECT on the table, USAGE on the schema stint and EXECUTE on stint.row_as_of, stint.point_is_kept and stint.image.",
            relation.qualified
        ))
    ));
}

fn owner_name(relation: &Relation) -> String {
    // SAFETY: answers a palloc'd C string, or raises where the role is gone.
    let name = unsafe { std::ffi::CStr::from_ptr(pg_sys::GetUserNameFromId(relation.owner, false)) };
    quote_name(&name.to_string_lossy())
}

/// Drops the table's as-of function, whatever its name; called by `drop_state`.
pub fn remove(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    let made = session.run(&MADE, &[arg(relation.oid)]);
    if !made.is_empty() {
        let function = full_name(&made.must::<String>(0, 1), &made.must::<String>(0, 2));
        session.execute_once(&format!("DROP FUNCTION {function}(text, bigint, timestamptz)"));
    }
}

thread_local! {
    /// Whether this is already at work: what it executes are commands, too.
    static AT_WORK: Cell<bool> = const { Cell::new(false) };
}

struct AtWork;

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.set(false);
    }
}

/// See [`follow_ddl_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_follow_ddl_wrapper() -> &'static pg_sys::Pg_finfo_record {
    static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &CALLED_BY_V1
}

/// `stint.follow_ddl()`, the event trigger: what is known of captured tables' columns and their as-of functions follow them, and the tables of deleted keys their tables' grants.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn follow_ddl_wrapper(_fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    if !AT_WORK.get() {
        let _owner = Identity::owner();
        connect(|session| {
            if session.run(&ELSEWHERE, &[]).get(0, 1) == Some(true) {
                return;
            }
            // While a dump is restored, it is the dump that makes the functions and the grants, in several sessions at once.
            if matches!(epoch::current(session), Some((_, true))) {
                columns::follow(session);
                refresh_all(session);
            }
        });
    }
    pg_sys::Datum::from(0usize)
}

/// Has the as-of functions and the tables of deleted keys follow their state tables; also called by `activate`, for what happened before.
pub fn refresh_all(session: &Session) {
    AT_WORK.set(true);
    let _at_work = AtWork;
    let tables = session.run(&CAPTURED, &[]);
    for row in 0..tables.len() {
        refresh(session, tables.must(row, 1));
    }
}

fn refresh(session: &Session, table: pg_sys::Oid) {
    let relation = Relation::load_unfit(session, table);
    gone::grant(session, table);
    let made = session.run(&MADE, &[arg(table)]);
    if made.is_empty() {
        return; // dropped, or somebody's own
    }
    let Some(body) = body(session, &relation) else { return };
    if made.must::<String>(0, 3) == body {
        return;
    }
    let (schema, name): (String, String) = (made.must(0, 1), made.must(0, 2));
    // A name or a schema that somebody gave it is left to it.
    let to_name = if made.must(0, 4) { function_name(&relation) } else { name.clone() };
    let to_schema = if made.must(0, 5) { relation.schema.clone() } else { schema.clone() };
    let function = full_name(&to_schema, &to_name);
    if moved(session, (&schema, &name), (&to_schema, &to_name)) {
        comment(session, &relation, &function);
        create(session, &relation, &function, &body);
    } else {
        create(session, &relation, &full_name(&schema, &name), &body);
    }
}

/// Gives the function another schema and name; answers false where it has them already, or cannot have them.
fn moved(session: &Session, (schema, name): (&str, &str), (to_schema, to_name): (&str, &str)) -> bool {
    let (rename, place) = (name != to_name, schema != to_schema);
    if !(rename || place)
        || to_name.len() > LONGEST
        || is_taken(session, to_schema, to_name)
        || (rename && place && is_taken(session, schema, to_name))
    {
        return false;
    }
    if rename {
        session.execute_once(&format!("ALTER FUNCTION {} RENAME TO {}", full_name(schema, name), quote_name(to_name)));
    }
    if place {
        session.execute_once(&format!("ALTER FUNCTION {} SET SCHEMA {}", full_name(schema, to_name), quote_name(to_schema)));
    }
    true
}
