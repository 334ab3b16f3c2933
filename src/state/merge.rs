//! `merge`: rows meet a state table as its declaration says. The values are read, compared and written by PostgreSQL; nothing here opens them.

use super::locks::{self, Keys};
use super::plans::{self, After, Lazy, Plans, Steps};
use super::{deferred, feed, rights, rounds};
use crate::errors::{self, Fault};
use crate::guc;
use crate::spi::{self, Identity, Session, arg};
use crate::values::RawJsonb;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use pgrx::varlena;
use std::panic::AssertUnwindSafe;
use stint_core::names::nearest;
use stint_core::state::batch::{self, Misfit};
use stint_core::state::compile::{KINDS, Kind};
use stint_core::state::declare::Deletes;

/// What a merge did, in keys; `late` in rows. A batch of several kinds counts a key once for each run of rows of one kind.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    /// Keys that got a row.
    pub inserted: i64,
    /// Keys whose row changed.
    pub updated: i64,
    /// Keys that lost their row.
    pub deleted: i64,
    /// Keys whose row would read the same.
    pub unchanged: i64,
    /// Rows that changed nothing because newer ones were there.
    pub late: i64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.inserted += other.inserted;
        self.updated += other.updated;
        self.deleted += other.deleted;
        self.unchanged += other.unchanged;
        self.late += other.late;
    }
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn merge(
    relation: Option<pg_sys::Oid>,
    rows: Option<RawJsonb>,
    kind: Option<&str>,
) -> TableIterator<'static, (name!(inserted, i64), name!(updated, i64), name!(deleted, i64), name!(unchanged, i64), name!(late, i64))> {
    let Some(oid) = relation else { errors::missing("relation", "Name the state table, as in stint.merge('shop.goods', …).") };
    let Some(rows) = rows else { errors::missing("rows", "Give a JSON array of objects, one per row.") };
    let kind = kind_named(kind);
    crate::shmem::required();
    let identity = Identity::owner();
    let counts = spi::connect(|session| {
        let rows = detoasted(rows);
        loop {
            let plans = plans::of(session, oid);
            feed::refuse_projected(
                &plans.relation,
                &plans.projections,
                "merge into",
                "Record events instead, or run stint.drop_projection(…) first.",
            );
            let (kinds, length) = match &plans.rowkind {
                None => {
                    check_rights(&plans, identity.caller(), kind);
                    (vec![kind], check_shape(&plans, rows))
                }
                Some(rowkind) => {
                    let length = check_shape(&plans, rows);
                    let kinds = rounds::kinds_of_rows(session, &plans.relation, rows, rowkind, kind);
                    KINDS.into_iter().filter(|known| kinds.contains(known)).for_each(|kind| check_rights(&plans, identity.caller(), kind));
                    (kinds, length)
                }
            };
            if let Some(counts) = write(session, &plans, rows, &kinds, length, Keys::Shared) {
                return counts;
            }
        }
    });
    TableIterator::once((counts.inserted, counts.updated, counts.deleted, counts.unchanged, counts.late))
}

/// Merges rows of any kinds, `kinds` naming that of each row, and does what they would do one by one, in order. It asks for no right of the caller's: who calls
/// it has done so.
pub fn fold(session: &Session, relation: pg_sys::Oid, rows: RawJsonb, kinds: &[Kind]) -> Counts {
    let plans = plans::of(session, relation);
    let rows = detoasted(rows);
    let length = check_shape(&plans, rows);
    if usize::try_from(length) != Ok(kinds.len()) {
        errors::internal(&format!("{} kinds were given for {length} rows", kinds.len()));
    }
    write(session, &plans, rows, kinds, length, Keys::Ordered).unwrap_or_default()
}

/// Writes the rows, of which `kinds` names the kind of each or the one of all. None, with nothing written, where the declaration changed before the table was
/// locked: whoever gives it another feed waits from there on.
fn write(session: &Session, plans: &Plans, rows: RawJsonb, kinds: &[Kind], length: i32, keys: Keys) -> Option<Counts> {
    as_owner(session, plans, || {
        let rounds = rounds::cut(session, plans, rows, kinds, length);
        locks::take(session, plans, rows, &rounds, keys);
        (keys == Keys::Ordered || !plans.stale()).then(|| rounds::go(session, plans, &rounds))
    })
}

/// The table carries its owner's triggers, domains and indexes: what writes it runs as that role, with that role's rights.
fn as_owner<R>(session: &Session, plans: &Plans, work: impl FnOnce() -> R) -> R {
    if plans.defers {
        return deferred::checked_at_once(session, &plans.relation, || explained(plans, work));
    }
    let _restricted = Identity::restricted(plans.relation.owner);
    explained(plans, work)
}

/// The kind of that name.
pub fn kind_named(word: Option<&str>) -> Kind {
    let Some(word) = word else { errors::missing("kind", "Give 'upsert', 'delete' or 'retract', or leave it out.") };
    match KINDS.iter().find(|known| known.word() == word) {
        Some(kind) => *kind,
        None => errors::invalid(
            format!("merge kind \"{word}\" does not exist"),
            match nearest(word, KINDS.map(Kind::word).iter().copied()) {
                Some(near) => format!("Did you mean \"{near}\"?"),
                None => "The kinds are upsert, delete and retract.".to_string(),
            },
        ),
    }
}

fn check_rights(plans: &Plans, caller: pg_sys::Oid, kind: Kind) {
    const INSERT: (u32, &str) = (pg_sys::ACL_INSERT, "INSERT");
    const UPDATE: (u32, &str) = (pg_sys::ACL_UPDATE, "UPDATE");
    const DELETE: (u32, &str) = (pg_sys::ACL_DELETE, "DELETE");
    let rights: &[(u32, &str)] = match kind {
        Kind::Upsert => &[INSERT, UPDATE],
        Kind::Delete if plans.owes => &[INSERT, UPDATE, DELETE],
        Kind::Retract if plans.owes => &[INSERT, UPDATE],
        Kind::Delete if plans.deletes == Deletes::Retract => &[UPDATE, DELETE],
        Kind::Retract if plans.deletes == Deletes::Retract => &[UPDATE],
        Kind::Retract if plans.fieldwise => &[UPDATE, DELETE],
        Kind::Delete | Kind::Retract => &[DELETE],
    };
    rights::require(&plans.relation, caller, rights);
}

/// Refuses a batch that is not an array of objects that name columns and a whole key; returns its length.
fn check_shape(plans: &Plans, rows: RawJsonb) -> i32 {
    let max = guc::max_batch();
    let table = &plans.relation.qualified;
    // SAFETY: a detoasted jsonb, alive through the call.
    let bytes = unsafe {
        let value = rows.0.cast_mut_ptr::<pg_sys::varlena>();
        std::slice::from_raw_parts(varlena::vardata_any(value).cast::<u8>(), varlena::varsize_any_exhdr(value))
    };
    match batch::check(bytes, &plans.names, usize::try_from(max).unwrap_or(0)) {
        Ok(length) => i32::try_from(length).unwrap_or(max),
        Err(Misfit::NotAnArray(kind)) => {
            errors::invalid(format!("rows for {table} is a JSON {kind}, not an array"), "Give an array of objects, one per row, as in [{\"id\": 1}].")
        }
        Err(Misfit::TooLong(length)) => {
            errors::over_limit(format!("rows for {table} has {length} elements; at most {max} fit in one merge"), "stint.max_batch")
        }
        Err(Misfit::NoSuchField(row, field)) => no_such_field(plans, row, &field),
        Err(Misfit::NoKey(row, key)) => Fault::new(
            PgSqlErrorCode::ERRCODE_NOT_NULL_VIOLATION,
            format!("row {row} for {table} has no value for key column \"{}\"", plans.keys[key]),
        )
        .hint(format!("Every row names the whole primary key: {}.", plans.keys.join(", ")))
        .raise(),
        Err(Misfit::NotAnObject(row, kind)) => {
            errors::invalid(format!("row {row} for {table} is a JSON {kind}, not an object"), "Each row is an object whose fields are column names.")
        }
        Err(Misfit::Damaged) => errors::internal("a jsonb value is not what jsonb.h describes"),
    }
}

/// The batch in memory, uncompressed, so that the statements that take it need not do that each.
fn detoasted(rows: RawJsonb) -> RawJsonb {
    // SAFETY: a jsonb datum; the copy, where one is made, lives as long as the call.
    RawJsonb(unsafe { pg_sys::pg_detoast_datum(rows.0.cast_mut_ptr()) }.into())
}

fn no_such_field(plans: &Plans, ord: usize, field: &str) -> ! {
    let table = &plans.relation.qualified;
    if plans.relation.columns.iter().any(|column| column.name == field) {
        Fault::new(PgSqlErrorCode::ERRCODE_GENERATED_ALWAYS, format!("row {ord} names column \"{field}\" of {table}, which PostgreSQL fills itself"))
            .hint("Leave generated and identity columns out of the rows.")
            .raise();
    }
    let hint = match nearest(field, plans.fields.iter().map(String::as_str)) {
        Some(near) => format!("Did you mean \"{near}\"?"),
        None => format!("Its columns are {}.", plans.fields.join(", ")),
    };
    Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN, format!("column \"{field}\" of {table}, named in row {ord}, does not exist"))
        .hint(hint)
        .raise()
}

/// Adds the table and what to do to what PostgreSQL says of a value it cannot read or store.
fn explained<R>(plans: &Plans, work: impl FnOnce() -> R) -> R {
    let hint: fn(PgSqlErrorCode) -> Option<&'static str> = |code| match code {
        PgSqlErrorCode::ERRCODE_NOT_NULL_VIOLATION => Some("Every row needs a value for each NOT NULL column, also where only other columns change."),
        code if unreadable(code) => Some("Give each field a value that its column's type reads."),
        _ => None,
    };
    explaining(&format!("The rows are for {}.", plans.relation.qualified), hint, work)
}

/// Whether PostgreSQL could not read or compute a value (class 22).
pub fn unreadable(code: PgSqlErrorCode) -> bool {
    let category = |code: PgSqlErrorCode| code as isize & 0xfff;
    category(code) == category(PgSqlErrorCode::ERRCODE_DATA_EXCEPTION)
}

/// Runs `work`; an error of PostgreSQL's that says nothing of what to do, and for which `hint` knows it, gets the hint and the detail.
pub fn explaining<R>(detail: &str, hint: fn(PgSqlErrorCode) -> Option<&'static str>, work: impl FnOnce() -> R) -> R {
    PgTryBuilder::new(AssertUnwindSafe(work))
        .catch_others(|error| match error {
            CaughtError::PostgresError(ref report) | CaughtError::ErrorReport(ref report) if report.hint().is_none() => {
                let code = report.sql_error_code();
                let Some(hint) = hint(code) else { error.rethrow() };
                let detail = report.detail().map_or_else(|| detail.to_string(), |said| format!("{said} {detail}"));
                Fault::new(code, report.message().to_string()).detail(detail).hint(hint).raise()
            }
            other => other.rethrow(),
        })
        .execute()
}

/// The number of distinct keys of a batch.
pub fn count_keys(session: &Session, plans: &Plans, batch: &[spi::Param], length: i32) -> i64 {
    if length == 1 { 1 } else { session.run_prepared(plans.count_keys.plan(), batch).must(0, 1) }
}

/// Merges one round of rows, for which the locks have been taken.
pub fn apply(session: &Session, plans: &Plans, kind: Kind, rows: RawJsonb, length: i32) -> Counts {
    let batch = [arg(rows)];
    let steps = plans.steps(kind);
    if let Steps::Refused = steps {
        Fault::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("state table {} does not accept deletes", plans.relation.qualified),
        )
        .hint("Declare it with another deletes policy: 'ignore', or where the engine has them 'remove' or 'retract'.")
        .raise();
    }
    match steps {
        _ if length == 0 => Counts::default(),
        Steps::Refused => Counts::default(),
        Steps::Ignored => Counts { unchanged: count_keys(session, plans, &batch, length), ..Counts::default() },
        Steps::Upsert { single, late, unique, folded, after } => {
            let written = if length == 1 { Some(upsert_single(session, single, late.as_ref(), &batch)) } else { counted(session, unique, &batch) };
            let mut counts = match (written, folded) {
                (Some(counts), _) => counts,
                (None, Some(folded)) => counted(session, folded, &batch).unwrap_or_default(),
                (None, None) => return rounds::go(session, plans, &rounds::occurrences(session, plans, kind, rows)),
            };
            if let Some(after) = after
                && counts.inserted > 0
            {
                settle_with_tombstones(session, plans, after, &batch, &mut counts);
            }
            counts
        }
        Steps::Remove { owe, apply, .. } => {
            if let Some(owe) = owe {
                session.run_prepared(owe.plan(), &batch);
                // Those that somebody else has inserted meanwhile are not ours yet.
                locks::lock_rows(session, plans, &batch);
            }
            counted(session, apply, &batch).unwrap_or_default()
        }
    }
}

/// One row. Where it writes nothing it has locked the row that is there, so a second look sees what it met.
fn upsert_single(session: &Session, single: &Lazy, late: Option<&Lazy>, batch: &[spi::Param]) -> Counts {
    let written = session.run_prepared(single.plan(), batch);
    if !written.is_empty() {
        let fresh = i64::from(written.must::<bool>(0, 1));
        return Counts { inserted: fresh, updated: 1 - fresh, ..Counts::default() };
    }
    let late = i64::from(late.is_some_and(|late| session.run_prepared(late.plan(), batch).must(0, 1)));
    Counts { unchanged: 1 - late, late, ..Counts::default() }
}

/// What a statement counted; none if it found that it does not fit the batch.
fn counted(session: &Session, statement: &Lazy, batch: &[spi::Param]) -> Option<Counts> {
    let rows = session.run_prepared(statement.plan(), batch);
    (!rows.is_empty()).then(|| Counts {
        inserted: rows.must(0, 1),
        updated: rows.must(0, 2),
        deleted: rows.must(0, 3),
        unchanged: rows.must(0, 4),
        late: rows.must(0, 5),
    })
}

/// Compares inserted rows with the tombstones as they are now. The rows are locked by having been inserted, so this look is final; the merge's own look may
/// have been too early, when it waited for the very delete that left the tombstone.
fn settle_with_tombstones(session: &Session, plans: &Plans, after: &After, batch: &[spi::Param], counts: &mut Counts) {
    if is_without_pages(plans.tombstones) {
        return;
    }
    if locks::keeps_snapshot() {
        let ours: String = session.run_prepared(after.tombstones.plan(), batch).must(0, 1);
        let latest: String = session.run_prepared_latest(after.tombstones.plan(), batch).must(0, 1);
        if ours != latest {
            locks::serialization_failure(plans);
        }
    }
    if !session.run_prepared(after.hit.plan(), batch).must::<bool>(0, 1) {
        return;
    }
    if let Some(remove) = &after.remove {
        let removed: i64 = session.run_prepared(remove.plan(), batch).must(0, 1);
        counts.inserted -= removed;
        counts.late += removed;
    }
    if let Some(adjust) = &after.adjust {
        session.run_prepared(adjust.plan(), batch);
    }
    session.run_prepared(after.forget.plan(), batch);
}

/// Whether a table has no page on disk: then it has no row either, for whoever looks and as of whenever.
fn is_without_pages(table: Option<pg_sys::Oid>) -> bool {
    let Some(table) = table else { return false };
    // SAFETY: opened and closed here; the lock is kept until the transaction ends, as a statement's would be.
    unsafe {
        let rel = pg_sys::relation_open(table, pg_sys::AccessShareLock as i32);
        let pages = pg_sys::RelationGetNumberOfBlocksInFork(rel, pg_sys::ForkNumber::MAIN_FORKNUM);
        pg_sys::relation_close(rel, pg_sys::NoLock as i32);
        pages == 0
    }
}
