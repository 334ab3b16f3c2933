//! Recursive descent over the tokens, with PostgreSQL's precedence: OR, AND, NOT, IS, comparisons (which do not chain), + and -, then * / %, then a sign.

use super::lexer::{Kind, Token, tokens};
use super::{Event, Expr, Fault, Node, Row, Why};

/// How deep parentheses, NOT and signs may be nested.
const DEEPEST: usize = 50;

/// Words that are no names of columns unless they are quoted.
pub(super) const RESERVED: [&str; 11] = ["and", "or", "not", "is", "null", "in", "between", "distinct", "from", "true", "false"];

const COMPARISONS: [&str; 7] = ["=", "<>", "!=", "<", "<=", ">", ">="];

/// Reads a condition.
pub fn parse(text: &str) -> Result<Expr, Fault> {
    let mut parser = Parser { text, tokens: tokens(text)?, next: 0, depth: 0 };
    let expr = parser.or()?;
    match parser.peek() {
        Kind::End => Ok(expr),
        _ => Err(parser.unexpected("AND, OR or the end")),
    }
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    next: usize,
    depth: usize,
}

type Parsed = Result<Expr, Fault>;

impl Parser<'_> {
    fn token(&self, ahead: usize) -> &Token {
        // The last token is the end, and nothing goes beyond it.
        &self.tokens[(self.next + ahead).min(self.tokens.len() - 1)]
    }

    fn peek(&self) -> &Kind {
        &self.token(0).kind
    }

    fn at(&self) -> usize {
        self.token(0).at
    }

    fn is_word(&self, ahead: usize, word: &str) -> bool {
        matches!(&self.token(ahead).kind, Kind::Word(found) if found == word)
    }

    fn is_sign(&self, ahead: usize, sign: &str) -> bool {
        matches!(self.token(ahead).kind, Kind::Sign(found) if found == sign)
    }

    fn take_word(&mut self, word: &str) -> bool {
        let found = self.is_word(0, word);
        self.next += usize::from(found);
        found
    }

    fn take_sign(&mut self, sign: &str) -> bool {
        let found = self.is_sign(0, sign);
        self.next += usize::from(found);
        found
    }

    fn unexpected(&self, expected: &str) -> Fault {
        let token = self.token(0);
        let found = match token.kind {
            Kind::End => "the text ends".to_string(),
            _ => format!("{} stands there", &self.text[token.at..token.end]),
        };
        Fault::new(
            token.at,
            Why::Syntax,
            format!("{expected} is expected, but {found}"),
            "The grammar is in docs/watches.md, such as 'qty < 10 and not discontinued'.",
        )
    }

    fn need_sign(&mut self, sign: &str) -> Result<(), Fault> {
        if self.take_sign(sign) { Ok(()) } else { Err(self.unexpected(&format!("\"{sign}\""))) }
    }

    fn need_word(&mut self, word: &str) -> Result<(), Fault> {
        if self.take_word(word) { Ok(()) } else { Err(self.unexpected(&word.to_uppercase())) }
    }

    /// Goes one level down, for as long as `read` runs.
    fn deeper(&mut self, read: fn(&mut Self) -> Parsed) -> Parsed {
        if self.depth == DEEPEST {
            return Err(Fault::new(self.at(), Why::Limit, format!("it is nested more than {DEEPEST} levels deep"), "Write it flatter."));
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    fn chain(&mut self, word: &str, part: fn(&mut Self) -> Parsed, join: fn(Vec<Expr>) -> Node) -> Parsed {
        let first = part(self)?;
        if !self.is_word(0, word) {
            return Ok(first);
        }
        let at = first.at;
        let mut parts = vec![first];
        while self.take_word(word) {
            parts.push(part(self)?);
        }
        Ok(Expr { at, node: join(parts) })
    }

    fn or(&mut self) -> Parsed {
        self.chain("or", Self::and, Node::Or)
    }

    fn and(&mut self) -> Parsed {
        self.chain("and", Self::not, Node::And)
    }

    fn not(&mut self) -> Parsed {
        let at = self.at();
        if self.take_word("not") {
            return Ok(Expr { at, node: Node::Not(Box::new(self.deeper(Self::not)?)) });
        }
        self.test()
    }

    fn test(&mut self) -> Parsed {
        let mut left = self.comparison()?;
        while self.take_word("is") {
            let negated = self.take_word("not");
            let (at, operand) = (left.at, Box::new(left));
            let node = if self.take_word("null") {
                Node::IsNull(operand, negated)
            } else if self.take_word("distinct") {
                self.need_word("from")?;
                Node::Distinct(operand, Box::new(self.comparison()?), negated)
            } else {
                return Err(self.unexpected("NULL or DISTINCT FROM"));
            };
            left = Expr { at, node };
        }
        Ok(left)
    }

    fn comparison(&mut self) -> Parsed {
        let left = self.sum()?;
        let at = left.at;
        let negated = self.is_word(0, "not") && (self.is_word(1, "in") || self.is_word(1, "between"));
        self.next += usize::from(negated);
        let node = if self.take_word("in") {
            self.need_sign("(")?;
            let mut list = vec![self.sum()?];
            while self.take_sign(",") {
                list.push(self.sum()?);
            }
            self.need_sign(")")?;
            Node::In(Box::new(left), list, negated)
        } else if self.take_word("between") {
            let low = self.sum()?;
            self.need_word("and")?;
            Node::Between(Box::new(left), Box::new(low), Box::new(self.sum()?), negated)
        } else if let Some(sign) = COMPARISONS.into_iter().find(|sign| self.is_sign(0, sign)) {
            self.next += 1;
            let right = self.sum()?;
            Node::Binary(if sign == "!=" { "<>" } else { sign }, Box::new(left), Box::new(right))
        } else {
            return Ok(left);
        };
        if COMPARISONS.iter().any(|sign| self.is_sign(0, sign)) {
            return Err(Fault::new(self.at(), Why::Syntax, "comparisons do not chain", "Join them with AND: 'low < x and x < high'."));
        }
        Ok(Expr { at, node })
    }

    fn left_to_right(&mut self, signs: &[&'static str], part: fn(&mut Self) -> Parsed) -> Parsed {
        let mut left = part(self)?;
        while let Some(sign) = signs.iter().find(|sign| self.is_sign(0, sign)) {
            self.next += 1;
            let right = part(self)?;
            left = Expr { at: left.at, node: Node::Binary(sign, Box::new(left), Box::new(right)) };
        }
        Ok(left)
    }

    fn sum(&mut self) -> Parsed {
        self.left_to_right(&["+", "-"], Self::product)
    }

    fn product(&mut self) -> Parsed {
        self.left_to_right(&["*", "/", "%"], Self::signed)
    }

    fn signed(&mut self) -> Parsed {
        let at = self.at();
        if self.take_sign("-") {
            return Ok(Expr { at, node: Node::Negative(Box::new(self.deeper(Self::signed)?)) });
        }
        self.value()
    }

    fn value(&mut self) -> Parsed {
        let token = self.token(0).clone();
        self.next += 1;
        let node = match token.kind {
            Kind::Number(digits) => Node::Number(digits),
            Kind::Text(text) => Node::Text(text),
            Kind::Quoted(name) => Node::Column(Row::After, name),
            Kind::Sign("(") => {
                let inner = self.deeper(Self::or)?;
                self.need_sign(")")?;
                return Ok(inner);
            }
            Kind::Word(word) => return self.word(token.at, word),
            _ => {
                self.next -= 1;
                return Err(self.unexpected("a column, a constant or \"(\""));
            }
        };
        Ok(Expr { at: token.at, node })
    }

    /// What a word begins; it has been taken.
    fn word(&mut self, at: usize, word: String) -> Parsed {
        let called = self.is_sign(0, "(");
        if let Some((_, event)) = Event::ALL.iter().find(|(known, _)| called && *known == word) {
            self.next += 1;
            self.need_sign(")")?;
            return Ok(Expr { at, node: Node::Event(*event) });
        }
        let node = match word.as_str() {
            "true" => Node::Bool(true),
            "false" => Node::Bool(false),
            "null" => Node::Null,
            "before" if self.take_sign(".") => Node::Column(Row::Before, self.name()?),
            "after" if self.take_sign(".") => Node::Column(Row::After, self.name()?),
            "changed" if called => {
                self.next += 1;
                let name = self.name()?;
                self.need_sign(")")?;
                Node::Changed(name)
            }
            _ if called && !RESERVED.contains(&word.as_str()) => {
                let hint = "There are changed(column), inserted(), updated() and deleted(), and no functions of SQL.";
                return Err(Fault::new(at, Why::Syntax, format!("there is no function {word}"), hint));
            }
            _ if self.is_sign(0, ".") => {
                return Err(Fault::new(at, Why::Syntax, format!("{word} is no row"), "Write before.column or after.column."));
            }
            reserved if RESERVED.contains(&reserved) => {
                self.next -= 1;
                return Err(self.unexpected("a column, a constant or \"(\""));
            }
            _ => Node::Column(Row::After, word),
        };
        Ok(Expr { at, node })
    }

    fn name(&mut self) -> Result<String, Fault> {
        let name = match self.peek() {
            Kind::Word(word) => word.clone(),
            Kind::Quoted(name) => name.clone(),
            _ => return Err(self.unexpected("the name of a column")),
        };
        self.next += 1;
        Ok(name)
    }
}
