//! What `create_state` was told, checked against the table: conflicts are found here, when the table is declared, and never by a merge.

use super::fields::{self, Field, Function};
use super::{Column, Table};
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
    /// The first row stays.
    FirstRow,
    /// Each column is merged by its aggregate function.
    Aggregation {
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
    /// It is taken back field by field: aggregate functions subtract it, other fields of the sequence groups it is not older than become null, and the groups
    /// advance.
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
pub const ENGINES: [&str; 4] = ["deduplicate", "first-row", "aggregation", "partial-update"];

/// What `create_state` was given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told<'a> {
    /// The engine's name.
    pub engine: &'a str,
    /// Columns that order the rows.
    pub sequence: Option<&'a [String]>,
    /// Sequence groups: the text of a JSON object.
    pub groups: Option<&'a str>,
    /// What deletes do.
    pub deletes: Option<&'a str>,
    /// Functions and options of single columns: the text of a JSON object.
    pub fields: Option<&'a str>,
    /// The field of the rows that carries their kind.
    pub rowkind: Option<&'a str>,
}

/// A checked declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// How rows merge.
    pub engine: Engine,
    /// What deletes do.
    pub deletes: Deletes,
    /// What was declared of each column of the table.
    pub fields: Vec<Field>,
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

pub(super) fn refuse<T>(why: Why, message: impl Into<String>, hint: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { why, message: message.into(), hint: hint.into() })
}

pub(super) fn unknown<T>(why: Why, message: String, name: &str, known: &[&str], otherwise: &str) -> Result<T, Refusal> {
    let hint = match nearest(name, known.iter().copied()) {
        Some(near) => format!("Did you mean \"{near}\"?"),
        None => format!("{otherwise} {}.", known.join(", ")),
    };
    refuse(why, message, hint)
}

impl Declaration {
    /// Checks what `create_state` was given.
    pub fn check(table: &Table, told: &Told) -> Result<Declaration, Refusal> {
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
        let engine = engine(table, told)?;
        let ordering: Vec<usize> = sequences_of(&engine).concat();
        let mut fields = fields::parse(table, told.fields, &ordering)?;
        check_fields(table, &engine, &ordering, &fields)?;
        if matches!(engine, Engine::Aggregation { .. }) {
            for (index, field) in fields.iter_mut().enumerate() {
                if !ordering.contains(&index) && field.function.is_none() {
                    field.function = Some(Function::LastNonNullValue);
                }
            }
        }
        if let Some(name) = told.rowkind {
            fields::check_rowkind(table, name)?;
        }
        let deletes = deletes_policy(table, &engine, &fields, told.deletes)?;
        Ok(Declaration { engine, deletes, fields })
    }

    /// Whether keys without a row must be remembered with their sequence.
    pub fn remembers(&self) -> bool {
        let (removes, retracts) = (self.deletes == Deletes::Remove, self.deletes == Deletes::Retract && !self.owes());
        match &self.engine {
            Engine::Deduplicate { sequence } => removes && !sequence.is_empty(),
            Engine::FirstRow => false,
            Engine::Aggregation { sequence } => (removes || retracts) && !sequence.is_empty(),
            Engine::PartialUpdate { groups } => retracts && !groups.is_empty(),
        }
    }

    /// Whether a retraction of a key without a row makes one, which holds what is to be subtracted from what is still to come.
    pub fn owes(&self) -> bool {
        let subtracts = |field: &Field| !field.ignore_retract && matches!(field.function, Some(Function::Sum | Function::Count));
        self.deletes == Deletes::Retract && !self.removes_by_group() && self.fields.iter().any(subtracts)
    }

    fn removes_by_group(&self) -> bool {
        matches!(&self.engine, Engine::PartialUpdate { groups } if groups.iter().any(|group| group.remove))
    }

    /// The sequences of the engine: one for an engine with a sequence, one per group for `partial-update`.
    pub fn sequences(&self) -> Vec<&[usize]> {
        sequences_of(&self.engine)
    }
}

fn sequences_of(engine: &Engine) -> Vec<&[usize]> {
    match engine {
        Engine::FirstRow => Vec::new(),
        Engine::Deduplicate { sequence } | Engine::Aggregation { sequence } if sequence.is_empty() => Vec::new(),
        Engine::Deduplicate { sequence } | Engine::Aggregation { sequence } => vec![sequence],
        Engine::PartialUpdate { groups } => groups.iter().map(|group| group.sequence.as_slice()).collect(),
    }
}

fn engine(table: &Table, told: &Told) -> Result<Engine, Refusal> {
    let sequence = told.sequence.unwrap_or_default();
    let no_groups = |why: &str, hint: &str| match told.groups {
        None => Ok(()),
        Some(_) => refuse(Why::Value, format!("engine \"{}\" takes no groups: {why}", told.engine), hint),
    };
    match told.engine {
        "deduplicate" => {
            no_groups(
                "its newest row replaces the whole row",
                "Name the columns that order the rows in sequence, or declare engine \"partial-update\".",
            )?;
            Ok(Engine::Deduplicate { sequence: sequence_columns(table, sequence)? })
        }
        "first-row" => {
            no_groups("its first row stays as it is", "Leave groups out, or declare engine \"partial-update\".")?;
            if !sequence.is_empty() {
                return refuse(
                    Why::Value,
                    "engine \"first-row\" takes no sequence: the row that arrives first stays, whatever it says of itself",
                    "Leave sequence out, or declare engine \"aggregation\" with function \"first_value\".",
                );
            }
            Ok(Engine::FirstRow)
        }
        "aggregation" => {
            no_groups(
                "one sequence orders its rows",
                "Name the columns that order the rows in sequence, or declare engine \"partial-update\", which takes functions too.",
            )?;
            Ok(Engine::Aggregation { sequence: sequence_columns(table, sequence)? })
        }
        "partial-update" => {
            if !sequence.is_empty() {
                return refuse(
                    Why::Value,
                    "engine \"partial-update\" takes no sequence: one sequence cannot order columns that arrive apart",
                    "Give the sequence column its fields in groups, as in {\"updated_at\": [\"price\", \"stock\"]}.",
                );
            }
            Ok(Engine::PartialUpdate { groups: sequence_groups(table, told.groups)? })
        }
        other => unknown(Why::Value, format!("engine \"{other}\" does not exist"), other, &ENGINES, "The engines are"),
    }
}

/// Refuses functions and defaults that the engine has no use for.
fn check_fields(table: &Table, engine: &Engine, ordering: &[usize], fields: &[Field]) -> Result<(), Refusal> {
    for (index, field) in fields.iter().enumerate() {
        let name = &table.columns[index].name;
        let ungrouped = match engine {
            Engine::PartialUpdate { groups } => !ordering.contains(&index) && !groups.iter().any(|group| group.fields.contains(&index)),
            _ => false,
        };
        if field.null_sets && (!ungrouped || field.function.is_some()) {
            return refuse(
                Why::Value,
                format!("field \"{name}\" says what a null does, which is open only for ungrouped columns of \"partial-update\" without a function"),
                "Leave \"null\" out: whole rows and groups store a null, functions treat it in their own way.",
            );
        }
        match engine {
            Engine::Deduplicate { .. } | Engine::FirstRow if field.function.is_some() || field.ignore_retract => {
                return refuse(
                    Why::Value,
                    format!("field \"{name}\" has a function or ignore_retract, but its engine keeps whole rows"),
                    "Leave them out, or declare engine \"aggregation\" or \"partial-update\".",
                );
            }
            Engine::PartialUpdate { .. } if field.default.is_some() && field.function.is_none() && ungrouped => {
                return refuse(
                    Why::Value,
                    format!("field \"{name}\" has a default, which every row without a value for it would write over the one stored"),
                    "Leave the default out, or put the column into a group, whose rows bring all its fields.",
                );
            }
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn column(table: &Table, name: &str) -> Result<usize, Refusal> {
    match table.find(name) {
        Some(index) => Ok(index),
        None => {
            let known: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
            unknown(Why::Column, format!("column \"{name}\" of {} does not exist", table.qualified), name, &known, "Its columns are")
        }
    }
}

pub(super) fn value_column(table: &Table, name: &str, role: &str) -> Result<usize, Refusal> {
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

/// The first column that a retraction would have to change and cannot.
fn obstacle<'a>(table: &'a Table, fields: &[Field]) -> Option<(&'a Column, String)> {
    table.columns.iter().zip(fields).find_map(|(column, field)| {
        let why = field.cannot_retract(column)?;
        let function = field.function.as_ref().map_or("", Function::name);
        Some((column, format!("{function} of column \"{}\" cannot be retracted: {why}", column.name)))
    })
}

/// Refuses a policy under which deletes or retractions reach a field that cannot take them back.
fn check_retraction(table: &Table, fields: &[Field], policy: Deletes) -> Result<Deletes, Refusal> {
    let Some((column, why)) = obstacle(table, fields) else { return Ok(policy) };
    refuse(
        Why::Value,
        format!("deletes \"{}\" is not possible: {why}", policy.word()),
        format!("Say {{\"{}\": {{…, \"ignore_retract\": true}}}} in fields, or use deletes \"ignore\" or \"refuse\".", column.name),
    )
}

fn deletes_policy(table: &Table, engine: &Engine, fields: &[Field], word: Option<&str>) -> Result<Deletes, Refusal> {
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
        Engine::FirstRow => match given {
            Some(policy @ (Deletes::Remove | Deletes::Retract)) => refuse(
                Why::Value,
                format!("deletes \"{}\" is not possible with engine \"first-row\", which keeps the first row of a key for good", policy.word()),
                "Use \"ignore\" or \"refuse\".",
            ),
            other => Ok(other.unwrap_or(Deletes::Refuse)),
        },
        Engine::Aggregation { .. } => match given {
            Some(policy @ (Deletes::Remove | Deletes::Retract)) => check_retraction(table, fields, policy),
            Some(policy) => Ok(policy),
            None if obstacle(table, fields).is_some() => Ok(Deletes::Refuse),
            None => Ok(Deletes::Retract),
        },
        Engine::PartialUpdate { groups } if groups.is_empty() => match given {
            Some(Deletes::Retract) if fields.iter().all(|field| field.function.is_none()) => refuse(
                Why::Value,
                "deletes \"retract\" needs sequence groups or aggregate functions",
                "Declare groups or functions, or use \"remove\", \"ignore\" or \"refuse\".",
            ),
            Some(policy @ (Deletes::Remove | Deletes::Retract)) => check_retraction(table, fields, policy),
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
            Some(policy @ (Deletes::Ignore | Deletes::Refuse)) => Ok(policy),
            None if obstacle(table, fields).is_some() && !groups.iter().any(|group| group.remove) => Ok(Deletes::Refuse),
            Some(Deletes::Retract) | None => check_retraction(table, fields, Deletes::Retract),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::Family;
    use super::*;

    fn table() -> Table {
        let column = |name: &str| Column {
            name: name.into(),
            quoted: name.into(),
            type_sql: "integer".into(),
            bare: "integer".into(),
            family: if name == "shape" { Family::Float } else { Family::Integer },
            schema: "pg_catalog".into(),
            written: name != "total",
            less: (name != "shape").then(|| "OPERATOR(pg_catalog.<)".into()),
            equal: Some("OPERATOR(pg_catalog.=)".into()),
            default: None,
            null_sets: false,
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
        Declaration::check(&table(), &Told { engine, sequence: sequence.as_deref(), groups, deletes, ..Told::default() })
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
            ("first-row", Some(&["seq"]), None, None, "takes no sequence"),
            ("first-row", None, Some(r#"{"seq": ["price"]}"#), None, "takes no groups"),
            ("first-row", None, None, Some("remove"), "keeps the first row"),
            ("aggregation", None, Some(r#"{"seq": ["price"]}"#), None, "takes no groups"),
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

    fn fields(engine: &str, sequence: Option<&[&str]>, fields: &str, deletes: Option<&str>) -> Result<Declaration, Refusal> {
        let sequence: Option<Vec<String>> = sequence.map(|names| names.iter().map(|name| name.to_string()).collect());
        Declaration::check(&table(), &Told { engine, sequence: sequence.as_deref(), deletes, fields: Some(fields), ..Told::default() })
    }

    #[test]
    fn fields_without_a_function_take_the_one_for_all_and_else_the_engines() {
        let declared = fields(
            "aggregation",
            Some(&["seq"]),
            r#"{"*": "max", "price": "sum", "shape": "last_value", "stock": {"default": 0, "ignore_retract": true}}"#,
            None,
        );
        let Ok(declared) = declared else { unreachable!("{declared:?}") };
        let functions: Vec<Option<&str>> = declared.fields.iter().map(|field| field.function.as_ref().map(Function::name)).collect();
        assert_eq!(functions[1..5], [Some("sum"), Some("max"), None, Some("max")]);
        assert_eq!(declared.fields[2].default.as_deref(), Some("0"));
        assert!(declared.fields[2].ignore_retract);
        // A maximum cannot be taken back, so nothing reaches it unless that is said.
        assert_eq!(declared.deletes, Deletes::Refuse);
        let plain = fields("aggregation", None, r#"{"price": "sum"}"#, None);
        assert!(
            plain
                .is_ok_and(|plain| plain.deletes == Deletes::Retract && plain.owes() && plain.fields[2].function == Some(Function::LastNonNullValue))
        );
    }

    #[test]
    fn what_a_field_cannot_do_is_refused_with_its_reason() {
        for (engine, told, deletes, part) in [
            ("aggregation", r#"[]"#, None, "not a JSON object"),
            ("aggregation", r#"{"prise": "sum"}"#, None, "Did you mean \"price\"?"),
            ("aggregation", r#"{"price": "summ"}"#, None, "Did you mean \"sum\"?"),
            ("aggregation", r#"{"price": {"funktion": "sum"}}"#, None, "Did you mean \"function\"?"),
            ("aggregation", r#"{"price": 1}"#, None, "neither the name of a function"),
            ("aggregation", r#"{"k": "sum"}"#, None, "primary key"),
            ("aggregation", r#"{"total": "sum"}"#, None, "filled by PostgreSQL"),
            ("aggregation", r#"{"seq": "sum"}"#, None, "takes no aggregate function"),
            ("aggregation", r#"{"shape": "max"}"#, None, "needs a type that has an order"),
            ("aggregation", r#"{"price": "bool_or"}"#, None, "needs boolean"),
            ("aggregation", r#"{"price": "hll_union"}"#, None, "CREATE EXTENSION hll"),
            ("aggregation", r#"{"price": {"function": "sum", "separator": ","}}"#, None, "which sum does not take"),
            ("aggregation", r#"{"price": {"function": "sum", "ignore_retract": 1}}"#, None, "Give true or false"),
            ("aggregation", r#"{"price": "max"}"#, Some("retract"), "max of column \"price\" cannot be retracted"),
            ("aggregation", r#"{"shape": "sum"}"#, Some("retract"), "floating-point"),
            ("aggregation", r#"{"*": {"function": "sum", "default": 1}}"#, None, "belong to a column"),
            ("partial-update", r#"{"price": {"default": 1}}"#, None, "would write over"),
            ("partial-update", r#"{"price": "min"}"#, Some("remove"), "min of column \"price\" cannot be retracted"),
            ("deduplicate", r#"{"price": "sum"}"#, None, "keeps whole rows"),
            ("first-row", r#"{"price": "first_value"}"#, None, "keeps whole rows"),
        ] {
            let sequence: Option<&[&str]> = (engine == "aggregation").then_some(&["seq"]);
            match fields(engine, sequence, told, deletes) {
                Err(refusal) => assert!(format!("{} / {}", refusal.message, refusal.hint).contains(part), "{refusal:?}"),
                Ok(declared) => unreachable!("{told}: {declared:?}"),
            }
        }
    }
}
