//! A condition's text as tokens.

use super::{Fault, Why};

/// The most tokens a condition has: what is made of it, and every tree in it, is bounded by this.
const MOST: usize = 1000;

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// A name without quotes, folded to lower case as PostgreSQL folds it: perhaps a keyword.
    Word(String),
    /// A name in double quotes.
    Quoted(String),
    /// Digits.
    Number(String),
    /// A constant in single quotes.
    Text(String),
    /// An operator or a sign.
    Sign(&'static str),
    /// The end of the text.
    End,
}

/// A token and where it begins and ends, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub at: usize,
    pub end: usize,
    pub kind: Kind,
}

/// Longer ones first.
const SIGNS: [&str; 16] = ["<>", "!=", "<=", ">=", "=", "<", ">", "+", "-", "*", "/", "%", "(", ")", ",", "."];

/// Whether a character may begin a name.
fn begins(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_' || !c.is_ascii() && c.is_alphanumeric()
}

/// The tokens of a text, the end included.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, Fault> {
    let mut tokens = Vec::new();
    let mut at = 0;
    loop {
        let rest = &text[at..];
        let space = rest.len() - rest.trim_start().len();
        if space > 0 {
            at += space;
            continue;
        }
        let Some(first) = rest.chars().next() else {
            tokens.push(Token { at, end: at, kind: Kind::End });
            return Ok(tokens);
        };
        if tokens.len() == MOST {
            return Err(Fault::new(at, Why::Limit, format!("it has more than {MOST} words and signs"), "Shorten it, or make several watches."));
        }
        let (kind, length) = match first {
            '\'' => quoted(rest, '\'').map(|(text, length)| (Kind::Text(text), length)).ok_or_else(|| {
                Fault::new(at, Why::Syntax, "a quoted constant does not end", "Close it with a single quote; write a quote inside as two.")
            })?,
            '"' => quoted(rest, '"').map(|(text, length)| (Kind::Quoted(text), length)).ok_or_else(|| {
                Fault::new(at, Why::Syntax, "a quoted name does not end", "Close it with a double quote; write a quote inside as two.")
            })?,
            '0'..='9' => number(rest, at)?,
            '.' if rest[1..].starts_with(|c: char| c.is_ascii_digit()) => number(rest, at)?,
            c if begins(c) => {
                let length = rest.find(|c| !(begins(c) || c == '$' || c.is_ascii_digit())).unwrap_or(rest.len());
                (Kind::Word(rest[..length].to_ascii_lowercase()), length)
            }
            _ => match SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
                Some(sign) => (Kind::Sign(sign), sign.len()),
                None => {
                    let hint = "Conditions are made of columns, constants, = <> < <= > >= + - * / %, IN, BETWEEN, IS NULL, IS DISTINCT FROM, AND, OR, NOT and parentheses.";
                    return Err(Fault::new(at, Why::Syntax, format!("the character {first:?} means nothing here"), hint));
                }
            },
        };
        tokens.push(Token { at, end: at + length, kind });
        at += length;
    }
}

/// What stands between two quotes, a doubled one meaning itself, and how many bytes that took; `None` where it does not end.
fn quoted(rest: &str, quote: char) -> Option<(String, usize)> {
    let mut inside = String::new();
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        if c != quote {
            inside.push(c);
        } else if chars.next_if(|(_, next)| *next == quote).is_some() {
            inside.push(quote);
        } else {
            return Some((inside, at + 1));
        }
    }
    None
}

/// `12`, `1.5`, `.5`, `1e-3`.
fn number(rest: &str, at: usize) -> Result<(Kind, usize), Fault> {
    let bytes = rest.as_bytes();
    let digits = |from: usize| bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    let mut end = digits(0);
    if bytes.get(end) == Some(&b'.') {
        end += 1 + digits(end + 1);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        let exponent = digits(end + 1 + sign);
        if exponent > 0 {
            end += 1 + sign + exponent;
        }
    }
    match rest[end..].chars().next() {
        Some(c) if begins(c) || c.is_ascii_digit() => {
            Err(Fault::new(at, Why::Syntax, "a number runs into a name", "Put a space or an operator between them."))
        }
        _ => Ok((Kind::Number(rest[..end].to_string()), end)),
    }
}
