//! Work in a subtransaction of its own, so that an error undoes that work and nothing else.

use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::panic::AssertUnwindSafe;
use std::ptr::null;

/// Runs `work`; where it raises, what it did is undone and the error's SQLSTATE and message returned. A cancelled statement or a server that shuts down is
/// raised on. Open every SPI connection inside `work`.
pub fn isolated<T>(work: impl FnOnce() -> T) -> Result<T, (PgSqlErrorCode, String)> {
    // SAFETY: PostgreSQL's own pairs, as PL/pgSQL's exception blocks use them: one of the two ends the subtransaction on every path but a raise, which the
    // abort of the whole transaction ends. Memory context and resource owner are put back as they were.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(null());
        pg_sys::MemoryContextSwitchTo(context);
        let done = PgTryBuilder::new(AssertUnwindSafe(|| Ok(work()))).catch_others(failed).execute();
        match done {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        done
    }
}

fn failed<T>(error: CaughtError) -> Result<T, (PgSqlErrorCode, String)> {
    let report = match &error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) | CaughtError::RustPanic { ereport: report, .. } => report,
    };
    use PgSqlErrorCode::*;
    let ends = [ERRCODE_QUERY_CANCELED, ERRCODE_ADMIN_SHUTDOWN, ERRCODE_CRASH_SHUTDOWN, ERRCODE_DATABASE_DROPPED];
    if ends.contains(&report.sql_error_code()) {
        error.rethrow()
    }
    Err((report.sql_error_code(), report.message().to_string()))
}
