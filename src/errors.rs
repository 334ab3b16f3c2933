//! Every error the extension raises, by name: a standard SQLSTATE that fits, a message naming the object, and a HINT with what to do.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// An error on its way to the client.
pub struct Fault {
    code: PgSqlErrorCode,
    message: String,
    detail: Option<String>,
    hint: Option<String>,
}

impl Fault {
    /// An error with its SQLSTATE and message.
    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Fault { code, message: message.into(), detail: None, hint: None }
    }

    /// What was seen, for the reader of a log.
    pub fn detail(mut self, text: impl Into<String>) -> Self {
        self.detail = Some(text.into());
        self
    }

    /// What to do.
    pub fn hint(mut self, text: impl Into<String>) -> Self {
        self.hint = Some(text.into());
        self
    }

    /// Raises it: the statement ends here.
    pub fn raise(self) -> ! {
        let mut report = ErrorReport::new(self.code, self.message, "pg_stint");
        if let Some(detail) = self.detail {
            report = report.set_detail(detail);
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(hint);
        }
        report.report(PgLogLevel::ERROR);
        unreachable!("an ERROR report does not return")
    }
}

/// A broken assumption of ours.
pub fn internal(what: &str) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, format!("pg_stint: {what}"))
        .hint("This is a defect; please report it with the statement.")
        .raise()
}

/// The schema is missing in this database.
pub fn not_installed() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_INVALID_SCHEMA_NAME, "pg_stint is not installed in this database")
        .hint("Run CREATE EXTENSION pg_stint.")
        .raise()
}

/// The library was not preloaded, so there is no shared memory.
pub fn not_preloaded() -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "pg_stint must be loaded when the server starts")
        .hint("Add this line to postgresql.conf and restart the server: shared_preload_libraries = 'pg_stint'")
        .raise()
}

/// An argument that must be given was null.
pub fn missing(argument: &str, hint: &str) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED, format!("argument \"{argument}\" must not be null")).hint(hint).raise()
}

/// An argument's value is out of its range.
pub fn invalid(message: impl Into<String>, hint: impl Into<String>) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, message).hint(hint).raise()
}

/// A limit set by a setting was passed.
pub fn over_limit(message: impl Into<String>, setting: &str) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, message).hint(format!("Ask for less, or raise the setting {setting}.")).raise()
}

/// No such object; `similar` is the nearest name there is.
pub fn unknown(kind: &str, name: &str, similar: Option<&str>, hint: &str) -> ! {
    let hint = match similar {
        Some(near) => format!("Did you mean \"{near}\"? {hint}"),
        None => hint.to_string(),
    };
    Fault::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("{kind} \"{name}\" does not exist")).hint(hint).raise()
}

/// An object of that name is there already.
pub fn exists(kind: &str, name: &str, hint: &str) -> ! {
    Fault::new(PgSqlErrorCode::ERRCODE_DUPLICATE_OBJECT, format!("{kind} \"{name}\" already exists")).hint(hint).raise()
}

/// Whether an error may be gone at the next try: it says nothing about what was tried.
pub fn passes_by_itself(code: PgSqlErrorCode) -> bool {
    // The first two characters of an SQLSTATE, as PostgreSQL packs it.
    let class = |code: PgSqlErrorCode| code as i32 & 0xfff;
    code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE
        || [
            PgSqlErrorCode::ERRCODE_TRANSACTION_ROLLBACK,
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
            PgSqlErrorCode::ERRCODE_OPERATOR_INTERVENTION,
            PgSqlErrorCode::ERRCODE_SYSTEM_ERROR,
        ]
        .into_iter()
        .any(|like| class(like) == class(code))
}
