//! The tables that every task passes through, as `direct` reads and writes them. Columns stand in the order in which the verbs' statements name them, so that one
//! list of values serves both.

use crate::direct::Table;
use crate::history::LeafTable;
use pgrx::pg_sys;

/// `stint.place_ready`.
pub mod ready {
    use super::*;

    /// The table.
    pub static TABLE: Table = Table::new(
        "place_ready",
        &[
            ("queue", pg_sys::TEXTOID),
            ("id", pg_sys::UUIDOID),
            ("lane", pg_sys::INT4OID),
            ("priority", pg_sys::INT4OID),
            ("tokens", pg_sys::INT8OID),
            ("attempt", pg_sys::INT4OID),
            ("counted", pg_sys::INT4OID),
            ("seq", pg_sys::INT8OID),
            ("agent", pg_sys::TEXTOID),
        ],
    );
    pub const ID: usize = 1;
    pub const LANE: usize = 2;
    pub const PRIORITY: usize = 3;
    pub const TOKENS: usize = 4;
    pub const ATTEMPT: usize = 5;
    pub const COUNTED: usize = 6;
    pub const SEQ: usize = 7;
    pub const AGENT: usize = 8;
    /// The index that claims go along.
    pub const ORDER: [usize; 3] = [LANE, PRIORITY, SEQ];
}

/// `stint.place_blocked`.
pub mod blocked {
    use super::*;

    /// The table.
    pub static TABLE: Table = Table::new(
        "place_blocked",
        &[
            ("queue", pg_sys::TEXTOID),
            ("id", pg_sys::UUIDOID),
            ("lane", pg_sys::INT4OID),
            ("priority", pg_sys::INT4OID),
            ("tokens", pg_sys::INT8OID),
            ("attempt", pg_sys::INT4OID),
            ("counted", pg_sys::INT4OID),
            ("run_at", pg_sys::TIMESTAMPTZOID),
            ("group_key", pg_sys::TEXTOID),
            ("group_seq", pg_sys::INT8OID),
        ],
    );
    pub const ID: usize = 1;
    /// The primary key.
    pub const KEY: [usize; 2] = [0, ID];
}

/// `stint.place_running`.
pub mod running {
    use super::*;

    /// The table.
    pub static TABLE: Table = Table::new(
        "place_running",
        &[
            ("queue", pg_sys::TEXTOID),
            ("id", pg_sys::UUIDOID),
            ("lease", pg_sys::UUIDOID),
            ("lane", pg_sys::INT4OID),
            ("priority", pg_sys::INT4OID),
            ("seq", pg_sys::INT8OID),
            ("tokens", pg_sys::INT8OID),
            ("attempt", pg_sys::INT4OID),
            ("counted", pg_sys::INT4OID),
            ("started_at", pg_sys::TIMESTAMPTZOID),
            ("expires_at", pg_sys::TIMESTAMPTZOID),
            ("budgets", pg_sys::INT4ARRAYOID),
            ("reserved", pg_sys::INT8ARRAYOID),
            ("worker", pg_sys::TEXTOID),
            ("deadline", pg_sys::TIMESTAMPTZOID),
            ("share", pg_sys::INT8OID),
            ("cancel_requested", pg_sys::BOOLOID),
            ("reason", pg_sys::TEXTOID),
            ("run_id", pg_sys::TEXTOID),
            ("trace_id", pg_sys::TEXTOID),
            ("heartbeat_gap", pg_sys::INTERVALOID),
            ("heartbeat_at", pg_sys::TIMESTAMPTZOID),
            ("extended_until", pg_sys::TIMESTAMPTZOID),
            ("progress", pg_sys::JSONBOID),
        ],
    );
    pub const QUEUE: usize = 0;
    pub const ID: usize = 1;
    pub const LEASE: usize = 2;
    pub const LANE: usize = 3;
    pub const PRIORITY: usize = 4;
    pub const SEQ: usize = 5;
    pub const TOKENS: usize = 6;
    pub const ATTEMPT: usize = 7;
    pub const COUNTED: usize = 8;
    pub const STARTED_AT: usize = 9;
    pub const BUDGETS: usize = 11;
    pub const RESERVED: usize = 12;
    pub const WORKER: usize = 13;
    pub const SHARE: usize = 15;
    pub const CANCEL_REQUESTED: usize = 16;
    pub const REASON: usize = 17;
    pub const RUN_ID: usize = 18;
    pub const TRACE_ID: usize = 19;
    pub const HEARTBEAT_GAP: usize = 20;
    /// The primary key.
    pub const KEY: [usize; 2] = [QUEUE, ID];
}

/// `stint.task_facts`, by partition.
pub mod facts {
    use super::*;

    /// The table.
    pub static TABLE: LeafTable = LeafTable::new(
        "task_facts",
        &[
            ("queue", pg_sys::TEXTOID),
            ("id", pg_sys::UUIDOID),
            ("lane", pg_sys::INT4OID),
            ("priority", pg_sys::INT4OID),
            ("max_attempts", pg_sys::INT4OID),
            ("tokens", pg_sys::INT8OID),
            ("enqueued_at", pg_sys::TIMESTAMPTZOID),
            ("run_at", pg_sys::TIMESTAMPTZOID),
            ("lease_for", pg_sys::INTERVALOID),
            ("agent", pg_sys::TEXTOID),
            ("key", pg_sys::TEXTOID),
            ("group_key", pg_sys::TEXTOID),
            ("group_seq", pg_sys::INT8OID),
            ("depends_on", pg_sys::UUIDARRAYOID),
            ("on_dependency_failure", pg_sys::TEXTOID),
            ("labels", pg_sys::JSONBOID),
            ("payload", pg_sys::JSONBOID),
            ("max_run_time", pg_sys::INTERVALOID),
        ],
    );
    pub const QUEUE: usize = 0;
    pub const ID: usize = 1;
    pub const ENQUEUED_AT: usize = 6;
    pub const LEASE_FOR: usize = 8;
    pub const AGENT: usize = 9;
    pub const LABELS: usize = 15;
    pub const PAYLOAD: usize = 16;
    pub const MAX_RUN_TIME: usize = 17;
    /// The primary key.
    pub const KEY: [usize; 2] = [QUEUE, ID];
}

/// `stint.task_attempts`, by partition.
pub static ATTEMPTS: LeafTable = LeafTable::new(
    "task_attempts",
    &[
        ("queue", pg_sys::TEXTOID),
        ("id", pg_sys::UUIDOID),
        ("attempt", pg_sys::INT4OID),
        ("lease", pg_sys::UUIDOID),
        ("started_at", pg_sys::TIMESTAMPTZOID),
        ("ended_at", pg_sys::TIMESTAMPTZOID),
        ("ended", pg_sys::TEXTOID),
        ("worker", pg_sys::TEXTOID),
        ("heartbeat_gap", pg_sys::INTERVALOID),
        ("error", pg_sys::TEXTOID),
        ("run_id", pg_sys::TEXTOID),
        ("trace_id", pg_sys::TEXTOID),
        ("model", pg_sys::TEXTOID),
        ("input_tokens", pg_sys::INT8OID),
        ("cached_tokens", pg_sys::INT8OID),
        ("output_tokens", pg_sys::INT8OID),
        ("model_cost", pg_sys::NUMERICOID),
        ("compute_cost", pg_sys::NUMERICOID),
        ("confidence", pg_sys::FLOAT4OID),
        ("meta", pg_sys::JSONBOID),
        ("budgets", pg_sys::INT4ARRAYOID),
        ("reserved", pg_sys::INT8ARRAYOID),
        ("charged", pg_sys::INT8ARRAYOID),
        ("incarnation", pg_sys::INT4OID),
        ("xact", pg_sys::XID8OID),
    ],
);

/// `stint.task_outcomes`, by partition.
pub static OUTCOMES: LeafTable = LeafTable::new(
    "task_outcomes",
    &[
        ("queue", pg_sys::TEXTOID),
        ("id", pg_sys::UUIDOID),
        ("outcome", pg_sys::TEXTOID),
        ("attempt", pg_sys::INT4OID),
        ("lease", pg_sys::UUIDOID),
        ("finished_at", pg_sys::TIMESTAMPTZOID),
        ("error", pg_sys::TEXTOID),
        ("result", pg_sys::JSONBOID),
        ("incarnation", pg_sys::INT4OID),
        ("xact", pg_sys::XID8OID),
    ],
);

/// `stint.task_dependencies`.
pub mod dependencies {
    use super::*;

    /// The table.
    pub static TABLE: Table = Table::new(
        "task_dependencies",
        &[
            ("queue", pg_sys::TEXTOID),
            ("on_id", pg_sys::UUIDOID),
            ("id", pg_sys::UUIDOID),
            ("spot", pg_sys::INT4OID),
            ("on_failure", pg_sys::TEXTOID),
        ],
    );
    pub const ON_ID: usize = 1;
    /// The primary key.
    pub const KEY: [usize; 3] = [0, ON_ID, 2];
}
