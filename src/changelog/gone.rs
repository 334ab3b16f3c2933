//! Keys of deleted rows. An as-of read starts from the live rows and from these, so that a condition on the key is an index condition on both; in the changelog
//! itself keys are text, which no condition of a user's could reach by an index.
//!
//! Per state table one table of the extension, with the key's columns typed. It moves with the rows: a deletion adds its key, an insertion takes it out, in the
//! same transaction; so under every snapshot a key is either live or here. What retention leaves no trace of is taken out by it.
//! Readers need SELECT on it as on the state table, so it is granted to the same roles.

use super::capture::name_of;
use super::images::key_sql;
use super::shape::Shape;
use crate::relation::Relation;
use crate::spi::{Prepared, Session, Statement, arg};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

static NUMBER: Statement = Statement::new(c"SELECT nextval('stint.change_seq')", &[]);
static SET: Statement = Statement::new(
    c"UPDATE stint.captures SET gone_keys = to_regclass($2) WHERE relation = $1 RETURNING gone_keys::oid",
    &[pg_sys::OIDOID, pg_sys::TEXTOID],
);
static FIND: Statement = Statement::new(
    c"SELECT c.gone_keys::oid, format('%I.%I', n.nspname, t.relname)
      FROM stint.captures c JOIN pg_class t ON t.oid = c.gone_keys JOIN pg_namespace n ON n.oid = t.relnamespace WHERE c.relation = $1",
    &[pg_sys::OIDOID],
);
/// Roles with SELECT on a table, as GRANT writes them; among them its owner, but never the owner of the table of its keys ($2), who may read that anyway: what
/// is granted to him or revoked would be written again by every statement that is followed, and statements of two sessions would fail on each other.
static READERS: Statement = Statement::new(
    c"SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(r.rolname) END
      FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a LEFT JOIN pg_roles r ON r.oid = a.grantee
      WHERE c.oid = $1 AND a.privilege_type = 'SELECT' AND (a.grantee = 0 OR r.oid IS NOT NULL)
        AND a.grantee <> (SELECT k.relowner FROM pg_class k WHERE k.oid = $2)
      UNION SELECT quote_ident(r.rolname) FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
      WHERE c.oid = $1 AND c.relowner <> (SELECT k.relowner FROM pg_class k WHERE k.oid = $2)
      ORDER BY 1",
    &[pg_sys::OIDOID, pg_sys::OIDOID],
);

/// Makes the table for a state table that is just declared.
pub fn create(session: &Session, relation: &Relation) {
    let number: i64 = session.run(&NUMBER, &[]).must(0, 1);
    let name = format!("stint.gone_keys_{number}");
    let columns: Vec<String> = relation.key_columns().enumerate().map(|(place, column)| format!("l.{} AS k{}", column.quoted, place + 1)).collect();
    session.execute_once(&format!(
        "CREATE TABLE {name} AS SELECT {}, ''::text COLLATE \"C\" AS key FROM {} l WITH NO DATA",
        columns.join(", "),
        relation.qualified
    ));
    session
        .execute_once(&format!("CREATE INDEX ON {name} ({})", (1..=columns.len()).map(|place| format!("k{place}")).collect::<Vec<_>>().join(", ")));
    session.execute_once(&format!("CREATE INDEX ON {name} (hashtextextended(key, 0))"));
    session.execute_once(&format!(
        "COMMENT ON TABLE {name} IS '{}'",
        format!("Keys of the deleted rows of {}, for its as-of function. Written by its capture triggers.", relation.qualified).replace('\'', "''")
    ));
    let table: pg_sys::Oid = session.run(&SET, &[arg(relation.oid), arg(name)]).must(0, 1);
    relation.takes_along(table);
    grant(session, relation.oid);
}

/// Drops it; called before the declaration is forgotten.
pub fn remove(session: &Session, relation: pg_sys::Oid) {
    if let Some((_, name)) = find(session, relation) {
        session.execute_once(&format!("DROP TABLE {name}"));
    }
}

/// The table for a state table: its oid, and its name as SQL writes it.
pub fn find(session: &Session, relation: pg_sys::Oid) -> Option<(pg_sys::Oid, String)> {
    let found = session.run(&FIND, &[arg(relation)]);
    (!found.is_empty()).then(|| (found.must(0, 1), found.must(0, 2)))
}

/// Lets those read it who may read the state table.
pub fn grant(session: &Session, relation: pg_sys::Oid) {
    let Some((table, name)) = find(session, relation) else { return };
    let names = |of: pg_sys::Oid| -> Vec<String> {
        let rows = session.run(&READERS, &[arg(of), arg(table)]);
        (0..rows.len()).map(|row| rows.must(row, 1)).collect()
    };
    let (wanted, granted) = (names(relation), names(table));
    for role in granted.iter().filter(|role| !wanted.contains(role)) {
        session.execute_once(&format!("REVOKE SELECT ON {name} FROM {role}"));
    }
    for role in wanted.iter().filter(|role| !granted.contains(role)) {
        session.execute_once(&format!("GRANT SELECT ON {name} TO {role}"));
    }
}

/// What a statement does to the keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Move {
    /// Rows were inserted: `stint_new`.
    Came,
    /// Rows were deleted: `stint_old`.
    Went,
    /// Keys were changed: both.
    Changed,
    /// The table is about to be emptied.
    Emptied,
    /// All rows of the table came, as a partition that was attached.
    Joined,
}

/// A table's statements, as long as its columns, its key and the table of its keys stay as they are.
struct Compiled {
    fingerprint: u64,
    table: pg_sys::Oid,
    statements: Vec<Rc<Prepared>>,
}

thread_local! {
    static COMPILED: RefCell<HashMap<(u32, Move), Compiled>> = RefCell::new(HashMap::new());
}

/// Follows what the capture trigger sees: transition tables are known by name, rights are the extension owner's. `written` is the state table or a partition
/// of it.
pub fn follow(session: &Session, relation: pg_sys::Oid, written: pg_sys::Oid, fingerprint: u64, what: Move) {
    let known = |all: &HashMap<(u32, Move), Compiled>| {
        let found = all.get(&(written.to_u32(), what)).filter(|found| found.fingerprint == fingerprint)?;
        Some((found.table, found.statements.clone()))
    };
    let found = COMPILED.with_borrow(known).and_then(|(oid, statements)| Some((blocks(oid)?, statements)));
    let (blocks, statements) = match found {
        Some(found) => found,
        None => {
            let (Some((oid, name)), Some(table)) = (find(session, relation), name_of(session, written)) else { return };
            let statements = prepared(session, relation, &table, &name, what);
            let compiled = Compiled { fingerprint, table: oid, statements: statements.clone() };
            COMPILED.with_borrow_mut(|all| all.insert((written.to_u32(), what), compiled));
            (blocks(oid).unwrap_or(1), statements)
        }
    };
    // Most tables never had a row deleted.
    if what == Move::Came && blocks == 0 {
        return;
    }
    // With what is committed now: an older snapshot may insert a key whose row another transaction deleted since, and must find it here.
    for statement in statements {
        session.run_own_latest(&statement, &[]);
    }
}

/// Follows a partition that is attached (`Joined`) or leaves (`Emptied`) with all its rows; `table` is its name as SQL writes it.
pub fn follow_partition(session: &Session, relation: pg_sys::Oid, table: &str, what: Move) {
    let Some((_, name)) = find(session, relation) else { return };
    prepared(session, relation, table, &name, what).iter().for_each(|statement| {
        session.run_own_latest(statement, &[]);
    });
}

fn prepared(session: &Session, relation: pg_sys::Oid, table: &str, keys: &str, what: Move) -> Vec<Rc<Prepared>> {
    sql(&Shape::load(session, relation), table, keys, what).iter().map(|text| Rc::new(Prepared::new(text, &[]))).collect()
}

/// How many blocks a table has; `None` where it is gone.
fn blocks(table: pg_sys::Oid) -> Option<u32> {
    // SAFETY: opened and closed here; the lock is kept to the end of the transaction, as any statement on it would.
    unsafe {
        let open = pg_sys::try_relation_open(table, pg_sys::RowExclusiveLock as i32);
        if open.is_null() {
            return None;
        }
        let count = pg_sys::RelationGetNumberOfBlocksInFork(open, pg_sys::ForkNumber::MAIN_FORKNUM);
        pg_sys::relation_close(open, pg_sys::NoLock as i32);
        Some(count)
    }
}

fn sql(shape: &Shape, table: &str, keys: &str, what: Move) -> Vec<String> {
    let key = |row: &str| key_sql(shape.key_columns().map(|column| column.quoted.as_str()), row);
    let columns: Vec<String> = shape.key_columns().map(|column| format!("r.{}", column.quoted)).collect();
    let names: Vec<String> = (1..=columns.len()).map(|place| format!("k{place}")).collect();
    let same = |a: &str, b: &str| format!("hashtextextended({a}, 0) = hashtextextended({b} COLLATE \"C\", 0) AND {a} = {b}");
    let add = |from: &str, except: &str| {
        format!(
            "INSERT INTO {keys} ({names}, key)
             SELECT {names}, o.key FROM (SELECT {columns}, {key} COLLATE \"C\" AS key FROM {from} r) o ({names}, key)
             WHERE NOT EXISTS (SELECT FROM {keys} g WHERE {same}) {except}",
            names = names.join(", "),
            columns = columns.join(", "),
            key = key("r"),
            same = same("g.key", "o.key"),
        )
    };
    let take = |from: &str| {
        format!("DELETE FROM {keys} g USING (SELECT {} COLLATE \"C\" AS key FROM {from} r) n WHERE {}", key("r"), same("g.key", "n.key"))
    };
    match what {
        Move::Came => vec![take("stint_new")],
        Move::Went => vec![add("stint_old", "")],
        Move::Changed => {
            let except = format!("AND NOT EXISTS (SELECT FROM (SELECT {} COLLATE \"C\" AS key FROM stint_new r) n WHERE n.key = o.key)", key("r"));
            vec![add("stint_old", &except), take("stint_new")]
        }
        Move::Emptied => vec![add(&format!("ONLY {table}"), "")],
        Move::Joined => vec![take(&format!("ONLY {table}"))],
    }
}
