//! The launcher. It looks at `pg_database` and at the requests in shared memory, and starts workers: one in every database it has not looked into, and one for
//! every request (a worker that died, a CREATE EXTENSION that committed). A worker that finds no extension leaves. The launcher keeps nothing that a new
//! launcher would miss.

use super::{describe, nap, take_signals};
use crate::shmem::{self, workers};
use crate::values::{Instant, SECOND};
use pgrx::pg_sys::{BgwHandleStatus, panic::ErrorReport};
use pgrx::prelude::*;
use std::collections::{HashMap, HashSet};
use std::ptr::null_mut;

/// Time between two looks at `pg_database` when nothing asks for one.
const IDLE: i64 = 10 * SECOND;
/// A database without the extension is looked into again after this time, one in each idle look: nobody tells of COMMIT PREPARED, or of a request that found
/// all slots taken.
const AGAIN: i64 = 60 * SECOND;
/// How long a worker may take to arrive before its request counts as unanswered.
const ARRIVAL: i64 = SECOND;
/// Pause after PostgreSQL had no room for another background worker.
const NO_ROOM: i64 = 5 * SECOND;

/// The process.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn stint_launcher_main(_arg: pg_sys::Datum) {
    // SAFETY: the callback lives as long as the library; no database is named, so only shared catalogues are read.
    unsafe {
        pg_sys::on_shmem_exit(Some(gone), pg_sys::Datum::from(0usize));
        take_signals();
        pg_sys::BackgroundWorkerInitializeConnection(null_mut(), null_mut(), 0);
    }
    super::fix(c"application_name", super::LAUNCHER);
    let shared = shmem::required();
    workers::launcher_is_here(shared);
    let mut launcher = Launcher { looked: HashMap::new(), told_no_room: false, shared };
    loop {
        let pause = launcher.look();
        nap(pause);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn gone(_code: i32, _arg: pg_sys::Datum) {
    workers::launcher_is_gone();
}

struct Launcher {
    /// When each database was last looked into, or had a worker.
    looked: HashMap<u32, Instant>,
    told_no_room: bool,
    shared: &'static shmem::Shared,
}

/// What became of a start.
enum Start {
    Done,
    NoRoom,
}

impl Launcher {
    /// Starts what is due, and tells how long to sleep.
    fn look(&mut self) -> i64 {
        let databases = databases();
        let now = Instant::now();
        workers::forget_unless(|database| databases.contains(&database));
        self.looked.retain(|database, _| databases.contains(database));
        for database in databases.iter().filter(|database| workers::has_slot(**database)) {
            self.looked.insert(*database, now);
        }
        if self.answer_requests(now) && self.look_into_new(&databases, now) {
            self.look_again(now);
        }
        let next = workers::requests().map(|(_, due)| due.0.saturating_sub(Instant::now().0)).min();
        next.map_or(IDLE, |wait| wait.clamp(10_000, IDLE))
    }

    /// False where there is no room for more.
    fn answer_requests(&mut self, now: Instant) -> bool {
        let due: Vec<u32> = workers::requests().filter(|(_, due)| *due <= now).map(|(database, _)| database).collect();
        due.into_iter().all(|database| matches!(self.start(database), Start::Done))
    }

    fn look_into_new(&mut self, databases: &HashSet<u32>, now: Instant) -> bool {
        let new: Vec<u32> = databases.iter().copied().filter(|database| !self.looked.contains_key(database)).collect();
        new.into_iter().all(|database| self.look_into(database, now))
    }

    fn look_again(&mut self, now: Instant) {
        let without = self.looked.iter().filter(|(database, at)| at.plus(AGAIN) <= now && !workers::has_slot(**database));
        if let Some(database) = without.min_by_key(|(_, at)| at.0).map(|(database, _)| *database) {
            self.look_into(database, now);
        }
    }

    fn look_into(&mut self, database: u32, now: Instant) -> bool {
        if !workers::request(database) {
            return false;
        }
        match self.start(database) {
            Start::Done => {
                self.looked.insert(database, now);
                true
            }
            Start::NoRoom => {
                workers::withdraw(database);
                false
            }
        }
    }

    fn start(&mut self, database: u32) -> Start {
        workers::postpone(database, Instant::now().plus(ARRIVAL));
        let mut worker = describe(super::WORKER, c"stint_worker_main");
        worker.bgw_main_arg = pg_sys::Datum::from(database);
        let mut handle = null_mut();
        // SAFETY: the struct is copied; the handle is freed below; the wait is ended by signals.
        unsafe {
            worker.bgw_notify_pid = pg_sys::MyProcPid;
            if !pg_sys::RegisterDynamicBackgroundWorker(&mut worker, &mut handle) {
                workers::postpone(database, Instant::now().plus(NO_ROOM));
                self.tell_no_room();
                return Start::NoRoom;
            }
            let mut pid = 0;
            let status = pg_sys::WaitForBackgroundWorkerStartup(handle, &mut pid);
            pg_sys::pfree(handle.cast());
            if status == BgwHandleStatus::BGWH_POSTMASTER_DIED {
                pg_sys::proc_exit(1);
            }
        }
        workers::note_room(self.shared, true);
        self.told_no_room = false;
        Start::Done
    }

    fn tell_no_room(&mut self) {
        workers::note_room(self.shared, false);
        if !self.told_no_room {
            self.told_no_room = true;
            ErrorReport::new(
                PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                "pg_stint: there is no room for another background worker, so a database has no maintenance worker",
                "pg_stint",
            )
            .set_hint("Raise the setting max_worker_processes and restart the server.")
            .report(PgLogLevel::WARNING);
        }
    }
}

/// The databases a worker may connect to. Templates have none: a session in one keeps CREATE DATABASE from copying it.
fn databases() -> HashSet<u32> {
    let mut found = HashSet::new();
    // SAFETY: a plain scan of a shared catalogue inside a transaction, all of it closed again.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        pg_sys::GetTransactionSnapshot();
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, pg_sys::AccessShareLock as i32);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let database = &*pg_sys::heap_tuple_get_struct::<pg_sys::FormData_pg_database>(tuple);
            // A limit of -2 marks a database whose DROP was cut short.
            if database.datallowconn && !database.datistemplate && database.datconnlimit != -2 {
                found.insert(database.oid.to_u32());
            }
        }
        pg_sys::table_endscan(scan);
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
        pg_sys::CommitTransactionCommand();
    }
    found
}
