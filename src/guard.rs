//! `DROP EXTENSION pg_stint` is refused while there are tasks or state tables, unless `stint.allow_drop` is on: nobody loses a company's work queue to a line
//! that was meant for another database. And partitions of state tables that come or go are told to the changelog.

use crate::changelog::partitions;
use crate::errors::Fault;
use crate::guc;
use crate::spi::{self, Identity, Prepared};
use pgrx::PgList;
use pgrx::prelude::*;
use std::ffi::{CStr, c_char};

const EXTENSION: &CStr = c"pg_stint";

/// What would be lost. No kept plan is worth it.
const HELD: &str = "select (select count(*) from (select from stint.task_facts limit 1000) f), (select count(*) from stint.state_config)";

static mut NEXT: pg_sys::ProcessUtility_hook_type = None;

/// Sets the hook. Called once, while the server starts.
pub fn init() {
    // SAFETY: the postmaster runs one thread; the hook that was set before is called in turn.
    unsafe {
        NEXT = pg_sys::ProcessUtility_hook;
        pg_sys::ProcessUtility_hook = Some(on_utility);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_utility(
    statement: *mut pg_sys::PlannedStmt,
    text: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    receiver: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: what PostgreSQL passes to the hook is passed on as it came.
    unsafe {
        if drops_this((*statement).utilityStmt) && !guc::allow_drop() {
            refuse_if_full();
        }
        let node = (*statement).utilityStmt;
        let coming = partitions::before(node);
        match NEXT {
            Some(next) => next(statement, text, read_only_tree, context, params, environment, receiver, completion),
            None => pg_sys::standard_ProcessUtility(statement, text, read_only_tree, context, params, environment, receiver, completion),
        }
        partitions::after(&coming);
    }
}

/// Whether the statement is a DROP EXTENSION that names this one.
///
/// # Safety
/// `statement` is null or a parsed utility statement.
unsafe fn drops_this(statement: *mut pg_sys::Node) -> bool {
    // SAFETY: the tag says what the node is; the objects of a DROP EXTENSION are strings.
    unsafe {
        if statement.is_null() || (*statement).type_ != pg_sys::NodeTag::T_DropStmt {
            return false;
        }
        let drop = &*statement.cast::<pg_sys::DropStmt>();
        drop.removeType == pg_sys::ObjectType::OBJECT_EXTENSION
            && PgList::<pg_sys::Node>::from_pg(drop.objects).iter_ptr().any(|name| CStr::from_ptr(text_of(name)) == EXTENSION)
    }
}

/// The text of a string node.
///
/// # Safety
/// `node` is one.
unsafe fn text_of(node: *mut pg_sys::Node) -> *const c_char {
    // SAFETY: as the caller promises.
    unsafe {
        #[cfg(feature = "pg14")]
        return (*node.cast::<pg_sys::Value>()).val.str_;
        #[cfg(not(feature = "pg14"))]
        return (*node.cast::<pg_sys::String>()).sval;
    }
}

fn refuse_if_full() {
    // SAFETY: a catalogue look-up.
    if unsafe { pg_sys::get_extension_oid(EXTENSION.as_ptr(), true) } == pg_sys::InvalidOid {
        return;
    }
    let _owner = Identity::owner();
    let (tasks, tables): (i64, i64) = spi::connect(|session| {
        let row = session.run_prepared_latest(&Prepared::new(HELD, &[]), &[]);
        (row.must(0, 1), row.must(0, 2))
    });
    if tasks > 0 || tables > 0 {
        let many = if tasks >= 1000 { "1000 or more".to_string() } else { tasks.to_string() };
        Fault::new(PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST, "cannot drop extension pg_stint: there are tasks or state tables in it")
            .detail(format!("{many} tasks and {tables} state tables; their history, changelog and tags would go with it."))
            .hint("Dump the database first. SET stint.allow_drop = on lets the DROP pass.")
            .raise()
    }
}
