//! SQL that makes jsonb of images, compiled from a table's columns as they are now: what `changes`, `poll` and `diff` return as key, before and after.

use super::shape::{Column, Shape};
use crate::spi::{Prepared, Session};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
pub use stint_core::sql::literal as quote;

/// SQL for the key of a change as an object; `key` is SQL for the text kept with it.
pub fn key_sql(shape: &Shape, key: &str) -> String {
    object(shape.key_columns().enumerate().map(|(place, column)| (column, format!("({key}::text[])[{}]", place + 1))))
}

/// SQL for an image as an object, null where there is none; `image` is SQL for the array.
pub fn image_sql(shape: &Shape, image: &str) -> String {
    let object = object(shape.columns.iter().map(|column| (column, format!("({image})[{}]", column.attnum))));
    format!("CASE WHEN {image} IS NOT NULL THEN {object} END")
}

thread_local! {
    static STATEMENTS: RefCell<HashMap<u32, (String, Rc<Prepared>)>> = RefCell::new(HashMap::new());
}

/// The statement that makes objects of a table's key ($1), before image ($2) and after image ($3).
pub fn statement(session: &Session, relation: pg_sys::Oid) -> Rc<Prepared> {
    let shape = Shape::load(session, relation);
    let sql = format!("SELECT {}, {}, {}", key_sql(&shape, "$1"), image_sql(&shape, "$2"), image_sql(&shape, "$3"));
    STATEMENTS.with_borrow_mut(|all| {
        if let Some((text, statement)) = all.get(&relation.to_u32())
            && *text == sql
        {
            return Rc::clone(statement);
        }
        let statement = Rc::new(Prepared::new(&sql, &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::TEXTARRAYOID]));
        all.insert(relation.to_u32(), (sql, Rc::clone(&statement)));
        statement
    })
}

fn object<'a>(members: impl Iterator<Item = (&'a Column, String)>) -> String {
    // A function takes at most 100 arguments, two of which make a member.
    const CHUNK: usize = 45;
    let members: Vec<String> = members.map(|(column, text)| format!("{}, {}", quote(&column.name), value(column.type_oid, &text))).collect();
    match members.len() {
        0 => "'{}'::jsonb".to_string(),
        _ => members.chunks(CHUNK).map(|chunk| format!("jsonb_build_object({})", chunk.join(", "))).collect::<Vec<_>>().join(" || "),
    }
}

/// SQL that makes jsonb of an image's text. Only PostgreSQL's own types are cast to: a user's type could bring code along.
fn value(type_oid: pg_sys::Oid, text: &str) -> String {
    // SAFETY: system cache look-ups.
    let (base, element) = unsafe {
        let base = pg_sys::getBaseType(type_oid);
        (base, pg_sys::get_element_type(base))
    };
    if element != pg_sys::InvalidOid {
        // SAFETY: as above.
        return match unsafe { pg_sys::getBaseType(element) } {
            pg_sys::BOXOID => text.to_string(), // its arrays are separated by semicolons
            pg_sys::BOOLOID => format!("to_jsonb({text}::bool[])"),
            pg_sys::JSONOID | pg_sys::JSONBOID => format!("to_jsonb({text}::jsonb[])"),
            number if is_number(number) => format!("to_jsonb({text}::numeric[])"),
            _ => format!("to_jsonb({text}::text[])"),
        };
    }
    match base {
        pg_sys::BOOLOID => format!("{text}::bool"),
        pg_sys::JSONOID | pg_sys::JSONBOID => format!("{text}::jsonb"),
        // jsonb has no infinite numbers and no NaN; to_jsonb makes strings of them.
        number if is_number(number) => format!("to_jsonb({text}::numeric)"),
        _ => text.to_string(),
    }
}

fn is_number(type_oid: pg_sys::Oid) -> bool {
    matches!(
        type_oid,
        pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID | pg_sys::NUMERICOID | pg_sys::FLOAT4OID | pg_sys::FLOAT8OID | pg_sys::OIDOID
    )
}
