//! What becomes of a leaf whose tasks are past their retention: dropped, or detached and moved to the schema `stint_archive`, as a whole. Tasks that are still live, or
//! finished less than the retention ago, are copied forward first, where they are few; where they are many the leaf waits until they are fewer.
//!
//! First everything is looked up and prepared with no lock that anybody would wait for. Then SHARE on the leaf keeps those who end or retry one of its tasks out while it is
//! looked up again, and ACCESS EXCLUSIVE on its tables and their parents is held for the exchange alone. Each lock is waited for only as long as the settings allow.

use super::compact::{self, TooRecent};
use super::make;
use super::{on_leaf, relation};
use crate::errors::Fault;
use crate::guc;
use crate::settings::Settings;
use crate::spi::{self, Prepared, Session, arg};
use crate::values::Instant;
use pgrx::prelude::*;
use std::collections::HashSet;
use stint_core::history::{Leaf, PARTS};

/// Where detached partitions go.
const ARCHIVE: &str = "stint_archive";

/// What was done with a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// It is gone.
    Dropped,
    /// It is in the archive.
    Detached,
    /// What it must keep is in a new one; the rest is gone, or in the archive.
    Compacted,
    /// Some of what hangs on its tasks elsewhere was deleted, and there may be more.
    Trimmed,
    /// It still holds too much that must be kept.
    HeldUp,
}

/// A leaf is compacted once no more than one of so many of its tasks must be kept: copying pays then, and is not done over and over.
const WORTH_COPYING: i64 = 4;

/// The rows of tasks that must be kept: no outcome, a recent one, or one that others have still to be told of.
const KEPT: &str = "o.id is null or o.finished_at >= $1 or exists (select from stint.follow_ups u where u.queue = f.queue and u.id = f.id)";

fn counts(session: &Session, leaf: Leaf, cutoff: Instant) -> (i64, i64) {
    let text =
        on_leaf("select count(*), count(*) filter (where {kept}) from {facts} f left join {outcomes} o on o.queue = f.queue and o.id = f.id", leaf);
    let statement = Prepared::new(&text.replace("{kept}", KEPT), &[pg_sys::TIMESTAMPTZOID]);
    let row = session.run_prepared_latest(&statement, &[arg(cutoff)]);
    (row.must(0, 1), row.must(0, 2))
}

fn kept(session: &Session, leaf: Leaf, cutoff: Instant) -> HashSet<[u8; 16]> {
    let text = on_leaf("select f.id from {facts} f left join {outcomes} o on o.queue = f.queue and o.id = f.id where {kept}", leaf);
    let statement = Prepared::new(&text.replace("{kept}", KEPT), &[pg_sys::TIMESTAMPTZOID]);
    let rows = session.run_prepared_latest(&statement, &[arg(cutoff)]);
    (0..rows.len()).map(|at| *rows.must::<pgrx::Uuid>(at, 1).as_bytes()).collect()
}

/// Deletes what hangs on expired tasks of a leaf in tables that are not partitioned, at most `max` rows of each. Returns how many.
fn trim(session: &Session, leaf: Leaf, cutoff: Instant, max: i64) -> usize {
    let (least, next) = leaf.bounds();
    let delete = |table: &str| {
        let text = format!(
            "delete from stint.{table} c
             where c.ctid = any (array(
                   select x.ctid
                   from stint.queue_config q
                   cross join lateral (
                         select t.ctid, t.queue, t.id
                         from stint.{table} t
                         where t.queue = q.queue and t.id >= '{least}' and t.id < '{next}' and get_byte(uuid_send(t.id), 15) = {}) as x
                   join {{outcomes}} o on o.queue = x.queue and o.id = x.id and o.finished_at < $1
                   limit $2))",
            leaf.class
        );
        let statement = Prepared::new(&on_leaf(&text, leaf), &[pg_sys::TIMESTAMPTZOID, pg_sys::INT8OID]);
        session.run_own_latest(&statement, &[arg(cutoff), arg(max)]).len()
    };
    ["usage_late", "task_retries", "task_checkpoints"].into_iter().map(delete).sum()
}

/// Whether all that accounting reads of a leaf, and of what hangs on its tasks elsewhere, is in its sums: what is removed before that would be missing there.
fn added_up(session: &Session, leaf: Leaf) -> bool {
    const NOT: &str = "not exists (select from stint.last_rollups e
                                   where e.incarnation = t.incarnation and (e.snapshot is null or pg_visible_in_snapshot(t.xact, e.snapshot)))";
    let (least, next) = leaf.bounds();
    let elsewhere = |table: &str| {
        format!(
            "exists (select
                     from stint.queue_config q
                     cross join lateral (
                           select x.incarnation, x.xact
                           from stint.{table} x
                           where x.queue = q.queue and x.id >= '{least}' and x.id < '{next}' and get_byte(uuid_send(x.id), 15) = {}) as t
                     where {NOT})",
            leaf.class
        )
    };
    let text = format!(
        "select not (exists (select from {{attempts}} t where {NOT}) or exists (select from {{outcomes}} t where t.xact is not null and {NOT}) or {} or {})",
        elsewhere("usage_late"),
        elsewhere("task_retries")
    );
    session.run_prepared_latest(&Prepared::new(&on_leaf(&text, leaf), &[]), &[]).must(0, 1)
}

fn tables(leaf: Leaf) -> [String; 3] {
    PARTS.map(|part| format!("{part}_{}", leaf.suffix()))
}

fn lock(session: &Session, names: &[String], mode: &str) {
    let names: Vec<String> = names.iter().map(|name| format!("stint.{name}")).collect();
    session.execute_once(&format!("lock table only {} in {mode} mode", names.join(", only ")));
}

/// Takes a detached table out of the way. Where the archive has one of its name, from before it was compacted, it gets the next number, and its indexes with it.
fn archive(session: &Session, table: &str) {
    session.execute_once(&format!("create schema if not exists {ARCHIVE}"));
    let taken = Prepared::new("select to_regclass($1) is not null", &[pg_sys::TEXTOID]);
    // Nothing in the archive depends on the extension.
    let defaults = Prepared::new(
        "select quote_ident(a.attname) from pg_catalog.pg_attribute a where a.attrelid = $1::regclass and a.atthasdef and not a.attisdropped",
        &[pg_sys::TEXTOID],
    );
    let defaults = session.run_own(&defaults, &[arg(format!("stint.{table}"))]);
    for at in 0..defaults.len() {
        session.execute_once(&format!("alter table stint.{table} alter column {} drop default", defaults.must::<String>(at, 1)));
    }
    let free = |ending: &String| !session.run_own(&taken, &[arg(format!("{ARCHIVE}.{table}{ending}"))]).must::<bool>(0, 1);
    let ending = (1..).map(|n| if n == 1 { String::new() } else { format!("_{n}") }).find(free).unwrap_or_default();
    if !ending.is_empty() {
        let indexes =
            Prepared::new("select i.indexrelid::regclass::text from pg_catalog.pg_index i where i.indrelid = $1::regclass", &[pg_sys::TEXTOID]);
        let indexes = session.run_own(&indexes, &[arg(format!("stint.{table}"))]);
        for at in 0..indexes.len() {
            let index: String = indexes.must(at, 1);
            let name = index.rsplit('.').next().unwrap_or(&index);
            session.execute_once(&format!("alter index {index} rename to {name}{ending}"));
        }
        session.execute_once(&format!("alter table stint.{table} rename to {table}{ending}"));
    }
    session.execute_once(&format!("alter table stint.{table}{ending} set schema {ARCHIVE}"));
}

/// Does what is to be done with a leaf all of whose tasks were enqueued longer than their retention ago. Call it in a savepoint: it may end in an error, and must then have done nothing. 55P03: a
/// lock was not to be had, or accounting has not added up everything yet. 55006: a snapshot is open that does not see all of it.
pub fn expire(leaf: Leaf, cutoff: Instant, detach: bool) -> Done {
    let (all, keep) = spi::connect(|session| counts(session, leaf, cutoff));
    if !worth_copying(all, keep) {
        return Done::HeldUp;
    }
    if !spi::connect(|session| added_up(session, leaf)) {
        not_added_up();
    }
    if spi::connect(|session| trim(session, leaf, cutoff, i64::from(guc::max_batch()))) > 0 {
        return Done::Trimmed;
    }
    spi::connect(|session| {
        let tables = tables(leaf);
        lock(session, &tables, "share");
        let keep = kept(session, leaf, cutoff);
        if !worth_copying(all, keep.len() as i64) {
            return Done::HeldUp;
        }
        let parents = PARTS.map(|part| format!("{part}_c{}", leaf.class));
        lock(session, &[parents, tables.clone()].concat(), "access exclusive");
        if !added_up(session, leaf) {
            not_added_up();
        }
        trim(session, leaf, cutoff, i64::MAX);
        if keep.is_empty() {
            if !detach {
                session.execute_once(&format!("drop table {}", tables.map(|table| format!("stint.{table}")).join(", ")));
                return Done::Dropped;
            }
            for part in PARTS {
                take_out(session, part, leaf);
            }
            return Done::Detached;
        }
        if let Err(TooRecent) = exchange(session, leaf, &keep, detach) {
            Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, "a snapshot is open that does not see all of the partition").raise()
        }
        Done::Compacted
    })
}

/// The next roll-up is seconds away: as with a lock that is not to be had, it is tried again soon.
fn not_added_up() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, "accounting has not added up all of the partition").raise()
}

fn worth_copying(all: i64, keep: i64) -> bool {
    keep.saturating_mul(WORTH_COPYING) <= all
}

/// Detaches a table of a leaf and moves it to the archive.
fn take_out(session: &Session, part: &str, leaf: Leaf) {
    let table = format!("{part}_{}", leaf.suffix());
    session.execute_once(&format!("alter table stint.{part}_c{} detach partition stint.{table}", leaf.class));
    archive(session, &table);
}

/// Puts tables with nothing but the tasks of `keep` in the place of those of the leaf.
fn exchange(session: &Session, leaf: Leaf, keep: &HashSet<[u8; 16]>, detach: bool) -> Result<(), TooRecent> {
    session.pin();
    let _settings = Settings::set(&[(c"default_tablespace", c"")]);
    let ids: Vec<pgrx::Uuid> = keep.iter().map(|id| pgrx::Uuid::from_bytes(*id)).collect();
    for table in tables(leaf) {
        let new = format!("{table}_kept");
        session.execute_once(&format!("create table stint.{new} (like stint.{table} including all excluding indexes) using heap"));
        if let (Some(from), Some(to)) = (relation(&table), relation(&new)) {
            compact::copy(from, to, keep)?;
        }
    }
    for part in PARTS {
        let table = format!("{part}_{}", leaf.suffix());
        if detach {
            // What is kept is archived once it has expired.
            let statement = Prepared::new(&format!("delete from stint.{table} t where t.id = any ($1)"), &[pg_sys::UUIDARRAYOID]);
            session.run_prepared(&statement, &[arg(ids.clone())]);
            take_out(session, part, leaf);
        } else {
            session.execute_once(&format!("drop table stint.{table}"));
        }
        session.execute_once(&format!("alter table stint.{table}_kept rename to {table}"));
        make::index(session, part, &table);
        session.execute_once(&format!("alter table stint.{part}_c{} attach partition stint.{table} for values {}", leaf.class, make::range(leaf)));
    }
    Ok(())
}
