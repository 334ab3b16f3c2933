//! What a backend knows of a queue: its settings, its lanes and the budgets these draw on. Read once, kept until a committed change moves the configuration's
//! generation; never kept by a transaction that changed it or that reads with an old snapshot.

use crate::changelog::epoch;
use crate::errors::{self, Fault};
use crate::shmem::{self, Instance, budgets, config, heads, waiters};
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
             q.history_class::int,
             q.events
      from stint.queue_config q
      where q.queue = $1",
    &[pg_sys::TEXTOID],
);

static LANES: Statement = Statement::new(c"select l.lane, l.budgets from stint.lanes l where l.queue = $1 order by l.lane", &[pg_sys::TEXTOID]);

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
    /// The task last seen at its front for which there was no room.
    pub front: Cell<Option<Front>>,
}

/// A task at the front of a lane that has to wait for room.
#[derive(Clone, Copy)]
pub struct Front {
    /// The line's count of moves when it was seen.
    pub moves: u64,
    /// When that was.
    pub seen: Instant,
    /// The tokens it predicts.
    pub tokens: Option<i64>,
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
}

impl Queue {
    /// The budgets that some lane draws on, as waiters know them.
    pub fn budget_bits(&self) -> u64 {
        waiters::budget_bits(self.budgets.iter().map(|budget| budget.number))
    }

    /// The lane of that number.
    pub fn lane(&self, lane: i32) -> Option<&Lane> {
        self.lanes.iter().find(|l| l.lane == lane)
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
    let lanes = session.run(&LANES, &[arg(name)]);
    let lane_budgets: Vec<(i32, Vec<i32>)> = (0..lanes.len()).map(|at| (lanes.must(at, 1), lanes.must(at, 2))).collect();
    let mut numbers: Vec<i32> = own_budgets.iter().chain(lane_budgets.iter().flat_map(|(_, own)| own)).copied().collect();
    numbers.sort_unstable();
    numbers.dedup();
    let budgets = read_budgets(session, numbers);
    let lanes = lane_budgets
        .into_iter()
        .map(|(lane, own)| {
            // Budgets stand by number; those of a thousand lanes are found by it.
            let places = own.iter().chain(&own_budgets).filter_map(|number| budgets.binary_search_by_key(number, |budget| budget.number).ok());
            let mut draws: Vec<usize> = places.collect();
            draws.sort_unstable();
            draws.dedup();
            Lane { lane, own, draws, line: heads::Handle::default(), front: Cell::new(None) }
        })
        .collect();
    Some(Queue {
        number: row.must(0, 1),
        lease: row.must(0, 2),
        max_attempts: row.must(0, 3),
        backoff: Backoff { base: row.must(0, 4), factor: row.must(0, 5), max: row.must(0, 6), jitter: row.must(0, 7) },
        key_retention: row.must(0, 8),
        late_accepted: row.must(0, 9),
        notify: row.must(0, 10),
        strict_groups: row.must(0, 11),
        max_run_time: row.get(0, 13),
        paused: row.must(0, 14),
        history_class: u8::try_from(row.must::<i32>(0, 15)).unwrap_or(FOR_EVER),
        events: row.must(0, 16),
        generation,
        own_budgets,
        budgets,
        lanes,
    })
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

static ADD_LANE: Statement = Statement::new(
    c"insert into stint.lanes (queue, budgets) values ($1, $2) on conflict (queue, budgets) do nothing",
    &[pg_sys::TEXTOID, pg_sys::INT4ARRAYOID],
);
static FIND_LANE: Statement =
    Statement::new(c"select l.lane from stint.lanes l where l.queue = $1 and l.budgets = $2", &[pg_sys::TEXTOID, pg_sys::INT4ARRAYOID]);

/// The number of the lane for tasks that name these budgets, made if it is the first time.
pub fn lane_for(session: &Session, name: &str, queue: &Queue, budgets: &[i32]) -> i32 {
    if let Some(lane) = queue.lanes.iter().find(|lane| lane.own == budgets) {
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

/// The instant at which a key stops being kept.
pub fn key_kept_until(queue: &Queue, now: Instant) -> Instant {
    now.plus(queue.key_retention)
}
