//! The step that rings: one NOTIFY for each queue and state table that changed since the last one, sent after the change is visible. The payload is the name
//! and nothing else. A doorbell is only that: clients that miss one look by themselves.

use crate::shmem::bells::{self, Kind};
use crate::shmem::{self, Instance, workers};
use crate::spi::{self, Statement, arg};
use pgrx::prelude::*;

/// Nobody waits for a doorbell to reach the disk.
static UNFLUSHED: Statement = Statement::new(c"SELECT pg_catalog.set_config('synchronous_commit', 'off', true)", &[]);

static RING_QUEUES: Statement = Statement::new(
    c"SELECT pg_catalog.pg_notify('stint_queue', c.queue)
        FROM stint.queue_config c
       WHERE c.number OPERATOR(pg_catalog.=) ANY ($1)",
    &[pg_sys::INT4ARRAYOID],
);

static RING_TABLES: Statement = Statement::new(
    c"SELECT pg_catalog.pg_notify('stint_changes', pg_catalog.format('%I.%I', n.nspname, c.relname))
        FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
       WHERE c.oid OPERATOR(pg_catalog.=) ANY ($1)",
    &[pg_sys::OIDARRAYOID],
);

/// Rings what was rung. Bells taken by a transaction that then fails are lost, which a doorbell may be.
pub fn step() -> bool {
    let Some(shared) = shmem::get() else { return false };
    workers::answer();
    let rung = bells::take(shared, Instance::here());
    if rung.is_empty() {
        return false;
    }
    let of = |kind| rung.iter().filter(move |(k, _)| *k == kind).map(|(_, object)| *object);
    let queues: Vec<i32> = of(Kind::Queue).filter_map(|number| i32::try_from(number).ok()).collect();
    let tables: Vec<pg_sys::Oid> = of(Kind::Changes).map(pg_sys::Oid::from).collect();
    spi::connect(|session| {
        session.run(&UNFLUSHED, &[]);
        if !queues.is_empty() {
            session.run(&RING_QUEUES, &[arg(queues)]);
        }
        if !tables.is_empty() {
            session.run(&RING_TABLES, &[arg(tables)]);
        }
    });
    false
}
