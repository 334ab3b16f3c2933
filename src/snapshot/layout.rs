//! Images in today's order of columns, whatever the table's columns were when they were made.
//!
//! An image has each column's text in the place of its number. Within a database numbers stay, also of renamed columns; in a restored one they are given anew,
//! and columns are found by the names that the image's layout has.

use super::point::xid;
use crate::changelog::epoch;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;
use std::collections::HashMap;
use stint_core::snapshot::Point;

static LAYOUT: Statement = Statement::new(c"SELECT l.columns FROM stint.image_layouts l WHERE l.layout = $1", &[pg_sys::INT4OID]);
static COLUMNS: Statement = Statement::new(
    c"SELECT CASE WHEN NOT a.attisdropped THEN a.attname::text END, k.epoch, k.xid, k.seq
      FROM pg_attribute a
      LEFT JOIN stint.captured_columns k
             ON k.relation = a.attrelid AND k.name = a.attname
                AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey))
      WHERE a.attrelid = $1 AND a.attnum > 0 ORDER BY a.attnum",
    &[pg_sys::OIDOID],
);

/// The text of each column in the place of its number; null where it was null, is dropped or was not there yet.
pub type Image = Vec<Option<String>>;

/// Of one table.
pub struct Layouts {
    /// The table's columns by number, `None` for dropped ones.
    columns: Vec<Option<String>>,
    /// Of columns beside the key that came later than the declaration or with it: the place, and the change that they came with.
    came: Vec<(usize, i32, u64, i64)>,
    /// The epoch whose images have the present numbers; `None` in a copy that was not activated.
    epoch: Option<i32>,
    /// By layout and whether its numbers are the present ones: the place in the image of each column.
    places: HashMap<(i32, bool), Vec<Option<usize>>>,
}

impl Layouts {
    /// Reads the table's columns.
    pub fn new(session: &Session, relation: pg_sys::Oid) -> Self {
        let rows = session.read(&COLUMNS, &[arg(relation)]);
        let mut columns: Vec<Option<String>> = (0..rows.len()).map(|row| rows.get(row, 1)).collect();
        let came = (0..rows.len()).filter_map(|row| Some((row, rows.get(row, 2)?, xid(&rows, row, 3), rows.must(row, 4)))).collect();
        // As the capture triggers make them, images end with the last column there is.
        while columns.last().is_some_and(Option::is_none) {
            columns.pop();
        }
        Layouts { columns, came, epoch: epoch::current(session).and_then(|(epoch, own)| own.then_some(epoch)), places: HashMap::new() }
    }

    /// The places of the columns that were not there yet at a point.
    pub fn absent_at(&self, point: &Point) -> Vec<usize> {
        self.came.iter().filter(|(_, epoch, xid, seq)| point.precedes(*epoch, *xid, *seq)).map(|(place, ..)| *place).collect()
    }

    /// Whether a column came after a change. Altering a table waits for its writers and keeps them out, so numbers are in order.
    pub fn came_after(&self, epoch: i32, seq: i64) -> bool {
        self.came.iter().any(|(_, other, _, came)| (*other, *came) > (epoch, seq))
    }

    /// An image of that layout and epoch as it would be made today.
    pub fn today(&mut self, session: &Session, mut image: Image, layout: i32, epoch: i32) -> Image {
        let numbered = self.epoch == Some(epoch);
        let columns = &self.columns;
        let places =
            self.places.entry((layout, numbered)).or_insert_with(|| if numbered { by_number(columns) } else { by_name(session, columns, layout) });
        places.iter().map(|place| image.get_mut((*place)?)?.take()).collect()
    }
}

fn by_number(columns: &[Option<String>]) -> Vec<Option<usize>> {
    columns.iter().enumerate().map(|(place, name)| name.as_ref().map(|_| place)).collect()
}

fn by_name(session: &Session, columns: &[Option<String>], layout: i32) -> Vec<Option<usize>> {
    let found = session.read(&LAYOUT, &[arg(layout)]);
    let names: Vec<Option<String>> = if found.is_empty() { Vec::new() } else { found.must(0, 1) };
    columns.iter().map(|column| names.iter().position(|name| name.is_some() && name == column)).collect()
}
