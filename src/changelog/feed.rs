//! Ticks of the task feeds: when the events of a queue's tasks get their positions, and when they go.
//!
//! A feed works as the changelog does (see the module above), with ticks of its own: a queue's ticks count that queue's events only, so a reader of a quiet queue
//! never walks past a busy one, positions of a feed are dense, and old ticks can go together with their events, which the changelog's cannot, since tags hold
//! on to them. The events of a queue's tick are those visible in its snapshot and not in that of the tick before, ordered by seq; the positions of a tick are
//! the `events` up to its `end_pos`.

use crate::direct;
use crate::guc;
use crate::object_lock::{self, Lock};
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::values::{Instant, SECOND};
use crate::{input, shmem};
use pgrx::prelude::*;
use std::cell::Cell;

static BEGIN: Statement = Statement::new(
    c"insert into stint.task_feeds (queue, start_pos)
      values ($1, nextval('stint.task_event_seq'))
      on conflict (queue) do update set start_pos = excluded.start_pos",
    &[pg_sys::TEXTOID],
);

/// One tick for each feed in which something was committed before the snapshot $1 and not before its last tick. A feed that is being dropped is left alone.
static ADVANCE: Statement = Statement::new(
    c"insert into stint.task_event_ticks (queue, epoch, events, end_pos, snapshot)
      select f.queue, m.epoch, n.events, greatest(p.end_pos, f.start_pos) + n.events, $1::pg_snapshot
      from stint.task_feeds f
      cross join stint.meta m
      left join lateral (select t.epoch, t.end_pos, t.snapshot
                         from stint.task_event_ticks t
                         where t.queue = f.queue
                         order by t.end_pos desc
                         limit 1) p on true
      cross join lateral (select coalesce(case when p.epoch = m.epoch then p.snapshot end, '1:1:'::pg_snapshot) as snapshot offset 0) b
      cross join lateral (
            select count(*) as events
            from (select l.xid
                  from stint.task_event_log l
                  where l.queue = f.queue and l.epoch = m.epoch
                    and l.xid >= pg_snapshot_xmax(b.snapshot) and l.xid < pg_snapshot_xmax($1::pg_snapshot)
                  union all
                  select r.xid
                  from pg_snapshot_xip(b.snapshot) i,
                       lateral (select l.xid from stint.task_event_log l where l.queue = f.queue and l.epoch = m.epoch and l.xid = i offset 0) r) x
            where pg_visible_in_snapshot(x.xid, $1::pg_snapshot)) n
      where n.events > 0
      for key share of f skip locked",
    &[pg_sys::TEXTOID],
);

/// The last tick of each feed in the epoch at hand, which sees every event of it.
static CLOSE: Statement = Statement::new(
    c"insert into stint.task_event_ticks (queue, epoch, events, end_pos, snapshot)
      select f.queue, m.epoch, n.events, greatest(p.end_pos, f.start_pos) + n.events, format('%s:%s:', n.beyond, n.beyond)::pg_snapshot
      from stint.task_feeds f
      cross join stint.meta m
      left join lateral (select t.epoch, t.end_pos, t.snapshot
                         from stint.task_event_ticks t
                         where t.queue = f.queue
                         order by t.end_pos desc
                         limit 1) p on true
      cross join lateral (select coalesce(case when p.epoch = m.epoch then p.snapshot end, '1:1:'::pg_snapshot) as snapshot offset 0) b
      cross join lateral (
            select count(*) as events, greatest(max(l.xid::text::numeric) + 1, pg_snapshot_xmax(b.snapshot)::text::numeric) as beyond
            from stint.task_event_log l
            where l.queue = f.queue and l.epoch = m.epoch and not pg_visible_in_snapshot(l.xid, b.snapshot)) n
      where n.events > 0",
    &[],
);

static SNAPSHOT: Statement = Statement::new(c"select pg_current_snapshot()::text", &[]);

/// Starts a queue's feed, or starts it anew: positions given before are refused from then on.
pub fn begin(session: &Session, queue: &str) {
    session.run(&BEGIN, &[arg(queue)]);
}

/// The snapshot of a tick; taken before the transaction has an id of its own, which would count as ended in it.
pub fn snapshot(session: &Session) -> String {
    session.run(&SNAPSHOT, &[]).must(0, 1)
}

/// Makes the ticks of all feeds with a snapshot. The tick lock is held, and was taken before the snapshot.
pub fn advance(session: &Session, snapshot: &str) {
    session.run(&ADVANCE, &[arg(snapshot)]);
}

/// Gives the events of an epoch that ends their last positions.
pub fn close(session: &Session) {
    session.run(&CLOSE, &[]);
}

/// Whether there may be feeds.
pub fn due() -> bool {
    direct::has_pages(c"task_feeds")
}

/// One round for the maintenance worker, in a transaction that has written nothing. Does not wait: where another session holds the tick lock, that one ticks.
pub fn step() -> bool {
    connect(|session| {
        if object_lock::take(Lock::Ticks, true) {
            advance(session, &snapshot(session));
        }
    });
    false
}

/// The first tick of each feed whose events are to go, with the one before it, as far as no other session has that feed in hand.
static EXPIRED: Statement = Statement::new(
    c"select f.queue::text, t.end_pos, t.epoch, coalesce(case when p.epoch = t.epoch then p.snapshot end, '1:1:'::pg_snapshot)::text, t.snapshot::text
      from stint.task_feeds f
      cross join lateral (select * from stint.task_event_ticks t where t.queue = f.queue and not t.removed order by t.end_pos limit 1) t
      left join lateral (select * from stint.task_event_ticks p where p.queue = f.queue and p.end_pos < t.end_pos order by p.end_pos desc limit 1) p on true
      where t.at < $1 or t.end_pos <= f.start_pos
      order by f.queue
      for no key update of f skip locked",
    &[pg_sys::TIMESTAMPTZOID],
);

static MOVE_START: Statement =
    Statement::new(c"update stint.task_feeds f set start_pos = $2 where f.queue = $1 and f.start_pos < $2", &[pg_sys::TEXTOID, pg_sys::INT8OID]);

/// At most $5 events of a tick (epoch $2, from snapshot $3 to $4).
static REMOVE: Statement = Statement::new(
    c"delete from stint.task_event_log d
      where d.ctid = any (array(
            select x.ctid
            from (select l.ctid, l.xid
                  from stint.task_event_log l
                  where l.queue = $1 and l.epoch = $2 and l.xid >= pg_snapshot_xmax($3::pg_snapshot) and l.xid < pg_snapshot_xmax($4::pg_snapshot)
                  union all
                  select r.*
                  from pg_snapshot_xip($3::pg_snapshot) i,
                       lateral (select l.ctid, l.xid from stint.task_event_log l where l.queue = $1 and l.epoch = $2 and l.xid = i offset 0) r) x
            where pg_visible_in_snapshot(x.xid, $4::pg_snapshot)
            limit $5))",
    &[pg_sys::TEXTOID, pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

/// The newest tick whose events are gone stays: the next one begins where it ends.
static REMOVED: Statement =
    Statement::new(c"update stint.task_event_ticks t set removed = true where t.queue = $1 and t.end_pos = $2", &[pg_sys::TEXTOID, pg_sys::INT8OID]);
static FORGET: Statement =
    Statement::new(c"delete from stint.task_event_ticks t where t.queue = $1 and t.end_pos < $2", &[pg_sys::TEXTOID, pg_sys::INT8OID]);

/// Removes at most `max` events that are past their time. Returns how many, and whether there are more.
fn trim(session: &Session, max: i64) -> (i64, bool) {
    let before = Instant(Instant::now().0.saturating_sub(guc::task_event_retention_s().saturating_mul(SECOND)));
    let mut left = max;
    loop {
        let expired = session.run(&EXPIRED, &[arg(before)]);
        if expired.is_empty() {
            return (max - left, false);
        }
        for at in 0..expired.len() {
            let (queue, end): (String, i64) = (expired.must(at, 1), expired.must(at, 2));
            // First for readers, in the same commit: whoever asks for less is told, also while the rows go bit by bit.
            session.run(&MOVE_START, &[arg(queue.as_str()), arg(end)]);
            let tick = [arg(queue.as_str()), arg(expired.must::<i32>(at, 3)), expired.lift(at, 4), expired.lift(at, 5), arg(left)];
            let gone = session.run(&REMOVE, &tick).len() as i64;
            left -= gone;
            if left == 0 {
                return (max, true);
            }
            session.run(&REMOVED, &[arg(queue.as_str()), arg(end)]);
            session.run(&FORGET, &[arg(queue.as_str()), arg(end)]);
        }
    }
}

/// How often the maintenance worker looks whether events are past their time.
const TRIM_EVERY: i64 = 10 * SECOND;

thread_local! {
    static NEXT_TRIM: Cell<Instant> = const { Cell::new(Instant(0)) };
}

/// Whether it is time again to look.
pub fn trim_due() -> bool {
    Instant::now() >= NEXT_TRIM.get() && due()
}

/// One bounded round for the maintenance worker.
pub fn trim_step() -> bool {
    let more = connect(|session| trim(session, i64::from(guc::max_batch())).1);
    if !more {
        NEXT_TRIM.set(Instant::now().plus(TRIM_EVERY));
    }
    more
}

/// See the SQL COMMENT of stint.trim_task_events.
#[pg_extern(sql = false)]
fn trim_task_events(max: Option<i32>) -> i64 {
    shmem::required();
    let max = input::batch("max", max);
    let _owner = Identity::owner();
    connect(|session| trim(session, max as i64).0)
}
