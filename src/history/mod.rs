//! History: what tasks were, their ended attempts and how they ended, in partitions by retention class and time. `stint_core::history` says which partition (the
//! *leaf*: three tables of one class and period) an id belongs to. Verbs look into the leaf itself: a plan over the parent would lock every partition before it
//! finds the one.
//!
//! Whoever works on a leaf holds ACCESS SHARE on its facts first, so that it is not dropped or rewritten in between. A leaf that is not there means, to a reader,
//! that there is no such task; a writer makes it (`make`).

pub mod ahead;
pub mod classes;
mod compact;
mod expire;
mod make;
pub mod retention;

use crate::direct::{self, Batch, Column, Opened, Table};
use crate::errors;
use crate::shmem::Instance;
use crate::spi::{Param, Prepared, Rows, Session, Statement, arg};
use crate::values::Instant;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::ffi::CString;
use std::rc::Rc;
use stint_core::history::{FOR_EVER, Leaf, PARTS};

/// How many plans a statement keeps: those of the leaves it was used on last.
const PLANS: usize = 16;

/// A statement on the tables of one leaf, which its text calls `{facts}`, `{attempts}` and `{outcomes}`. The plan for each leaf is kept; it names the tables, so
/// PostgreSQL plans it anew where a leaf was dropped and made again. Declare it as a `static`.
pub struct LeafStatement {
    template: &'static str,
    types: &'static [pg_sys::Oid],
    plans: RefCell<Vec<(Leaf, Rc<Prepared>)>>,
}

// SAFETY: a backend runs one thread; forked children start before any plan is made.
unsafe impl Sync for LeafStatement {}

impl LeafStatement {
    /// A statement with `$1 …` of the given types.
    pub const fn new(template: &'static str, types: &'static [pg_sys::Oid]) -> Self {
        LeafStatement { template, types, plans: RefCell::new(Vec::new()) }
    }

    /// The plan for a leaf. It is shared, so that a call from within another (a trigger) may let go of it.
    fn plan(&self, leaf: Leaf) -> Rc<Prepared> {
        let mut plans = self.plans.borrow_mut();
        if let Some(at) = plans.iter().position(|(of, _)| *of == leaf) {
            plans[..=at].rotate_right(1);
            return plans[0].1.clone();
        }
        drop(plans);
        let plan = Rc::new(Prepared::new(&on_leaf(self.template, leaf), self.types));
        let mut plans = self.plans.borrow_mut();
        plans.insert(0, (leaf, plan.clone()));
        plans.truncate(PLANS);
        plan
    }
}

/// The text of a statement on a leaf.
fn on_leaf(template: &str, leaf: Leaf) -> String {
    let suffix = leaf.suffix();
    ["{facts}", "{attempts}", "{outcomes}"]
        .iter()
        .zip(PARTS)
        .fold(template.to_string(), |text, (word, part)| text.replace(word, &format!("stint.{part}_{suffix}")))
}

/// One of the tables of each leaf, read and written without the executor. Declare it as a `static`.
pub struct LeafTable {
    part: &'static str,
    columns: &'static [Column],
    tables: RefCell<Vec<(Leaf, Rc<Table>)>>,
}

// SAFETY: as above.
unsafe impl Sync for LeafTable {}

impl LeafTable {
    /// The part of that name, with these columns.
    pub const fn new(part: &'static str, columns: &'static [Column]) -> Self {
        LeafTable { part, columns, tables: RefCell::new(Vec::new()) }
    }

    fn open(&self, leaf: Leaf, mode: u32) -> Option<Opened> {
        let mut tables = self.tables.borrow_mut();
        let table = match tables.iter().position(|(of, _)| *of == leaf) {
            Some(0) => tables[0].1.clone(),
            Some(at) => {
                tables[..=at].rotate_right(1);
                tables[0].1.clone()
            }
            None => {
                let table = Rc::new(Table::named(format!("{}_{}", self.part, leaf.suffix()), self.columns));
                tables.insert(0, (leaf, table.clone()));
                tables.truncate(PLANS);
                table
            }
        };
        drop(tables);
        table.open(mode)
    }

    /// Opens the table for a row of that task; its partition is made where there is none. `None` where the statement has to be run instead.
    pub fn to_write(&self, session: &Session, id: pgrx::Uuid) -> Option<Opened> {
        if !direct::usable() {
            return None;
        }
        let leaf = leaf_to_write(id);
        hold_or_make(session, leaf);
        self.open(leaf, pg_sys::RowExclusiveLock)
    }

    /// Takes rows of several tasks, about `expected` of them, to be written together.
    pub fn batch(&'static self, expected: usize) -> LeafBatch {
        LeafBatch { table: self, expected, leaves: Vec::new() }
    }

    /// Opens the table to look for tasks of a leaf. `None` where the statement has to be run instead, also where there is no such partition.
    pub fn leaf_to_read(&self, session: &Session, leaf: Leaf) -> Option<Opened> {
        (direct::usable() && hold(session, leaf)).then(|| self.open(leaf, pg_sys::AccessShareLock)).flatten()
    }

    /// Opens the table to look for that task. `None` where the statement has to be run instead, also where there is no such partition.
    pub fn to_read(&self, session: &Session, id: pgrx::Uuid) -> Option<Opened> {
        Leaf::of(id.as_bytes()).and_then(|leaf| self.leaf_to_read(session, leaf))
    }
}

/// Rows of tasks on their way into one of the tables of their leaves.
pub struct LeafBatch {
    table: &'static LeafTable,
    expected: usize,
    leaves: Vec<(Leaf, Option<Batch>)>,
}

impl LeafBatch {
    /// Takes a row of that task, as [`Batch::push`] does; its partition is made where there is none. False where the statement has to be run instead.
    pub fn push(&mut self, session: &Session, id: pgrx::Uuid, values: impl IntoIterator<Item = Param>) -> bool {
        let leaf = leaf_to_write(id);
        let at = self.leaves.iter().position(|(of, _)| *of == leaf).unwrap_or_else(|| {
            let batch = self.table.to_write(session, id).map(|table| Batch::new(table, self.expected));
            self.leaves.push((leaf, batch));
            self.leaves.len() - 1
        });
        let batch = self.leaves[at].1.as_mut();
        batch.map(|batch| batch.push(values)).is_some()
    }

    /// Writes the rows.
    pub fn write(self) {
        self.leaves.into_iter().filter_map(|(_, batch)| batch).for_each(Batch::write);
    }
}

/// The oid of a table in the schema, if it is there as far as this session has heard.
fn relation(name: &str) -> Option<pg_sys::Oid> {
    let name = CString::new(name).ok()?;
    // SAFETY: a system cache look-up.
    let oid = unsafe { pg_sys::get_relname_relid(name.as_ptr(), pg_sys::Oid::from(Instance::here().schema)) };
    (oid != pg_sys::InvalidOid).then_some(oid)
}

static COMMITTED: Statement =
    Statement::new(c"select from pg_catalog.pg_class c where c.relname = $1::name and c.relnamespace = $2", &[pg_sys::TEXTOID, pg_sys::OIDOID]);

/// The same as far as anything has committed: a transaction can be seen a moment before the news of its DDL arrives.
fn relation_now(session: &Session, name: &str) -> Option<pg_sys::Oid> {
    relation(name)
        .or_else(|| {
            // SAFETY: as PostgreSQL itself does whenever it takes a lock.
            unsafe { pg_sys::AcceptInvalidationMessages() };
            relation(name)
        })
        .or_else(|| {
            let schema = pg_sys::Oid::from(Instance::here().schema);
            if session.run_latest(&COMMITTED, &[arg(name), arg(schema)]).is_empty() {
                return None;
            }
            // SAFETY: as PostgreSQL itself does when it has missed messages.
            unsafe { pg_sys::InvalidateSystemCaches() };
            relation(name)
        })
}

/// The facts of a leaf as last found, and the count of changes at that time.
type Found = (Leaf, pg_sys::Oid, u64);

thread_local! {
    /// The leaves held last; what they are stays as long as the count of changes does.
    static FOUND: RefCell<Vec<Found>> = const { RefCell::new(Vec::new()) };
}

/// Holds a leaf as it is until the transaction ends; false where there is none.
fn hold(session: &Session, leaf: Leaf) -> bool {
    let mode = pg_sys::AccessShareLock as i32;
    let found = FOUND.with_borrow(|found| found.iter().find(|(of, ..)| *of == leaf).copied());
    if let Some((_, oid, changes)) = found.filter(|(.., changes)| *changes == direct::changes()) {
        // SAFETY: an ordinary relation lock; with it comes the news of changes.
        unsafe { pg_sys::LockRelationOid(oid, mode) };
        if changes == direct::changes() {
            return true;
        }
    }
    let name = format!("{}_{}", PARTS[0], leaf.suffix());
    loop {
        let Some(oid) = relation_now(session, &name) else { return false };
        // SAFETY: an ordinary relation lock; what waited for it may find another table under the name.
        unsafe {
            pg_sys::LockRelationOid(oid, mode);
            let changes = direct::watch(oid);
            if relation(&name) == Some(oid) {
                FOUND.with_borrow_mut(|found| {
                    found.retain(|(of, ..)| *of != leaf);
                    found.truncate(PLANS - 1);
                    found.insert(0, (leaf, oid, changes));
                });
                return true;
            }
            pg_sys::UnlockRelationOid(oid, mode);
        }
    }
}

/// As [`hold`]; makes the leaf where there is none.
fn hold_or_make(session: &Session, leaf: Leaf) {
    if !hold(session, leaf) {
        make::make(session, leaf);
        if !hold(session, leaf) {
            errors::internal(&format!("partition {} vanished while it was made", leaf.suffix()));
        }
    }
}

/// Sees to it that a class has the leaf of now.
fn prepare(session: &Session, class: u8) {
    if let Some(leaf) = Leaf::at(class, ms(Instant::now())) {
        hold_or_make(session, leaf);
    }
}

fn leaf_to_write(id: pgrx::Uuid) -> Leaf {
    match Leaf::of(id.as_bytes()) {
        Some(leaf) => leaf,
        None => errors::internal(&format!("{id} is not the id of a task")),
    }
}

/// Runs a statement that reads what there is of a task, or deletes it.
pub fn read(session: &Session, statement: &LeafStatement, id: pgrx::Uuid, params: &[Param]) -> Rows {
    match Leaf::of(id.as_bytes()).filter(|leaf| hold(session, *leaf)) {
        Some(leaf) => session.run_own(&statement.plan(leaf), params),
        None => Rows::none(),
    }
}

/// As [`read`], with what is committed now, also under REPEATABLE READ.
pub fn read_latest(session: &Session, statement: &LeafStatement, id: pgrx::Uuid, params: &[Param]) -> Rows {
    match Leaf::of(id.as_bytes()).filter(|leaf| hold(session, *leaf)) {
        Some(leaf) => session.run_own_latest(&statement.plan(leaf), params),
        None => Rows::none(),
    }
}

/// Runs a statement that writes to the history of a task; its partition is made where there is none.
pub fn write(session: &Session, statement: &LeafStatement, id: pgrx::Uuid, params: &[Param]) -> Rows {
    let leaf = leaf_to_write(id);
    hold_or_make(session, leaf);
    session.run_own(&statement.plan(leaf), params)
}

/// As [`write`], with what is committed now.
pub fn write_latest(session: &Session, statement: &LeafStatement, id: pgrx::Uuid, params: &[Param]) -> Rows {
    let leaf = leaf_to_write(id);
    hold_or_make(session, leaf);
    session.run_own_latest(&statement.plan(leaf), params)
}

/// The ids by the leaf they belong to, each leaf's in the order given. Ids that no task has are left out.
pub fn by_leaf(ids: &[pgrx::Uuid]) -> Vec<(Leaf, Vec<pgrx::Uuid>)> {
    let mut leaves: Vec<(Leaf, Vec<pgrx::Uuid>)> = Vec::new();
    for id in ids {
        let Some(leaf) = Leaf::of(id.as_bytes()) else { continue };
        match leaves.iter_mut().find(|(of, _)| *of == leaf) {
            Some((_, of_leaf)) => of_leaf.push(*id),
            None => leaves.push((leaf, vec![*id])),
        }
    }
    leaves
}

/// Runs a statement on a queue's name and an array of ids once for each leaf that there is of them.
pub fn read_many(session: &Session, statement: &LeafStatement, queue: &str, ids: &[pgrx::Uuid]) -> Vec<Rows> {
    let of_leaf = |(leaf, ids): (Leaf, Vec<pgrx::Uuid>)| hold(session, leaf).then(|| session.run_own(&statement.plan(leaf), &[arg(queue), arg(ids)]));
    by_leaf(ids).into_iter().filter_map(of_leaf).collect()
}

/// As [`read_many`], with what is committed now.
pub fn read_many_latest(session: &Session, statement: &LeafStatement, queue: &str, ids: &[pgrx::Uuid]) -> Vec<Rows> {
    let of_leaf =
        |(leaf, ids): (Leaf, Vec<pgrx::Uuid>)| hold(session, leaf).then(|| session.run_own_latest(&statement.plan(leaf), &[arg(queue), arg(ids)]));
    by_leaf(ids).into_iter().filter_map(of_leaf).collect()
}

/// Milliseconds since 1970, as ids count.
fn ms(now: Instant) -> i64 {
    const FROM_1970_TO_2000_MS: i64 = 946_684_800_000;
    now.0.div_euclid(1000) + FROM_1970_TO_2000_MS
}

/// The name of the partition that an id belongs to, where it is over and not there any more: what it held may have been removed.
pub fn removed(session: &Session, id: pgrx::Uuid) -> Option<String> {
    let version_7 = id.as_bytes()[6] >> 4 == 7;
    let leaf = Leaf::of(id.as_bytes()).filter(|leaf| version_7 && leaf.class != FOR_EVER && leaf.ends_ms() <= ms(Instant::now()))?;
    (!hold(session, leaf)).then(|| format!("stint.{}_{}", PARTS[0], leaf.suffix()))
}

/// See the SQL COMMENT of stint.history_partition.
#[pg_extern(sql = false)]
fn history_partition(id: Option<pgrx::Uuid>) -> Option<String> {
    Leaf::of_task(crate::input::given("id", id).as_bytes()).map(|leaf| format!("{}_{}", PARTS[0], leaf.suffix()))
}

static CLASS: Statement = Statement::new(c"select from stint.history_classes h where h.class = $1", &[pg_sys::INT4OID]);

/// See the SQL COMMENT of stint.create_history_partition.
#[pg_extern(sql = false)]
fn create_history_partition(id: Option<pgrx::Uuid>) -> String {
    crate::shmem::required();
    let id = crate::input::given("id", id);
    let not_one = || -> ! {
        errors::invalid(
            format!("{id} is not the id of a task"),
            "A task's id is a version 7 UUID of its time, whose last byte is its retention class: stint.history_classes lists them.",
        )
    };
    let Some(leaf) = Leaf::of_task(id.as_bytes()).filter(|leaf| leaf.starts_ms <= ms(Instant::now())) else { not_one() };
    let _owner = crate::spi::Identity::owner();
    crate::spi::connect(|session| {
        if session.run(&CLASS, &[arg(i32::from(leaf.class))]).is_empty() {
            not_one()
        }
        hold_or_make(session, leaf);
    });
    format!("{}_{}", PARTS[0], leaf.suffix())
}
