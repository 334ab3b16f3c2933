//! Changes that one statement brings about inside another, put after the change that caused them.
//!
//! PostgreSQL fires the capture triggers when a statement ends. What the table's own row triggers did to the same key meanwhile has ended before, and so has its
//! number; and a MERGE that deletes one row of a key and inserts another tells of the insertion first. The rows are still locked, so new numbers can be drawn:
//! of the changes of one key the ones that follow from an image are moved behind the one that made it.

use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

/// `$1` the epoch, `$2` the table, `$3` the command that the ending statement is, `$4` the first command after it had written. What a nested statement logged
/// has a command number in between. The ending statement's change of a key belongs before the first of those that begins with the image it left, where the
/// one before that ends with the image it found.
static MOVE: Statement = Statement::new(
    c"WITH since AS MATERIALIZED (
          SELECT l.ctid AS tid, l.key, l.seq, l.before, l.after, l.cmin::text::bigint >= $4 AS mine
          FROM stint.change_log l
          WHERE l.epoch = $1 AND l.xid = pg_current_xact_id() AND l.relation = $2 AND l.cmin::text::bigint > $3
      ), others AS (
          SELECT s.*, row_number() OVER key AS place, lag(s.after) OVER key AS found FROM since s WHERE NOT s.mine WINDOW key AS (PARTITION BY s.key ORDER BY s.seq)
      ), cuts AS (
          SELECT o.key, min(o.seq) AS seq
          FROM others o JOIN since m ON m.mine AND m.key = o.key
          WHERE o.before IS NOT DISTINCT FROM m.after AND (o.place = 1 OR o.found IS NOT DISTINCT FROM m.before)
          GROUP BY o.key
      )
      UPDATE stint.change_log l SET seq = n.seq
      FROM (SELECT f.tid, nextval('stint.change_seq') AS seq
            FROM (SELECT o.tid FROM others o JOIN cuts c ON c.key = o.key AND o.seq >= c.seq ORDER BY o.seq) f) n
      WHERE l.ctid = n.tid",
    &[pg_sys::INT4OID, pg_sys::OIDOID, pg_sys::INT8OID, pg_sys::INT8OID],
);

/// Per table, the newest statement of a transaction that logged something.
struct Newest {
    transaction: pg_sys::TransactionId,
    commands: HashMap<u32, pg_sys::CommandId>,
}

thread_local! {
    static NEWEST: RefCell<Option<Newest>> = const { RefCell::new(None) };
}

/// The command that the statement whose triggers fire is: that of the snapshot it runs with. To be asked before anything else pushes a snapshot.
pub fn statement() -> pg_sys::CommandId {
    // SAFETY: a trigger is fired with its statement's snapshot active.
    unsafe { if pg_sys::ActiveSnapshotSet() { (*pg_sys::GetActiveSnapshot()).curcid } else { pg_sys::GetCurrentCommandId(false) } }
}

/// The command that what is written next will be, at the earliest.
pub fn next_write() -> pg_sys::CommandId {
    // SAFETY: a counter of this backend.
    unsafe { pg_sys::GetCurrentCommandId(false) }
}

/// After a statement's changes of a table were logged from command `wrote` on: moves behind them what belongs there. `may_remove` says whether there may be a
/// deletion among them, which can belong before what another trigger of the same statement has logged.
pub fn settle(session: &Session, epoch: i32, table: pg_sys::Oid, statement: pg_sys::CommandId, wrote: pg_sys::CommandId, may_remove: bool) {
    // SAFETY: the transaction has an id, since it has just written.
    let transaction = unsafe { pg_sys::GetTopTransactionIdIfAny() };
    let newest = NEWEST.with_borrow_mut(|newest| {
        if newest.as_ref().is_none_or(|known| known.transaction != transaction) {
            *newest = Some(Newest { transaction, commands: HashMap::new() });
        }
        let before = newest.as_mut().and_then(|known| known.commands.insert(table.to_u32(), statement));
        // Of two that are nested the inner one stays the newest for those around both.
        if let (Some(known), Some(before)) = (newest.as_mut(), before)
            && before > statement
        {
            known.commands.insert(table.to_u32(), before);
        }
        before
    });
    let nested = match newest {
        Some(other) if other == statement => may_remove,
        Some(other) => other > statement,
        None => false,
    };
    if nested {
        session.run(&MOVE, &[arg(epoch), arg(table), arg(i64::from(statement)), arg(i64::from(wrote))]);
    }
}
