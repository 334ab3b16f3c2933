//! A user's table as the catalogue describes it: what a state table's declaration is checked against and its statements are compiled from.

use crate::errors::Fault;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;

static TABLE: Statement = Statement::new(
    c"SELECT n.nspname::text, c.relname::text, format('%I.%I', n.nspname, c.relname), c.relowner, c.relkind::text, c.relpersistence::text,
             c.relispartition,
             EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid),
             c.relkind <> 'p' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid),
             c.oid < 16384 OR n.nspname IN ('pg_catalog', 'information_schema', 'pg_toast', 'stint'),
             (SELECT i.indimmediate FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), c.relrowsecurity
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE c.oid = $1",
    &[pg_sys::OIDOID],
);

static COLUMNS: Statement = Statement::new(
    c"SELECT a.attname::text, quote_ident(a.attname), a.atttypid, format_type(a.atttypid, a.atttypmod),
             CASE WHEN a.attcollation <> 0 AND a.attcollation <> t.typcollation
                  THEN (SELECT format('%I.%I', n.nspname, l.collname) FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace
                        WHERE l.oid = a.attcollation) END,
             a.attgenerated <> '', a.attidentity::text,
             (SELECT k.place FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY k (attnum, place)
              WHERE i.indrelid = a.attrelid AND i.indisprimary AND k.attnum = a.attnum)
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
      WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
      ORDER BY a.attnum",
    &[pg_sys::OIDOID],
);

/// One column of a table.
#[derive(Clone, Debug)]
pub struct Column {
    /// Its name as stored.
    pub name: String,
    /// Its name as SQL writes it.
    pub quoted: String,
    /// Its type.
    pub type_oid: pg_sys::Oid,
    /// Its type as SQL writes it, with modifiers, under `search_path = pg_catalog, pg_temp`.
    pub type_name: String,
    /// Its collation as SQL writes it, where it is not the type's own.
    pub collation: Option<String>,
    /// Whether PostgreSQL computes it (GENERATED … STORED).
    pub generated: bool,
    /// Whether it is an identity column: `a` GENERATED ALWAYS, `d` BY DEFAULT.
    pub identity: Option<char>,
}

/// A table that can hold state: an ordinary or partitioned permanent table with an immediate primary key.
#[derive(Clone, Debug)]
pub struct Relation {
    /// Its oid.
    pub oid: pg_sys::Oid,
    /// Its schema as stored.
    pub schema: String,
    /// Its name as stored.
    pub name: String,
    /// Schema and name as SQL writes them.
    pub qualified: String,
    /// The role that owns it.
    pub owner: pg_sys::Oid,
    /// Whether it is partitioned.
    pub partitioned: bool,
    /// Its columns in table order, without dropped ones.
    pub columns: Vec<Column>,
    /// The primary key: indexes into `columns`, in key order.
    pub key: Vec<usize>,
}

/// Has callbacks called when a relation or a schema changes, for as long as the backend lives.
pub fn on_change(relation: pg_sys::RelcacheCallbackFunction, schema: pg_sys::SyscacheCallbackFunction) {
    // SAFETY: the functions have the callbacks' signatures and live as long as the library.
    unsafe {
        pg_sys::CacheRegisterRelcacheCallback(relation, pg_sys::Datum::from(0usize));
        pg_sys::CacheRegisterSyscacheCallback(pg_sys::SysCacheIdentifier::NAMESPACEOID as i32, schema, pg_sys::Datum::from(0usize));
    }
}

impl Relation {
    /// Has another table, which this transaction made, dropped together with this one, which is locked.
    pub fn takes_along(&self, other: pg_sys::Oid) {
        let address = |oid: pg_sys::Oid| pg_sys::ObjectAddress { classId: pg_sys::RelationRelationId, objectId: oid, objectSubId: 0 };
        // SAFETY: both objects exist and are locked by this transaction.
        unsafe { pg_sys::recordDependencyOn(&address(other), &address(self.oid), pg_sys::DependencyType::DEPENDENCY_AUTO) };
    }

    /// Reads the table from the catalogue; raises an error that says why it cannot hold state.
    pub fn load(session: &Session, oid: pg_sys::Oid) -> Relation {
        let (relation, refusal) = Self::read(session, oid);
        if let Some((code, reason, hint)) = refusal {
            Fault::new(code, format!("{} cannot be a state table: {reason}", relation.qualified)).hint(hint).raise();
        }
        relation
    }

    /// Reads a table that may have become unfit to hold state, to take it out of service.
    pub fn load_unfit(session: &Session, oid: pg_sys::Oid) -> Relation {
        Self::read(session, oid).0
    }

    fn read(session: &Session, oid: pg_sys::Oid) -> (Relation, Option<Refusal>) {
        let rows = session.run(&TABLE, &[arg(oid)]);
        if rows.is_empty() {
            Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE, format!("relation with oid {} does not exist", oid.to_u32()))
                .hint("Give the table's name, as in 'shop.orders'.")
                .raise();
        }
        let schema: String = rows.must(0, 1);
        let name: String = rows.must(0, 2);
        let qualified: String = rows.must(0, 3);
        let kind: String = rows.must(0, 5);
        let refusal = refusal(&Facts {
            kind: &kind,
            persistence: &rows.must::<String>(0, 6),
            partition: rows.must(0, 7),
            child: rows.must(0, 8),
            parent: rows.must(0, 9),
            system: rows.must(0, 10),
            immediate_key: rows.get(0, 11),
            row_security: rows.must(0, 12),
        });
        let owner = rows.must(0, 4);

        let rows = session.run(&COLUMNS, &[arg(oid)]);
        let mut columns = Vec::with_capacity(rows.len());
        let mut key = Vec::new();
        for row in 0..rows.len() {
            if let Some(place) = rows.get::<i64>(row, 8) {
                key.push((place, row));
            }
            columns.push(Column {
                name: rows.must(row, 1),
                quoted: rows.must(row, 2),
                type_oid: rows.must(row, 3),
                type_name: rows.must(row, 4),
                collation: rows.get(row, 5),
                generated: rows.must(row, 6),
                identity: rows.get::<String>(row, 7).and_then(|text| text.chars().next()),
            });
        }
        key.sort_unstable();
        let key = key.into_iter().map(|(_, column)| column).collect();
        let relation = Relation { oid, schema, name, qualified, owner, partitioned: kind == "p", columns, key };
        (relation, refusal)
    }

    /// The key's columns, in key order.
    pub fn key_columns(&self) -> impl Iterator<Item = &Column> {
        self.key.iter().map(|index| &self.columns[*index])
    }
}

/// SQLSTATE, reason and hint.
type Refusal = (PgSqlErrorCode, &'static str, &'static str);

/// What decides whether a table can hold state.
struct Facts<'a> {
    kind: &'a str,
    persistence: &'a str,
    partition: bool,
    child: bool,
    parent: bool,
    system: bool,
    immediate_key: Option<bool>,
    row_security: bool,
}

/// Why such a table cannot hold state, and what to do.
fn refusal(facts: &Facts<'_>) -> Option<Refusal> {
    use PgSqlErrorCode::*;
    let other = match facts.kind {
        "r" | "p" => None,
        "v" => Some("it is a view"),
        "m" => Some("it is a materialized view"),
        "f" => Some("it is a foreign table"),
        "S" => Some("it is a sequence"),
        "i" | "I" => Some("it is an index"),
        "c" => Some("it is a composite type"),
        _ => Some("it is not a table"),
    };
    if let Some(reason) = other {
        return Some((ERRCODE_WRONG_OBJECT_TYPE, reason, "Name an ordinary or partitioned table."));
    }
    if facts.system {
        return Some((ERRCODE_INSUFFICIENT_PRIVILEGE, "it belongs to the system", "Name a table of your own."));
    }
    match facts.persistence {
        "t" => return Some((ERRCODE_WRONG_OBJECT_TYPE, "it is temporary, and its changes would outlive it", "Create it without TEMPORARY.")),
        "u" => {
            return Some((
                ERRCODE_WRONG_OBJECT_TYPE,
                "it is unlogged, and a crash would empty it without a trace in the changelog",
                "Run ALTER TABLE … SET LOGGED first.",
            ));
        }
        _ => {}
    }
    if facts.partition {
        return Some((ERRCODE_WRONG_OBJECT_TYPE, "it is a partition", "Declare the partitioned table at the root instead."));
    }
    if facts.child || facts.parent {
        return Some((
            ERRCODE_WRONG_OBJECT_TYPE,
            "it takes part in table inheritance, where a primary key does not hold across the tables",
            "Use a partitioned table, or a table without INHERITS.",
        ));
    }
    if facts.row_security {
        return Some((
            ERRCODE_WRONG_OBJECT_TYPE,
            "it has row-level security, and merges run as its owner, whom policies do not bind",
            "Run ALTER TABLE … DISABLE ROW LEVEL SECURITY, or keep the rows of each tenant in a table of its own.",
        ));
    }
    match facts.immediate_key {
        None => Some((
            ERRCODE_INVALID_TABLE_DEFINITION,
            "it has no primary key, so rows cannot be told apart",
            "Run ALTER TABLE … ADD PRIMARY KEY (…) first.",
        )),
        Some(false) => Some((
            ERRCODE_INVALID_TABLE_DEFINITION,
            "its primary key is deferrable, and a merge must see a conflict at once",
            "Declare the primary key NOT DEFERRABLE.",
        )),
        Some(true) => None,
    }
}
