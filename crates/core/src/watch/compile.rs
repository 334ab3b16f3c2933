//! Conditions as SQL over two images of a row, arrays of text in which each column has its place.
//!
//! Every column is read as its own type, a domain as what it is based on, and every operator is the one `pg_catalog` has for the two types: what the catalogue of the
//! server knows comes in through [`Catalogue`]. A division by zero is null. The SQL must be prepared and run under `search_path = pg_catalog, pg_temp`, because
//! `IS DISTINCT FROM` and `NULLIF` name their operator themselves.

use super::{Event, Expr, Fault, Node, Row, Why};
use crate::names::nearest;
use crate::sql::literal;

/// A type of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// A type of `pg_catalog`, by its oid.
    Base(u32),
    /// An enum: its labels are text here, and their order is looked up.
    Enum(u32),
    /// Any other type: a value can be told from another and from null by its text, and no more.
    Other(u32),
}

/// The text type and the boolean, whose oids never change.
const TEXT: Type = Type::Base(25);
const BOOL: Type = Type::Base(16);

/// One column of the table.
#[derive(Clone, Debug)]
pub struct Column {
    /// Its place in an image, from 1.
    pub place: i16,
    /// What its values are, domains reduced to what they are based on.
    pub of: Type,
    /// Its collation as SQL writes it, where it is not the type's own.
    pub collation: Option<String>,
}

/// An operator of `pg_catalog`.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    /// The type of its left operand, if that is one type and not any of a kind.
    pub left: Option<Type>,
    /// The same of its right one.
    pub right: Option<Type>,
    /// What it yields.
    pub result: Type,
}

/// What the compiler asks of the server.
pub trait Catalogue {
    /// The column of that name.
    fn column(&self, name: &str) -> Option<Column>;
    /// All names of columns.
    fn names(&self) -> Vec<String>;
    /// The operator of `pg_catalog` for these operands, if there is one whose answer depends on nothing else. No type stands for a quoted constant;
    /// `left` is `None` for a sign before its operand.
    fn operator(&self, name: &str, left: Option<Option<Type>>, right: Option<Type>) -> Option<Operator>;
    /// Whether a type takes a constant; why not where it does not.
    fn constant(&self, of: Type, text: &str) -> Result<(), String>;
    /// The type as SQL writes it, with its schema.
    fn sql_name(&self, of: Type) -> String;
    /// The type as people know it.
    fn name(&self, of: Type) -> String;
}

/// Where in a statement the two images are, and the type of a number constant.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// SQL for the image before.
    pub before: &'a str,
    /// SQL for the image after.
    pub after: &'a str,
}

/// A condition that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// SQL of type boolean, true where the watch fires.
    pub sql: String,
    /// Whether it is a condition on the change, since it speaks of the row before or of what became of the row; else it is one on a row, and what counts is that it becomes true.
    pub on_change: bool,
}

/// Whether it speaks of more than the row after: the first place that does.
fn looks_back(expr: &Expr) -> Option<usize> {
    let any = |parts: &[&Expr]| parts.iter().find_map(|part| looks_back(part));
    match &expr.node {
        Node::Column(Row::Before, _) | Node::Changed(_) | Node::Event(_) => Some(expr.at),
        Node::Column(Row::After, _) | Node::Number(_) | Node::Text(_) | Node::Bool(_) | Node::Null => None,
        Node::Negative(of) | Node::IsNull(of, _) | Node::Not(of) => looks_back(of),
        Node::Binary(_, a, b) | Node::Distinct(a, b, _) => any(&[a, b]),
        Node::Between(a, b, c, _) => any(&[a, b, c]),
        Node::In(of, list, _) => looks_back(of).or_else(|| list.iter().find_map(looks_back)),
        Node::And(parts) | Node::Or(parts) => parts.iter().find_map(looks_back),
    }
}

/// Compiles the condition of a watch.
pub fn condition(expr: &Expr, catalogue: &dyn Catalogue, place: Place<'_>) -> Result<Compiled, Fault> {
    let Place { before, after } = place;
    if looks_back(expr).is_some() {
        let change = truth(expr, catalogue, place)?;
        let sql = format!("({before} IS DISTINCT FROM {after} AND CASE WHEN {change} THEN true ELSE false END)");
        return Ok(Compiled { sql, on_change: true });
    }
    let (now, then) = (truth(expr, catalogue, place)?, truth(expr, catalogue, Place { before, after: before })?);
    // CASE, so that the row before is looked at only where it decides.
    let sql = format!(
        "CASE WHEN {after} IS NULL THEN false WHEN {now} THEN CASE WHEN {before} IS NULL THEN true ELSE ({then}) IS NOT TRUE END ELSE false END"
    );
    Ok(Compiled { sql, on_change: false })
}

/// Compiles the condition under which a watch that fired for a row may fire again: true also where the row is gone.
pub fn rearm(expr: &Expr, catalogue: &dyn Catalogue, place: Place<'_>) -> Result<String, Fault> {
    if let Some(at) = looks_back(expr) {
        let hint = "Name columns alone: 'qty > 20'.";
        return Err(Fault::new(at, Why::Syntax, "it speaks of more than the row after the change", hint));
    }
    let now = truth(expr, catalogue, place)?;
    Ok(format!("CASE WHEN {after} IS NULL THEN true WHEN {now} THEN true ELSE false END", after = place.after))
}

fn truth(expr: &Expr, catalogue: &dyn Catalogue, place: Place<'_>) -> Result<String, Fault> {
    let compiler = Compiler { catalogue, place };
    let term = compiler.term(expr)?;
    compiler.boolean(term, expr)
}

/// SQL and its type; a quoted constant and null have none yet.
enum Term {
    Typed(Type, String),
    Text(String),
    Null,
}

impl Term {
    fn of(&self) -> Option<Type> {
        match self {
            Term::Typed(of, _) => Some(*of),
            Term::Text(_) | Term::Null => None,
        }
    }
}

struct Compiler<'a> {
    catalogue: &'a dyn Catalogue,
    place: Place<'a>,
}

impl Compiler<'_> {
    fn column(&self, name: &str, at: usize) -> Result<Column, Fault> {
        self.catalogue.column(name).ok_or_else(|| {
            let names = self.catalogue.names();
            let hint = match nearest(name, names.iter().map(String::as_str)) {
                Some(near) => format!("Did you mean \"{near}\"? A constant stands in single quotes."),
                None => format!("Its columns are {}. A constant stands in single quotes.", names.join(", ")),
            };
            Fault::new(at, Why::Column, format!("the table has no column \"{name}\""), hint)
        })
    }

    fn text_of(&self, row: Row, column: &Column) -> String {
        let image = match row {
            Row::Before => self.place.before,
            Row::After => self.place.after,
        };
        format!("({image})[{}]", column.place)
    }

    fn term(&self, expr: &Expr) -> Result<Term, Fault> {
        Ok(match &expr.node {
            Node::Column(row, name) => {
                let column = self.column(name, expr.at)?;
                let text = self.text_of(*row, &column);
                let sql = match (column.of, &column.collation) {
                    (Type::Base(_), Some(collation)) => format!("({text}::{} COLLATE {collation})", self.catalogue.sql_name(column.of)),
                    (Type::Base(_), None) => format!("{text}::{}", self.catalogue.sql_name(column.of)),
                    (Type::Enum(_) | Type::Other(_), _) => text,
                };
                Term::Typed(column.of, sql)
            }
            Node::Number(digits) => Term::Typed(number_type(digits), digits.clone()),
            Node::Text(text) => Term::Text(text.clone()),
            Node::Null => Term::Null,
            Node::Bool(value) => Term::Typed(BOOL, value.to_string()),
            Node::Changed(name) => {
                let column = self.column(name, expr.at)?;
                Term::Typed(BOOL, format!("({} IS DISTINCT FROM {})", self.text_of(Row::Before, &column), self.text_of(Row::After, &column)))
            }
            Node::Event(event) => {
                let there = |image, is| format!("{image} IS {}NULL", if is { "NOT " } else { "" });
                let (was, is) = match event {
                    Event::Inserted => (false, true),
                    Event::Updated => (true, true),
                    Event::Deleted => (true, false),
                };
                Term::Typed(BOOL, format!("({} AND {})", there(self.place.before, was), there(self.place.after, is)))
            }
            Node::Negative(of) => {
                let term = self.term(of)?;
                let operator = self.operator("-", None, term.of(), expr, of)?;
                Term::Typed(operator.result, format!("(OPERATOR(pg_catalog.-) {})", self.typed(term, operator.right, of)?))
            }
            Node::Binary(sign, a, b) => {
                let (left, right) = (self.term(a)?, self.term(b)?);
                self.binary(sign, left, a, right, b)?
            }
            Node::IsNull(of, negated) => {
                let term = self.term(of)?;
                let sql = match term {
                    Term::Typed(_, sql) => sql,
                    Term::Text(text) => literal(&text),
                    Term::Null => "NULL".to_string(),
                };
                Term::Typed(BOOL, format!("({sql} IS {}NULL)", if *negated { "NOT " } else { "" }))
            }
            Node::Distinct(a, b, negated) => {
                let (a, b) = self.alike(self.term(a)?, a, self.term(b)?, b)?;
                Term::Typed(BOOL, format!("({a} IS {}DISTINCT FROM {b})", if *negated { "NOT " } else { "" }))
            }
            Node::In(of, list, negated) => {
                let any = list.iter().map(|item| self.compare("=", of, item)).collect::<Result<Vec<_>, _>>()?.join(" OR ");
                Term::Typed(BOOL, format!("({}({any}))", if *negated { "NOT " } else { "" }))
            }
            Node::Between(of, low, high, negated) => {
                let (above, below) = (self.compare(">=", of, low)?, self.compare("<=", of, high)?);
                Term::Typed(BOOL, format!("({}({above} AND {below}))", if *negated { "NOT " } else { "" }))
            }
            Node::Not(of) => Term::Typed(BOOL, format!("(NOT {})", self.boolean(self.term(of)?, of)?)),
            Node::And(parts) => Term::Typed(BOOL, self.joined(parts, " AND ")?),
            Node::Or(parts) => Term::Typed(BOOL, self.joined(parts, " OR ")?),
        })
    }

    fn joined(&self, parts: &[Expr], between: &str) -> Result<String, Fault> {
        let parts = parts.iter().map(|part| self.boolean(self.term(part)?, part)).collect::<Result<Vec<_>, _>>()?;
        Ok(format!("({})", parts.join(between)))
    }

    /// What stands where something true or false must.
    fn boolean(&self, term: Term, expr: &Expr) -> Result<String, Fault> {
        match term {
            Term::Typed(of, sql) if of == BOOL => Ok(sql),
            Term::Null => Ok("NULL::pg_catalog.bool".to_string()),
            Term::Typed(of, _) => Err(Fault::new(
                expr.at,
                Why::Type,
                format!("a condition is expected, but this is of type {}", self.catalogue.name(of)),
                "Compare it with something: 'qty < 10'.",
            )),
            Term::Text(_) => Err(Fault::new(expr.at, Why::Type, "a condition is expected, but this is a constant", "Compare a column with it.")),
        }
    }

    fn operator(&self, name: &str, left: Option<Option<Type>>, right: Option<Type>, expr: &Expr, on: &Expr) -> Result<Operator, Fault> {
        let known = |of: Option<Type>| of.map_or("a constant".to_string(), |of| self.catalogue.name(of));
        let other = [left.flatten(), right].into_iter().flatten().any(|of| !matches!(of, Type::Base(_)));
        let found = if other { None } else { self.catalogue.operator(name, left, right) };
        found.ok_or_else(|| {
            let operands = match left {
                Some(left) => format!("{} {name} {}", known(left), known(right)),
                None => format!("{name} {}", known(right)),
            };
            let about = match &on.node {
                Node::Column(_, column) => format!(", as column \"{column}\" would need"),
                _ => String::new(),
            };
            let hint = match (left.flatten(), right) {
                (None, None) => "Compare a column with a constant.",
                _ if other => "Values of types that users made can be tested with changed(column), IS NULL and IS NOT NULL.",
                _ => "Compare values of one type, or write the constant in quotes so that it takes the column's type.",
            };
            Fault::new(expr.at, Why::Type, format!("PostgreSQL has no operator {operands}{about}"), hint)
        })
    }

    /// The constant as SQL of a type.
    fn typed(&self, term: Term, of: Option<Type>, expr: &Expr) -> Result<String, Fault> {
        let of = of.unwrap_or(TEXT);
        match term {
            Term::Typed(_, sql) => Ok(sql),
            Term::Null => Ok(format!("NULL::{}", self.catalogue.sql_name(of))),
            Term::Text(text) => match self.catalogue.constant(of, &text) {
                Ok(()) => Ok(format!("{}::{}", literal(&text), self.catalogue.sql_name(of))),
                Err(reason) => Err(Fault::new(expr.at, Why::Constant, reason, "Write a constant that the type of the other side takes.")),
            },
        }
    }

    fn compare(&self, sign: &'static str, a: &Expr, b: &Expr) -> Result<String, Fault> {
        match self.binary(sign, self.term(a)?, a, self.term(b)?, b)? {
            Term::Typed(_, sql) => Ok(sql),
            Term::Text(_) | Term::Null => Ok("NULL::pg_catalog.bool".to_string()),
        }
    }

    fn binary(&self, sign: &'static str, left: Term, a: &Expr, right: Term, b: &Expr) -> Result<Term, Fault> {
        if let Some((left, right)) = self.labels(&left, a, &right, b)? {
            let equal = matches!(sign, "=" | "<>");
            if !equal && !matches!(sign, "<" | "<=" | ">" | ">=") {
                self.operator(sign, Some(left.of()), right.of(), a, a)?;
            }
            let side = |(of, sql): (u32, String)| {
                if equal {
                    sql
                } else {
                    format!("(SELECT e.enumsortorder FROM pg_catalog.pg_enum e WHERE e.enumtypid = {of} AND e.enumlabel::pg_catalog.text = {sql})")
                }
            };
            let (Some(l), Some(r)) = (left.label(), right.label()) else { return Ok(Term::Null) };
            return Ok(Term::Typed(BOOL, format!("({} OPERATOR(pg_catalog.{sign}) {})", side(l), side(r))));
        }
        let on = if matches!(a.node, Node::Column(..)) { a } else { b };
        let operator = match self.less_interval(sign, &left, &right) {
            Some(operator) => operator,
            None => self.operator(sign, Some(left.of()), right.of(), a, on)?,
        };
        let (of_left, of_right) = (operator.left.or(left.of()).or(right.of()), operator.right.or(right.of()).or(left.of()));
        let left = self.typed(left, of_left, a)?;
        let mut right = self.typed(right, of_right, b)?;
        if matches!(sign, "/" | "%") {
            right = format!("NULLIF({right}, 0)");
        }
        Ok(Term::Typed(operator.result, format!("({left} OPERATOR(pg_catalog.{sign}) {right})")))
    }

    /// `at - '1 day'`: PostgreSQL would read the constant as another time, since two times can be subtracted; what is no time, but is an interval, is one here.
    fn less_interval(&self, sign: &str, left: &Term, right: &Term) -> Option<Operator> {
        const INTERVAL: Type = Type::Base(1186);
        let (Some(of), Term::Text(text)) = (left.of(), right) else { return None };
        if sign != "-" || of == INTERVAL || self.catalogue.constant(of, text).is_ok() || self.catalogue.constant(INTERVAL, text).is_err() {
            return None;
        }
        self.catalogue.operator("-", Some(Some(of)), Some(INTERVAL))
    }

    /// Both sides where they are labels of one enum.
    fn labels(&self, left: &Term, a: &Expr, right: &Term, b: &Expr) -> Result<Option<(Label, Label)>, Fault> {
        let of = match (left.of(), right.of()) {
            (Some(Type::Enum(l)), Some(Type::Enum(r))) if l == r => l,
            (Some(Type::Enum(of)), None) | (None, Some(Type::Enum(of))) => of,
            _ => return Ok(None),
        };
        let side = |term: &Term, expr: &Expr| match term {
            Term::Typed(_, sql) => Ok(Label(of, Some(sql.clone()))),
            Term::Null => Ok(Label(of, None)),
            Term::Text(text) => match self.catalogue.constant(Type::Enum(of), text) {
                Ok(()) => Ok(Label(of, Some(format!("{}::pg_catalog.text", literal(text))))),
                Err(reason) => Err(Fault::new(expr.at, Why::Constant, reason, "Write one of the type's labels.")),
            },
        };
        Ok(Some((side(left, a)?, side(right, b)?)))
    }

    /// Both sides of IS DISTINCT FROM.
    fn alike(&self, left: Term, a: &Expr, right: Term, b: &Expr) -> Result<(String, String), Fault> {
        if let Some((left, right)) = self.labels(&left, a, &right, b)? {
            let side = |label: Label| label.1.unwrap_or_else(|| "NULL::pg_catalog.text".to_string());
            return Ok((side(left), side(right)));
        }
        let operator = self.operator("=", Some(left.of()), right.of(), a, a)?;
        let (of_left, of_right) = (operator.left.or(left.of()).or(right.of()), operator.right.or(right.of()).or(left.of()));
        Ok((self.typed(left, of_left, a)?, self.typed(right, of_right, b)?))
    }
}

/// A value of an enum: its type and SQL for its label; none for null.
struct Label(u32, Option<String>);

impl Label {
    fn of(&self) -> Option<Type> {
        Some(Type::Enum(self.0))
    }

    fn label(self) -> Option<(u32, String)> {
        self.1.map(|sql| (self.0, sql))
    }
}

/// The type PostgreSQL gives a number without quotes.
fn number_type(digits: &str) -> Type {
    const INT4: Type = Type::Base(23);
    const INT8: Type = Type::Base(20);
    const NUMERIC: Type = Type::Base(1700);
    match (digits.parse::<i32>(), digits.parse::<i64>()) {
        (Ok(_), _) => INT4,
        (_, Ok(_)) => INT8,
        _ => NUMERIC,
    }
}
