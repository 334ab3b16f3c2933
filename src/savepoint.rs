//! Work in a subtransaction of its own, so that it can be undone and nothing else.

use crate::spi::Session;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use std::panic::AssertUnwindSafe;
use std::ptr::null;

/// Runs `work` in a subtransaction, which is undone where it raises or `keep` says so.
fn nested<T>(work: impl FnOnce() -> T, keep: impl FnOnce(&T) -> bool) -> Result<T, Box<CaughtError>> {
    // SAFETY: PostgreSQL's own pairs, as PL/pgSQL's exception blocks use them: one of the two ends the subtransaction on every path. Memory context and
    // resource owner are put back as they were.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(null());
        pg_sys::MemoryContextSwitchTo(context);
        let done = PgTryBuilder::new(AssertUnwindSafe(|| Ok(work()))).catch_others(|error| Err(Box::new(error))).execute();
        match &done {
            Ok(answer) if keep(answer) => pg_sys::ReleaseCurrentSubTransaction(),
            _ => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        done
    }
}

/// Runs `work`; where it raises, what it did is undone and the error's SQLSTATE and message returned. A cancelled statement or a server that shuts down is
/// raised on. Open every SPI connection inside `work`.
pub fn isolated<T>(work: impl FnOnce() -> T) -> Result<T, (PgSqlErrorCode, String)> {
    nested(work, |_| true).map_err(|error| failed(*error))
}

/// Runs `work`; where it answers `None`, what it did is undone, above all the locks it took are let go. What it read is gone then. An error is raised on.
pub fn attempt<T>(session: &Session, work: impl FnOnce() -> Option<T>) -> Option<T> {
    session.pin();
    match nested(work, Option::is_some) {
        Ok(answer) => answer,
        Err(error) => error.rethrow(),
    }
}

fn failed(error: CaughtError) -> (PgSqlErrorCode, String) {
    let report = match &error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) | CaughtError::RustPanic { ereport: report, .. } => report,
    };
    use PgSqlErrorCode::*;
    let ends = [ERRCODE_QUERY_CANCELED, ERRCODE_ADMIN_SHUTDOWN, ERRCODE_CRASH_SHUTDOWN, ERRCODE_DATABASE_DROPPED];
    if ends.contains(&report.sql_error_code()) {
        error.rethrow()
    }
    (report.sql_error_code(), report.message().to_string())
}
