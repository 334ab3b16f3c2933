//! Idempotency keys: at most one task for each queue and key while the key is kept.

use super::config::{self, Queue};
use super::lines::{self, Eye};
use crate::errors::Fault;
use crate::shmem::{self, Instance, heads};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use crate::{guc, input};
use pgrx::prelude::*;
use std::cell::Cell;

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
            where d.kept_until >= $3 and d.kept_until <= $1
              and (select true from stint.place_ready w where w.queue = d.queue and w.id >= d.id and w.id <= d.id order by w.id limit 1) is null
              and not exists (select from stint.place_scheduled s where s.queue = d.queue and s.id = d.id)
              and not exists (select from stint.place_blocked b where b.queue = d.queue and b.id = d.id)
              and not exists (select from stint.place_running r where r.queue = d.queue and r.id = d.id)
            order by d.kept_until
            limit $2
            for update skip locked)",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID, pg_sys::TIMESTAMPTZOID],
);

static FIRST: Statement =
    Statement::new(c"select k.kept_until from stint.task_keys k where k.kept_until >= $1 order by k.kept_until limit 1", &[pg_sys::TIMESTAMPTZOID]);

/// Until when the last of $3 keys from an instant on is kept, where there are so many.
static PAGE_END: Statement = Statement::new(
    c"select k.kept_until from stint.task_keys k where k.kept_until >= $2 and k.kept_until <= $1 order by k.kept_until offset $3 - 1 limit 1",
    &[pg_sys::TIMESTAMPTZOID, pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID],
);

/// Takes the key for task `id`. Where another task has it, that task's id. A key whose holder's transaction is still open is waited for.
pub fn hold(session: &Session, name: &str, queue: &Queue, key: &str, id: pgrx::Uuid, now: Instant) -> Option<pgrx::Uuid> {
    // Between the two statements the key may expire, after which it is free again.
    for _ in 0..100 {
        let kept_until = config::key_kept_until(queue, now);
        let held = session.run(&HOLD, &[arg(name), arg(key), arg(id), arg(kept_until)]);
        if !held.is_empty() {
            heads::lower(Instance::here(), heads::KEYS, 0, kept_until.0);
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

/// Lets go of at most `max` keys whose time ended from one instant to another.
fn expire(session: &Session, from: i64, until: i64, max: i64) -> i64 {
    session.run(&EXPIRE, &[arg(Instant(until)), arg(max), arg(Instant(from))]).len() as i64
}

/// See the SQL COMMENT of stint.expire_keys.
#[pg_extern(sql = false)]
fn expire_keys(max: Option<i32>) -> i64 {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = spi::Identity::owner();
    spi::connect(|session| expire(session, i64::MIN, Instant::now().0, max as i64))
}

/// How often the maintenance worker looks again at keys that it passed since their tasks were live, in microseconds.
const AGAIN_EVERY: i64 = 60 * SECOND;

thread_local! {
    /// Up to where it has looked, and when it begins anew.
    static LOOKED: Cell<(i64, i64)> = const { Cell::new((i64::MIN, i64::MIN)) };
}

thread_local! {
    static EYE: Eye = Eye::on(heads::KEYS);
}

/// Whether a key may be past its time.
pub fn due() -> bool {
    EYE.with(Eye::due)
}

/// One bounded round for the maintenance worker: looks at one page of keys past their time. However many of them belong to live tasks, it does not look at all of
/// these in every round.
pub fn step() -> bool {
    let (now, page) = (Instant::now(), i64::from(guc::max_batch()));
    let (looked, again) = LOOKED.get();
    let (looked, again) = if now.0 < again { (looked, again) } else { (i64::MIN, now.plus(AGAIN_EVERY).0) };
    spi::connect(|session| {
        let first = lines::first_instant(session, heads::KEYS, &FIRST).unwrap_or(i64::MAX);
        let from = looked.max(first);
        if from > now.0 {
            return false;
        }
        let end = session.run(&PAGE_END, &[arg(now), arg(Instant(from)), arg(page)]).get::<Instant>(0, 1);
        let until = end.map_or(now.0, |end| end.0);
        let gone = expire(session, from, until, page);
        // Keys of one instant may be more than a page.
        let looked = if gone < page { until.saturating_add(1) } else { from };
        LOOKED.set((looked, again));
        gone == page || end.is_some()
    })
}
