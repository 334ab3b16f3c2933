//! What happens before a commit: the watches of the tables that changed are evaluated on the net change of each key, and what fires is enqueued in the same
//! transaction.
//!
//! A watch must not make a change fail. What cannot be evaluated or enqueued is halved until the one change that is at fault stands alone, and goes to the log with
//! its reason; only what passes by itself (a deadlock, a lock that was waited for too long) fails the transaction, as it would fail any other.
//!
//! Locks in order: rows of `watch_disarmed` by key, then those of an enqueue. Who writes a key holds its row in the table until it ends, so nobody else decides
//! for the same key meanwhile; what is disarmed is read as it is committed now, also under REPEATABLE READ.

use super::compiled::{self, Set, Task, Watch};
use super::log::{self, Entry};
use crate::changelog::{capture, documents, epoch, images, watched};
use crate::errors::{self, Fault};
use crate::queue::enqueue;
use crate::savepoint;
use crate::spi::{Identity, Session, Statement, arg, connect};
use crate::values::{Instant, RawJsonb};
use pgrx::prelude::*;
use std::collections::HashSet;
use std::rc::Rc;

static SEQS: Statement = Statement::new(
    c"SELECT c.seq FROM stint.change_log c WHERE c.epoch = $1 AND c.xid = pg_current_xact_id() AND c.relation = $2 ORDER BY c.seq",
    &[pg_sys::INT4OID, pg_sys::OIDOID],
);
static DISARM: Statement = Statement::new(
    c"INSERT INTO stint.watch_disarmed (watch, key, since) SELECT $1, k.key, $3 FROM unnest($2) k (key) ORDER BY k.key ON CONFLICT DO NOTHING RETURNING key::text",
    &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::TIMESTAMPTZOID],
);
static ARM: Statement =
    Statement::new(c"DELETE FROM stint.watch_disarmed d WHERE d.watch = $1 AND d.key = ANY ($2)", &[pg_sys::TEXTOID, pg_sys::TEXTARRAYOID]);
static MAY: Statement = Statement::new(
    c"SELECT has_table_privilege(r.oid, $2, 'SELECT') AND has_function_privilege(r.oid, p.oid, 'EXECUTE'), r.oid
      FROM pg_roles r, pg_proc p
      WHERE r.rolname = $1 AND p.pronamespace = 'stint'::regnamespace AND p.proname = 'enqueue'",
    &[pg_sys::TEXTOID, pg_sys::OIDOID],
);
static PAYLOAD: Statement = Statement::new(
    c"SELECT coalesce($1, '{}') || jsonb_build_object('watch', $2, 'relation', $3, 'key', $4, 'before', $5, 'after', $6)",
    &[pg_sys::JSONBOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::JSONBOID, pg_sys::JSONBOID, pg_sys::JSONBOID],
);

/// The members that a watch adds to the payload.
pub const ADDED: [&str; 5] = ["watch", "relation", "key", "before", "after"];

/// A net change for which a watch does something.
struct Hit {
    watch: usize,
    seq: i64,
    key: String,
    before: Option<pg_sys::Datum>,
    after: Option<pg_sys::Datum>,
    fires: bool,
    arms: bool,
}

/// Evaluates what the transaction changed. Called before it commits or is prepared.
pub fn before_commit() {
    let mut tables = Vec::new();
    watched::PENDING.with(|pending| pending.drain(|table| tables.push(*table)));
    if tables.is_empty() {
        return;
    }
    tables.sort_unstable_by_key(|table| table.to_u32());
    let _surroundings = Surroundings::set();
    let _owner = Identity::owner();
    if let Some((epoch, true)) = connect(epoch::current) {
        for table in tables {
            Evaluation { table, epoch, now: Instant::now() }.run();
        }
    }
}

/// What statements need that a commit does not have: an active snapshot, and memory that lasts until its end.
struct Surroundings {
    memory: pg_sys::MemoryContext,
}

impl Surroundings {
    fn set() -> Self {
        // SAFETY: PostgreSQL's own pairs, undone in Drop and by an abort.
        unsafe {
            let memory = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            Surroundings { memory }
        }
    }
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        // After an error the abort of the transaction undoes both.
        if !std::thread::panicking() {
            // SAFETY: as in `set`.
            unsafe {
                pg_sys::PopActiveSnapshot();
                pg_sys::MemoryContextSwitchTo(self.memory);
            }
        }
    }
}

/// Why something could not be done, where the fault lies in the watch or the row.
#[derive(Clone)]
struct Problem {
    text: String,
    /// Whether it has nothing to do with the row: every other meets it too.
    of_all: bool,
}

/// A change that is at fault, and why.
type Failed<T> = (T, Problem);

/// The watches of one table at the end of one transaction.
struct Evaluation {
    table: pg_sys::Oid,
    epoch: i32,
    now: Instant,
}

impl Evaluation {
    fn run(&self) {
        let set = match compiled::kept(self.table) {
            Some(set) => set,
            None => match self.isolated(|session| Rc::new(compiled::load(session, self.table))) {
                Ok(set) => {
                    compiled::keep(self.table, &set);
                    set
                }
                Err(problem) => return self.broken(&problem.text),
            },
        };
        let mut hits = Vec::new();
        if set.find.is_some() {
            let all: Vec<i32> = (0..).zip(&set.watches).filter(|(_, watch)| watch.broken.is_none()).map(|(number, _)| number).collect();
            match self.find(&set, &all, (i64::MIN, i64::MAX)) {
                Ok(found) => hits = found,
                Err(_) => all.iter().for_each(|number| hits.extend(self.find_apart(&set, *number))),
            }
        }
        for (number, watch) in set.watches.iter().enumerate() {
            if let Some(problem) = &watch.broken {
                self.fail(watch, self.seqs().last().copied().unwrap_or(0), None, problem);
                continue;
            }
            let mine = || hits.iter().filter(|hit| hit.watch == number);
            self.fire(&set, watch, &mine().filter(|hit| hit.fires).collect::<Vec<_>>());
            // Last: what a change arms again, it was disarmed for, and does not fire for.
            let keys: Vec<String> = mine().filter(|hit| hit.arms).map(|hit| hit.key.clone()).collect();
            if !keys.is_empty() {
                connect(|session| session.run_latest(&ARM, &[arg(watch.name.as_str()), arg(keys)]));
            }
        }
    }

    /// Runs `work` in a subtransaction.
    fn isolated<T>(&self, work: impl FnOnce(&Session) -> T) -> Result<T, Problem> {
        savepoint::isolated(|| connect(work)).map_err(|(code, text)| {
            if errors::passes_by_itself(code) {
                Fault::new(code, text)
                    .detail("It happened while watches were evaluated as the transaction committed.")
                    .hint("Repeat the transaction.")
                    .raise()
            }
            use PgSqlErrorCode::{ERRCODE_INSUFFICIENT_PRIVILEGE, ERRCODE_UNDEFINED_OBJECT};
            Problem { text, of_all: matches!(code, ERRCODE_INSUFFICIENT_PRIVILEGE | ERRCODE_UNDEFINED_OBJECT) }
        })
    }

    /// What the given watches do for the changes in a range of numbers.
    fn find(&self, set: &Set, watches: &[i32], (first, last): (i64, i64)) -> Result<Vec<Hit>, Problem> {
        let Some(find) = &set.find else { return Ok(Vec::new()) };
        self.isolated(|session| {
            let _pinned = images::Pinned::set();
            let rows = session.run_own_latest(find, &[arg(self.epoch), arg(self.table), arg(watches.to_vec()), arg(first), arg(last)]);
            let sound: Vec<usize> = (0..set.watches.len()).filter(|number| set.watches[*number].broken.is_none()).collect();
            let mut hits = Vec::new();
            for row in 0..rows.len() {
                let (seq, key): (i64, String) = (rows.must(row, 1), rows.must(row, 2));
                let (before, after) = (rows.lift(row, 3), rows.lift(row, 4));
                let answers: Vec<bool> = rows.must(row, 5);
                for (watch, answer) in sound.iter().zip(answers.chunks(2)).filter(|(_, answer)| answer.contains(&true)) {
                    let (fires, arms) = (answer.first() == Some(&true), answer.last() == Some(&true));
                    hits.push(Hit { watch: *watch, seq, key: key.clone(), before, after, fires, arms });
                }
            }
            hits
        })
    }

    /// The same for one watch, where some change is at fault: that one goes to the log.
    fn find_apart(&self, set: &Set, number: i32) -> Vec<Hit> {
        let seqs = self.seqs();
        let (mut hits, mut failed) = (Vec::new(), Vec::new());
        halve(
            &seqs,
            &mut |part: &[i64]| match part {
                [first, .., last] => self.find(set, &[number], (*first, *last)).map(|found| hits.extend(found)),
                [one] => self.find(set, &[number], (*one, *one)).map(|found| hits.extend(found)),
                [] => Ok(()),
            },
            &mut failed,
        );
        if let Some(watch) = usize::try_from(number).ok().and_then(|number| set.watches.get(number)) {
            failed.iter().for_each(|(seq, problem)| self.fail(watch, *seq, None, &problem.text));
        }
        hits
    }

    /// Numbers of this transaction's changes of the table.
    fn seqs(&self) -> Vec<i64> {
        connect(|session| {
            let rows = session.run(&SEQS, &[arg(self.epoch), arg(self.table)]);
            (0..rows.len()).map(|row| rows.must(row, 1)).collect()
        })
    }

    /// Makes the tasks of a watch.
    fn fire(&self, set: &Set, watch: &Watch, hits: &[&Hit]) {
        let mut failed = Vec::new();
        halve(
            hits,
            &mut |part: &[&Hit]| if part.is_empty() { Ok(()) } else { self.isolated(|session| self.enqueue(session, set, watch, part)) },
            &mut failed,
        );
        failed.iter().for_each(|(hit, problem)| self.fail(watch, hit.seq, Some(&hit.key), &problem.text));
    }

    fn enqueue(&self, session: &Session, set: &Set, watch: &Watch, hits: &[&Hit]) {
        check_declarer(session, &watch.declarer, self.table, &set.relation);
        let armed: Option<HashSet<String>> = watch.rearms.then(|| {
            let keys: Vec<String> = hits.iter().map(|hit| hit.key.clone()).collect();
            let rows = session.run_latest(&DISARM, &[arg(watch.name.as_str()), arg(keys), arg(self.now)]);
            (0..rows.len()).map(|row| rows.must(row, 1)).collect()
        });
        let task = Task::load(session, &watch.name);
        for hit in hits.iter().filter(|hit| armed.as_ref().is_none_or(|armed| armed.contains(&hit.key))) {
            let made = session.run_prepared(&documents::statement(session, self.table), &[arg(hit.key.as_str()), hit.before, hit.after]);
            let [key, before, after] = [1, 2, 3].map(|column| made.lift(0, column));
            let payload = session.run(&PAYLOAD, &[arg(task.payload()), arg(watch.name.as_str()), arg(set.relation.as_str()), key, before, after]);
            let request = task.request(payload.must::<RawJsonb>(0, 1), format!("watch:{}:{}", watch.name, hit.seq));
            // The limits may be others than when the watch was declared.
            request.check();
            let (id, _) = enqueue::add(session, &watch.queue, request, &task.budgets, self.now, |_, _| ());
            log::add(session, &Entry { watch: &watch.name, seq: hit.seq, key: Some(&hit.key), queue: &watch.queue, came: Ok(id) }, self.now);
        }
    }

    fn fail(&self, watch: &Watch, seq: i64, key: Option<&str>, problem: &str) {
        connect(|session| log::add(session, &Entry { watch: &watch.name, seq, key, queue: &watch.queue, came: Err(problem) }, self.now));
    }

    /// No watch of the table could be compiled.
    fn broken(&self, problem: &str) {
        let seq = self.seqs().last().copied().unwrap_or(0);
        for watch in connect(|session| compiled::names(session, self.table)) {
            self.fail(&watch, seq, None, problem);
        }
    }
}

/// Does `work` for all items at once, or, where that fails, for each half, down to the items that are at fault.
fn halve<T: Copy>(items: &[T], work: &mut dyn FnMut(&[T]) -> Result<(), Problem>, failed: &mut Vec<Failed<T>>) {
    match (work(items), items) {
        (Ok(()), _) | (_, []) => {}
        (Err(problem), _) if items.len() == 1 || problem.of_all => failed.extend(items.iter().map(|item| (*item, problem.clone()))),
        (Err(_), _) => {
            let (left, right) = items.split_at(items.len() / 2);
            halve(left, work, failed);
            halve(right, work, failed);
        }
    }
}

/// Refuses where the role that a watch acts for may not do itself what the watch does.
pub fn check_declarer(session: &Session, role: &str, relation: pg_sys::Oid, name: &str) {
    let found = session.run(&MAY, &[arg(role), arg(relation)]);
    let insufficient = |message: String, hint: &str| -> ! { Fault::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, message).hint(hint).raise() };
    if found.is_empty() {
        insufficient(format!("role \"{role}\", for which the watch acts, does not exist"), "Drop the watch and declare it with a role that does.");
    }
    capture::check_readable(found.must(0, 2), relation, name);
    if !found.must::<bool>(0, 1) {
        insufficient(
            format!("permission denied: role \"{role}\" may not call stint.enqueue"),
            "GRANT EXECUTE ON FUNCTION stint.enqueue TO that role.",
        );
    }
}
