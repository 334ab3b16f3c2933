//! SQL that reads rows out of events. Events come as `$1`, a jsonb array of objects with the fields of [`super::map::FIELDS`]; values stay jsonb all the way, so
//! that nothing but the column's own type ever reads them. The statements call functions of pg_catalog alone.

use super::map::Source;
use crate::sql::literal;

/// One projection as the compiler needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    /// The types of events it takes.
    pub types: Vec<String>,
    /// Its column map as text, for the constants in it.
    pub map: String,
    /// The map, read.
    pub columns: Vec<(String, Source)>,
    /// What its rows do, as a number that the caller knows.
    pub kind: i32,
}

impl Projection {
    /// Whether a row's key is known only when its event has its number.
    pub fn numbers(&self, key: &Key<'_>) -> bool {
        self.columns.iter().any(|(name, source)| key.has(name) && source.numbered())
    }
}

fn array(texts: &[String]) -> String {
    format!("ARRAY[{}]::pg_catalog.text[]", texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join(", "))
}

/// A value's expression over `event`; null where the event has nothing there, while a JSON null stays one.
pub fn value(map: &str, column: &str, source: &Source, event: &str) -> String {
    match source {
        Source::Path(path) => format!("{event} OPERATOR(pg_catalog.#>) {}", array(path)),
        Source::Const => {
            format!("{}::pg_catalog.jsonb OPERATOR(pg_catalog.#>) {}", literal(map), array(&[column.to_string(), "const".to_string()]))
        }
    }
}

/// The object of the values that are there.
fn object(map: &str, columns: &[(String, Source)], event: &str) -> String {
    let values = columns.iter().map(|(name, source)| format!("({}, {})", literal(name), value(map, name, source, event))).collect::<Vec<_>>();
    format!(
        "(SELECT coalesce(jsonb_object_agg(f.name, f.value), '{{}}') FROM (VALUES {}) f (name, value) WHERE f.value IS NOT NULL)",
        values.join(", ")
    )
}

/// For each event its rows, one for each projection of its type: `ord` of the event, `place` of the projection, `kind`, `row`.
fn rows(projections: &[Projection], columns: impl Fn(&Projection) -> Vec<(String, Source)>) -> String {
    let each = projections
        .iter()
        .enumerate()
        .map(|(place, projection)| {
            format!(
                "SELECT e.ord, {place} AS place, {} AS kind, {} AS row FROM e WHERE e.event ->> 'type' = ANY ({})",
                projection.kind,
                object(&projection.map, &columns(projection), "e.event"),
                array(&projection.types)
            )
        })
        .collect::<Vec<_>>();
    format!(
        "WITH e AS MATERIALIZED (SELECT x.event, x.ord FROM jsonb_array_elements($1) WITH ORDINALITY x (event, ord) WHERE x.ord BETWEEN $2 AND $3)\n{}",
        each.join("\nUNION ALL\n")
    )
}

/// The rows of the events `$2` to `$3`, counted from 1, in the order of the events: a jsonb array of objects, an array of their kinds, and one of the place of
/// each row's event.
pub fn batch(projections: &[Projection]) -> String {
    format!(
        "SELECT coalesce(jsonb_agg(r.row ORDER BY r.ord, r.place), '[]'), coalesce(array_agg(r.kind ORDER BY r.ord, r.place), '{{}}'),
                coalesce(array_agg(r.ord ORDER BY r.ord, r.place), '{{}}')
         FROM ({}) r",
        rows(projections, |projection| projection.columns.clone())
    )
}

/// The key of a state table, for typed reading.
pub struct Key<'a> {
    /// Name, name as SQL writes it, and type of each column.
    pub columns: Vec<(&'a str, &'a str, &'a str)>,
}

impl Key<'_> {
    /// Whether a column of this name is part of it.
    fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|(column, ..)| *column == name)
    }
}

/// The slots of the keys that the events `$2` to `$3` touch, in ascending order, each once; `$4` is the number of slots less one. Equal keys share a slot,
/// since PostgreSQL's hash of the key's own types tells it. A projection whose key is the event's own number touches no key that anybody else does.
pub fn slots(projections: &[Projection], key: &Key<'_>) -> Option<String> {
    let in_key = |name: &str| key.has(name);
    let shared: Vec<Projection> = projections.iter().filter(|p| !p.numbers(key)).cloned().collect();
    if shared.is_empty() {
        return None;
    }
    let definition = key.columns.iter().map(|(_, quoted, kind)| format!("{quoted} {kind}")).collect::<Vec<_>>().join(", ");
    let row = key.columns.iter().map(|(_, quoted, _)| format!("k.{quoted}")).collect::<Vec<_>>().join(", ");
    Some(format!(
        "SELECT coalesce(array_agg(DISTINCT hash_record(ROW({row})) & $4 ORDER BY hash_record(ROW({row})) & $4), '{{}}')
         FROM ({}) r CROSS JOIN LATERAL jsonb_to_record(r.row) AS k ({definition})",
        rows(&shared, |p| p.columns.iter().filter(|(name, _)| in_key(name)).cloned().collect())
    ))
}

/// What a lookup finds for the events `$2` to `$3`: an object of rows by the place of the event. `row` is the statement that reads one row, its key in `k`.
pub fn lookup(of: &Projection, key: &Key<'_>, row: &str) -> String {
    let definition = key.columns.iter().map(|(_, quoted, kind)| format!("{quoted} {kind}")).collect::<Vec<_>>().join(", ");
    format!(
        "SELECT coalesce(jsonb_object_agg(r.ord, to_jsonb(v.*)), '{{}}')
         FROM ({}) r CROSS JOIN LATERAL jsonb_to_record(r.row) AS k ({definition}) LEFT JOIN LATERAL ({row}) v ON true",
        rows(std::slice::from_ref(of), |p| p.columns.clone())
    )
}

/// The text of each key that the events `$2` to `$3` touch, as the changelog writes keys, with the number of the last of them that does.
pub fn causes(projections: &[Projection], key: &Key<'_>) -> String {
    let in_key = |name: &str| key.has(name);
    let definition = key.columns.iter().map(|(_, quoted, kind)| format!("{quoted} {kind}")).collect::<Vec<_>>().join(", ");
    let row = key.columns.iter().map(|(_, quoted, _)| format!("k.{quoted}")).collect::<Vec<_>>().join(", ");
    format!(
        "SELECT coalesce(array_agg(c.key), '{{}}'), coalesce(array_agg(c.ord), '{{}}')
         FROM (SELECT stint.image({row})::text AS key, max(r.ord) AS ord FROM ({}) r CROSS JOIN LATERAL jsonb_to_record(r.row) AS k ({definition}) GROUP BY 1) c",
        rows(projections, |p| p.columns.iter().filter(|(name, _)| in_key(name)).cloned().collect())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_cannot_leave_their_quotes() {
        let source = Source::Path(vec!["payload".into(), "'; DROP TABLE x; --".into()]);
        assert_eq!(
            value("{}", "c", &source, "e.event"),
            "e.event OPERATOR(pg_catalog.#>) ARRAY['payload', '''; DROP TABLE x; --']::pg_catalog.text[]"
        );
    }

    #[test]
    fn a_key_that_is_the_number_of_the_event_needs_no_lock() {
        let projection = |source: &str| Projection {
            types: vec!["t".into()],
            map: "{}".into(),
            columns: vec![("id".into(), Source::Path(vec![source.into()]))],
            kind: 0,
        };
        let key = Key { columns: vec![("id", "id", "bigint")] };
        assert!(slots(&[projection("seq")], &key).is_none());
        assert!(slots(&[projection("seq"), projection("source")], &key).is_some_and(|sql| !sql.contains("'seq'")));
    }
}
