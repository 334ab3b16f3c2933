//! The capture triggers: AFTER each statement, from its transition tables, and BEFORE TRUNCATE, from the table.
//!
//! Old and new rows of an UPDATE are paired by the text of their primary key, so a row whose key changed is a deletion and an insertion, and rows whose text
//! stayed as it was are left out. Numbers are drawn after the statement locked its rows. PostgreSQL fires the trigger at the end of a statement; so where a
//! table's own AFTER ROW trigger changes the same key of the same table again, that change is numbered before the one that caused it, and so is the insertion
//! before the deletion where one MERGE does both to one key. A server that did not preload the library captures all the same; only
//! the doorbell stays silent.

use super::epoch;
use super::images::{check_types, image_sql, key_sql};
use super::shape::Shape;
use super::watched;
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::shmem::{self, Instance, bells};
use crate::spi::{Identity, Prepared, Session, Statement, arg, connect};
use crate::values::Instant;
use pgrx::PgTupleDesc;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::Rc;

static DECLARE: Statement = Statement::new(
    c"INSERT INTO stint.captures AS c (relation, epoch, xid)
      VALUES ($1, $2, pg_current_xact_id())
      ON CONFLICT (relation) DO UPDATE SET epoch = excluded.epoch, xid = excluded.xid, captured_at = excluded.captured_at",
    &[pg_sys::OIDOID, pg_sys::INT4OID],
);
static FORGET: Statement = Statement::new(c"DELETE FROM stint.captures WHERE relation = $1", &[pg_sys::OIDOID]);
static IS_SUBSCRIBED: Statement = Statement::new(
    c"SELECT s.subname::text FROM pg_subscription_rel r JOIN pg_subscription s ON s.oid = r.srsubid WHERE r.srrelid = $1 ORDER BY 1 LIMIT 1",
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

/// Starts to capture a table's changes; called by `create_state`. Refuses tables whose changes would be missed or could not be read back.
pub fn install(session: &Session, relation: &Relation) {
    if relation.partitioned {
        Fault::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("{} cannot be a state table: it is partitioned", relation.qualified))
            .detail("A row written to a partition directly fires no trigger of the partitioned table, so the changelog would miss it.")
            .hint("Use an ordinary table.")
            .raise();
    }
    let _owner = Identity::owner();
    let subscribed = session.run(&IS_SUBSCRIBED, &[arg(relation.oid)]);
    if !subscribed.is_empty() {
        Fault::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("{} cannot be a state table: the subscription \"{}\" writes to it", relation.qualified, subscribed.must::<String>(0, 1)),
        )
        .detail("Logical replication fires no statement-level triggers, so the changelog would miss its changes.")
        .hint("Subscribe into another table and merge from it.")
        .raise();
    }
    check_types(&relation.qualified, &Shape::load(session, relation.oid));
    for (name, event) in TRIGGERS {
        let event = event.replace("{table}", &relation.qualified);
        session.execute_once(&format!("CREATE TRIGGER {name} {event} FOR EACH STATEMENT EXECUTE FUNCTION stint.capture()"));
    }
    session.run(&DECLARE, &[arg(relation.oid), arg(epoch::required(session))]);
}

/// Stops capturing; called by `drop_state`. What was captured stays, since positions count it.
pub fn remove(session: &Session, relation: &Relation) {
    let _owner = Identity::owner();
    for (name, _) in TRIGGERS {
        session.execute_once(&format!("DROP TRIGGER IF EXISTS {name} ON {}", relation.qualified));
    }
    session.run(&FORGET, &[arg(relation.oid)]);
    watched::forget(session, relation.oid);
}

/// What a statement did to the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Event {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// A table's compiled capture statements, as long as its columns and key stay as they are.
struct Compiled {
    fingerprint: u64,
    layout: i32,
    statements: HashMap<Event, Rc<Prepared>>,
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
    // SAFETY: fields of the trigger data; transition tables are null or tuple stores.
    let (event, rel, empty) = unsafe {
        let data = &*trigger;
        let event = match data.tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
            pg_sys::TRIGGER_EVENT_INSERT => Event::Insert,
            pg_sys::TRIGGER_EVENT_UPDATE => Event::Update,
            pg_sys::TRIGGER_EVENT_DELETE => Event::Delete,
            _ => Event::Truncate,
        };
        let is_empty = |store: *mut pg_sys::Tuplestorestate| store.is_null() || pg_sys::tuplestore_tuple_count(store) == 0;
        (event, data.tg_relation, event != Event::Truncate && is_empty(data.tg_oldtable) && is_empty(data.tg_newtable))
    };
    if empty {
        return;
    }
    // SAFETY: the relation is open and locked by the statement.
    let (oid, fingerprint) = unsafe { ((*rel).rd_id, fingerprint(rel)) };
    let written = connect(|session| {
        // SAFETY: makes the transition tables known by name in this SPI level.
        unsafe { pg_sys::SPI_register_trigger_data(trigger) };
        let _owner = Identity::owner();
        let (statement, layout) = statement(session, oid, fingerprint, event);
        let params = [arg(oid), arg(layout), arg(Instant::now()), arg(epoch::required(session))];
        let written = if event == Event::Truncate {
            // The table is locked against everybody; under REPEATABLE READ the transaction's own snapshot may be older than the rows that vanish.
            session.run_prepared_latest(&statement, &params).len()
        } else {
            session.run_prepared(&statement, &params).len()
        };
        if written > 0 && shmem::get().is_some() {
            watched::note(session, oid);
        }
        written
    });
    if written > 0 && shmem::get().is_some() {
        bells::ring(Instance::here(), bells::Kind::Changes, oid.to_u32());
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

/// The statement for an event and the layout its images have, compiled when first needed.
fn statement(session: &Session, oid: pg_sys::Oid, fingerprint: u64, event: Event) -> (Rc<Prepared>, i32) {
    let known = COMPILED.with_borrow(|all| {
        let table = all.get(&oid.to_u32()).filter(|table| table.fingerprint == fingerprint)?;
        Some((table.statements.get(&event).cloned(), table.layout))
    });
    if let Some((Some(statement), layout)) = known {
        return (statement, layout);
    }
    let Some(name) = name_of(session, oid) else { errors::internal("the table of a trigger is not in the catalogue") };
    let shape = Shape::load(session, oid);
    if shape.key.is_empty() {
        Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("the state table {name} has lost its primary key"))
            .hint("Add the primary key again, or run stint.drop_state.")
            .raise();
    }
    let columns: Vec<Option<String>> = shape.places().iter().map(|place| place.map(|column| column.name.clone())).collect();
    let found = session.run(&LAYOUT, &[arg(oid), arg(columns.clone())]);
    let statement = Rc::new(Prepared::new(&sql(&shape, &name, event), &[pg_sys::OIDOID, pg_sys::INT4OID, pg_sys::TIMESTAMPTZOID, pg_sys::INT4OID]));
    if found.is_empty() {
        // A layout made now could be rolled back, so it is not remembered; the next statement finds it.
        return (statement, session.run(&ADD_LAYOUT, &[arg(oid), arg(columns)]).must(0, 1));
    }
    let layout: i32 = found.must(0, 1);
    COMPILED.with_borrow_mut(|all| {
        let table = all.entry(oid.to_u32()).or_insert_with(|| Compiled { fingerprint, layout, statements: HashMap::new() });
        if table.fingerprint != fingerprint || table.layout != layout {
            *table = Compiled { fingerprint, layout, statements: HashMap::new() };
        }
        table.statements.insert(event, Rc::clone(&statement));
    });
    (statement, layout)
}

/// `$1` the table, `$2` its layout, `$3` the time, `$4` the epoch. The order by kind puts the deletion of a changed key before its insertion.
fn sql(shape: &Shape, table: &str, event: Event) -> String {
    let key = |row: &str| key_sql(shape.key_columns().map(|column| column.quoted.as_str()), row);
    let image = |row: &str| image_sql(shape, row);
    let changes = match event {
        Event::Insert => format!("SELECT 'I' AS kind, {} AS key, NULL::text[] AS before, {} AS after FROM stint_new n", key("n"), image("n")),
        Event::Delete => format!("SELECT 'D' AS kind, {} AS key, {} AS before, NULL::text[] AS after FROM stint_old o", key("o"), image("o")),
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
    format!(
        "INSERT INTO stint.change_log (epoch, relation, xid, seq, at, layout, kind, key, before, after)
         SELECT $4, $1, pg_current_xact_id(), nextval('stint.change_seq'), $3, $2, c.kind::\"char\", c.key, c.before, c.after
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
    c"SELECT format('%I.%I', n.nspname, c.relname), EXISTS (SELECT FROM stint.captures p WHERE p.relation = c.oid)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1",
    &[pg_sys::OIDOID],
);

/// The qualified name of a state table that the caller may read; an error for anything else. Runs with the rights of the extension's owner.
pub fn required(session: &Session, caller: pg_sys::Oid, relation: pg_sys::Oid) -> String {
    let found = session.run(&CAPTURED, &[arg(relation)]);
    if found.is_empty() {
        errors::unknown("relation", &relation.to_u32().to_string(), None, "Give the table's name, as in 'shop.orders'.")
    }
    let name: String = found.must(0, 1);
    check_readable(caller, relation, &name);
    if !found.must::<bool>(0, 2) {
        errors::unknown("state table", &name, None, "Declare it with stint.create_state, or look at stint.state_config.")
    }
    name
}
