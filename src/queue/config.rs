//! What a backend knows of a queue: its settings, its lanes and the budgets these draw on. Read once, kept until a committed change moves the configuration's
//! generation; never kept by a transaction that changed it or that reads with an old snapshot.

use crate::changelog::epoch;
use crate::errors::{self, Fault};
use crate::shmem::{self, Instance, budgets, config, fair, heads, waiters};
use crate::spi::{Session, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::backoff::Backoff;
use stint_core::budget::{Limit, Weights};
use stint_core::history::FOR_EVER;

static QUEUE: Statement = Statement::new(
    c"select q.number,
             (extract(epoch from q.lease_for) * 1e6)::bigint,
             q.max_attempts,
             (extract(epoch from q.backoff_base) * 1e6)::bigint,
             q.backoff_factor,
             (extract(epoch from q.backoff_max) * 1e6)::bigint,
             q.backoff_jitter,
             (extract(epoch from q.key_retention) * 1e6)::bigint,
             q.late_result = 'accept',
             q.notify,
             q.strict_groups,
             array(select b.number from stint.budget_config b where b.budget = any (q.budgets) order by b.number),
             (extract(epoch from q.max_run_time) * 1e6)::bigint,
             q.paused,
             q.fair,
             q.correct_predictions,
             q.history_class::int,
             q.events
      from stint.queue_config q
      where q.queue = $1",
    &[pg_sys::TEXTOID],
);

static LANES: Statement = Statement::new(
    c"select l.lane, l.budgets, l.group_key::text,
             (select w.weight from stint.group_weights w where w.queue = l.queue and w.group_key = l.group_key)
      from stint.lanes l
      where l.queue = $1
      order by l.lane",
    &[pg_sys::TEXTOID],
);

static FACTORS: Statement = Statement::new(c"select f.agent::text, f.factor from stint.prediction_factors f where f.queue = $1", &[pg_sys::TEXTOID]);

static BUDGETS: Statement = Statement::new(
    c"select b.number, b.budget::text, b.max_running::bigint, b.max_tokens, b.default_tokens,
             coalesce((extract(epoch from b.per) * 1000000)::bigint, 0), b.max_requests, b.max_window_tokens,
             (trunc(b.max_cost * 1000000))::bigint, b.input_weight, b.cached_weight, b.output_weight, b.throttled_until
      from stint.budget_config b
      where b.number = any ($1)
      order by b.number",
    &[pg_sys::INT4ARRAYOID],
);

static NAMES: Statement = Statement::new(c"select q.queue::text from stint.queue_config q", &[]);

/// A budget as a queue sees it.
#[derive(Clone)]
pub struct Budget {
    /// Its number.
    pub number: i32,
    /// Its name.
    pub name: String,
    /// Its limits.
    pub limit: Limit,
    /// Its entry in shared memory.
    pub entry: budgets::Handle,
}

impl Budget {
    /// What to name it by when reserving.
    pub fn wanted(&self) -> budgets::Wanted {
        budgets::Wanted { budget: self.number, per: self.limit.per }
    }
}

/// A line tasks wait in.
pub struct Lane {
    /// Its number.
    pub lane: i32,
    /// The numbers of the budgets its tasks named.
    pub own: Vec<i32>,
    /// All budgets it draws on, the queue's included, as indices into [`Queue::budgets`].
    pub draws: Vec<usize>,
    /// Its line's entry in shared memory.
    pub line: heads::Handle,
    /// What was last seen at its front that no claim could take.
    pub front: Cell<Option<Front>>,
    /// Its group, an index into [`Queue::groups`].
    pub group: usize,
    /// What a task without a prediction counts as: the most that one of its budgets says.
    pub default_tokens: Option<i64>,
    /// The most tokens that a task may reserve at all.
    pub capacity: Option<i64>,
}

/// Tasks of one group key, or those without one.
pub struct Group {
    /// The key.
    pub key: Option<String>,
    /// What it counts in a fair queue.
    pub weight: f64,
    /// Its entry in shared memory.
    pub seat: fair::Seat,
}

/// What was found at the front of a lane: a task that has to wait for room, or nothing.
#[derive(Clone, Copy)]
pub struct Front {
    /// The line's count of moves when it was seen.
    pub moves: u64,
    /// When that was.
    pub seen: Instant,
    /// The tokens the task predicts.
    pub tokens: Option<i64>,
    /// Whether nothing was there.
    pub empty: bool,
}

/// A queue.
pub struct Queue {
    /// Its number.
    pub number: i32,
    /// Lease in microseconds.
    pub lease: i64,
    /// Attempts a task may use up.
    pub max_attempts: i32,
    /// Back-off between them.
    pub backoff: Backoff,
    /// How long a key is kept, in microseconds.
    pub key_retention: i64,
    /// Whether the result of a lapsed lease is taken.
    pub late_accepted: bool,
    /// Whether its doorbell rings.
    pub notify: bool,
    /// The longest an attempt may run, in microseconds.
    pub max_run_time: Option<i64>,
    /// Whether claims find nothing.
    pub paused: bool,
    /// Whether changes of status are kept as events.
    pub events: bool,
    /// The retention class of tasks enqueued from now on.
    pub history_class: u8,
    /// The configuration's generation before this was read; 0 where it was not read to be kept.
    generation: u64,
    /// Whether at most one task of a group may run.
    pub strict_groups: bool,
    /// The numbers of the queue's own budgets.
    pub own_budgets: Vec<i32>,
    /// Every budget that some lane draws on, by number.
    pub budgets: Vec<Budget>,
    /// Its lanes, by number.
    pub lanes: Vec<Lane>,
    /// The count of lanes that came or went, before they were read.
    lanes_seen: u64,
    /// Whether groups share it by weight.
    pub fair: bool,
    /// The groups that its lanes are of.
    pub groups: Vec<Group>,
    /// What its groups go on from.
    pub floor: fair::Handle,
    /// Where predictions are corrected, the factor of each agent; '' is no agent.
    factors: HashMap<String, f64>,
}

impl Queue {
    /// The budgets that some lane draws on, as waiters know them.
    pub fn budget_bits(&self) -> u64 {
        waiters::budget_bits(self.budgets.iter().map(|budget| budget.number))
    }

    /// The lane of that number.
    pub fn lane(&self, lane: i32) -> Option<&Lane> {
        self.lanes.binary_search_by_key(&lane, |known| known.lane).ok().map(|at| &self.lanes[at])
    }

    /// The most tokens that a task of a lane may predict and still run. Where predictions are corrected, every task is made to fit.
    pub fn most_tokens(&self, lane: &Lane) -> i64 {
        lane.capacity.filter(|_| self.factors.is_empty()).unwrap_or(i64::MAX)
    }

    /// What a task of an agent is taken to predict at a claim: corrected where the queue does that, but never so that a task which could run could not any more.
    pub fn corrected(&self, lane: &Lane, tokens: Option<i64>, agent: Option<&str>) -> Option<i64> {
        match self.factors.get(agent.unwrap_or("")) {
            Some(factor) => tokens.map(|tokens| stint_core::budget::corrected(tokens, *factor, lane.capacity)),
            None => tokens,
        }
    }
}

struct Cache {
    instance: Option<Instance>,
    generation: u64,
    queues: HashMap<String, Rc<Queue>>,
}

thread_local! {
    static CACHE: RefCell<Cache> = RefCell::new(Cache { instance: None, generation: 0, queues: HashMap::new() });
}

/// The queue of that name; an error naming it, and the nearest there is, where it does not exist.
pub fn find(session: &Session, name: &str) -> Rc<Queue> {
    match lookup(session, name) {
        Some(queue) => queue,
        None => unknown(session, name),
    }
}

/// The queue of that name, if it exists.
pub fn lookup(session: &Session, name: &str) -> Option<Rc<Queue>> {
    // SAFETY: reads this transaction's isolation level.
    let old_snapshot = unsafe { pg_sys::XactIsoLevel } >= pg_sys::XACT_REPEATABLE_READ as i32;
    if old_snapshot || config::changed_here() {
        return read(session, name, 0).map(Rc::new);
    }
    let generation = config::generation(shmem::required());
    // DROP EXTENSION moves no generation, but the next CREATE EXTENSION is another instance.
    let instance = Some(Instance::here());
    let kept = CACHE.with_borrow_mut(|cache| {
        if (cache.instance, cache.generation) != (instance, generation) {
            cache.queues.clear();
            (cache.instance, cache.generation) = (instance, generation);
        }
        cache.queues.get(name).cloned()
    });
    if kept.is_some() {
        return kept;
    }
    let queue = Rc::new(read(session, name, generation)?);
    CACHE.with_borrow_mut(|cache| cache.queues.insert(name.to_string(), queue.clone()));
    Some(queue)
}

fn unknown(session: &Session, name: &str) -> ! {
    let rows = session.run(&NAMES, &[]);
    let names: Vec<String> = (0..rows.len()).filter_map(|row| rows.get(row, 1)).collect();
    let near = stint_core::names::nearest(name, names.iter().map(String::as_str));
    errors::unknown("queue", name, near, "The view stint.queues lists them; stint.create_queue makes one.")
}

fn read(session: &Session, name: &str, generation: u64) -> Option<Queue> {
    epoch::refuse_in_copy(session);
    let row = session.run(&QUEUE, &[arg(name)]);
    if row.is_empty() {
        return None;
    }
    let own_budgets: Vec<i32> = row.must(0, 12);
    let number = row.must(0, 1);
    let lanes_seen = config::lanes(shmem::required(), number);
    let lanes = session.run(&LANES, &[arg(name)]);
    let lane_budgets: Vec<(i32, Vec<i32>)> = (0..lanes.len()).map(|at| (lanes.must(at, 1), lanes.must(at, 2))).collect();
    let mut places: HashMap<Option<String>, usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    let lane_groups: Vec<usize> = (0..lanes.len())
        .map(|at| {
            let key: Option<String> = lanes.get(at, 3);
            *places.entry(key.clone()).or_insert_with(|| {
                let seat = fair::Seat { group: fair::Group::of(key.as_deref()), handle: fair::Handle::default() };
                groups.push(Group { key, weight: lanes.get(at, 4).unwrap_or(1.0), seat });
                groups.len() - 1
            })
        })
        .collect();
    let mut numbers: Vec<i32> = own_budgets.iter().chain(lane_budgets.iter().flat_map(|(_, own)| own)).copied().collect();
    numbers.sort_unstable();
    numbers.dedup();
    let budgets = read_budgets(session, numbers);
    let lanes = lane_budgets
        .into_iter()
        .zip(lane_groups)
        .map(|((lane, own), group)| {
            // Budgets stand by number; those of a thousand lanes are found by it.
            let places = own.iter().chain(&own_budgets).filter_map(|number| budgets.binary_search_by_key(number, |budget| budget.number).ok());
            let mut draws: Vec<usize> = places.collect();
            draws.sort_unstable();
            draws.dedup();
            let default_tokens = draws.iter().filter_map(|at| budgets[*at].limit.default_tokens).max();
            let capacity = draws.iter().filter_map(|at| budgets[*at].limit.capacity()).min();
            Lane { lane, own, draws, line: heads::Handle::default(), front: Cell::new(None), group, default_tokens, capacity }
        })
        .collect();
    let corrects: bool = row.must(0, 16);
    let mut factors = HashMap::new();
    if corrects {
        let rows = session.run(&FACTORS, &[arg(name)]);
        factors.extend((0..rows.len()).map(|at| (rows.must::<String>(at, 1), rows.must::<f64>(at, 2))));
    }
    Some(Queue {
        number,
        lease: row.must(0, 2),
        max_attempts: row.must(0, 3),
        backoff: Backoff { base: row.must(0, 4), factor: row.must(0, 5), max: row.must(0, 6), jitter: row.must(0, 7) },
        key_retention: row.must(0, 8),
        late_accepted: row.must(0, 9),
        notify: row.must(0, 10),
        strict_groups: row.must(0, 11),
        max_run_time: row.get(0, 13),
        paused: row.must(0, 14),
        history_class: u8::try_from(row.must::<i32>(0, 17)).unwrap_or(FOR_EVER),
        events: row.must(0, 18),
        generation,
        own_budgets,
        budgets,
        lanes,
        lanes_seen,
        fair: row.must(0, 15),
        groups,
        floor: fair::Handle::default(),
        factors,
    })
}

impl Queue {
    /// Keeps what an earlier reading knew of the lanes and groups that are still there.
    fn take_over(&mut self, earlier: &Queue) {
        for lane in &mut self.lanes {
            if let Some(known) = earlier.lane(lane.lane) {
                lane.line = known.line.clone();
                lane.front = known.front.clone();
            }
        }
        let known: HashMap<Option<&str>, &Group> = earlier.groups.iter().map(|group| (group.key.as_deref(), group)).collect();
        for group in &mut self.groups {
            if let Some(known) = known.get(&group.key.as_deref()) {
                group.seat = known.seat.clone();
            }
        }
        for budget in &mut self.budgets {
            if let Ok(at) = earlier.budgets.binary_search_by_key(&budget.number, |known| known.number) {
                budget.entry = earlier.budgets[at].entry.clone();
            }
        }
        self.floor = earlier.floor.clone();
    }
}

/// The queue with the lanes that a claim has to look at: those of groups come and go without moving the generation.
pub fn for_claim(session: &Session, name: &str, queue: &Rc<Queue>) -> Rc<Queue> {
    if config::lanes_changed_here() {
        return read(session, name, 0).map_or_else(|| queue.clone(), Rc::new);
    }
    // What was not read to be kept was read just now.
    if queue.generation == 0 || queue.lanes_seen == config::lanes(shmem::required(), queue.number) {
        return queue.clone();
    }
    let Some(mut anew) = read(session, name, queue.generation) else { return queue.clone() };
    anew.take_over(queue);
    let anew = Rc::new(anew);
    CACHE.with_borrow_mut(|cache| {
        if cache.generation == queue.generation {
            cache.queues.insert(name.to_string(), anew.clone());
        }
    });
    anew
}

/// Keeps queues from being dropped until this transaction ends. `drop_queue` waits for whoever has this lock, which every verb that moves a task gets anyway; one
/// that writes history first takes it before.
pub fn keep_from_dropping() {
    // SAFETY: an ordinary relation lock on a table of ours.
    unsafe {
        let table = pg_sys::get_relname_relid(c"place_ready".as_ptr(), pg_sys::Oid::from(Instance::here().schema));
        pg_sys::LockRelationOid(table, pg_sys::RowExclusiveLock as i32);
    }
}

static STANDS: Statement = Statement::new(c"select q.number from stint.queue_config q where q.queue = $1", &[pg_sys::TEXTOID]);

/// Makes sure, once a task's facts are written, that its queue was not dropped since it was read: `drop_queue` commits when no such transaction is open, and
/// whoever comes later sees another generation.
pub fn still_stands(session: &Session, name: &str, queue: &Queue) {
    if queue.generation == config::generation(shmem::required()) {
        return;
    }
    match session.run_latest(&STANDS, &[arg(name)]).get::<i32>(0, 1) {
        None => unknown(session, name),
        Some(number) if number != queue.number => {
            Fault::new(PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, format!("queue \"{name}\" was dropped and made anew"))
                .hint("Repeat the transaction.")
                .raise()
        }
        Some(_) => {}
    }
}

/// The budgets of those numbers, by number.
pub fn read_budgets(session: &Session, numbers: Vec<i32>) -> Vec<Budget> {
    if numbers.is_empty() {
        return Vec::new();
    }
    let rows = session.run(&BUDGETS, &[arg(numbers)]);
    (0..rows.len())
        .map(|at| Budget {
            number: rows.must(at, 1),
            name: rows.must(at, 2),
            limit: Limit {
                max_running: rows.get(at, 3),
                max_tokens: rows.get(at, 4),
                default_tokens: rows.get(at, 5),
                per: rows.must(at, 6),
                max_requests: rows.get(at, 7),
                max_window_tokens: rows.get(at, 8),
                max_cost: rows.get(at, 9),
                weights: Weights { input: rows.must(at, 10), cached: rows.must(at, 11), output: rows.must(at, 12) },
                throttled_until: rows.get::<Instant>(at, 13).map_or(i64::MIN, |until| until.0),
            },
            entry: budgets::Handle::default(),
        })
        .collect()
}

/// The budgets of those numbers: as the queue knows them, or read where one is new to it.
pub fn read_or_known(session: &Session, queue: &Queue, numbers: Vec<i32>) -> Vec<Budget> {
    let known: Vec<Budget> = queue.budgets.iter().filter(|budget| numbers.contains(&budget.number)).cloned().collect();
    if known.len() == numbers.len() { known } else { read_budgets(session, numbers) }
}

static BUDGET_NUMBERS: Statement = Statement::new(
    c"select n.name, b.number
      from unnest($1::text[]) with ordinality as n (name, at)
      left join stint.budget_config b on b.budget = n.name
      order by n.at",
    &[pg_sys::TEXTARRAYOID],
);
static BUDGET_NAMES: Statement = Statement::new(c"select b.budget::text from stint.budget_config b", &[]);

/// The numbers of the budgets of those names, sorted; an error naming the first that does not exist.
pub fn budget_numbers(session: &Session, names: &[String]) -> Vec<i32> {
    if names.is_empty() {
        return Vec::new();
    }
    let rows = session.run(&BUDGET_NUMBERS, &[arg(names.to_vec())]);
    let mut numbers = Vec::with_capacity(rows.len());
    for at in 0..rows.len() {
        match rows.get::<i32>(at, 2) {
            Some(number) => numbers.push(number),
            None => unknown_budget(session, &rows.must::<String>(at, 1)),
        }
    }
    numbers.sort_unstable();
    numbers
}

/// The error for a budget that does not exist, naming the nearest there is.
pub fn unknown_budget(session: &Session, name: &str) -> ! {
    let rows = session.run(&BUDGET_NAMES, &[]);
    let names: Vec<String> = (0..rows.len()).filter_map(|row| rows.get(row, 1)).collect();
    let near = stint_core::names::nearest(name, names.iter().map(String::as_str));
    errors::unknown("budget", name, near, "The view stint.budgets lists them; stint.create_budget makes one.")
}

static ADD_LANE: Statement =
    Statement::new(c"insert into stint.lanes (queue, budgets) values ($1, $2) on conflict do nothing", &[pg_sys::TEXTOID, pg_sys::INT4ARRAYOID]);
static FIND_LANE: Statement = Statement::new(
    c"select l.lane from stint.lanes l where l.queue = $1 and l.budgets = $2 and l.group_key is null",
    &[pg_sys::TEXTOID, pg_sys::INT4ARRAYOID],
);

/// The number of the lane for tasks that name these budgets, made if it is the first time.
pub fn lane_for(session: &Session, name: &str, queue: &Queue, budgets: &[i32]) -> i32 {
    if let Some(lane) = queue.lanes.iter().find(|lane| queue.groups[lane.group].key.is_none() && lane.own == budgets) {
        return lane.lane;
    }
    if !session.run(&ADD_LANE, &[arg(name), arg(budgets.to_vec())]).is_empty() {
        config::changed();
    }
    let found = session.run(&FIND_LANE, &[arg(name), arg(budgets.to_vec())]);
    if found.is_empty() {
        errors::internal("a lane vanished while it was made");
    }
    found.must(0, 1)
}

static ADD_GROUP_LANE: Statement = Statement::new(
    c"insert into stint.lanes (queue, group_key, budgets) values ($1, $2, $3) on conflict do nothing returning lane",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT4ARRAYOID],
);
static FIND_GROUP_LANE: Statement = Statement::new(
    c"select l.lane from stint.lanes l where l.queue = $1 and l.group_key = $2 and l.budgets = $3 and l.closed is null",
    &[pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::INT4ARRAYOID],
);

/// The lanes of groups that a backend has used, as long as the generation stays: whoever closes one moves it.
struct GroupLanes {
    of: (Option<Instance>, u64),
    lanes: HashMap<(i32, String, Vec<i32>), i32>,
}

/// So many are remembered; more groups than that are looked up again.
const GROUP_LANES: usize = 16_384;

thread_local! {
    static LANES_OF_GROUPS: RefCell<GroupLanes> = RefCell::new(GroupLanes { of: (None, 0), lanes: HashMap::new() });
}

/// The number of the lane for new tasks of a group that name these budgets, made if there is none. Where several are made, in the order of groups and budgets.
///
/// A lane that nothing uses is closed and removed later (`shares::tidy`), when every transaction is over that was under way when it was closed. So one that
/// may use what it knew before must be known to be under way before it looks: it has a transaction id.
pub fn group_lane(session: &Session, name: &str, queue: &Queue, group: &str, budgets: &[i32]) -> i32 {
    // SAFETY: gives this transaction an id, if it has none.
    unsafe { pg_sys::GetTopTransactionId() };
    let of = (Some(Instance::here()), config::generation(shmem::required()));
    let key = (queue.number, group.to_string(), budgets.to_vec());
    let known = LANES_OF_GROUPS.with_borrow_mut(|known| {
        if known.of != of {
            known.lanes.clear();
            known.of = of;
        }
        known.lanes.get(&key).copied()
    });
    if let Some(lane) = known {
        return lane;
    }
    let params = [arg(name), arg(group), arg(budgets.to_vec())];
    let lane = super::late::decide(|| {
        // What is committed now, whatever snapshot the transaction keeps: a lane may be closed since.
        if let Some(lane) = session.run_latest(&FIND_GROUP_LANE, &params).get(0, 1) {
            return Some(lane);
        }
        let made = session.run(&ADD_GROUP_LANE, &params).get(0, 1)?;
        config::group_lane_changed(queue.number);
        Some(made)
    });
    // One that this transaction made may be gone again when it ends.
    if !config::lanes_changed_here() {
        LANES_OF_GROUPS.with_borrow_mut(|known| {
            if known.lanes.len() >= GROUP_LANES {
                known.lanes.clear();
            }
            known.lanes.insert(key, lane);
        });
    }
    lane
}

static LANE: Statement = Statement::new(
    c"select l.budgets, l.group_key::text,
             (select w.weight from stint.group_weights w where w.queue = l.queue and w.group_key = l.group_key)
      from stint.lanes l
      where l.queue = $1 and l.lane = $2",
    &[pg_sys::TEXTOID, pg_sys::INT4OID],
);

/// The lane in which a task that becomes live again waits, given that of its budgets.
pub fn lane_again(session: &Session, name: &str, queue: &Queue, lane: i32, group: Option<&str>) -> i32 {
    let Some(group) = group.filter(|_| queue.fair) else { return lane };
    match queue.lane(lane).map(|known| known.own.clone()).or_else(|| session.run_latest(&LANE, &[arg(name), arg(lane)]).get(0, 1)) {
        Some(budgets) => group_lane(session, name, queue, group, &budgets),
        None => lane,
    }
}

/// The group of a lane and its weight.
pub fn group_of(session: &Session, name: &str, queue: &Queue, lane: i32) -> (fair::Group, f64) {
    if let Some(lane) = queue.lane(lane) {
        let group = &queue.groups[lane.group];
        return (group.seat.group, group.weight);
    }
    let row = session.run_latest(&LANE, &[arg(name), arg(lane)]);
    (fair::Group::of(row.get::<String>(0, 2).as_deref()), row.get(0, 3).unwrap_or(1.0))
}

/// The instant at which a key stops being kept.
pub fn key_kept_until(queue: &Queue, now: Instant) -> Instant {
    now.plus(queue.key_retention)
}
