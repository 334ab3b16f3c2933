//! The trigger that keeps events as they were recorded.

use crate::errors::Fault;
use crate::spi;
use pgrx::prelude::*;

/// See [`keep_events_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_keep_events_wrapper() -> &'static pg_sys::Pg_finfo_record {
    static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &CALLED_BY_V1
}

/// `stint.keep_events()`: refuses UPDATE, DELETE and TRUNCATE of the record, except by the verb that lets old events go.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn keep_events_wrapper(_fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    if !spi::in_own_statement() {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "events of the record are neither changed nor removed by hand")
            .hint("Record a further event that corrects it; stint.expire_record(…) lets old events go.")
            .raise();
    }
    pg_sys::Datum::from(0usize)
}
