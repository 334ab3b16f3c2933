//! Rows are deleted or withdrawn.

use super::{Compiler, Kind, Removal, list};
use crate::state::fields::Function;
use std::fmt::Write;

impl Compiler<'_> {
    fn removal(&self, kind: Kind, apply: String) -> Removal {
        Removal { owe: self.declaration.owes().then(|| self.owe(kind)), apply, folds: self.folds(kind) }
    }

    /// Rows for the keys that have none, neutral in every column that subtracts something: the removal then finds them.
    fn owe(&self, kind: Kind) -> String {
        let subtracting: Vec<usize> =
            self.merged().into_iter().filter(|c| !self.unretracted(*c) && matches!(self.function(*c), Function::Sum | Function::Count)).collect();
        let columns: Vec<usize> = self.key_and(&self.inputs_of(&subtracting));
        let gathered = self.gathered("e", "", kind, &subtracting);
        let neutral: String = gathered
            .values
            .iter()
            .map(|(c, value)| {
                let zero = format!("CAST('0' AS {})", self.column(*c).bare);
                format!(", CASE WHEN {value} IS NOT NULL THEN {zero} END")
            })
            .collect();
        let named: String = subtracting.iter().map(|c| format!(", {}", self.quoted(*c))).collect();
        format!(
            "WITH {events}{with}\nINSERT INTO {target} AS t ({names}{named})\n  SELECT {keys}{neutral} FROM h JOIN u ON u.kid = h.kid{joins}\n  \
             WHERE NOT EXISTS (SELECT FROM {target} t WHERE {same}) ORDER BY {keys}\n  ON CONFLICT ({names}) DO NOTHING",
            events = self.events(&columns),
            with = gathered.with,
            target = self.table.qualified,
            names = list(&self.table.key, |c| self.quoted(c).to_string()),
            keys = self.keys("h."),
            joins = gathered.joins,
            same = self.target_key_is("h"),
        )
    }

    /// The columns, and the sequences by which their groups are named in a row.
    fn inputs_of(&self, columns: &[usize]) -> Vec<usize> {
        let mut all = columns.to_vec();
        for g in columns.iter().filter_map(|c| self.group_of(*c)) {
            all.extend(self.groups[g].sequence.iter().filter(|c| !columns.contains(c)));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    fn key_and(&self, columns: &[usize]) -> Vec<usize> {
        self.table.key.iter().chain(columns).copied().collect()
    }

    /// The columns whose values a retraction takes back.
    fn taken_back(&self) -> Vec<usize> {
        if self.keeps_whole_rows() { Vec::new() } else { self.merged().into_iter().filter(|c| !self.unretracted(*c)).collect() }
    }

    /// A retraction where no sequence judges it.
    pub(super) fn withdraw_by_arrival(&self) -> Removal {
        let taken = self.taken_back();
        let gathered = self.gathered("e", "", Kind::Retract, &taken);
        let values: String = gathered.values.iter().map(|(c, value)| format!(", {value} AS z{c}")).collect();
        let combined: Vec<(usize, String)> = taken.iter().map(|c| (*c, self.withdrawn(*c, "true", &format!("f.z{c}")))).collect();
        let set = combined.iter().map(|(c, text)| format!("{} = {text}", self.quoted(*c))).collect::<Vec<_>>().join(",\n    ");
        self.removal(
            Kind::Retract,
            format!(
                "WITH {events}{with},\nf AS MATERIALIZED (SELECT {keys}{values} FROM h JOIN u ON u.kid = h.kid{joins}),\n\
                 w AS (UPDATE {target} t SET\n    {set}\n  FROM f WHERE {same} AND {differs} RETURNING 1),\n\
                 n (keys, updated) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM w))\n\
                 SELECT 0::bigint, updated, 0::bigint, greatest(keys - updated, 0), 0::bigint FROM n",
                events = self.events(&self.key_and(&taken)),
                with = gathered.with,
                keys = self.keys("h."),
                joins = gathered.joins,
                target = self.table.qualified,
                same = self.target_key_is("f"),
                differs = self.differs(&combined),
            ),
        )
    }

    /// A delete without a sequence removes what is there when it arrives.
    pub(super) fn delete_by_arrival(&self) -> Removal {
        self.removal(
            Kind::Delete,
            format!(
                "WITH {events},\nw AS (DELETE FROM {target} t USING h WHERE {same} RETURNING 1),\n\
             n (keys, deleted) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM w))\n\
             SELECT 0::bigint, 0::bigint, deleted, greatest(keys - deleted, 0), 0::bigint FROM n",
                events = self.events(&self.table.key),
                target = self.table.qualified,
                same = self.target_key_is("h"),
            ),
        )
    }

    /// A delete or retraction judged by sequence. `wins` says that the key is removed: then it starts anew from the sequences of the deleting row (and of
    /// deletes after it in the batch). Otherwise each group it is not older than is emptied and advanced.
    pub(super) fn delete_by_sequence(&self, kind: Kind) -> Removal {
        let deciding = if kind == Kind::Delete || self.deduplicates() { self.groups.iter().position(|group| group.remove) } else { None };
        let places = self.sequence_places();
        let taken = self.taken_back();
        let mut inputs: Vec<usize> = places.iter().map(|(_, _, c)| *c).chain(taken.iter().copied()).collect();
        inputs.sort_unstable();
        let columns = self.key_and(&inputs);
        let mut with = format!("{},\n{},\n{}", self.events(&columns), self.base(), self.judged(&columns, ""));
        let gathered = self.gathered("e", "", Kind::Retract, &taken);
        let mut joins = String::new();
        if !taken.is_empty() {
            with.push_str(&gathered.with);
            let _ = write!(joins, " JOIN u ON u.kid = h.kid{}", gathered.joins);
        }
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
        for (c, value) in &gathered.values {
            let _ = write!(outputs, ", {value} AS z{c}");
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
            }
            for c in &taken {
                let newer = self.group_of(*c).map_or(String::from("true"), |g| format!("f.a{g}"));
                combined.push((*c, self.withdrawn(*c, &newer, &format!("f.z{c}"))));
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
        self.removal(kind, format!(
            "WITH {with},\nn (keys, deleted, updated, late, late_keys) AS (SELECT (SELECT count(*) FROM h), (SELECT count(*) FROM del), {updated},\n  \
             (SELECT count(*) FROM v WHERE late), (SELECT count(*) FROM (SELECT FROM v GROUP BY kid HAVING bool_and(late)) z))\n\
             SELECT 0::bigint, updated, deleted, greatest(keys - updated - deleted - late_keys, 0), late FROM n"
        ))
    }
}
