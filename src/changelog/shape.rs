//! A captured table as the catalogue describes it now: its columns, by number, and its key.

use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;

static COLUMNS: Statement = Statement::new(
    c"SELECT a.attnum, a.attname::text, quote_ident(a.attname), a.atttypid,
             (SELECT k.place FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY k (attnum, place)
              WHERE i.indrelid = a.attrelid AND i.indisprimary AND k.place <= i.indnkeyatts AND k.attnum = a.attnum)
      FROM pg_attribute a
      WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
      ORDER BY a.attnum",
    &[pg_sys::OIDOID],
);

/// One column.
pub struct Column {
    /// Its number, which is its place in an image.
    pub attnum: i16,
    /// Its name as stored.
    pub name: String,
    /// Its name as SQL writes it.
    pub quoted: String,
    /// Its type.
    pub type_oid: pg_sys::Oid,
}

/// The columns of a table in order, and which of them are its primary key.
pub struct Shape {
    /// Columns by number, dropped ones left out.
    pub columns: Vec<Column>,
    /// The primary key: indexes into `columns`, in key order. Empty where there is none.
    pub key: Vec<usize>,
}

impl Shape {
    /// Reads the shape. A table that is gone has no columns.
    pub fn load(session: &Session, relation: pg_sys::Oid) -> Self {
        let rows = session.run(&COLUMNS, &[arg(relation)]);
        let mut key = Vec::new();
        let columns = (0..rows.len())
            .map(|row| {
                if let Some(place) = rows.get::<i64>(row, 5) {
                    key.push((place, row));
                }
                Column { attnum: rows.must(row, 1), name: rows.must(row, 2), quoted: rows.must(row, 3), type_oid: rows.must(row, 4) }
            })
            .collect();
        key.sort_unstable();
        Shape { columns, key: key.into_iter().map(|(_, column)| column).collect() }
    }

    /// The columns of the key, in key order.
    pub fn key_columns(&self) -> impl Iterator<Item = &Column> {
        self.key.iter().map(|index| &self.columns[*index])
    }

    /// Columns by number, from 1, with gaps where one was dropped.
    pub fn places(&self) -> Vec<Option<&Column>> {
        let mut places = Vec::new();
        for column in &self.columns {
            let place = usize::try_from(column.attnum).unwrap_or(1);
            places.resize_with(place - 1, || None);
            places.push(Some(column));
        }
        places
    }
}
