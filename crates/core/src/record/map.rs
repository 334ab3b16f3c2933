//! The column map of a projection or a lookup: for each column of the table, where in the event its value stands.
//!
//! `"payload.order.sku"` is a path, its parts parted by dots; `["payload", "a.b", "c"]` is the same with parts that contain dots; `{"const": 7}` is a value of
//! its own. The first part is a field of the event.

use crate::names::nearest;
use serde_json::Value;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A path into the event, at least the event's field.
    Path(Vec<String>),
    /// A value of its own: that of the map under `const`, which PostgreSQL reads there, so that numbers stay exact.
    Const,
}

/// The fields of an event that a path may begin with; the first two go deeper.
pub const FIELDS: [&str; 8] = ["payload", "lookups", "seq", "source", "type", "event_id", "occurred_at", "recorded_at"];
const DEEP: usize = 2;

/// A map that cannot work: what is wrong and what to do. `column` is true where it is a column that does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Whether the fault is an unknown column.
    pub column: bool,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: String,
}

const SHAPE: &str = "Write {\"column\": \"payload.path.to.value\", …}: a path from payload, lookups, seq, source, type, event_id, occurred_at or recorded_at, or {\"const\": value}.";

fn refuse<T>(message: impl Into<String>, hint: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { column: false, message: message.into(), hint: hint.into() })
}

/// Reads a map. `columns` are the names that may be mapped, `fields` the fields of the event that may be named.
pub fn parse(text: &str, columns: &[&str], fields: &[&str]) -> Result<Vec<(String, Source)>, Refusal> {
    let Ok(Value::Object(object)) = serde_json::from_str::<Value>(text) else {
        return refuse("the column map is not a JSON object", SHAPE);
    };
    if object.is_empty() {
        return refuse("the column map is empty", SHAPE);
    }
    object
        .iter()
        .map(|(column, value)| {
            if !columns.contains(&column.as_str()) {
                let hint = match nearest(column, columns.iter().copied()) {
                    Some(near) => format!("Did you mean \"{near}\"?"),
                    None => format!("Its columns are {}.", columns.join(", ")),
                };
                return Err(Refusal { column: true, message: format!("column \"{column}\" does not exist or cannot be written"), hint });
            }
            Ok((column.clone(), source(column, value, fields)?))
        })
        .collect()
}

fn source(column: &str, value: &Value, fields: &[&str]) -> Result<Source, Refusal> {
    match value {
        Value::String(path) => parts(column, path.split('.').map(str::to_string).collect(), fields),
        Value::Array(given) => {
            let path: Vec<String> = given.iter().filter_map(|part| part.as_str().map(str::to_string)).collect();
            if path.len() < given.len() || path.is_empty() {
                return refuse(format!("the path of column \"{column}\" is not an array of strings"), SHAPE);
            }
            parts(column, path, fields)
        }
        Value::Object(options) => match options.iter().next() {
            Some((name, _)) if name == "const" && options.len() == 1 => Ok(Source::Const),
            Some((name, _)) => refuse(format!("column \"{column}\" has the unknown source \"{name}\""), "Did you mean {\"const\": value}?"),
            None => refuse(format!("the source of column \"{column}\" is empty"), SHAPE),
        },
        other => refuse(format!("the source of column \"{column}\" is {other}"), SHAPE),
    }
}

fn parts(column: &str, path: Vec<String>, fields: &[&str]) -> Result<Source, Refusal> {
    let first = path[0].as_str();
    let Some(place) = FIELDS.iter().position(|field| *field == first && fields.contains(field)) else {
        let hint = match nearest(first, fields.iter().copied()) {
            Some(near) => format!("Did you mean \"{near}\"?"),
            None => SHAPE.to_string(),
        };
        return refuse(format!("the path of column \"{column}\" begins with \"{first}\", which events do not have"), hint);
    };
    if place >= DEEP && path.len() > 1 {
        return refuse(format!("the path of column \"{column}\" goes into \"{first}\", which has no parts"), format!("Write \"{first}\" alone."));
    }
    if path.iter().any(String::is_empty) {
        return refuse(
            format!("the path of column \"{column}\" has an empty part"),
            "Part names by single dots; write a name with dots as an array.",
        );
    }
    Ok(Source::Path(path))
}

impl Source {
    /// Whether the value is known only when the event has its number.
    pub fn numbered(&self) -> bool {
        matches!(self, Source::Path(path) if path[0] == "seq")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const COLUMNS: [&str; 3] = ["sku", "qty", "at"];

    fn told(text: &str) -> String {
        let refusal = parse(text, &COLUMNS, &FIELDS).unwrap_err();
        format!("{} / {}", refusal.message, refusal.hint)
    }

    #[test]
    fn every_spelling_is_read() {
        let map = parse(r#"{"sku": "payload.item.sku", "qty": ["payload", "a.b"], "at": {"const": 1.10}}"#, &COLUMNS, &FIELDS).unwrap();
        let of = |name: &str| map.iter().find(|(column, _)| column == name).map(|(_, source)| source.clone());
        assert_eq!(of("sku"), Some(Source::Path(vec!["payload".into(), "item".into(), "sku".into()])));
        assert_eq!(of("qty"), Some(Source::Path(vec!["payload".into(), "a.b".into()])));
        assert!(matches!(of("at"), Some(Source::Const)));
        assert!(parse(r#"{"at": "seq"}"#, &COLUMNS, &FIELDS).unwrap()[0].1.numbered());
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_name() {
        for (text, part) in [
            ("[]", "not a JSON object"),
            ("{}", "is empty"),
            (r#"{"skuu": "payload.x"}"#, "column \"skuu\" does not exist or cannot be written / Did you mean \"sku\"?"),
            (r#"{"sku": "paylod.x"}"#, "begins with \"paylod\", which events do not have / Did you mean \"payload\"?"),
            (r#"{"sku": "seq.x"}"#, "goes into \"seq\""),
            (r#"{"sku": "payload..x"}"#, "empty part"),
            (r#"{"sku": ""}"#, "begins with \"\""),
            (r#"{"sku": []}"#, "not an array of strings"),
            (r#"{"sku": ["payload", 1]}"#, "not an array of strings"),
            (r#"{"sku": {"konst": 1}}"#, "unknown source \"konst\""),
            (r#"{"sku": {}}"#, "is empty"),
            (r#"{"sku": 7}"#, "is 7"),
        ] {
            assert!(told(text).contains(part), "{text}: {}", told(text));
        }
        assert!(parse(r#"{"sku": "lookups.x"}"#, &COLUMNS, &["payload"]).is_err());
    }
}
