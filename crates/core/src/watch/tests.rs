use super::*;
use proptest::prelude::*;

/// A table of qty int, price numeric, name text, at timestamptz, done bool, risk (an enum), spot (of a user's type); numbers and same types have operators.
struct Shop;

const INT: u32 = 23;
const NUMERIC: u32 = 1700;
const TEXT: u32 = 25;
const AT: u32 = 1184;
const INTERVAL: u32 = 1186;
const BOOL: u32 = 16;
const RISK: u32 = 90_000;
const SPOT: u32 = 90_001;

impl Catalogue for Shop {
    fn column(&self, name: &str) -> Option<Column> {
        let place = self.names().iter().position(|known| known == name)?;
        let of = match name {
            "qty" => Type::Base(INT),
            "price" => Type::Base(NUMERIC),
            "at" => Type::Base(AT),
            "done" => Type::Base(BOOL),
            "risk" => Type::Enum(RISK),
            "spot" => Type::Other(SPOT),
            _ => Type::Base(TEXT),
        };
        Some(Column { place: i16::try_from(place).unwrap() + 1, of, collation: (name == "Odd name").then(|| "pg_catalog.\"C\"".to_string()) })
    }

    fn names(&self) -> Vec<String> {
        ["qty", "price", "name", "at", "done", "risk", "spot", "Odd name"].map(str::to_string).to_vec()
    }

    fn operator(&self, name: &str, left: Option<Option<Type>>, right: Option<Type>) -> Option<Operator> {
        let number = |of: Option<Type>| matches!(of, Some(Type::Base(INT | NUMERIC)));
        let compares = !matches!(name, "+" | "-" | "*" | "/" | "%");
        let Some(left) = left else { return number(right).then(|| Operator { left: None, right, result: right.unwrap() }) };
        if left == Some(Type::Base(AT)) && (name == "+" || name == "-" && right == Some(Type::Base(INTERVAL))) {
            return Some(Operator { left, right: Some(Type::Base(INTERVAL)), result: Type::Base(AT) });
        }
        let (l, r) = (left.or(right)?, right.or(left)?);
        if !(l == r || number(Some(l)) && number(Some(r))) || !compares && !number(Some(l)) {
            return None;
        }
        Some(Operator { left: Some(l), right: Some(r), result: if compares { Type::Base(BOOL) } else { l } })
    }

    fn constant(&self, of: Type, text: &str) -> Result<(), String> {
        match of {
            Type::Base(INT) if text.parse::<i32>().is_err() => Err(format!("\"{text}\" is no integer")),
            Type::Base(AT) if !text.starts_with("20") => Err(format!("\"{text}\" is no time")),
            Type::Base(INTERVAL) if !text.ends_with("day") => Err(format!("\"{text}\" is no interval")),
            Type::Enum(_) if !["low", "high"].contains(&text) => Err(format!("\"{text}\" is no label")),
            _ => Ok(()),
        }
    }

    fn sql_name(&self, of: Type) -> String {
        match of {
            Type::Base(INT) => "pg_catalog.int4",
            Type::Base(NUMERIC) => "pg_catalog.numeric",
            Type::Base(AT) => "pg_catalog.timestamptz",
            Type::Base(INTERVAL) => "pg_catalog.interval",
            Type::Base(BOOL) => "pg_catalog.bool",
            _ => "pg_catalog.text",
        }
        .to_string()
    }

    fn name(&self, of: Type) -> String {
        format!("{of:?}")
    }
}

const PLACE: Place<'static> = Place { before: "b", after: "a" };

fn sql(text: &str) -> String {
    // The part of a condition on the change that its text makes.
    let sql = condition(&parse(&format!("updated() and ({text})")).unwrap(), &Shop, PLACE).unwrap().sql;
    let inner = sql.strip_prefix("(b IS DISTINCT FROM a AND CASE WHEN ((b IS NOT NULL AND a IS NOT NULL) AND ").unwrap();
    inner.strip_suffix(") THEN true ELSE false END)").unwrap().to_string()
}

fn fault(text: &str) -> Fault {
    match parse(text) {
        Err(fault) => fault,
        Ok(expr) => condition(&expr, &Shop, PLACE).unwrap_err(),
    }
}

#[test]
fn operators_bind_as_in_postgresql() {
    for (text, full) in [
        ("a or b and not c", "a or (b and (not c))"),
        ("not a = b", "not (a = b)"),
        ("a = b is null", "(a = b) is null"),
        ("a + b * c < d - e - f", "(a + (b * c)) < ((d - e) - f)"),
        ("- a * b", "(- a) * b"),
        ("a between b + 1 and c and d", "(a between (b + 1) and c) and d"),
        ("a not in (1, 2 + 3) or b", "(a not in (1, (2 + 3))) or b"),
        ("a is distinct from b is not null", "(a is distinct from b) is not null"),
        ("A != before.\"B\"", "after.a <> before.\"B\""),
        ("not not a", "not (not a)"),
    ] {
        assert_eq!(parse(text).unwrap(), parse(full).unwrap(), "{text}");
    }
}

#[test]
fn what_does_not_follow_the_grammar_is_told_with_its_place() {
    for (text, at, says) in [
        ("", 0, "a column, a constant or \"(\" is expected, but the text ends"),
        ("qty <", 5, "the text ends"),
        ("qty < < 3", 6, "but < stands there"),
        ("1 < qty < 3", 8, "comparisons do not chain"),
        ("qty = 3)", 7, "AND, OR or the end is expected, but ) stands there"),
        ("(qty = 3", 8, "\")\" is expected"),
        ("qty in 3", 7, "\"(\" is expected, but 3 stands there"),
        ("qty is 3", 7, "NULL or DISTINCT FROM is expected"),
        ("qty = 'x", 6, "does not end"),
        ("qty = \"x", 6, "does not end"),
        ("qty = 3x", 6, "a number runs into a name"),
        ("qty ; 3", 4, "';' means nothing"),
        ("lower(name) = 'x'", 0, "there is no function lower"),
        ("old.qty = 3", 0, "old is no row"),
        ("qty = and", 6, "but and stands there"),
        ("changed(3)", 8, "the name of a column is expected"),
        ("qty between 3 or 4", 14, "AND is expected"),
        ("é = 'ü' ü", 10, "but ü stands there"),
    ] {
        let fault = fault(text);
        assert!(fault.at == at && fault.message.contains(says) && !fault.hint.is_empty(), "{text}: {fault:?}");
    }
    assert_eq!(fault("é = 'ü' ü").place("é = 'ü' ü"), "at character 9 (\"ü\")");
}

#[test]
fn depth_and_length_have_bounds() {
    for text in [format!("{}qty{}", "(".repeat(60), ")".repeat(60)), format!("{} done", "not ".repeat(60)), format!("qty = {}1", "- ".repeat(60))] {
        assert_eq!(fault(&text).why, Why::Limit);
    }
    assert_eq!(fault(&format!("qty = 1{}", " + 1".repeat(600))).why, Why::Limit);
    assert!(parse(&format!("qty = 1{}", " + 1".repeat(490))).is_ok());
}

#[test]
fn columns_and_constants_get_their_types() {
    assert_eq!(sql("qty < 10"), "((a)[1]::pg_catalog.int4 OPERATOR(pg_catalog.<) 10)");
    assert_eq!(sql("before.qty = '10'"), "((b)[1]::pg_catalog.int4 OPERATOR(pg_catalog.=) '10'::pg_catalog.int4)");
    assert_eq!(
        sql("at + '1 day' < '2026-01-01'"),
        "(((a)[4]::pg_catalog.timestamptz OPERATOR(pg_catalog.+) '1 day'::pg_catalog.interval) OPERATOR(pg_catalog.<) '2026-01-01'::pg_catalog.timestamptz)"
    );
    assert_eq!(
        sql("\"Odd name\" = 'it''s \\'"),
        "(((a)[8]::pg_catalog.text COLLATE pg_catalog.\"C\") OPERATOR(pg_catalog.=) E'it''s \\\\'::pg_catalog.text)"
    );
    assert_eq!(sql("done"), "(a)[5]::pg_catalog.bool");
    assert_eq!(sql("changed(spot)"), "((b)[7] IS DISTINCT FROM (a)[7])");
    assert_eq!(sql("spot is not null"), "((a)[7] IS NOT NULL)");
    assert_eq!(sql("qty is distinct from null"), "((a)[1]::pg_catalog.int4 IS DISTINCT FROM NULL::pg_catalog.int4)");
    assert_eq!(
        sql("qty / price > 1"),
        "(((a)[1]::pg_catalog.int4 OPERATOR(pg_catalog./) NULLIF((a)[2]::pg_catalog.numeric, 0)) OPERATOR(pg_catalog.>) 1)"
    );
    assert_eq!(sql("risk = 'high'"), "((a)[6] OPERATOR(pg_catalog.=) 'high'::pg_catalog.text)");
    assert!(
        sql("risk > 'low'")
            .contains("enumsortorder FROM pg_catalog.pg_enum e WHERE e.enumtypid = 90000 AND e.enumlabel::pg_catalog.text = 'low'::pg_catalog.text)")
    );
}

#[test]
fn what_has_no_type_or_the_wrong_one_is_refused() {
    for (text, at, why, says) in [
        ("qyt < 10", 0, Why::Column, "the table has no column \"qyt\""),
        ("qty", 0, Why::Type, "a condition is expected"),
        ("done and 'x'", 9, Why::Type, "a condition is expected"),
        ("qty < 'ten'", 6, Why::Constant, "\"ten\" is no integer"),
        ("risk = 'middle'", 7, Why::Constant, "no label"),
        ("qty = name", 0, Why::Type, "no operator"),
        ("spot = spot", 0, Why::Type, "no operator"),
        ("risk + 'low' = 'low'", 0, Why::Type, "no operator"),
        ("'a' = 'b'", 0, Why::Type, "no operator a constant = a constant"),
        ("name = price and done", 0, Why::Type, "column \"name\""),
    ] {
        let fault = fault(text);
        assert!(fault.at == at && fault.why == why && fault.message.contains(says) && !fault.hint.is_empty(), "{text}: {fault:?}");
    }
    assert!(fault("qyt < 10").hint.contains("qty"));
}

#[test]
fn a_condition_on_the_row_fires_where_it_becomes_true_and_one_on_the_change_where_it_is() {
    let compiled = |text| condition(&parse(text).unwrap(), &Shop, PLACE).unwrap();
    for text in ["qty < 10", "after.qty is null", "done and not name in ('a')"] {
        assert!(!compiled(text).on_change, "{text}");
    }
    for text in ["before.qty > qty", "changed(qty)", "deleted()", "qty < 10 and (done or inserted())", "qty in (1, before.qty)"] {
        assert!(compiled(text).on_change, "{text}");
    }
    assert_eq!(
        compiled("done").sql,
        "CASE WHEN a IS NULL THEN false WHEN (a)[5]::pg_catalog.bool THEN CASE WHEN b IS NULL THEN true ELSE ((b)[5]::pg_catalog.bool) IS NOT TRUE END ELSE false END"
    );
    assert!(rearm(&parse("qty > 20").unwrap(), &Shop, PLACE).unwrap().starts_with("CASE WHEN a IS NULL THEN true WHEN"));
    assert_eq!(rearm(&parse("qty > 20 or deleted()").unwrap(), &Shop, PLACE).unwrap_err().at, 12);
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![Just("qty".to_string()), Just("select".to_string()), Just("not".to_string()), "[a-zé_][a-z0-9_é \"']{0,6}"]
}

fn expr() -> impl Strategy<Value = Expr> {
    let row = prop_oneof![Just(Row::Before), Just(Row::After)];
    let leaf = prop_oneof![
        (row, name()).prop_map(|(row, name)| Node::Column(row, name)),
        "[0-9]{1,3}(\\.[0-9]{1,2})?(e-?[0-9])?".prop_map(Node::Number),
        "[a-z'\\\\\" é]{0,5}".prop_map(Node::Text),
        any::<bool>().prop_map(Node::Bool),
        Just(Node::Null),
        name().prop_map(Node::Changed),
        prop::sample::select(vec![Event::Inserted, Event::Updated, Event::Deleted]).prop_map(Node::Event),
    ]
    .prop_map(|node| Expr { at: 0, node });
    leaf.prop_recursive(6, 40, 4, |inner| {
        let boxed = inner.clone().prop_map(Box::new);
        let signs = vec!["=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "%"];
        prop_oneof![
            boxed.clone().prop_map(Node::Negative),
            boxed.clone().prop_map(Node::Not),
            (prop::sample::select(signs), boxed.clone(), boxed.clone()).prop_map(|(sign, a, b)| Node::Binary(sign, a, b)),
            (boxed.clone(), any::<bool>()).prop_map(|(a, not)| Node::IsNull(a, not)),
            (boxed.clone(), boxed.clone(), any::<bool>()).prop_map(|(a, b, not)| Node::Distinct(a, b, not)),
            (boxed.clone(), prop::collection::vec(inner.clone(), 1..4), any::<bool>()).prop_map(|(a, list, not)| Node::In(a, list, not)),
            (boxed.clone(), boxed.clone(), boxed, any::<bool>()).prop_map(|(a, b, c, not)| Node::Between(a, b, c, not)),
            prop::collection::vec(inner.clone(), 2..4).prop_map(Node::And),
            prop::collection::vec(inner, 2..4).prop_map(Node::Or),
        ]
        .prop_map(|node| Expr { at: 0, node })
    })
}

proptest! {
    #[test]
    fn a_condition_reads_back_as_it_was(expr in expr()) {
        let text = expr.to_string();
        prop_assert_eq!(parse(&text), Ok(expr), "{}", text);
    }

    #[test]
    fn any_text_is_read_or_refused_at_a_place_in_it(text in ".{0,60}") {
        if let Err(fault) = parse(&text) {
            prop_assert!(text.is_char_boundary(fault.at));
            prop_assert!(!fault.place(&text).is_empty());
        }
    }

    #[test]
    fn any_words_of_the_language_are_compiled_or_refused(
        words in prop::collection::vec(prop::sample::select(vec![
            "qty", "price", "name", "at", "done", "risk", "spot", "before.", "after.", "(", ")", ",", "=", "<>", "<", "+", "-", "*", "/", "%", "and", "or", "not", "in",
            "between", "is", "null", "distinct", "from", "true", "changed", "deleted", "'x'", "'1'", "1", "2.5", "9999999999", "\"Odd name\"",
        ]), 0..14)
    ) {
        let text = words.join(" ");
        if let Ok(expr) = parse(&text) {
            match condition(&expr, &Shop, PLACE) {
                Ok(compiled) => prop_assert!(!compiled.sql.is_empty()),
                Err(fault) => prop_assert!(fault.at <= text.len()),
            }
        }
    }
}
