//! Work that may fail without failing the transaction around it.

use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::panic::AssertUnwindSafe;

/// Runs `work` in a subtransaction. Where it raises an error, everything it did is undone, and the error's SQLSTATE and message come back. A cancelled query is
/// no error of the work: it goes on up.
pub fn attempt<R>(work: impl FnOnce() -> R) -> Result<R, (PgSqlErrorCode, String)> {
    // SAFETY: the calls and their order are those of PL/pgSQL's exception blocks; what is open in SPI inside is closed by the rollback.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        let back = move || {
            pg_sys::MemoryContextSwitchTo(context);
            pg_sys::CurrentResourceOwner = owner;
        };
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        PgTryBuilder::new(AssertUnwindSafe(|| {
            let done = work();
            pg_sys::ReleaseCurrentSubTransaction();
            back();
            Ok(done)
        }))
        .catch_others(move |error| {
            pg_sys::RollbackAndReleaseCurrentSubTransaction();
            back();
            match error {
                CaughtError::PostgresError(report) | CaughtError::ErrorReport(report)
                    if report.sql_error_code() != PgSqlErrorCode::ERRCODE_QUERY_CANCELED =>
                {
                    Err((report.sql_error_code(), report.message().to_string()))
                }
                other => other.rethrow(),
            }
        })
        .execute()
    }
}
