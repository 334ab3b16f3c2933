//! The background processes. A launcher, preloaded with the server, keeps one maintenance worker in every database that has the extension; the worker runs the
//! steps of [`steps`] in rounds. Neither runs while the server is a standby: PostgreSQL starts the launcher when recovery is over.

mod doorbells;
mod launcher;
mod rounds;
mod steps;

pub mod preload;
pub mod status;

use crate::guc;
use pgrx::prelude::*;
use std::ffi::CStr;
use std::os::raw::c_char;

/// `backend_type` of the launcher in `pg_stat_activity`.
const LAUNCHER: &CStr = c"pg_stint launcher";
/// `backend_type` of a maintenance worker.
const WORKER: &CStr = c"pg_stint worker";

mod raw {
    unsafe extern "C-unwind" {
        /// PostgreSQL's handler of SIGTERM in a session: ends the process at its next look at interrupts, also in the middle of a statement.
        pub fn die(signal: i32);
        /// PostgreSQL's handler of SIGHUP: sets `ConfigReloadPending`.
        pub fn SignalHandlerForConfigReload(signal: i32);
    }
}

/// Registers the launcher. Called from `_PG_init` while the server starts.
pub fn init() {
    // pg_upgrade starts the server to restore into it; nothing may be done there beside it.
    // SAFETY: a flag of the postmaster.
    if unsafe { pg_sys::IsBinaryUpgrade } {
        return;
    }
    let mut launcher = describe(LAUNCHER, c"stint_launcher_main");
    launcher.bgw_restart_time = 1;
    // SAFETY: the struct is copied.
    unsafe { pg_sys::RegisterBackgroundWorker(&mut launcher) };
}

fn fill(field: &mut [c_char], text: &CStr) {
    field.iter_mut().zip(text.to_bytes()).for_each(|(to, from)| *to = *from as c_char);
}

/// What PostgreSQL is told of a process of ours.
fn describe(name: &CStr, main: &CStr) -> pg_sys::BackgroundWorker {
    let mut worker = pg_sys::BackgroundWorker {
        bgw_flags: (pg_sys::BGWORKER_SHMEM_ACCESS | pg_sys::BGWORKER_BACKEND_DATABASE_CONNECTION) as i32,
        bgw_start_time: pg_sys::BgWorkerStartTime::BgWorkerStart_RecoveryFinished,
        bgw_restart_time: pg_sys::BGW_NEVER_RESTART,
        ..Default::default()
    };
    fill(&mut worker.bgw_name, name);
    fill(&mut worker.bgw_type, name);
    fill(&mut worker.bgw_library_name, c"pg_stint");
    fill(&mut worker.bgw_function_name, main);
    worker
}

/// Takes signals as a session does. Called once, before anything else that could wait.
fn take_signals() {
    // SAFETY: both handlers are PostgreSQL's own.
    unsafe {
        #[cfg(not(feature = "pg18"))]
        use pg_sys::pqsignal;
        #[cfg(feature = "pg18")]
        use pg_sys::pqsignal_be as pqsignal;
        pqsignal(pg_sys::SIGHUP as i32, Some(raw::SignalHandlerForConfigReload));
        pqsignal(pg_sys::SIGTERM as i32, Some(raw::die));
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Sleeps until something sets the latch, at most `micros`. Shutdown and termination end the process here; a reload takes effect.
fn nap(micros: i64) {
    let ms = micros.max(0).saturating_add(999) / 1000;
    // SAFETY: this process's own latch; the events are those WaitLatch knows.
    unsafe {
        let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, ms as _, pg_sys::PG_WAIT_EXTENSION);
        pg_sys::ResetLatch(pg_sys::MyLatch);
        // pg_cancel_backend is for a step at work; here there is nothing to cancel.
        PgTryBuilder::new(|| {
            pg_sys::check_for_interrupts!();
        })
        .catch_when(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, |_| ())
        .execute();
        if pg_sys::ConfigReloadPending != 0 {
            pg_sys::ConfigReloadPending = 0;
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
    }
}

/// Fixes a setting for this process, whatever the configuration and ALTER DATABASE say.
fn fix(name: &CStr, value: &CStr) {
    // SAFETY: C strings; a value PostgreSQL does not know is an error.
    unsafe { pg_sys::SetConfigOption(name.as_ptr(), value.as_ptr(), pg_sys::GucContext::PGC_SUSET, pg_sys::GucSource::PGC_S_OVERRIDE) };
}

/// The time between two rounds, in microseconds.
fn naptime() -> i64 {
    guc::naptime_ms() * 1000
}
