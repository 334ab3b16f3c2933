//! `stint.row_as_of`: one row of a state table at a point, of which `<table>_as_of` is made.
//!
//! A query calls it in several places (its conditions, its columns) for the same row, so what it found last is kept for the query, as is the point itself.

use super::point::{self, Name};
use super::probe::Probe;
use crate::changelog::capture;
use crate::changelog::images::RowReader;
use crate::errors;
use crate::spi::{Identity, Session, connect};
use crate::values::Instant;
use pgrx::PgMemoryContexts;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

/// The row of a key at the point.
enum Row {
    /// As it is now.
    Unchanged,
    /// There was none.
    Absent,
    /// Another one: a composite datum's bytes.
    Was(Vec<u8>),
}

/// One table read at one point, within one query.
struct Reading {
    row_type: pg_sys::Oid,
    name: Name,
    /// The snapshot that it reads with; a function's expressions may be evaluated under several.
    snapshot: (u32, u32, u32, u64),
    probe: Probe,
    reader: RowReader,
    last: Option<(String, Row)>,
}

thread_local! {
    /// The readings of running queries, by the memory context that ends with the query.
    static READINGS: RefCell<HashMap<usize, Vec<Reading>>> = RefCell::new(HashMap::new());
}

/// Ends the readings of a query with its memory context.
struct Query(usize);

impl Drop for Query {
    fn drop(&mut self) {
        READINGS.with_borrow_mut(|all| all.remove(&self.0));
    }
}

fn active_snapshot() -> (u32, u32, u32, u64) {
    // SAFETY: a running query has an active snapshot.
    unsafe {
        let snapshot = &*pg_sys::GetActiveSnapshot();
        (snapshot.xmax.into_inner(), snapshot.xcnt, snapshot.curcid, snapshot.snapXactCompletionCount)
    }
}

impl Reading {
    fn open(session: &Session, caller: pg_sys::Oid, row_type: pg_sys::Oid, name: Name, context: pg_sys::MemoryContext) -> Self {
        // SAFETY: a catalogue look-up; the context is the query's.
        let (relation, reader) = unsafe { (pg_sys::get_typ_typrelid(row_type), RowReader::new(row_type, context)) };
        let table = capture::required(session, caller, relation);
        let point = point::resolve(session, relation, &table, &name);
        Reading { row_type, name, snapshot: active_snapshot(), probe: Probe::new(session, relation, point), reader, last: None }
    }

    /// A row that has not changed since the point, with null in columns that were not there yet.
    fn as_it_was(&self, row: pg_sys::Datum) -> pg_sys::Datum {
        match self.probe.absent() {
            [] => row,
            absent => copy(&bytes(self.reader.without(row, absent))),
        }
    }

    fn find(&mut self, session: &Session, key: &str) {
        if self.last.as_ref().is_some_and(|(known, _)| known == key) {
            return;
        }
        let row = match self.probe.first_change(session, key).map(|change| change.before) {
            None => Row::Unchanged,
            Some(None) => Row::Absent,
            Some(Some(image)) => Row::Was(bytes(self.reader.read(&image))),
        };
        self.last = Some((key.to_string(), row));
    }
}

/// See [`row_as_of_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_row_as_of_wrapper() -> &'static pg_sys::Pg_finfo_record {
    &CALLED_BY_V1
}

/// `stint.row_as_of(anyelement, text, text, bigint, timestamptz) → anyelement`, by hand because its answer is of its argument's type.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn row_as_of_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: fcinfo is PostgreSQL's, with the five arguments of the declaration.
    unsafe {
        let call = &mut *fcinfo;
        let args = call.args.as_slice(5);
        let Some(key) = String::from_datum(args[1].value, args[1].isnull) else {
            errors::missing("key", "Give the key's values as stint.image(…)::text.")
        };
        let live = (!args[0].isnull).then_some(args[0].value);
        let answer = with_reading(call.flinfo, named(&args[2..]), |session, reading| {
            reading.find(session, &key);
            match &reading.last {
                Some((_, Row::Was(bytes))) => Some(copy(bytes)),
                Some((_, Row::Unchanged)) => live.map(|row| reading.as_it_was(row)),
                _ => None,
            }
        });
        call.isnull = answer.is_none();
        answer.unwrap_or(pg_sys::Datum::from(0usize))
    }
}

/// See [`point_is_kept_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_point_is_kept_wrapper() -> &'static pg_sys::Pg_finfo_record {
    &CALLED_BY_V1
}

/// `stint.point_is_kept(anyelement, text, bigint, timestamptz) → boolean`: true, or the error that says why the table cannot be read at the point.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn point_is_kept_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: fcinfo is PostgreSQL's, with the four arguments of the declaration.
    unsafe {
        let call = &mut *fcinfo;
        let args = call.args.as_slice(4);
        with_reading(call.flinfo, named(&args[1..]), |_, _| ());
        pg_sys::Datum::from(true)
    }
}

/// The record that tells PostgreSQL how a hand-written C function is called.
static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// The point that the arguments tag, pos and at name.
///
/// # Safety
/// They are of these types.
unsafe fn named(args: &[pg_sys::NullableDatum]) -> Name {
    // SAFETY: as the caller promises.
    unsafe {
        point::named(
            String::from_datum(args[0].value, args[0].isnull),
            i64::from_datum(args[1].value, args[1].isnull),
            Instant::from_datum(args[2].value, args[2].isnull),
        )
    }
}

/// Works with the reading of a table, whose row type the function's first argument has, at a point; opened where this is the query's first call.
///
/// # Safety
/// `info` is that of a call under way.
unsafe fn with_reading<T>(info: *mut pg_sys::FmgrInfo, name: Name, work: impl FnOnce(&Session, &mut Reading) -> T) -> T {
    // SAFETY: the context of the call lives as long as the query.
    let (row_type, context) = unsafe { (pg_sys::get_fn_expr_argtype(info, 0), (*info).fn_mcxt) };
    // Taken out while it is worked with: a domain's check is user code, which may read as of a point, too.
    let known = READINGS.with_borrow_mut(|all| all.remove(&(context as usize)));
    let mut readings = known.unwrap_or_else(|| {
        PgMemoryContexts::For(context).leak_and_drop_on_delete(Query(context as usize));
        Vec::new()
    });
    let snapshot = active_snapshot();
    readings.retain(|reading| reading.snapshot == snapshot);
    let answer = connect(|session| {
        let owner = Identity::owner();
        let same = |reading: &Reading| reading.row_type == row_type && reading.name == name;
        let at = readings.iter().position(same).unwrap_or_else(|| {
            readings.push(Reading::open(session, owner.caller(), row_type, name.clone(), context));
            readings.len() - 1
        });
        work(session, &mut readings[at])
    });
    READINGS.with_borrow_mut(|all| all.insert(context as usize, readings));
    answer
}

/// The bytes of a composite datum.
fn bytes(datum: pg_sys::Datum) -> Vec<u8> {
    // SAFETY: it starts with its length.
    unsafe { std::slice::from_raw_parts(datum.cast_mut_ptr::<u8>(), pgrx::varsize_any(datum.cast_mut_ptr())).to_vec() }
}

/// A composite datum of these bytes, in the memory of the call that SPI was opened in.
fn copy(bytes: &[u8]) -> pg_sys::Datum {
    // SAFETY: as many bytes as are allocated; inside SPI this allocates in the upper context.
    unsafe {
        let to = pg_sys::SPI_palloc(bytes.len()).cast::<u8>();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        pg_sys::Datum::from(to)
    }
}
