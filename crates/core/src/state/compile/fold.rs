//! What the batch amounts to per key, and which of its rows came too late.

use super::{Compiler, list, rows};

impl Compiler<'_> {
    /// CTEs `r` (the batch), `e` (with the number of its key) and `h` (one row per key).
    pub(super) fn events(&self, columns: &[usize]) -> String {
        format!(
            "{rows},\ne AS MATERIALIZED (SELECT r.*, dense_rank() OVER (ORDER BY {keys}) AS kid FROM r),\n\
             h AS MATERIALIZED (SELECT DISTINCT ON (kid) kid, {keys} FROM e ORDER BY kid, ord)",
            rows = rows(self.table, columns),
            keys = self.keys(""),
        )
    }

    /// CTE `b`: what is known of each key: `there`, and per sequence column `p…`, the stored row's value or else the tombstone's; `removed` of the tombstone.
    pub(super) fn base(&self) -> String {
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
    pub(super) fn judged(&self, columns: &[usize], brings: &str) -> String {
        let names = self.carried(columns, "e");
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
                let newer_before = format!("max(x.r{g}) OVER (PARTITION BY x.kid ORDER BY x.ord ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)");
                format!(
                    "({} AND {} AND coalesce(x.r{g} >= {newer_before}, true)) AS w{g}",
                    self.present(g, |_, c| format!("x.c{c}")),
                    self.not_older(g, |_, c| format!("x.c{c}"), |j, _| format!("b.p{g}_{j}"))
                )
            })
            .collect();
        let older = self.older_than_tombstone(|c| format!("x.c{c}"), |g, j| format!("b.p{g}_{j}"));
        let any_win = (0..self.groups.len()).map(|g| format!("y.w{g}")).collect::<Vec<_>>().join(" OR ");
        let any_present = (0..self.groups.len()).map(|g| self.present(g, |_, c| format!("y.c{c}"))).collect::<Vec<_>>().join(" OR ");
        let carried = self.carried(columns, "y");
        let ranks = ranks.join(", ");
        let dropped = match older {
            None => "false",
            Some(_) => "bool_and(y.older) OVER (PARTITION BY y.kid ORDER BY y.ord ROWS UNBOUNDED PRECEDING)",
        };
        let older = older.map_or(String::from("false"), |older| format!("(b.removed AND NOT b.there AND {older})"));
        format!(
            "x AS (SELECT e.kid, e.ord, {names}, {ranks} FROM e),\n\
             y AS (SELECT x.*, {wins}, {older} AS older FROM x JOIN b ON b.kid = x.kid),\n\
             v AS MATERIALIZED (SELECT y.kid, y.ord, {carried}, {dropped} AS dropped,\n  {dropped} OR (({any_present}) AND NOT ({any_win}){brings}) AS late FROM y)",
            wins = wins.join(", ")
        )
    }

    /// The columns of a row, and which of them it names where that counts.
    fn carried(&self, columns: &[usize], alias: &str) -> String {
        list(columns, |c| if self.column(c).null_sets { format!("{alias}.c{c}, {alias}.h{c}") } else { format!("{alias}.c{c}") })
    }

    /// Whether a row is older than the delete that a tombstone remembers; none where nothing is ever removed by sequence. A row that names the deciding
    /// group is judged by it; another is older if it names groups and all of them are newer already.
    pub(super) fn older_than_tombstone(&self, row: impl Fn(usize) -> String, tombstone: impl Fn(usize, usize) -> String) -> Option<String> {
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
}
