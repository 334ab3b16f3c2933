//! `create_watch`, `drop_watch`, `pause_watch`, `resume_watch`.

use super::{compiled, fire, log};
use crate::changelog::{capture, epoch, watched};
use crate::errors::{self, Fault};
use crate::queue::config;
use crate::queue::enqueue::{self, Request};
use crate::queue::flow::enter::OnFailure;
use crate::spi::{self, Session, Statement, arg};
use crate::values::{RawInterval, RawJsonb};
use crate::{input, shmem};
use pgrx::prelude::*;
use stint_core::names::nearest;

static INSERT: Statement = Statement::new(
    c"INSERT INTO stint.watch_config
             (watch, relation, condition, rearm, into_queue, payload, priority, delay, agent, tokens, budgets, group_key, max_attempts, lease_for, labels, paused,
              comment, created_by)
      VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18::name)
      ON CONFLICT (watch) DO NOTHING",
    &[
        pg_sys::TEXTOID,
        pg_sys::OIDOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
        pg_sys::JSONBOID,
        pg_sys::INT4OID,
        pg_sys::INTERVALOID,
        pg_sys::TEXTOID,
        pg_sys::INT8OID,
        pg_sys::TEXTARRAYOID,
        pg_sys::TEXTOID,
        pg_sys::INT4OID,
        pg_sys::INTERVALOID,
        pg_sys::JSONBOID,
        pg_sys::BOOLOID,
        pg_sys::TEXTOID,
        pg_sys::TEXTOID,
    ],
);
static ROLE_NAME: Statement = Statement::new(c"SELECT r.rolname::text FROM pg_roles r WHERE r.oid = $1", &[pg_sys::OIDOID]);

/// A declared payload that is no object, or a member of it that the watch sets itself.
static PAYLOAD_FAULT: Statement = Statement::new(
    c"SELECT jsonb_typeof($1), CASE WHEN jsonb_typeof($1) = 'object' THEN (SELECT k FROM jsonb_object_keys($1) k WHERE k = ANY ($2) LIMIT 1) END",
    &[pg_sys::JSONBOID, pg_sys::TEXTARRAYOID],
);

/// The watch, its table, and whether a role ($2) may change it.
static FIND: Statement = Statement::new(
    c"SELECT c.relation::oid,
             EXISTS (SELECT FROM pg_roles r WHERE r.oid = $2 AND r.rolsuper)
             OR EXISTS (SELECT FROM pg_class t WHERE t.oid = c.relation AND pg_has_role($2, t.relowner, 'USAGE'))
             OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname = c.created_by AND pg_has_role($2, r.oid, 'USAGE'))
      FROM stint.watch_config c WHERE c.watch = $1",
    &[pg_sys::TEXTOID, pg_sys::OIDOID],
);
static NAMES: Statement = Statement::new(c"SELECT c.watch::text FROM stint.watch_config c ORDER BY c.watch", &[]);
static SET_PAUSED: Statement =
    Statement::new(c"UPDATE stint.watch_config c SET paused = $2 WHERE c.watch = $1 AND c.paused <> $2", &[pg_sys::TEXTOID, pg_sys::BOOLOID]);
static DROP: [Statement; 3] = [
    Statement::new(c"DELETE FROM stint.watch_log l WHERE l.watch = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"DELETE FROM stint.watch_disarmed d WHERE d.watch = $1", &[pg_sys::TEXTOID]),
    Statement::new(c"DELETE FROM stint.watch_config c WHERE c.watch = $1", &[pg_sys::TEXTOID]),
];

/// Waits for those who have written to a table and keeps others out until this transaction ends, so that each transaction meets the same watches from its first
/// change to its end.
fn keep_writers_out(relation: pg_sys::Oid) {
    // SAFETY: an ordinary relation lock.
    unsafe { pg_sys::LockRelationOid(relation, pg_sys::ShareRowExclusiveLock as i32) };
}

/// Has every backend compile the table's watches anew.
fn tell(relation: pg_sys::Oid) {
    // SAFETY: a look-up, and an invalidation message that is sent when this transaction commits.
    unsafe {
        if pg_sys::SearchSysCacheExists(pg_sys::SysCacheIdentifier::RELOID as i32, relation.into(), 0usize.into(), 0usize.into(), 0usize.into()) {
            pg_sys::CacheInvalidateRelcacheByRelid(relation);
        }
    }
}

fn check_payload(session: &Session, payload: Option<RawJsonb>) {
    let Some(payload) = payload else { return };
    let seen = session.run(&PAYLOAD_FAULT, &[arg(payload), arg(fire::ADDED.map(str::to_string).to_vec())]);
    let kind: String = seen.must(0, 1);
    let hint = format!("Give an object; the watch adds {} to it.", fire::ADDED.join(", "));
    if kind != "object" {
        errors::invalid(format!("argument \"payload\" is a JSON {kind}, not an object"), hint)
    }
    if let Some(member) = seen.get::<String>(0, 2) {
        errors::invalid(format!("argument \"payload\" has a member \"{member}\", which the watch sets itself"), hint)
    }
}

/// See the SQL COMMENT of stint.create_watch.
#[pg_extern(sql = false)]
fn create_watch(
    name: Option<&str>,
    relation: Option<pg_sys::Oid>,
    condition: Option<&str>,
    queue: Option<&str>,
    payload: Option<RawJsonb>,
    rearm: Option<&str>,
    priority: Option<i32>,
    delay: Option<RawInterval>,
    agent: Option<&str>,
    tokens: Option<i64>,
    budgets: Option<Vec<Option<String>>>,
    group_key: Option<&str>,
    max_attempts: Option<i32>,
    lease_for: Option<RawInterval>,
    labels: Option<RawJsonb>,
    paused: Option<bool>,
    comment: Option<&str>,
) {
    shmem::required();
    let name = input::name("name", name);
    let relation = relation.unwrap_or_else(|| errors::missing("relation", "Give the state table's name, as in 'shop.goods'."));
    let condition = input::given("condition", input::text("condition", condition));
    let queue = input::name("queue", queue);
    let rearm = input::text("rearm", rearm);
    let budget_names = input::names("budgets", budgets);
    let paused = input::given("paused", paused);
    input::text("comment", comment);
    let priority = input::given("priority", priority);

    let identity = spi::Identity::owner();
    spi::connect(|session| {
        epoch::refuse_in_copy(session);
        let role: String = session.run(&ROLE_NAME, &[arg(identity.caller())]).must(0, 1);
        let table = capture::required(session, identity.caller(), relation);
        fire::check_declarer(session, &role, relation, &table);
        check_payload(session, payload);
        keep_writers_out(relation);
        capture::required(session, identity.caller(), relation);
        compiled::check(session, relation, condition, rearm);

        let mut request = Request {
            payload: payload.unwrap_or_else(|| session.run(&EMPTY, &[]).must(0, 1)),
            priority,
            run_at: None,
            delay,
            key: None,
            agent: agent.map(str::to_string),
            tokens,
            budgets: Vec::new(),
            group_key: group_key.map(str::to_string),
            depends_on: Vec::new(),
            on_dependency_failure: OnFailure::Fail,
            max_attempts,
            lease_for,
            labels,
            max_run_time: None,
        };
        request.check();
        let found = config::find(session, queue);
        request.budgets = config::budget_numbers(session, &budget_names);
        enqueue::check_capacity(session, &found, &request);
        log::forget_dropped(session);
        config::keep_from_dropping();
        let made = session.run(
            &INSERT,
            &[
                arg(name),
                arg(relation),
                arg(condition),
                arg(rearm),
                arg(queue),
                arg(payload),
                arg(priority),
                arg(delay),
                arg(agent),
                arg(tokens),
                arg(budget_names),
                arg(group_key),
                arg(max_attempts),
                arg(lease_for),
                arg(labels),
                arg(paused),
                arg(comment),
                arg(role),
            ],
        );
        if made.is_empty() {
            errors::exists("watch", name, "Choose another name, or drop the one there is: SELECT stint.drop_watch(…).");
        }
        config::still_stands(session, queue, &found);
        tell(relation);
        // It counts for all that this transaction does, also before.
        watched::note_watched(relation);
    });
}

static EMPTY: Statement = Statement::new(c"SELECT '{}'::jsonb", &[]);

/// Does something to a watch that the caller may change.
fn change<T>(name: Option<&str>, work: impl FnOnce(&Session, &str) -> T) -> T {
    shmem::required();
    let name = input::name("name", name);
    let identity = spi::Identity::owner();
    spi::connect(|session| {
        epoch::refuse_in_copy(session);
        let find = || {
            let found = session.run(&FIND, &[arg(name), arg(identity.caller())]);
            if found.is_empty() {
                let rows = session.run(&NAMES, &[]);
                let names: Vec<String> = (0..rows.len()).map(|row| rows.must(row, 1)).collect();
                errors::unknown("watch", name, nearest(name, names.iter().map(String::as_str)), "stint.watches lists them.")
            }
            if !found.must::<bool>(0, 2) {
                Fault::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, format!("permission denied for watch \"{name}\""))
                    .hint("The role that declared it and the owner of its table may change it.")
                    .raise();
            }
            found.must::<pg_sys::Oid>(0, 1)
        };
        let relation = find();
        keep_writers_out(relation);
        // It may have been dropped, and made anew on another table, while this waited.
        if find() != relation {
            Fault::new(PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, format!("watch \"{name}\" was made anew meanwhile"))
                .hint("Repeat the transaction.")
                .raise();
        }
        let done = work(session, name);
        tell(relation);
        done
    })
}

/// See the SQL COMMENT of stint.pause_watch.
#[pg_extern(sql = false)]
fn pause_watch(name: Option<&str>) -> bool {
    change(name, |session, name| !session.run(&SET_PAUSED, &[arg(name), arg(true)]).is_empty())
}

/// See the SQL COMMENT of stint.resume_watch.
#[pg_extern(sql = false)]
fn resume_watch(name: Option<&str>) -> bool {
    change(name, |session, name| !session.run(&SET_PAUSED, &[arg(name), arg(false)]).is_empty())
}

/// See the SQL COMMENT of stint.drop_watch.
#[pg_extern(sql = false)]
fn drop_watch(name: Option<&str>) {
    change(name, |session, name| {
        for statement in &DROP {
            session.run(statement, &[arg(name)]);
        }
    });
}
