//! Declarations as they are kept in `stint.state_config`.

use super::declare::json_text;
use crate::spi::{Rows, Session, Statement, arg};
use crate::values::RawJsonb;
use pgrx::prelude::*;
use stint_core::state::declare::{Declaration, Told};

static READ: Statement = Statement::new(
    c"SELECT c.engine, c.sequence, c.groups, c.deletes, c.fields, c.rowkind,
             (SELECT format('%I.%I', n.nspname, t.relname) FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace WHERE t.oid = c.tombstones)
      FROM stint.state_config c WHERE c.relation = $1",
    &[pg_sys::OIDOID],
);
static INSERT: Statement = Statement::new(
    c"INSERT INTO stint.state_config (relation, engine, sequence, groups, deletes, fields, rowkind)
      VALUES ($1, $2, $3, $4::jsonb, $5, $6::jsonb, $7) ON CONFLICT (relation) DO NOTHING",
    &[pg_sys::OIDOID, pg_sys::TEXTOID, pg_sys::TEXTARRAYOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);
static UPDATE: Statement = Statement::new(
    c"UPDATE stint.state_config SET sequence = $2, groups = $3::jsonb, deletes = $4, fields = $5::jsonb, rowkind = $6 WHERE relation = $1",
    &[pg_sys::OIDOID, pg_sys::TEXTARRAYOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TEXTOID, pg_sys::TEXTOID],
);

/// What a declaration was given, in words of our own.
#[derive(Clone)]
pub struct Config {
    /// The engine's name.
    pub engine: String,
    /// Columns that order the rows.
    pub sequence: Option<Vec<String>>,
    /// Sequence groups, as JSON text.
    pub groups: Option<String>,
    /// What deletes do; none: as the engine has it.
    pub deletes: Option<String>,
    /// Functions and options of single columns, as JSON text.
    pub fields: Option<String>,
    /// The field of the rows that carries their kind.
    pub rowkind: Option<String>,
}

impl Config {
    /// The kept declaration and the name of the table of tombstones; none where the table is not declared.
    pub fn read(session: &Session, relation: pg_sys::Oid) -> Option<(Config, Option<String>)> {
        let rows = session.run(&READ, &[arg(relation)]);
        if rows.is_empty() {
            return None;
        }
        let json = |column: usize| rows.get::<RawJsonb>(0, column).map(|value| json_text(session, value));
        let config = Config {
            engine: rows.must(0, 1),
            sequence: rows.get(0, 2),
            groups: json(3),
            deletes: rows.get(0, 4),
            fields: json(5),
            rowkind: rows.get(0, 6),
        };
        Some((config, rows.get(0, 7)))
    }

    /// As the core wants it.
    pub fn told(&self) -> Told<'_> {
        Told {
            engine: &self.engine,
            sequence: self.sequence.as_deref(),
            groups: self.groups.as_deref(),
            deletes: self.deletes.as_deref(),
            fields: self.fields.as_deref(),
            rowkind: self.rowkind.as_deref(),
        }
    }

    /// Keeps a new declaration; false where there is one already.
    pub fn insert(&self, session: &Session, relation: pg_sys::Oid, declaration: &Declaration) -> bool {
        let policy = declaration.deletes.word();
        let (sequence, groups) = (arg(self.sequence.clone()), arg(self.groups.as_deref()));
        let (fields, rowkind) = (arg(self.fields.as_deref()), arg(self.rowkind.as_deref()));
        let rows: Rows = session.run(&INSERT, &[arg(relation), arg(self.engine.as_str()), sequence, groups, arg(policy), fields, rowkind]);
        !rows.is_empty()
    }

    /// Replaces the kept declaration.
    pub fn update(&self, session: &Session, relation: pg_sys::Oid, declaration: &Declaration) {
        let policy = declaration.deletes.word();
        let (sequence, groups) = (arg(self.sequence.clone()), arg(self.groups.as_deref()));
        session.run(&UPDATE, &[arg(relation), sequence, groups, arg(policy), arg(self.fields.as_deref()), arg(self.rowkind.as_deref())]);
    }
}
