//! `<table>_as_of`: the function that `create_state` makes beside a state table, and `stint.images_after`, which it stands on.
//!
//! The function is plain SQL that PostgreSQL expands into the calling query, with the caller's rights. Its two parts see one snapshot, the query's, and ask
//! `images_after` once; that one checks the caller's right to the table and reads the changelog with the extension owner's.

use super::tag;
use crate::changelog::capture;
use crate::changelog::images::key_sql;
use crate::changelog::reader::quote;
use crate::errors::{self, Fault};
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::state::relation::Relation;
use pgrx::prelude::*;

static EXISTS: Statement = Statement::new(
    c"SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = $2",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// Where a tag lies: epoch, what is settled before it, what is seen at most, and the last change of the latter that belongs to it.
static TAG_POINT: Statement = Statement::new(
    c"SELECT p.epoch, p.snapshot::text, p.snapshot::text, 0::bigint
      FROM stint.tag_list t JOIN stint.pins p USING (pin)
      WHERE t.tag = $1",
    &[pg_sys::TEXTOID],
);

/// Where a position lies, likewise: in the first tick that ends at or after it.
static POS_POINT: Statement = Statement::new(
    c"SELECT t.epoch, coalesce(p.snapshot, '1:1:')::text, t.snapshot::text,
             (SELECT x.seq
              FROM (SELECT l.seq, row_number() OVER (ORDER BY l.seq) AS ordinal FROM stint.change_log l
                    WHERE l.epoch = t.epoch
                      AND (l.xid >= pg_snapshot_xmax(coalesce(p.snapshot, '1:1:')) AND l.xid < pg_snapshot_xmax(t.snapshot)
                           OR l.xid IN (SELECT pg_snapshot_xip(p.snapshot)))
                      AND pg_visible_in_snapshot(l.xid, t.snapshot)) x
              WHERE x.ordinal = $1 - coalesce((SELECT max(e.end_pos) FROM stint.ticks e WHERE e.end_pos < t.end_pos), 0))
      FROM (SELECT * FROM stint.ticks s WHERE s.end_pos >= $1 ORDER BY s.end_pos LIMIT 1) t
      LEFT JOIN stint.ticks p ON p.epoch = t.epoch AND p.number = t.number - 1",
    &[pg_sys::INT8OID],
);
static LAST: Statement = Statement::new(c"SELECT coalesce(max(t.end_pos), 0) FROM stint.ticks t", &[]);

/// Whether the table was captured already at a point: the declaring transaction is visible in what the point sees.
static CAPTURED: Statement = Statement::new(
    c"SELECT c.epoch < $2 OR c.epoch = $2 AND pg_visible_in_snapshot(c.xid, $3::pg_snapshot) FROM stint.captures c WHERE c.relation = $1",
    &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TEXTOID],
);
/// A point is followed by what it does not see, and by later epochs. The upper bound is true for every transaction; with it the planner takes the range for a
/// narrow one, and so the index.
static IMAGES: Statement = Statement::new(
    c"SELECT DISTINCT ON (c.key) c.key, c.before
      FROM (SELECT l.key, l.seq, l.before FROM stint.change_log l
            WHERE l.relation = $1
              AND l.epoch = $2 AND l.xid >= pg_snapshot_xmin($3::pg_snapshot) AND l.xid < '9223372036854775807'
              AND NOT pg_visible_in_snapshot(l.xid, $3::pg_snapshot)
              AND (l.seq > $5 OR NOT pg_visible_in_snapshot(l.xid, $4::pg_snapshot))
            UNION ALL
            SELECT l.key, l.seq, l.before FROM stint.change_log l
            WHERE l.relation = $1 AND l.epoch > $2) c
      ORDER BY c.key, c.seq",
    &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

fn function_name(relation: &Relation) -> String {
    let name = format!("{}_as_of", relation.name);
    // PostgreSQL's NAMEDATALEN − 1; it would cut the name short without an error.
    if name.len() > 63 {
        Fault::new(PgSqlErrorCode::ERRCODE_NAME_TOO_LONG, format!("{} cannot be a state table: its name is too long", relation.qualified))
            .detail(format!("The function \"{name}\" would have a name of more than 63 bytes."))
            .hint("Rename the table to at most 57 bytes.")
            .raise();
    }
    name
}

fn quote_name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Makes `<table>_as_of`, owned by the table's owner; called by `create_state`.
pub fn install(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    let name = function_name(relation);
    if !session.run(&EXISTS, &[arg(relation.schema.clone()), arg(name.clone())]).is_empty() {
        errors::exists("function", &format!("{}.{name}", relation.schema), "Rename or drop it: create_state makes a function of that name.")
    }
    let function = format!("{}.{}", quote_name(&relation.schema), quote_name(&name));
    let table = &relation.qualified;
    let body = format!(
        "
    WITH changed AS MATERIALIZED (SELECT c.key, c.before FROM stint.images_after({table_text}::pg_catalog.regclass, $1, $2) c)
    SELECT l.* FROM {table} l
    WHERE NOT EXISTS (SELECT FROM changed c WHERE c.key OPERATOR(pg_catalog.=) {key})
    UNION ALL
    SELECT r.* FROM changed c CROSS JOIN LATERAL stint.image_row(NULL::{table}, c.before) r
    WHERE c.before IS NOT NULL
",
        table_text = quote(table),
        key = key_sql(relation.key_columns().map(|column| column.quoted.as_str()), "l").replace("::text", "::pg_catalog.text"),
    );
    session.execute_once(&format!(
        "CREATE FUNCTION {function}(tag text DEFAULT NULL, pos bigint DEFAULT NULL) RETURNS SETOF {table} LANGUAGE sql STABLE AS {}",
        quote(&body)
    ));
    session.execute_once(&format!(
        "COMMENT ON FUNCTION {function}(text, bigint) IS {}",
        quote(&format!(
            "The rows of {table} as a reader saw them at a tag or at a position of the changelog (give one of the two). Needs SELECT on the table, USAGE on the schema stint and \
             EXECUTE on stint.images_after, stint.image and stint.image_row."
        ))
    ));
    // So that DROP EXTENSION leaves no function behind that cannot work, and that stands in the way of the next create_state.
    session.execute_once(&format!("ALTER FUNCTION {function}(text, bigint) DEPENDS ON EXTENSION pg_stint"));
    session.execute_once(&format!("ALTER FUNCTION {function}(text, bigint) OWNER TO {}", owner_name(relation)));
}

fn owner_name(relation: &Relation) -> String {
    // SAFETY: answers a palloc'd C string, or raises where the role is gone.
    let name = unsafe { std::ffi::CStr::from_ptr(pg_sys::GetUserNameFromId(relation.owner, false)) };
    quote_name(&name.to_string_lossy())
}

/// Drops `<table>_as_of`; called by `drop_state`.
pub fn remove(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    let function = format!("{}.{}", quote_name(&relation.schema), quote_name(&function_name(relation)));
    session.execute_once(&format!("DROP FUNCTION IF EXISTS {function}(text, bigint)"));
}

/// `stint.images_after`.
#[pg_extern(sql = false)]
fn images_after(
    relation: Option<pg_sys::Oid>,
    tag: Option<&str>,
    pos: Option<i64>,
) -> TableIterator<'static, (name!(key, String), name!(before, Option<Vec<Option<String>>>))> {
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.orders'."));
    let images = connect(|session| {
        let identity = Identity::owner();
        let name = capture::required(session, identity.caller(), relation);
        let point = match (tag, pos) {
            (Some(tag), None) => {
                let point = session.read(&TAG_POINT, &[arg(tag)]);
                if point.is_empty() {
                    tag::unknown(session, tag)
                }
                point
            }
            (None, Some(pos)) => {
                let last: i64 = session.read(&LAST, &[]).must(0, 1);
                if pos < 0 || pos > last {
                    errors::invalid(
                        format!("argument \"pos\" is {pos}; positions go from 0 to {last}"),
                        "Give a position that stint.changes, stint.poll or stint.tick returned.",
                    )
                }
                session.read(&POS_POINT, &[arg(pos)])
            }
            _ => errors::invalid("one of the arguments \"tag\" and \"pos\" must be given", "Write tag => 'name' or pos => number."),
        };
        let captured = !point.is_empty() && {
            let found = session.read(&CAPTURED, &[arg(relation), arg(point.must::<i32>(0, 1)), point.lift(0, 3)]);
            !found.is_empty() && found.must(0, 1)
        };
        if !captured {
            errors::invalid(format!("{name} was not a state table yet at that point"), "Give a tag or a position made after stint.create_state.")
        }
        let bound = point.get::<i64>(0, 4).unwrap_or(0);
        let rows = session.read(&IMAGES, &[arg(relation), arg(point.must::<i32>(0, 1)), point.lift(0, 2), point.lift(0, 3), arg(bound)]);
        (0..rows.len()).map(|row| (rows.must(row, 1), rows.get(row, 2))).collect::<Vec<_>>()
    });
    TableIterator::new(images)
}
