//! The fold of the record anew: into a table of the same columns, key and declaration that stands beside the state table for one transaction only.

use super::append::events_at_once;
use super::apply::{self, Poisoned};
use super::config::Projected;
use crate::relation::Relation;
use crate::spi::{Identity, Moment, Prepared, Session, Statement, arg};
use crate::values::RawJsonb;
use pgrx::prelude::*;

static NAMES: Statement = Statement::new(
    c"SELECT format('%I.%I', $2, format('stint_shadow_%s', pg_backend_pid())), format('%I.%I', $2, format('stint_shadow_%s_tombstones', pg_backend_pid())),
             (SELECT format('%I.%I', n.nspname, t.relname)
              FROM stint.state_config c JOIN pg_class t ON t.oid = c.tombstones JOIN pg_namespace n ON n.oid = t.relnamespace WHERE c.relation = $1),
             quote_ident(pg_get_userbyid($3))",
    &[pg_sys::OIDOID, pg_sys::TEXTOID, pg_sys::OIDOID],
);
static OID: Statement = Statement::new(c"SELECT to_regclass($1)::oid", &[pg_sys::TEXTOID]);
// Whatever a declaration consists of, the shadow's is the same but for the tables it names.
static DECLARE: Statement = Statement::new(
    c"INSERT INTO stint.state_config
      SELECT (jsonb_populate_record(c, jsonb_build_object('relation', $2::regclass, 'tombstones', to_regclass($3)))).*
      FROM stint.state_config c WHERE c.relation = $1",
    &[pg_sys::OIDOID, pg_sys::OIDOID, pg_sys::TEXTOID],
);
static FORGET: Statement = Statement::new(c"DELETE FROM stint.state_config c WHERE c.relation = $1", &[pg_sys::OIDOID]);

static BASE: Statement = Statement::new(
    c"SELECT b.rows FROM stint.base_images b WHERE b.relation = $1 AND b.tombstones = $2 ORDER BY b.part",
    &[pg_sys::OIDOID, pg_sys::BOOLOID],
);
static FORGET_BASE: Statement = Statement::new(c"DELETE FROM stint.base_images b WHERE b.relation = $1", &[pg_sys::OIDOID]);
static ADD_BASE: Statement = Statement::new(
    c"INSERT INTO stint.base_images (relation, tombstones, part, rows) VALUES ($1, $2, $3, $4)",
    &[pg_sys::OIDOID, pg_sys::BOOLOID, pg_sys::INT4OID, pg_sys::JSONBOID],
);

/// How far a table is folded.
#[derive(Clone, Default)]
pub struct Extent {
    /// The epoch of `base`; none: every event there is.
    pub epoch: Option<i32>,
    /// What sees every event that is done.
    pub base: Option<String>,
    /// The epoch of `target`.
    pub target_epoch: Option<i32>,
    /// What sees the events of the pass at hand, done up to `seq`.
    pub target: Option<String>,
    /// See above.
    pub seq: Option<i64>,
}

/// The numbers of the next events of some types ($1), at most $3, after a number ($2), that lie in an extent ($4 …) and are not aside for a table ($9) (or
/// skipped only, with $10), nor seen at an earlier point ($11, $12).
static READ: Statement = Statement::new(
    c"SELECT coalesce(array_agg(s.seq ORDER BY s.seq), '{}')
      FROM (SELECT l.seq
            FROM unnest($1) t (type),
                 LATERAL (SELECT l.seq FROM stint.event_log l
                          WHERE l.type = t.type AND l.seq > $2
                            AND ($4 IS NULL OR l.epoch < $4 OR l.epoch = $4 AND pg_visible_in_snapshot(l.xid, $5::pg_snapshot)
                                 OR l.seq <= $8 AND (l.epoch < $6 OR l.epoch = $6 AND pg_visible_in_snapshot(l.xid, $7::pg_snapshot)))
                            AND ($11 IS NULL OR l.epoch > $11 OR l.epoch = $11 AND NOT pg_visible_in_snapshot(l.xid, $12::pg_snapshot))
                            AND NOT EXISTS (SELECT FROM stint.events_aside a WHERE a.relation = $9 AND a.seq = l.seq AND (a.state = 'skipped' OR NOT $10))
                          ORDER BY l.seq LIMIT $3) l
            ORDER BY l.seq LIMIT $3) s",
    &[
        pg_sys::TEXTARRAYOID,
        pg_sys::INT8OID,
        pg_sys::INT4OID,
        pg_sys::INT4OID,
        pg_sys::TEXTOID,
        pg_sys::INT4OID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::OIDOID,
        pg_sys::BOOLOID,
        pg_sys::INT4OID,
        pg_sys::TEXTOID,
    ],
);
/// The lowest number of an event that an earlier point did not see: of a transaction that was running then, or a later one.
static FIRST_AFTER: Statement = Statement::new(
    c"SELECT least((SELECT min(l.seq) FROM stint.event_log l WHERE l.epoch = $1 AND l.xid >= pg_snapshot_xmax($2::pg_snapshot)),
                   (SELECT min(r.seq) FROM pg_snapshot_xip($2::pg_snapshot) x,
                                           LATERAL (SELECT l.seq FROM stint.event_log l WHERE l.epoch = $1 AND l.xid = x OFFSET 0) r),
                   (SELECT min(l.seq) FROM stint.event_log l WHERE l.epoch > $1))",
    &[pg_sys::INT4OID, pg_sys::TEXTOID],
);
static NOW: Statement = Statement::new(c"SELECT pg_current_snapshot()::text, pg_current_xact_id_if_assigned()::text", &[]);

/// Which events are read.
pub struct Reading<'a> {
    /// Their types.
    pub types: &'a [String],
    /// Only those that lie in it.
    pub extent: &'a Extent,
    /// Only those that this point did not see.
    pub since: Option<&'a Point>,
    /// Not those that are aside for this table; with true, only not those that were skipped.
    pub aside: Option<(pg_sys::Oid, bool)>,
}

impl Reading<'_> {
    /// The numbers of the next events after a number, at most so many, that a moment shows, in order.
    pub fn next(&self, session: &Session, moment: &Moment, after: i64, at_most: i32) -> Vec<i64> {
        let events = session.run_at(
            moment,
            &READ,
            &[
                arg(self.types.to_vec()),
                arg(after),
                arg(at_most),
                self.extent.epoch.and_then(arg),
                self.extent.base.as_deref().and_then(arg),
                self.extent.target_epoch.and_then(arg),
                self.extent.target.as_deref().and_then(arg),
                self.extent.seq.and_then(arg),
                self.aside.and_then(|(relation, _)| arg(relation)),
                arg(self.aside.is_some_and(|(_, retry)| retry)),
                self.since.and_then(|point| arg(point.epoch)),
                self.since.and_then(|point| arg(point.snapshot.as_str())),
            ],
        );
        events.must::<Vec<Option<i64>>>(0, 1).into_iter().flatten().collect()
    }

    /// The number before the first event that `since` did not see; none where there is no such event.
    pub fn start(&self, session: &Session, moment: &Moment) -> Option<i64> {
        let Some(point) = self.since else { return Some(0) };
        session.run_at(moment, &FIRST_AFTER, &[arg(point.epoch), arg(point.snapshot.as_str())]).get::<i64>(0, 1).map(|first| first - 1)
    }
}

/// A table being folded anew.
pub struct Shadow {
    /// Its schema and name as SQL writes them.
    pub name: String,
    /// Its tombstones and those of the state table, where it has some.
    pub tombstones: Option<(String, String)>,
    /// How many events were folded.
    pub events: i64,
    /// The events that do not fit.
    pub poisoned: Vec<Poisoned>,
    oid: pg_sys::Oid,
}

/// A point in the record: what a moment shows, as text, in the epoch at hand.
pub struct Point {
    /// The epoch.
    pub epoch: i32,
    /// The snapshot.
    pub snapshot: String,
}

impl Point {
    /// The point of a moment. What this transaction wrote counts as seen, since it has been.
    pub fn of(session: &Session, moment: &Moment, epoch: i32) -> Self {
        let seen = session.run_at(moment, &NOW, &[]);
        let snapshot: String = seen.must(0, 1);
        let own = seen.get::<String>(0, 2).and_then(|own| stint_core::snapshot::with_ended(&snapshot, &own));
        Point { epoch, snapshot: own.unwrap_or(snapshot) }
    }
}

/// The columns of a table that PostgreSQL does not fill itself, as SQL lists them.
fn written(relation: &Relation) -> String {
    let columns = relation.columns.iter().enumerate();
    let written = columns.filter(|(at, column)| relation.key.contains(at) || (!column.generated && column.identity.is_none()));
    written.map(|(_, column)| column.quoted.as_str()).collect::<Vec<_>>().join(", ")
}

/// Pages of a table whose rows make one part of an image.
const PAGES: i32 = 256;

/// Stores the rows of a table. Its types may have casts of the owner's, so it is read as that role.
fn store(session: &Session, relation: &Relation, tombstones: bool, name: &str, columns: &str) {
    let sql = format!(
        "SELECT coalesce(jsonb_agg(to_jsonb(x.*)), '[]'), pg_relation_size('{0}') > current_setting('block_size')::int8 * $2
         FROM (SELECT {columns} FROM {name} WHERE ctid >= format('(%s,0)', $1)::tid AND ctid < format('(%s,0)', $2)::tid) x",
        name.replace('\'', "''")
    );
    let read = Prepared::new(&sql, &[pg_sys::INT4OID, pg_sys::INT4OID]);
    for part in 0.. {
        let rows = {
            let _restricted = Identity::restricted(relation.owner);
            session.run_prepared(&read, &[arg(part * PAGES), arg((part + 1) * PAGES)])
        };
        session.run(&ADD_BASE, &[arg(relation.oid), arg(tombstones), arg(part), arg(rows.must::<RawJsonb>(0, 1))]);
        if !rows.must::<bool>(0, 2) {
            return;
        }
    }
}

/// Fills a table with the stored rows.
fn load(session: &Session, relation: &Relation, tombstones: bool, name: &str, columns: &str) {
    let parts = session.run_latest(&BASE, &[arg(relation.oid), arg(tombstones)]);
    if parts.is_empty() {
        return;
    }
    let list = if columns == "*" { String::new() } else { format!("({columns})") };
    let sql = format!("INSERT INTO {name} {list} SELECT {columns} FROM jsonb_populate_recordset(NULL::{name}, $1)");
    let fill = Prepared::new(&sql, &[pg_sys::JSONBOID]);
    let _restricted = Identity::restricted(relation.owner);
    for part in 0..parts.len() {
        session.run_prepared(&fill, &[arg(parts.must::<RawJsonb>(part, 1))]);
    }
}

impl Shadow {
    /// Makes one that holds what the record began with: nothing, or what events that were removed since had amounted to.
    pub fn make(session: &Session, relation: &Relation) -> Self {
        let names = session.run(&NAMES, &[arg(relation.oid), arg(relation.schema.as_str()), arg(relation.owner)]);
        let (name, beside, owner): (String, String, String) = (names.must(0, 1), names.must(0, 2), names.must(0, 4));
        let original: Option<String> = names.get(0, 3);
        let make = |name: &str, like: &str| {
            session.execute_once(&format!(
                "CREATE TABLE {name} (LIKE {like} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING IDENTITY INCLUDING INDEXES)"
            ));
            session.execute_once(&format!("ALTER TABLE {name} OWNER TO {owner}"));
        };
        make(&name, &relation.qualified);
        if let Some(original) = &original {
            make(&beside, original);
        }
        let oid: pg_sys::Oid = session.run(&OID, &[arg(name.as_str())]).must(0, 1);
        session.run(&DECLARE, &[arg(relation.oid), arg(oid), original.as_ref().and_then(|_| arg(beside.as_str()))]);
        let mut kept = vec![(false, name.as_str(), written(relation))];
        if original.is_some() {
            kept.push((true, beside.as_str(), "*".to_string()));
        }
        for (tombstones, name, columns) in kept {
            load(session, relation, tombstones, name, &columns);
        }
        Shadow { name, tombstones: original.map(|original| (beside, original)), events: 0, poisoned: Vec::new(), oid }
    }

    /// Folds the events that a moment shows and that lie in an extent; of those only what `since` does not see, if given. `retry`: poisoned events, too.
    pub fn fold(&mut self, session: &Session, projected: &Projected, moment: &Moment, extent: &Extent, since: Option<&Point>, retry: bool) {
        let reading = Reading { types: &projected.types, extent, since, aside: Some((projected.relation.oid, retry)) };
        let Some(mut after) = reading.start(session, moment) else { return };
        let at_once = events_at_once(projected.per_event);
        loop {
            let seqs = reading.next(session, moment, after, at_once);
            let Some(last) = seqs.last() else { return };
            after = *last;
            let poisoned = apply::fold(projected, self.oid, apply::documents(session, &seqs), &seqs);
            self.events += i64::try_from(seqs.len() - poisoned.len()).unwrap_or(0);
            self.poisoned.extend(poisoned);
            if i32::try_from(seqs.len()).is_ok_and(|read| read < at_once) {
                return;
            }
        }
    }

    /// Stores what it holds as that which the fold of the table begins with.
    pub fn keep(&self, session: &Session, relation: &Relation) {
        session.run(&FORGET_BASE, &[arg(relation.oid)]);
        store(session, relation, false, &self.name, &written(relation));
        if let Some((tombstones, _)) = &self.tombstones {
            store(session, relation, true, tombstones, "*");
        }
    }

    /// Removes it again.
    pub fn drop(self, session: &Session) {
        session.run(&FORGET, &[arg(self.oid)]);
        session.execute_once(&format!("DROP TABLE {}", self.name));
        if let Some((tombstones, _)) = &self.tombstones {
            session.execute_once(&format!("DROP TABLE {tombstones}"));
        }
    }
}
