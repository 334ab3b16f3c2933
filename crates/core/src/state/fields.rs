//! What `create_state` was told of single columns: the function that merges each, and its options.

use super::declare::{Refusal, Why, column, refuse, unknown, value_column};
use super::{Column, Family, Table};
use serde_json::{Map, Value};

/// How the values of one column meet, by Paimon's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Function {
    /// The first value, also null.
    FirstValue,
    /// The first value that is not null.
    FirstNonNullValue,
    /// The last value, also null.
    LastValue,
    /// The last value that is not null.
    LastNonNullValue,
    /// The sum.
    Sum,
    /// The product.
    Product,
    /// How many values were not null.
    Count,
    /// The greatest value.
    Max,
    /// The least value.
    Min,
    /// Whether all are true.
    BoolAnd,
    /// Whether one is true.
    BoolOr,
    /// Texts joined by a separator.
    Listagg {
        /// Stands between two texts.
        separator: String,
        /// Whether a part that is there already is left out.
        distinct: bool,
    },
    /// The elements of all arrays.
    Collect {
        /// Whether an element that is there already is left out.
        distinct: bool,
    },
    /// The entries of all maps; of one key the last.
    MergeMap,
    /// Rows in a jsonb array.
    NestedUpdate {
        /// Fields that identify a nested row, which replaces the one before it; empty: rows are appended.
        key: Vec<String>,
        /// Fields that say which of two nested rows is newer; empty: the later one is.
        sequence: Vec<String>,
        /// The most rows that are kept.
        limit: Option<u32>,
    },
    /// The union of HyperLogLog sketches.
    HllUnion,
}

const FIRST_VALUE: &str = "first_value";
const FIRST_NON_NULL_VALUE: &str = "first_non_null_value";
const LAST_VALUE: &str = "last_value";
const LAST_NON_NULL_VALUE: &str = "last_non_null_value";
const SUM: &str = "sum";
const PRODUCT: &str = "product";
const COUNT: &str = "count";
const MAX: &str = "max";
const MIN: &str = "min";
const BOOL_AND: &str = "bool_and";
const BOOL_OR: &str = "bool_or";
const LISTAGG: &str = "listagg";
const COLLECT: &str = "collect";
const MERGE_MAP: &str = "merge_map";
const NESTED_UPDATE: &str = "nested_update";
const HLL_UNION: &str = "hll_union";

/// The functions there are.
pub const FUNCTIONS: [&str; 16] = [
    FIRST_VALUE,
    FIRST_NON_NULL_VALUE,
    LAST_VALUE,
    LAST_NON_NULL_VALUE,
    SUM,
    PRODUCT,
    COUNT,
    MAX,
    MIN,
    BOOL_AND,
    BOOL_OR,
    LISTAGG,
    COLLECT,
    MERGE_MAP,
    NESTED_UPDATE,
    HLL_UNION,
];

impl Function {
    /// Its name in a declaration.
    pub fn name(&self) -> &'static str {
        match self {
            Function::FirstValue => FIRST_VALUE,
            Function::FirstNonNullValue => FIRST_NON_NULL_VALUE,
            Function::LastValue => LAST_VALUE,
            Function::LastNonNullValue => LAST_NON_NULL_VALUE,
            Function::Sum => SUM,
            Function::Product => PRODUCT,
            Function::Count => COUNT,
            Function::Max => MAX,
            Function::Min => MIN,
            Function::BoolAnd => BOOL_AND,
            Function::BoolOr => BOOL_OR,
            Function::Listagg { .. } => LISTAGG,
            Function::Collect { .. } => COLLECT,
            Function::MergeMap => MERGE_MAP,
            Function::NestedUpdate { .. } => NESTED_UPDATE,
            Function::HllUnion => HLL_UNION,
        }
    }

    fn named(name: &str) -> Option<Function> {
        Some(match name {
            FIRST_VALUE => Function::FirstValue,
            FIRST_NON_NULL_VALUE => Function::FirstNonNullValue,
            LAST_VALUE => Function::LastValue,
            LAST_NON_NULL_VALUE => Function::LastNonNullValue,
            SUM => Function::Sum,
            PRODUCT => Function::Product,
            COUNT => Function::Count,
            MAX => Function::Max,
            MIN => Function::Min,
            BOOL_AND => Function::BoolAnd,
            BOOL_OR => Function::BoolOr,
            LISTAGG => Function::Listagg { separator: ",".into(), distinct: false },
            COLLECT => Function::Collect { distinct: false },
            MERGE_MAP => Function::MergeMap,
            NESTED_UPDATE => Function::NestedUpdate { key: Vec::new(), sequence: Vec::new(), limit: None },
            HLL_UNION => Function::HllUnion,
            _ => return None,
        })
    }

    /// Whether every row adds something of its own, also one that is older than the row stored.
    pub fn gathers(&self) -> bool {
        !matches!(self, Function::LastValue)
    }

    /// Whether the values may meet in any order and grouping, with the same result to the last digit.
    pub fn commutes(&self, column: &Column) -> bool {
        match self {
            Function::Sum => column.family != Family::Float,
            Function::Count | Function::Max | Function::Min | Function::BoolAnd | Function::BoolOr | Function::HllUnion => true,
            _ => false,
        }
    }

    /// Whether rows that arrive one after the other can be folded into one beforehand.
    pub fn folds(&self, column: &Column) -> bool {
        match self {
            Function::Product | Function::Listagg { distinct: true, .. } => false,
            Function::Sum => column.family != Family::Float,
            Function::MergeMap => column.family == Family::Jsonb,
            _ => true,
        }
    }

    /// Why a value cannot be taken back; none if it can.
    fn keeps(&self, column: &Column) -> Option<&'static str> {
        match self {
            Function::LastValue | Function::LastNonNullValue | Function::Count | Function::Collect { distinct: false } => None,
            Function::Sum if column.family == Family::Float => Some("taking a floating-point number back does not give the sum without it"),
            Function::Sum => None,
            Function::NestedUpdate { limit: None, .. } => None,
            Function::NestedUpdate { .. } => Some("rows above count_limit were not kept"),
            _ => Some("the values before it are not kept"),
        }
    }

    fn takes(&self, column: &Column) -> Result<(), &'static str> {
        let numbers = matches!(column.family, Family::Integer | Family::Numeric | Family::Float);
        let (fits, needs) = match self {
            Function::Sum => (numbers || column.family == Family::Interval, "a number or interval"),
            Function::Product => (numbers, "a number"),
            Function::Count => (matches!(column.family, Family::Integer | Family::Numeric), "an integer or numeric"),
            Function::Max | Function::Min => (column.less.is_some(), "a type that has an order"),
            Function::BoolAnd | Function::BoolOr => (column.family == Family::Boolean, "boolean"),
            Function::Listagg { .. } => (column.family == Family::Text, "text or varchar"),
            Function::Collect { distinct: false } => (column.family == Family::Array, "an array"),
            Function::Collect { distinct: true } => {
                (column.family == Family::Array && column.equal.is_some(), "an array whose elements have equality")
            }
            Function::MergeMap => (matches!(column.family, Family::Jsonb | Family::Hstore), "jsonb (an object) or hstore"),
            Function::NestedUpdate { .. } => (column.family == Family::Jsonb, "jsonb (an array of objects)"),
            Function::HllUnion => (column.family == Family::Hll, "type hll of the extension hll (package postgresql-15-hll)"),
            _ => return Ok(()),
        };
        if fits { Ok(()) } else { Err(needs) }
    }
}

/// What was declared of one column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Field {
    /// The function that merges it; none: the engine's own way.
    pub function: Option<Function>,
    /// Whether deletes and retractions leave it alone.
    pub ignore_retract: bool,
    /// What a null or missing value stands for.
    pub default: Option<String>,
    /// Whether an explicit null is written where a missing field leaves the stored value.
    pub null_sets: bool,
}

impl Field {
    /// Why a retraction that reaches the column cannot be exact; none if it can.
    pub fn cannot_retract(&self, column: &Column) -> Option<&'static str> {
        if self.ignore_retract { None } else { self.function.as_ref().and_then(|function| function.keeps(column)) }
    }
}

const SHAPE: &str = "Write {\"column\": \"function\"} or {\"column\": {\"function\": …, \"ignore_retract\": …, \"default\": …}}.";
/// Stands for every column that has no function of its own (Paimon's fields.default-aggregate-function).
const EVERY: &str = "*";
const OPTIONS: [&str; 9] = ["function", "ignore_retract", "default", "null", "separator", "distinct", "nested_key", "nested_sequence", "count_limit"];

/// Reads `fields`, the text of a JSON object; one entry per column of the table. `ordering` are the sequence columns, which take no function.
pub fn parse(table: &Table, text: Option<&str>, ordering: &[usize]) -> Result<Vec<Field>, Refusal> {
    let mut fields = vec![Field::default(); table.columns.len()];
    let Some(text) = text else { return Ok(fields) };
    let Ok(Value::Object(object)) = serde_json::from_str::<Value>(text) else {
        return refuse(Why::Value, "fields is not a JSON object", SHAPE);
    };
    for (name, told) in &object {
        if name == EVERY && table.find(EVERY).is_none() {
            continue;
        }
        let index = value_column(table, name, "merged field")?;
        let field = parse_field(name, told)?;
        if let Some(function) = &field.function {
            if ordering.contains(&index) {
                return refuse(
                    Why::Value,
                    format!("column \"{name}\" is a sequence column and takes no aggregate function: it always holds the newest sequence"),
                    "Leave the function out.",
                );
            }
            check_type(&table.columns[index], function)?;
        }
        fields[index] = field;
    }
    if let Some(told) = object.get(EVERY)
        && table.find(EVERY).is_none()
    {
        let every = parse_field(EVERY, told)?;
        if every.default.is_some() || every.null_sets {
            return refuse(Why::Value, "default and null belong to a column, not to \"*\"", "Name the column.");
        }
        for (index, (column, field)) in table.columns.iter().zip(&mut fields).enumerate() {
            if !column.written || table.key.contains(&index) || ordering.contains(&index) || field.function.is_some() {
                continue;
            }
            if let Some(function) = &every.function {
                check_type(column, function)?;
            }
            field.function.clone_from(&every.function);
            field.ignore_retract |= every.ignore_retract;
        }
    }
    Ok(fields)
}

fn check_type(column: &Column, function: &Function) -> Result<(), Refusal> {
    let Err(needs) = function.takes(column) else { return Ok(()) };
    let hint = match function {
        Function::HllUnion if column.family != Family::Hll => "Install the package, run CREATE EXTENSION hll and give the column type hll.".into(),
        _ => format!("Use another function, or a column of {needs}."),
    };
    refuse(Why::Value, format!("{} needs {needs}, but column \"{}\" has type {}", function.name(), column.name, column.bare), hint)
}

fn parse_field(name: &str, told: &Value) -> Result<Field, Refusal> {
    let options = match told {
        Value::String(function) => return Ok(Field { function: Some(function_named(name, function)?), ..Field::default() }),
        Value::Object(options) => options,
        _ => return refuse(Why::Value, format!("field \"{name}\" is neither the name of a function nor an object"), SHAPE),
    };
    for option in options.keys() {
        if !OPTIONS.contains(&option.as_str()) {
            return unknown(Why::Value, format!("option \"{option}\" of field \"{name}\" does not exist"), option, &OPTIONS, "The options are");
        }
    }
    let mut function = match options.get("function") {
        None => None,
        Some(Value::String(function)) => Some(function_named(name, function)?),
        Some(_) => return refuse(Why::Value, format!("function of field \"{name}\" is not a string"), SHAPE),
    };
    apply_options(name, options, function.as_mut())?;
    let default = match options.get("default") {
        None => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Some(value.to_string()),
        Some(_) => {
            return refuse(
                Why::Value,
                format!("default of field \"{name}\" is neither a string nor a number nor a boolean"),
                "Write it as PostgreSQL writes the column's values, in a string.",
            );
        }
    };
    let null_sets = match options.get("null").map(Value::as_str) {
        None | Some(Some("ignore")) => false,
        Some(Some("set")) => true,
        Some(_) => {
            return refuse(
                Why::Value,
                format!("null of field \"{name}\" is neither \"ignore\" nor \"set\""),
                "\"ignore\" leaves the stored value, \"set\" writes the null; a missing field always leaves it.",
            );
        }
    };
    Ok(Field { function, ignore_retract: boolean(name, options, "ignore_retract")?, default, null_sets })
}

fn function_named(field: &str, name: &str) -> Result<Function, Refusal> {
    match Function::named(name) {
        Some(function) => Ok(function),
        None => unknown(Why::Value, format!("function \"{name}\" of field \"{field}\" does not exist"), name, &FUNCTIONS, "The functions are"),
    }
}

/// Hands the options to the function; one that the function does not have is refused.
fn apply_options(field: &str, options: &Map<String, Value>, function: Option<&mut Function>) -> Result<(), Refusal> {
    let called = function.as_deref().map_or("a field without a function", Function::name);
    let allowed: &[&str] = match function.as_deref() {
        Some(Function::Listagg { .. }) => &["separator", "distinct"],
        Some(Function::Collect { .. }) => &["distinct"],
        Some(Function::NestedUpdate { .. }) => &["nested_key", "nested_sequence", "count_limit"],
        _ => &[],
    };
    let general = ["function", "ignore_retract", "default", "null"];
    if let Some(option) = options.keys().find(|option| !general.contains(&option.as_str()) && !allowed.contains(&option.as_str())) {
        return refuse(
            Why::Value,
            format!("field \"{field}\" has option \"{option}\", which {called} does not take"),
            "separator is for listagg, distinct for listagg and collect, nested_key, nested_sequence and count_limit for nested_update.",
        );
    }
    match function {
        Some(Function::Listagg { separator, distinct }) => {
            match options.get("separator") {
                None => {}
                Some(Value::String(text)) => separator.clone_from(text),
                Some(_) => return refuse(Why::Value, format!("separator of field \"{field}\" is not a string"), SHAPE),
            }
            *distinct = boolean(field, options, "distinct")?;
            if *distinct && separator.is_empty() {
                return refuse(
                    Why::Value,
                    format!("field \"{field}\" is distinct and has an empty separator, so its parts cannot be told apart"),
                    "Give a separator that the parts do not contain.",
                );
            }
        }
        Some(Function::Collect { distinct }) => *distinct = boolean(field, options, "distinct")?,
        Some(Function::NestedUpdate { key, sequence, limit }) => {
            *key = names(field, options, "nested_key")?;
            *sequence = names(field, options, "nested_sequence")?;
            if key.is_empty() && !sequence.is_empty() {
                return refuse(
                    Why::Value,
                    format!("field \"{field}\" has nested_sequence without nested_key: rows that are only appended are never compared"),
                    "Name the fields that identify a nested row in nested_key.",
                );
            }
            *limit = match options.get("count_limit") {
                None => None,
                Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0) {
                    Some(limit) => Some(limit),
                    None => return refuse(Why::Value, format!("count_limit of field \"{field}\" is {value}"), "Give a whole number of at least 1."),
                },
            };
        }
        _ => {}
    }
    Ok(())
}

fn boolean(field: &str, options: &Map<String, Value>, option: &str) -> Result<bool, Refusal> {
    match options.get(option) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(value) => refuse(Why::Value, format!("{option} of field \"{field}\" is {value}"), "Give true or false."),
    }
}

fn names(field: &str, options: &Map<String, Value>, option: &str) -> Result<Vec<String>, Refusal> {
    const HINT: &str = "Give an array of names of fields of the nested rows.";
    match options.get(option) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => {
            let mut names: Vec<String> = Vec::with_capacity(items.len());
            for item in items {
                match item {
                    Value::String(name) if !names.contains(name) => names.push(name.clone()),
                    _ => {
                        return refuse(
                            Why::Value,
                            format!("{option} of field \"{field}\" has {item}, which is no string or stands there twice"),
                            HINT,
                        );
                    }
                }
            }
            Ok(names)
        }
        Some(value) => refuse(Why::Value, format!("{option} of field \"{field}\" is {value}"), HINT),
    }
}

/// Checks the name of the field that carries the kind of each row: a text column, or a name that is no column.
pub fn check_rowkind(table: &Table, name: &str) -> Result<(), Refusal> {
    if name.is_empty() {
        return refuse(Why::Value, "rowkind is empty", "Name the field of the rows that holds +I, +U, -U or -D.");
    }
    if table.find(name).is_none() {
        return Ok(());
    }
    let index = column(table, name)?;
    if table.key.contains(&index) || table.columns[index].family != Family::Text {
        return refuse(
            Why::Value,
            format!("column \"{name}\" cannot hold the kind of a row: it is a key column or not text"),
            "Name a text column outside the key, or a field of the rows that is no column.",
        );
    }
    Ok(())
}
