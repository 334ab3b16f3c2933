//! Rows arrive: a statement for batches without a repeated key, one that folds, and what follows where keys may have been deleted before.

use super::{Compiler, Kind, Merge, Revival, Single, list, row, rows};
use crate::state::fields::Function;
use std::fmt::Write;

impl Compiler<'_> {
    pub(super) fn upsert(&self) -> Merge {
        let folded = self.folds(Kind::Upsert).then(|| self.upsert_folded());
        Merge::Upsert { single: self.upsert_single(), unique: self.upsert_unique(), folded, after: self.revival() }
    }

    /// The key and every written column.
    fn inputs(&self) -> Vec<usize> {
        self.table.key.iter().copied().chain(self.values()).collect()
    }

    /// CTE `f` of a batch without a repeated key: nothing needs folding. `only` is a condition on the whole batch.
    fn unfolded(&self, columns: &[usize], only: &str) -> String {
        // A group without a sequence is left alone, also where the row is new.
        let merged = if self.keeps_whole_rows() { Vec::new() } else { self.merged() };
        let value = |c: usize| {
            let plain = format!("r.c{c}");
            let lifted = if merged.contains(&c) { self.lifted(c, Kind::Upsert, |c| format!("r.c{c}")) } else { plain.clone() };
            match (lifted == plain, self.column(c).null_sets) {
                (true, false) => plain,
                (true, true) => format!("{plain}, r.h{c}"),
                (false, _) => format!("{lifted} AS c{c}"),
            }
        };
        let names = list(columns, value);
        match self.older_than_removal() {
            None => format!("f AS (SELECT {names} FROM r WHERE {only})"),
            Some((tombstones, older)) => {
                format!(
                    "f AS (SELECT {names} FROM r LEFT JOIN {tombstones} d ON {} WHERE {only} AND {older} IS NOT TRUE)",
                    self.tombstone_key_is("r")
                )
            }
        }
    }

    /// The tombstones, and whether row `r` is older than the delete that `d` remembers.
    fn older_than_removal(&self) -> Option<(&str, String)> {
        let older = self.older_than_tombstone(|c| format!("r.c{c}"), |g, j| format!("d.s{g}_{j}"))?;
        self.table.tombstones.as_deref().map(|tombstones| (tombstones, format!("(d.removed AND {older})")))
    }

    /// Whether row `r`, which wrote nothing, was late; none where no row can be.
    fn was_late(&self) -> Option<String> {
        if self.groups.is_empty() {
            return None;
        }
        let present = |g: usize| self.present(g, |_, c| format!("r.c{c}"));
        let wins = |g: usize| format!("({} AND {})", present(g), self.not_older(g, |_, c| format!("r.c{c}"), |_, c| format!("t.{}", self.quoted(c))));
        let any = |of: &dyn Fn(usize) -> String| (0..self.groups.len()).map(of).collect::<Vec<_>>().join(" OR ");
        let lost = format!(
            "coalesce((SELECT ({}) AND NOT ({}) FROM {} t WHERE {}), false){}",
            any(&present),
            any(&wins),
            self.table.qualified,
            self.target_key_is("r"),
            self.brings_nothing("r"),
        );
        Some(match self.older_than_removal() {
            None => lost,
            Some((tombstones, older)) => {
                format!("{lost} OR coalesce((SELECT {older} FROM {tombstones} d WHERE {}), false)", self.tombstone_key_is("r"))
            }
        })
    }

    /// One row: it is written, and tells whether it is new; or it writes nothing, and is looked at once more.
    fn upsert_single(&self) -> Single {
        let columns = self.inputs();
        let fresh = if self.table.partitioned {
            // As in `counted`.
            let same = self.same_key(|_, c| format!("o.{}", self.quoted(c)), |_, c| format!("t.{}", self.quoted(c)));
            format!("NOT EXISTS (SELECT FROM {} o WHERE {same})", self.table.qualified)
        } else {
            String::from("t.xmax = 0")
        };
        Single {
            write: format!(
                "WITH {},\n{}\n{}\n  RETURNING {fresh}",
                row(self.table, &columns),
                self.unfolded(&columns, "true"),
                self.insert(&columns, "")
            ),
            late: self.was_late().map(|late| format!("WITH {}\nSELECT {late} FROM r", row(self.table, &columns))),
        }
    }

    /// For a batch without a repeated key, where only a row that wrote nothing can have been late. Where a key is repeated after all, it writes nothing.
    fn upsert_unique(&self) -> String {
        let columns = self.inputs();
        let late = self.was_late().map_or(String::from("0::bigint"), |late| {
            let wrote = self.same_key(|_, c| format!("w.c{c}"), |_, c| format!("r.c{c}"));
            format!(
                "CASE WHEN wrote < keys THEN (SELECT count(*) FILTER (WHERE {late}) FROM r WHERE NOT EXISTS (SELECT FROM w WHERE {wrote})) ELSE 0 END"
            )
        });
        let with = format!(
            "{},\nu AS MATERIALIZED (SELECT (SELECT count(*) FROM r) = (SELECT count(*) FROM (SELECT FROM r GROUP BY {}) k) AS distinct_keys),\n{}",
            rows(self.table, &columns),
            self.keys(""),
            self.unfolded(&columns, "(SELECT distinct_keys FROM u)"),
        );
        let counted = self.counted(&with, &columns, "r", &late, "late");
        format!("{counted}, u WHERE u.distinct_keys")
    }

    fn upsert_folded(&self) -> String {
        let columns = self.inputs();
        let mut with = self.events(&columns);
        let judged = !self.groups.is_empty();
        if judged {
            let _ = write!(with, ",\n{},\n{}", self.base(), self.judged(&columns, &self.brings_nothing("y")));
        }
        let source = if judged { "v" } else { "e" };
        let fold = if self.keeps_whole_rows() { self.one_whole(source, judged) } else { self.partial_fold(source, judged) };
        with.push_str(&fold);
        let (late, late_keys) = if judged {
            ("(SELECT count(*) FROM v WHERE late)", "(SELECT count(*) FROM (SELECT FROM v GROUP BY kid HAVING bool_and(late)) z)")
        } else {
            ("0::bigint", "0")
        };
        self.counted(&with, &columns, "h", late, late_keys)
    }

    /// The statement around the folded rows `f`: writes them and counts. `keys` is the CTE with one row per key.
    fn counted(&self, with: &str, columns: &[usize], keys: &str, late: &str, late_keys: &str) -> String {
        // A partitioned table cannot return system columns; there a row counts as inserted if the statement's snapshot does not hold it.
        let (returned, fresh) = if self.table.partitioned {
            ("true", format!("NOT EXISTS (SELECT FROM {} t WHERE {})", self.table.qualified, self.target_key_is("w")))
        } else {
            ("t.xmax = 0", String::from("w.fresh"))
        };
        format!(
            "WITH {with},\nw AS ({insert}\n  RETURNING {returned} AS fresh, {returned_keys}),\n\
             m (keys, fresh, wrote) AS (SELECT (SELECT count(*) FROM {keys}), count(*) FILTER (WHERE {fresh}), count(*) FROM w),\n\
             n AS (SELECT keys, fresh, wrote, {late} AS late FROM m)\n\
             SELECT fresh, wrote - fresh, 0::bigint, greatest(keys - wrote - {late_keys}, 0), late FROM n",
            // In the order of the keys, so that writers do not deadlock.
            insert = self.insert(columns, &format!(" ORDER BY {}", self.keys("f."))),
            returned_keys = list(&self.table.key, |c| format!("t.{} AS c{c}", self.quoted(c))),
        )
    }

    /// ` AND …`: the row adds nothing that counts also when it is late: a value outside the groups, or one for a function that gathers all values.
    fn brings_nothing(&self, alias: &str) -> String {
        if self.keeps_whole_rows() {
            return String::new();
        }
        let gathering = |c: usize| match self.group_of(c) {
            None if self.column(c).null_sets => Some(format!("CASE WHEN {alias}.h{c} THEN true END")),
            None => Some(format!("{alias}.c{c}")),
            Some(_) if !self.function(c).gathers() => None,
            Some(g) => match self.present(g, |_, c| format!("{alias}.c{c}")) {
                always if always == "true" => Some(format!("{alias}.c{c}")),
                present => Some(format!("CASE WHEN {present} THEN {alias}.c{c} END")),
            },
        };
        let brought: Vec<String> = self.merged().into_iter().filter_map(gathering).collect();
        if brought.is_empty() { String::new() } else { format!(" AND num_nonnulls({}) = 0", brought.join(", ")) }
    }

    /// CTE `f`: the newest row of each key, or the first one.
    fn one_whole(&self, source: &str, judged: bool) -> String {
        let order = match (self.deduplicates(), judged) {
            (false, _) => "e.ord".into(),
            (true, false) => "e.ord DESC".into(),
            (true, true) => self.newest_first(0, "v."),
        };
        let kept = if judged { " WHERE NOT v.dropped" } else { "" };
        let names: String = self.values().iter().map(|c| format!(", {source}.c{c}")).collect();
        format!(
            ",\n{first},\nf AS (SELECT DISTINCT ON ({source}.kid) {keys}{names} FROM {source} JOIN k ON k.kid = {source}.kid{kept}\n  \
             ORDER BY {source}.kid, {order})",
            first = self.first_written(source, judged),
            keys = self.keys("k."),
        )
    }

    /// CTE `k`: each key as the first row that counts writes it; keys that are equal may still read differently.
    fn first_written(&self, source: &str, judged: bool) -> String {
        let kept = if judged { " WHERE NOT dropped" } else { "" };
        format!("k AS (SELECT DISTINCT ON (kid) kid, {} FROM {source}{kept} ORDER BY kid, ord)", self.keys(""))
    }

    /// CTEs `g0`, `g1`, … (the winner of each group), `u` (what the columns with functions amount to) and `f` (one row per key).
    fn partial_fold(&self, source: &str, judged: bool) -> String {
        let mut text = String::new();
        let mut joins = String::new();
        let mut outputs = format!("u.kid, {}", self.keys("k."));
        let kept = if judged { "NOT dropped AND " } else { "" };
        let newest = |c: &usize| self.group_of(*c).is_some() && *self.function(*c) == Function::LastValue;
        for (g, group) in self.groups.iter().enumerate() {
            let own: Vec<usize> = group.sequence.iter().copied().chain(group.fields.iter().copied().filter(|c| newest(c))).collect();
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
        let others: Vec<usize> = self.merged().into_iter().filter(|c| !newest(c)).collect();
        let gathered = self.gathered(source, kept, Kind::Upsert, &others);
        for (c, value) in &gathered.values {
            let _ = write!(outputs, ", {value} AS c{c}");
            if self.column(*c).null_sets {
                let _ = write!(outputs, ", u.o{c} IS NOT NULL AS h{c}");
            }
        }
        let _ = write!(
            text,
            ",\n{first}{with},\nf AS (SELECT {outputs}\n  FROM u JOIN k ON k.kid = u.kid{joins}{more})",
            first = self.first_written(source, judged),
            with = gathered.with,
            more = gathered.joins,
        );
        text
    }

    /// INSERT of the folded rows, in `order`, combined with the row that is there.
    fn insert(&self, columns: &[usize], order: &str) -> String {
        let names = list(columns, |c| self.quoted(c).to_string());
        let conflict = list(&self.table.key, |c| self.quoted(c).to_string());
        let head = format!(
            "INSERT INTO {table} AS t ({names})\n  SELECT {sources} FROM f{order}\n  ON CONFLICT ({conflict}) DO ",
            table = self.table.qualified,
            sources = list(columns, |c| format!("f.c{c}")),
        );
        let values = self.values();
        if values.is_empty() || (self.keeps_whole_rows() && !self.deduplicates()) {
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

    /// What a column becomes when its folded row meets the stored one.
    fn combined(&self, c: usize) -> String {
        let name = self.quoted(c);
        if self.deduplicates() {
            return format!("EXCLUDED.{name}");
        }
        match self.groups.iter().position(|group| group.sequence.contains(&c)) {
            None => self.met(c),
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
                // What gathers all values keeps also that of an older row.
                for c in group.fields.iter().filter(|c| !self.function(**c).gathers()) {
                    let name = self.quoted(*c);
                    set.push(format!("{name} = CASE WHEN {} THEN t.{name} END", keeps(g)));
                }
            }
            let all = (0..self.groups.len()).map(keeps).collect::<Vec<_>>().join(" AND ");
            format!("WITH {rows}\nUPDATE {target} t SET\n  {set}\nFROM r, {tombstones} d WHERE {joined} AND NOT ({all})", set = set.join(",\n  "))
        });
        Some(Revival {
            hit: format!("WITH {rows}\nSELECT EXISTS (SELECT FROM r, {tombstones} d WHERE {})", self.tombstone_key_is("r")),
            tombstones: format!(
                "WITH {rows}\nSELECT coalesce(string_agg(DISTINCT d::text, ',' ORDER BY d::text), '') FROM r, {tombstones} d WHERE {}",
                self.tombstone_key_is("r")
            ),
            remove,
            adjust,
            forget: format!("WITH {rows}\nDELETE FROM {tombstones} d USING r, {target} t WHERE {joined}"),
        })
    }
}
