//! What lives in shared memory: live budget usage, what the groups of fair queues have got, the heads of lines, doorbells, waiters, worker slots and the configuration's generation. One fixed struct
//! and its tables, laid out at server start; all zero after a crash, so nothing here is a truth of its own: each part can be derived again from the tables.

pub mod bells;
pub mod budgets;
pub mod config;
pub mod fair;
pub mod heads;
pub mod waiters;
pub mod workers;

use crate::{errors, guc};
use pgrx::prelude::*;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The fixed part.
#[repr(C)]
pub struct Shared {
    config: config::Shared,
    bells: bells::Shared,
    waiters: waiters::Shared,
    budgets: budgets::Shared,
    heads: heads::Shared,
    workers: workers::Shared,
    fair: fair::Shared,
}

/// The LWLocks, by their place in the named tranche.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Lock {
    /// Guards the budget usage table.
    Budgets = 0,
    /// Guards the doorbells.
    Bells = 1,
    /// Guards the worker slots.
    Workers = 2,
    /// Guards the heads.
    Heads = 3,
    /// Guards the giving of places to waiters.
    Waiters = 4,
    /// Guards what the groups of fair queues have got. Taken while that of the budgets is held, never the other way round.
    Fair = 5,
}
const LOCKS: i32 = 6;
const TRANCHE: &std::ffi::CStr = c"pg_stint";

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(null_mut());
static LOCK_ARRAY: AtomicPtr<pg_sys::LWLockPadded> = AtomicPtr::new(null_mut());
static PREVIOUS_REQUEST: AtomicPtr<()> = AtomicPtr::new(null_mut());
static PREVIOUS_STARTUP: AtomicPtr<()> = AtomicPtr::new(null_mut());

type Hook = unsafe extern "C-unwind" fn();

/// Installs the hooks. Called from `_PG_init` while the server starts.
pub fn init() {
    // SAFETY: the postmaster is single threaded; the hooks chain to whoever was there before.
    unsafe {
        #[cfg(not(feature = "pg14"))]
        {
            PREVIOUS_REQUEST.store(pg_sys::shmem_request_hook.map_or(null_mut(), |hook| hook as *mut ()), Ordering::Relaxed);
            pg_sys::shmem_request_hook = Some(request);
        }
        #[cfg(feature = "pg14")]
        request();
        PREVIOUS_STARTUP.store(pg_sys::shmem_startup_hook.map_or(null_mut(), |hook| hook as *mut ()), Ordering::Relaxed);
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

fn call_previous(slot: &AtomicPtr<()>) {
    let hook = slot.load(Ordering::Relaxed);
    if !hook.is_null() {
        // SAFETY: the pointer was stored from a hook of this type.
        unsafe {
            let hook: Hook = std::mem::transmute(hook);
            pg_sys::ffi::pg_guard_ffi_boundary(|| hook());
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn request() {
    call_previous(&PREVIOUS_REQUEST);
    // SAFETY: called by the postmaster while requests are taken.
    unsafe {
        pg_sys::RequestAddinShmemSpace(
            size_of::<Shared>() + budgets::table_size() + heads::table_size() + workers::table_size() + fair::table_size(),
        );
        pg_sys::RequestNamedLWLockTranche(TRANCHE.as_ptr(), LOCKS);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn startup() {
    call_previous(&PREVIOUS_STARTUP);
    // SAFETY: runs in the postmaster before any backend; the add-in lock is held as ShmemInitStruct asks.
    unsafe {
        let addin = &raw mut (*pg_sys::MainLWLockArray.add(21)).lock; // AddinShmemInitLock, a C macro
        pg_sys::LWLockAcquire(addin, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let shared = pg_sys::ShmemInitStruct(TRANCHE.as_ptr(), size_of::<Shared>(), &mut found).cast::<Shared>();
        if !found {
            std::ptr::write_bytes(shared, 0, 1);
            (*shared).waiters.init();
            (*shared).config.init();
            (*shared).heads.init();
        }
        budgets::attach_table();
        heads::attach_table();
        workers::attach_table();
        fair::attach_table();
        pg_sys::LWLockRelease(addin);
        LOCK_ARRAY.store(pg_sys::GetNamedLWLockTranche(TRANCHE.as_ptr()), Ordering::Release);
        SHARED.store(shared, Ordering::Release);
    }
}

/// The shared memory; `None` where the library was not preloaded.
pub fn get() -> Option<&'static Shared> {
    // SAFETY: set once at server start and never freed; every field is atomic or behind a lock.
    unsafe { SHARED.load(Ordering::Acquire).as_ref() }
}

/// The shared memory, or the error that tells how to preload the library. Every verb comes through here.
pub fn required() -> &'static Shared {
    match get() {
        Some(shared) => shared,
        None => errors::not_preloaded(),
    }
}

/// An LWLock held until dropped; released on every path.
pub struct Held(*mut pg_sys::LWLock);

/// Takes a lock. Never hold one across SQL.
pub fn lock(which: Lock) -> Held {
    let array = LOCK_ARRAY.load(Ordering::Acquire);
    // SAFETY: the tranche has LOCKS locks and lives as long as the server.
    unsafe {
        let lock = &raw mut (*array.add(which as usize)).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        Held(lock)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: an error's clean-up releases all LWLocks itself and resets the holdoff count, after which this one is no longer ours.
        unsafe {
            if pg_sys::InterruptHoldoffCount > 0 {
                pg_sys::LWLockRelease(self.0);
            }
        }
    }
}

/// This database and this instance of the extension: what names things of ours in shared memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instance {
    /// Database oid.
    pub database: u32,
    /// Oid of the schema `stint`, new with every CREATE EXTENSION.
    pub schema: u32,
}

impl Instance {
    /// The one this session works in.
    pub fn here() -> Self {
        // SAFETY: set for every backend connected to a database.
        let database = unsafe { pg_sys::MyDatabaseId };
        Instance { database: database.to_u32(), schema: crate::spi::home().schema.to_u32() }
    }
}

/// Settings that size shared memory, read once at start.
fn budget_capacity() -> usize {
    guc::max_budgets()
}

/// The most budgets whose live usage has room where no other database has any: one entry is the mark that they are loaded.
pub fn budgets_of_one_database() -> usize {
    budget_capacity().saturating_sub(1)
}
