//! The maintenance worker of one database: rounds of steps, a nap between them.

use super::steps::{STEPS, Step, When};
use super::{fix, nap, naptime, take_signals};
use crate::changelog::epoch;
use crate::guc;
use crate::shmem::workers;
use crate::spi::{Identity, connect};
use crate::values::{Instant, SECOND};
use pgrx::pg_sys::panic::{CaughtError, ErrorReport};
use pgrx::prelude::*;
use std::ffi::CStr;
use std::ptr::null;

/// The process; its argument is the database's oid.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn stint_worker_main(arg: pg_sys::Datum) {
    let database = arg.value() as u32;
    // First, so that no death leaves the slot behind.
    // SAFETY: the callback lives as long as the library.
    unsafe { pg_sys::on_shmem_exit(Some(gone), pg_sys::Datum::from(0usize)) };
    take_signals();
    if !workers::arrive(database) {
        // SAFETY: this database has its worker, or no slot is free.
        unsafe { pg_sys::proc_exit(0) };
    }
    // SAFETY: a database the launcher read from pg_database; if it was dropped since, this ends the process. The role is the bootstrap superuser, and each
    // step takes the rights of the extension's owner.
    unsafe { pg_sys::BackgroundWorkerInitializeConnectionByOid(database.into(), pg_sys::InvalidOid, 0) };
    settle();
    let mut worker = Worker { told: [const { None }; STEPS.len()] };
    worker.work();
    // The one way out with code 0: the extension is gone.
    // SAFETY: no transaction is open.
    unsafe { pg_sys::proc_exit(0) };
}

#[pg_guard]
unsafe extern "C-unwind" fn gone(code: i32, _arg: pg_sys::Datum) {
    workers::depart(code == 0);
}

/// The steps are written for these, and ALTER DATABASE could say otherwise.
fn settle() {
    fix(c"application_name", super::WORKER);
    fix(c"search_path", c"pg_catalog, pg_temp");
    fix(c"default_transaction_isolation", c"read committed");
    fix(c"default_transaction_read_only", c"off");
    fix(c"default_transaction_deferrable", c"off");
    fix(c"session_replication_role", c"origin");
    fix(c"row_security", c"off");
    // A step that meets somebody's table lock fails after this time, and the others go on.
    fix(c"lock_timeout", c"10s");
}

/// What became of a transaction.
enum Outcome<T> {
    /// The extension is not there.
    NoExtension,
    /// Somebody is dropping it, or has just made it anew.
    Later,
    /// It ran.
    Ran(T),
    /// It failed.
    Failed(PgSqlErrorCode, String),
}

/// An error of a step that was written to the log.
struct Told {
    code: PgSqlErrorCode,
    text: String,
    at: Instant,
}

/// One error is told once; one whose text changes each time (it names a row, say) at most once in this time.
const SILENCE: i64 = 60 * SECOND;

struct Worker {
    /// For each step the error told last.
    told: [Option<Told>; STEPS.len()],
}

impl Worker {
    /// Works until the extension is gone.
    fn work(&mut self) {
        // When the last round and the last doorbells were; 0: the next is due.
        let (mut last_round, mut last_bell) = (Instant(0), Instant(0));
        loop {
            let now = Instant::now();
            // From the settings each time: a reload may have shortened either.
            let (round_due, bell_due) = (last_round.plus(naptime()), last_bell.plus(guc::doorbell_ms() * 1000));
            let (round, bell) = (now >= round_due, workers::rung() && now >= bell_due);
            if round || bell {
                let Some(more) = self.run(round, bell) else { return };
                let then = Instant::now();
                if round {
                    last_round = if more { Instant(0) } else { then };
                }
                if bell {
                    last_bell = then;
                }
                nap(0);
            } else {
                let due = if workers::rung() { round_due.min(bell_due) } else { round_due };
                nap(due.0 - now.0);
            }
        }
    }

    /// Runs the steps that are due. Returns whether there is more to do; `None` where the extension is gone.
    fn run(&mut self, round: bool, bell: bool) -> Option<bool> {
        workers::looking();
        let due = match perform(c"what is due", due) {
            Outcome::NoExtension => return None,
            Outcome::Later => 0,
            Outcome::Ran(due) => due,
            // What keeps this look from its end will keep a step from its own, and that is told.
            Outcome::Failed(..) => u64::MAX,
        };
        let now = |step: &Step| match step.when {
            When::Round => round,
            When::RoundAndBell => round || bell,
            When::Bell => bell,
        };
        let (mut more, mut clean) = (false, true);
        for (number, step) in STEPS.iter().enumerate().filter(|(number, step)| now(step) && due >> number & 1 == 1) {
            match perform(step.name, step.run) {
                Outcome::NoExtension => return None,
                Outcome::Later => {}
                Outcome::Ran(unfinished) => more |= unfinished,
                Outcome::Failed(code, message) => {
                    clean = false;
                    self.tell(number, code, message);
                }
            }
        }
        if round {
            workers::note_round(clean);
        }
        // SAFETY: outside a transaction.
        unsafe { pg_sys::pgstat_report_stat(false) };
        Some(more)
    }

    fn tell(&mut self, number: usize, code: PgSqlErrorCode, message: String) {
        let (name, now) = (STEPS[number].name.to_string_lossy(), Instant::now());
        let text = format!("{name}: {message}");
        workers::note_failure(&text);
        let known = self.told[number].as_ref().is_some_and(|told| told.text == text || (told.code == code && now < told.at.plus(SILENCE)));
        if !known {
            ErrorReport::new(code, format!("pg_stint: the step \"{name}\" of the maintenance worker failed"), "pg_stint")
                .set_detail(message)
                .set_hint(
                    "The other steps go on, and this one is tried again. The same error is not repeated here; stint.maintenance shows the last one.",
                )
                .report(PgLogLevel::WARNING);
            self.told[number] = Some(Told { code, text, at: now });
        }
    }
}

fn report(state: pg_sys::BackendState::Type, what: *const std::os::raw::c_char) {
    // SAFETY: a C string or null.
    unsafe { pg_sys::pgstat_report_activity(state, what) };
}

/// The steps that may have something to do: one bit each.
fn due() -> u64 {
    STEPS.iter().enumerate().filter(|(_, step)| (step.due)()).fold(0, |due, (number, _)| due | 1 << number)
}

/// Runs a step in a transaction of its own; whatever it raises ends here.
fn perform<T: Default>(name: &CStr, run: fn() -> T) -> Outcome<T> {
    report(pg_sys::BackendState::STATE_RUNNING, name.as_ptr());
    let outcome = PgTryBuilder::new(move || transaction(run)).catch_others(failure).execute();
    if matches!(outcome, Outcome::Failed(..)) {
        // SAFETY: ends the transaction the error left open.
        unsafe { pg_sys::AbortCurrentTransaction() };
    }
    report(pg_sys::BackendState::STATE_IDLE, null());
    outcome
}

fn failure<T>(error: CaughtError) -> Outcome<T> {
    let (CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) | CaughtError::RustPanic { ereport: report, .. }) = error;
    let detail = report.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
    Outcome::Failed(report.sql_error_code(), format!("{}{detail}", report.message()))
}

const EXTENSION: &CStr = c"pg_stint";

fn transaction<T: Default>(run: fn() -> T) -> Outcome<T> {
    // SAFETY: the pair of calls around every transaction of a background worker; an error in between is ended by AbortCurrentTransaction.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        let outcome = if let Err(instead) = locked() {
            instead
        } else {
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let done = {
                let _owner = Identity::owner();
                // In a copy of another database nothing is done until it is activated.
                if connect(epoch::own) { run() } else { T::default() }
            };
            pg_sys::PopActiveSnapshot();
            Outcome::Ran(done)
        };
        pg_sys::CommitTransactionCommand();
        outcome
    }
}

/// Keeps DROP EXTENSION out of this transaction, without ever waiting for one: no step meets tables that vanish under it, and no DROP meets a deadlock.
/// An error is what to do instead: the extension is not there, or a DROP has the lock. Must be called inside a transaction.
fn locked<T>() -> Result<(), Outcome<T>> {
    // SAFETY: catalogue look-ups and a lock that the end of the transaction releases.
    unsafe {
        let extension = pg_sys::get_extension_oid(EXTENSION.as_ptr(), true);
        if extension == pg_sys::InvalidOid {
            return Err(Outcome::NoExtension);
        }
        let held = pg_sys::ConditionalLockDatabaseObject(pg_sys::ExtensionRelationId, extension, 0, pg_sys::AccessShareLock as i32);
        if held && pg_sys::get_extension_oid(EXTENSION.as_ptr(), true) == extension { Ok(()) } else { Err(Outcome::Later) }
    }
}
