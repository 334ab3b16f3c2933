//! Idempotency keys: at most one task for each queue and key while the key is kept.

use super::config::{self, Queue};
use crate::errors::Fault;
use crate::spi::{self, Session, Statement, arg};
use crate::values::Instant;
use crate::{guc, input, shmem};
use pgrx::prelude::*;

static HOLD: Statement = Statement::new(
    c"insert into stint.task_keys (queue, key, id, kept_until) values ($1, $2, $3, $4) on conflict (queue, key) do nothing",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::TIMESTAMPTZOID],
);
static HOLDER: Statement =
    Statement::new(c"select k.id from stint.task_keys k where k.queue = $1 and k.key = $2", &[pg_sys::TEXTOID, pg_sys::TEXTOID]);

/// A key is let go once its time is over and its task has finished, so that a live task is never doubled. What has finished is in no place; its history may have been
/// removed.
static EXPIRE: Statement = Statement::new(
    c"delete from stint.task_keys k
      where (k.queue, k.key) in (
            select d.queue, d.key
            from stint.task_keys d
            where d.kept_until <= $1
              and not exists (select from stint.place_ready w where w.queue = d.queue and w.id = d.id)
              and not exists (select from stint.place_scheduled s where s.queue = d.queue and s.id = d.id)
              and not exists (select from stint.place_blocked b where b.queue = d.queue and b.id = d.id)
              and not exists (select from stint.place_running r where r.queue = d.queue and r.id = d.id)
            order by d.kept_until
            limit $2
            for update skip locked)",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID],
);

/// Takes the key for task `id`. Where another task has it, that task's id. A key whose holder's transaction is still open is waited for.
pub fn hold(session: &Session, name: &str, queue: &Queue, key: &str, id: pgrx::Uuid, now: Instant) -> Option<pgrx::Uuid> {
    // Between the two statements the key may expire, after which it is free again.
    for _ in 0..100 {
        let held = session.run(&HOLD, &[arg(name), arg(key), arg(id), arg(config::key_kept_until(queue, now))]);
        if !held.is_empty() {
            return None;
        }
        let holder = session.run(&HOLDER, &[arg(name), arg(key)]);
        if !holder.is_empty() {
            return Some(holder.must(0, 1));
        }
    }
    Fault::new(PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, format!("key \"{key}\" of queue \"{name}\" keeps changing hands"))
        .hint("Repeat the transaction.")
        .raise()
}

/// Lets go of at most `max` keys that are past their time.
fn expire(max: usize) -> i64 {
    spi::connect(|session| session.run(&EXPIRE, &[arg(Instant::now()), arg(max as i64)]).len() as i64)
}

/// See the SQL COMMENT of stint.expire_keys.
#[pg_extern(sql = false)]
fn expire_keys(max: Option<i32>) -> i64 {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = spi::Identity::owner();
    expire(max)
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    expire(usize::try_from(guc::max_batch()).unwrap_or(1)) > 0
}
