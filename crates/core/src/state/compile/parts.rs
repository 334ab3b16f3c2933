//! The pieces that the statements are made of.

use super::{Compiler, list};
use crate::state::declare::{Engine, Group};
use crate::state::{Column, Table};
use std::fmt::Write;

/// `left`'s key equals `right`'s.
pub(super) fn same_key(table: &Table, left: impl Fn(usize, usize) -> String, right: impl Fn(usize, usize) -> String) -> String {
    let each = |(place, c): (usize, &usize)| {
        let equal = table.columns[*c].equal.as_deref().unwrap_or("=");
        format!("{} {equal} {}", left(place, *c), right(place, *c))
    };
    table.key.iter().enumerate().map(each).collect::<Vec<_>>().join(" AND ")
}

impl Compiler<'_> {
    pub(super) fn column(&self, c: usize) -> &Column {
        &self.table.columns[c]
    }

    pub(super) fn quoted(&self, c: usize) -> &str {
        &self.column(c).quoted
    }

    /// Written columns outside the key.
    pub(super) fn values(&self) -> Vec<usize> {
        (0..self.table.columns.len()).filter(|c| self.column(*c).written && !self.table.key.contains(c)).collect()
    }

    /// Whether rows replace each other whole.
    pub(super) fn deduplicates(&self) -> bool {
        matches!(self.declaration.engine, Engine::Deduplicate { .. })
    }

    /// Whether rows are kept or replaced whole, never column by column.
    pub(super) fn keeps_whole_rows(&self) -> bool {
        matches!(self.declaration.engine, Engine::Deduplicate { .. } | Engine::FirstRow)
    }

    /// Whether the sequence `new` is not older than `old`: lexicographic, null before everything.
    pub(super) fn not_older(&self, g: usize, new: impl Fn(usize, usize) -> String, old: impl Fn(usize, usize) -> String) -> String {
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

    /// Whether the group has a sequence in that row at all; a row without leaves the group alone. A sequence of the whole row takes null as its lowest value
    /// instead.
    pub(super) fn present(&self, g: usize, name: impl Fn(usize, usize) -> String) -> String {
        if !matches!(self.declaration.engine, Engine::PartialUpdate { .. }) {
            return "true".into();
        }
        let parts: Vec<String> = self.groups[g].sequence.iter().enumerate().map(|(j, c)| format!("{} IS NOT NULL", name(j, *c))).collect();
        format!("({})", parts.join(" OR "))
    }

    pub(super) fn same_key(&self, left: impl Fn(usize, usize) -> String, right: impl Fn(usize, usize) -> String) -> String {
        same_key(self.table, left, right)
    }

    pub(super) fn target_key_is(&self, alias: &str) -> String {
        self.same_key(|_, c| format!("t.{}", self.quoted(c)), |_, c| format!("{alias}.c{c}"))
    }

    pub(super) fn tombstone_key_is(&self, alias: &str) -> String {
        self.same_key(|place, _| format!("d.k{place}"), |_, c| format!("{alias}.c{c}"))
    }

    pub(super) fn keys(&self, alias: &str) -> String {
        list(&self.table.key, |c| format!("{alias}c{c}"))
    }

    /// (group, place, column) of every sequence column.
    pub(super) fn sequence_places(&self) -> Vec<(usize, usize, usize)> {
        let each = |(g, group): (usize, &Group)| group.sequence.iter().enumerate().map(move |(j, c)| (g, j, *c)).collect::<Vec<_>>();
        self.groups.iter().enumerate().flat_map(each).collect()
    }

    /// `seq DESC …, ord DESC`: the winner of the group first.
    pub(super) fn newest_first(&self, g: usize, alias: &str) -> String {
        let mut text = String::new();
        for c in &self.groups[g].sequence {
            let _ = write!(text, "{alias}c{c} DESC NULLS LAST, ");
        }
        format!("{text}{alias}ord DESC")
    }

    /// Whether the row would change, byte for byte: `1.0` and `1.00` are equal and yet read differently.
    pub(super) fn differs(&self, combined: &[(usize, String)]) -> String {
        let before = combined.iter().map(|(c, _)| format!("t.{}", self.quoted(*c))).collect::<Vec<_>>().join(", ");
        let after = combined.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(", ");
        format!("ROW({before})::record OPERATOR(pg_catalog.*<>) ROW({after})::record")
    }
}
