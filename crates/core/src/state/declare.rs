//! What `create_state` was told, checked against the table: conflicts are found here, when the table is declared, and never by a merge.

use super::Table;
use crate::names::nearest;
use serde_json::Value;

/// A merge engine, by Paimon's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The newest row replaces the whole row.
    Deduplicate {
        /// Columns that say which row is newer, compared in order; empty: the later arrival is.
        sequence: Vec<usize>,
    },
    /// Each row brings some columns.
    PartialUpdate {
        /// Columns that are newer or older together; the others take every non-null value.
        groups: Vec<Group>,
    },
}

/// A sequence group of `partial-update`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The columns that order it.
    pub sequence: Vec<usize>,
    /// The columns it guards.
    pub fields: Vec<usize>,
    /// Whether a delete that is not older than the group removes the row (`remove-record-on-sequence-group`).
    pub remove: bool,
}

/// What a delete does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletes {
    /// It is an error.
    Refuse,
    /// Nothing.
    Ignore,
    /// It removes the row.
    Remove,
    /// It sets the fields of the sequence groups it is not older than to null, and advances them.
    Retract,
}

/// The words of `deletes`.
pub const DELETES: [Deletes; 4] = [Deletes::Refuse, Deletes::Ignore, Deletes::Remove, Deletes::Retract];

impl Deletes {
    /// Its word in a declaration.
    pub fn word(self) -> &'static str {
        match self {
            Deletes::Refuse => "refuse",
            Deletes::Ignore => "ignore",
            Deletes::Remove => "remove",
            Deletes::Retract => "retract",
        }
    }
}

/// The engines there are.
pub const ENGINES: [&str; 2] = ["deduplicate", "partial-update"];

/// A checked declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// How rows merge.
    pub engine: Engine,
    /// What deletes do.
    pub deletes: Deletes,
}

/// The kind of a refusal: it decides the SQLSTATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A column is not there.
    Column,
    /// A value is not one of those known, or options contradict each other.
    Value,
    /// The table's definition stands in the way.
    Table,
}

/// Why a declaration cannot work, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its kind.
    pub why: Why,
    /// What is wrong, naming it.
    pub message: String,
    /// What to do.
    pub hint: String,
}

fn refuse<T>(why: Why, message: impl Into<String>, hint: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { why, message: message.into(), hint: hint.into() })
}

fn unknown<T>(why: Why, message: String, name: &str, known: &[&str], otherwise: &str) -> Result<T, Refusal> {
    let hint = match nearest(name, known.iter().copied()) {
        Some(near) => format!("Did you mean \"{near}\"?"),
        None => format!("{otherwise} {}.", known.join(", ")),
    };
    refuse(why, message, hint)
}

impl Declaration {
    /// Checks what `create_state` was given. `groups` is the text of a JSON object.
    pub fn check(
        table: &Table,
        engine: &str,
        sequence: Option<&[String]>,
        groups: Option<&str>,
        deletes: Option<&str>,
    ) -> Result<Declaration, Refusal> {
        for index in &table.key {
            let column = &table.columns[*index];
            if !column.written {
                return refuse(
                    Why::Table,
                    format!("key column \"{}\" is filled by PostgreSQL, so a row cannot name its key", column.name),
                    "Use a key column that is neither GENERATED ALWAYS nor computed.",
                );
            }
        }
        let engine = match engine {
            "deduplicate" => {
                if groups.is_some() {
                    return refuse(
                        Why::Value,
                        "engine \"deduplicate\" takes no groups: its newest row replaces the whole row",
                        "Name the columns that order the rows in sequence, or declare engine \"partial-update\".",
                    );
                }
                Engine::Deduplicate { sequence: sequence_columns(table, sequence.unwrap_or_default())? }
            }
            "partial-update" => {
                if sequence.is_some_and(|names| !names.is_empty()) {
                    return refuse(
                        Why::Value,
                        "engine \"partial-update\" takes no sequence: one sequence cannot order columns that arrive apart",
                        "Give the sequence column its fields in groups, as in {\"updated_at\": [\"price\", \"stock\"]}.",
                    );
                }
                Engine::PartialUpdate { groups: sequence_groups(table, groups)? }
            }
            other => return unknown(Why::Value, format!("engine \"{other}\" does not exist"), other, &ENGINES, "The engines are"),
        };
        let deletes = deletes_policy(&engine, deletes)?;
        Ok(Declaration { engine, deletes })
    }

    /// Whether keys without a row must be remembered with their sequence.
    pub fn remembers(&self) -> bool {
        match &self.engine {
            Engine::Deduplicate { sequence } => self.deletes == Deletes::Remove && !sequence.is_empty(),
            Engine::PartialUpdate { groups } => self.deletes == Deletes::Retract && !groups.is_empty(),
        }
    }

    /// The sequences of the engine: one for `deduplicate` with a sequence, one per group for `partial-update`.
    pub fn sequences(&self) -> Vec<&[usize]> {
        match &self.engine {
            Engine::Deduplicate { sequence } if sequence.is_empty() => Vec::new(),
            Engine::Deduplicate { sequence } => vec![sequence],
            Engine::PartialUpdate { groups } => groups.iter().map(|group| group.sequence.as_slice()).collect(),
        }
    }
}

fn column(table: &Table, name: &str) -> Result<usize, Refusal> {
    match table.find(name) {
        Some(index) => Ok(index),
        None => {
            let known: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
            unknown(Why::Column, format!("column \"{name}\" of {} does not exist", table.qualified), name, &known, "Its columns are")
        }
    }
}

fn value_column(table: &Table, name: &str, role: &str) -> Result<usize, Refusal> {
    let index = column(table, name)?;
    if table.key.contains(&index) {
        return refuse(
            Why::Value,
            format!("column \"{name}\" belongs to the primary key and cannot be a {role}"),
            "Name a column outside the key; the key never changes.",
        );
    }
    if !table.columns[index].written {
        return refuse(
            Why::Value,
            format!("column \"{name}\" is filled by PostgreSQL and cannot be a {role}"),
            "Name a column that is neither generated nor an identity.",
        );
    }
    Ok(index)
}

fn sequence_columns<T: AsRef<str>>(table: &Table, names: &[T]) -> Result<Vec<usize>, Refusal> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let name = name.as_ref();
        let index = value_column(table, name, "sequence column")?;
        if table.columns[index].less.is_none() {
            return refuse(
                Why::Value,
                format!("column \"{name}\" has a type without an order and cannot be a sequence column"),
                "Use a number, a timestamp or another type that can be sorted.",
            );
        }
        if found.contains(&index) {
            return refuse(Why::Value, format!("column \"{name}\" stands twice in one sequence"), "Name each column once.");
        }
        found.push(index);
    }
    Ok(found)
}

/// The names in a group's left side: one column, or several parted by commas.
fn split_names<'a>(table: &Table, text: &'a str) -> Vec<&'a str> {
    if table.find(text).is_some() { vec![text] } else { text.split(',').map(str::trim).collect() }
}

fn sequence_groups(table: &Table, text: Option<&str>) -> Result<Vec<Group>, Refusal> {
    const SHAPE: &str =
        "Write {\"sequence_column\": [\"field\", …]}, or {\"sequence_column\": {\"fields\": [\"field\", …], \"on_delete\": \"remove\"}}.";
    let Some(text) = text else { return Ok(Vec::new()) };
    let Ok(Value::Object(object)) = serde_json::from_str::<Value>(text) else {
        return refuse(Why::Value, "groups is not a JSON object", SHAPE);
    };
    if object.is_empty() {
        return refuse(Why::Value, "groups is empty", SHAPE);
    }
    let mut groups: Vec<Group> = Vec::with_capacity(object.len());
    let mut taken: Vec<usize> = Vec::new();
    for (left, right) in &object {
        let sequence = sequence_columns(table, &split_names(table, left))?;
        let (fields, remove) = match right {
            Value::Array(fields) => (fields, false),
            Value::Object(options) => group_options(left, options, SHAPE)?,
            _ => return refuse(Why::Value, format!("group \"{left}\" is neither an array of columns nor an object"), SHAPE),
        };
        let mut indexes = Vec::with_capacity(fields.len());
        for field in fields {
            let Value::String(name) = field else {
                return refuse(Why::Value, format!("group \"{left}\" names a field that is not a string: {field}"), SHAPE);
            };
            indexes.push(value_column(table, name, "field of a group")?);
        }
        if indexes.is_empty() {
            return refuse(Why::Value, format!("group \"{left}\" guards no field"), SHAPE);
        }
        for index in sequence.iter().chain(&indexes) {
            if taken.contains(index) {
                return refuse(
                    Why::Value,
                    format!("column \"{}\" stands twice in groups", table.columns[*index].name),
                    "A column belongs to one group, either as its sequence or as a field.",
                );
            }
            taken.push(*index);
        }
        if remove && groups.iter().any(|group| group.remove) {
            return refuse(
                Why::Value,
                format!("group \"{left}\" is the second with on_delete \"remove\""),
                "Let the one group decide that knows whether the row exists.",
            );
        }
        groups.push(Group { sequence, fields: indexes, remove });
    }
    Ok(groups)
}

fn group_options<'a>(left: &str, options: &'a serde_json::Map<String, Value>, shape: &str) -> Result<(&'a Vec<Value>, bool), Refusal> {
    const KNOWN: [&str; 2] = ["fields", "on_delete"];
    for name in options.keys() {
        if !KNOWN.contains(&name.as_str()) {
            return unknown(Why::Value, format!("option \"{name}\" of group \"{left}\" does not exist"), name, &KNOWN, "The options are");
        }
    }
    let Some(Value::Array(fields)) = options.get("fields") else {
        return refuse(Why::Value, format!("group \"{left}\" has no array \"fields\""), shape);
    };
    match options.get("on_delete").map(|value| value.as_str()) {
        None | Some(Some("retract")) => Ok((fields, false)),
        Some(Some("remove")) => Ok((fields, true)),
        Some(_) => refuse(
            Why::Value,
            format!("on_delete of group \"{left}\" is neither \"retract\" nor \"remove\""),
            "\"retract\" sets the group's fields to null, \"remove\" removes the row.",
        ),
    }
}

fn deletes_policy(engine: &Engine, word: Option<&str>) -> Result<Deletes, Refusal> {
    let given = match word {
        None => None,
        Some(word) => match DELETES.iter().find(|policy| policy.word() == word) {
            Some(policy) => Some(*policy),
            None => {
                return unknown(
                    Why::Value,
                    format!("deletes policy \"{word}\" does not exist"),
                    word,
                    &DELETES.map(Deletes::word),
                    "The policies are",
                );
            }
        },
    };
    match engine {
        Engine::Deduplicate { .. } => match given {
            Some(Deletes::Retract) => refuse(
                Why::Value,
                "deletes \"retract\" needs sequence groups, which engine \"deduplicate\" has not",
                "Use \"remove\", \"ignore\" or \"refuse\".",
            ),
            other => Ok(other.unwrap_or(Deletes::Remove)),
        },
        Engine::PartialUpdate { groups } if groups.is_empty() => match given {
            Some(Deletes::Retract) => {
                refuse(Why::Value, "deletes \"retract\" needs sequence groups", "Declare groups, or use \"remove\", \"ignore\" or \"refuse\".")
            }
            other => Ok(other.unwrap_or(Deletes::Refuse)),
        },
        Engine::PartialUpdate { groups } => match given {
            Some(Deletes::Remove) => refuse(
                Why::Value,
                "deletes \"remove\" cannot be combined with sequence groups: it would not say which sequence a delete must beat",
                "Give the group that decides {\"fields\": […], \"on_delete\": \"remove\"} and leave deletes out.",
            ),
            Some(policy @ (Deletes::Ignore | Deletes::Refuse)) if groups.iter().any(|group| group.remove) => refuse(
                Why::Value,
                format!("deletes \"{}\" contradicts a group's on_delete \"remove\"", if policy == Deletes::Ignore { "ignore" } else { "refuse" }),
                "Leave one of the two out.",
            ),
            other => Ok(other.unwrap_or(Deletes::Retract)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::Column;
    use super::*;

    fn table() -> Table {
        let column = |name: &str| Column {
            name: name.into(),
            quoted: name.into(),
            type_sql: "integer".into(),
            written: name != "total",
            less: (name != "shape").then(|| "OPERATOR(pg_catalog.<)".into()),
            equal: Some("OPERATOR(pg_catalog.=)".into()),
        };
        Table {
            qualified: "shop.goods".into(),
            columns: ["k", "price", "stock", "seq", "other", "total", "shape", "a,b"].map(column).to_vec(),
            key: vec![0],
            ..Table::default()
        }
    }

    fn check(engine: &str, sequence: Option<&[&str]>, groups: Option<&str>, deletes: Option<&str>) -> Result<Declaration, Refusal> {
        let sequence: Option<Vec<String>> = sequence.map(|names| names.iter().map(|name| name.to_string()).collect());
        Declaration::check(&table(), engine, sequence.as_deref(), groups, deletes)
    }

    #[test]
    fn defaults_follow_the_engine() {
        let policy = |engine, groups| check(engine, None, groups, None).map(|declared| declared.deletes);
        assert_eq!(policy("deduplicate", None), Ok(Deletes::Remove));
        assert_eq!(policy("partial-update", None), Ok(Deletes::Refuse));
        assert_eq!(policy("partial-update", Some(r#"{"seq": ["price"]}"#)), Ok(Deletes::Retract));
    }

    #[test]
    fn a_group_is_read_in_both_spellings() {
        let groups = check("partial-update", None, Some(r#"{"seq, other": {"fields": ["price"], "on_delete": "remove"}, "a,b": ["stock"]}"#), None);
        let Ok(Declaration { engine: Engine::PartialUpdate { groups }, .. }) = groups else { unreachable!("{groups:?}") };
        assert_eq!(groups.len(), 2);
        assert!(groups.contains(&Group { sequence: vec![3, 4], fields: vec![1], remove: true }));
        assert!(groups.contains(&Group { sequence: vec![7], fields: vec![2], remove: false }));
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_name() {
        let told = |engine: &str, sequence: Option<&[&str]>, groups, deletes| match check(engine, sequence, groups, deletes) {
            Err(refusal) => format!("{} / {}", refusal.message, refusal.hint),
            Ok(declared) => unreachable!("{declared:?}"),
        };
        assert_eq!(told("deduplicat", None, None, None), "engine \"deduplicat\" does not exist / Did you mean \"deduplicate\"?");
        assert_eq!(told("deduplicate", Some(&["seqq"]), None, None), "column \"seqq\" of shop.goods does not exist / Did you mean \"seq\"?");
        for (engine, sequence, groups, deletes, part) in [
            ("deduplicate", None, Some(r#"{"seq": ["price"]}"#), None, "takes no groups"),
            ("deduplicate", Some(["k"].as_slice()), None, None, "primary key"),
            ("deduplicate", Some(&["total"]), None, None, "filled by PostgreSQL"),
            ("deduplicate", Some(&["shape"]), None, None, "without an order"),
            ("deduplicate", Some(&["seq", "seq"]), None, None, "twice"),
            ("deduplicate", None, None, Some("retract"), "needs sequence groups"),
            ("partial-update", Some(&["seq"]), None, None, "takes no sequence"),
            ("partial-update", None, Some("[]"), None, "not a JSON object"),
            ("partial-update", None, Some("{}"), None, "empty"),
            ("partial-update", None, Some(r#"{"seq": 1}"#), None, "neither an array"),
            ("partial-update", None, Some(r#"{"seq": []}"#), None, "guards no field"),
            ("partial-update", None, Some(r#"{"seq": [1]}"#), None, "not a string"),
            ("partial-update", None, Some(r#"{"seq": ["price"], "other": ["price"]}"#), None, "twice"),
            ("partial-update", None, Some(r#"{"seq": {"field": ["price"]}}"#), None, "Did you mean \"fields\"?"),
            ("partial-update", None, Some(r#"{"seq": {"fields": ["price"], "on_delete": "x"}}"#), None, "neither \"retract\" nor"),
            ("partial-update", None, Some(r#"{"seq": ["price"]}"#), Some("remove"), "cannot be combined"),
            ("partial-update", None, Some(r#"{"seq": {"fields": ["price"], "on_delete": "remove"}}"#), Some("ignore"), "contradicts"),
            (
                "partial-update",
                None,
                Some(r#"{"seq": {"fields": ["price"], "on_delete": "remove"}, "other": {"fields": ["stock"], "on_delete": "remove"}}"#),
                None,
                "second",
            ),
            ("partial-update", None, None, Some("drop"), "deletes policy \"drop\""),
        ] {
            let text = told(engine, sequence, groups, deletes);
            assert!(text.contains(part), "{text}");
        }
    }
}
