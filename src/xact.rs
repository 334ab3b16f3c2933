//! What happens when a transaction ends. Whatever a verb did in shared memory is remembered here with its subtransaction, made final at commit, after the
//! commit is visible, and undone at abort, also of a savepoint and of a terminated session. Nothing called at commit allocates, runs SQL or raises: an error
//! there is a server PANIC. Before commit all that may be done: watches are evaluated there.

use crate::changelog::watched;
use crate::errors::Fault;
use crate::shmem::{bells, budgets, config, fair, heads, waiters, workers};
use crate::watch;
use pgrx::pg_sys::{SubXactEvent, XactEvent};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::os::raw::c_void;

/// Things a transaction has done, each with the subtransaction that did it.
pub struct Pending<T>(RefCell<Vec<(pg_sys::SubTransactionId, T)>>);

impl<T: Copy> Pending<T> {
    /// An empty list.
    pub const fn new() -> Self {
        Pending(RefCell::new(Vec::new()))
    }

    /// Makes room for `more` entries, so that the pushes that follow a change of shared memory cannot fail.
    pub fn make_room(&self, more: usize) {
        self.0.borrow_mut().reserve(more);
    }

    /// Remembers `what` under the current subtransaction.
    pub fn push(&self, what: T) {
        // SAFETY: reads a counter of this backend.
        let current = unsafe { pg_sys::GetCurrentSubTransactionId() };
        self.0.borrow_mut().push((current, what));
    }

    /// Shows everything remembered.
    pub fn each(&self, show: impl FnMut(&T)) {
        self.0.borrow().iter().map(|(_, what)| what).for_each(show);
    }

    /// Lets `change` alter everything remembered.
    pub fn each_mut(&self, change: impl FnMut(&mut T)) {
        self.0.borrow_mut().iter_mut().map(|(_, what)| what).for_each(change);
    }

    /// Whether `like` holds for something remembered.
    pub fn any(&self, like: impl Fn(&T) -> bool) -> bool {
        self.0.borrow().iter().any(|(_, what)| like(what))
    }

    /// Whether `like` holds for something the current subtransaction remembered.
    pub fn any_here(&self, like: impl Fn(&T) -> bool) -> bool {
        // SAFETY: reads a counter of this backend.
        let current = unsafe { pg_sys::GetCurrentSubTransactionId() };
        self.0.borrow().iter().any(|(sub, what)| *sub == current && like(what))
    }

    /// Hands everything to `each` and forgets it. The memory stays, so nothing is freed in a commit callback.
    pub fn drain(&self, mut each: impl FnMut(&T)) {
        let mut list = self.0.borrow_mut();
        list.iter().for_each(|(_, what)| each(what));
        list.clear();
    }

    fn reassign(&self, from: pg_sys::SubTransactionId, to: pg_sys::SubTransactionId) {
        self.0.borrow_mut().iter_mut().filter(|(sub, _)| *sub == from).for_each(|(sub, _)| *sub = to);
    }

    fn drain_sub(&self, sub: pg_sys::SubTransactionId, mut each: impl FnMut(&T)) {
        self.0.borrow_mut().retain(|(of, what)| {
            if *of == sub {
                each(what);
            }
            *of != sub
        });
    }
}

/// Registers the callbacks. Called once, from `_PG_init` in the postmaster.
pub fn init() {
    // SAFETY: both functions have the callbacks' signatures and live as long as the library.
    unsafe {
        pg_sys::RegisterXactCallback(Some(on_xact), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(on_subxact), std::ptr::null_mut());
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_xact(event: XactEvent::Type, _arg: *mut c_void) {
    match event {
        XactEvent::XACT_EVENT_PRE_COMMIT => watch::fire::before_commit(),
        XactEvent::XACT_EVENT_PRE_PREPARE => {
            watch::fire::before_commit();
            refuse_prepare();
        }
        XactEvent::XACT_EVENT_COMMIT => {
            budgets::PENDING.with(|p| p.drain(budgets::commit));
            fair::PENDING.with(|p| p.drain(fair::commit));
            config::PENDING.with(|p| p.drain(config::commit));
            config::LANES.with(|p| p.drain(config::lanes_changed));
            heads::PENDING.with(|p| p.drain(heads::commit));
            heads::TAKEN.with(|p| p.drain(|_| ()));
            heads::GONE.with(|p| p.drain(heads::remove));
            heads::RESCANS.with(|p| p.drain(heads::rescanned));
            // Before the bells: who waits for a task should have the core that becomes free, not the maintenance worker.
            waiters::PENDING.with(|p| p.drain(waiters::commit));
            bells::PENDING.with(|p| p.drain(bells::commit));
            workers::PENDING.with(|p| p.drain(workers::commit));
        }
        XactEvent::XACT_EVENT_ABORT => {
            budgets::PENDING.with(|p| p.drain(budgets::abort));
            fair::PENDING.with(|p| p.drain(fair::abort));
            config::PENDING.with(|p| p.drain(config::abort));
            config::LANES.with(|p| p.drain(|_| ()));
            heads::look_away();
            heads::PENDING.with(|p| p.drain(|_| ()));
            heads::TAKEN.with(|p| p.drain(heads::commit));
            heads::GONE.with(|p| p.drain(|_| ()));
            heads::RESCANS.with(|p| p.drain(heads::rescanned));
            bells::PENDING.with(|p| p.drain(|_| ()));
            waiters::PENDING.with(|p| p.drain(waiters::abort));
            waiters::pass_on();
            workers::PENDING.with(|p| p.drain(|_| ()));
            watched::PENDING.with(|p| p.drain(|_| ()));
        }
        XactEvent::XACT_EVENT_PREPARE => {
            heads::prepared();
            heads::PENDING.with(|p| p.drain(heads::commit));
            heads::TAKEN.with(|p| p.drain(heads::commit));
            heads::GONE.with(|p| p.drain(heads::remove));
            heads::RESCANS.with(|p| p.drain(heads::rescanned));
            bells::PENDING.with(|p| p.drain(|_| ()));
            waiters::PENDING.with(|p| p.drain(|_| ()));
            workers::PENDING.with(|p| p.drain(|_| ()));
        }
        _ => {}
    }
}

/// No callback reports COMMIT PREPARED, so what must be settled at commit cannot be prepared.
fn refuse_prepare() {
    let what = if budgets::PENDING.with(|p| p.any(|_| true)) {
        "claimed or ended a task that draws on a budget"
    } else if fair::PENDING.with(|p| p.any(|_| true)) {
        "claimed or ended a task of a fair queue"
    } else if config::PENDING.with(|p| p.any(|_| true)) || config::LANES.with(|p| p.any(|_| true)) {
        "changed a queue, a lane or a budget"
    } else {
        return;
    };
    Fault::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("cannot PREPARE a transaction that {what}"))
        .hint("Use COMMIT, or do this in a transaction of its own.")
        .raise()
}

#[pg_guard]
unsafe extern "C-unwind" fn on_subxact(event: SubXactEvent::Type, me: pg_sys::SubTransactionId, parent: pg_sys::SubTransactionId, _arg: *mut c_void) {
    match event {
        SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => {
            budgets::PENDING.with(|p| p.reassign(me, parent));
            fair::PENDING.with(|p| p.reassign(me, parent));
            config::PENDING.with(|p| p.reassign(me, parent));
            config::LANES.with(|p| p.reassign(me, parent));
            heads::PENDING.with(|p| p.reassign(me, parent));
            heads::TAKEN.with(|p| p.reassign(me, parent));
            heads::GONE.with(|p| p.reassign(me, parent));
            heads::RESCANS.with(|p| p.reassign(me, parent));
            bells::PENDING.with(|p| p.reassign(me, parent));
            waiters::PENDING.with(|p| p.reassign(me, parent));
            workers::PENDING.with(|p| p.reassign(me, parent));
            watched::PENDING.with(|p| p.reassign(me, parent));
        }
        SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            budgets::PENDING.with(|p| p.drain_sub(me, budgets::abort));
            fair::PENDING.with(|p| p.drain_sub(me, fair::abort));
            config::PENDING.with(|p| p.drain_sub(me, config::abort));
            config::LANES.with(|p| p.drain_sub(me, |_| ()));
            heads::look_away();
            heads::PENDING.with(|p| p.drain_sub(me, |_| ()));
            heads::TAKEN.with(|p| p.drain_sub(me, heads::commit));
            heads::GONE.with(|p| p.drain_sub(me, |_| ()));
            heads::RESCANS.with(|p| p.drain_sub(me, heads::rescanned));
            bells::PENDING.with(|p| p.drain_sub(me, |_| ()));
            waiters::PENDING.with(|p| p.drain_sub(me, waiters::abort));
            waiters::pass_on();
            workers::PENDING.with(|p| p.drain_sub(me, |_| ()));
            watched::PENDING.with(|p| p.drain_sub(me, |_| ()));
        }
        _ => {}
    }
}
