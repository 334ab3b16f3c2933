//! Conditions of watches: a small language over the row before and after a change. [`parse`] reads a text, [`compile`] gives it types and makes it SQL in which every
//! operator is one of `pg_catalog`; nothing a user wrote reaches PostgreSQL's parser but checked names of columns' places, numbers and quoted constants.

mod compile;
mod lexer;
mod parser;
#[cfg(test)]
mod print;

pub use compile::{Catalogue, Column, Compiled, Operator, Place, Type, condition, rearm};
pub use parser::parse;

/// A condition or a part of one. Two are equal where they mean the same, wherever they stand in their texts.
#[derive(Clone, Debug)]
pub struct Expr {
    /// Where it begins in the text, in bytes.
    pub at: usize,
    /// What it is.
    pub node: Node,
}

impl PartialEq for Expr {
    fn eq(&self, other: &Self) -> bool {
        self.node == other.node
    }
}

/// Which of the two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// As it was before the transaction.
    Before,
    /// As it is after it.
    After,
}

/// What became of the row as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// There was none before.
    Inserted,
    /// It is there before and after.
    Updated,
    /// There is none after.
    Deleted,
}

impl Event {
    /// Every event with the word for it.
    pub const ALL: [(&'static str, Event); 3] = [("inserted", Event::Inserted), ("updated", Event::Updated), ("deleted", Event::Deleted)];
}

/// The kinds of expressions.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `before.name`, `after.name` or `name`, which means the row after.
    Column(Row, String),
    /// Digits, perhaps with a fraction and an exponent.
    Number(String),
    /// A quoted constant, which takes its type from what it meets.
    Text(String),
    /// `true` or `false`.
    Bool(bool),
    /// `null`.
    Null,
    /// `changed(name)`.
    Changed(String),
    /// `inserted()` and the like.
    Event(Event),
    /// `-a`.
    Negative(Box<Expr>),
    /// Arithmetic or a comparison: the operator as PostgreSQL writes it.
    Binary(&'static str, Box<Expr>, Box<Expr>),
    /// `a IS NULL`; negated where true.
    IsNull(Box<Expr>, bool),
    /// `a IS DISTINCT FROM b`; negated where true.
    Distinct(Box<Expr>, Box<Expr>, bool),
    /// `a IN (b, …)`; negated where true.
    In(Box<Expr>, Vec<Expr>, bool),
    /// `a BETWEEN b AND c`; negated where true.
    Between(Box<Expr>, Box<Expr>, Box<Expr>, bool),
    /// `NOT a`.
    Not(Box<Expr>),
    /// `a AND b …`, two or more.
    And(Vec<Expr>),
    /// `a OR b …`, two or more.
    Or(Vec<Expr>),
}

/// Why a text is no condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where, in bytes.
    pub at: usize,
    /// What kind of fault it is.
    pub why: Why,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: String,
}

/// Kinds of faults, for their SQLSTATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The text does not follow the grammar.
    Syntax,
    /// No such column.
    Column,
    /// Types that do not go together.
    Type,
    /// A constant that its type does not take.
    Constant,
    /// Too long, too deep.
    Limit,
}

impl Fault {
    fn new(at: usize, why: Why, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Fault { at, why, message: message.into(), hint: hint.into() }
    }

    /// The character at which it is, from 1, and the rest of the text from there, cut short.
    pub fn place(&self, text: &str) -> String {
        const SHOWN: usize = 24;
        let at = (0..=self.at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let number = text[..at].chars().count() + 1;
        let rest: String = text[at..].split_whitespace().collect::<Vec<_>>().join(" ");
        match rest.chars().count() {
            0 => "at its end".to_string(),
            n if n > SHOWN => format!("at character {number} (\"{}…\")", rest.chars().take(SHOWN).collect::<String>()),
            _ => format!("at character {number} (\"{rest}\")"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
