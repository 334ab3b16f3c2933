//! `alter_state`: another declaration for a state table that has one.

use super::config::Config;
use super::declare::{check, check_defaults, create_tombstones, describe, json_text, lock_own_table, no_nulls, not_declared, recompile};
use crate::errors::{self, Fault};
use crate::relation::Relation;
use crate::spi::{self, Identity, Prepared, Session};
use crate::values::RawJsonb;
use pgrx::prelude::*;
use stint_core::state::declare::Declaration;
use stint_core::state::fields::{Field, Function};

#[pg_extern(sql = false)]
fn alter_state(
    relation: Option<pg_sys::Oid>,
    sequence: Option<Vec<Option<String>>>,
    groups: Option<RawJsonb>,
    deletes: Option<&str>,
    fields: Option<RawJsonb>,
    rowkind: Option<&str>,
) {
    let Some(oid) = relation else { errors::missing("relation", "Name the table, as in stint.alter_state('shop.goods', deletes => 'ignore').") };
    let sequence = sequence.map(no_nulls);
    crate::shmem::required();
    let identity = Identity::owner();
    spi::connect(|session| {
        let relation = lock_own_table(session, oid, &identity);
        let Some((old_config, tombstones)) = Config::read(session, oid) else { not_declared(&relation) };
        let json = |given: Option<RawJsonb>, kept: &Option<String>| match given.map(|value| json_text(session, value)) {
            None => kept.clone(),
            Some(text) => Some(text).filter(|text| text != "{}"),
        };
        let config = Config {
            engine: old_config.engine.clone(),
            sequence: sequence.or_else(|| old_config.sequence.clone()).filter(|names| !names.is_empty()),
            groups: json(groups, &old_config.groups),
            deletes: deletes.map(str::to_string).or_else(|| old_config.deletes.clone()),
            fields: json(fields, &old_config.fields),
            rowkind: rowkind.map(str::to_string).or_else(|| old_config.rowkind.clone()).filter(|name| !name.is_empty()),
        };
        let mut table = describe(session, &relation, tombstones.clone());
        let declaration = check(&relation, &mut table, &config);
        check_defaults(session, &relation, &table);
        let before = check(&relation, &mut describe(session, &relation, tombstones.clone()), &old_config);
        let holds_rows = holds_rows(session, &relation, tombstones.as_deref());
        if holds_rows {
            refuse_change_of_meaning(&relation, &before, &declaration);
        }
        config.update(session, oid, &declaration);
        // With rows in the table the sequences are the same, and so is the shape of the tombstones.
        let remade = before.sequences() != declaration.sequences() || before.remembers() != declaration.remembers();
        if remade {
            if let Some(name) = &tombstones {
                session.execute_once(&format!("DROP TABLE {name}"));
            }
            if declaration.remembers() {
                create_tombstones(session, &relation, &table, &declaration);
            }
        }
        recompile(oid);
    });
}

/// Whether the table, or what remembers its deleted keys, holds rows.
fn holds_rows(session: &Session, relation: &Relation, tombstones: Option<&str>) -> bool {
    let of = |name: &str| format!("EXISTS (SELECT FROM {name})");
    let any = [Some(relation.qualified.as_str()), tombstones].into_iter().flatten().map(of).collect::<Vec<_>>().join(" OR ");
    let _restricted = Identity::restricted(relation.owner);
    session.run_prepared(&Prepared::new(&format!("SELECT {any}"), &[]), &[]).must(0, 1)
}

/// What stored rows mean must not change under them: they would have to be computed anew.
fn refuse_change_of_meaning(relation: &Relation, before: &Declaration, after: &Declaration) {
    let refuse = |what: String| -> ! {
        Fault::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("{what} of {} cannot change while it holds rows, which were merged by the old one", relation.qualified),
        )
        .hint("Empty the table and fill it anew, or drop_state and create_state if its rows fit the new declaration as they are.")
        .raise()
    };
    if before.engine != after.engine {
        refuse("the sequence or the groups".into());
    }
    for (column, (old, new)) in relation.columns.iter().zip(before.fields.iter().zip(&after.fields)) {
        let name = |field: &Field| field.function.as_ref().map(Function::name);
        if name(old) != name(new) {
            refuse(format!("the function of column \"{}\"", column.name));
        }
    }
    if before.remembers() != after.remembers() {
        let (old, new) = (before.deletes.word(), after.deletes.word());
        refuse(format!("the deletes policy from \"{old}\" to \"{new}\", of which one keeps the sequences of deleted keys and one does not,"));
    }
}
