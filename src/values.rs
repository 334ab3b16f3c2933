//! How SQL values cross into Rust. Payloads, results and money pass through as datums that nothing here opens, because converting `jsonb` or `numeric`
//! would change them (`1.10`, 30-digit integers, `1e400`); instants and durations are counted in microseconds, PostgreSQL's own unit.

use crate::errors;
use pgrx::callconv::{Arg, ArgAbi, BoxRet, FcInfo};
use pgrx::datum::{Datum, UnboxDatum};
use pgrx::nullable::Nullable;
use pgrx::pgrx_sql_entity_graph::metadata::{ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin};
use pgrx::prelude::*;

/// Declares a `Copy` newtype over one datum of a fixed SQL type, usable as argument, result, SPI argument and SPI column. A macro, because the six
/// conversion traits differ only in the type's name and oid.
macro_rules! datum_newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty), $oid:ident, $sql:literal, |$d:ident| $from:expr, |$s:ident| $into:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl FromDatum for $name {
            unsafe fn from_polymorphic_datum($d: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
                (!is_null).then(|| $name($from))
            }
        }
        impl IntoDatum for $name {
            fn into_datum(self) -> Option<pg_sys::Datum> {
                let $s = self.0;
                Some($into)
            }
            fn type_oid() -> pg_sys::Oid {
                pg_sys::$oid
            }
        }
        // SAFETY: the datum is taken as it is; its memory outlives the call, as any argument's does.
        unsafe impl UnboxDatum for $name {
            type As<'src> = $name;
            unsafe fn unbox<'src>(datum: Datum<'src>) -> Self
            where
                Self: 'src,
            {
                let $d = datum.sans_lifetime();
                $name($from)
            }
        }
        // SAFETY: reads the argument slot through pgrx's own accessors.
        unsafe impl<'fcx> ArgAbi<'fcx> for $name {
            unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
                // SAFETY: pgrx calls this for an argument of this type only.
                match unsafe { arg.unbox_arg_using_from_datum() } {
                    Some(value) => value,
                    None => errors::internal(concat!("a null reached a non-null argument of type ", $sql)),
                }
            }
            unsafe fn unbox_nullable_arg(arg: Arg<'_, 'fcx>) -> Nullable<Self> {
                // SAFETY: as above.
                unsafe { arg.unbox_arg_using_from_datum().into() }
            }
        }
        // SAFETY: hands the datum back unchanged.
        unsafe impl BoxRet for $name {
            unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
                let $s = self.0;
                let datum = $into;
                // SAFETY: the datum is of the declared result type.
                unsafe { fcinfo.return_raw_datum(datum) }
            }
        }
        // SAFETY: names the SQL type that the datum really is.
        unsafe impl SqlTranslatable for $name {
            const TYPE_IDENT: &'static str = pgrx::pgrx_resolved_type!($name);
            const TYPE_ORIGIN: TypeOrigin = TypeOrigin::External;
            const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> = Ok(SqlMappingRef::literal($sql));
            const RETURN_SQL: Result<ReturnsRef, ReturnsError> = Ok(ReturnsRef::One(SqlMappingRef::literal($sql)));
        }
    };
}

datum_newtype!(
    /// A `jsonb` value, never opened.
    RawJsonb(pg_sys::Datum), JSONBOID, "jsonb", |d| d, |s| s
);
datum_newtype!(
    /// A `numeric` value, never opened.
    RawNumeric(pg_sys::Datum), NUMERICOID, "numeric", |d| d, |s| s
);
datum_newtype!(
    /// A `text` value, made once for the many rows it stands in.
    RawText(pg_sys::Datum), TEXTOID, "text", |d| d, |s| s
);
datum_newtype!(
    /// An instant: microseconds since 2000-01-01 UTC, as `timestamptz` counts.
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    Instant(i64), TIMESTAMPTZOID, "timestamp with time zone", |d| d.value() as i64, |s| pg_sys::Datum::from(s)
);
datum_newtype!(
    /// An `interval`, still in PostgreSQL's own struct.
    RawInterval(pg_sys::Datum), INTERVALOID, "interval", |d| d, |s| s
);

/// Microseconds in a second.
pub const SECOND: i64 = 1_000_000;

impl RawJsonb {
    /// Size in bytes before compression, without opening a toasted value.
    pub fn size(self) -> usize {
        // SAFETY: a jsonb datum is a varlena; the function reads its header only.
        unsafe { pg_sys::toast_raw_datum_size(self.0) }
    }
}

impl RawText {
    /// That text, in the current memory.
    pub fn of(text: &str) -> Self {
        // SAFETY: PostgreSQL copies that many bytes.
        RawText(pg_sys::Datum::from(unsafe { pg_sys::cstring_to_text_with_len(text.as_ptr().cast(), text.len() as i32) }))
    }
}

impl RawNumeric {
    /// Its decimal digits, as PostgreSQL writes them.
    pub fn text(self) -> String {
        // SAFETY: the datum is a numeric; its own output function reads it.
        unsafe {
            let text = pg_sys::OidOutputFunctionCall(pg_sys::Oid::from(pg_sys::F_NUMERIC_OUT), self.0);
            std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

impl RawInterval {
    /// The duration in microseconds; months count 30 days and days 24 hours, as `extract(epoch …)` counts them. Saturates.
    pub fn micros(self) -> i64 {
        // SAFETY: an interval datum points to a PostgreSQL `Interval`.
        let interval = unsafe { &*self.0.cast_mut_ptr::<pg_sys::Interval>() };
        let days = i64::from(interval.month) * 30 + i64::from(interval.day);
        days.saturating_mul(86_400 * SECOND).saturating_add(interval.time)
    }
}

impl RawInterval {
    /// The duration in microseconds as `extract(epoch …)` has it, to which a year is 365 days and a quarter. Saturates.
    pub fn epoch_micros(self) -> i64 {
        // SAFETY: an interval datum points to a PostgreSQL `Interval`.
        let interval = unsafe { &*self.0.cast_mut_ptr::<pg_sys::Interval>() };
        let (years, months) = (i64::from(interval.month) / 12, i64::from(interval.month) % 12);
        let hours = years * 8766 + (months * 30 + i64::from(interval.day)) * 24;
        hours.saturating_mul(3600 * SECOND).saturating_add(interval.time)
    }
}

impl Instant {
    /// The database's clock, which a verb reads once.
    pub fn now() -> Self {
        // SAFETY: reads the clock.
        Instant(unsafe { pg_sys::GetCurrentTimestamp() })
    }

    /// This instant moved by `micros`, saturating.
    pub fn plus(self, micros: i64) -> Self {
        Instant(self.0.saturating_add(micros))
    }

    /// As the session's settings write it.
    pub fn text(self) -> String {
        // SAFETY: the output function of timestamptz on a timestamptz.
        unsafe {
            let text = pg_sys::OidOutputFunctionCall(pg_sys::Oid::from(pg_sys::F_TIMESTAMPTZ_OUT), pg_sys::Datum::from(self.0));
            std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// Whole milliseconds from `earlier` to this instant.
    pub fn ms_since(self, earlier: Instant) -> i64 {
        self.0.saturating_sub(earlier.0) / 1000
    }
}
