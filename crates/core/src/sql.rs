//! Writing SQL.

/// A text as an SQL literal, the same whatever `standard_conforming_strings` says.
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') { format!("E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn quotes_and_backslashes_stay_text() {
        assert_eq!(literal("it's"), "'it''s'");
        assert_eq!(literal(r"\' or 1=1"), r"E'\\'' or 1=1'");
    }
}
