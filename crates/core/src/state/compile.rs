//! A declaration compiled into SQL: one set-based statement per kind of merge, whatever the number of rows. Every statement takes the batch as `$1 jsonb` and
//! is meant to run with `search_path = pg_catalog, pg_temp`; operators of other types' classes are written with their schema.
//!
//! The batch is folded per key first and combined with the stored row second, so that a batch in which a key comes many times equals its rows merged one by
//! one. What makes that sound: a sequence only rises, so of a group only the row with the highest (sequence, arrival) can win, and a later delete that wins
//! starts the key anew. The combination is written in ON CONFLICT DO UPDATE, over the row as it is once locked, so writers of one key lose nothing.
//!
//! Inside the statements columns go by their place in the table (`c0`, `c1`, …), so that no name of a user's can clash.

use super::Table;
use super::declare::{Declaration, Deletes, Engine, Group};
use crate::sql::literal;
use std::fmt::Write;

mod fold;
mod functions;
mod parts;
mod removal;
mod upsert;

/// What a batch does to its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Rows arrive (`+I`, `+U`).
    Upsert,
    /// Rows are deleted (`-D`).
    Delete,
    /// Rows are withdrawn before a newer one arrives (`-U`).
    Retract,
}

/// The kinds there are.
pub const KINDS: [Kind; 3] = [Kind::Upsert, Kind::Delete, Kind::Retract];

impl Kind {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Upsert => "upsert",
            Kind::Delete => "delete",
            Kind::Retract => "retract",
        }
    }
}

/// What a merge of one kind runs. The main statements return one row: inserted, updated, deleted, unchanged, late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merge {
    /// The declaration refuses this kind.
    Refused,
    /// The declaration ignores this kind: every key stays as it is.
    Ignored,
    /// Rows are written.
    Upsert {
        /// For a batch of one row.
        single: Single,
        /// For a batch in which no key comes twice; returns no row and writes nothing where one does.
        unique: String,
        /// For any batch; none where a batch in which keys come again goes in rounds, one row of each key at a time ([`occurrences`]).
        folded: Option<String>,
        /// What follows when keys were inserted that may have been deleted before.
        after: Option<Revival>,
    },
    /// Rows are deleted, or fields of theirs set to null.
    Remove(Removal),
}

/// The statements for a batch of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Single {
    /// Writes it; returns whether it is new, or no row where nothing is written.
    pub write: String,
    /// Returns whether a row that wrote nothing was late; none where no row can be.
    pub late: Option<String>,
}

/// The statements after an upsert that inserted keys: they run with fresh snapshots while the inserted rows are locked, so they also see a delete that the
/// upsert waited behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revival {
    /// Returns whether a key of the batch has a tombstone.
    pub hit: String,
    /// Returns the tombstones of the batch as text.
    pub tombstones: String,
    /// Deletes rows older than their tombstone; returns how many.
    pub remove: Option<String>,
    /// Sets back the groups that are older than the tombstone's.
    pub adjust: Option<String>,
    /// Drops the tombstones of keys that live.
    pub forget: String,
}

/// The statements of a delete or retraction, in order; before them go [`lock_table`], where a key is absent and that matters, and [`lock_rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// Makes rows for the keys without one, for what is subtracted from them before it has arrived; runs when the rows are locked.
    pub owe: Option<String>,
    /// The removal itself.
    pub apply: String,
    /// Whether `apply` takes any batch; otherwise it goes in rounds as an upsert does.
    pub folds: bool,
}

/// Returns the number of distinct keys.
pub fn count_keys(table: &Table) -> String {
    format!("WITH {}\nSELECT count(*) FROM (SELECT FROM r GROUP BY {}) k", rows(table, &table.key), list(&table.key, |c| format!("c{c}")))
}

/// Cuts a batch into rounds, `$2 text[]` being the kind of each of its rows: round i holds the i-th run of rows of one kind of each key, so that rounds done one
/// after the other do to every key what its rows in order do, however many kinds they have. Returns round, kind, the rows as a batch and their number.
pub fn runs(table: &Table) -> String {
    cut(table, ", ($2)[ord::integer] AS kind", "kind IS DISTINCT FROM lag(kind) OVER (PARTITION BY kid ORDER BY ord)", "kind")
}

/// Cuts a batch into rounds in which no key comes twice: round i holds the i-th row of each key. Returns round, null, the rows as a batch and their number.
pub fn occurrences(table: &Table) -> String {
    cut(table, "", "true", "NULL::text")
}

fn cut(table: &Table, kind: &str, starts: &str, told: &str) -> String {
    let keys = list(&table.key, |c| format!("c{c}"));
    let by_kind = if kind.is_empty() { "" } else { ", kind" };
    format!(
        "WITH {rows},\ne AS (SELECT ord, dense_rank() OVER (ORDER BY {keys}) AS kid{kind} FROM r),\n\
         s AS (SELECT e.*, {starts} AS starts FROM e),\n\
         n AS (SELECT s.*, count(*) FILTER (WHERE starts) OVER (PARTITION BY kid ORDER BY ord) AS round FROM s)\n\
         SELECT round, {told}, jsonb_agg(a.row ORDER BY n.ord), count(*)::integer\n  \
         FROM n JOIN jsonb_array_elements($1) WITH ORDINALITY a (row, ord) ON a.ord = n.ord GROUP BY round{by_kind} ORDER BY round{by_kind}",
        rows = rows(table, &table.key),
    )
}

/// Returns how many keys of the batch have no row, and how many have one.
pub fn count_absent_and_present(table: &Table) -> String {
    let keys = list(&table.key, |c| format!("c{c}"));
    let same = parts::same_key(table, |_, c| format!("t.{}", table.columns[c].quoted), |_, c| format!("r.c{c}"));
    format!(
        "WITH {rows}\nSELECT count(*) - count(t.{one}), count(t.{one}) FROM (SELECT DISTINCT {keys} FROM r) r LEFT JOIN {target} t ON {same}",
        rows = rows(table, &table.key),
        one = table.columns[table.key[0]].quoted,
        target = table.qualified,
    )
}

/// Locks the rows of a batch in key order.
pub fn lock_rows(table: &Table) -> String {
    let keys = |alias: &str| list(&table.key, |c| format!("{alias}c{c}"));
    let same = parts::same_key(table, |_, c| format!("t.{}", table.columns[c].quoted), |_, c| format!("h.c{c}"));
    format!(
        "WITH {rows}\nSELECT 1 FROM (SELECT DISTINCT {distinct} FROM r) h JOIN {target} t ON {same} ORDER BY {order} FOR UPDATE OF t",
        rows = rows(table, &table.key),
        distinct = keys(""),
        target = table.qualified,
        order = keys("h."),
    )
}

/// Keeps writers out of the table, because a row that somebody else is inserting cannot be locked.
pub fn lock_table(table: &Table) -> String {
    format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", table.qualified)
}

/// Reads the declared defaults as their columns' types; none where there are none.
pub fn read_defaults(table: &Table) -> Option<String> {
    let read = |column: &super::Column| column.default.as_ref().map(|text| format!("CAST({} AS {})", literal(text), column.bare));
    let casts: Vec<String> = table.columns.iter().filter_map(read).collect();
    (!casts.is_empty()).then(|| format!("SELECT {}", casts.join(", ")))
}

/// CREATE TABLE for the tombstones of a state table: typed as the table is, so that keys compare as they do there.
pub fn create_tombstones(table: &Table, declaration: &Declaration, name: &str) -> String {
    let mut columns = String::new();
    for (place, c) in table.key.iter().enumerate() {
        let _ = write!(columns, "k{place} {} NOT NULL, ", table.columns[*c].type_sql);
    }
    for (g, sequence) in declaration.sequences().iter().enumerate() {
        for (j, c) in sequence.iter().enumerate() {
            let _ = write!(columns, "s{g}_{j} {}, ", table.columns[*c].type_sql);
        }
    }
    let keys = (0..table.key.len()).map(|place| format!("k{place}")).collect::<Vec<_>>().join(", ");
    format!("CREATE TABLE {name} ({columns}removed boolean NOT NULL, PRIMARY KEY ({keys}))")
}

/// Compiles the merge of one kind.
pub fn compile(table: &Table, declaration: &Declaration, kind: Kind) -> Merge {
    let compiler = Compiler { table, declaration, groups: groups(table, declaration) };
    if kind == Kind::Upsert {
        return compiler.upsert();
    }
    match declaration.deletes {
        Deletes::Refuse => Merge::Refused,
        Deletes::Ignore => Merge::Ignored,
        _ if compiler.groups.is_empty() && (kind == Kind::Delete && declaration.deletes == Deletes::Remove || compiler.keeps_whole_rows()) => {
            Merge::Remove(compiler.delete_by_arrival())
        }
        _ if compiler.groups.is_empty() && compiler.merged().into_iter().all(|c| compiler.unretracted(c)) => Merge::Ignored,
        _ if compiler.groups.is_empty() => Merge::Remove(compiler.withdraw_by_arrival()),
        _ => Merge::Remove(compiler.delete_by_sequence(kind)),
    }
}

/// The engine's sequences as groups; the one of `deduplicate` decides over the whole row, that of `aggregation` orders all columns.
fn groups(table: &Table, declaration: &Declaration) -> Vec<Group> {
    match &declaration.engine {
        Engine::FirstRow => Vec::new(),
        Engine::Deduplicate { sequence } | Engine::Aggregation { sequence } if sequence.is_empty() => Vec::new(),
        Engine::Deduplicate { sequence } => vec![Group { sequence: sequence.clone(), fields: Vec::new(), remove: true }],
        Engine::Aggregation { sequence } => {
            let others = (0..table.columns.len()).filter(|c| table.columns[*c].written && !table.key.contains(c) && !sequence.contains(c));
            vec![Group { sequence: sequence.clone(), fields: others.collect(), remove: declaration.deletes == Deletes::Remove }]
        }
        Engine::PartialUpdate { groups } => groups.clone(),
    }
}

fn list<T: Copy>(items: &[T], each: impl Fn(T) -> String) -> String {
    items.iter().map(|item| each(*item)).collect::<Vec<_>>().join(", ")
}

/// The batch as typed rows with their ordinal; PostgreSQL reads the values. Where an explicit null counts, `h3` says whether the row has the field of `c3`.
fn rows(table: &Table, columns: &[usize]) -> String {
    format!("r AS MATERIALIZED ({})", read(table, columns, true))
}

/// A batch of one row, likewise, which is read in the place where it is used.
fn row(table: &Table, columns: &[usize]) -> String {
    format!("r AS ({})", read(table, columns, false))
}

fn read(table: &Table, columns: &[usize], ordinal: bool) -> String {
    let definitions = list(columns, |c| format!("{} {}", table.columns[c].quoted, table.columns[c].type_sql));
    let names = list(columns, |c| format!("c{c}"));
    let values = list(columns, |c| match &table.columns[c].default {
        Some(default) => format!("coalesce(c{c}, CAST({} AS {})) AS c{c}", literal(default), table.columns[c].bare),
        None => format!("c{c}"),
    });
    let (with_ordinality, ord) = if ordinal { (" WITH ORDINALITY", ", ord") } else { ("", "") };
    let told: Vec<usize> = columns.iter().copied().filter(|c| table.columns[*c].null_sets).collect();
    let has = |c: usize| format!("raw ? {} AS h{c}", literal(&table.columns[c].name));
    let (selected, source, raw) = match told.is_empty() {
        true if values == names => (String::from("*"), "", ""),
        true => (format!("{values}{ord}"), "", ""),
        false => (format!("{values}, {}{ord}", list(&told, has)), ", jsonb_array_elements($1)", ", raw"),
    };
    format!("SELECT {selected} FROM ROWS FROM (jsonb_to_recordset($1) AS ({definitions}){source}){with_ordinality} AS x ({names}{raw}{ord})")
}

struct Compiler<'a> {
    table: &'a Table,
    declaration: &'a Declaration,
    groups: Vec<Group>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
