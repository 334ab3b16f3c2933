//! What the compiler of conditions asks of the server. Types and operators are PostgreSQL's own; nothing a user made is ever called.

use crate::savepoint;
use crate::spi::{Session, Statement, arg};
use pgrx::prelude::*;
use std::ffi::CString;
use stint_core::watch::{Catalogue, Column, Operator, Type};

static COLUMNS: Statement = Statement::new(
    c"SELECT a.attnum, a.attname::text, a.atttypid,
             CASE WHEN a.attcollation <> 0 AND a.attcollation <> t.typcollation
                  THEN (SELECT format('%I.%I', n.nspname, l.collname) FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace
                        WHERE l.oid = a.attcollation) END
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
      WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
      ORDER BY a.attnum",
    &[pg_sys::OIDOID],
);
static TYPE_NAMES: Statement = Statement::new(
    c"SELECT format('%I.%I', n.nspname, t.typname), format_type(t.oid, NULL) FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE t.oid = $1",
    &[pg_sys::OIDOID],
);
static LABELS: Statement = Statement::new(
    c"SELECT coalesce(bool_or(e.enumlabel = $2), false), string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = $1",
    &[pg_sys::OIDOID, pg_sys::TEXTOID],
);

/// Oids below are of what initdb makes.
const FIRST_OF_USERS: u32 = 16384;

/// The columns of one table, and the types and operators of the server.
pub struct Server<'a> {
    session: &'a Session,
    columns: Vec<(String, Column)>,
}

impl<'a> Server<'a> {
    /// Reads the table's columns.
    pub fn new(session: &'a Session, relation: pg_sys::Oid) -> Self {
        let rows = session.run(&COLUMNS, &[arg(relation)]);
        let column = |row| (rows.must(row, 2), Column { place: rows.must(row, 1), of: classify(rows.must(row, 3)), collation: rows.get(row, 4) });
        Server { session, columns: (0..rows.len()).map(column).collect() }
    }
}

/// What a column's type is: a domain counts as what it is based on.
fn classify(type_oid: pg_sys::Oid) -> Type {
    // SAFETY: system cache look-ups.
    let (base, kind) = unsafe {
        let base = pg_sys::getBaseType(type_oid);
        (base.to_u32(), pg_sys::get_typtype(base) as u8)
    };
    match kind {
        b'e' => Type::Enum(base),
        b'b' | b'r' | b'm' if base < FIRST_OF_USERS => Type::Base(base),
        _ => Type::Other(base),
    }
}

fn oid(of: Type) -> pg_sys::Oid {
    let (Type::Base(oid) | Type::Enum(oid) | Type::Other(oid)) = of;
    oid.into()
}

impl Catalogue for Server<'_> {
    fn column(&self, name: &str) -> Option<Column> {
        self.columns.iter().find(|(known, _)| known == name).map(|(_, column)| column.clone())
    }

    fn names(&self) -> Vec<String> {
        self.columns.iter().map(|(name, _)| name.clone()).collect()
    }

    fn operator(&self, name: &str, left: Option<Option<Type>>, right: Option<Type>) -> Option<Operator> {
        let operand = |of: Option<Type>| of.map_or(pg_sys::UNKNOWNOID, oid);
        let name = CString::new(name).ok()?;
        // SAFETY: the list of two names is PostgreSQL's own; the tuple is read and released at once.
        unsafe {
            let word = |text: &std::ffi::CStr| pg_sys::makeString(pg_sys::pstrdup(text.as_ptr())).cast();
            let names = pg_sys::lappend(pg_sys::lappend(std::ptr::null_mut(), word(c"pg_catalog")), word(&name));
            let tuple = match left {
                Some(left) => pg_sys::oper(std::ptr::null_mut(), names, operand(left), operand(right), true, -1),
                None => pg_sys::left_oper(std::ptr::null_mut(), names, operand(right), true, -1),
            };
            if tuple.is_null() {
                return None;
            }
            let (function, left, right, result) = {
                let found = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_operator>();
                (found.oprcode, found.oprleft, found.oprright, found.oprresult)
            };
            pg_sys::ReleaseSysCache(tuple);
            let one = |of: pg_sys::Oid| (of != pg_sys::InvalidOid && pg_sys::get_typtype(of) as u8 != b'p').then(|| classify(of));
            // A stable one depends on the time zone, which is UTC here, and on nothing else.
            let pure = function.to_u32() < FIRST_OF_USERS && pg_sys::func_volatile(function) as u8 != b'v';
            one(result).filter(|_| pure).map(|result| Operator { left: one(left), right: one(right), result })
        }
    }

    fn constant(&self, of: Type, text: &str) -> Result<(), String> {
        match of {
            Type::Enum(_) | Type::Other(_) => {
                let labels = self.session.run(&LABELS, &[arg(oid(of)), arg(text)]);
                if labels.must(0, 1) {
                    return Ok(());
                }
                let known: Option<String> = labels.get(0, 2);
                Err(format!("'{text}' is no label of type {}, whose labels are {}", self.name(of), known.unwrap_or_default()))
            }
            Type::Base(_) => {
                let moves = matches!(oid(of), pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID | pg_sys::TIMEOID | pg_sys::TIMETZOID);
                let lower = text.to_lowercase();
                if moves && let Some(word) = ["now", "today", "tomorrow", "yesterday"].iter().find(|word| lower.contains(**word)) {
                    return Err(format!("'{text}' is no constant: {word} is another time whenever it is read"));
                }
                read(oid(of), text)
            }
        }
    }

    fn sql_name(&self, of: Type) -> String {
        self.session.run(&TYPE_NAMES, &[arg(oid(of))]).must(0, 1)
    }

    fn name(&self, of: Type) -> String {
        self.session.run(&TYPE_NAMES, &[arg(oid(of))]).must(0, 2)
    }
}

/// Whether the type's input function takes the text.
fn read(of: pg_sys::Oid, text: &str) -> Result<(), String> {
    let Ok(text) = CString::new(text) else { return Err("it contains a zero byte".to_string()) };
    let taken = savepoint::isolated(|| {
        // SAFETY: the input function of a type of PostgreSQL's own, which reads the text and leaves it as it is.
        unsafe {
            let (mut input, mut element) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
            pg_sys::getTypeInputInfo(of, &mut input, &mut element);
            pg_sys::OidInputFunctionCall(input, text.as_ptr().cast_mut(), element, -1);
        }
    });
    taken.map_err(|(_, reason)| reason)
}
