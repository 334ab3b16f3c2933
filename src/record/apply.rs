//! Events into a table: one write for many, and those that do not fit set aside.
//!
//! A batch is folded in a subtransaction. Where it fails for what an event holds, it is halved until the event stands alone; the others are folded in order all
//! the same. What fails for another reason (a lock, a deadlock, a full disk) is no fault of the event's and is raised.

use super::append::events_at_once;
use super::config::{self, Projected, Target};
use crate::changelog::cause;
use crate::errors::Fault;
use crate::savepoint::isolated;
use crate::spi::{self, Session, Statement, arg};
use crate::state::merge;
use crate::values::RawJsonb;
use pgrx::prelude::*;

static DOCUMENTS: Statement = Statement::new(
    c"SELECT coalesce(jsonb_agg(d.document ORDER BY d.seq), '[]') FROM stint.event_documents d WHERE d.seq = ANY ($1)",
    &[pg_sys::INT8ARRAYOID],
);
static SET_ASIDE: Statement = Statement::new(
    c"INSERT INTO stint.events_aside (relation, seq, state, sqlstate, reason) VALUES ($1, $2, 'poisoned', $3, $4)
      ON CONFLICT (relation, seq) DO UPDATE SET sqlstate = excluded.sqlstate, reason = excluded.reason, at = excluded.at",
    &[pg_sys::OIDOID, pg_sys::INT8OID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);
/// The events among some that a table takes, for what its declaration lacks.
static SET_ALL_ASIDE: Statement = Statement::new(
    c"INSERT INTO stint.events_aside (relation, seq, state, sqlstate, reason)
      SELECT $1, l.seq, 'poisoned', $3, $4 FROM stint.event_log l
      WHERE l.seq = ANY ($2) AND EXISTS (SELECT FROM stint.projection_config c WHERE c.relation = $1 AND l.type = ANY (c.types))
      ON CONFLICT (relation, seq) DO UPDATE SET sqlstate = excluded.sqlstate, reason = excluded.reason, at = excluded.at",
    &[pg_sys::OIDOID, pg_sys::INT8ARRAYOID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// An event that does not fit the table.
pub struct Poisoned {
    /// Its number.
    pub seq: i64,
    code: PgSqlErrorCode,
    message: String,
}

/// Folds the events of these numbers, which ascend, into a table of which the events were just recorded.
pub fn recorded(session: &Session, target: &Target, seqs: &[i64]) {
    let projected = match config::fitting(session, target.relation) {
        Ok(Some(projected)) => projected,
        Ok(None) => return,
        Err((code, message)) if target.refuses || passing(code) => Fault::new(code, message).raise(),
        Err((code, message)) => {
            session.run_latest(&SET_ALL_ASIDE, &[arg(target.relation), arg(seqs.to_vec()), arg(text_of(code)), arg(message)]);
            return;
        }
    };
    for seqs in seqs.chunks(usize::try_from(events_at_once(projected.per_event)).unwrap_or(1)) {
        let documents = documents(session, seqs);
        if target.refuses {
            stretch(session, &projected, target.relation, documents, seqs, (1, seqs.len()));
        } else {
            set_aside(session, target.relation, &fold(&projected, target.relation, documents, seqs));
        }
    }
}

/// The events of these numbers as projections see them, in order.
pub fn documents(session: &Session, seqs: &[i64]) -> RawJsonb {
    session.run_latest(&DOCUMENTS, &[arg(seqs.to_vec())]).must(0, 1)
}

/// Folds documents, of which `seqs` are the numbers, into a table declared as the projected one. Returns the events that do not fit.
pub fn fold(projected: &Projected, into: pg_sys::Oid, documents: RawJsonb, seqs: &[i64]) -> Vec<Poisoned> {
    let mut poisoned = Vec::new();
    let mut stretches = vec![(1, seqs.len())];
    while let Some((from, to)) = stretches.pop() {
        if from > to {
            continue;
        }
        let Err((code, message)) = isolated(|| spi::connect(|session| stretch(session, projected, into, documents, seqs, (from, to)))) else {
            continue;
        };
        if passing(code) {
            Fault::new(code, message).hint("It lies not in the event: repeat the transaction.").raise();
        }
        if from == to {
            poisoned.push(Poisoned { seq: seqs[from - 1], code, message });
        } else {
            let middle = from + (to - from) / 2;
            // Popped in this order: the earlier half first.
            stretches.push((middle + 1, to));
            stretches.push((from, middle));
        }
    }
    poisoned
}

/// Folds the documents `from` to `to`, counted from 1.
fn stretch(session: &Session, projected: &Projected, into: pg_sys::Oid, documents: RawJsonb, seqs: &[i64], (from, to): (usize, usize)) {
    let bound = |at: usize| arg(i64::try_from(at).unwrap_or(0));
    let stretch = [arg(documents), bound(from), bound(to)];
    let batch = session.run_prepared(projected.batch.plan(), &stretch);
    let kinds: Vec<_> = batch.must::<Vec<Option<i32>>>(0, 2).into_iter().flatten().map(config::kind_of).collect();
    let rows = batch.must(0, 1);
    match &projected.causes {
        Some(causes) if into == projected.relation.oid => {
            let found = session.run_prepared(causes.plan(), &stretch);
            let keys = found.must::<Vec<Option<String>>>(0, 1).into_iter().flatten();
            let events = found.must::<Vec<Option<i64>>>(0, 2).into_iter().flatten().filter_map(|at| seqs.get(usize::try_from(at - 1).ok()?).copied());
            cause::during(into, keys.zip(events).collect(), || merge::fold(session, into, rows, &kinds));
        }
        _ => {
            merge::fold(session, into, rows, &kinds);
        }
    }
}

/// Keeps in mind which events are not part of the table.
pub fn set_aside(session: &Session, relation: pg_sys::Oid, events: &[Poisoned]) {
    for event in events {
        session.run(&SET_ASIDE, &[arg(relation), arg(event.seq), arg(text_of(event.code)), arg(event.message.as_str())]);
    }
}

/// Whether an error says nothing of the event: transactions that stand in each other's way, resources, an operator, a defect.
fn passing(code: PgSqlErrorCode) -> bool {
    let text = text_of(code);
    ["40", "53", "57", "58", "XX", "55P03", "25"].iter().any(|class| text.starts_with(class))
}

/// The five characters of an SQLSTATE.
fn text_of(code: PgSqlErrorCode) -> String {
    let bits = code as i32;
    (0..5u32).map(|place| char::from(u8::try_from((bits >> (6 * place)) & 0x3f).unwrap_or(0) + b'0')).collect()
}
