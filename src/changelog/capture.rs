//! The capture triggers: AFTER each statement, from its transition tables, and BEFORE TRUNCATE, from the table.
//!
//! Old and new rows of an UPDATE are paired by the text of their primary key, so a row whose key changed is a deletion and an insertion, and rows whose text
//! stayed as it was are left out. Numbers are drawn after the statement locked its rows, and put in order by [`order`]. A server that did not preload the library
//! captures all the same; only the doorbell stays silent, and partitions that come or go tell nothing of their rows.

use super::gone::Move;
use super::images::{check_types, image_sql, key_sql};
use super::shape::Shape;
use super::{cause, columns, epoch, gone, order, partitions, watched};
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::shmem::{self, Instance, bells};
use crate::spi::{Identity, Param, Prepared, Session, Statement, arg, connect};
use crate::values::Instant;
use pgrx::PgTupleDesc;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::Rc;

static DECLARE: Statement = Statement::new(
    c"INSERT INTO stint.captures AS c (relation, epoch, xid, history)
      VALUES ($1, $2, pg_current_xact_id(), $3)
      ON CONFLICT (relation) DO UPDATE
          SET epoch = excluded.epoch, xid = excluded.xid, captured_at = excluded.captured_at, history = excluded.history, floor_pos = 0, floor_epoch = NULL,
              floor_seen = NULL, floor_xid = NULL, gone_keys = NULL",
    &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::INTERVALOID],
);
static FORGET_IMAGES: Statement = Statement::new(c"DELETE FROM stint.kept_images WHERE relation = $1", &[pg_sys::OIDOID]);
static FORGET: Statement = Statement::new(c"DELETE FROM stint.captures WHERE relation = $1", &[pg_sys::OIDOID]);
static IS_SUBSCRIBED: Statement = Statement::new(
    c"SELECT s.subname::text, r.srrelid::regclass::text FROM pg_subscription_rel r JOIN pg_subscription s ON s.oid = r.srsubid
      WHERE r.srrelid = $1 OR r.srrelid IN (SELECT t.relid FROM pg_partition_tree($1) t) ORDER BY 1 LIMIT 1",
    &[pg_sys::OIDOID],
);
static QUALIFIED_NAME: Statement = Statement::new(
    c"SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1",
    &[pg_sys::OIDOID],
);
static LAYOUT: Statement = Statement::new(
    c"SELECT l.layout FROM stint.image_layouts l WHERE l.relation = $1 AND l.columns = $2 ORDER BY l.layout LIMIT 1",
    &[pg_sys::OIDOID, pg_sys::TEXTARRAYOID],
);
static ADD_LAYOUT: Statement =
    Statement::new(c"INSERT INTO stint.image_layouts (relation, columns) VALUES ($1, $2) RETURNING layout", &[pg_sys::OIDOID, pg_sys::TEXTARRAYOID]);

/// The triggers, by name. The underscore puts them before most of the table's own, in whose order PostgreSQL fires them.
const TRIGGERS: [(&str, &str); 4] = [
    ("_stint_capture_insert", "AFTER INSERT ON {table} REFERENCING NEW TABLE AS stint_new"),
    ("_stint_capture_update", "AFTER UPDATE ON {table} REFERENCING OLD TABLE AS stint_old NEW TABLE AS stint_new"),
    ("_stint_capture_delete", "AFTER DELETE ON {table} REFERENCING OLD TABLE AS stint_old"),
    ("_stint_capture_truncate", "BEFORE TRUNCATE ON {table}"),
];

/// Starts to capture a table's changes, to be kept for `history` (null: for ever); called by `create_state`. Refuses tables whose changes would be missed or could not be read back.
pub fn install(session: &Session, relation: &Relation, history: Param) {
    let _owner = Identity::owner();
    let subscribed = session.run(&IS_SUBSCRIBED, &[arg(relation.oid)]);
    if !subscribed.is_empty() {
        Fault::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("{} cannot be a state table: the subscription \"{}\" writes to it", relation.qualified, subscribed.must::<String>(0, 1)),
        )
        .detail(format!(
            "Logical replication into {} fires no statement-level triggers, so the changelog would miss its changes.",
            subscribed.must::<String>(0, 2)
        ))
        .hint("Subscribe into another table and merge from it.")
        .raise();
    }
    check_types(&relation.qualified, &Shape::load(session, relation.oid));
    create_triggers(session, &relation.qualified, false);
    for partition in partitions::below(session, relation.oid, &relation.qualified) {
        create_triggers(session, &partition.name, true);
    }
    session.run(&DECLARE, &[arg(relation.oid), arg(epoch::required(session)), history]);
    columns::declare(session, relation.oid);
    gone::create(session, relation);
}

/// Stops capturing; called by `drop_state`. What was captured stays, since positions count it.
pub fn remove(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    partitions::members(session, relation.oid, &relation.qualified).iter().for_each(|table| drop_triggers(session, table));
    gone::remove(session, relation.oid);
    forget(session, relation.oid);
}

/// Forgets what was noted of a table that is captured no longer, or is gone.
pub fn forget(session: &Session, relation: pg_sys::Oid) {
    session.run(&FORGET_IMAGES, &[arg(relation)]);
    session.run(&FORGET, &[arg(relation)]);
    columns::forget(session, relation);
    watched::forget(session, relation);
}

/// Makes a table's capture triggers; those of a partition say that what they tell belongs to its root.
pub fn create_triggers(session: &Session, table: &str, partition: bool) {
    let of = if partition { "'partition'" } else { "" };
    for (name, event) in TRIGGERS {
        let event = event.replace("{table}", table);
        session.execute_once(&format!("CREATE OR REPLACE TRIGGER {name} {event} FOR EACH STATEMENT EXECUTE FUNCTION stint.capture({of})"));
    }
}

/// Drops what [`create_triggers`] made.
pub fn drop_triggers(session: &Session, table: &str) {
    for (name, _) in TRIGGERS {
        session.execute_once(&format!("DROP TRIGGER IF EXISTS {name} ON {table}"));
    }
}

/// What a statement did to the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Rows came.
    Insert,
    /// Rows changed.
    Update,
    /// Rows went.
    Delete,
    /// All rows go.
    Truncate,
    /// The table joins a partitioned one with all its rows.
    Join,
}

/// A table's compiled capture statements, as long as its columns and key stay as they are.
struct Compiled {
    fingerprint: u64,
    layout: i32,
    /// By event, and whether causes are joined.
    statements: HashMap<(Event, bool), Rc<Prepared>>,
}

thread_local! {
    static COMPILED: RefCell<HashMap<u32, Compiled>> = RefCell::new(HashMap::new());
}

/// See [`capture_wrapper`].
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_capture_wrapper() -> &'static pg_sys::Pg_finfo_record {
    static CALLED_BY_V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &CALLED_BY_V1
}

/// `stint.capture()`, the trigger function; by hand because the transition tables are reached through PostgreSQL's own struct.
///
/// # Safety
/// Called by PostgreSQL only.
#[unsafe(no_mangle)]
#[pg_guard]
pub unsafe extern "C-unwind" fn capture_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    // SAFETY: the context is trigger data if its tag says so.
    let trigger = unsafe {
        let context = (*fcinfo).context;
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
            Fault::new(PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED, "stint.capture() was not called as a trigger")
                .hint("stint.create_state makes the triggers that call it.")
                .raise();
        }
        context.cast::<pg_sys::TriggerData>()
    };
    // SAFETY: PostgreSQL's trigger data lives through the call.
    unsafe { capture(trigger) };
    pg_sys::Datum::from(0usize)
}

unsafe fn capture(trigger: *mut pg_sys::TriggerData) {
    let ended = order::statement();
    // SAFETY: fields of the trigger data; transition tables are null or tuple stores.
    let (event, rel, of_partition, empty) = unsafe {
        let data = &*trigger;
        let event = match data.tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
            pg_sys::TRIGGER_EVENT_INSERT => Event::Insert,
            pg_sys::TRIGGER_EVENT_UPDATE => Event::Update,
            pg_sys::TRIGGER_EVENT_DELETE => Event::Delete,
            _ => Event::Truncate,
        };
        let is_empty = |store: *mut pg_sys::Tuplestorestate| store.is_null() || pg_sys::tuplestore_tuple_count(store) == 0;
        (
            event,
            data.tg_relation,
            (*data.tg_trigger).tgnargs > 0,
            event != Event::Truncate && is_empty(data.tg_oldtable) && is_empty(data.tg_newtable),
        )
    };
    if empty {
        return;
    }
    // SAFETY: the relation is open and locked by the statement.
    let (oid, shape_now) = unsafe { ((*rel).rd_id, fingerprint(rel)) };
    connect(|session| {
        // SAFETY: makes the transition tables known by name in this SPI level.
        unsafe { pg_sys::SPI_register_trigger_data(trigger) };
        let _owner = Identity::owner();
        let (table, fingerprint) = if of_partition {
            // What was detached without our seeing it keeps its triggers, and belongs to nobody.
            let root = partitions::root_of(session, oid)?;
            (root, shape_now.rotate_left(1) ^ root_fingerprint(root))
        } else {
            (oid, shape_now)
        };
        let causes = cause::of(table);
        let (statement, layout) = statement(session, Source { written: oid, table }, fingerprint, event, causes.is_some());
        let epoch = epoch::required(session);
        let mut params = vec![arg(table), arg(layout), arg(Instant::now()), arg(epoch)];
        if let Some((keys, events)) = causes {
            params.extend([arg(keys), arg(events)]);
        }
        let went = match event {
            Event::Insert => Some(Move::Came),
            Event::Delete => Some(Move::Went),
            Event::Truncate => Some(Move::Emptied),
            Event::Join => Some(Move::Joined),
            // SAFETY: as above.
            Event::Update => unsafe { may_change_keys(trigger) }.then_some(Move::Changed),
        };
        if let Some(went) = went {
            gone::follow(session, table, oid, fingerprint, went);
        }
        let wrote = order::next_write();
        let written = if event == Event::Truncate {
            // The table is locked against everybody; under REPEATABLE READ the transaction's own snapshot may be older than the rows that vanish.
            session.run_prepared_latest(&statement, &params).len()
        } else {
            session.run_prepared(&statement, &params).len()
        };
        (written > 0).then(|| {
            order::settle(session, epoch, table, ended, wrote, event != Event::Insert);
            told(session, table);
        })
    });
}

/// Changes of a state table were logged.
fn told(session: &Session, table: pg_sys::Oid) {
    if shmem::get().is_some() {
        watched::note(session, table);
        bells::ring(Instance::here(), bells::Kind::Changes, table.to_u32());
    }
}

/// Logs all rows of a partition as inserted or deleted, since it joins the state table or leaves it. The partition is locked against everybody.
pub fn whole(session: &Session, table: pg_sys::Oid, name: &str, event: Event) {
    let shape = fit_shape(session, table, name);
    let (layout, _) = layout(session, table, &shape);
    let statement = Prepared::new(&sql(&shape, name, event, false), &TYPES[..4]);
    let epoch = epoch::required(session);
    gone::follow_partition(session, table, name, if event == Event::Truncate { Move::Emptied } else { Move::Joined });
    let written = session.run_prepared_latest(&statement, &[arg(table), arg(layout), arg(Instant::now()), arg(epoch)]);
    if !written.is_empty() {
        told(session, table);
    }
}

/// Whether an UPDATE may have changed a primary key: one that names a column of the key, or of a table whose own triggers may change the row.
///
/// # Safety
/// `trigger` is PostgreSQL's trigger data of an UPDATE.
unsafe fn may_change_keys(trigger: *mut pg_sys::TriggerData) -> bool {
    // SAFETY: fields of the trigger data and of its open relation; the key's columns are a copy.
    unsafe {
        let rel = (*trigger).tg_relation;
        let own = (*rel).trigdesc;
        if !own.is_null() && (*own).trig_update_before_row {
            return true;
        }
        let key = pg_sys::RelationGetIndexAttrBitmap(rel, pg_sys::IndexAttrBitmapKind::INDEX_ATTR_BITMAP_PRIMARY_KEY);
        pg_sys::bms_overlap(key, (*trigger).tg_updatedcols)
    }
}

/// A number that changes when the table's columns or its key change (FNV-1a).
unsafe fn fingerprint(rel: pg_sys::Relation) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    // SAFETY: an open relation's descriptor; the index list is a copy, made so that rd_pkindex is known.
    unsafe {
        for column in PgTupleDesc::from_pg_copy((*rel).rd_att).iter() {
            add(&column.atttypid.to_u32().to_ne_bytes());
            add(&[u8::from(column.attisdropped)]);
            add(CStr::from_ptr(column.attname.data.as_ptr()).to_bytes());
            add(&[0]);
        }
        pg_sys::list_free(pg_sys::RelationGetIndexList(rel));
        add(&(*rel).rd_pkindex.to_u32().to_ne_bytes());
    }
    hash
}

/// The fingerprint of the table that a partition belongs to. PostgreSQL looks at a partition's parent under the same lock.
fn root_fingerprint(root: pg_sys::Oid) -> u64 {
    // SAFETY: opened and closed here.
    unsafe {
        let rel = pg_sys::relation_open(root, pg_sys::AccessShareLock as i32);
        let found = fingerprint(rel);
        pg_sys::relation_close(rel, pg_sys::AccessShareLock as i32);
        found ^ u64::from(root.to_u32())
    }
}

/// The table that a statement wrote to, and the state table that it belongs to: itself, or the root above it.
#[derive(Clone, Copy)]
struct Source {
    written: pg_sys::Oid,
    table: pg_sys::Oid,
}

const TYPES: [pg_sys::Oid; 6] =
    [pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID, pg_sys::INT4OID, pg_sys::TEXTARRAYOID, pg_sys::INT8ARRAYOID];

/// The state table's shape, which must have a key.
fn fit_shape(session: &Session, table: pg_sys::Oid, name: &str) -> Shape {
    let shape = Shape::load(session, table);
    if shape.key.is_empty() {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("the state table {name} has lost its primary key"))
            .hint("Add the primary key again, or run stint.drop_state.")
            .raise();
    }
    shape
}

/// The number of the layout that a shape's images have, and whether it was there already.
fn layout(session: &Session, table: pg_sys::Oid, shape: &Shape) -> (i32, bool) {
    let columns: Vec<Option<String>> = shape.places().iter().map(|place| place.map(|column| column.name.clone())).collect();
    match session.run(&LAYOUT, &[arg(table), arg(columns.clone())]).get(0, 1) {
        Some(layout) => (layout, true),
        None => (session.run(&ADD_LAYOUT, &[arg(table), arg(columns)]).must(0, 1), false),
    }
}

/// The statement for an event and the layout its images have, compiled when first needed.
fn statement(session: &Session, of: Source, fingerprint: u64, event: Event, caused: bool) -> (Rc<Prepared>, i32) {
    let oid = of.written;
    let known = COMPILED.with_borrow(|all| {
        let table = all.get(&oid.to_u32()).filter(|table| table.fingerprint == fingerprint)?;
        Some((table.statements.get(&(event, caused)).cloned(), table.layout))
    });
    if let Some((Some(statement), layout)) = known {
        return (statement, layout);
    }
    let Some(name) = name_of(session, oid) else { errors::internal("the table of a trigger is not in the catalogue") };
    let shape = fit_shape(session, of.table, &name);
    let (layout, known) = layout(session, of.table, &shape);
    let statement = Rc::new(Prepared::new(&sql(&shape, &name, event, caused), if caused { &TYPES } else { &TYPES[..4] }));
    if !known {
        // A layout made now could be rolled back, so it is not remembered; the next statement finds it.
        return (statement, layout);
    }
    COMPILED.with_borrow_mut(|all| {
        let table = all.entry(oid.to_u32()).or_insert_with(|| Compiled { fingerprint, layout, statements: HashMap::new() });
        if table.fingerprint != fingerprint || table.layout != layout {
            *table = Compiled { fingerprint, layout, statements: HashMap::new() };
        }
        table.statements.insert((event, caused), Rc::clone(&statement));
    });
    (statement, layout)
}

/// `$1` the table, `$2` its layout, `$3` the time, `$4` the epoch, and where changes are `caused` `$5` keys and `$6` their events. The order by kind puts the
/// deletion of a changed key before its insertion.
fn sql(shape: &Shape, table: &str, event: Event, caused: bool) -> String {
    let key = |row: &str| key_sql(shape.key_columns().map(|column| column.quoted.as_str()), row);
    let image = |row: &str| image_sql(shape, row);
    let changes = match event {
        Event::Insert => format!("SELECT 'I' AS kind, {} AS key, NULL::text[] AS before, {} AS after FROM stint_new n", key("n"), image("n")),
        Event::Delete => format!("SELECT 'D' AS kind, {} AS key, {} AS before, NULL::text[] AS after FROM stint_old o", key("o"), image("o")),
        Event::Join => format!("SELECT 'I' AS kind, {} AS key, NULL::text[] AS before, {} AS after FROM ONLY {table} n", key("n"), image("n")),
        Event::Truncate => format!("SELECT 'D' AS kind, {} AS key, {} AS before, NULL::text[] AS after FROM ONLY {table} o", key("o"), image("o")),
        Event::Update => format!(
            "SELECT CASE WHEN o.key IS NULL THEN 'I' WHEN n.key IS NULL THEN 'D' ELSE 'U' END AS kind,
                    coalesce(o.key, n.key) AS key, o.image AS before, n.image AS after
             FROM (SELECT {} AS key, {} AS image FROM stint_old o) o
             FULL JOIN (SELECT {} AS key, {} AS image FROM stint_new n) n ON n.key = o.key
             WHERE o.image IS DISTINCT FROM n.image
             ORDER BY 1",
            key("o"),
            image("o"),
            key("n"),
            image("n")
        ),
    };
    let (changes, cause) = if caused {
        // The join keeps no order, so it is made anew.
        let joined = "LEFT JOIN unnest($5, $6) e (key, event) ON e.key = r.key ORDER BY r.kind";
        (format!("SELECT r.*, e.event AS cause FROM ({changes}) r {joined}"), "c.cause")
    } else {
        (changes, "NULL::bigint")
    };
    format!(
        "INSERT INTO stint.change_log (epoch, relation, xid, seq, at, layout, kind, key, before, after, cause)
         SELECT $4, $1, pg_current_xact_id(), nextval('stint.change_seq'), $3, $2, c.kind::\"char\", c.key, c.before, c.after, {cause}
         FROM ({changes}) c"
    )
}

/// A table's schema and name as SQL writes them; `None` where it is gone.
pub fn name_of(session: &Session, relation: pg_sys::Oid) -> Option<String> {
    let names = session.run(&QUALIFIED_NAME, &[arg(relation)]);
    (!names.is_empty()).then(|| names.must(0, 1))
}

/// Whether the caller may read everything in a table; raises the error where not. Row security cannot be applied to images, so roles under it are refused.
pub fn check_readable(caller: pg_sys::Oid, relation: pg_sys::Oid, name: &str) {
    // SAFETY: catalogue look-ups on behalf of a role.
    let (allowed, filtered) = unsafe {
        let allowed = pg_sys::pg_class_aclcheck(relation, caller, pg_sys::ACL_SELECT as pg_sys::AclMode) == pg_sys::AclResult::ACLCHECK_OK;
        (allowed, allowed && pg_sys::check_enable_rls(relation, caller, true) == pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32)
    };
    if !allowed {
        Fault::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, format!("permission denied for table {name}"))
            .hint(format!("Its owner can GRANT SELECT ON {name} to your role."))
            .raise();
    }
    if filtered {
        Fault::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("row security on {name} applies to your role, and its changelog cannot be filtered"),
        )
        .hint("Read it with a role that bypasses row security.")
        .raise();
    }
}

static CAPTURED: Statement = Statement::new(
    c"SELECT format('%I.%I', n.nspname, c.relname), EXISTS (SELECT FROM stint.captures p WHERE p.relation = c.oid),
             EXISTS (SELECT FROM stint.state_config s WHERE s.relation = c.oid)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1",
    &[pg_sys::OIDOID],
);

/// Whether a table's changes are captured.
pub fn is_captured(session: &Session, relation: pg_sys::Oid) -> bool {
    let found = session.run(&CAPTURED, &[arg(relation)]);
    !found.is_empty() && found.must(0, 2)
}

/// The qualified name of a state table that the caller may read; an error for anything else. Runs with the rights of the extension's owner.
pub fn required(session: &Session, caller: pg_sys::Oid, relation: pg_sys::Oid) -> String {
    let found = session.run(&CAPTURED, &[arg(relation)]);
    if found.is_empty() {
        errors::unknown("relation", &relation.to_u32().to_string(), None, "Give the table's name, as in 'shop.orders'.")
    }
    let name: String = found.must(0, 1);
    check_readable(caller, relation, &name);
    if !found.must::<bool>(0, 2) && found.must(0, 3) {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("the state table {name} keeps no changelog"))
            .detail("It was declared with changelog => false.")
            .hint("Run stint.drop_state and declare it again with stint.create_state(…, changelog => true); its rows stay.")
            .raise()
    }
    if !found.must::<bool>(0, 2) {
        errors::unknown("state table", &name, None, "Declare it with stint.create_state, or look at stint.state_config.")
    }
    name
}
