//! What a maintenance worker does, in order. A step is bounded, runs in a transaction of its own as the owner of the extension, under READ COMMITTED, and takes
//! no transaction id when it finds nothing to do. It returns whether there may be more to do: then the next round follows at once. A step that fails is told in
//! the log and in `stint.maintenance`, and the others go on. A database in which nothing happens should cost next to nothing, so steps that know without a
//! query that nothing is there for them have no transaction.

use super::doorbells;
use crate::{accounting, budget, changelog, history, queue, record, watch};
use std::ffi::CStr;

/// When a step runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// In every round, that is every `stint.naptime`.
    Round,
    /// In every round, and before the doorbells are rung: what has to keep up with a busy queue.
    RoundAndBell,
    /// When a doorbell was rung, at most once in `stint.doorbell_interval`.
    Bell,
}

/// One step.
pub struct Step {
    /// Its name in the log, in `stint.maintenance` and in `pg_stat_activity`.
    pub name: &'static CStr,
    /// When it runs.
    pub when: When,
    /// Whether there may be something to do, as far as this process and shared memory know. Asked in one transaction for all steps of a round.
    pub due: fn() -> bool,
    /// The work; true if it did something and there may be more.
    pub run: fn() -> bool,
}

/// All steps. What clients are told of by a doorbell stands before the doorbells.
pub const STEPS: &[Step] = &[
    Step { name: c"load budgets", when: When::Round, due: budget::live::due, run: budget::live::step },
    Step { name: c"heads", when: When::Round, due: queue::lines::due, run: queue::lines::step },
    Step { name: c"sweep", when: When::Round, due: queue::sweep::due, run: queue::sweep::step },
    Step { name: c"follow up", when: When::Round, due: queue::flow::leave::due, run: queue::flow::leave::step },
    Step { name: c"promote", when: When::Round, due: queue::promote::due, run: queue::promote::step },
    Step { name: c"schedules", when: When::Round, due: queue::schedule::due, run: queue::schedule::step },
    Step { name: c"expire keys", when: When::Round, due: queue::keys::due, run: queue::keys::step },
    Step { name: c"tidy lanes", when: When::Round, due: queue::shares::due, run: queue::shares::step },
    Step { name: c"correct predictions", when: When::Round, due: queue::factors::due, run: queue::factors::step },
    Step { name: c"history ahead", when: When::Round, due: history::ahead::due, run: history::ahead::step },
    Step { name: c"history retention", when: When::Round, due: history::retention::due, run: history::retention::step },
    Step { name: c"expire events", when: When::Round, due: history::retention::events_due, run: history::retention::let_go_of_events },
    Step { name: c"project", when: When::RoundAndBell, due: record::project::due, run: record::project::step },
    Step { name: c"expire record", when: When::Round, due: record::retention::due, run: record::retention::step },
    Step { name: c"tick", when: When::RoundAndBell, due: changelog::tick::due, run: changelog::tick::step },
    Step { name: c"tick task events", when: When::RoundAndBell, due: changelog::feed::due, run: changelog::feed::step },
    Step { name: c"trim task events", when: When::Round, due: changelog::feed::trim_due, run: changelog::feed::trim_step },
    Step { name: c"trim consumers", when: When::Round, due: changelog::consumer::due, run: changelog::consumer::step },
    Step { name: c"expire changes", when: When::Round, due: changelog::retention::due, run: changelog::retention::step },
    Step { name: c"trim watches", when: When::Round, due: watch::log::due, run: watch::log::step },
    Step { name: c"roll up", when: When::RoundAndBell, due: accounting::roll_up::due, run: accounting::roll_up::step },
    Step { name: c"doorbells", when: When::Bell, due: || true, run: doorbells::step },
];
