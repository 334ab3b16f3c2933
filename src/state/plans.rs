//! Compiled merges, kept per backend and table. An entry becomes stale when PostgreSQL tells that the table changed (ALTER TABLE, a new declaration, ANALYZE)
//! or that a schema was renamed; it is then compiled again at the next merge.

use super::config::Config;
use super::declare::{check_again, describe, not_declared};
use super::{deferred, feed};
use crate::relation::{self, Relation};
use crate::spi::{Prepared, Session, Statement, arg};
use pgrx::prelude::*;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::state::batch;
use stint_core::state::compile::{self, Kind, Merge};
use stint_core::state::declare::Deletes;

static TOMBSTONES: Statement = Statement::new(c"SELECT c.tombstones::oid FROM stint.state_config c WHERE c.relation = $1", &[pg_sys::OIDOID]);

/// A statement that is prepared when it is first run.
pub struct Lazy {
    sql: String,
    types: &'static [pg_sys::Oid],
    plan: OnceCell<Prepared>,
}

impl Lazy {
    /// A merge statement: it takes the batch alone.
    fn new(sql: String) -> Self {
        Lazy { sql, types: &[pg_sys::JSONBOID], plan: OnceCell::new() }
    }

    /// A statement that takes the batch and the kind of each row.
    fn with_kinds(sql: String) -> Self {
        Lazy { sql, types: &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID], plan: OnceCell::new() }
    }

    /// The kept plan.
    pub fn plan(&self) -> &Prepared {
        self.plan.get_or_init(|| Prepared::new(&self.sql, self.types))
    }
}

/// What one kind of merge runs, prepared.
pub enum Steps {
    /// The declaration refuses it.
    Refused,
    /// The declaration ignores it.
    Ignored,
    /// Rows are written.
    Upsert { single: Lazy, late: Option<Lazy>, unique: Lazy, folded: Option<Lazy>, after: Option<Box<After>> },
    /// Rows are removed.
    Remove { owe: Option<Lazy>, apply: Lazy, folds: bool },
}

/// What follows an upsert that inserted rows.
pub struct After {
    /// Whether there is anything to do.
    pub hit: Lazy,
    /// The tombstones as text.
    pub tombstones: Lazy,
    /// Deletes rows older than their tombstone.
    pub remove: Option<Lazy>,
    /// Sets back groups older than the tombstone's.
    pub adjust: Option<Lazy>,
    /// Drops the tombstones of living keys.
    pub forget: Lazy,
}

impl Steps {
    fn new(merge: Merge) -> Self {
        match merge {
            Merge::Refused => Steps::Refused,
            Merge::Ignored => Steps::Ignored,
            Merge::Upsert { single, unique, folded, after } => Steps::Upsert {
                single: Lazy::new(single.write),
                late: single.late.map(Lazy::new),
                unique: Lazy::new(unique),
                folded: folded.map(Lazy::new),
                after: after.map(|after| {
                    Box::new(After {
                        hit: Lazy::new(after.hit),
                        tombstones: Lazy::new(after.tombstones),
                        remove: after.remove.map(Lazy::new),
                        adjust: after.adjust.map(Lazy::new),
                        forget: Lazy::new(after.forget),
                    })
                }),
            },
            Merge::Remove(removal) => Steps::Remove { owe: removal.owe.map(Lazy::new), apply: Lazy::new(removal.apply), folds: removal.folds },
        }
    }
}

/// A state table with its compiled merges.
pub struct Plans {
    /// The table.
    pub relation: Relation,
    /// Names a row may use.
    pub fields: Vec<String>,
    /// Names a row must use.
    pub keys: Vec<String>,
    /// Both, as the check of a batch wants them.
    pub names: batch::Names,
    /// What deletes do.
    pub deletes: Deletes,
    /// Whether a retraction may make a row.
    pub owes: bool,
    /// Whether rows merge column by column, so that a retraction takes back fields.
    pub fieldwise: bool,
    /// The field of the rows that carries their kind.
    pub rowkind: Option<String>,
    /// The table that remembers deleted keys.
    pub tombstones: Option<pg_sys::Oid>,
    /// Counts the distinct keys.
    pub count_keys: Lazy,
    /// Counts the keys that have no row and those that have one.
    pub count_absent_and_present: Lazy,
    /// Cuts a batch of several kinds into rounds.
    pub runs: Lazy,
    /// Cuts a batch into rounds in which no key comes twice.
    pub occurrences: Lazy,
    /// Locks the rows of a batch in key order.
    pub lock_rows: Lazy,
    /// Locks the table against writers.
    pub lock_table: String,
    /// The projections that feed the table; with any, nothing else does.
    pub projections: Vec<String>,
    /// Whether it has deferrable constraints.
    pub defers: bool,
    upsert: Steps,
    delete: Steps,
    retract: Steps,
    stale: Cell<bool>,
}

impl Plans {
    /// What the kind runs.
    pub fn steps(&self, kind: Kind) -> &Steps {
        match kind {
            Kind::Upsert => &self.upsert,
            Kind::Delete => &self.delete,
            Kind::Retract => &self.retract,
        }
    }

    /// Whether the table or its declaration has changed since.
    pub fn stale(&self) -> bool {
        self.stale.get()
    }

    fn compile(session: &Session, oid: pg_sys::Oid) -> Self {
        let relation = Relation::load(session, oid);
        let Some((config, tombstones)) = Config::read(session, oid) else { not_declared(&relation) };
        let mut table = describe(session, &relation, tombstones);
        // Checked again, because columns may have gone since.
        let declaration = check_again(&relation, &mut table, &config);
        let names = |indexes: &mut dyn Iterator<Item = usize>| indexes.map(|index| table.columns[index].name.clone()).collect::<Vec<_>>();
        let steps = |kind| Steps::new(compile::compile(&table, &declaration, kind));
        let written = names(&mut (0..table.columns.len()).filter(|index| table.columns[*index].written));
        let fields: Vec<String> = written.into_iter().chain(config.rowkind.clone().filter(|name| table.find(name).is_none())).collect();
        let keys = names(&mut table.key.iter().copied());
        Plans {
            names: batch::Names::new(&fields, &keys),
            fields,
            keys,
            deletes: declaration.deletes,
            owes: declaration.owes(),
            fieldwise: declaration.fields.iter().any(|field| field.function.is_some()),
            rowkind: config.rowkind,
            tombstones: session.run(&TOMBSTONES, &[arg(oid)]).get(0, 1),
            count_keys: Lazy::new(compile::count_keys(&table)),
            count_absent_and_present: Lazy::new(compile::count_absent_and_present(&table)),
            occurrences: Lazy::new(compile::occurrences(&table)),
            runs: Lazy::with_kinds(compile::runs(&table)),
            lock_rows: Lazy::new(compile::lock_rows(&table)),
            lock_table: compile::lock_table(&table),
            upsert: steps(Kind::Upsert),
            delete: steps(Kind::Delete),
            retract: steps(Kind::Retract),
            projections: feed::names_of(session, oid),
            defers: deferred::any(session, oid),
            stale: Cell::new(false),
            relation,
        }
    }
}

thread_local! {
    static KEPT: RefCell<HashMap<pg_sys::Oid, Rc<Plans>>> = RefCell::new(HashMap::new());
    static LISTENING: Cell<bool> = const { Cell::new(false) };
}

/// The table's plans as far as they are compiled and not stale.
pub fn kept(oid: pg_sys::Oid) -> Option<Rc<Plans>> {
    KEPT.with(|kept| kept.borrow().get(&oid).cloned()).filter(|plans| !plans.stale())
}

/// The table's plans, compiled if there are none or they are stale.
pub fn of(session: &Session, oid: pg_sys::Oid) -> Rc<Plans> {
    listen();
    if let Some(plans) = kept(oid) {
        return plans;
    }
    KEPT.with(|kept| kept.borrow_mut().remove(&oid));
    let plans = Rc::new(Plans::compile(session, oid));
    KEPT.with(|kept| kept.borrow_mut().insert(oid, plans.clone()));
    plans
}

/// Registers the callbacks once per backend.
fn listen() {
    if LISTENING.get() {
        return;
    }
    relation::on_change(Some(relation_changed), Some(schema_changed));
    LISTENING.set(true);
}

/// Marks entries; called while PostgreSQL processes invalidations, so it frees nothing.
fn mark(oid: Option<pg_sys::Oid>) {
    KEPT.with(|kept| {
        if let Ok(kept) = kept.try_borrow() {
            kept.iter().filter(|(of, _)| oid.is_none_or(|oid| oid == **of)).for_each(|(_, plans)| plans.stale.set(true));
        }
    });
}

#[pg_guard]
unsafe extern "C-unwind" fn relation_changed(_arg: pg_sys::Datum, oid: pg_sys::Oid) {
    mark((oid != pg_sys::InvalidOid).then_some(oid));
}

#[pg_guard]
unsafe extern "C-unwind" fn schema_changed(_arg: pg_sys::Datum, _cache: i32, _hash: u32) {
    mark(None);
}
