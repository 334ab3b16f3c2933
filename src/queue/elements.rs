//! The JSON argument of a verb that takes many things at once: an array of objects with a single verb's arguments. It is taken apart where it lies; payloads and
//! results come out as the `->` operator would give them, byte by byte.

use crate::errors::{self, Fault};
use crate::input;
use crate::values::RawJsonb;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::pg_sys::{JsonbContainer, JsonbIteratorToken as Token, JsonbValue, jbvType};
use pgrx::prelude::*;
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::panic::AssertUnwindSafe;

/// What a verb calls the array and its elements, and what these may hold.
pub struct Shape<const N: usize> {
    /// The argument.
    pub argument: &'static str,
    /// One of its elements.
    pub element: &'static str,
    /// An array as it should be, for hints.
    pub example: &'static str,
    /// The fields an element may have.
    pub fields: [&'static str; N],
    /// What an element should be, for hints.
    pub hint: &'static str,
}

/// An element's fields, by their place in [`Shape::fields`].
pub struct Fields<const N: usize>([Option<JsonbValue>; N]);

/// A field's value.
#[derive(Clone, Copy)]
pub struct Value(JsonbValue);

impl<const N: usize> Fields<N> {
    /// A field, where the element has it.
    pub fn get(&self, field: usize) -> Option<Value> {
        self.0[field].map(Value)
    }

    /// The same, where it is not JSON's null.
    pub fn some(&self, field: usize) -> Option<Value> {
        self.get(field).filter(|value| value.0.type_ != jbvType::jbvNull)
    }

    /// A field's text.
    pub fn text(&self, field: usize) -> Option<String> {
        self.some(field).map(Value::text)
    }

    /// A field's value as it is.
    pub fn json(&self, field: usize) -> Option<RawJsonb> {
        self.some(field).map(Value::json)
    }
}

impl Value {
    /// The name of its type.
    fn kind(self) -> &'static str {
        // SAFETY: the tag says which part holds; a container lies in the argument.
        unsafe {
            match self.0.type_ {
                jbvType::jbvNull => "null",
                jbvType::jbvString => "string",
                jbvType::jbvNumeric => "number",
                jbvType::jbvBool => "boolean",
                _ if (*self.0.val.binary.data).header & pg_sys::JB_FARRAY != 0 => "array",
                _ => "object",
            }
        }
    }

    /// The value as it is.
    pub fn json(mut self) -> RawJsonb {
        // SAFETY: a value of the argument; the copy is made in the current memory.
        RawJsonb(unsafe { pg_sys::Datum::from(pg_sys::JsonbValueToJsonb(&mut self.0)) })
    }

    /// The bytes of a string.
    pub fn bytes(&self) -> Option<&[u8]> {
        // SAFETY: the tag says that it is a string, whose bytes lie in the argument.
        (self.0.type_ == jbvType::jbvString)
            .then(|| unsafe { std::slice::from_raw_parts(self.0.val.string.val.cast(), self.0.val.string.len as usize) })
    }

    /// Its text, as `->>` has it.
    pub fn text(self) -> String {
        if let Some(text) = self.bytes().and_then(|bytes| std::str::from_utf8(bytes).ok()) {
            return text.to_string();
        }
        // SAFETY: the tag says which part holds; PostgreSQL's own functions write the text.
        unsafe {
            match self.0.type_ {
                jbvType::jbvString => {
                    let text = pg_sys::cstring_to_text_with_len(self.0.val.string.val, self.0.val.string.len);
                    String::from_datum(pg_sys::Datum::from(text), false).unwrap_or_default()
                }
                jbvType::jbvBool => self.0.val.boolean.to_string(),
                jbvType::jbvNumeric => {
                    let numeric = pg_sys::Datum::from(self.0.val.numeric);
                    let text = pgrx::direct_function_call_as_datum(pg_sys::numeric_out, &[Some(numeric)]).map(|text| text.cast_mut_ptr());
                    text.map_or(String::new(), |text| CStr::from_ptr(text).to_string_lossy().into_owned())
                }
                _ => {
                    let text = pg_sys::JsonbToCString(std::ptr::null_mut(), self.0.val.binary.data, self.0.val.binary.len);
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            }
        }
    }

    /// The texts of an array's elements.
    pub fn texts(self) -> Option<Vec<Option<String>>> {
        let mut texts = Vec::new();
        let array = (self.kind() == "array").then_some(self.0)?;
        // SAFETY: a container of the argument.
        let mut walk = unsafe { Walk::of(array.val.binary.data) };
        walk.next();
        while let (Token::WJB_ELEM, value) = walk.next() {
            texts.push((value.type_ != jbvType::jbvNull).then(|| Value(value).text()));
        }
        Some(texts)
    }
}

/// PostgreSQL's way along a container. What lies within is not gone into.
struct Walk(*mut pg_sys::JsonbIterator);

impl Walk {
    /// # Safety
    /// The container outlives it.
    unsafe fn of(container: *mut JsonbContainer) -> Self {
        // SAFETY: as the caller promises.
        Walk(unsafe { pg_sys::JsonbIteratorInit(container) })
    }

    fn next(&mut self) -> (Token::Type, JsonbValue) {
        // SAFETY: a union of plain values; the iterator frees itself at the end.
        unsafe {
            let mut value: JsonbValue = std::mem::zeroed();
            let token = if self.0.is_null() { Token::WJB_DONE } else { pg_sys::JsonbIteratorNext(&mut self.0, &mut value, true) };
            (token, value)
        }
    }
}

/// The elements of an argument that has passed [`Shape::check`].
pub struct Elements {
    container: *mut JsonbContainer,
    /// How many there are.
    pub count: usize,
}

impl<const N: usize> Shape<N> {
    /// Opens an argument, in memory that lasts as long as the current one does. An error names the first element that is none.
    pub fn check(&self, argument: RawJsonb) -> Elements {
        // SAFETY: a jsonb datum; what comes back is untoasted and aligned.
        let container = unsafe { &raw mut (*pg_sys::pg_detoast_datum(argument.0.cast_mut_ptr()).cast::<pg_sys::Jsonb>()).root };
        // SAFETY: as above.
        let header = unsafe { (*container).header };
        if header & pg_sys::JB_FARRAY == 0 || header & pg_sys::JB_FSCALAR != 0 {
            errors::invalid(format!("argument \"{}\" is not an array", self.argument), format!("Pass an array of objects: '{}'.", self.example))
        }
        Elements { container, count: input::batch_size(self.argument, (header & pg_sys::JB_CMASK) as usize) }
    }

    /// Goes through the elements, each as its number from 0 and its fields. An error names the first that is no object or has an unknown field.
    pub fn each(&self, elements: &Elements, mut visit: impl FnMut(usize, &Fields<N>)) {
        // SAFETY: the argument's memory outlives the elements.
        let mut walk = unsafe { Walk::of(elements.container) };
        walk.next();
        let mut at = 0;
        while let (Token::WJB_ELEM, element) = walk.next() {
            visit(at, &self.fields(at, Value(element)));
            at += 1;
        }
    }

    fn fields(&self, at: usize, element: Value) -> Fields<N> {
        let kind = element.kind();
        if kind != "object" {
            self.faulty(at, &format!("is not an object but of type {kind}"))
        }
        let mut fields = Fields([None; N]);
        // SAFETY: an object within the argument.
        let mut walk = unsafe { Walk::of(element.0.val.binary.data) };
        walk.next();
        while let (Token::WJB_KEY, key) = walk.next() {
            let key = Value(key);
            let (_, value) = walk.next();
            match key.bytes().and_then(|key| self.fields.iter().position(|field| field.as_bytes() == key)) {
                Some(field) => fields.0[field] = Some(value),
                None => self.unknown(at, &key.text()),
            }
        }
        fields
    }

    /// An error that says what is wrong with an element.
    pub fn faulty(&self, at: usize, problem: &str) -> ! {
        errors::invalid(format!("{} {} {problem}", self.element, at + 1), self.hint)
    }

    fn unknown(&self, at: usize, field: &str) -> ! {
        let near = stint_core::names::nearest(field, self.fields).map_or(String::new(), |near| format!("Did you mean \"{near}\"? "));
        let hint = format!("{near}The fields are {}.", self.fields.join(", "));
        errors::invalid(format!("{} {} has the unknown field \"{field}\"", self.element, at + 1), hint)
    }

    /// Does work that concerns one element after the other; an error names that which `now` says is at hand, and its field, if it says one.
    pub fn naming<T>(&self, now: &Now, work: impl FnOnce() -> T) -> T {
        PgTryBuilder::new(AssertUnwindSafe(work))
            .catch_others(|error| match (error, now.0.get()) {
                (CaughtError::PostgresError(report) | CaughtError::ErrorReport(report), Some((at, field))) => {
                    let field = field.map_or(String::new(), |field| format!(", field \"{}\"", self.fields[field]));
                    let fault = Fault::new(report.sql_error_code(), format!("{} {}{field}: {}", self.element, at + 1, report.message()));
                    let fault = report.detail().into_iter().fold(fault, |fault, detail| fault.detail(detail));
                    fault.hint(report.hint().unwrap_or(self.hint)).raise()
                }
                (other, _) => other.rethrow(),
            })
            .execute()
    }
}

/// Which element is at hand, and which of its fields.
#[derive(Default)]
pub struct Now(Cell<Option<(usize, Option<usize>)>>);

/// Read by whoever catches an error; no step leaves it half set.
impl std::panic::RefUnwindSafe for Now {}

impl Now {
    /// An element from here on.
    pub fn at(&self, element: usize) {
        self.0.set(Some((element, None)));
    }

    /// No single one from here on.
    pub fn none(&self) {
        self.0.set(None);
    }

    /// A field of the element at hand, while `work` runs.
    pub fn field<T>(&self, field: usize, work: impl FnOnce() -> T) -> T {
        let before = self.0.get();
        self.0.set(before.map(|(at, _)| (at, Some(field))));
        let done = work();
        self.0.set(before);
        done
    }

    /// A field's text, read by the input function of its type.
    pub fn value<T: FromDatum, const N: usize>(&self, fields: &Fields<N>, field: usize, input: u32) -> Option<T> {
        let text = fields.text(field)?;
        self.field(field, || read(text, input))
    }

    /// A field's id.
    pub fn id<const N: usize>(&self, fields: &Fields<N>, field: usize) -> Option<pgrx::Uuid> {
        let plain = fields.get(field)?.bytes().and_then(stint_core::ids::plain).map(pgrx::Uuid::from_bytes);
        plain.or_else(|| self.value(fields, field, pg_sys::F_UUID_IN))
    }
}

/// A text as the input function of its type reads it.
pub fn read<T: FromDatum>(text: String, input: u32) -> Option<T> {
    let text = CString::new(text).ok()?;
    // SAFETY: an input function of a type whose values T takes; it reads the text and leaves it as it is.
    unsafe {
        let datum = pg_sys::OidInputFunctionCall(pg_sys::Oid::from(input), text.as_ptr().cast_mut(), pg_sys::InvalidOid, -1);
        T::from_datum(datum, false)
    }
}
