//! What a maintenance worker does, in order. A step is bounded, runs in a transaction of its own as the owner of the extension, under READ COMMITTED, and takes
//! no transaction id when it finds nothing to do. It returns whether there may be more to do: then the next round follows at once. A step that fails is told in
//! the log and in `stint.maintenance`, and the others go on.

use super::doorbells;
use crate::{accounting, budget, changelog, history, queue, record, watch};

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
    pub name: &'static str,
    /// When it runs.
    pub when: When,
    /// The work; true if it did something and there may be more.
    pub run: fn() -> bool,
}

/// All steps. What clients are told of by a doorbell stands before the doorbells.
pub const STEPS: &[Step] = &[
    Step { name: "load budgets", when: When::Round, run: budget::live::step },
    Step { name: "heads", when: When::Round, run: queue::lines::step },
    Step { name: "sweep", when: When::Round, run: queue::sweep::step },
    Step { name: "follow up", when: When::Round, run: queue::flow::leave::step },
    Step { name: "promote", when: When::Round, run: queue::promote::step },
    Step { name: "schedules", when: When::Round, run: queue::schedule::step },
    Step { name: "expire keys", when: When::Round, run: queue::keys::step },
    Step { name: "tidy lanes", when: When::Round, run: queue::shares::step },
    Step { name: "correct predictions", when: When::Round, run: queue::factors::step },
    Step { name: "history ahead", when: When::Round, run: history::make_ahead },
    Step { name: "history retention", when: When::Round, run: history::retention::step },
    Step { name: "expire events", when: When::Round, run: history::retention::let_go_of_events },
    Step { name: "project", when: When::RoundAndBell, run: record::project::step },
    Step { name: "expire record", when: When::Round, run: record::retention::step },
    Step { name: "tick", when: When::RoundAndBell, run: changelog::tick::step },
    Step { name: "tick task events", when: When::RoundAndBell, run: changelog::feed::step },
    Step { name: "trim task events", when: When::Round, run: changelog::feed::trim_step },
    Step { name: "trim consumers", when: When::Round, run: changelog::consumer::step },
    Step { name: "expire changes", when: When::Round, run: changelog::retention::step },
    Step { name: "trim watches", when: When::Round, run: watch::log::step },
    Step { name: "roll up", when: When::RoundAndBell, run: accounting::roll_up::step },
    Step { name: "doorbells", when: When::Bell, run: doorbells::step },
];
