//! Rows are deleted or withdrawn.

use super::{Compiler, Kind, Removal, list, rows};
use std::fmt::Write;

impl Compiler<'_> {
    fn removal(&self, apply: String) -> Removal {
        let target = &self.table.qualified;
        let rows = rows(self.table, &self.table.key);
        Removal {
            absent: self
                .table
                .tombstones
                .as_ref()
                .map(|_| format!("WITH {rows}\nSELECT count(*) FROM r WHERE NOT EXISTS (SELECT FROM {target} t WHERE {})", self.target_key_is("r"))),
            apply,
        }
    }

    /// A delete without a sequence removes what is there when it arrives.
    pub(super) fn delete_by_arrival(&self) -> Removal {
        self.removal(format!(
            "WITH {events},\nw AS (DELETE FROM {target} t USING h WHERE {same} RETURNING 1),\n\
             n (keys, deleted) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM w))\n\
             SELECT 0::bigint, 0::bigint, deleted, greatest(keys - deleted, 0), 0::bigint FROM n",
            events = self.events(&self.table.key),
            target = self.table.qualified,
            same = self.target_key_is("h"),
        ))
    }

    /// A delete or retraction judged by sequence. `wins` says that the key is removed: then it starts anew from the sequences of the deleting row (and of
    /// deletes after it in the batch). Otherwise each group it is not older than is emptied and advanced.
    pub(super) fn delete_by_sequence(&self, kind: Kind) -> Removal {
        let deciding = if kind == Kind::Delete || self.deduplicates() { self.groups.iter().position(|group| group.remove) } else { None };
        let places = self.sequence_places();
        let mut columns = self.table.key.clone();
        columns.extend(places.iter().map(|(_, _, c)| *c));
        let mut with = format!("{},\n{},\n{}", self.events(&columns), self.base(), self.judged(&columns, ""));
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
