//! What a new task has to wait for: looked up and held still before the task is written.

use crate::history::{self, LeafStatement};
use crate::queue::config::{self, Queue};
use crate::queue::enqueue::Request;
use crate::queue::late;
use crate::shmem::waiters;
use crate::spi::{Rows, Session, Statement, arg};
use crate::{errors, input, savepoint};
use pgrx::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Keeps tasks in their places until this transaction ends, one after the other in the order of their ids, wherever each stands. They are looked up one by one,
/// so that no plan made while a table was small reads all of it. Heartbeats pass; claims and sweeps step over the rows, and whoever ends one of the tasks waits.
static HOLD: Statement = Statement::new(
    c"select u.id, w.id is not null
      from unnest($2) as u (id)
      left join lateral (select t.id from stint.place_ready t where t.queue = $1 and t.id >= u.id and t.id <= u.id order by t.id limit 1 for key share) as w on true
      left join lateral (select t.id from stint.place_scheduled t where t.queue = $1 and t.id = u.id limit 1 for key share) as s on true
      left join lateral (select t.id from stint.place_running t where t.queue = $1 and t.id = u.id limit 1 for key share) as r on true
      where coalesce(w.id, s.id, r.id) is not null",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

/// The same for tasks that are blocked themselves.
static HOLD_BLOCKED: Statement = Statement::new(
    c"select h.id
      from unnest($2) as u (id)
      cross join lateral (select t.id from stint.place_blocked t where t.queue = $1 and t.id = u.id limit 1 for key share) as h",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static ENDED: LeafStatement = LeafStatement::new(
    "select o.id, o.outcome::text
      from unnest($2) as u (id)
      cross join lateral (select t.id, t.outcome from {outcomes} t where t.queue = $1 and t.id = u.id limit 1) as o",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static KNOWN: LeafStatement = LeafStatement::new(
    "select u.id
      from unnest($2) as u (id)
      where (select true from {facts} f where f.queue = $1 and f.id = u.id limit 1)",
    &[pg_sys::TEXTOID, pg_sys::UUIDARRAYOID],
);

static TAKE_TURN: Statement = Statement::new(
    c"insert into stint.group_turns (queue, group_key) values ($1, $2) on conflict (queue, group_key) do nothing",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// Keeps the turn from being handed on until this transaction ends: whoever does so then sees the task that is queued up behind it.
static STAND_BEHIND: Statement =
    Statement::new(c"select from stint.group_turns t where t.queue = $1 and t.group_key = $2 for key share", &[pg_sys::TEXTOID, pg_sys::TEXTOID]);

static GIVE_UP_TURN: Statement =
    Statement::new(c"delete from stint.group_turns t where t.queue = $1 and t.group_key = $2", &[pg_sys::TEXTOID, pg_sys::TEXTOID]);

static DEPEND: Statement = Statement::new(
    c"insert into stint.task_dependencies (queue, on_id, id, spot, on_failure) select $1, u.on_id, $2, u.spot, $5 from unnest($3, $4) as u (on_id, spot)",
    &[pg_sys::TEXTOID, pg_sys::UUIDOID, pg_sys::UUIDARRAYOID, pg_sys::INT4ARRAYOID, pg_sys::TEXTOID],
);

/// What becomes of a task when one that it depends on fails or is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// It fails.
    Fail,
    /// It is cancelled.
    Cancel,
    /// Nothing: it runs once all have ended.
    Run,
}

impl OnFailure {
    /// Reads the argument, or the word kept in `task_dependencies`.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "fail" => OnFailure::Fail,
            "cancel" => OnFailure::Cancel,
            "run" => OnFailure::Run,
            _ => return None,
        })
    }

    /// Reads the argument; an error that lists the words where it is none of them.
    pub fn argument(word: &str) -> Self {
        match Self::parse(word) {
            Some(policy) => policy,
            None => errors::invalid(format!("on_dependency_failure \"{word}\" is not known"), "Use 'fail', 'cancel' or 'run'."),
        }
    }

    /// The word for it, as the argument takes it.
    pub fn word(self) -> &'static str {
        match self {
            OnFailure::Fail => "fail",
            OnFailure::Cancel => "cancel",
            OnFailure::Run => "run",
        }
    }

    /// The outcome of a task that does not run.
    pub fn outcome(self) -> Option<&'static str> {
        match self {
            OnFailure::Fail => Some("failed"),
            OnFailure::Cancel => Some("cancelled"),
            OnFailure::Run => None,
        }
    }
}

/// Why a task ends that never ran.
pub fn reason(on: pgrx::Uuid, outcome: &str) -> String {
    format!("task {on}, on which it depends, {}", if outcome == "failed" { "failed" } else { "was cancelled" })
}

/// The ids of the argument `depends_on`, sorted and without repeats.
pub fn ids(value: Option<Vec<Option<pgrx::Uuid>>>) -> Vec<pgrx::Uuid> {
    let mut ids: Vec<pgrx::Uuid> = Vec::new();
    for id in value.unwrap_or_default() {
        ids.push(input::given("depends_on", id));
    }
    sort(&mut ids);
    input::batch_size("depends_on", ids.len());
    ids
}

fn sort(ids: &mut Vec<pgrx::Uuid>) {
    ids.sort_unstable_by_key(|id| *id.as_bytes());
    ids.dedup_by_key(|id| *id.as_bytes());
}

/// What a task about to be written waits for.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// Tasks that must end first, sorted.
    pub depends_on: &'a [pgrx::Uuid],
    /// Its group.
    pub group_key: Option<&'a str>,
    /// The budgets it names itself, sorted; `None` where its lane is known.
    pub budgets: Option<&'a [i32]>,
}

/// What the tasks about to be written wait for, as it stays until they are.
#[derive(Default)]
pub struct Gate {
    /// The outcome of each dependency that has ended.
    ended: HashMap<[u8; 16], String>,
    /// Groups that had no live task: the first task written has the turn.
    free: HashSet<String>,
    /// Where tasks of groups of a fair queue wait, by group and budgets.
    lanes: BTreeMap<(String, Vec<i32>), i32>,
}

/// The lanes of groups of a fair queue, by group and budgets. All that are missing are made in one order, so that two batches that make the same ones wait for each
/// other in a line and not in a ring.
fn lanes<'a>(session: &Session, name: &str, queue: &Queue, waits: impl Iterator<Item = Wait<'a>>) -> BTreeMap<(String, Vec<i32>), i32> {
    let (mut sets, mut groups) = (BTreeSet::new(), BTreeMap::new());
    for Wait { group_key, budgets, .. } in waits {
        let Some(budgets) = budgets else { continue };
        sets.insert(budgets);
        if let Some(group) = group_key.filter(|_| queue.fair) {
            groups.insert((group.to_string(), budgets.to_vec()), 0);
        }
    }
    for budgets in sets {
        config::lane_for(session, name, queue, budgets);
    }
    groups.iter_mut().for_each(|((group, budgets), lane)| *lane = config::group_lane(session, name, queue, group, budgets));
    groups
}

/// Holds everything that tasks wait for, in the one order of locks, and makes the lanes that they are the first of.
pub fn hold<'a>(session: &Session, name: &str, queue: &Queue, waits: impl Iterator<Item = Wait<'a>> + Clone) -> Gate {
    let lanes = lanes(session, name, queue, waits.clone());
    let mut wanted: Vec<pgrx::Uuid> = waits.clone().flat_map(|wait| wait.depends_on).copied().collect();
    sort(&mut wanted);
    let mut groups: Vec<&str> = if queue.strict_groups { waits.filter_map(|wait| wait.group_key).collect() } else { Vec::new() };
    groups.sort_unstable();
    groups.dedup();
    let free = || groups.iter().filter(|key| take_turn(session, name, key)).map(|key| key.to_string()).collect();

    if wanted.is_empty() {
        return Gate { ended: HashMap::new(), free: free(), lanes };
    }
    // A task that moved between two looks would be met again by going on, but by then out of the order of locks, and whoever has it may wait for what is held
    // here. So everything is let go, and held anew.
    let (ended, free, ready) = late::decide(|| {
        savepoint::attempt(session, || {
            let mut wanted = wanted.clone();
            let held = take(session, name, &HOLD, &mut wanted);
            let ready = (0..held.len()).filter(|at| held.must(*at, 2)).count();
            let mut ended = HashMap::new();
            for over in history::read_many(session, &ENDED, name, &wanted) {
                ended.extend((0..over.len()).map(|at| (*over.must::<pgrx::Uuid>(at, 1).as_bytes(), over.must(at, 2))));
                strike(&mut wanted, &over);
            }
            let free = free();
            take(session, name, &HOLD_BLOCKED, &mut wanted);
            if wanted.is_empty() {
                return Some((ended, free, ready));
            }
            if let Some(id) = unknown(session, name, &wanted).first() {
                late::unknown_task(session, name, *id);
            }
            None
        })
    });
    if ready > 0 {
        // Claims step over what is held; however this ends, somebody shall look again.
        waiters::taken(queue.number, ready);
        waiters::ready(queue.number, ready);
    }
    Gate { ended, free, lanes }
}

/// Runs a statement that finds some of the `wanted` tasks, and strikes those from the list.
fn take(session: &Session, name: &str, statement: &Statement, wanted: &mut Vec<pgrx::Uuid>) -> Rows {
    let rows = session.run(statement, &[arg(name), arg(wanted.clone())]);
    strike(wanted, &rows);
    rows
}

/// Those of the tasks that the queue does not know, or not any more.
pub fn unknown(session: &Session, name: &str, ids: &[pgrx::Uuid]) -> Vec<pgrx::Uuid> {
    let mut unknown = ids.to_vec();
    history::read_many(session, &KNOWN, name, ids).iter().for_each(|known| strike(&mut unknown, known));
    unknown
}

/// Strikes what was found from a list.
fn strike(wanted: &mut Vec<pgrx::Uuid>, rows: &Rows) {
    if !rows.is_empty() {
        let found: HashSet<[u8; 16]> = (0..rows.len()).map(|at| *rows.must::<pgrx::Uuid>(at, 1).as_bytes()).collect();
        wanted.retain(|id| !found.contains(id.as_bytes()));
    }
}

/// Takes the turn of a group that has no live task; false where one has it, which then keeps it until this transaction ends.
fn take_turn(session: &Session, name: &str, key: &str) -> bool {
    let params = [arg(name), arg(key)];
    late::decide(|| {
        if !session.run(&TAKE_TURN, &params).is_empty() {
            return Some(true);
        }
        (!session.run(&STAND_BEHIND, &params).is_empty()).then_some(false)
    })
}

impl Gate {
    /// The lane of a task, given that of its budgets.
    pub fn lane(&self, request: &Request, lane: i32) -> i32 {
        let group = request.group_key.as_ref().filter(|_| !self.lanes.is_empty());
        group.and_then(|group| self.lanes.get(&(group.clone(), request.budgets.clone()))).copied().unwrap_or(lane)
    }

    /// How a task ends that cannot run any more, since one it depends on failed or was cancelled.
    pub fn doom(&self, request: &Request) -> Option<(&'static str, String)> {
        let outcome = request.on_dependency_failure.outcome()?;
        request.depends_on.iter().find_map(|on| {
            let ended = self.ended.get(on.as_bytes()).filter(|ended| *ended != "completed")?;
            Some((outcome, reason(*on, ended)))
        })
    }

    /// The dependencies of a task that have not ended.
    pub fn open(&self, depends_on: &[pgrx::Uuid]) -> Vec<pgrx::Uuid> {
        depends_on.iter().filter(|on| !self.ended.contains_key(on.as_bytes())).copied().collect()
    }

    /// Whether the task being written has the turn of its group.
    pub fn take_turn(&mut self, key: &str) -> bool {
        self.free.remove(key)
    }

    /// Lets go of turns that no task took.
    pub fn leave(self, session: &Session, name: &str) {
        for key in &self.free {
            session.run(&GIVE_UP_TURN, &[arg(name), arg(key.as_str())]);
        }
    }
}

/// Writes what a blocked task depends on.
pub fn depend(session: &Session, name: &str, id: pgrx::Uuid, on: Vec<pgrx::Uuid>, policy: OnFailure) {
    if on.is_empty() {
        return;
    }
    let spots: Vec<i32> = on.iter().map(spot).collect();
    session.run(&DEPEND, &[arg(name), arg(id), arg(on), arg(spots), arg(policy.word())]);
}

/// The 24 bits before the last byte of a task's id are random, and those before them count.
fn spot(id: &pgrx::Uuid) -> i32 {
    let bytes = id.as_bytes();
    i32::from_be_bytes([bytes[12], bytes[13], bytes[14], bytes[11]])
}
