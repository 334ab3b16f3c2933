//! Images: the text of a row's values, the same in every session, from which the same values come back. Made by the types' output functions and read by their
//! input functions, never by casts, which users can define.

use super::shape::Shape;
use crate::errors::{self, Fault};
use crate::spi::Identity;
use pgrx::prelude::*;
use pgrx::{PgMemoryContexts, PgTupleDesc};
use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

mod raw {
    // Not in pgrx's bindings.
    unsafe extern "C" {
        pub static mut bytea_output: std::os::raw::c_int;
    }
}
const BYTEA_OUTPUT_HEX: c_int = 1;
/// A function call takes at most 100 arguments.
const CHUNK: usize = 90;

/// The settings that a value's text depends on, fixed while it lives: what pg_dump fixes, and UTC.
pub struct Pinned {
    float_digits: c_int,
    date_style: c_int,
    date_order: c_int,
    interval_style: c_int,
    bytea: c_int,
    array_nulls: bool,
    zone: *mut pg_sys::pg_tz,
}

impl Pinned {
    /// Fixes them.
    pub fn set() -> Self {
        // SAFETY: plain variables of this backend, put back in Drop; nothing that runs meanwhile reads the settings otherwise. The zone is loaded first, since
        // only that can fail.
        unsafe {
            let utc = pg_sys::pg_tzset(c"UTC".as_ptr());
            if utc.is_null() {
                errors::internal("the time zone UTC is not available");
            }
            let before = Pinned {
                float_digits: pg_sys::extra_float_digits,
                date_style: pg_sys::DateStyle,
                date_order: pg_sys::DateOrder,
                interval_style: pg_sys::IntervalStyle,
                bytea: raw::bytea_output,
                array_nulls: pg_sys::Array_nulls,
                zone: pg_sys::session_timezone,
            };
            pg_sys::extra_float_digits = 1;
            pg_sys::DateStyle = pg_sys::USE_ISO_DATES as c_int;
            pg_sys::DateOrder = pg_sys::DATEORDER_YMD as c_int;
            pg_sys::IntervalStyle = pg_sys::INTSTYLE_POSTGRES as c_int;
            raw::bytea_output = BYTEA_OUTPUT_HEX;
            pg_sys::Array_nulls = true;
            pg_sys::session_timezone = utc;
            before
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: as in `set`.
        unsafe {
            pg_sys::extra_float_digits = self.float_digits;
            pg_sys::DateStyle = self.date_style;
            pg_sys::DateOrder = self.date_order;
            pg_sys::IntervalStyle = self.interval_style;
            raw::bytea_output = self.bytea;
            pg_sys::Array_nulls = self.array_nulls;
            pg_sys::session_timezone = self.zone;
        }
    }
}

/// The record that tells PostgreSQL how a hand-written C function is called.
static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// See [`image_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_image_wrapper() -> &'static pg_sys::Pg_finfo_record {
    &CALLED_BY_V1
}

/// `stint.image(VARIADIC "any") → text[]`, by hand because pgrx has no "any". The types' output functions are looked up once per query.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn image_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: fcinfo is PostgreSQL's and has nargs arguments; what is cached lives as long as flinfo; datums are passed to their own types' functions.
    unsafe {
        let call = &mut *fcinfo;
        let count = usize::try_from(call.nargs).unwrap_or(0);
        let args = call.args.as_slice(count);
        let info = &mut *call.flinfo;
        if info.fn_extra.is_null() {
            let outputs = pg_sys::MemoryContextAllocZero(info.fn_mcxt, size_of::<pg_sys::FmgrInfo>() * count.max(1)).cast::<pg_sys::FmgrInfo>();
            for index in 0..count {
                let (mut output, mut varlena) = (pg_sys::InvalidOid, false);
                pg_sys::getTypeOutputInfo(pg_sys::get_fn_expr_argtype(info, index as c_int), &mut output, &mut varlena);
                pg_sys::fmgr_info_cxt(output, outputs.add(index), info.fn_mcxt);
            }
            info.fn_extra = outputs.cast();
        }
        let outputs = info.fn_extra.cast::<pg_sys::FmgrInfo>();
        let pinned = Pinned::set();
        let mut texts = Vec::with_capacity(count);
        let mut nulls = Vec::with_capacity(count);
        for (index, value) in args.iter().enumerate() {
            nulls.push(value.isnull);
            texts.push(if value.isnull {
                pg_sys::Datum::from(0usize)
            } else {
                let text = pg_sys::OutputFunctionCall(outputs.add(index), value.value);
                let datum = pg_sys::Datum::from(pg_sys::cstring_to_text(text));
                pg_sys::pfree(text.cast());
                datum
            });
        }
        drop(pinned);
        let (mut size, mut from) = (count as c_int, 1);
        let array =
            pg_sys::construct_md_array(texts.as_mut_ptr(), nulls.as_mut_ptr(), 1, &mut size, &mut from, pg_sys::TEXTOID, -1, false, b'i' as c_char);
        pg_sys::Datum::from(array)
    }
}

/// Reads images of a table's rows by the input functions of its types, as the table's owner: domains inside arrays and composites have checks, which are user
/// code. A column's own domain is passed over for its base type, so that a row reads back as it was, also where the domain was tightened since.
pub struct RowReader {
    row: pg_sys::TupleDesc,
    inputs: *mut pg_sys::FmgrInfo,
    types: Vec<(pg_sys::Oid, i32)>,
    owner: pg_sys::Oid,
}

impl RowReader {
    /// For the row type of a table. What it looks up lives as long as `context`.
    ///
    /// # Safety
    /// `context` is a memory context that outlives the reader.
    pub unsafe fn new(row_type: pg_sys::Oid, context: pg_sys::MemoryContext) -> Self {
        // SAFETY: catalogue look-ups; the descriptor is a copy in `context`.
        unsafe {
            let relation = pg_sys::get_typ_typrelid(row_type);
            if relation == pg_sys::InvalidOid {
                Fault::new(PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH, "argument \"kind\" must be of a table's row type")
                    .hint("Write null::schema.table.")
                    .raise();
            }
            let before = pg_sys::MemoryContextSwitchTo(context);
            let row = pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1);
            pg_sys::BlessTupleDesc(row);
            let columns = usize::try_from((*row).natts).unwrap_or(0);
            let inputs = pg_sys::palloc0(size_of::<pg_sys::FmgrInfo>() * columns.max(1)).cast::<pg_sys::FmgrInfo>();
            let mut types = Vec::with_capacity(columns);
            for index in 0..columns {
                let column = &*(*row).attrs.as_ptr().add(index);
                let mut typmod = column.atttypmod;
                let (mut input, mut parameter) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
                if !column.attisdropped {
                    let base = pg_sys::getBaseTypeAndTypmod(column.atttypid, &mut typmod);
                    pg_sys::getTypeInputInfo(base, &mut input, &mut parameter);
                    pg_sys::fmgr_info_cxt(input, inputs.add(index), context);
                }
                types.push((parameter, typmod));
            }
            pg_sys::MemoryContextSwitchTo(before);
            RowReader { row, inputs, types, owner: owner_of(relation) }
        }
    }

    /// The row of an image as a composite datum in the current memory context.
    pub fn read(&self, image: &[Option<String>]) -> pg_sys::Datum {
        let _owner = Identity::restricted(self.owner);
        let (mut values, mut nulls) = (Vec::with_capacity(self.types.len()), Vec::with_capacity(self.types.len()));
        // SAFETY: the input functions are those of the columns' types; values and nulls are as many as the descriptor has columns.
        unsafe {
            let pinned = Pinned::set();
            for (index, (parameter, typmod)) in self.types.iter().enumerate() {
                let input = self.inputs.add(index);
                let text = if (*input).fn_oid == pg_sys::InvalidOid { None } else { image.get(index).and_then(Option::as_deref) };
                nulls.push(text.is_none());
                values.push(match text {
                    Some(text) => {
                        let copy = pg_sys::pnstrdup(text.as_ptr().cast(), text.len());
                        pg_sys::InputFunctionCall(input, copy, *parameter, *typmod)
                    }
                    None => pg_sys::Datum::from(0usize),
                });
            }
            drop(pinned);
            let tuple = pg_sys::heap_form_tuple(self.row, values.as_mut_ptr(), nulls.as_mut_ptr());
            pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data)
        }
    }

    /// A row of the table with null in these places of its columns, in the current memory context.
    pub fn without(&self, row: pg_sys::Datum, places: &[usize]) -> pg_sys::Datum {
        let mut values = vec![pg_sys::Datum::from(0usize); self.types.len()];
        let mut nulls = vec![true; self.types.len()];
        let mut replaced: Vec<bool> = (0..self.types.len()).map(|place| places.contains(&place)).collect();
        // SAFETY: a composite datum of the descriptor's type; values, nulls and marks are as many as it has columns.
        unsafe {
            let header = pg_sys::pg_detoast_datum(row.cast_mut_ptr()).cast::<pg_sys::HeapTupleHeaderData>();
            let mut tuple = pg_sys::HeapTupleData {
                t_len: u32::try_from(pgrx::varsize_any(header.cast())).unwrap_or(0),
                t_data: header,
                ..pg_sys::HeapTupleData::default()
            };
            let tuple = pg_sys::heap_modify_tuple(&mut tuple, self.row, values.as_mut_ptr(), nulls.as_mut_ptr(), replaced.as_mut_ptr());
            pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data)
        }
    }
}

fn owner_of(relation: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: a system cache look-up, the tuple released at once.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as i32, relation.into());
        if tuple.is_null() {
            errors::internal("a row type's table is not in the catalogue");
        }
        let owner = (*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>()).relowner;
        pg_sys::ReleaseSysCache(tuple);
        owner
    }
}

/// See [`image_row_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_image_row_wrapper() -> &'static pg_sys::Pg_finfo_record {
    &CALLED_BY_V1
}

/// `stint.image_row(anyelement, text[]) → anyelement`: the table's row as its types' input functions read it.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn image_row_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: fcinfo is PostgreSQL's, with the two arguments of the declaration; what is cached lives as long as flinfo.
    unsafe {
        let call = &mut *fcinfo;
        let args = call.args.as_slice(2);
        let image = Vec::<Option<String>>::from_datum(args[1].value, args[1].isnull);
        let Some(image) = image else {
            call.isnull = true;
            return pg_sys::Datum::from(0usize);
        };
        let info = &mut *call.flinfo;
        if info.fn_extra.is_null() {
            let reader = RowReader::new(pg_sys::get_fn_expr_argtype(info, 0), info.fn_mcxt);
            info.fn_extra = PgMemoryContexts::For(info.fn_mcxt).leak_and_drop_on_delete(reader).cast();
        }
        (*info.fn_extra.cast::<RowReader>()).read(&image)
    }
}

/// SQL that makes a row's image of the transition table or table named `row`.
pub fn image_sql(shape: &Shape, row: &str) -> String {
    let values: Vec<String> =
        shape.places().iter().map(|place| place.map_or_else(|| "NULL::text".to_string(), |column| format!("{row}.{}", column.quoted))).collect();
    values.chunks(CHUNK).map(|chunk| format!("stint.image({})", chunk.join(", "))).collect::<Vec<_>>().join(" || ")
}

/// SQL that makes a key's text, likewise. An index has at most 32 columns, so one call holds them.
pub fn key_sql<'a>(columns: impl Iterator<Item = &'a str>, row: &str) -> String {
    format!("stint.image({})::text", columns.map(|column| format!("{row}.{column}")).collect::<Vec<_>>().join(", "))
}

/// Types whose text does not come back as the same value, or means another thing after a rename, a dump or a change of a setting.
const NO_ROUND_TRIP: &[(pg_sys::Oid, &str)] = &[
    (pg_sys::REGPROCOID, "names an object, which can be renamed"),
    (pg_sys::REGPROCEDUREOID, "names an object, which can be renamed"),
    (pg_sys::REGOPEROID, "names an object, which can be renamed"),
    (pg_sys::REGOPERATOROID, "names an object, which can be renamed"),
    (pg_sys::REGCLASSOID, "names an object, which can be renamed"),
    (pg_sys::REGTYPEOID, "names an object, which can be renamed"),
    (pg_sys::REGROLEOID, "names an object, which can be renamed"),
    (pg_sys::REGNAMESPACEOID, "names an object, which can be renamed"),
    (pg_sys::REGCONFIGOID, "names an object, which can be renamed"),
    (pg_sys::REGDICTIONARYOID, "names an object, which can be renamed"),
    (pg_sys::REGCOLLATIONOID, "names an object, which can be renamed"),
    (pg_sys::ACLITEMOID, "names roles, which can be renamed"),
    (pg_sys::MONEYOID, "is written as lc_monetary says"),
    (pg_sys::XMLOID, "is read as xmloption says"),
    (pg_sys::XIDOID, "names a transaction of this cluster"),
    (pg_sys::CIDOID, "names a command of one transaction"),
    (pg_sys::TIDOID, "names a place in a table, which changes"),
    (pg_sys::CHAROID, "is one byte, which need not be text"),
];

/// Why values of a type cannot be kept as text: the offending type inside it and the reason.
fn refusal(type_oid: pg_sys::Oid) -> Option<(pg_sys::Oid, &'static str)> {
    // SAFETY: system cache look-ups; the row type's descriptor is a copy.
    unsafe {
        let base = pg_sys::getBaseType(type_oid);
        if let Some((_, reason)) = NO_ROUND_TRIP.iter().find(|(oid, _)| *oid == base) {
            return Some((base, reason));
        }
        let parts = [pg_sys::get_element_type(base), pg_sys::get_range_subtype(base), pg_sys::get_multirange_range(base)];
        if let Some(found) = parts.into_iter().filter(|part| *part != pg_sys::InvalidOid).find_map(refusal) {
            return Some(found);
        }
        if pg_sys::get_typ_typrelid(base) == pg_sys::InvalidOid {
            return None;
        }
        let row = PgTupleDesc::from_pg_is_copy(pg_sys::lookup_rowtype_tupdesc_copy(base, -1));
        row.iter().filter(|field| !field.attisdropped).find_map(|field| refusal(field.atttypid))
    }
}

/// Refuses a table with a column whose values could not be read back as they were.
pub fn check_types(table: &str, shape: &Shape) {
    for column in &shape.columns {
        if let Some((of, reason)) = refusal(column.type_oid) {
            // SAFETY: the function returns a palloc'd C string.
            let name = unsafe { CStr::from_ptr(pg_sys::format_type_be(of)) }.to_string_lossy();
            Fault::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!("{table} cannot be a state table: column \"{}\" holds {name}", column.name),
            )
            .detail(format!("A value of type {name} {reason}, so a tag could not give back the same text."))
            .hint("Use another type, such as text, for the column.")
            .raise();
        }
    }
}
