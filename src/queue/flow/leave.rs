//! What follows the end of a task: the tasks that depended on it, and the next of its group. In the transaction that ends it; all that depended on it are
//! moved at once, some ten microseconds each. Where the one who ends it must not wait, as a sweep must not, it leaves a row in `follow_ups` and the
//! maintenance worker does it.

use super::enter::{OnFailure, reason};
use crate::direct;
use crate::history::{self, LeafStatement};
use crate::queue::config::{self, Queue};
use crate::queue::late;
use crate::queue::store::{self, Outcome, Ticket};
use crate::spi::{Param, Rows, Session, Statement, arg};
use crate::values::Instant;
use crate::{guc, savepoint, spi};
use pgrx::prelude::*;
use std::collections::VecDeque;

/// A task that has ended.
#[derive(Clone, Copy)]
pub struct End<'a> {
    /// The task.
    pub id: pgrx::Uuid,
    /// Its outcome.
    pub outcome: &'a str,
    /// Whether it had the turn of its group, if it has one: any task but one that was blocked behind another.
    pub turn: bool,
}

impl End<'_> {
    fn completed(&self) -> bool {
        self.outcome == "completed"
    }
}

static DEPENDENTS: Statement = Statement::new(
    c"select d.id
      from unnest($2) as u (id)
      cross join lateral (
            select t.id from stint.task_dependencies t where t.queue = $1 and t.on_id >= u.id and t.on_id <= u.id order by t.on_id offset 0) as d",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// The same with all that depend on those: what may fail with it.
static DESCENDANTS: Statement = Statement::new(
    c"with recursive found as (
            select d.id
            from unnest($2) as u (id)
            cross join lateral (
                  select t.id from stint.task_dependencies t where t.queue = $1 and t.on_id >= u.id and t.on_id <= u.id order by t.on_id offset 0) as d
            union
            select n.id
            from found f
            cross join lateral (
                  select d.id from stint.task_dependencies d where d.queue = $1 and d.on_id >= f.id and d.on_id <= f.id order by d.on_id offset 0) as n)
      select f.id from found f",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// The groups of tasks, which are looked up one by one, so that no plan made while a table was small reads all of it.
static GROUPS: LeafStatement = LeafStatement::new(
    "select distinct f.group_key::text
      from unnest($2) as u (id)
      cross join lateral (select t.group_key from {facts} t where t.queue = $1 and t.id = u.id and t.group_seq is not null limit 1) as f",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// In the order in which they are given: that of their keys.
static LOCK_TURNS: Statement = Statement::new(
    c"select
      from unnest($2) as k (group_key)
      cross join lateral (select from stint.group_turns t where t.queue = $1 and t.group_key = k.group_key limit 1 for update) as held",
    &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID],
);

/// The same without waiting: whether all are locked.
static TRY_TURNS: Statement = Statement::new(
    c"select coalesce(bool_and(held.mine is not null), true)
      from unnest($2) as k (group_key)
      cross join lateral (select from stint.group_turns t where t.queue = $1 and t.group_key = k.group_key limit 1) as there
      left join lateral (select true as mine
                         from stint.group_turns t
                         where t.queue = $1 and t.group_key = k.group_key
                         limit 1
                         for update skip locked) as held on true",
    &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID],
);

/// Who is next in the groups of these tasks, not locked.
static SUCCESSORS: LeafStatement = LeafStatement::new(
    "select n.id
      from unnest($2) as u (id)
      cross join lateral (select t.group_key, t.group_seq from {facts} t where t.queue = $1 and t.id = u.id and t.group_seq is not null limit 1) as f
      cross join lateral (
            select b.id
            from stint.place_blocked b
            where b.queue = $1 and b.group_key = f.group_key and b.group_seq > f.group_seq
            order by b.group_seq
            limit 1) as n",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// In the order in which they are given: that of their ids.
static LOCK_BLOCKED: Statement = Statement::new(
    c"select
      from unnest($2) as u (id)
      cross join lateral (select from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1 for update) as held",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// The same without waiting: whether all are locked.
static TRY_BLOCKED: Statement = Statement::new(
    c"select coalesce(bool_and(held.mine is not null), true)
      from unnest($2) as u (id)
      cross join lateral (select from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1) as there
      left join lateral (select true as mine from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1 for update skip locked) as held on true",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// The dependencies on a task that has ended.
static MEET: Statement = Statement::new(
    c"delete from stint.task_dependencies d
      where d.ctid = any (array(
            select t.ctid from stint.task_dependencies t where t.queue = $1 and t.on_id >= $2 and t.on_id <= $2 order by t.on_id))
      returning d.id, d.spot, d.on_failure::text",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static DOOM: Statement = Statement::new(
    c"delete from stint.place_blocked b where b.queue = $1 and b.id = $2 returning b.attempt, b.group_key is null",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

static FORGET: Statement = Statement::new(
    c"delete from stint.task_dependencies d
      where d.ctid = any (array(
            select t.ctid from stint.task_dependencies t where t.queue = $1 and t.id >= $2 and t.id <= $2 order by t.id))",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// Takes away those of the tasks that wait for nothing any more. The nearest dependency left is looked for on both sides of the one that was met.
static FREE: Statement = Statement::new(
    c"delete from stint.place_blocked b
      where b.ctid = any (array(
            select (select w.ctid from stint.place_blocked w where w.queue = $1 and w.id = u.id and w.group_key is null)
            from unnest($2, $3) as u (id, spot)
            where (select d.spot from stint.task_dependencies d where d.queue = $1 and d.id = u.id and d.spot >= u.spot order by d.spot limit 1) is null
              and (select d.spot from stint.task_dependencies d where d.queue = $1 and d.id = u.id and d.spot < u.spot order by d.spot desc limit 1) is null))
      returning b.id, b.lane, b.priority, b.tokens, b.attempt, b.counted, b.run_at",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID, pg_sys::INT4ARRAYOID],
);

static GROUP: LeafStatement = LeafStatement::new(
    "select f.group_key::text, f.group_seq from {facts} f where f.queue = $1 and f.id = $2 and f.group_seq is not null",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID],
);

/// The next of a group leaves its line. All before it have ended, so the search begins behind the last one to have the turn.
static NEXT: Statement = Statement::new(
    c"delete from stint.place_blocked b
      where b.ctid = any (array(
            select n.ctid
            from stint.place_blocked n
            where n.queue = $1 and n.group_key = $2 and n.group_seq > $3
            order by n.group_seq
            limit 1
            for update))
      returning b.id, b.lane, b.priority, b.tokens, b.attempt, b.counted, b.run_at,
                coalesce((select true from stint.task_dependencies d where d.queue = $1 and d.id >= b.id and d.id <= b.id order by d.id limit 1), false)",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT8OID],
);

static GROUP_OVER: Statement =
    Statement::new(c"delete from stint.group_turns t where t.queue = $1 and t.group_key = $2", &[pg_sys::TEXTOID, pg_sys::TEXTOID]);

type Ids = Vec<pgrx::Uuid>;

fn ids_of(rows: &Rows) -> Ids {
    (0..rows.len()).map(|at| rows.must(at, 1)).collect()
}

/// The groups that tasks of strict groups belong to, each once and in order.
fn groups_of(session: &Session, name: &str, ids: &[pgrx::Uuid]) -> Vec<String> {
    let found = history::read_many_latest(session, &GROUPS, name, ids);
    let mut keys: Vec<String> = found.iter().flat_map(|rows| (0..rows.len()).map(|at| rows.must(at, 1))).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Locks all that may move when tasks end: turns, then blocked rows; their own, where they are blocked, are among them. False where another session holds one
/// and `patient` is not, and where more has come to depend on them meanwhile: then nothing may be locked on top, out of the order of locks.
fn lock_once(session: &Session, name: &str, queue: &Queue, ends: &Ids, failing: bool, patient: bool) -> bool {
    let got = |wait: &Statement, only_try: &Statement, what: Param| {
        let rows = session.run_latest(if patient { wait } else { only_try }, &[arg(name), what]);
        patient || rows.must(0, 1)
    };
    let found = || ids_of(&session.run_latest(if failing { &DESCENDANTS } else { &DEPENDENTS }, &[arg(name), arg(ends.clone())]));
    let mut rows = found();
    rows.extend(ends);
    if queue.strict_groups {
        let ending = if failing { rows.clone() } else { ends.clone() };
        if !got(&LOCK_TURNS, &TRY_TURNS, arg(groups_of(session, name, &ending))) {
            return false;
        }
        rows.extend(history::read_many_latest(session, &SUCCESSORS, name, &ending).iter().flat_map(ids_of));
    }
    rows.sort_unstable_by_key(|id| *id.as_bytes());
    rows.dedup_by_key(|id| *id.as_bytes());
    if !got(&LOCK_BLOCKED, &TRY_BLOCKED, arg(rows.clone())) {
        return false;
    }
    // A task that has ended gets no new dependents, but one that may fail with it does until its row is locked.
    !failing || found().iter().all(|id| rows.binary_search_by_key(id.as_bytes(), |known| *known.as_bytes()).is_ok())
}

/// Locks all that may move when tasks end, waiting for whoever holds some of it.
fn lock(session: &Session, name: &str, queue: &Queue, ends: &Ids, failing: bool) {
    if !failing {
        lock_once(session, name, queue, ends, false, true);
        return;
    }
    late::decide(|| savepoint::attempt(session, || lock_once(session, name, queue, ends, true, true).then_some(())));
}

/// Ends a blocked task. `None`, with nothing locked, where it is not blocked any more, or what has to be locked changed or, unless `patient`, is held by another
/// session: whoever tries again does so from the beginning of the order of locks.
pub fn leave_blocked(session: &Session, name: &str, queue: &Queue, id: pgrx::Uuid, outcome: &Outcome, now: Instant, patient: bool) -> Option<()> {
    savepoint::attempt(session, || {
        if !lock_once(session, name, queue, &vec![id], outcome.outcome != "completed", patient) {
            return None;
        }
        let end = end_blocked(session, name, id, outcome, now)?;
        move_on(session, name, queue, vec![end], now);
        Some(())
    })
}

/// A blocked row on its way to ready or scheduled.
fn place(session: &Session, name: &str, rows: &Rows, at: usize, now: Instant) -> bool {
    let ticket = ticket(rows, at);
    match rows.get::<Instant>(at, 7).filter(|run_at| run_at.0 > now.0) {
        Some(run_at) => {
            store::to_scheduled(session, name, &ticket, run_at);
            false
        }
        None => {
            store::to_ready(session, name, &ticket);
            true
        }
    }
}

fn ticket(rows: &Rows, at: usize) -> Ticket {
    Ticket {
        id: rows.must(at, 1),
        lane: rows.must(at, 2),
        priority: rows.must(at, 3),
        tokens: rows.get(at, 4),
        attempt: rows.must(at, 5),
        counted: rows.must(at, 6),
    }
}

/// Does what follows the ends of tasks, whose outcomes are written.
pub fn follow(session: &Session, name: &str, ends: Vec<End>, now: Instant) {
    if ends.is_empty() {
        return;
    }
    if let Some(queue) = config::lookup(session, name) {
        let ids = ends.iter().map(|end| end.id).collect();
        lock(session, name, &queue, &ids, !ends.iter().all(End::completed));
        move_on(session, name, &queue, ends, now);
    }
}

/// Everything that `lock_once` locked is moved.
fn move_on(session: &Session, name: &str, queue: &Queue, ends: Vec<End>, now: Instant) {
    let mut work = VecDeque::from(ends);
    let (mut met, mut turns) = (Vec::new(), Vec::new());
    while let Some(end) = work.pop_front() {
        if end.turn && queue.strict_groups {
            turns.push(end.id);
        }
        let rows = session.run_latest(&MEET, &[arg(name), arg(end.id)]);
        for at in 0..rows.len() {
            let id: pgrx::Uuid = rows.must(at, 1);
            let policy = OnFailure::parse(&rows.must::<String>(at, 3)).unwrap_or(OnFailure::Run);
            match policy.outcome().filter(|_| !end.completed()) {
                None => met.push((id, rows.must::<i32>(at, 2))),
                Some(theirs) => {
                    let why = reason(end.id, end.outcome);
                    work.extend(end_blocked(session, name, id, &Outcome::waiting(theirs, Some(&why)), now));
                }
            }
        }
    }
    let mut ready = free(session, name, met, now);
    for id in turns {
        ready += usize::from(hand_on(session, name, id, now));
    }
    store::announce(queue, ready);
}

/// Ends a task that is blocked; `None` where it is not: another of its dependencies was before. The outcome names the last of its attempts, where it had some
/// before it was retried.
fn end_blocked(session: &Session, name: &str, id: pgrx::Uuid, outcome: &Outcome, now: Instant) -> Option<End<'static>> {
    let row = session.run_latest(&DOOM, &[arg(name), arg(id)]);
    if row.is_empty() {
        return None;
    }
    session.run_latest(&FORGET, &[arg(name), arg(id)]);
    store::write_outcome(session, name, id, now, &Outcome { attempt: row.must(0, 1), ..*outcome });
    Some(End { id, outcome: outcome.outcome, turn: row.must(0, 2) })
}

/// Moves those of the tasks that depended on an ended one and now wait for nothing. Returns how many are ready.
fn free(session: &Session, name: &str, met: Vec<(pgrx::Uuid, i32)>, now: Instant) -> usize {
    if met.is_empty() {
        return 0;
    }
    let (ids, spots): (Ids, Vec<i32>) = met.into_iter().unzip();
    let rows = session.run_latest(&FREE, &[arg(name), arg(ids), arg(spots)]);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|at| *rows.must::<pgrx::Uuid>(*at, 1).as_bytes());
    order.into_iter().filter(|at| place(session, name, &rows, *at, now)).count()
}

/// Gives the turn of the ended task's group to the next one. It goes to the end of the line in ready, so that a busy group takes turns with others and does
/// not keep them waiting. True if that made a task ready.
fn hand_on(session: &Session, name: &str, id: pgrx::Uuid, now: Instant) -> bool {
    let group = history::read_latest(session, &GROUP, id, &[arg(name), arg(id)]);
    if group.is_empty() {
        return false;
    }
    let key: String = group.must(0, 1);
    let next = session.run_latest(&NEXT, &[arg(name), arg(key.as_str()), arg(group.must::<i64>(0, 2))]);
    if next.is_empty() {
        session.run_latest(&GROUP_OVER, &[arg(name), arg(key.as_str())]);
        return false;
    }
    if next.must(0, 8) {
        store::place_blocked(session, name, &ticket(&next, 0), next.get(0, 7), None);
        return false;
    }
    place(session, name, &next, 0, now)
}

static OWE: Statement =
    Statement::new(c"insert into stint.follow_ups (queue, id) values ($1, $2) on conflict do nothing", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// What is owed, one at a time so that each is followed up or left as a whole.
static OWED: Statement = Statement::new(
    c"select u.queue::text, u.id
      from stint.follow_ups u
      order by u.queue, u.id
      limit $1
      for update of u skip locked",
    &[pg_sys::INT8OID],
);

static OUTCOME: LeafStatement =
    LeafStatement::new("select o.outcome::text from {outcomes} o where o.queue = $1 and o.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

static PAID: Statement = Statement::new(c"delete from stint.follow_ups u where u.queue = $1 and u.id = $2", &[pg_sys::TEXTOID, pg_sys::UUIDOID]);

/// Leaves what follows the end of a task to be done later, by one who need not wait for anybody.
pub fn owe(session: &Session, name: &str, id: pgrx::Uuid) {
    session.run(&OWE, &[arg(name), arg(id)]);
}

/// Does at most `max` of what is owed, as far as nobody holds the rows. Returns how many.
pub fn settle(session: &Session, max: usize) -> usize {
    let owed = session.run(&OWED, &[arg(max as i64)]);
    let now = Instant::now();
    (0..owed.len())
        .filter(|at| {
            let (name, id): (String, pgrx::Uuid) = (owed.must(*at, 1), owed.must(*at, 2));
            let outcome: Option<String> = history::read(session, &OUTCOME, id, &[arg(name.as_str()), arg(id)]).get(0, 1);
            let end = outcome.as_deref().map(|outcome| End { id, outcome, turn: true });
            let Some(queue) = config::lookup(session, &name) else { return false };
            if !lock_once(session, &name, &queue, &vec![id], end.is_some_and(|end| !end.completed()), false) {
                return false;
            }
            match end {
                Some(end) => move_on(session, &name, &queue, vec![end], now),
                // It was retried meanwhile: what waits for it waits on, but its turn is over.
                None => store::announce(&queue, usize::from(queue.strict_groups && hand_on(session, &name, id, now))),
            }
            !session.run(&PAID, &[arg(name.as_str()), arg(id)]).is_empty()
        })
        .count()
}

/// Whether anything may be owed.
pub fn due() -> bool {
    direct::has_pages(c"follow_ups")
}

/// One bounded round for the maintenance worker.
pub fn step() -> bool {
    spi::connect(|session| settle(session, usize::try_from(guc::max_batch()).unwrap_or(1)) > 0)
}
