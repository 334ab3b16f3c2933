//! A condition as text, from which the parser makes the same condition: for the tests of both.

use super::parser::RESERVED;
use super::{Event, Expr, Node, Row};
use std::fmt::{Display, Formatter, Result, Write};

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let negated = |not: &bool| if *not { "NOT " } else { "" };
        match &self.node {
            Node::Column(Row::Before, name) => write!(f, "before.{}", Name(name)),
            Node::Column(Row::After, name) => write!(f, "after.{}", Name(name)),
            Node::Number(digits) => f.write_str(digits),
            Node::Text(text) => write!(f, "'{}'", text.replace('\'', "''")),
            Node::Bool(value) => write!(f, "{value}"),
            Node::Null => f.write_str("null"),
            Node::Changed(name) => write!(f, "changed({})", Name(name)),
            Node::Event(event) => write!(f, "{}()", Event::ALL.iter().find(|(_, known)| known == event).map_or("", |(word, _)| word)),
            Node::Negative(of) => write!(f, "- {}", Part(of)),
            Node::Binary(sign, a, b) => write!(f, "{} {sign} {}", Part(a), Part(b)),
            Node::IsNull(of, not) => write!(f, "{} IS {}NULL", Part(of), negated(not)),
            Node::Distinct(a, b, not) => write!(f, "{} IS {}DISTINCT FROM {}", Part(a), negated(not), Part(b)),
            Node::In(of, list, not) => {
                write!(f, "{} {}IN (", Part(of), negated(not))?;
                join(f, list, ", ")?;
                f.write_char(')')
            }
            Node::Between(of, low, high, not) => write!(f, "{} {}BETWEEN {} AND {}", Part(of), negated(not), Part(low), Part(high)),
            Node::Not(of) => write!(f, "NOT {}", Part(of)),
            Node::And(parts) => join(f, parts, " AND "),
            Node::Or(parts) => join(f, parts, " OR "),
        }
    }
}

fn join(f: &mut Formatter<'_>, parts: &[Expr], between: &str) -> Result {
    for (number, part) in parts.iter().enumerate() {
        if number > 0 {
            f.write_str(between)?;
        }
        write!(f, "{}", Part(part))?;
    }
    Ok(())
}

/// A part of an expression, in parentheses unless it is a single value.
struct Part<'a>(&'a Expr);

impl Display for Part<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        use Node::*;
        match self.0.node {
            Column(..) | Number(_) | Text(_) | Bool(_) | Null | Changed(_) | Event(_) => write!(f, "{}", self.0),
            _ => write!(f, "({})", self.0),
        }
    }
}

/// A name, quoted where it would not be read back.
struct Name<'a>(&'a str);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let plain = self.0.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            && self.0.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            && !RESERVED.contains(&self.0);
        if plain { f.write_str(self.0) } else { write!(f, "\"{}\"", self.0.replace('"', "\"\"")) }
    }
}
