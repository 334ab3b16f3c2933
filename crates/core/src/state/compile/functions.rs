//! The aggregate functions in SQL: what one row brings (`lift`), how that meets the stored value (`met`, `withdrawn`), and what the rows of a key amount to
//! before they meet it (`gathered`).
//!
//! A row that is older than the stored one in its sequence group meets it from the other side (Paimon's `aggReversed`). Where the two sides differ, what the
//! rows of a batch amount to depends on the stored sequence, which is only known once the row is locked: such columns are merged in rounds, one row of each
//! key at a time, and never folded beforehand.

use super::{Compiler, Kind};
use crate::sql::literal;
use crate::state::Family;
use crate::state::declare::Engine;
use crate::state::fields::Function;
use std::fmt::Write;

/// What the rows of each key amount to: CTEs, joins to the CTE `u` (one row per key), and where to read each column.
pub(super) struct Gathered {
    pub(super) with: String,
    pub(super) joins: String,
    pub(super) values: Vec<(usize, String)>,
}

impl Compiler<'_> {
    /// The function of a value column; without one of its own, a column in a group takes the newest row's value and another every value that is not null.
    pub(super) fn function(&self, c: usize) -> &Function {
        match self.declaration.fields.get(c).and_then(|field| field.function.as_ref()) {
            Some(function) => function,
            None if self.group_of(c).is_some() => &Function::LastValue,
            None => &Function::LastNonNullValue,
        }
    }

    /// Whether a retraction leaves the column alone. Columns outside groups and without a function are so by nature: nobody says whose value it was.
    pub(super) fn unretracted(&self, c: usize) -> bool {
        let field = self.declaration.fields.get(c);
        field.is_some_and(|field| field.ignore_retract) || (field.is_none_or(|field| field.function.is_none()) && self.group_of(c).is_none())
    }

    /// Whether the column has a function of its own or stands in a group.
    fn unplain(&self, c: usize) -> bool {
        self.group_of(c).is_some() || self.declaration.fields.get(c).is_some_and(|field| field.function.is_some())
    }

    /// The group whose fields hold the column.
    pub(super) fn group_of(&self, c: usize) -> Option<usize> {
        self.groups.iter().position(|group| group.fields.contains(&c))
    }

    /// Value columns that are no sequence.
    pub(super) fn merged(&self) -> Vec<usize> {
        self.values().into_iter().filter(|c| !self.groups.iter().any(|group| group.sequence.contains(c))).collect()
    }

    /// Whether a batch in which keys come again can be folded before it meets the table.
    pub(super) fn folds(&self, kind: Kind) -> bool {
        if matches!(self.declaration.engine, Engine::Deduplicate { .. } | Engine::FirstRow) {
            return true;
        }
        self.merged().into_iter().all(|c| {
            let (function, column) = (self.function(c), self.column(c));
            let in_group = self.group_of(c).is_some();
            match kind {
                // Rows that a tombstone rules out must not be counted, and the tombstone may only come to light once the row is locked.
                Kind::Upsert if self.table.tombstones.is_some() && self.unplain(c) => *function == Function::LastValue && in_group,
                Kind::Upsert if in_group => *function == Function::LastValue || function.commutes(column),
                Kind::Upsert => function.folds(column),
                Kind::Delete | Kind::Retract => self.unretracted(c) || !(in_group && *function == Function::LastNonNullValue),
            }
        })
    }

    /// What one row brings to a column.
    pub(super) fn lift(&self, c: usize, kind: Kind, value: &str) -> String {
        let bare = &self.column(c).bare;
        let sign = if kind == Kind::Upsert { "1" } else { "-1" };
        match self.function(c) {
            Function::Sum if kind != Kind::Upsert => format!("CAST(CAST('0' AS {bare}) - {value} AS {bare})"),
            Function::Count => format!("CAST(CASE WHEN {value} IS NULL THEN 0 ELSE {sign} END AS {bare})"),
            Function::Listagg { .. } => format!("CASE WHEN {value} ~ '[^[:space:]]' THEN {value} END"),
            Function::Collect { distinct: false } => {
                format!("CASE WHEN array_ndims({value}) > 1 THEN ARRAY(SELECT q.x FROM unnest({value}) q (x)) ELSE {value} END")
            }
            Function::Collect { distinct: true } => distinct_elements(value),
            // jsonb_each refuses what is no object.
            Function::MergeMap if self.column(c).family == Family::Jsonb => format!(
                "CASE WHEN jsonb_typeof({value}) = 'object' THEN {value} ELSE (SELECT jsonb_object_agg(q.k, q.x) FROM jsonb_each({value}) q (k, x)) END"
            ),
            Function::NestedUpdate { key, sequence, limit } => nested(value, key, sequence, *limit),
            _ => value.to_string(),
        }
    }

    /// As [`Compiler::lift`], and nothing where the row leaves the column's group alone.
    pub(super) fn lifted(&self, c: usize, kind: Kind, row: impl Fn(usize) -> String) -> String {
        let lift = self.lift(c, kind, &row(c));
        match self.group_of(c).map(|g| self.present(g, |_, c| row(c))) {
            None => lift,
            Some(present) if present == "true" => lift,
            Some(present) if *self.function(c) == Function::Count => format!("CASE WHEN {present} THEN {lift} ELSE 0 END"),
            Some(present) => format!("CASE WHEN {present} THEN {lift} END"),
        }
    }

    /// What the stored value `t` of a column and a newer one `e` make, where no sequence stands in between.
    fn joined(&self, c: usize, t: &str, e: &str) -> String {
        let column = self.column(c);
        let less = column.less.as_deref().unwrap_or("<");
        let typed = |text: String| format!("CAST({text} AS {})", column.bare);
        let union = |schema: &str| typed(format!("coalesce({t} OPERATOR({schema}.||) {e}, {t}, {e})"));
        match self.function(c) {
            Function::FirstValue => t.to_string(),
            Function::FirstNonNullValue => format!("coalesce({t}, {e})"),
            Function::LastValue => e.to_string(),
            Function::LastNonNullValue => format!("coalesce({e}, {t})"),
            Function::Sum => typed(format!("coalesce({t} + {e}, {t}, {e})")),
            Function::Product => typed(format!("coalesce({t} * {e}, {t}, {e})")),
            Function::Count => typed(format!("coalesce({t}, 0) + coalesce({e}, 0)")),
            Function::Max => format!("CASE WHEN {t} IS NULL OR {t} {less} {e} THEN {e} ELSE {t} END"),
            Function::Min => format!("CASE WHEN {t} IS NULL OR {e} {less} {t} THEN {e} ELSE {t} END"),
            Function::BoolAnd => typed(format!("coalesce({t}, {e}) AND coalesce({e}, {t})")),
            Function::BoolOr => typed(format!("coalesce({t}, {e}) OR coalesce({e}, {t})")),
            Function::Listagg { separator, distinct } => {
                let separator = literal(separator);
                let more = if *distinct { other_parts(t, e, &separator) } else { format!("{separator} || {e}") };
                typed(format!("CASE WHEN {t} IS NULL THEN {e} WHEN {e} IS NULL THEN {t} ELSE {t} || {more} END"))
            }
            Function::Collect { distinct: false } => typed(format!("coalesce({t} || {e}, {t}, {e})")),
            Function::Collect { distinct: true } => {
                typed(format!("CASE WHEN {e} IS NULL THEN {t} ELSE {} END", distinct_elements(&format!("({t} || {e})"))))
            }
            Function::MergeMap if column.family == Family::Jsonb => typed(format!("coalesce({t} || {e}, {t}, {e})")),
            Function::MergeMap | Function::HllUnion => union(&column.schema),
            Function::NestedUpdate { key, sequence, limit } => {
                let all = nested(&format!("({t} || {e})"), key, sequence, *limit);
                typed(format!("CASE WHEN {t} IS NULL THEN {e} WHEN {e} IS NULL THEN {t} ELSE {all} END"))
            }
        }
    }

    /// What a column becomes when its folded rows, in EXCLUDED, meet the stored row `t`.
    pub(super) fn met(&self, c: usize) -> String {
        let name = self.quoted(c);
        let (e, t) = (format!("EXCLUDED.{name}"), format!("t.{name}"));
        if self.column(c).null_sets {
            // EXCLUDED holds columns of the table only, so which keys were told their null is looked up.
            let told = self.same_key(|_, k| format!("f.c{k}"), |_, k| format!("EXCLUDED.{}", self.quoted(k)));
            return format!("CASE WHEN {e} IS NULL AND NOT EXISTS (SELECT FROM f WHERE f.h{c} AND {told}) THEN {t} ELSE {e} END");
        }
        let Some(g) = self.group_of(c) else { return self.joined(c, &t, &e) };
        let new = |_: usize, c: usize| format!("EXCLUDED.{}", self.quoted(c));
        let old = |_: usize, c: usize| format!("t.{}", self.quoted(c));
        let (present, newer) = (self.present(g, new), self.not_older(g, new, old));
        match self.function(c) {
            Function::LastValue => format!("CASE WHEN {present} AND {newer} THEN {e} ELSE {t} END"),
            // The first row of the group is the first, and then each that is older than the newest so far.
            Function::FirstValue => format!("CASE WHEN {present} AND NOT ({newer} AND {}) THEN {e} ELSE {t} END", self.present(g, old)),
            function if function.commutes(self.column(c)) || matches!(function, Function::Collect { .. }) => self.joined(c, &t, &e),
            _ => format!("CASE WHEN NOT {present} THEN {t} WHEN {newer} THEN {} ELSE {} END", self.joined(c, &t, &e), self.joined(c, &e, &t)),
        }
    }

    /// What a column becomes when the retracted rows, gathered in `e`, are taken from the stored row `t`; `newer` says whether they are not older than it in
    /// the column's group.
    pub(super) fn withdrawn(&self, c: usize, newer: &str, e: &str) -> String {
        let t = format!("t.{}", self.quoted(c));
        if self.unretracted(c) {
            return t;
        }
        let typed = |text: String| format!("CAST({text} AS {})", self.column(c).bare);
        match self.function(c) {
            Function::LastValue => format!("CASE WHEN NOT {newer} THEN {t} END"),
            Function::LastNonNullValue => format!("CASE WHEN NOT ({newer} AND {e} IS NOT NULL) THEN {t} END"),
            Function::Collect { .. } => typed(without_elements(&t, e)),
            Function::NestedUpdate { key, .. } if key.is_empty() => without_rows(&t, e),
            Function::NestedUpdate { key, .. } => without_keys(&t, e, key),
            _ => self.joined(c, &t, e),
        }
    }

    /// What the rows of each key in `source` amount to, in columns `columns`; `kept` filters rows and is empty or ends with ` AND `.
    pub(super) fn gathered(&self, source: &str, kept: &str, kind: Kind, columns: &[usize]) -> Gathered {
        let (mut aggregates, mut with, mut joins, mut values) = (String::new(), String::new(), String::new(), Vec::new());
        let filter = |c: usize, and: &str| {
            let present = self.group_of(c).map_or(String::from("true"), |g| self.present(g, |_, c| format!("{source}.c{c}")));
            format!("{present}{and}")
        };
        for c in columns.iter().copied() {
            let (v, bare) = (format!("{source}.c{c}"), &self.column(c).bare);
            let (any, given) = (filter(c, ""), filter(c, &format!(" AND {v} IS NOT NULL")));
            let pick = |place: String| format!(", {place} AS o{c}");
            let aggregate = |text: String| format!(", {text} AS a{c}");
            let function = self.function(c);
            // Of a retraction only what its function subtracts is asked for, and else whether there was a value.
            let told = match (kind, function) {
                (Kind::Upsert, _) | (_, Function::Sum | Function::Count | Function::Collect { .. } | Function::NestedUpdate { .. }) => function,
                _ => &Function::LastNonNullValue,
            };
            let text = match told {
                Function::FirstValue => pick(format!("min({source}.ord) FILTER (WHERE {any})")),
                Function::FirstNonNullValue => pick(format!("min({source}.ord) FILTER (WHERE {given})")),
                Function::LastValue => pick(format!("max({source}.ord) FILTER (WHERE {any})")),
                Function::Max => pick(format!("(array_agg({source}.ord ORDER BY {v} DESC, {source}.ord) FILTER (WHERE {given}))[1]")),
                Function::Min => pick(format!("(array_agg({source}.ord ORDER BY {v}, {source}.ord) FILTER (WHERE {given}))[1]")),
                Function::Sum => aggregate(format!("CAST(sum({}) FILTER (WHERE {any}) AS {bare})", self.lift(c, kind, &v))),
                Function::Count => aggregate(format!("CAST(coalesce(sum({}) FILTER (WHERE {any}), 0) AS {bare})", self.lift(c, kind, &v))),
                Function::BoolAnd => aggregate(format!("CAST(bool_and({v}) FILTER (WHERE {any}) AS {bare})")),
                Function::BoolOr => aggregate(format!("CAST(bool_or({v}) FILTER (WHERE {any}) AS {bare})")),
                Function::HllUnion => aggregate(format!("{}.hll_union_agg({v}) FILTER (WHERE {any})", self.column(c).schema)),
                Function::Listagg { separator, .. } => aggregate(format!(
                    "CAST(string_agg({v}, {} ORDER BY {source}.ord) FILTER (WHERE {any} AND {v} ~ '[^[:space:]]') AS {bare})",
                    literal(separator)
                )),
                Function::Collect { .. } | Function::MergeMap | Function::NestedUpdate { .. } => {
                    let (elements, all) = match told {
                        Function::Collect { .. } => {
                            ("unnest", String::from("coalesce(array_agg(q.x ORDER BY s.ord, q.n) FILTER (WHERE q.n IS NOT NULL), '{}')"))
                        }
                        Function::MergeMap => {
                            ("jsonb_each", String::from("coalesce(jsonb_object_agg(q.k, q.x ORDER BY s.ord) FILTER (WHERE q.k IS NOT NULL), '{}')"))
                        }
                        _ => (
                            "jsonb_array_elements",
                            String::from("coalesce(jsonb_agg(q.x ORDER BY s.ord, q.n) FILTER (WHERE q.n IS NOT NULL), '[]')"),
                        ),
                    };
                    let names = if elements == "jsonb_each" { "k, x, n" } else { "x, n" };
                    let _ = write!(
                        with,
                        ",\nj{c} AS (SELECT w.kid, CAST({lift} AS {bare}) AS v FROM (SELECT s.kid, {all} AS v FROM (SELECT * FROM {source} WHERE {kept}{given}) s\n  \
                         LEFT JOIN LATERAL {elements}(s.c{c}) WITH ORDINALITY q ({names}) ON true GROUP BY s.kid) w)",
                        lift = self.gathered_lift(c, kind),
                    );
                    let _ = write!(joins, "\n  LEFT JOIN j{c} ON j{c}.kid = u.kid");
                    values.push((c, format!("j{c}.v")));
                    continue;
                }
                Function::LastNonNullValue if self.column(c).null_sets => pick(format!("max({source}.ord) FILTER (WHERE {source}.h{c})")),
                // Products are merged in rounds.
                Function::LastNonNullValue | Function::Product => pick(format!("max({source}.ord) FILTER (WHERE {given})")),
            };
            if text.ends_with(&format!(" AS o{c}")) {
                let _ = write!(joins, "\n  LEFT JOIN {source} l{c} ON l{c}.ord = u.o{c}");
                values.push((c, format!("l{c}.c{c}")));
            } else {
                values.push((c, format!("u.a{c}")));
            }
            aggregates.push_str(&text);
        }
        let kept = kept.strip_suffix(" AND ").map_or(String::new(), |kept| format!(" WHERE {kept}"));
        let with = format!(",\nu AS (SELECT kid{aggregates} FROM {source}{kept} GROUP BY kid){with}");
        Gathered { with, joins, values }
    }

    /// The elements of all rows as one row would bring them; a retraction takes them as they are.
    fn gathered_lift(&self, c: usize, kind: Kind) -> String {
        match self.function(c) {
            Function::Collect { distinct: false } | Function::MergeMap => String::from("w.v"),
            Function::NestedUpdate { .. } if kind != Kind::Upsert => String::from("w.v"),
            _ => self.lift(c, kind, "w.v"),
        }
    }
}

/// Each element of an array once, where it stands first.
fn distinct_elements(array: &str) -> String {
    format!(
        "CASE WHEN {array} IS NOT NULL THEN ARRAY(SELECT q.x FROM (SELECT DISTINCT ON (p.x) p.x, p.n FROM unnest({array}) WITH ORDINALITY p (x, n) \
         ORDER BY p.x, p.n) q ORDER BY q.n) END"
    )
}

/// The array `all` without one equal element, the first, for each element of `gone`.
fn without_elements(all: &str, gone: &str) -> String {
    format!(
        "CASE WHEN {all} IS NOT NULL THEN ARRAY(SELECT q.x FROM ({}) q WHERE q.n > 0 AND q.place > 2 * q.gone ORDER BY q.n) END",
        placed(&format!("unnest({all})"), &format!("unnest({gone})"))
    )
}

fn without_rows(all: &str, gone: &str) -> String {
    format!(
        "CASE WHEN {all} IS NOT NULL THEN coalesce((SELECT jsonb_agg(q.x ORDER BY q.n) FROM ({}) q WHERE q.n > 0 AND q.place > 2 * q.gone), '[]') END",
        placed(&format!("jsonb_array_elements({all})"), &format!("jsonb_array_elements({gone})"))
    )
}

/// Elements with `place`, counted among equals with those to be removed first, and how many of them are to be removed.
fn placed(all: &str, gone: &str) -> String {
    format!(
        "SELECT p.x, p.n, row_number() OVER (PARTITION BY p.x ORDER BY p.n) AS place, count(*) FILTER (WHERE p.n < 0) OVER (PARTITION BY p.x) AS gone \
         FROM (SELECT x, n FROM {all} WITH ORDINALITY a (x, n) UNION ALL SELECT x, -n FROM {gone} WITH ORDINALITY g (x, n)) p"
    )
}

fn nested_key(names: &[String], row: &str) -> String {
    let fields: Vec<String> = names.iter().map(|name| format!("{row} -> {}", literal(name))).collect();
    format!("jsonb_build_array({})", fields.join(", "))
}

fn without_keys(all: &str, gone: &str, key: &[String]) -> String {
    format!(
        "CASE WHEN {gone} IS NULL THEN {all} WHEN {all} IS NOT NULL THEN coalesce((SELECT jsonb_agg(p.x ORDER BY p.n) \
         FROM jsonb_array_elements({all}) WITH ORDINALITY p (x, n) \
         WHERE {} <> ALL (SELECT {} FROM jsonb_array_elements({gone}) g (x))), '[]') END",
        nested_key(key, "p.x"),
        nested_key(key, "g.x")
    )
}

/// A nested table in order: of the rows of one key the newest, where the key stands first.
fn nested(array: &str, key: &[String], sequence: &[String], limit: Option<u32>) -> String {
    let limit = limit.map_or(String::new(), |limit| format!(" LIMIT {limit}"));
    let rows = format!("jsonb_array_elements({array}) WITH ORDINALITY p (x, n) WHERE jsonb_typeof(p.x) <> 'null'");
    let rows = if key.is_empty() {
        format!("SELECT p.x, p.n AS place FROM {rows}")
    } else {
        let newest: String = sequence.iter().map(|name| format!("coalesce(q.x -> {}, 'null') DESC, ", literal(name))).collect();
        format!(
            "SELECT DISTINCT ON (q.key) q.x, min(q.n) OVER (PARTITION BY q.key) AS place FROM (SELECT p.x, p.n, {key} AS key FROM {rows}) q \
             ORDER BY q.key, {newest}q.n DESC",
            key = nested_key(key, "p.x")
        )
    };
    format!(
        "CASE WHEN {array} IS NOT NULL THEN coalesce((SELECT jsonb_agg(k.x ORDER BY k.place) FROM (SELECT * FROM ({rows}) r ORDER BY r.place{limit}) k), '[]') END"
    )
}

/// The parts of `new` that are not in `old` yet, each once and after a separator.
fn other_parts(old: &str, new: &str, separator: &str) -> String {
    format!(
        "coalesce((SELECT string_agg({separator} || q.x, '' ORDER BY q.n) FROM (SELECT p.x, min(p.n) AS n \
         FROM unnest(string_to_array({new}, {separator})) WITH ORDINALITY p (x, n) \
         WHERE p.x ~ '[^[:space:]]' AND p.x <> ALL (string_to_array({old}, {separator})) GROUP BY p.x) q), '')"
    )
}
