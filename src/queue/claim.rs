//! `stint.claim`: takes tasks under a lease.
//!
//! A queue's lanes are merged by priority and enqueue order; in a fair queue, groups have turns, and within a group that order holds (`turns`). Where no lane
//! draws on a budget there is one lane, and a claim is three steps: take from ready (from the head of its line on, see `shmem::heads`), read the facts, put into
//! running. Where lanes draw on budgets, the claim first looks at what stands at the head of each lane that has room, reserves for what it may take in one step in
//! shared memory, and only then touches rows. Each step goes to its table directly (`direct`), or is a statement where that cannot be. docs/locks.md says which
//! locks it takes, docs/performance.md what it costs.

use super::config::{self, Front, Lane, Queue};
use super::lines;
use super::rows::{facts, ready, running};
use super::store::{self, Ticket};
use super::task_events::{self, Change};
use super::turns::{self, Turns, share};
use crate::answer::Table;
use crate::budget::live;
use crate::direct::{Batch, Condition, Deleted, Opened, Scan};
use crate::errors::Fault;
use crate::history::{self, LeafStatement};
use crate::shmem::budgets::Wanted;
use crate::shmem::heads::{Glimpse, Head, NOTHING};
use crate::shmem::{self, Instance, waiters};
use crate::spi::{self, Param, Row, Rows, Session, Statement, arg};
use crate::values::{Instant, RawInterval, RawJsonb, RawText, SECOND};
use crate::{errors, guc, horizon, input};
use pgrx::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use stint_core::budget::{Candidate, Limit, State, Usage, admit};
use stint_core::history::Leaf;

/// Takes the first rows of a lane's priority, from its head on, that no other session holds. The inner scan locks, the outer deletes exactly those by their place in the heap.
/// Tasks above what a lowered limit allows at all are stepped over: they stay, and hold up nobody.
static TAKE: Statement = Statement::new(
    c"delete from stint.place_ready r
      where r.ctid = any (array(
            select h.ctid
            from stint.place_ready h
            where h.lane = $1 and h.priority = $2 and h.seq >= $3 and coalesce(h.tokens, 0) <= $5
            order by h.seq
            limit $4
            for update skip locked))
      returning r.queue, r.id, r.lane, r.priority, r.tokens, r.attempt, r.counted, r.seq, r.agent",
    &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// The same for the tasks of one agent, through an index of their own: tasks of other agents are neither walked nor locked, and stay where they are. The lane's
/// head is a lower bound for the agent's rows too, since it only ever rises to the first row of any agent.
static TAKE_AGENT: Statement = Statement::new(
    c"delete from stint.place_ready r
      where r.ctid = any (array(
            select h.ctid
            from stint.place_ready h
            where h.lane = $1 and h.priority = $2 and h.seq >= $3 and h.agent = $6 and coalesce(h.tokens, 0) <= $5
            order by h.seq
            limit $4
            for update skip locked))
      returning r.queue, r.id, r.lane, r.priority, r.tokens, r.attempt, r.counted, r.seq, r.agent",
    &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::INT8OID, pg_sys::TEXTOID],
);

/// Looks, without locking, at what stands first in a lane's priority for some agents: whose turn it is, one row a task.
static TURNS: Statement = Statement::new(
    c"select a.agent
      from unnest($4) as a (agent)
      cross join lateral (
            select h.seq
            from stint.place_ready h
            where h.lane = $1 and h.priority = $2 and h.seq >= $3 and h.agent = a.agent and coalesce(h.tokens, 0) <= $6
            order by h.seq
            limit $5) as r
      order by r.seq
      limit $5",
    &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::TEXTARRAYOID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// Looks, without locking, at what stands first in each of the lanes and priorities, from their heads on.
static FIRST: Statement = Statement::new(
    c"select l.lane, r.tokens, r.agent::text
      from unnest($1, $2, $3, $5) as l (lane, priority, head, most)
      cross join lateral (
            select h.seq, h.tokens, h.agent
            from stint.place_ready h
            where h.lane = l.lane and h.priority = l.priority and h.seq >= l.head and coalesce(h.tokens, 0) <= l.most
            order by h.seq
            limit $4) as r
      order by l.priority desc, r.seq",
    &[pg_sys::INT4ARRAYOID, pg_sys::INT4ARRAYOID, pg_sys::INT8ARRAYOID, pg_sys::INT8OID, pg_sys::INT8ARRAYOID],
);

/// The same for the tasks of some agents.
static FIRST_AGENTS: Statement = Statement::new(
    c"select l.lane, r.tokens, r.agent::text
      from unnest($1, $2, $3, $5) as l (lane, priority, head, most)
      cross join unnest($6) as a (agent)
      cross join lateral (
            select h.seq, h.tokens, h.agent
            from stint.place_ready h
            where h.lane = l.lane and h.priority = l.priority and h.seq >= l.head and h.agent = a.agent
              and coalesce(h.tokens, 0) <= l.most
            order by h.seq
            limit $4) as r
      order by l.priority desc, r.seq",
    &[pg_sys::INT4ARRAYOID, pg_sys::INT4ARRAYOID, pg_sys::INT8ARRAYOID, pg_sys::INT8OID, pg_sys::INT8ARRAYOID, pg_sys::TEXTARRAYOID],
);

/// Looked up one by one: with `id = any ($2)` a plan made while the table was small reads all tasks of the queue, for as long as it is kept.
static FACTS: LeafStatement = LeafStatement::new(
    "select f.queue, f.id, f.lane, f.priority, f.max_attempts, f.tokens, f.enqueued_at, f.run_at, f.lease_for, f.agent, f.key, f.group_key, f.group_seq,
             f.depends_on, f.on_dependency_failure, f.labels, f.payload, f.max_run_time
      from unnest($2) as w (id)
      cross join lateral (select * from {facts} t where t.queue = $1 and t.id = w.id limit 1) as f",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static RUN: Statement = Statement::new(
    c"insert into stint.place_running
             (queue, id, lease, lane, priority, seq, tokens, attempt, counted, started_at, expires_at, budgets, reserved, worker, deadline,
              share)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
    &[
        pg_sys::TEXTOID,
        pg_sys::UUIDOID,
        pg_sys::UUIDOID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::INT8OID,
        pg_sys::INT8OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::INT4ARRAYOID,
        pg_sys::INT8ARRAYOID,
        pg_sys::TEXTOID,
        pg_sys::TIMESTAMPTZOID,
        pg_sys::INT8OID,
    ],
);

/// How long what was seen at the front of a lane is trusted, in microseconds: a row that somebody changed by hand opens its lane so late at the most.
const TRUSTED: i64 = 10 * SECOND;

/// A row taken from ready.
struct Taken {
    ticket: Ticket,
    seq: i64,
    /// The agent it is for.
    agent: Option<String>,
    /// What it is taken to predict: as given, or corrected.
    tokens: Option<i64>,
    /// The instant its budgets were reserved at, if it draws on any.
    began: Option<Instant>,
    /// What its group is charged, in a fair queue.
    share: Option<i64>,
}

/// A claimed task, as the caller gets it after the queue's name.
pub type Claimed = (pgrx::Uuid, i32, pgrx::Uuid, Option<RawJsonb>, i32, Option<RawText>, Option<i64>, Option<RawJsonb>, Instant, Instant, i64);

/// `most`: tasks that predict more are left.
fn take(session: &Session, (lane, most): (i32, i64), head: Head, max: usize, agents: Option<&[String]>) -> Vec<Taken> {
    let Some(agents) = agents else {
        return taken(&session.run(&TAKE, &[arg(lane), arg(head.priority), arg(head.at), arg(max as i64), arg(most)]));
    };
    // What stood first for one agent may be held by another session: the claim then turns to the others.
    let (mut agents, mut all) = (agents.to_vec(), Vec::new());
    while all.len() < max && !agents.is_empty() {
        let left = (max - all.len()) as i64;
        let turns = session.run(&TURNS, &[arg(lane), arg(head.priority), arg(head.at), arg(agents.clone()), arg(left), arg(most)]);
        let mut shares: BTreeMap<String, usize> = BTreeMap::new();
        (0..turns.len()).for_each(|at| *shares.entry(turns.must(at, 1)).or_default() += 1);
        let before = agents.len();
        for (agent, share) in shares {
            let line = [arg(lane), arg(head.priority), arg(head.at), arg(share as i64), arg(most), arg(agent.as_str())];
            let rows = taken(&session.run(&TAKE_AGENT, &line));
            if rows.len() < share {
                agents.retain(|other| *other != agent);
            }
            all.extend(rows);
        }
        if agents.len() == before {
            break;
        }
    }
    all
}

fn taken(rows: &Rows) -> Vec<Taken> {
    rows.iter().map(|row| taken_row(&row)).collect()
}

fn taken_row(row: &impl Row) -> Taken {
    Taken {
        ticket: Ticket {
            id: row.must(ready::ID),
            lane: row.must(ready::LANE),
            priority: row.must(ready::PRIORITY),
            tokens: row.get(ready::TOKENS),
            attempt: row.must(ready::ATTEMPT),
            counted: row.must(ready::COUNTED),
        },
        seq: row.must(ready::SEQ),
        agent: row.get(ready::AGENT),
        tokens: row.get(ready::TOKENS),
        began: None,
        share: None,
    }
}

/// How far a claim looks at first, in seq beyond the head and twice the rows it wants, and how much farther each time it has not found them. A look through an index
/// reads all of a page that its conditions leave open, many times what one row needs.
const REACH: i64 = 6;
const FARTHER: i64 = 16;
/// Beyond this it looks to the end.
const FAR: i64 = 65_536;

/// Goes along a line from its head on, without the executor, until `visit` has seen enough. `None` where a statement has to be run instead.
fn along(table: &Opened, lane: i32, head: Head, wanted: usize, mut visit: impl FnMut(&mut Scan) -> bool) -> Option<()> {
    let [lane, priority] = [Condition::int4(lane), Condition::int4(head.priority)];
    let (mut from, mut reach) = (head.at, (wanted as i64).saturating_mul(2).saturating_add(REACH));
    loop {
        let last = reach > FAR || from <= 0;
        let until = from.saturating_add(reach);
        let conditions = [lane, priority, Condition::at_least(from), Condition::below(until)];
        let mut rows = table.scan(&ready::ORDER, &conditions[..if last { 3 } else { 4 }])?;
        while rows.advance() {
            if visit(&mut rows) {
                return Some(());
            }
        }
        if last {
            return Some(());
        }
        (from, reach) = (until, reach.saturating_mul(FARTHER));
    }
}

/// The first row of a line from its head on, but for those that open transactions are taking, without the executor. `None` where a statement has to be run.
pub fn first_to_stay(lane: i32, head: Head) -> Option<Option<i64>> {
    let table = ready::TABLE.open(pg_sys::AccessShareLock)?;
    let mut first = None;
    along(&table, lane, head, 1, |row| {
        first = row.get(ready::SEQ).filter(|_| !row.leaving());
        first.is_some()
    })?;
    Some(first)
}

/// As [`TAKE`], without the executor; `None` where the statement has to be run. Each row is deleted as it is met, without being locked before. Returns with the
/// rows where the line now begins: at the first row it met that stays, whoever holds it, or else at the last one it took.
fn take_directly((lane, most): (i32, i64), head: Head, max: usize) -> Option<(Vec<Taken>, i64)> {
    let table = ready::TABLE.open(pg_sys::RowExclusiveLock)?;
    let (mut all, mut stays) = (Vec::new(), None);
    along(&table, lane, head, max, |row| {
        // One that another session changed meanwhile is passed over like one that it holds.
        if row.get::<i64>(ready::TOKENS).unwrap_or(0) <= most && row.delete(false) == Deleted::Here {
            all.push(taken_row(row));
        } else if stays.is_none() && !row.leaving() {
            stays = row.get(ready::SEQ);
        }
        all.len() == max
    })?;
    // At the last row it took and not behind it, so that who still sees that one in an old snapshot meets it and is told.
    let begins = stays.or_else(|| all.last().map(|last: &Taken| last.seq)).unwrap_or(NOTHING);
    Some((all, begins))
}

/// Where a claim looks before it takes: a lane, the most tokens that a task of it may predict, and where one of its priorities begins.
#[derive(Clone, Copy)]
struct Line {
    lane: i32,
    most: i64,
    head: Head,
}

/// A task that stands first in its lane: the lane, what it predicts, and the agent it is for.
type First = (i32, Option<i64>, Option<String>);

/// The first tasks of each line, for some agents only where these are given: highest priority first, then by seq.
fn first(session: &Session, lines: &[Line], depth: usize, agents: Option<&[String]>) -> Vec<First> {
    if agents.is_none()
        && let Some(found) = first_directly(lines, depth)
    {
        return found;
    }
    let lanes: Vec<i32> = lines.iter().map(|line| line.lane).collect();
    let priorities: Vec<i32> = lines.iter().map(|line| line.head.priority).collect();
    let starts: Vec<i64> = lines.iter().map(|line| line.head.at).collect();
    let most: Vec<i64> = lines.iter().map(|line| line.most).collect();
    let params = [arg(lanes), arg(priorities), arg(starts), arg(depth as i64), arg(most)];
    let rows = match agents {
        None => session.run(&FIRST, &params),
        Some(agents) => session.run(&FIRST_AGENTS, &[params.as_slice(), &[arg(agents.to_vec())]].concat()),
    };
    rows.iter().map(|row| (row.must(0), row.get(1), row.get(2))).collect()
}

/// As [`FIRST`], without the executor.
fn first_directly(lines: &[Line], depth: usize) -> Option<Vec<First>> {
    let table = ready::TABLE.open(pg_sys::AccessShareLock)?;
    let mut found = Vec::new();
    for line in lines {
        let mut left = depth;
        along(&table, line.lane, line.head, depth, |row| {
            let tokens: Option<i64> = row.get(ready::TOKENS);
            if tokens.unwrap_or(0) <= line.most {
                let place = (std::cmp::Reverse(line.head.priority), row.must::<i64>(ready::SEQ));
                found.push((place, (line.lane, tokens, row.get(ready::AGENT))));
                left -= 1;
            }
            left == 0
        })?;
    }
    found.sort_unstable_by_key(|(place, _)| *place);
    Some(found.into_iter().map(|(_, first)| first).collect())
}

/// Takes at most `max` rows of a lane in their order.
fn take_lane(session: &Session, (lane, most): (i32, i64), max: usize, agents: Option<&[String]>) -> Vec<Taken> {
    let start = lines::heads(session, lane);
    let (mut taken, mut seen) = (Vec::new(), Vec::new());
    for head in &start.heads {
        let before = taken.len();
        let left = max - before;
        match agents.is_none().then(|| take_directly((lane, most), *head, left)).flatten() {
            Some((rows, begins)) => {
                taken.extend(rows);
                seen.push(Head { at: begins, ..*head });
            }
            None => taken.extend(take(session, (lane, most), *head, left, agents)),
        }
        if let Some(first) = taken[before..].iter().map(|row: &Taken| row.seq).min() {
            shmem::heads::taken(Instance::here(), lane, head.priority, first);
        }
        if taken.len() == max {
            break;
        }
    }
    let risen = start.rise(lane, &seen);
    if !taken.is_empty() {
        if !risen {
            shmem::heads::took(shmem::required(), Instance::here(), lane, taken.len());
        }
    } else if seen.len() < start.heads.len() {
        lines::exhausted(session, lane);
    }
    sort(&mut taken);
    taken
}

/// Priority descending, then enqueue order.
fn sort(taken: &mut [Taken]) {
    taken.sort_unstable_by_key(|row| (std::cmp::Reverse(row.ticket.priority), row.seq));
}

/// Takes at most `max` tasks, reserving their budgets.
fn take_any(session: &Session, name: &str, queue: &Queue, wish: &Wish) -> Vec<Taken> {
    match queue.lanes.as_slice() {
        [only] if only.draws.is_empty() && !queue.fair => take_lane(session, (only.lane, i64::MAX), wish.max, wish.agents.as_deref()),
        _ => take_several(session, name, queue, wish),
    }
}

/// Where each budget of the queue stands, at a glance.
fn glance(queue: &Queue, now: Instant, freed: &[Usage]) -> Vec<State> {
    let (shared, instance) = (shmem::required(), Instance::here());
    let seen = queue.budgets.iter().map(|budget| shmem::budgets::glance(shared, instance, budget.number, &budget.entry, now.0));
    seen.zip(freed).map(|(state, freed)| State { usage: state.usage.minus(*freed), ..state }).collect()
}

/// The lanes that may yield something: none of their budgets is shut, there are tasks in them, and the task last seen at their front is not known to have to
/// wait still. Reads only what is published in shared memory, and no lock is taken, so that thousands of lanes without room cost microseconds.
fn open_lanes<'a>(queue: &'a Queue, states: &[State], now: Instant) -> Vec<(&'a Lane, Glimpse)> {
    let instance = Instance::here();
    let shut: Vec<bool> = queue.budgets.iter().zip(states).map(|(budget, state)| budget.limit.shut(*state, now.0)).collect();
    let open = |lane: &&Lane| !lane.draws.iter().any(|budget| shut[*budget]);
    let worth = |lane: &'a Lane| {
        let glimpse = shmem::heads::glimpse(instance, lane.lane, &lane.line);
        let worth = match (glimpse, lane.front.get()) {
            (Glimpse::Empty, _) => false,
            (Glimpse::Moves(moves), Some(front)) if front.moves == moves && now.0.saturating_sub(front.seen.0) < TRUSTED => {
                !front.empty && lane.draws.iter().all(|budget| queue.budgets[*budget].limit.admits(states[*budget], front.tokens, now.0))
            }
            _ => true,
        };
        worth.then_some((lane, glimpse))
    };
    queue.lanes.iter().filter(open).filter_map(worth).collect()
}

fn take_several(session: &Session, name: &str, queue: &Queue, wish: &Wish) -> Vec<Taken> {
    if !queue.budgets.is_empty() {
        live::ensure_loaded(session, Instance::here());
    }
    let (mut all, mut passed) = (Vec::new(), HashSet::new());
    let mut turns = queue.fair.then(Turns::default);
    // What stood first in a lane may be held by another session: the claim then turns to the other lanes, instead of going away empty past tasks that wait there.
    while all.len() < wish.max {
        let (taken, short) = take_round(session, name, queue, &passed, wish.max - all.len(), wish, &mut turns);
        all.extend(taken);
        if turns.as_ref().map_or(short.is_empty(), Turns::over) {
            break;
        }
        passed.extend(short);
    }
    sort(&mut all);
    if !all.is_empty() {
        // What one ended attempt gave back may be room for more than one task: each claim that found some sends the next waiter to look.
        waiters::ready(queue.number, 1);
        if let Some(turns) = &turns {
            let barren = |lane| passed.contains(&lane) && !all.iter().any(|row: &Taken| row.ticket.lane == lane);
            turns.raise_floor(queue, barren, wish.agents.is_some());
        }
        waiters::reserved(queue.budget_bits());
    }
    all
}

/// Takes what now stands first in the lanes that are open and not yet passed, and names the lanes that yielded less than they showed, or are to be passed for
/// another reason.
fn take_round(
    session: &Session,
    name: &str,
    queue: &Queue,
    passed: &HashSet<i32>,
    max: usize,
    wish: &Wish,
    turns: &mut Option<Turns>,
) -> (Vec<Taken>, Vec<i32>) {
    let instance = Instance::here();
    let shared = shmem::required();
    let numbers: Vec<i32> = queue.budgets.iter().map(|budget| budget.number).collect();
    let freed = if wish.hand_on { shmem::budgets::released_here(instance, &numbers) } else { vec![Usage::default(); numbers.len()] };
    let now = Instant::now();
    let mut open = open_lanes(queue, &glance(queue, now, &freed), now);
    open.retain(|(lane, _)| !passed.contains(&lane.lane));
    let depth = match turns {
        Some(turns) => turns.choose(queue, &mut open, max, now),
        None => max,
    };
    let mut heads: Vec<(usize, Head)> = Vec::new();
    for (at, (lane, glimpse)) in open.iter().enumerate() {
        let of_lane = lines::heads(session, lane.lane).heads;
        if of_lane.is_empty() {
            remember_empty(lane, *glimpse, now);
        }
        heads.extend(of_lane.into_iter().map(|head| (at, head)));
    }
    if heads.is_empty() {
        return (Vec::new(), if turns.is_some() { open.iter().map(|(lane, _)| lane.lane).collect() } else { Vec::new() });
    }
    let lines: Vec<Line> =
        heads.iter().map(|(at, head)| Line { lane: open[*at].0.lane, most: queue.most_tokens(open[*at].0), head: *head }).collect();
    let agents = wish.agents.as_deref();
    let first = first(session, &lines, depth, agents);
    let by_number: HashMap<i32, usize> = open.iter().enumerate().map(|(at, (lane, _))| (lane.lane, at)).collect();
    let candidates: Vec<Candidate> = first
        .iter()
        .filter_map(|(lane, tokens, agent)| {
            let lane = *by_number.get(lane)?;
            Some(Candidate { lane, tokens: queue.corrected(open[lane].0, *tokens, agent.as_deref()) })
        })
        .collect();
    let mut seen = vec![0; open.len()];
    candidates.iter().for_each(|candidate| seen[candidate.lane] += 1);
    // Behind what stands first for some agents another agent's task may stand first in the lane; of a fair queue's lanes one is looked at all the same, since
    // one that only looks full would hold down the floor.
    let look_at = if agents.is_none() { open.len() } else { usize::from(turns.is_some()) };
    for at in (0..open.len()).filter(|at| seen[*at] == 0 && heads.iter().any(|(of, _)| of == at)).take(look_at) {
        let (lane, glimpse) = open[at];
        lines::exhausted(session, lane.lane);
        if agents.is_none() {
            remember_empty(lane, glimpse, now);
        }
    }
    let mut short: Vec<i32> =
        if turns.is_some() { open.iter().zip(&seen).filter(|(_, seen)| **seen == 0).map(|((lane, _), _)| lane.lane).collect() } else { Vec::new() };
    if candidates.is_empty() {
        return (Vec::new(), short);
    }

    // Only the budgets that these lanes draw on are looked at under the lock, each under its place in `used`.
    let mut used: Vec<usize> = open.iter().zip(&seen).filter(|(_, seen)| **seen > 0).flat_map(|((lane, _), _)| &lane.draws).copied().collect();
    used.sort_unstable();
    used.dedup();
    let place = |budget: &usize| used.binary_search(budget).unwrap_or_default();
    let draws: Vec<Vec<usize>> =
        open.iter().zip(&seen).map(|((lane, _), seen)| if *seen > 0 { lane.draws.iter().map(place).collect() } else { Vec::new() }).collect();
    let wanted: Vec<Wanted> = used.iter().map(|budget| queue.budgets[*budget].wanted()).collect();
    let limits: Vec<Limit> = used.iter().map(|budget| queue.budgets[*budget].limit).collect();
    let freed: Vec<Usage> = used.iter().map(|budget| freed[*budget]).collect();
    if !used.is_empty() {
        live::enter();
    }
    let mut refused = Vec::new();
    let mut decide = |states: &mut [State], now: i64| match &*turns {
        None => admit(states, &limits, &draws, &candidates, max, now),
        Some(turns) => {
            let lanes = turns.lanes(&open, &draws, &seen, depth);
            let round = turns.admit(queue, &open, states, &limits, &lanes, &candidates, max, Instant(now));
            refused = round.refused;
            round.admitted
        }
    };
    let (admitted, promised_at) = match wanted.as_slice() {
        [] => (decide(&mut [], now.0), now),
        wanted => shmem::budgets::reserve(shared, instance, wanted, None, &freed, decide),
    };
    // What has room only by what this transaction frees is no news to others.
    if turns.is_some() {
        refused.iter().for_each(|index| short.push(open[candidates[*index].lane].0.lane));
        if agents.is_none() && !wish.hand_on {
            refused.iter().for_each(|index| remember_front(&open, candidates[*index], now));
        }
    } else if agents.is_none() && !wish.hand_on {
        // Once enough are admitted the rest was not looked at.
        let judged = if admitted.len() < max { candidates.len() } else { admitted.last().map_or(0, |last| last + 1) };
        remember_fronts(&open, &candidates[..judged], &admitted, now);
    }

    // The rows a lane yields may be others than those seen at its head, since another session may hold these: what they cost is settled row by row.
    let mut promised: Vec<Vec<Candidate>> = vec![Vec::new(); open.len()];
    admitted.iter().for_each(|index| promised[candidates[*index].lane].push(candidates[*index]));
    let mut all = Vec::with_capacity(admitted.len());
    for (at, (lane, _)) in open.iter().enumerate().filter(|(at, _)| !promised[*at].is_empty()) {
        let mut rows = take_lane(session, (lane.lane, queue.most_tokens(lane)), promised[at].len(), agents);
        shmem::heads::stir(instance, lane.lane);
        rows.iter_mut().for_each(|row| row.tokens = queue.corrected(lane, row.ticket.tokens, row.agent.as_deref()));
        let waiting: Vec<Candidate> = rows.iter().map(|row| Candidate { lane: 0, tokens: row.tokens }).collect();
        let wanted: Vec<Wanted> = draws[at].iter().map(|budget| wanted[*budget]).collect();
        let limits: Vec<Limit> = draws[at].iter().map(|budget| limits[*budget]).collect();
        let (kept, began) = if wanted.is_empty() {
            (rows.len(), None)
        } else {
            let given: Vec<State> =
                limits.iter().map(|limit| promised[at].iter().fold(State::default(), |sum, task| sum.plus(limit.cost(task.tokens)))).collect();
            let freed: Vec<Usage> = draws[at].iter().map(|budget| freed[*budget]).collect();
            let every: Vec<usize> = (0..limits.len()).collect();
            let (kept, began) = shmem::budgets::reserve(shared, instance, &wanted, Some((promised_at.0, &given)), &freed, |states, now| {
                admit(states, &limits, &[every], &waiting, waiting.len(), now).len()
            });
            (kept, Some(began))
        };
        // A lane that yielded less than it promised, or of which all was seen and taken.
        if kept < promised[at].len() || turns.is_some() && seen[at] < depth && kept == seen[at] {
            short.push(lane.lane);
        }
        let left = rows.split_off(kept);
        if queue.fair {
            let costs: Vec<i64> = rows.iter().map(|row| share(lane, row.tokens)).collect();
            turns::correct(queue, lane, promised[at].iter().map(|task| share(lane, task.tokens)).sum(), costs.iter().sum(), now);
            rows.iter_mut().zip(costs).for_each(|(row, cost)| row.share = Some(cost));
        }
        rows.iter_mut().for_each(|row| row.began = began);
        all.extend(rows);
        for row in left {
            store::back_to_ready(session, name, &row.ticket, row.seq);
        }
    }
    (all, short)
}

/// Remembers that nothing was found in a lane: this backend need not look again, also where its transaction, having ended a task, may not tell all.
fn remember_empty(lane: &Lane, glimpse: Glimpse, now: Instant) {
    if let (Glimpse::Moves(moves), true) = (glimpse, shmem::heads::may_tell(shmem::required())) {
        lane.front.set(Some(Front { moves, seen: now, tokens: None, empty: true }));
    }
}

/// Remembers that the task which stands first in a lane found no room.
fn remember_front(open: &[(&Lane, Glimpse)], candidate: Candidate, now: Instant) {
    let (lane, glimpse) = &open[candidate.lane];
    if let Glimpse::Moves(moves) = *glimpse {
        lane.front.set(Some(Front { moves, seen: now, tokens: candidate.tokens, empty: false }));
    }
}

/// Remembers, of each lane, the first task that found no room.
fn remember_fronts(open: &[(&Lane, Glimpse)], candidates: &[Candidate], admitted: &[usize], now: Instant) {
    let mut done = vec![false; open.len()];
    let mut next = admitted.iter().peekable();
    for (at, candidate) in candidates.iter().enumerate() {
        if next.next_if(|index| **index == at).is_some() || std::mem::replace(&mut done[candidate.lane], true) {
            continue;
        }
        remember_front(open, *candidate, now);
    }
}

/// What a running row keeps of the budgets it reserved: their numbers and the tokens of each.
fn reservation(queue: &Queue, lane: i32, tokens: Option<i64>) -> (Option<Vec<i32>>, Option<Vec<i64>>) {
    let Some(lane) = queue.lane(lane).filter(|lane| !lane.draws.is_empty()) else { return (None, None) };
    let draws = lane.draws.iter().map(|at| &queue.budgets[*at]);
    (Some(draws.clone().map(|budget| budget.number).collect()), Some(draws.map(|budget| budget.limit.cost(tokens).usage.tokens).collect()))
}

/// What a claim needs to know of a task beside its place.
struct Facts {
    payload: Option<RawJsonb>,
    labels: Option<RawJsonb>,
    agent: Option<RawText>,
    enqueued_at: Instant,
    /// In microseconds, as the next.
    lease_for: Option<i64>,
    max_run_time: Option<i64>,
}

impl Facts {
    fn of(row: &impl Row) -> Self {
        let micros = |column| row.datum(column).map(|datum| RawInterval(datum).epoch_micros());
        Facts {
            payload: row.lift(facts::PAYLOAD).map(RawJsonb),
            labels: row.lift(facts::LABELS).map(RawJsonb),
            agent: row.lift(facts::AGENT).map(RawText),
            enqueued_at: row.must(facts::ENQUEUED_AT),
            lease_for: micros(facts::LEASE_FOR),
            max_run_time: micros(facts::MAX_RUN_TIME),
        }
    }
}

/// The facts of a task, without the executor; `None` where they have to be looked for with the statement.
fn facts_directly(session: &Session, name: &str, id: pgrx::Uuid) -> Option<Facts> {
    let table = facts::TABLE.to_read(session, id)?;
    let mut rows = table.scan(&facts::KEY, &[Condition::text(arg(name)), Condition::uuid(arg(id))])?;
    rows.advance().then(|| Facts::of(&rows))
}

/// The same for several tasks, which stand in their order in `taken`: what is found of each.
fn all_directly(session: &Session, name: &str, taken: &[Taken]) -> Vec<Option<Facts>> {
    if let [only] = taken {
        return vec![facts_directly(session, name, only.ticket.id)];
    }
    let mut known: Vec<Option<Facts>> = taken.iter().map(|_| None).collect();
    let mut order: Vec<(Option<Leaf>, [u8; 16], usize)> =
        taken.iter().enumerate().map(|(at, row)| (Leaf::of(row.ticket.id.as_bytes()), *row.ticket.id.as_bytes(), at)).collect();
    order.sort_unstable();
    for of_leaf in order.chunk_by(|one, other| one.0 == other.0) {
        if let Some(table) = of_leaf[0].0.and_then(|leaf| facts::TABLE.leaf_to_read(session, leaf)) {
            let ids: Vec<pgrx::Uuid> = of_leaf.iter().map(|(_, id, _)| pgrx::Uuid::from_bytes(*id)).collect();
            table.find_all(&facts::KEY, arg(name), facts::ID, &ids, |at, row| {
                known[of_leaf[at].2] = row.map(|row| Facts::of(row));
                true
            });
        }
    }
    known
}

/// The facts of the taken tasks, in their order.
fn facts_of(session: &Session, name: &str, taken: &[Taken]) -> Vec<Option<Facts>> {
    let mut known = all_directly(session, name, taken);
    if known.iter().all(Option::is_some) {
        return known;
    }
    let left: Vec<pgrx::Uuid> = taken.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(row, _)| row.ticket.id).collect();
    let mut found = HashMap::with_capacity(left.len());
    for rows in history::read_many(session, &FACTS, name, &left) {
        found.extend(rows.iter().map(|row| (*row.must::<pgrx::Uuid>(facts::ID).as_bytes(), Facts::of(&row))));
    }
    for (row, known) in taken.iter().zip(&mut known).filter(|(_, known)| known.is_none()) {
        *known = found.remove(row.ticket.id.as_bytes());
    }
    known
}

/// Running rows on their way to their table.
enum Starting {
    One(Opened),
    Many(Batch),
    ByStatement,
}

impl Starting {
    fn push(&mut self, session: &Session, row: [Param; 16]) {
        let not_cancelled = [arg(false)];
        match self {
            Starting::One(table) => table.insert(row.into_iter().chain(not_cancelled)),
            Starting::Many(batch) => batch.push(row.into_iter().chain(not_cancelled)),
            Starting::ByStatement => {
                session.run(&RUN, &row);
            }
        }
    }
}

/// Starts an attempt of each taken task.
fn start(session: &Session, name: &str, queue: &Queue, taken: &[Taken], wish: &Wish, now: Instant) -> Vec<Claimed> {
    let known = facts_of(session, name, taken);
    let mut starting = match running::TABLE.open(pg_sys::RowExclusiveLock) {
        Some(table) if taken.len() == 1 => Starting::One(table),
        Some(table) => Starting::Many(Batch::new(table, taken.len())),
        None => Starting::ByStatement,
    };
    let (queue_name, worker) = (arg(name), arg(wish.worker));
    let leases = stint_core::ids::leases(taken.len()).map(pgrx::Uuid::from_bytes);
    let claimed: Vec<Claimed> = taken
        .iter()
        .zip(known)
        .zip(leases)
        .filter_map(|((Taken { ticket, seq, tokens, began, share, .. }, facts), lease)| {
            let now = began.unwrap_or(now);
            let facts = facts?;
            let attempt = ticket.attempt.saturating_add(1);
            let longest: Option<i64> = facts.max_run_time.or(queue.max_run_time);
            let lasts = wish.lease_for.or(facts.lease_for).unwrap_or(queue.lease).min(longest.unwrap_or(i64::MAX));
            let expires = now.plus(lasts);
            let (budgets, reserved) = reservation(queue, ticket.lane, *tokens);
            lines::runs_until(expires);
            let row = [
                queue_name,
                arg(ticket.id),
                arg(lease),
                arg(ticket.lane),
                arg(ticket.priority),
                arg(*seq),
                arg(ticket.tokens),
                arg(attempt),
                arg(ticket.counted),
                arg(now),
                arg(expires),
                arg(budgets),
                arg(reserved),
                worker,
                arg(longest.map(|longest| now.plus(longest))),
                arg(*share),
            ];
            starting.push(session, row);
            if queue.events {
                let change = Change { id: ticket.id, status: "running", attempt, worker: Some(wish.worker), why: None };
                task_events::record(session, name, &change);
            }
            Some((
                ticket.id,
                attempt,
                lease,
                facts.payload,
                ticket.priority,
                facts.agent,
                ticket.tokens,
                facts.labels,
                facts.enqueued_at,
                expires,
                lasts / 1000,
            ))
        })
        .collect();
    if let Starting::Many(batch) = starting {
        batch.write();
    }
    claimed
}

/// What a claim asks for.
pub struct Wish<'a> {
    /// Who runs the tasks.
    pub worker: &'a str,
    /// The most tasks.
    pub max: usize,
    /// Their lease in microseconds, in place of the task's or the queue's.
    pub lease_for: Option<i64>,
    /// The agents whose tasks are asked for; any task where none are named.
    pub agents: Option<Vec<String>>,
    /// Whether it may use what the attempts that this transaction ended will release when it commits.
    pub hand_on: bool,
}

/// The most agents a claim may name: each costs a look at the index in every lane and priority.
const MOST_AGENTS: usize = 100;

/// The agents of a claim, checked.
pub fn checked_agents(agents: Option<Vec<Option<String>>>) -> Option<Vec<String>> {
    let agents = input::names("agents", Some(agents?));
    if agents.is_empty() || agents.len() > MOST_AGENTS {
        errors::invalid(
            format!("argument \"agents\" names {} agents, it must be from 1 to {MOST_AGENTS}", agents.len()),
            "Name the agents whose tasks to claim, or leave agents out to claim any task.",
        )
    }
    Some(agents)
}

/// One try: claims what is there now.
pub fn try_claim(session: &Session, name: &str, queue: &Rc<Queue>, wish: &Wish) -> Vec<Claimed> {
    if queue.paused {
        return Vec::new();
    }
    let queue = &config::for_claim(session, name, queue);
    let taken = take_any(session, name, queue, wish);
    if taken.is_empty() {
        return Vec::new();
    }
    waiters::taken(queue.number, taken.len());
    store::announce(queue, 0);
    start(session, name, queue, &taken, wish, Instant::now())
}

fn find_and_try(name: &str, wish: &Wish) -> Vec<Claimed> {
    spi::connect(|session| {
        let queue = config::find(session, name);
        try_claim(session, name, &queue, wish)
    })
}

/// Claims, sleeping in the server until something is there or the wait is over.
fn wait_and_claim(name: &str, wish: &Wish, wait: i64, fcinfo: pg_sys::FunctionCallInfo) -> Vec<Claimed> {
    // SAFETY: reads this transaction's isolation level.
    if unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32 {
        Fault::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, "claim cannot wait in a transaction that keeps one snapshot")
            .hint("Use READ COMMITTED, or leave out wait: a REPEATABLE READ transaction would never see the task that ends the wait.")
            .raise()
    }
    let until = Instant::now().plus(wait);
    // A wake-up is for one task. A session that waits for some agents only would swallow it where the task is for another, so it does not stand among the
    // sleepers but looks by itself.
    let queue = || spi::connect(|session| config::find(session, name));
    let waiter = wish.agents.is_none().then(|| {
        let queue = queue();
        waiters::Waiter::join(queue.number, queue.budget_bits())
    });
    loop {
        let claimed = find_and_try(name, wish);
        let left = until.ms_since(Instant::now());
        if !claimed.is_empty() || left <= 0 {
            return claimed;
        }
        // A task that came meanwhile may draw on a budget that no other of the queue does.
        let budgets = queue().budget_bits();
        // A try may have taken a transaction id, with rows that it had to put back.
        if horizon::may_let_go(fcinfo) {
            horizon::let_go();
        }
        match &waiter {
            Some(waiter) => waiter.sleep(left, budgets),
            None => waiters::doze(left),
        }
    }
}

/// See the SQL COMMENT of stint.claim.
#[pg_extern(sql = false)]
fn claim(
    queue: Option<&str>,
    worker: Option<&str>,
    max: Option<i32>,
    lease_for: Option<RawInterval>,
    wait: Option<RawInterval>,
    agents: Option<Vec<Option<String>>>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Table<(
    name!(queue, RawText),
    name!(id, pgrx::Uuid),
    name!(attempt, i32),
    name!(lease, pgrx::Uuid),
    name!(payload, Option<RawJsonb>),
    name!(priority, i32),
    name!(agent, Option<RawText>),
    name!(tokens, Option<i64>),
    name!(labels, Option<RawJsonb>),
    name!(enqueued_at, Instant),
    name!(expires_at, Instant),
    name!(expires_in_ms, i64),
)> {
    shmem::required();
    let name = input::name("queue", queue);
    let worker = input::name("worker", worker);
    let wish = Wish {
        worker,
        max: input::batch("max", max),
        lease_for: lease_for.map(|lease| input::lease("lease_for", lease)),
        agents: checked_agents(agents),
        hand_on: false,
    };
    let wait = wait.map_or(0, |wait| input::duration("wait", wait, 0, guc::max_wait_s(), "stint.max_wait"));
    let _owner = spi::Identity::owner();
    let claimed = if wait > 0 { wait_and_claim(name, &wish, wait, fcinfo) } else { find_and_try(name, &wish) };
    let queue = RawText::of(name);
    let with_queue = |(id, attempt, lease, payload, priority, agent, tokens, labels, enqueued_at, expires_at, expires_in_ms): Claimed| {
        (queue, id, attempt, lease, payload, priority, agent, tokens, labels, enqueued_at, expires_at, expires_in_ms)
    };
    Table::of(claimed.into_iter().map(with_queue).collect())
}
