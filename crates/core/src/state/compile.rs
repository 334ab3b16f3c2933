//! A declaration compiled into SQL: one set-based statement per kind of merge, whatever the number of rows. Every statement takes the batch as `$1 jsonb` and
//! is meant to run with `search_path = pg_catalog, pg_temp`; operators of other types' classes are written with their schema.
//!
//! The batch is folded per key first and combined with the stored row second, so that a batch in which a key comes many times equals its rows merged one by
//! one. What makes that sound: a sequence only rises, so of a group only the row with the highest (sequence, arrival) can win, and a later delete that wins
//! starts the key anew. The combination is written in ON CONFLICT DO UPDATE, over the row as it is once locked, so writers of one key lose nothing.
//!
//! Inside the statements columns go by their place in the table (`c0`, `c1`, …), so that no name of a user's can clash.

use super::declare::{Declaration, Deletes, Engine, Group};
use super::{Column, Table};
use std::fmt::Write;

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

/// The words of `kind`.
pub const KINDS: [(&str, Kind); 3] = [("upsert", Kind::Upsert), ("delete", Kind::Delete), ("retract", Kind::Retract)];

/// What a merge of one kind runs. The main statements return one row: inserted, updated, deleted, unchanged, late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merge {
    /// The declaration refuses this kind.
    Refused,
    /// The declaration ignores this kind: every key stays as it is.
    Ignored,
    /// Rows are written.
    Upsert {
        /// For a batch in which no key comes twice.
        unique: String,
        /// For any batch.
        folded: String,
        /// What follows when keys were inserted that may have been deleted before.
        after: Option<Revival>,
    },
    /// Rows are deleted, or fields of theirs set to null.
    Remove(Removal),
}

/// The statements after an upsert that inserted keys: they run with fresh snapshots while the inserted rows are locked, so they also see a delete that the
/// upsert waited behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revival {
    /// Returns whether a key of the batch has both a row and a tombstone.
    pub hit: String,
    /// Deletes rows older than their tombstone; returns how many.
    pub remove: Option<String>,
    /// Sets back the groups that are older than the tombstone's.
    pub adjust: Option<String>,
    /// Drops the tombstones of keys that live.
    pub forget: String,
}

/// The statements of a delete or retraction, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// Returns whether a key of the batch has no row; then `lock_table` goes first. Only where sequences are remembered.
    pub absent: Option<String>,
    /// Keeps writers out, because a row that somebody else is inserting cannot be locked.
    pub lock_table: String,
    /// Locks the rows of the batch in key order.
    pub lock_rows: String,
    /// The removal itself.
    pub apply: String,
}

/// Returns (rows, distinct keys, ordinal of the first row with a null in its key).
pub fn check_keys(table: &Table) -> String {
    let keys = list(&table.key, |c| format!("c{c}"));
    let null = table.key.iter().map(|c| format!("c{c} IS NULL")).collect::<Vec<_>>().join(" OR ");
    format!("WITH {rows}\nSELECT count(*), count(DISTINCT ROW({keys})), min(ord) FILTER (WHERE {null}) FROM r", rows = rows(table, &table.key))
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
    let compiler = Compiler { table, declaration, groups: groups(declaration) };
    if kind == Kind::Upsert {
        return compiler.upsert();
    }
    match declaration.deletes {
        Deletes::Refuse => Merge::Refused,
        Deletes::Ignore => Merge::Ignored,
        Deletes::Remove if kind == Kind::Retract && matches!(declaration.engine, Engine::PartialUpdate { .. }) => Merge::Ignored,
        Deletes::Remove if compiler.groups.is_empty() => Merge::Remove(compiler.delete_by_arrival()),
        Deletes::Remove | Deletes::Retract => Merge::Remove(compiler.delete_by_sequence(kind)),
    }
}

/// The engine's sequences as groups; the one of `deduplicate` decides over the whole row.
fn groups(declaration: &Declaration) -> Vec<Group> {
    match &declaration.engine {
        Engine::Deduplicate { sequence } if sequence.is_empty() => Vec::new(),
        Engine::Deduplicate { sequence } => vec![Group { sequence: sequence.clone(), fields: Vec::new(), remove: true }],
        Engine::PartialUpdate { groups } => groups.clone(),
    }
}

fn list<T: Copy>(items: &[T], each: impl Fn(T) -> String) -> String {
    items.iter().map(|item| each(*item)).collect::<Vec<_>>().join(", ")
}

/// The batch as typed rows with their ordinal; PostgreSQL reads the values.
fn rows(table: &Table, columns: &[usize]) -> String {
    let definitions = list(columns, |c| format!("{} {}", table.columns[c].quoted, table.columns[c].type_sql));
    let names = list(columns, |c| format!("c{c}"));
    format!("r AS MATERIALIZED (SELECT * FROM ROWS FROM (jsonb_to_recordset($1) AS ({definitions})) WITH ORDINALITY AS x ({names}, ord))")
}

struct Compiler<'a> {
    table: &'a Table,
    declaration: &'a Declaration,
    groups: Vec<Group>,
}

impl Compiler<'_> {
    fn column(&self, c: usize) -> &Column {
        &self.table.columns[c]
    }

    fn quoted(&self, c: usize) -> &str {
        &self.column(c).quoted
    }

    /// Written columns outside the key.
    fn values(&self) -> Vec<usize> {
        (0..self.table.columns.len()).filter(|c| self.column(*c).written && !self.table.key.contains(c)).collect()
    }

    /// Written columns outside key and groups: with partial-update, those that take every non-null value.
    fn free(&self) -> Vec<usize> {
        self.values().into_iter().filter(|c| !self.groups.iter().any(|g| g.sequence.contains(c) || g.fields.contains(c))).collect()
    }

    fn deduplicates(&self) -> bool {
        matches!(self.declaration.engine, Engine::Deduplicate { .. })
    }

    /// Whether the sequence `new` is not older than `old`: lexicographic, null before everything.
    fn not_older(&self, g: usize, new: impl Fn(usize, usize) -> String, old: impl Fn(usize, usize) -> String) -> String {
        let sequence = &self.groups[g].sequence;
        let mut text = String::from("true");
        for (j, c) in sequence.iter().enumerate().rev() {
            let less = self.column(*c).less.as_deref().unwrap_or("<");
            let (n, o) = (new(j, *c), old(j, *c));
            text = if text == "true" {
                format!("({o} IS NULL OR ({n} IS NOT NULL AND NOT {n} {less} {o}))")
            } else {
                format!(
                    "CASE WHEN {o} IS NULL AND {n} IS NULL THEN {text} WHEN {o} IS NULL THEN true WHEN {n} IS NULL THEN false \
                     WHEN {n} {less} {o} THEN false WHEN {o} {less} {n} THEN true ELSE {text} END"
                )
            };
        }
        format!("({text})")
    }

    /// Whether the group has a sequence in that row at all; a row without leaves the group alone. `deduplicate` takes null as the lowest sequence instead.
    fn present(&self, g: usize, name: impl Fn(usize, usize) -> String) -> String {
        if self.deduplicates() {
            return "true".into();
        }
        let parts: Vec<String> = self.groups[g].sequence.iter().enumerate().map(|(j, c)| format!("{} IS NOT NULL", name(j, *c))).collect();
        format!("({})", parts.join(" OR "))
    }

    /// `left`'s key equals `right`'s.
    fn same_key(&self, left: impl Fn(usize, usize) -> String, right: impl Fn(usize, usize) -> String) -> String {
        let each = |(place, c): (usize, &usize)| {
            let equal = self.column(*c).equal.as_deref().unwrap_or("=");
            format!("{} {equal} {}", left(place, *c), right(place, *c))
        };
        self.table.key.iter().enumerate().map(each).collect::<Vec<_>>().join(" AND ")
    }

    fn target_key_is(&self, alias: &str) -> String {
        self.same_key(|_, c| format!("t.{}", self.quoted(c)), |_, c| format!("{alias}.c{c}"))
    }

    fn tombstone_key_is(&self, alias: &str) -> String {
        self.same_key(|place, _| format!("d.k{place}"), |_, c| format!("{alias}.c{c}"))
    }

    fn keys(&self, alias: &str) -> String {
        list(&self.table.key, |c| format!("{alias}c{c}"))
    }

    /// (group, place, column) of every sequence column.
    fn sequence_places(&self) -> Vec<(usize, usize, usize)> {
        let each = |(g, group): (usize, &Group)| group.sequence.iter().enumerate().map(move |(j, c)| (g, j, *c)).collect::<Vec<_>>();
        self.groups.iter().enumerate().flat_map(each).collect()
    }

    /// `seq DESC …, ord DESC`: the winner of the group first.
    fn newest_first(&self, g: usize, alias: &str) -> String {
        let mut text = String::new();
        for c in &self.groups[g].sequence {
            let _ = write!(text, "{alias}c{c} DESC NULLS LAST, ");
        }
        format!("{text}{alias}ord DESC")
    }

    /// CTEs up to `e` (rows with the number of their key) and `h` (one row per key, the key as first written).
    fn events(&self, columns: &[usize], unique: bool) -> String {
        let rows = rows(self.table, columns);
        let keys = self.keys("");
        if unique {
            format!("{rows},\ne AS (SELECT r.*, ord AS kid FROM r),\nh AS (SELECT kid, {keys} FROM e)")
        } else {
            format!(
                "{rows},\ne AS MATERIALIZED (SELECT r.*, dense_rank() OVER (ORDER BY {keys}) AS kid FROM r),\n\
                 h AS MATERIALIZED (SELECT DISTINCT ON (kid) kid, {keys} FROM e ORDER BY kid, ord)"
            )
        }
    }

    /// CTE `b`: what is known of each key: `there`, and per sequence column `p…`, the stored row's value or else the tombstone's; `removed` of the tombstone.
    fn base(&self) -> String {
        let places = self.sequence_places();
        let stored = places.iter().map(|(g, j, c)| format!("t.{} AS p{g}_{j}", self.quoted(*c))).collect::<Vec<_>>().join(", ");
        let target =
            format!("LEFT JOIN LATERAL (SELECT true AS there, {stored} FROM {} t WHERE {}) s ON true", self.table.qualified, self.target_key_is("h"));
        let (known, tombstone) = match &self.table.tombstones {
            Some(tombstones) => (
                format!(
                    "{}, coalesce(d.removed, false) AS removed",
                    places
                        .iter()
                        .map(|(g, j, _)| format!("CASE WHEN s.there THEN s.p{g}_{j} ELSE d.s{g}_{j} END AS p{g}_{j}"))
                        .collect::<Vec<_>>()
                        .join(", ")
                ),
                format!("\n  LEFT JOIN LATERAL (SELECT * FROM {tombstones} d WHERE {}) d ON true", self.tombstone_key_is("h")),
            ),
            None => {
                (format!("{}, false AS removed", places.iter().map(|(g, j, _)| format!("s.p{g}_{j}")).collect::<Vec<_>>().join(", ")), String::new())
            }
        };
        format!("b AS MATERIALIZED (SELECT h.kid, s.there IS NOT NULL AS there, {known}\n  FROM h {target}{tombstone})")
    }

    /// CTEs `x`, `y`, `v`: the rows with `late` (every group it names is newer already, and it brings nothing else) and `dropped` (older than a deleted key's
    /// tombstone, and nothing before it in the batch brought the key back).
    fn judged(&self, columns: &[usize], unique: bool, brings: &str) -> String {
        let names = list(columns, |c| format!("e.c{c}"));
        let ranks: Vec<String> = (0..self.groups.len())
            .map(|g| {
                let order = list(&self.groups[g].sequence, |c| format!("e.c{c} NULLS FIRST"));
                format!(
                    "CASE WHEN {} THEN dense_rank() OVER (PARTITION BY e.kid ORDER BY {order}) END AS r{g}",
                    self.present(g, |_, c| format!("e.c{c}"))
                )
            })
            .collect();
        let wins: Vec<String> = (0..self.groups.len())
            .map(|g| {
                let newer_before = if unique {
                    String::new()
                } else {
                    format!(
                        " AND coalesce(x.r{g} >= max(x.r{g}) OVER (PARTITION BY x.kid ORDER BY x.ord ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true)"
                    )
                };
                format!(
                    "({} AND {}{newer_before}) AS w{g}",
                    self.present(g, |_, c| format!("x.c{c}")),
                    self.not_older(g, |_, c| format!("x.c{c}"), |j, _| format!("b.p{g}_{j}"))
                )
            })
            .collect();
        let older = self.older_than_tombstone(|c| format!("x.c{c}"), |g, j| format!("b.p{g}_{j}"));
        let any_win = (0..self.groups.len()).map(|g| format!("y.w{g}")).collect::<Vec<_>>().join(" OR ");
        let any_present = (0..self.groups.len()).map(|g| self.present(g, |_, c| format!("y.c{c}"))).collect::<Vec<_>>().join(" OR ");
        let carried = list(columns, |c| format!("y.c{c}"));
        let ranks = if unique { String::new() } else { format!(", {}", ranks.join(", ")) };
        let dropped: String = match (&older, unique) {
            (None, _) => "false".into(),
            (Some(_), true) => "y.older".into(),
            (Some(_), false) => "bool_and(y.older) OVER (PARTITION BY y.kid ORDER BY y.ord ROWS UNBOUNDED PRECEDING)".into(),
        };
        let older = older.map_or(String::from("false"), |older| format!("(b.removed AND NOT b.there AND {older})"));
        format!(
            "x AS (SELECT e.kid, e.ord, {names}{ranks} FROM e),\n\
             y AS (SELECT x.*, {wins}, {older} AS older FROM x JOIN b ON b.kid = x.kid),\n\
             v AS MATERIALIZED (SELECT y.kid, y.ord, {carried}, {dropped} AS dropped,\n  {dropped} OR (({any_present}) AND NOT ({any_win}){brings}) AS late FROM y)",
            wins = wins.join(", ")
        )
    }

    /// Whether a row is older than the delete that a tombstone remembers; none where nothing is ever removed by sequence. A row that names the deciding
    /// group is judged by it; another is older if it names groups and all of them are newer already.
    fn older_than_tombstone(&self, row: impl Fn(usize) -> String, tombstone: impl Fn(usize, usize) -> String) -> Option<String> {
        self.table.tombstones.as_ref()?;
        let deciding = self.groups.iter().position(|group| group.remove)?;
        let not_older = |g: usize| self.not_older(g, |_, c| row(c), |j, _| tombstone(g, j));
        let present = |g: usize| self.present(g, |_, c| row(c));
        if self.deduplicates() {
            return Some(format!("NOT {}", not_older(deciding)));
        }
        let others: Vec<usize> = (0..self.groups.len()).filter(|g| *g != deciding).collect();
        if others.is_empty() {
            return Some(format!("({} AND NOT {})", present(deciding), not_older(deciding)));
        }
        let named = others.iter().map(|g| present(*g)).collect::<Vec<_>>().join(" OR ");
        let newer = others.iter().map(|g| format!("({} AND {})", present(*g), not_older(*g))).collect::<Vec<_>>().join(" OR ");
        Some(format!("CASE WHEN {} THEN NOT {} ELSE ({named}) AND NOT ({newer}) END", present(deciding), not_older(deciding)))
    }

    fn upsert(&self) -> Merge {
        Merge::Upsert { unique: self.upsert_statement(true), folded: self.upsert_statement(false), after: self.revival() }
    }

    fn upsert_statement(&self, unique: bool) -> String {
        let mut columns = self.table.key.clone();
        columns.extend(self.values());
        let mut with = self.events(&columns, unique);
        let judged = !self.groups.is_empty();
        if judged {
            let free = if self.deduplicates() { Vec::new() } else { self.free() };
            let brings = if free.is_empty() { String::new() } else { format!(" AND num_nonnulls({}) = 0", list(&free, |c| format!("y.c{c}"))) };
            let _ = write!(with, ",\n{},\n{}", self.base(), self.judged(&columns, unique, &brings));
        }
        let (source, kept) = if judged { ("v", " WHERE NOT dropped") } else { ("e", "") };
        if unique {
            // A group without a sequence is left alone, also where the row is new.
            let value = |c: usize| match self.groups.iter().position(|group| group.fields.contains(&c)) {
                Some(g) => format!("CASE WHEN {} THEN c{c} END AS c{c}", self.present(g, |_, c| format!("c{c}"))),
                None => format!("c{c}"),
            };
            let _ = write!(with, ",\nf AS (SELECT kid, {names} FROM {source}{kept})", names = list(&columns, value));
        } else if self.deduplicates() {
            let order = if judged { self.newest_first(0, "v.") } else { "e.ord DESC".into() };
            let names: String = self.values().iter().map(|c| format!(", {source}.c{c}")).collect();
            let kept = if judged { " WHERE NOT v.dropped" } else { "" };
            let _ = write!(
                with,
                ",\n{first},\nf AS (SELECT DISTINCT ON ({source}.kid) {source}.kid, {keys}{names} FROM {source} JOIN k ON k.kid = {source}.kid{kept}\n  \
                 ORDER BY {source}.kid, {order})",
                first = self.first_written(source, judged),
                keys = self.keys("k."),
            );
        } else {
            with.push_str(&self.partial_fold(source, judged));
        }
        let late = if judged {
            "(SELECT count(*) FROM v WHERE late), (SELECT count(*) FROM (SELECT FROM v GROUP BY kid HAVING bool_and(late)) z)"
        } else {
            "0::bigint, 0::bigint"
        };
        let fresh = self.written();
        format!(
            "WITH {with},\nw AS ({insert}\n  RETURNING {fresh} AS fresh),\n\
             n (keys, fresh, changed, late, late_keys) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM w WHERE {is_fresh}),\n  \
             (SELECT count(*) FROM w WHERE NOT {is_fresh}), {late})\n\
             SELECT fresh, changed, 0::bigint, greatest(keys - fresh - changed - late_keys, 0), late FROM n",
            insert = self.insert(&columns),
            is_fresh = self.is_fresh(),
        )
    }

    /// What RETURNING yields to tell inserted rows from updated ones. A partitioned table cannot return system columns, so there
    /// a row counts as inserted if the statement's snapshot does not hold it.
    fn written(&self) -> String {
        if self.table.partitioned { format!("ROW({})", list(&self.table.key, |c| format!("t.{}", self.quoted(c)))) } else { "(t.xmax = 0)".into() }
    }

    fn is_fresh(&self) -> String {
        if self.table.partitioned {
            let key = list(&self.table.key, |c| format!("t.{}", self.quoted(c)));
            format!("(NOT EXISTS (SELECT FROM {} t WHERE ROW({key})::record OPERATOR(pg_catalog.=) w.fresh))", self.table.qualified)
        } else {
            "w.fresh".into()
        }
    }

    /// CTE `k`: each key as the first row that counts writes it; keys that are equal may still read differently.
    fn first_written(&self, source: &str, judged: bool) -> String {
        let kept = if judged { " WHERE NOT dropped" } else { "" };
        format!("k AS (SELECT DISTINCT ON (kid) kid, {} FROM {source}{kept} ORDER BY kid, ord)", self.keys(""))
    }

    /// CTEs `g0`, `g1`, … (the winner of each group), `u` (where each free column last had a value) and `f` (one row per key).
    fn partial_fold(&self, source: &str, judged: bool) -> String {
        let mut text = String::new();
        let mut joins = String::new();
        let mut outputs = format!("u.kid, {}", self.keys("k."));
        let kept = if judged { "NOT dropped AND " } else { "" };
        for (g, group) in self.groups.iter().enumerate() {
            let own: Vec<usize> = group.sequence.iter().chain(&group.fields).copied().collect();
            let _ = write!(
                text,
                ",\ng{g} AS (SELECT DISTINCT ON (kid) kid, {names} FROM {source} WHERE {kept}{present}\n  ORDER BY kid, {order})",
                names = list(&own, |c| format!("c{c}")),
                present = self.present(g, |_, c| format!("c{c}")),
                order = self.newest_first(g, ""),
            );
            let _ = write!(joins, "\n  LEFT JOIN g{g} ON g{g}.kid = u.kid");
            for c in &own {
                let _ = write!(outputs, ", g{g}.c{c}");
            }
        }
        let mut lasts = String::new();
        for c in self.free() {
            let _ = write!(lasts, ", max(ord) FILTER (WHERE c{c} IS NOT NULL) AS o{c}");
            let _ = write!(joins, "\n  LEFT JOIN {source} l{c} ON l{c}.ord = u.o{c}");
            let _ = write!(outputs, ", l{c}.c{c}");
        }
        let kept = if judged { " WHERE NOT dropped" } else { "" };
        let _ = write!(
            text,
            ",\n{first},\nu AS (SELECT kid{lasts} FROM {source}{kept} GROUP BY kid),\nf AS (SELECT {outputs}\n  FROM u JOIN k ON k.kid = u.kid{joins})",
            first = self.first_written(source, judged),
        );
        text
    }

    /// INSERT of the folded rows in key order, combined with the row that is there.
    fn insert(&self, columns: &[usize]) -> String {
        let names = list(columns, |c| self.quoted(c).to_string());
        let conflict = list(&self.table.key, |c| self.quoted(c).to_string());
        let head = format!(
            "INSERT INTO {table} AS t ({names})\n  SELECT {sources} FROM f ORDER BY {keys}\n  ON CONFLICT ({conflict}) DO ",
            table = self.table.qualified,
            sources = list(columns, |c| format!("f.c{c}")),
            keys = self.keys("f."),
        );
        let values = self.values();
        if values.is_empty() {
            return format!("{head}NOTHING");
        }
        let combined: Vec<(usize, String)> = values.iter().map(|c| (*c, self.combined(*c))).collect();
        let set = combined.iter().map(|(c, text)| format!("{} = {text}", self.quoted(*c))).collect::<Vec<_>>().join(",\n    ");
        let newer = if self.deduplicates() && !self.groups.is_empty() {
            format!("{} AND ", self.not_older(0, |_, c| format!("EXCLUDED.{}", self.quoted(c)), |_, c| format!("t.{}", self.quoted(c))))
        } else {
            String::new()
        };
        format!("{head}UPDATE SET\n    {set}\n  WHERE {newer}{}", self.differs(&combined))
    }

    /// Whether the row would change, byte for byte: `1.0` and `1.00` are equal and yet read differently.
    fn differs(&self, combined: &[(usize, String)]) -> String {
        let before = combined.iter().map(|(c, _)| format!("t.{}", self.quoted(*c))).collect::<Vec<_>>().join(", ");
        let after = combined.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(", ");
        format!("ROW({before})::record OPERATOR(pg_catalog.*<>) ROW({after})::record")
    }

    /// What a column becomes when its folded row meets the stored one.
    fn combined(&self, c: usize) -> String {
        let name = self.quoted(c);
        if self.deduplicates() {
            return format!("EXCLUDED.{name}");
        }
        match self.groups.iter().position(|group| group.sequence.contains(&c) || group.fields.contains(&c)) {
            None => format!("coalesce(EXCLUDED.{name}, t.{name})"),
            Some(g) => {
                let new = |_: usize, c: usize| format!("EXCLUDED.{}", self.quoted(c));
                let old = |_: usize, c: usize| format!("t.{}", self.quoted(c));
                format!("CASE WHEN {} AND {} THEN EXCLUDED.{name} ELSE t.{name} END", self.present(g, new), self.not_older(g, new, old))
            }
        }
    }

    fn revival(&self) -> Option<Revival> {
        let tombstones = self.table.tombstones.as_ref()?;
        let target = &self.table.qualified;
        let rows = rows(self.table, &self.table.key);
        let joined = format!("{} AND {}", self.target_key_is("r"), self.tombstone_key_is("r"));
        // Only a key all of whose rows are older stays dead: the merge itself judged row by row wherever it saw the tombstone.
        let mut judged: Vec<usize> = self.table.key.clone();
        judged.extend(self.sequence_places().iter().map(|(_, _, c)| *c));
        let older = |alias: &str| self.older_than_tombstone(|c| format!("{alias}.c{c}"), |g, j| format!("d.s{g}_{j}"));
        let remove = older("r").zip(older("o")).map(|(older, other_older)| {
            format!(
                "WITH {judged},\nw AS (DELETE FROM {target} t USING r, {tombstones} d WHERE {joined} AND d.removed AND {older}\n  \
                 AND NOT EXISTS (SELECT FROM r o WHERE {same} AND NOT ({other_older})) RETURNING 1)\nSELECT count(*) FROM w",
                judged = self::rows(self.table, &judged),
                same = self.target_key_is("o"),
            )
        });
        let adjust = (!self.deduplicates()).then(|| {
            let keeps = |g: usize| self.not_older(g, |_, c| format!("t.{}", self.quoted(c)), |j, _| format!("d.s{g}_{j}"));
            let mut set = Vec::new();
            for (g, group) in self.groups.iter().enumerate() {
                for (j, c) in group.sequence.iter().enumerate() {
                    let name = self.quoted(*c);
                    set.push(format!("{name} = CASE WHEN {} THEN t.{name} ELSE d.s{g}_{j} END", keeps(g)));
                }
                for c in &group.fields {
                    let name = self.quoted(*c);
                    set.push(format!("{name} = CASE WHEN {} THEN t.{name} END", keeps(g)));
                }
            }
            let all = (0..self.groups.len()).map(keeps).collect::<Vec<_>>().join(" AND ");
            format!("WITH {rows}\nUPDATE {target} t SET\n  {set}\nFROM r, {tombstones} d WHERE {joined} AND NOT ({all})", set = set.join(",\n  "))
        });
        Some(Revival {
            hit: format!("WITH {rows}\nSELECT EXISTS (SELECT FROM r, {tombstones} d, {target} t WHERE {joined})"),
            remove,
            adjust,
            forget: format!("WITH {rows}\nDELETE FROM {tombstones} d USING r, {target} t WHERE {joined}"),
        })
    }

    fn removal(&self, apply: String) -> Removal {
        let target = &self.table.qualified;
        let rows = rows(self.table, &self.table.key);
        Removal {
            absent: self.table.tombstones.as_ref().map(|_| {
                format!("WITH {rows}\nSELECT EXISTS (SELECT FROM r WHERE NOT EXISTS (SELECT FROM {target} t WHERE {}))", self.target_key_is("r"))
            }),
            lock_table: format!("LOCK TABLE {target} IN SHARE ROW EXCLUSIVE MODE"),
            lock_rows: format!(
                "WITH {rows}\nSELECT 1 FROM (SELECT DISTINCT {keys} FROM r) h JOIN {target} t ON {same} ORDER BY {order} FOR UPDATE OF t",
                keys = self.keys(""),
                same = self.target_key_is("h"),
                order = self.keys("h."),
            ),
            apply,
        }
    }

    /// A delete without a sequence removes what is there when it arrives.
    fn delete_by_arrival(&self) -> Removal {
        self.removal(format!(
            "WITH {events},\nw AS (DELETE FROM {target} t USING h WHERE {same} RETURNING 1),\n\
             n (keys, deleted) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM w))\n\
             SELECT 0::bigint, 0::bigint, deleted, greatest(keys - deleted, 0), 0::bigint FROM n",
            events = self.events(&self.table.key, false),
            target = self.table.qualified,
            same = self.target_key_is("h"),
        ))
    }

    /// A delete or retraction judged by sequence. `wins` says that the key is removed: then it starts anew from the sequences of the deleting row (and of
    /// deletes after it in the batch). Otherwise each group it is not older than is emptied and advanced.
    fn delete_by_sequence(&self, kind: Kind) -> Removal {
        let deciding = if kind == Kind::Delete || self.deduplicates() { self.groups.iter().position(|group| group.remove) } else { None };
        let places = self.sequence_places();
        let mut columns = self.table.key.clone();
        columns.extend(places.iter().map(|(_, _, c)| *c));
        let mut with = format!("{},\n{},\n{}", self.events(&columns, false), self.base(), self.judged(&columns, false, ""));
        let mut joins = String::new();
        for g in 0..self.groups.len() {
            let _ = write!(
                with,
                ",\ng{g} AS (SELECT DISTINCT ON (kid) kid, ord, {names} FROM e WHERE {present} ORDER BY kid, {order})",
                names = list(&self.groups[g].sequence, |c| format!("c{c}")),
                present = self.present(g, |_, c| format!("c{c}")),
                order = self.newest_first(g, ""),
            );
            let _ = write!(joins, " LEFT JOIN g{g} ON g{g}.kid = h.kid");
        }
        if let Some(deciding) = deciding {
            for g in 0..self.groups.len() {
                let _ = write!(
                    with,
                    ",\nn{g} AS (SELECT DISTINCT ON (e.kid) e.kid, {names} FROM e JOIN g{deciding} z ON z.kid = e.kid AND e.ord >= z.ord\n  \
                     ORDER BY e.kid, {order})",
                    names = list(&self.groups[g].sequence, |c| format!("e.c{c}")),
                    order = self.newest_first(g, "e."),
                );
                let _ = write!(joins, " LEFT JOIN n{g} ON n{g}.kid = h.kid");
            }
        }
        let advances =
            |g: usize| format!("(g{g}.kid IS NOT NULL AND {})", self.not_older(g, |_, c| format!("g{g}.c{c}"), |j, _| format!("b.p{g}_{j}")));
        let wins = deciding.map_or(String::from("false"), advances);
        let mut outputs = format!("h.kid, {}, b.there, b.removed, {wins} AS wins", self.keys("h."));
        for g in 0..self.groups.len() {
            let _ = write!(outputs, ", {} AS a{g}", advances(g));
        }
        for (g, j, c) in &places {
            let kept = format!("CASE WHEN {} THEN g{g}.c{c} ELSE b.p{g}_{j} END", advances(*g));
            match deciding {
                Some(_) => {
                    let _ = write!(outputs, ", CASE WHEN {wins} THEN n{g}.c{c} ELSE {kept} END AS s{g}_{j}");
                }
                None => {
                    let _ = write!(outputs, ", {kept} AS s{g}_{j}");
                }
            }
        }
        let _ = write!(with, ",\nf AS MATERIALIZED (SELECT {outputs}\n  FROM h JOIN b ON b.kid = h.kid{joins})");

        let target = &self.table.qualified;
        let same = self.target_key_is("f");
        let _ = write!(with, ",\ndel AS (DELETE FROM {target} t USING f WHERE {same} AND f.wins RETURNING 1)");
        let updated = if self.deduplicates() {
            "0::bigint".to_string()
        } else {
            let mut combined = Vec::new();
            for (g, group) in self.groups.iter().enumerate() {
                for (j, c) in group.sequence.iter().enumerate() {
                    combined.push((*c, format!("CASE WHEN f.a{g} THEN f.s{g}_{j} ELSE t.{} END", self.quoted(*c))));
                }
                for c in &group.fields {
                    combined.push((*c, format!("CASE WHEN NOT f.a{g} THEN t.{} END", self.quoted(*c))));
                }
            }
            let set = combined.iter().map(|(c, text)| format!("{} = {text}", self.quoted(*c))).collect::<Vec<_>>().join(",\n    ");
            let _ = write!(
                with,
                ",\nupd AS (UPDATE {target} t SET\n    {set}\n  FROM f WHERE {same} AND NOT f.wins AND {differs} RETURNING 1)",
                differs = self.differs(&combined)
            );
            "(SELECT count(*) FROM upd)".to_string()
        };
        if let Some(tombstones) = &self.table.tombstones {
            let keys = (0..self.table.key.len()).map(|place| format!("k{place}")).collect::<Vec<_>>().join(", ");
            let sequences = places.iter().map(|(g, j, _)| format!("s{g}_{j}")).collect::<Vec<_>>();
            let set = sequences.iter().map(|name| format!("{name} = EXCLUDED.{name}")).collect::<Vec<_>>().join(", ");
            let compare = |of: &str| sequences.iter().map(|name| format!("{of}.{name}")).collect::<Vec<_>>().join(", ");
            let any = (0..self.groups.len()).map(|g| format!("f.a{g}")).collect::<Vec<_>>().join(" OR ");
            let _ = write!(
                with,
                ",\ntomb AS (INSERT INTO {tombstones} AS d ({keys}, {names}, removed)\n  \
                 SELECT {key_values}, {values}, f.wins OR f.removed FROM f WHERE f.wins OR (NOT f.there AND ({any})) ORDER BY {order}\n  \
                 ON CONFLICT ({keys}) DO UPDATE SET {set}, removed = EXCLUDED.removed\n  \
                 WHERE ROW({before}, d.removed)::record OPERATOR(pg_catalog.*<>) ROW({after}, EXCLUDED.removed)::record)",
                names = sequences.join(", "),
                key_values = self.keys("f."),
                values = compare("f"),
                order = self.keys("f."),
                before = compare("d"),
                after = compare("EXCLUDED"),
            );
        }
        self.removal(format!(
            "WITH {with},\nn (keys, deleted, updated, late, late_keys) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM del), {updated},\n  \
             (SELECT count(*) FROM v WHERE late), (SELECT count(*) FROM (SELECT FROM v GROUP BY kid HAVING bool_and(late)) z))\n\
             SELECT 0::bigint, updated, deleted, greatest(keys - updated - deleted - late_keys, 0), late FROM n"
        ))
    }
}
