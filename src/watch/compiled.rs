//! The watches of a table, compiled into one statement that finds what they fire for; kept per backend.

use super::catalogue::Server;
use crate::changelog::{capture, images, reader, watched};
use crate::errors::{self, Fault};
use crate::queue::enqueue::Request;
use crate::queue::flow::enter::OnFailure;
use crate::spi::{Prepared, Rows, Session, Statement, arg};
use crate::values::{RawInterval, RawJsonb};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use stint_core::watch::{self as language, Catalogue, Compiled, Place, Why};

static WATCHES: Statement = Statement::new(
    c"SELECT w.watch::text, w.condition, w.rearm, w.into_queue::text, w.paused, w.created_by::text
      FROM stint.watch_config w WHERE w.relation = $1 ORDER BY w.watch",
    &[pg_sys::OIDOID],
);

/// A watch in force.
pub struct Watch {
    /// Its name.
    pub name: String,
    /// The queue of its tasks.
    pub queue: String,
    /// Whether it waits for keys to be armed again.
    pub rearms: bool,
    /// The role that declared it.
    pub declarer: String,
    /// Why it cannot be evaluated.
    pub broken: Option<String>,
}

/// The watches of one table.
pub struct Set {
    version: u64,
    /// Schema and name of the table as SQL writes them.
    pub relation: String,
    /// By number.
    pub watches: Vec<Watch>,
    /// Finds what they fire for: two answers of each watch that is not broken, in their order.
    pub find: Option<Prepared>,
}

/// The images of a net change in the statement.
const PLACE: Place<'static> = Place { before: "n.before", after: "n.after" };

thread_local! {
    static KEPT: RefCell<HashMap<pg_sys::Oid, Rc<Set>>> = RefCell::new(HashMap::new());
}

/// The set that is still valid.
pub fn kept(relation: pg_sys::Oid) -> Option<Rc<Set>> {
    KEPT.with_borrow(|kept| kept.get(&relation).filter(|set| set.version == watched::version()).cloned())
}

/// Keeps a set.
pub fn keep(relation: pg_sys::Oid, set: &Rc<Set>) {
    let old = KEPT.with_borrow_mut(|kept| kept.insert(relation, Rc::clone(set)));
    drop(old);
}

/// A condition's fault as an error of the server.
pub fn fault(argument: &str, text: &str, fault: &language::Fault) -> Fault {
    let code = match fault.why {
        Why::Syntax => PgSqlErrorCode::ERRCODE_SYNTAX_ERROR,
        Why::Column => PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
        Why::Type => PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
        Why::Constant => PgSqlErrorCode::ERRCODE_INVALID_TEXT_REPRESENTATION,
        Why::Limit => PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
    };
    Fault::new(code, format!("argument \"{argument}\" is no condition {}: {}", fault.place(text), fault.message)).hint(fault.hint.clone())
}

/// What a watch's two texts compile to; the argument that is at fault, its text and the fault where they do not.
fn compile<'a>(
    catalogue: &dyn Catalogue,
    condition: &'a str,
    rearm: Option<&'a str>,
) -> Result<(Compiled, Option<String>), (&'static str, &'a str, language::Fault)> {
    let condition = language::parse(condition)
        .and_then(|parsed| language::condition(&parsed, catalogue, PLACE))
        .map_err(|fault| ("condition", condition, fault))?;
    let rearm = rearm
        .map(|text| language::parse(text).and_then(|parsed| language::rearm(&parsed, catalogue, PLACE)).map_err(|fault| ("rearm", text, fault)))
        .transpose()?;
    Ok((condition, rearm))
}

/// Checks the texts of a watch that is to be declared, to the point that PostgreSQL has planned them.
pub fn check(session: &Session, relation: pg_sys::Oid, condition: &str, rearm: Option<&str>) {
    let server = Server::new(session, relation);
    let _pinned = images::Pinned::set();
    match compile(&server, condition, rearm) {
        Ok((condition, rearm)) => {
            let find = Prepared::new(&statement(&[part(0, "", &condition.sql, rearm.as_deref(), false)]), TYPES);
            // Finds nothing; constants are folded now.
            session.run_own(&find, &[arg(0), arg(relation), arg(vec![0]), arg(0_i64), arg(0_i64)]);
        }
        Err((argument, text, problem)) => fault(argument, text, &problem).raise(),
    }
}

/// The watches of a table without what they compile to.
pub fn names(session: &Session, relation: pg_sys::Oid) -> Vec<Watch> {
    let rows = session.run(&WATCHES, &[arg(relation)]);
    (0..rows.len()).map(|row| watch(&rows, row, None)).collect()
}

fn watch(rows: &Rows, row: usize, broken: Option<String>) -> Watch {
    Watch { name: rows.must(row, 1), queue: rows.must(row, 4), rearms: rows.get::<String>(row, 3).is_some(), declarer: rows.must(row, 6), broken }
}

/// Compiles the watches of a table as they are now. What has become of no use since it was declared (a column is gone) is marked broken.
pub fn load(session: &Session, relation: pg_sys::Oid) -> Set {
    watched::meet(relation);
    let version = watched::version();
    let rows = session.run(&WATCHES, &[arg(relation)]);
    let server = Server::new(session, relation);
    let _pinned = images::Pinned::set();
    let mut parts = Vec::new();
    let watches = (0..rows.len())
        .map(|row| {
            let (name, condition, rearm): (String, String, Option<String>) = (rows.must(row, 1), rows.must(row, 2), rows.get(row, 3));
            let broken = match compile(&server, &condition, rearm.as_deref()) {
                Ok((condition, rearm)) => {
                    parts.push(part(row, &name, &condition.sql, rearm.as_deref(), rows.must(row, 5)));
                    None
                }
                Err((argument, text, problem)) => {
                    Some(format!("its {argument} is not understood any more {}: {}", problem.place(text), problem.message))
                }
            };
            watch(&rows, row, broken)
        })
        .collect();
    let find = (!parts.is_empty()).then(|| Prepared::new(&statement(&parts), TYPES));
    Set { version, relation: capture::name_of(session, relation).unwrap_or_default(), watches, find }
}

/// `$1` the epoch, `$2` the table, `$3` the watches to evaluate, `$4` and `$5` the first and the last number of a change.
const TYPES: &[pg_sys::Oid] = &[pg_sys::INT4OID, pg_sys::OIDOID, pg_sys::INT4ARRAYOID, pg_sys::INT8OID, pg_sys::INT8OID];

/// Whether one watch fires, and whether it arms a key again: two expressions.
fn part(number: usize, name: &str, condition: &str, rearm: Option<&str>, paused: bool) -> String {
    // All in the CASE: a condition that cannot be evaluated for one change must not be evaluated where another is asked for.
    let when = |sql: &str| {
        format!(
            "CASE WHEN n.last AND n.before IS DISTINCT FROM n.after AND {number} = ANY ($3) AND n.seq BETWEEN $4 AND $5 THEN {sql} ELSE false END"
        )
    };
    let fires = if paused { "false".to_string() } else { when(condition) };
    let arms = rearm.map_or("false".to_string(), |rearm| {
        // Which keys are disarmed is asked first: they are few.
        let disarmed = format!("EXISTS (SELECT FROM stint.watch_disarmed d WHERE d.watch = {} AND d.key = n.key)", reader::quote(name));
        when(&format!("CASE WHEN {disarmed} THEN {rearm} ELSE false END"))
    });
    format!("{fires}, {arms}")
}

/// The net changes of this transaction, one for each key, for which something fires or arms again, with the two answers of each of `parts`. Not a join with VALUES,
/// which PostgreSQL makes ready anew for every row; and behind OFFSET, so that each condition is evaluated once.
fn statement(parts: &[String]) -> String {
    format!(
        "SELECT w.seq, w.key, w.before, w.after, w.answers
         FROM (SELECT n.seq, n.key, n.before, n.after, ARRAY[{}] AS answers
               FROM (SELECT c.key, c.seq, first_value(c.before) OVER k AS before, c.after, lead(c.seq) OVER k IS NULL AS last
                     FROM stint.change_log c
                     WHERE c.epoch = $1 AND c.xid = pg_current_xact_id() AND c.relation = $2
                     WINDOW k AS (PARTITION BY c.key ORDER BY c.seq)) n
               OFFSET 0) w
         WHERE true = ANY (w.answers)
         ORDER BY w.seq",
        parts.join(", ")
    )
}

static TASK: Statement = Statement::new(
    c"SELECT w.payload, w.priority, w.delay, w.agent::text, w.tokens, w.budgets::text[], w.group_key::text, w.max_attempts, w.lease_for, w.labels
      FROM stint.watch_config w WHERE w.watch = $1",
    &[pg_sys::TEXTOID],
);

/// What the tasks of a watch have in common.
pub struct Task {
    rows: Rows,
    /// Budgets it draws on.
    pub budgets: Vec<String>,
}

impl Task {
    /// Reads it.
    pub fn load(session: &Session, watch: &str) -> Self {
        let rows = session.run(&TASK, &[arg(watch)]);
        if rows.is_empty() {
            errors::internal("a watch vanished under the lock of its table");
        }
        let budgets = rows.must(0, 6);
        Task { rows, budgets }
    }

    /// The declared part of the payload.
    pub fn payload(&self) -> Option<RawJsonb> {
        self.rows.get(0, 1)
    }

    /// A task with that payload and that key.
    pub fn request(&self, payload: RawJsonb, key: String) -> Request {
        Request {
            payload,
            priority: self.rows.must(0, 2),
            run_at: None,
            delay: self.rows.get::<RawInterval>(0, 3),
            key: Some(key),
            agent: self.rows.get(0, 4),
            tokens: self.rows.get(0, 5),
            budgets: Vec::new(),
            group_key: self.rows.get(0, 7),
            depends_on: Vec::new(),
            on_dependency_failure: OnFailure::Fail,
            max_attempts: self.rows.get(0, 8),
            lease_for: self.rows.get(0, 9),
            labels: self.rows.get(0, 10),
            max_run_time: None,
        }
    }
}
