//! pg_stint: the queue and state primitives of agent work as plain SQL functions. This file is the table of contents: the modules, the SQL files in the order
//! they install, and what happens when the library is loaded. Nouns (tables, views, grants, COMMENTs) are in `sql/`, verbs are in the modules here, and what
//! needs no server is in `crates/core`.

mod accounting;
mod answer;
mod budget;
mod changelog;
mod direct;
mod errors;
mod guard;
mod guc;
mod history;
mod horizon;
mod input;
mod object_lock;
mod queue;
mod record;
mod relation;
mod savepoint;
mod settings;
mod shmem;
mod snapshot;
mod spi;
mod state;
mod values;
mod watch;
mod worker;
mod xact;

use pgrx::prelude::*;

pgrx::pg_module_magic!(name, version);

extension_sql_file!("../sql/00_schema.sql", name = "schema", bootstrap);
extension_sql_file!("../sql/05_preload.sql", name = "preload", requires = ["schema"]);
extension_sql_file!("../sql/10_queue_tables.sql", name = "queue_tables", requires = ["preload"]);
extension_sql_file!("../sql/15_flow_tables.sql", name = "flow_tables", requires = ["queue_tables"]);
extension_sql_file!("../sql/20_queue_views.sql", name = "queue_views", requires = ["flow_tables"]);
extension_sql_file!("../sql/30_queue_verbs.sql", name = "queue_verbs", requires = ["queue_views"]);
extension_sql_file!("../sql/35_flow_verbs.sql", name = "flow_verbs", requires = ["queue_verbs"]);
extension_sql_file!("../sql/35_schedules.sql", name = "schedules", requires = ["flow_verbs"]);
extension_sql_file!("../sql/35_queue_operations.sql", name = "queue_operations", requires = ["schedules"]);
extension_sql_file!("../sql/40_state.sql", name = "state", requires = ["queue_operations"]);
extension_sql_file!("../sql/45_record.sql", name = "record", requires = ["state"]);
extension_sql_file!("../sql/50_changelog.sql", name = "changelog", requires = ["record"]);
extension_sql_file!("../sql/52_task_events.sql", name = "task_events", requires = ["changelog"]);
extension_sql_file!("../sql/55_snapshot.sql", name = "snapshot", requires = ["task_events"]);
extension_sql_file!("../sql/57_watches.sql", name = "watches", requires = ["snapshot"]);
extension_sql_file!("../sql/58_dropped.sql", name = "dropped", requires = ["watches"]);
extension_sql_file!("../sql/60_accounting.sql", name = "accounting", requires = ["dropped"]);
extension_sql_file!("../sql/70_worker.sql", name = "worker", requires = ["accounting"]);
extension_sql_file!("../sql/72_freshness.sql", name = "freshness", requires = ["worker"]);
extension_sql_file!("../sql/75_history.sql", name = "history", requires = ["freshness"]);
extension_sql_file!("../sql/80_check.sql", name = "check", requires = ["history"]);
extension_sql_file!("../sql/90_doctor.sql", name = "doctor", requires = ["check"]);

/// Settings always; shared memory, callbacks and the launcher only while the server starts, since they cannot be had later.
#[pg_guard]
extern "C-unwind" fn _PG_init() {
    guc::init();
    // SAFETY: a flag of the postmaster.
    if unsafe { pg_sys::process_shared_preload_libraries_in_progress } {
        shmem::init();
        xact::init();
        worker::init();
        guard::init();
    }
}
