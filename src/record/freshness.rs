//! `stint.require_fresh`: no decision on state that is too old.

use super::config;
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::shmem;
use crate::spi::{Identity, Prepared, arg, connect};
use crate::values::RawInterval;
use pgrx::prelude::*;

const FRESHNESS: &str =
    "SELECT f.lag, f.ok, f.lag::text, f.freshness::text, f.held_up_by, f.lag > f.freshness, f.poisoned FROM stint.freshness f WHERE f.relation = $1";

#[pg_extern(sql = false)]
fn require_fresh(relation: Option<pg_sys::Oid>) -> RawInterval {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.require_fresh('shop.goods').") };
    shmem::required();
    let _owner = Identity::owner();
    connect(|session| {
        let relation = Relation::load_unfit(session, oid);
        config::required(session, &relation);
        // Planned each time it is asked: the view looks into several catalogues, of which the plan should know the sizes.
        let found = session.run_own_latest(&Prepared::new(FRESHNESS, &[pg_sys::OIDOID]), &[arg(oid)]);
        if !found.must::<bool>(0, 2) {
            let (lag, allowed, cause): (String, String, Option<String>) = (found.must(0, 3), found.must(0, 4), found.get(0, 5));
            let reason = if found.must(0, 6) {
                format!("it lags {lag} behind the record, {allowed} is allowed")
            } else {
                format!("poisoned events that are not part of it: {}", found.must::<i64>(0, 7))
            };
            Fault::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, format!("table {} is not fresh: {reason}", relation.qualified))
                .detail(format!("Held up by: {}.", cause.as_deref().unwrap_or("nothing that is known")))
                .hint(if found.must::<i64>(0, 7) > 0 {
                    "stint.poisoned_events says why; stint.rebuild(…) tries them again, stint.skip_event(…) gives one up."
                } else {
                    "Wait and try again, or fold now with stint.project(…)."
                })
                .raise();
        }
        match found.lift(0, 1) {
            Some(lag) => RawInterval(lag),
            None => errors::internal("a table has no lag"),
        }
    })
}
