//! The shape of a batch, read from its `jsonb` as PostgreSQL stores it (utils/jsonb.h; the same in every release, since tables on disk hold it): an array of
//! objects that name columns and the whole key. Names alone are read here, values never.

use std::cmp::Ordering;

const COUNT: u32 = 0x0fff_ffff;
const SCALAR: u32 = 0x1000_0000;
const OBJECT: u32 = 0x2000_0000;
const ARRAY: u32 = 0x4000_0000;
const ENTRY_LENGTH: u32 = 0x0fff_ffff;
const ENTRY_TYPE: u32 = 0x7000_0000;
const ENTRY_HAS_OFFSET: u32 = 0x8000_0000;
const ENTRY_STRING: u32 = 0;
const ENTRY_NUMERIC: u32 = 0x1000_0000;
const ENTRY_NULL: u32 = 0x4000_0000;
const ENTRY_CONTAINER: u32 = 0x5000_0000;

/// Why a batch will not do. Rows are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// It is another kind of JSON value.
    NotAnArray(&'static str),
    /// It has too many rows.
    TooLong(usize),
    /// A row is another kind of JSON value.
    NotAnObject(usize, &'static str),
    /// A row names something that is none of the columns.
    NoSuchField(usize, String),
    /// A row has no value for that column of the key.
    NoKey(usize, usize),
    /// It is not what PostgreSQL stores.
    Damaged,
}

/// The names that rows may and must use.
#[derive(Clone, Debug)]
pub struct Names {
    /// In the order in which an object stores its keys, with the place of those that belong to the primary key.
    sorted: Vec<(Box<[u8]>, Option<usize>)>,
    keys: usize,
}

/// An object stores its keys sorted, shorter ones first.
fn stored_order(left: &[u8], right: &[u8]) -> Ordering {
    left.len().cmp(&right.len()).then_with(|| left.cmp(right))
}

impl Names {
    /// Names that rows may use, and those of them that each row must give a value.
    pub fn new(fields: &[String], keys: &[String]) -> Self {
        let place = |field: &String| keys.iter().position(|key| key == field);
        let mut sorted: Vec<_> = fields.iter().map(|field| (field.as_bytes().into(), place(field))).collect();
        sorted.sort_unstable_by(|left: &(Box<[u8]>, _), right| stored_order(&left.0, &right.0));
        Names { sorted, keys: keys.len() }
    }
}

/// A container: its header, and where its entries and their data lie.
struct Container<'a> {
    header: u32,
    entries: &'a [u8],
    data: &'a [u8],
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_ne_bytes)
}

impl<'a> Container<'a> {
    fn open(bytes: &'a [u8]) -> Option<Self> {
        let header = number(bytes, 0)?;
        let count = usize::try_from(header & COUNT).ok()?;
        let length = 4 * if header & OBJECT != 0 { 2 * count } else { count };
        Some(Container { header, entries: bytes.get(4..4 + length)?, data: bytes.get(4 + length..)? })
    }

    fn len(&self) -> usize {
        (self.header & COUNT) as usize
    }

    /// Each entry's type and data, in order. Most entries hold their length, some the end of their data.
    fn children(&self) -> impl Iterator<Item = Option<(u32, &'a [u8])>> + use<'a> {
        let data = self.data;
        let mut start = 0;
        self.entries.chunks_exact(4).map(move |entry| {
            let entry = number(entry, 0)?;
            let length = (entry & ENTRY_LENGTH) as usize;
            let end = if entry & ENTRY_HAS_OFFSET != 0 { length } else { start + length };
            let kind = entry & ENTRY_TYPE;
            // What needs alignment has its padding before it.
            let from = if kind == ENTRY_CONTAINER { start.next_multiple_of(4) } else { start };
            start = end;
            Some((kind, data.get(from..end)?))
        })
    }
}

fn word(kind: u32, data: &[u8]) -> &'static str {
    match kind {
        ENTRY_STRING => "string",
        ENTRY_NUMERIC => "number",
        ENTRY_NULL => "null",
        ENTRY_CONTAINER if number(data, 0).is_some_and(|header| header & OBJECT != 0) => "object",
        ENTRY_CONTAINER => "array",
        _ => "boolean",
    }
}

/// Checks a batch, given as the bytes after the header of its varlena; answers how many rows it has, or the first that will not do.
pub fn check(bytes: &[u8], names: &Names, max: usize) -> Result<usize, Misfit> {
    let batch = Container::open(bytes).ok_or(Misfit::Damaged)?;
    if batch.header & ARRAY == 0 {
        return Err(Misfit::NotAnArray("object"));
    }
    if batch.header & SCALAR != 0 {
        let (kind, data) = batch.children().next().flatten().ok_or(Misfit::Damaged)?;
        return Err(Misfit::NotAnArray(word(kind, data)));
    }
    if batch.len() > max {
        return Err(Misfit::TooLong(batch.len()));
    }
    let mut given = vec![false; names.keys];
    for (row, child) in batch.children().enumerate() {
        let (kind, data) = child.ok_or(Misfit::Damaged)?;
        let object = if kind == ENTRY_CONTAINER {
            Container::open(data).ok_or(Misfit::Damaged)?
        } else {
            return Err(Misfit::NotAnObject(row + 1, word(kind, data)));
        };
        if object.header & OBJECT == 0 {
            return Err(Misfit::NotAnObject(row + 1, "array"));
        }
        check_row(&object, names, row + 1, &mut given)?;
    }
    Ok(batch.len())
}

fn check_row(object: &Container<'_>, names: &Names, row: usize, given: &mut [bool]) -> Result<(), Misfit> {
    given.fill(false);
    let mut known = names.sorted.iter();
    let values = object.entries.get(4 * object.len()..).ok_or(Misfit::Damaged)?;
    for (place, child) in object.children().take(object.len()).enumerate() {
        let (_, name) = child.ok_or(Misfit::Damaged)?;
        // Both are in the same order: one pass over the two.
        let Some((_, key)) = known.find(|(field, _)| stored_order(field, name) != Ordering::Less).filter(|(field, _)| **field == *name) else {
            return Err(Misfit::NoSuchField(row, String::from_utf8_lossy(name).into_owned()));
        };
        if let Some(key) = key {
            let value = number(values, 4 * place).ok_or(Misfit::Damaged)?;
            given[*key] = value & ENTRY_TYPE != ENTRY_NULL;
        }
    }
    match given.iter().position(|given| !given) {
        Some(key) => Err(Misfit::NoKey(row, key)),
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Writes a value as PostgreSQL stores it; one entry of four holds its end instead of its length. Numbers' and booleans' data is left empty.
    fn child(value: &Value, data: &mut Vec<u8>) -> u32 {
        let container = |data: &mut Vec<u8>, bytes: Vec<u8>| {
            data.resize(data.len().next_multiple_of(4), 0);
            data.extend(bytes);
            ENTRY_CONTAINER
        };
        match value {
            Value::Null => ENTRY_NULL,
            Value::Bool(_) => 0x2000_0000,
            Value::Number(_) => ENTRY_NUMERIC,
            Value::String(text) => {
                data.extend(text.bytes());
                ENTRY_STRING
            }
            Value::Array(_) | Value::Object(_) => container(data, stored(value)),
        }
    }

    fn stored(value: &Value) -> Vec<u8> {
        let (header, children): (u32, Vec<Value>) = match value {
            Value::Array(items) => (ARRAY | u32::try_from(items.len()).unwrap(), items.clone()),
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                members.sort_by(|left, right| stored_order(left.0.as_bytes(), right.0.as_bytes()));
                let names = members.iter().map(|(name, _)| Value::String((*name).clone()));
                let children = names.chain(members.iter().map(|(_, value)| (*value).clone())).collect();
                (OBJECT | u32::try_from(members.len()).unwrap(), children)
            }
            scalar => (ARRAY | SCALAR | 1, vec![scalar.clone()]),
        };
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for (place, value) in children.iter().enumerate() {
            let start = data.len();
            let kind = child(value, &mut data);
            let entry =
                if place % 4 == 3 { ENTRY_HAS_OFFSET | u32::try_from(data.len()).unwrap() } else { u32::try_from(data.len() - start).unwrap() };
            entries.push(kind | entry);
        }
        [header].iter().chain(&entries).flat_map(|number| number.to_ne_bytes()).chain(data).collect()
    }

    fn names() -> Names {
        Names::new(&["id", "name", "é", "k", "other"].map(String::from), &["k", "id"].map(String::from))
    }

    fn told(value: Value) -> Result<usize, Misfit> {
        check(&stored(&value), &names(), 3)
    }

    #[test]
    fn a_batch_that_fits_is_counted() {
        assert_eq!(told(json!([])), Ok(0));
        assert_eq!(told(json!([{"k": 1, "id": "x", "other": [{"a": null}], "é": null}, {"id": false, "k": {}}])), Ok(2));
    }

    #[test]
    fn the_first_row_that_will_not_do_is_named() {
        assert_eq!(told(json!({"id": 1})), Err(Misfit::NotAnArray("object")));
        for (value, word) in [(json!(null), "null"), (json!(7), "number"), (json!("x"), "string"), (json!(true), "boolean")] {
            assert_eq!(told(value.clone()), Err(Misfit::NotAnArray(word)));
            assert_eq!(told(json!([{"id": 1, "k": 1}, value])), Err(Misfit::NotAnObject(2, word)));
        }
        assert_eq!(told(json!([[]])), Err(Misfit::NotAnObject(1, "array")));
        assert_eq!(told(json!([1, 2, 3, 4])), Err(Misfit::TooLong(4)));
        assert_eq!(told(json!([{"id": 1, "k": 1, "nam": 1}])), Err(Misfit::NoSuchField(1, "nam".into())));
        assert_eq!(told(json!([{"id": 1, "k": 1, "": 1}])), Err(Misfit::NoSuchField(1, "".into())));
        assert_eq!(told(json!([{"id": 1, "k": 1}, {"k": 1, "name": 2}])), Err(Misfit::NoKey(2, 1)));
        assert_eq!(told(json!([{"id": null, "k": null}])), Err(Misfit::NoKey(1, 0)));
        assert_eq!(told(json!([{"id": 1, "k": 1, "zzzzzz": 1}, 2])), Err(Misfit::NoSuchField(1, "zzzzzz".into())));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_fault(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = check(&bytes, &names(), 10);
        }

        #[test]
        fn rows_are_judged_as_their_names_say(rows in proptest::collection::vec(proptest::collection::btree_map("id|k|name|é|other|nam", 0..3, 0..6), 0..4)) {
            let batch = Value::Array(rows.iter().map(|row| json!(row)).collect());
            let expected = rows.iter().all(|row| !row.contains_key("nam") && row.contains_key("id") && row.contains_key("k"));
            prop_assert_eq!(check(&stored(&batch), &names(), 10).is_ok(), expected);
        }
    }
}
