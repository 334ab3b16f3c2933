//! Retention classes: one for each retention that queues have and what becomes of partitions past it. Tasks carry the number in their id, so a class is made once and
//! stays as it is.

use crate::errors::{self, Fault};
use crate::spi::{Session, Statement, arg};
use crate::values::{RawInterval, SECOND};
use pgrx::prelude::*;
use stint_core::history::{CLASSES_EACH, FOR_EVER, first_class, width_ms};

/// Null keeps what is there; a retention of zero takes it away.
static CHANGE: Statement = Statement::new(
    c"update stint.queue_config q
      set history_retention = nullif(coalesce($2, q.history_retention), interval '0'),
          history_archive = coalesce($3, q.history_archive)
      where q.queue = $1
      returning q.history_retention, q.history_archive, q.history_class::int",
    &[pg_sys::TEXTOID, pg_sys::INTERVALOID, pg_sys::TEXTOID],
);

static SET: Statement =
    Statement::new(c"update stint.queue_config q set history_class = $2::smallint where q.queue = $1", &[pg_sys::TEXTOID, pg_sys::INT4OID]);

static FIND: Statement = Statement::new(
    c"select h.class::int from stint.history_classes h where h.retention = $1 and h.archive = $2",
    &[pg_sys::INTERVALOID, pg_sys::TEXTOID],
);

static MAKE: Statement = Statement::new(
    c"insert into stint.history_classes (class, retention, archive, width)
      select n.class, $3, $4, make_interval(days => $5 / 24, hours => $5 % 24)
      from generate_series($1, $2) as n (class)
      where not exists (select from stint.history_classes h where h.class = n.class)
      order by n.class
      limit 1
      returning class::int",
    &[pg_sys::INT4OID, pg_sys::INT4OID, pg_sys::INTERVALOID, pg_sys::TEXTOID, pg_sys::INT4OID],
);

/// Makers of classes line up; readers do not notice.
const ONE_MAKER: &str = "lock table stint.history_classes in share row exclusive mode";

const LEAST: i64 = 3600 * SECOND;
/// A hundred years, as durations are counted here: of 12 months of 30 days.
const MOST: i64 = 100 * 360 * 86_400 * SECOND;

/// Checks a retention; where `or_none` is, zero takes it away.
pub fn check(retention: Option<RawInterval>, archive: Option<&str>, or_none: bool) {
    if let Some(micros) = retention.map(RawInterval::micros)
        && !(LEAST..=MOST).contains(&micros)
        && !(or_none && micros == 0)
    {
        errors::invalid(
            format!("argument \"history_retention\" is {} s, it must be from 1 hour to 100 years", micros as f64 / 1e6),
            if or_none {
                "Pass such a duration, or '0' to keep history for ever."
            } else {
                "Pass such a duration, or null to keep history for ever."
            },
        )
    }
    if let Some(archive) = archive
        && !["drop", "detach"].contains(&archive)
    {
        errors::invalid(format!("history_archive \"{archive}\" is not known"), "Use 'drop' or 'detach'.")
    }
}

/// Gives a queue a retention and an archive, where they are given, and the class that follows. The partition that its next task goes to is made at once, so that it commits
/// with the setting: sessions that enqueue first need not wait for each other.
pub fn change(session: &Session, queue: &str, retention: Option<RawInterval>, archive: Option<&str>) {
    let row = session.run(&CHANGE, &[arg(queue), arg(retention), arg(archive)]);
    let archive: String = row.must(0, 2);
    let class = match row.get::<RawInterval>(0, 1) {
        None => i32::from(FOR_EVER),
        Some(retention) => class_of(session, retention, &archive),
    };
    if class != row.must::<i32>(0, 3) {
        session.run(&SET, &[arg(queue), arg(class)]);
    }
    super::prepare(session, u8::try_from(class).unwrap_or(FOR_EVER));
}

fn class_of(session: &Session, retention: RawInterval, archive: &str) -> i32 {
    let find = || session.run_latest(&FIND, &[arg(retention), arg(archive)]).get(0, 1);
    if let Some(class) = find() {
        return class;
    }
    session.execute_once(ONE_MAKER);
    if let Some(class) = find() {
        return class;
    }
    let first = first_class(retention.micros());
    let last = i32::from(first) + i32::from(CLASSES_EACH) - 1;
    let hours = width_ms(first).unwrap_or_default() / 3_600_000;
    let hours = i32::try_from(hours).unwrap_or(24);
    match session.run_latest(&MAKE, &[arg(i32::from(first)), arg(last), arg(retention), arg(archive), arg(hours)]).get(0, 1) {
        Some(class) => class,
        None => Fault::new(PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED, "there are too many different history retentions of this length")
            .detail(format!("Queues share one class for each retention and history_archive, and there can be {CLASSES_EACH} of a similar length."))
            .hint("Use a retention that another queue has or had: the table stint.history_classes lists them.")
            .raise(),
    }
}
