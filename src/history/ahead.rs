//! Makes partitions ahead of their time: for each class that a queue has, the one of now and the next. An enqueue that finds none makes it itself, so this only
//! spares it the time.

use super::{make, ms, relation};
use crate::changelog::epoch;
use crate::errors::Fault;
use crate::guc;
use crate::savepoint;
use crate::settings::Settings;
use crate::shmem::{self, config};
use crate::spi::{self, Session, Statement, arg};
use crate::values::{Instant, SECOND};
use pgrx::prelude::*;
use std::cell::Cell;
use std::ffi::CString;
use stint_core::history::{Leaf, PARTS};

static CLASSES: Statement = Statement::new(c"select distinct q.history_class::int from stint.queue_config q", &[]);

/// Tables that could not be attached when they were made, classes first.
static LOOSE: Statement = Statement::new(
    c"select c.relname::text
      from pg_catalog.pg_class c
      where c.relnamespace = $1 and not c.relispartition and c.relkind in ('r', 'p')
        and c.relname ~ '^task_(facts|attempts|outcomes)_c[0-9]+(_[0-9]+)?$'
      order by c.relkind, c.relname",
    &[pg_sys::OIDOID],
);

/// How often the worker looks while nothing changes.
const EVERY: i64 = 10 * SECOND;

thread_local! {
    /// The configuration's generation when all was there, and when to look again.
    static LOOKED: Cell<(u64, Instant)> = const { Cell::new((0, Instant(0))) };
}

/// The settings under which history is kept up: a lock that is not to be had soon is left for later.
pub fn impatient() -> Settings {
    let timeout = CString::new(format!("{}ms", guc::history_lock_timeout_ms())).unwrap_or_default();
    Settings::set(&[(c"lock_timeout", timeout.as_c_str())])
}

/// What became of a round.
#[derive(Default)]
pub struct Made {
    /// How many leaves were made.
    pub leaves: i32,
    /// Whether something is still missing.
    pub missing: bool,
    /// The first error but that a lock was not to be had.
    error: Option<(PgSqlErrorCode, String)>,
}

impl Made {
    /// Does one thing in a savepoint; true if it was done.
    fn attempt(&mut self, work: impl FnOnce(&Session)) -> bool {
        let done = savepoint::isolated(|| {
            let _settings = impatient();
            spi::connect(work);
        });
        if let Err((code, why)) = done {
            self.missing = true;
            if code != PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE {
                self.error.get_or_insert((code, why));
            }
            return false;
        }
        true
    }
}

/// Makes what is missing; an error that stands in the way is raised where nothing could be made.
pub fn make(now: Instant) -> Made {
    let (wanted, loose) = spi::connect(|session| {
        if !epoch::own(session) {
            return (Vec::new(), Vec::new());
        }
        let rows = session.run(&CLASSES, &[]);
        // While a dump is restored there is no queue until all its tables are in their places.
        if rows.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let wanted: Vec<Leaf> = (0..rows.len())
            .filter_map(|at| Leaf::at(u8::try_from(rows.must::<i32>(at, 1)).ok()?, ms(now)))
            .flat_map(|leaf| [leaf, leaf.next()])
            .filter(|leaf| PARTS.iter().any(|part| relation(&format!("{part}_{}", leaf.suffix())).is_none()))
            .collect();
        let rows = session.run(&LOOSE, &[arg(pg_sys::Oid::from(shmem::Instance::here().schema))]);
        (wanted, (0..rows.len()).map(|at| rows.must(at, 1)).collect::<Vec<String>>())
    });
    let mut made = Made::default();
    for leaf in wanted {
        made.leaves += i32::from(made.attempt(|session| make::make(session, leaf)));
    }
    for table in loose {
        made.attempt(|session| make::attach_later(session, &table));
    }
    if let Some((code, why)) = made.error.take_if(|_| made.leaves == 0) {
        Fault::new(code, why).raise()
    }
    made
}

/// Whether it is time again, or queues have changed.
pub fn due() -> bool {
    let (known, next) = LOOKED.get();
    known != config::generation(shmem::required()) || Instant::now() >= next
}

/// One round for the maintenance worker.
pub fn step() -> bool {
    let now = Instant::now();
    let generation = config::generation(shmem::required());
    let missing = make(now).missing;
    LOOKED.set((generation, now.plus(if missing { SECOND } else { EVERY })));
    false
}
