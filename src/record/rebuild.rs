//! `rebuild` and `verify`: the record folded anew, and what differs in the table written or told.

use super::config::{self, Projected};
use super::shadow::{Extent, Point, Shadow};
use super::{apply, order, position};
use crate::changelog::epoch;
use crate::errors;
use crate::input;
use crate::object_lock;
use crate::relation::Relation;
use crate::shmem;
use crate::spi::{self, Identity, Moment, Prepared, Session, Statement, arg};
use crate::state::declare::describe;
use crate::state::deferred;
use crate::state::rights;
use crate::values::RawJsonb;
use pgrx::prelude::*;

static FORGIVE: Statement = Statement::new(c"DELETE FROM stint.events_aside a WHERE a.relation = $1 AND a.state = 'poisoned'", &[pg_sys::OIDOID]);

/// What a rebuild did.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    /// Events folded.
    pub events: i64,
    /// Rows that were missing.
    pub inserted: i64,
    /// Rows that differed.
    pub updated: i64,
    /// Rows that should not have been there.
    pub deleted: i64,
    /// Events that do not fit.
    pub set_aside: i64,
}

/// The statements that compare a table with its shadow.
struct Compare<'a> {
    live: &'a str,
    shadow: &'a str,
    relation: &'a Relation,
    /// The equality of each key column, as SQL writes it.
    equal: Vec<String>,
}

impl<'a> Compare<'a> {
    fn new(session: &Session, relation: &'a Relation, shadow: &'a str) -> Self {
        let described = describe(session, relation, None);
        let equal = relation.key.iter().map(|at| described.columns[*at].equal.clone().unwrap_or_else(|| "=".to_string())).collect();
        Compare { live: &relation.qualified, shadow, relation, equal }
    }

    /// The columns that are compared: those that PostgreSQL does not fill itself.
    fn columns(&self) -> Vec<&str> {
        self.relation
            .columns
            .iter()
            .enumerate()
            .filter(|(at, column)| self.relation.key.contains(at) || (!column.generated && column.identity.is_none()))
            .map(|(_, column)| column.quoted.as_str())
            .collect()
    }

    fn keys(&self) -> Vec<&str> {
        self.relation.key_columns().map(|column| column.quoted.as_str()).collect()
    }

    fn same_key(&self) -> String {
        self.keys().iter().zip(&self.equal).map(|(key, equal)| format!("t.{key} {equal} s.{key}")).collect::<Vec<_>>().join(" AND ")
    }

    fn rows(&self, of: &str, row: &str) -> String {
        format!("(SELECT {} FROM {of} x) {row}", self.columns().iter().map(|column| format!("x.{column}")).collect::<Vec<_>>().join(", "))
    }

    /// Key, what, expected, actual of each difference, in key order. Rows are compared by their text, as they read.
    fn differences(&self) -> String {
        let key = self.keys().iter().map(|key| format!("coalesce(s.{key}, t.{key}) AS {key}")).collect::<Vec<_>>().join(", ");
        let first = self.keys()[0];
        let order = self.keys().iter().map(|key| format!("coalesce(s.{key}, t.{key})")).collect::<Vec<_>>().join(", ");
        format!(
            "SELECT (SELECT to_jsonb(k.*) FROM (SELECT {key}) k),
                    CASE WHEN t.{first} IS NULL THEN 'missing' WHEN s.{first} IS NULL THEN 'extra' ELSE 'different' END,
                    CASE WHEN s.{first} IS NOT NULL THEN to_jsonb(s.*) END, CASE WHEN t.{first} IS NOT NULL THEN to_jsonb(t.*) END
             FROM {} FULL JOIN {} ON {}
             WHERE (s.*)::text IS DISTINCT FROM (t.*)::text
             ORDER BY {order}",
            self.rows(self.shadow, "s"),
            self.rows(self.live, "t"),
            self.same_key(),
        )
    }

    /// Writes what differs; returns rows inserted, updated and deleted.
    fn write(&self) -> String {
        let columns = self.columns();
        let keys = self.keys();
        let values: Vec<&str> = columns.iter().filter(|column| !keys.contains(column)).copied().collect();
        let list = |row: &str, names: &[&str]| names.iter().map(|name| format!("{row}.{name}")).collect::<Vec<_>>().join(", ");
        let (live, shadow, same) = (self.live, self.shadow, self.same_key());
        let update = if values.is_empty() {
            "SELECT 1 WHERE false".to_string()
        } else {
            let set = values.iter().map(|column| format!("{column} = s.{column}")).collect::<Vec<_>>().join(", ");
            format!(
                "UPDATE {live} t SET {set} FROM {shadow} s WHERE {same} AND ROW({})::text IS DISTINCT FROM ROW({})::text RETURNING 1",
                list("s", &columns),
                list("t", &columns)
            )
        };
        format!(
            "WITH d AS (DELETE FROM {live} t WHERE NOT EXISTS (SELECT FROM {shadow} s WHERE {same}) RETURNING 1),
                  u AS ({update}),
                  i AS (INSERT INTO {live} ({}) SELECT {} FROM {shadow} s WHERE NOT EXISTS (SELECT FROM {live} t WHERE {same}) RETURNING 1)
             SELECT (SELECT count(*) FROM i), (SELECT count(*) FROM u), (SELECT count(*) FROM d)",
            columns.join(", "),
            list("s", &columns),
        )
    }
}

/// Folds the record anew and writes what differs. The caller has been found to own the table.
pub fn run(session: &Session, projected: &Projected, retry: bool) -> Counts {
    let relation = &projected.relation;
    let epoch = epoch::required(session);
    order::folder(relation.oid, false);
    let mut shadow = Shadow::make(session, relation);
    let mut moment = Moment::now();
    let mut point = Point::of(session, &moment, epoch);
    shadow.fold(session, projected, &moment, &Extent::default(), None, retry);
    if projected.immediate {
        // Nobody records for the table from here on: what came meanwhile is folded, and the table is what the record made of it.
        order::all(relation.oid);
        drop(moment);
        moment = Moment::now();
        let since = std::mem::replace(&mut point, Point::of(session, &moment, epoch));
        shadow.fold(session, projected, &moment, &Extent::default(), Some(&since), retry);
    } else {
        position::restart(session, relation.oid, &point);
    }
    drop(moment);
    let compare = Compare::new(session, relation, &shadow.name);
    let written = deferred::checked_at_once(session, relation, || {
        if let Some((shadow, live)) = &shadow.tombstones {
            session.execute_once(&format!("DELETE FROM {live}"));
            session.execute_once(&format!("INSERT INTO {live} SELECT * FROM {shadow}"));
        }
        session.run_prepared_latest(&Prepared::new(&compare.write(), &[]), &[])
    });
    let counts = Counts {
        events: shadow.events,
        inserted: written.must(0, 1),
        updated: written.must(0, 2),
        deleted: written.must(0, 3),
        set_aside: i64::try_from(shadow.poisoned.len()).unwrap_or(i64::MAX),
    };
    if retry {
        session.run(&FORGIVE, &[arg(relation.oid)]);
    }
    apply::set_aside(session, relation.oid, &shadow.poisoned);
    shadow.drop(session);
    counts
}

fn owned(session: &Session, oid: pg_sys::Oid, caller: pg_sys::Oid) -> std::rc::Rc<Projected> {
    let relation = Relation::load_unfit(session, oid);
    rights::require_ownership(session, &relation, caller);
    config::required(session, &relation)
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn rebuild(
    relation: Option<pg_sys::Oid>,
    retry: Option<bool>,
) -> TableIterator<'static, (name!(events, i64), name!(inserted, i64), name!(updated, i64), name!(deleted, i64), name!(set_aside, i64))> {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.rebuild('shop.goods').") };
    let retry = input::given("retry", retry);
    shmem::required();
    object_lock::refuse_written("rebuild a table", "stint.rebuild(…)");
    let identity = Identity::owner();
    let counts = spi::connect(|session| {
        let projected = owned(session, oid, identity.caller());
        run(session, &projected, retry)
    });
    TableIterator::once((counts.events, counts.inserted, counts.updated, counts.deleted, counts.set_aside))
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn verify(
    relation: Option<pg_sys::Oid>,
) -> TableIterator<'static, (name!(key, RawJsonb), name!(what, String), name!(expected, Option<RawJsonb>), name!(actual, Option<RawJsonb>))> {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.verify('shop.goods').") };
    shmem::required();
    let identity = Identity::owner();
    let differences = spi::connect(|session| {
        let projected = owned(session, oid, identity.caller());
        epoch::required(session);
        let relation = &projected.relation;
        let moment = Moment::now();
        let extent = if projected.immediate { Extent::default() } else { position::at(session, &moment, oid) };
        let mut shadow = Shadow::make(session, relation);
        shadow.fold(session, &projected, &moment, &extent, None, false);
        let compare = Compare::new(session, relation, &shadow.name);
        let rows = {
            let _restricted = Identity::restricted(relation.owner);
            session.run_prepared_at(&moment, &Prepared::new(&compare.differences(), &[]), &[])
        };
        let lifted = |row, column| rows.lift(row, column).map(RawJsonb);
        let found: Vec<_> =
            (0..rows.len()).filter_map(|row| Some((lifted(row, 1)?, rows.must::<String>(row, 2), lifted(row, 3), lifted(row, 4)))).collect();
        drop(moment);
        shadow.drop(session);
        found
    });
    TableIterator::new(differences)
}
