use super::*;
use crate::state::declare::Told;
use crate::state::{Column, Family};
use proptest::prelude::*;

fn column(name: &str) -> Column {
    Column {
        name: name.into(),
        quoted: format!("\"{}\"", name.replace('"', "\"\"")),
        type_sql: "numeric(10,2)".into(),
        bare: "numeric(10,2)".into(),
        family: Family::Numeric,
        written: true,
        less: Some("OPERATOR(pg_catalog.<)".into()),
        equal: Some("OPERATOR(pg_catalog.=)".into()),
        ..Column::default()
    }
}

fn table(names: &[&str], key: &[usize], declaration: &Declaration) -> Table {
    Table {
        qualified: "\"s\".\"t\"".into(),
        columns: names.iter().map(|name| column(name)).collect(),
        key: key.to_vec(),
        partitioned: false,
        tombstones: declaration.remembers().then(|| "\"s\".\"t_tombstones\"".into()),
    }
}

fn statements(merge: &Merge) -> Vec<&str> {
    match merge {
        Merge::Refused | Merge::Ignored => Vec::new(),
        Merge::Upsert { single, unique, folded, after } => {
            let mut all = vec![single.write.as_str(), unique];
            all.extend(single.late.as_deref().into_iter().chain(folded.as_deref()));
            if let Some(after) = after {
                all.extend([after.hit.as_str(), &after.tombstones, &after.forget]);
                all.extend(after.remove.as_deref().into_iter().chain(after.adjust.as_deref()));
            }
            all
        }
        Merge::Remove(removal) => {
            let mut all = vec![removal.apply.as_str()];
            all.extend(removal.owe.as_deref());
            all
        }
    }
}

/// The text without what stands in double quotes; none if a quote does not close.
fn outside_quotes(sql: &str) -> Option<String> {
    let parts: Vec<&str> = sql.split('"').collect();
    (parts.len() % 2 == 1).then(|| parts.iter().step_by(2).copied().collect::<Vec<_>>().join(" "))
}

fn well_formed(sql: &str) -> bool {
    let Some(plain) = outside_quotes(sql) else { return false };
    let mut depth = 0i32;
    for letter in plain.chars() {
        depth += match letter {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        if depth < 0 {
            return false;
        }
    }
    depth == 0 && !plain.contains(", ,") && !plain.contains("(,") && !plain.contains(", FROM")
}

/// Each CTE is used only by those after it, as PostgreSQL demands.
fn in_order(sql: &str) -> bool {
    let mut lines = sql.split('\n').filter(|line| line.contains(" AS (") || line.contains(" AS MATERIALIZED ("));
    let mut known: Vec<String> = Vec::new();
    lines.all(|line| {
        let name = line.trim_start_matches("WITH ").split([' ', '(']).next().unwrap_or_default().to_string();
        let fine = !line.contains(&format!("JOIN {name} ON")) && !known.contains(&name);
        known.push(name);
        fine
    })
}

const NAMES: [&str; 8] = ["k\"1", "k2", "ord", "kid", "t", "s,1", "é '%", "c0"];

fn declarations() -> impl Strategy<Value = Declaration> {
    let values: Vec<usize> = (2..NAMES.len()).collect();
    let deduplicate =
        (proptest::sample::subsequence(values.clone(), 0..=3), prop_oneof![Just(Deletes::Remove), Just(Deletes::Ignore), Just(Deletes::Refuse)])
            .prop_map(|(sequence, deletes)| Declaration { engine: Engine::Deduplicate { sequence }, deletes, fields: Vec::new() });
    let partial = (Just(values).prop_shuffle(), 0usize..3, 1usize..3, proptest::option::of(0usize..2)).prop_map(|(order, groups, width, remove)| {
        let groups: Vec<Group> = (0..groups)
            .map(|g| Group {
                sequence: order[g * 3..g * 3 + width].to_vec(),
                fields: order[g * 3 + width..g * 3 + 3].to_vec(),
                remove: remove == Some(g),
            })
            .collect();
        let deletes = if groups.is_empty() { Deletes::Remove } else { Deletes::Retract };
        Declaration { engine: Engine::PartialUpdate { groups }, deletes, fields: Vec::new() }
    });
    prop_oneof![deduplicate, partial]
}

proptest! {
    #[test]
    fn every_declaration_compiles_to_well_formed_statements(declaration in declarations(), both in any::<bool>(), partitioned in any::<bool>()) {
        let mut table = table(&NAMES, if both { &[1, 0] } else { &[0] }, &declaration);
        table.partitioned = partitioned;
        for kind in KINDS {
            let merge = compile(&table, &declaration, kind);
            prop_assert_eq!(&merge, &compile(&table, &declaration, kind));
            for sql in statements(&merge) {
                prop_assert!(well_formed(sql), "{}", sql);
                prop_assert!(in_order(sql), "{}", sql);
                // Names of a user's appear quoted only.
                let plain = outside_quotes(sql).unwrap_or_default();
                prop_assert!(!plain.contains("é") && !plain.contains("k2"), "{}", sql);
            }
        }
        prop_assert!(well_formed(&create_tombstones(&table, &declaration, "\"s\".\"x\"")));
        for sql in [count_keys(&table), count_absent_and_present(&table), runs(&table), occurrences(&table), lock_rows(&table)] {
            prop_assert!(well_formed(&sql) && in_order(&sql), "{}", sql);
        }
    }
}

#[test]
fn a_plain_upsert_reads_as_one_would_write_it() {
    let declaration = Declaration { engine: Engine::PartialUpdate { groups: Vec::new() }, deletes: Deletes::Refuse, fields: Vec::new() };
    let table = table(&["id", "price"], &[0], &declaration);
    let Merge::Upsert { unique, after: None, .. } = compile(&table, &declaration, Kind::Upsert) else {
        unreachable!("not an upsert without tombstones")
    };
    assert_eq!(
        unique,
        r#"WITH r AS MATERIALIZED (SELECT * FROM ROWS FROM (jsonb_to_recordset($1) AS ("id" numeric(10,2), "price" numeric(10,2))) WITH ORDINALITY AS x (c0, c1, ord)),
u AS MATERIALIZED (SELECT (SELECT count(*) FROM r) = (SELECT count(*) FROM (SELECT FROM r GROUP BY c0) k) AS distinct_keys),
f AS (SELECT r.c0, r.c1 FROM r WHERE (SELECT distinct_keys FROM u)),
w AS (INSERT INTO "s"."t" AS t ("id", "price")
  SELECT f.c0, f.c1 FROM f ORDER BY f.c0
  ON CONFLICT ("id") DO UPDATE SET
    "price" = coalesce(EXCLUDED."price", t."price")
  WHERE ROW(t."price")::record OPERATOR(pg_catalog.*<>) ROW(coalesce(EXCLUDED."price", t."price"))::record
  RETURNING t.xmax = 0 AS fresh, t."id" AS c0),
m (keys, fresh, wrote) AS (SELECT (SELECT count(*) FROM r), count(*) FILTER (WHERE w.fresh), count(*) FROM w),
n AS (SELECT keys, fresh, wrote, 0::bigint AS late FROM m)
SELECT fresh, wrote - fresh, 0::bigint, greatest(keys - wrote - late, 0), late FROM n, u WHERE u.distinct_keys"#
    );
    assert_eq!(compile(&table, &declaration, Kind::Delete), Merge::Refused);
}

/// A table of every family of types under an engine with a function for each, checked as `create_state` checks it.
fn gathering(engine: &str, sequence: &[&str], groups: Option<&str>, deletes: Option<&str>) -> (Table, Declaration) {
    let families = [
        ("k", Family::Integer, "integer"),
        ("s", Family::Integer, "integer"),
        ("n", Family::Numeric, "numeric(10,2)"),
        ("f", Family::Float, "double precision"),
        ("b", Family::Boolean, "boolean"),
        ("t", Family::Text, "text"),
        ("a", Family::Array, "integer[]"),
        ("j", Family::Jsonb, "jsonb"),
        ("r", Family::Jsonb, "jsonb"),
        ("h", Family::Hll, "x.hll"),
        ("c", Family::Integer, "bigint"),
    ];
    let mut table =
        table(&families.map(|(name, ..)| name), &[0], &Declaration { engine: Engine::FirstRow, deletes: Deletes::Refuse, fields: Vec::new() });
    for (column, (_, family, bare)) in table.columns.iter_mut().zip(families) {
        (column.family, column.bare, column.type_sql, column.schema) = (family, bare.into(), bare.into(), "x".into());
    }
    let fields = r#"{"n": "sum", "f": {"function": "max", "ignore_retract": true}, "b": {"function": "bool_or", "ignore_retract": true}, "t": {"function": "listagg", "separator": "'\\", "ignore_retract": true},
        "a": "collect", "j": {"function": "merge_map", "ignore_retract": true}, "r": {"function": "nested_update", "nested_key": ["it's"]},
        "h": {"function": "hll_union", "ignore_retract": true}, "c": "count"}"#;
    let sequence: Vec<String> = sequence.iter().map(|name| name.to_string()).collect();
    let told = Told { engine, sequence: Some(&sequence), groups, deletes, fields: Some(fields), rowkind: None };
    let declaration = Declaration::check(&table, &told).unwrap();
    table.tombstones = declaration.remembers().then(|| "\"s\".\"t_tombstones\"".into());
    (table, declaration)
}

#[test]
fn functions_compile_to_well_formed_statements_and_say_whether_they_fold() {
    let groups = Some(r#"{"s": ["n", "t", "c"]}"#);
    let removing = Some(r#"{"s": {"fields": ["n", "c"], "on_delete": "remove"}}"#);
    for (engine, sequence, groups, deletes, folds) in [
        ("aggregation", [].as_slice(), None, None, true),
        ("aggregation", &[], None, Some("remove"), true),
        // An older text stands before the stored one.
        ("aggregation", &["s"], None, None, false),
        ("aggregation", &["s"], None, Some("remove"), false),
        ("partial-update", &[], None, Some("retract"), true),
        ("partial-update", &[], groups, None, false),
        ("partial-update", &[], removing, None, false),
    ] {
        let (table, declaration) = gathering(engine, sequence, groups, deletes);
        for kind in KINDS {
            let merge = compile(&table, &declaration, kind);
            for sql in statements(&merge) {
                assert!(well_formed(sql), "{sql}");
                assert!(in_order(sql), "{sql}");
            }
            match merge {
                Merge::Upsert { folded, .. } => assert_eq!(folded.is_some(), folds, "{engine} {groups:?}"),
                Merge::Remove(removal) => {
                    assert!(removal.folds);
                    assert_eq!(removal.owe.is_some(), declaration.owes());
                }
                Merge::Refused | Merge::Ignored => unreachable!("{engine} {deletes:?}"),
            }
        }
    }
}

#[test]
fn what_a_policy_ignores_writes_nothing() {
    let partial = |deletes| Declaration { engine: Engine::PartialUpdate { groups: Vec::new() }, deletes, fields: Vec::new() };
    for (declaration, kind) in
        [(partial(Deletes::Ignore), Kind::Delete), (partial(Deletes::Ignore), Kind::Retract), (partial(Deletes::Remove), Kind::Retract)]
    {
        assert_eq!(compile(&table(&["id", "price"], &[0], &declaration), &declaration, kind), Merge::Ignored);
    }
}
