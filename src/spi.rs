//! The only way to PostgreSQL's executor: statements that are prepared once per backend and kept, planned generically whatever the user's
//! `plan_cache_mode` says, run read-write with a fresh snapshot each, and taking no transaction id until something is written.

use crate::errors;
use crate::settings::Settings;
use pgrx::prelude::*;
use std::cell::{Cell, OnceCell};
use std::ffi::{CStr, CString};

/// One argument of a statement; `None` is SQL null.
pub type Param = Option<pg_sys::Datum>;

/// Makes a statement's argument of a Rust value. Call it inside [`connect`], so that what it allocates is freed there.
pub fn arg<T: IntoDatum>(value: T) -> Param {
    value.into_datum()
}

/// A statement with its kept plan. Declare it as a `static`; a backend is one process with one thread and prepares it at first use.
pub struct Statement {
    sql: &'static CStr,
    types: &'static [pg_sys::Oid],
    plan: Cell<pg_sys::SPIPlanPtr>,
}

// SAFETY: a backend runs one thread; forked children start before any plan is made.
unsafe impl Sync for Statement {}

impl Statement {
    /// A statement with `$1 …` of the given types.
    pub const fn new(sql: &'static CStr, types: &'static [pg_sys::Oid]) -> Self {
        Statement { sql, types, plan: Cell::new(std::ptr::null_mut()) }
    }

    fn plan(&self) -> pg_sys::SPIPlanPtr {
        if self.plan.get().is_null() {
            self.plan.set(prepare(self.sql, self.types));
        }
        self.plan.get()
    }
}

/// A kept plan whose text was made at run time (a state table's merge). Freed when dropped.
pub struct Prepared {
    plan: pg_sys::SPIPlanPtr,
    args: usize,
}

impl Prepared {
    /// Prepares and keeps `sql`. Must be called inside [`connect`].
    pub fn new(sql: &str, types: &[pg_sys::Oid]) -> Self {
        let Ok(text) = CString::new(sql) else { errors::internal("a compiled statement contains a zero byte") };
        Prepared { plan: prepare(&text, types), args: types.len() }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // SAFETY: the plan was kept by `prepare` and is not used again.
        unsafe { pg_sys::SPI_freeplan(self.plan) };
    }
}

fn prepare(sql: &CStr, types: &[pg_sys::Oid]) -> pg_sys::SPIPlanPtr {
    let mut types = types.to_vec();
    let _path = pin_search_path();
    // SAFETY: `types` outlives the call; the text is a C string; errors are raised by PostgreSQL.
    unsafe {
        let plan = pg_sys::SPI_prepare_cursor(sql.as_ptr(), types.len() as i32, types.as_mut_ptr(), pg_sys::CURSOR_OPT_GENERIC_PLAN as i32);
        if plan.is_null() || pg_sys::SPI_keepplan(plan) != 0 {
            let code = pg_sys::SPI_result;
            errors::internal(&format!("a statement could not be prepared (SPI {code}): {}", sql.to_string_lossy()));
        }
        plan
    }
}

/// Where names in statements are looked for: an operator that the caller's search_path finds first would run with our rights.
const SEARCH_PATH: &CStr = c"pg_catalog, pg_temp";

/// While what it returns lives, names are looked for in [`SEARCH_PATH`]; none where they are anyway.
fn pin_search_path() -> Option<Settings> {
    // SAFETY: a variable of this backend, null or a C string.
    let pinned = unsafe {
        let set = pg_sys::namespace_search_path;
        !set.is_null() && CStr::from_ptr(set) == SEARCH_PATH
    };
    (!pinned).then(|| Settings::set(&[(c"search_path", SEARCH_PATH)]))
}

/// An open SPI connection; closed when dropped, also by an error's unwinding.
pub struct Session {
    /// There once a statement was run.
    path: OnceCell<Option<Settings>>,
}

/// Runs `work` inside an SPI connection.
pub fn connect<R>(work: impl FnOnce(&Session) -> R) -> R {
    // SAFETY: opens a nested SPI level that the guard closes.
    if unsafe { pg_sys::SPI_connect() } != pg_sys::SPI_OK_CONNECT as i32 {
        errors::internal("SPI_connect failed");
    }
    let session = Session { path: OnceCell::new() };
    work(&session)
}

impl Drop for Session {
    fn drop(&mut self) {
        // After an error PostgreSQL unwinds its own SPI stack when the (sub)transaction aborts.
        if !std::thread::panicking() {
            drop(self.path.take());
            // SAFETY: closes the level that `connect` opened.
            unsafe { pg_sys::SPI_finish() };
        }
    }
}

/// Generic plans without just-in-time compilation while it lives. The user's `force_custom_plan` would plan every call anew; and a plan is kept for calls of
/// every size, so one that a large batch made must not be compiled again, tens of milliseconds long, at each small one.
struct GenericPlans {
    cache_mode: i32,
    jit: bool,
    scans: [bool; SCANS],
    own: bool,
}

/// The settings that choose how a statement on our tables is run, and what they are for it: by the indexes, whatever the session has set for its own queries.
///
/// Where two indexes of a table begin with the same column and statistics say that the table is empty, as they do whenever it was when it was last analysed, both
/// cost the same to the planner, and it may take the one that fits less and read all of a queue. Such statements name the one by the order that they ask for,
/// which only that one gives: `x.id >= $2 and x.id <= $2 order by x.id limit 1` in place of `x.id = $2`, whose order would be none.
const SCANS: usize = 6;

/// # Safety
/// Plain variables of this backend; the pointers are for one use at a time.
unsafe fn scans() -> [(*mut bool, bool); SCANS] {
    [
        (&raw mut pg_sys::enable_seqscan, false),
        (&raw mut pg_sys::enable_bitmapscan, false),
        (&raw mut pg_sys::enable_indexscan, true),
        (&raw mut pg_sys::enable_indexonlyscan, true),
        (&raw mut pg_sys::enable_nestloop, true),
        (&raw mut pg_sys::enable_sort, false),
    ]
}

thread_local! {
    /// Whether a statement of a verb on our own tables is being run.
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// Whether the row at hand is written by a verb, which settles in shared memory what follows from it.
pub fn in_own_statement() -> bool {
    OWN.get()
}

/// Which tables a statement is on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// Ours: every condition has its index, and the plan must not hang on what the statistics said of a table that was empty when it was first made.
    OurTables,
    /// A user's.
    UsersTable,
}

impl GenericPlans {
    fn set(on: On) -> Self {
        // SAFETY: plain variables of this backend.
        unsafe {
            let before = GenericPlans {
                cache_mode: pg_sys::plan_cache_mode,
                jit: pg_sys::jit_enabled,
                scans: scans().map(|(setting, _)| *setting),
                own: OWN.replace(on == On::OurTables),
            };
            pg_sys::plan_cache_mode = pg_sys::PlanCacheMode::PLAN_CACHE_MODE_FORCE_GENERIC_PLAN as i32;
            pg_sys::jit_enabled = false;
            if on == On::OurTables {
                scans().into_iter().for_each(|(setting, ours)| *setting = ours);
            }
            before
        }
    }
}

impl Drop for GenericPlans {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe {
            pg_sys::plan_cache_mode = self.cache_mode;
            pg_sys::jit_enabled = self.jit;
            scans().into_iter().zip(self.scans).for_each(|((setting, _), before)| *setting = before);
        }
        OWN.set(self.own);
    }
}

fn execute_latest(plan: pg_sys::SPIPlanPtr, values: *mut pg_sys::Datum, nulls: *const std::os::raw::c_char) -> i32 {
    // SAFETY: the snapshot is registered while the statement runs, as the foreign key triggers do it; an abort releases it too.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
        let code = pg_sys::SPI_execute_snapshot(plan, values, nulls, snapshot, std::ptr::null_mut(), false, true, 0);
        pg_sys::UnregisterSnapshot(snapshot);
        code
    }
}

/// One point that several statements look at, beside what this transaction has written since.
pub struct Moment(pg_sys::Snapshot);

impl Moment {
    /// What is committed now, also under REPEATABLE READ.
    pub fn now() -> Self {
        // SAFETY: registered until it is dropped; an abort releases it too.
        Moment(unsafe { pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()) })
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: registered by `now` under the same resource owner.
            unsafe { pg_sys::UnregisterSnapshot(self.0) };
        }
    }
}

fn execute_at(moment: &Moment, plan: pg_sys::SPIPlanPtr, values: *mut pg_sys::Datum, nulls: *const std::os::raw::c_char) -> i32 {
    // SAFETY: the snapshot is registered; SPI copies it and advances the copy's command id.
    unsafe { pg_sys::SPI_execute_snapshot(plan, values, nulls, moment.0, std::ptr::null_mut(), false, true, 0) }
}

impl Session {
    /// Runs a kept statement with what a moment shows.
    pub fn run_at(&self, moment: &Moment, statement: &Statement, params: &[Param]) -> Rows {
        self.execute_with(statement.plan(), statement.types.len(), On::OurTables, params, |plan, values, nulls| {
            execute_at(moment, plan, values, nulls)
        })
    }

    /// As [`Session::run_at`] for a statement prepared at run time.
    pub fn run_prepared_at(&self, moment: &Moment, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute_with(statement.plan, statement.args, On::UsersTable, params, |plan, values, nulls| execute_at(moment, plan, values, nulls))
    }

    /// Has names in statements looked for in [`SEARCH_PATH`] until this connection ends. Every statement does so first; a verb that runs none does not pay for it.
    /// Call it before a subtransaction or other settings within the connection, whose end would end a level of settings that began in it.
    pub fn pin(&self) {
        self.path.get_or_init(pin_search_path);
    }

    /// Runs a kept statement to its end.
    pub fn run(&self, statement: &Statement, params: &[Param]) -> Rows {
        self.execute(statement.plan(), statement.types.len(), On::OurTables, params)
    }

    /// Runs a statement prepared at run time to its end.
    pub fn run_prepared(&self, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute(statement.plan, statement.args, On::UsersTable, params)
    }

    /// Runs a statement on our own tables that was prepared at run time to its end.
    pub fn run_own(&self, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute(statement.plan, statement.args, On::OurTables, params)
    }

    /// As [`Session::run_own`], with what is committed now.
    pub fn run_own_latest(&self, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute_with(statement.plan, statement.args, On::OurTables, params, execute_latest)
    }

    /// Runs a kept statement that only reads, with the snapshot of the query that called us: for a STABLE function, whose answer must fit the rows that the
    /// rest of its query sees.
    pub fn read(&self, statement: &Statement, params: &[Param]) -> Rows {
        self.execute_with(statement.plan(), statement.types.len(), On::OurTables, params, |plan, values, nulls| {
            // SAFETY: as `execute_with` promises.
            unsafe { pg_sys::SPI_execute_plan(plan, values, nulls, true, 0) }
        })
    }

    /// As [`Session::read`] for a statement on a user's table that was prepared at run time.
    pub fn read_prepared(&self, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute_with(statement.plan, statement.args, On::UsersTable, params, |plan, values, nulls| {
            // SAFETY: as `execute_with` promises.
            unsafe { pg_sys::SPI_execute_plan(plan, values, nulls, true, 0) }
        })
    }

    /// Runs a kept statement with what is committed now, also under REPEATABLE READ: for looking again after a lock was got.
    pub fn run_latest(&self, statement: &Statement, params: &[Param]) -> Rows {
        self.execute_with(statement.plan(), statement.types.len(), On::OurTables, params, execute_latest)
    }

    /// As [`Session::run_latest`] for a statement prepared at run time.
    pub fn run_prepared_latest(&self, statement: &Prepared, params: &[Param]) -> Rows {
        self.execute_with(statement.plan, statement.args, On::UsersTable, params, execute_latest)
    }

    fn execute(&self, plan: pg_sys::SPIPlanPtr, args: usize, on: On, params: &[Param]) -> Rows {
        self.execute_with(plan, args, on, params, |plan, values, nulls| {
            // SAFETY: as `execute_with` promises.
            unsafe { pg_sys::SPI_execute_plan(plan, values, nulls, false, 0) }
        })
    }

    /// Calls `call` with plan, values and nulls that agree in number and type, in PostgreSQL's own form.
    fn execute_with(
        &self,
        plan: pg_sys::SPIPlanPtr,
        args: usize,
        on: On,
        params: &[Param],
        call: impl FnOnce(pg_sys::SPIPlanPtr, *mut pg_sys::Datum, *const std::os::raw::c_char) -> i32,
    ) -> Rows {
        self.pin();
        if params.len() != args {
            errors::internal(&format!("a statement of {args} arguments was given {}", params.len()));
        }
        let mut values: Vec<pg_sys::Datum> = params.iter().map(|p| p.unwrap_or(pg_sys::Datum::from(0usize))).collect();
        let nulls: Vec<std::os::raw::c_char> = params.iter().map(|p| if p.is_some() { b' ' } else { b'n' } as std::os::raw::c_char).collect();
        let generic = GenericPlans::set(on);
        let code = call(plan, values.as_mut_ptr(), nulls.as_ptr());
        if code < 0 {
            errors::internal(&format!("SPI_execute_plan answered {code}"));
        }
        // SAFETY: SPI's result variables; the tuple table lives until this SPI level ends.
        let rows = unsafe { Rows { table: pg_sys::SPI_tuptable, count: pg_sys::SPI_processed as usize } };
        drop(generic);
        rows
    }

    /// Runs text that is made and used once (DDL of `create_state`).
    pub fn execute_once(&self, sql: &str) {
        self.pin();
        let Ok(text) = CString::new(sql) else { errors::internal("a statement contains a zero byte") };
        // SAFETY: text is a C string; errors are raised by PostgreSQL.
        let code = unsafe { pg_sys::SPI_execute(text.as_ptr(), false, 0) };
        if code < 0 {
            errors::internal(&format!("SPI_execute answered {code}"));
        }
    }
}

/// A row as it is read: by a statement, or from its table (`direct`). Columns count from 0.
pub trait Row {
    /// A column's value where it lies, which the row outlives.
    fn datum(&self, column: usize) -> Option<pg_sys::Datum>;

    /// A column's value that lives as long as SPI's memory.
    fn keep(&self, column: usize) -> Option<pg_sys::Datum>;

    /// A column's value in memory that outlives SPI (the calling function's). A toast pointer stays a pointer.
    fn lift(&self, column: usize) -> Option<pg_sys::Datum>;

    /// A column copied into Rust.
    fn get<T: FromDatum>(&self, column: usize) -> Option<T> {
        // SAFETY: the statement, or the table, has a column of T's type there.
        self.datum(column).and_then(|datum| unsafe { T::from_datum(datum, false) })
    }

    /// As [`Row::get`] for a column that is never null.
    fn must<T: FromDatum>(&self, column: usize) -> T {
        match self.get(column) {
            Some(value) => value,
            None => errors::internal(&format!("column {column} is null")),
        }
    }
}

/// One of the rows of a statement.
pub struct RowOf<'r>(&'r Rows, usize);

impl Row for RowOf<'_> {
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        self.0.datum(self.1, column + 1)
    }

    fn keep(&self, column: usize) -> Option<pg_sys::Datum> {
        self.datum(column)
    }

    fn lift(&self, column: usize) -> Option<pg_sys::Datum> {
        self.0.lift(self.1, column + 1)
    }
}

/// What a statement returned. Valid inside the [`connect`] it came from.
pub struct Rows {
    table: *mut pg_sys::SPITupleTable,
    count: usize,
}

impl Rows {
    /// What a statement returns that finds nothing.
    pub fn none() -> Self {
        Rows { table: std::ptr::null_mut(), count: 0 }
    }

    /// The rows returned.
    pub fn iter(&self) -> impl Iterator<Item = RowOf<'_>> {
        (0..self.count).map(|at| RowOf(self, at))
    }

    /// Rows returned, or, without RETURNING, rows changed.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether nothing was returned or changed.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn datum(&self, row: usize, column: usize) -> Option<pg_sys::Datum> {
        if row >= self.count || self.table.is_null() {
            return None;
        }
        // SAFETY: the tuple table is open; SPI checks the column number.
        unsafe {
            let tuple = *(*self.table).vals.add(row);
            let mut is_null = true;
            let datum = pg_sys::SPI_getbinval(tuple, (*self.table).tupdesc, column as i32, &mut is_null);
            (!is_null).then_some(datum)
        }
    }

    /// Column `column` (from 1) of row `row` (from 0), copied into Rust. The statement's text fixes its type, so casts belong there.
    pub fn get<T: FromDatum>(&self, row: usize, column: usize) -> Option<T> {
        let datum = self.datum(row, column)?;
        // SAFETY: the SQL text yields a column of T's type.
        unsafe { T::from_datum(datum, false) }
    }

    /// As [`Rows::get`] for a column that is never null by the tables' constraints.
    pub fn must<T: FromDatum>(&self, row: usize, column: usize) -> T {
        match self.get(row, column) {
            Some(value) => value,
            None => errors::internal(&format!("column {column} of row {row} is null")),
        }
    }

    /// A column copied to memory that outlives SPI (the calling function's), still as a datum.
    pub fn lift(&self, row: usize, column: usize) -> Option<pg_sys::Datum> {
        let datum = self.datum(row, column)?;
        // SAFETY: the row exists, so its descriptor does; what is passed by reference is copied into the upper context by the type's own length while SPI is
        // open. A toast pointer stays a pointer.
        unsafe {
            let (mut length, mut by_value) = (0, false);
            let kind = pg_sys::SPI_gettypeid((*self.table).tupdesc, column as i32);
            pg_sys::get_typlenbyval(kind, &mut length, &mut by_value);
            Some(pg_sys::SPI_datumTransfer(datum, by_value, i32::from(length)))
        }
    }
}

/// The extension's owner and schema.
#[derive(Clone, Copy)]
pub struct Home {
    /// The role that owns the schema `stint`.
    pub owner: pg_sys::Oid,
    /// The schema's oid: it changes with every CREATE EXTENSION, so it names this instance of the extension in shared memory.
    pub schema: pg_sys::Oid,
}

thread_local! {
    /// What was last found, until a schema changes; and whether we are told of that yet.
    static HOME: Cell<Option<Home>> = const { Cell::new(None) };
    static TOLD: Cell<bool> = const { Cell::new(false) };
}

/// Told by PostgreSQL when a schema changes, or may have changed.
unsafe extern "C-unwind" fn schema_changed(_arg: pg_sys::Datum, _cache: i32, _hash: u32) {
    HOME.set(None);
}

/// Where the extension lives in this database; an error where it does not. A verb asks for it many times, so it is kept.
pub fn home() -> Home {
    if let Some(home) = HOME.get() {
        return home;
    }
    if !TOLD.replace(true) {
        // SAFETY: registered once in this backend; the function lives as long as the library.
        unsafe {
            pg_sys::CacheRegisterSyscacheCallback(pg_sys::SysCacheIdentifier::NAMESPACEOID as i32, Some(schema_changed), pg_sys::Datum::from(0usize));
        }
    }
    // SAFETY: plain system cache look-ups, the tuple released at once.
    unsafe {
        let schema = pg_sys::get_namespace_oid(c"stint".as_ptr(), true);
        if schema != pg_sys::InvalidOid {
            let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::NAMESPACEOID as i32, schema.into());
            if !tuple.is_null() {
                let owner = (*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_namespace>()).nspowner;
                pg_sys::ReleaseSysCache(tuple);
                let home = Home { owner, schema };
                HOME.set(Some(home));
                return home;
            }
        }
    }
    errors::not_installed()
}

/// The role whose rights are in force while it lives; the caller's come back when it is dropped, on every path.
pub struct Identity {
    role: pg_sys::Oid,
    context: i32,
}

impl Identity {
    /// The extension owner's rights, for statements on the extension's own tables.
    pub fn owner() -> Self {
        Self::switch(home().owner, pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32)
    }

    /// The rights of a state table's owner, restricted as REFRESH MATERIALIZED VIEW restricts them: its triggers, domains and expression indexes are user
    /// code and must not gain ours.
    pub fn restricted(role: pg_sys::Oid) -> Self {
        Self::switch(role, (pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_RESTRICTED_OPERATION) as i32)
    }

    fn switch(to: pg_sys::Oid, add: i32) -> Self {
        let (mut role, mut context) = (pg_sys::InvalidOid, 0);
        // SAFETY: PostgreSQL's own pair, restored in Drop; an abort restores it too.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut role, &mut context);
            pg_sys::SetUserIdAndSecContext(to, context | add);
        }
        Identity { role, context }
    }

    /// The role in force before the switch: the one whose rights a verb checks.
    pub fn caller(&self) -> pg_sys::Oid {
        self.role
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        // SAFETY: puts back what `switch` found.
        unsafe { pg_sys::SetUserIdAndSecContext(self.role, self.context) };
    }
}
