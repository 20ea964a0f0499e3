//! How large a client's constraint becomes while it is compiled.
//!
//! llguidance bounds the symbols of a grammar, the parts of a schema and the states of a lexer, but not the texts in them.
//! A class such as `\w` is two bytes and becomes 6 to 40 KB of ranges. A schema's pattern is copied for each combination of
//! the alternatives beside it, of which there may be 50,000. A pattern that ignores case looks at each character of its classes. So all
//! are checked before they are written out.

use baton_schemas::constraint::{Constraint, Rule};
use serde_json::{Map, Value};

use super::case_folding;

/// The most bytes of one pattern: a client's grammar as a pattern, which has 64 KiB at most, and what formats of calls put
/// around it. Each byte takes 100 to 200 bytes while it is compiled.
const MAX_PATTERN_BYTES: usize = 65 << 10;

/// The most classes of Unicode in one pattern: 6 MB of `\w`, or 40 MB of `\W`.
const MAX_CLASSES: usize = 1000;

/// The most classes of all patterns that ignore case, by [`case_folding`]: a second of work.
const MAX_FOLDED: usize = 256;

/// The most bytes of a text in a schema that combines alternatives: 25 MB in all combinations.
const MAX_COMBINED_BYTES: usize = 512;

/// Checks that the texts of a constraint take little memory while they are compiled. Errors: the reason, in words.
pub(crate) fn check(constraint: &Constraint) -> Result<(), &'static str> {
    let mut n_folded = 0;
    match constraint {
        Constraint::JsonObject => Ok(()),
        Constraint::JsonSchema { schema, held, .. } => check_schema(held.as_ref().unwrap_or(schema), &mut n_folded),
        Constraint::Grammar { rule, .. } => check_rule(rule, &mut n_folded),
    }
}

fn check_rule(rule: &Rule, n_folded: &mut usize) -> Result<(), &'static str> {
    match rule {
        Rule::Pattern(pattern) => check_pattern(pattern, n_folded),
        Rule::Json(schema) => check_schema(schema, n_folded),
        Rule::Sequence(rules) | Rule::OneOf(rules) | Rule::FirstKnown(rules) | Rule::Rules(rules) => {
            rules.iter().try_for_each(|rule| check_rule(rule, n_folded))
        }
        Rule::For { rule, .. } | Rule::Repeat { rule, .. } => check_rule(rule, n_folded),
        Rule::Literal(_) | Rule::Plain(_) | Rule::Until(_) | Rule::Ref(_) => Ok(()),
    }
}

fn check_schema(schema: &Value, n_folded: &mut usize) -> Result<(), &'static str> {
    check_patterns(schema, n_folded)?;
    if longest_text(schema) > MAX_COMBINED_BYTES && combines(schema) {
        return Err("it combines alternatives with texts that are too long");
    }
    Ok(())
}

/// `n_folded` is that of the patterns before.
fn check_pattern(pattern: &str, n_folded: &mut usize) -> Result<(), &'static str> {
    *n_folded += case_folding::n_folded(pattern);
    match pattern.len() <= MAX_PATTERN_BYTES && n_classes(pattern) <= MAX_CLASSES {
        true if *n_folded <= MAX_FOLDED => Ok(()),
        true => Err("its regular expressions that ignore case have too many classes"),
        false => Err("its regular expression is too large"),
    }
}

/// Counts the classes of Unicode in a pattern: `\w`, `\pL` and others.
fn n_classes(pattern: &str) -> usize {
    let mut bytes = pattern.bytes();
    let mut n = 0;
    while let Some(byte) = bytes.next() {
        let is_class = byte == b'\\' && bytes.next().is_some_and(|letter| b"wWdDsSpP".contains(&letter));
        n += usize::from(is_class);
    }
    n
}

/// Checks the patterns in a schema.
fn check_patterns(schema: &Value, n_folded: &mut usize) -> Result<(), &'static str> {
    if let Some(Value::String(pattern)) = schema.get("pattern") {
        check_pattern(pattern, n_folded)?;
    }
    if let Some(Value::Object(patterns)) = schema.get("patternProperties") {
        patterns.keys().try_for_each(|pattern| check_pattern(pattern, n_folded))?;
    }
    parts(schema).try_for_each(|part| check_patterns(part, n_folded))
}

/// Returns the bytes of the longest key or string in a schema, without its descriptions.
fn longest_text(schema: &Value) -> usize {
    match schema {
        Value::String(text) => text.len(),
        Value::Object(fields) => {
            let is_words = |key: &str, value: &Value| value.is_string() && is_annotation(key);
            let held = fields.iter().filter(|(key, value)| !is_words(key, value));
            held.map(|(key, value)| key.len().max(longest_text(value))).max().unwrap_or(0)
        }
        _ => parts(schema).map(longest_text).max().unwrap_or(0),
    }
}

/// Returns true if a part of a schema describes a value in several ways at once, with alternatives or references among
/// them.
fn combines(schema: &Value) -> bool {
    schema.as_object().is_some_and(|fields| n_ways(fields) > 1) || parts(schema).any(combines)
}

/// Counts the ways in which a schema describes one value: by its own keywords, and by those that lead to other schemas.
fn n_ways(fields: &Map<String, Value>) -> usize {
    const LEADING: [&str; 5] = ["allOf", "anyOf", "oneOf", "enum", "$ref"];
    let ways = |(key, value): (&str, &Value)| match key {
        "allOf" => value.as_array().map_or(0, Vec::len),
        _ => 1,
    };
    let leading = LEADING.iter().filter_map(|key| Some(ways((key, fields.get(*key)?)))).sum::<usize>();
    let is_own = |key: &String| {
        !LEADING.contains(&key.as_str())
            && !is_annotation(key)
            && !matches!(key.as_str(), "type" | "$defs" | "definitions")
    };
    leading + usize::from(leading > 0 && fields.keys().any(is_own))
}

/// Returns true for keywords that describe nothing.
fn is_annotation(key: &str) -> bool {
    matches!(key, "title" | "description" | "default" | "examples" | "$comment" | "$schema" | "$id" | "deprecated")
}

/// The values in an array or an object.
fn parts(value: &Value) -> impl Iterator<Item = &Value> {
    let items = value.as_array().into_iter().flatten();
    items.chain(value.as_object().into_iter().flat_map(Map::values))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema(schema: Value) -> Result<(), &'static str> {
        check(&Constraint::exactly(schema, "f"))
    }

    #[test]
    fn classes_are_counted_before_they_are_written_out() {
        for (pattern, n) in [("", 0), (r"\w", 1), (r"\\w", 0), (r"[\p{L}\d]\\\S.\n", 3), ("\\", 0)] {
            assert_eq!(n_classes(pattern), n, "{pattern}");
        }
        let many = r"\pL".repeat(MAX_CLASSES + 1);
        let held = |pattern: &str| Rule::optional(Rule::OneOf(vec![Rule::text(), Rule::Pattern(pattern.to_owned())]));
        let rule = |pattern: &str| check(&Constraint::Grammar { rule: held(pattern), field: "f".to_owned() });
        assert_eq!(rule(&many[3..]), Ok(()));
        assert!(rule(&many).is_err() && rule(&"x".repeat(MAX_PATTERN_BYTES + 1)).is_err());
        assert_eq!(schema(json!({ "items": { "pattern": many[3..], "title": many } })), Ok(()));
        assert!(schema(json!({ "items": { "pattern": many } })).is_err());
        assert!(schema(json!({ "items": { "patternProperties": { many: {} } } })).is_err());
    }

    #[test]
    fn the_other_case_is_looked_for_in_few_classes_of_all_patterns() {
        let folded = |n: usize| format!("(?i){}", r"[\D]".repeat(n));
        let several = |n: usize| {
            let properties: Map<String, Value> =
                (0..10).map(|i| (i.to_string(), json!({ "pattern": folded(n) }))).collect();
            schema(json!({ "type": "object", "properties": properties }))
        };
        assert_eq!((several(25), several(26).is_err()), (Ok(()), true));
        let rule = |n: usize| check(&Constraint::Grammar { rule: Rule::Pattern(folded(n)), field: "f".to_owned() });
        assert_eq!((rule(256), rule(257).is_err()), (Ok(()), true));
    }

    #[test]
    fn long_texts_are_not_copied_for_each_combination() {
        let (long, short) = ("x".repeat(3000), "x".repeat(30));
        let combined = |text: &str| {
            let any = |i: usize| json!({ "anyOf": [{ "pattern": format!("{text}{i}") }, { "pattern": text }] });
            json!({ "properties": { "a": { "allOf": (0..14).map(any).collect::<Vec<_>>() } } })
        };
        assert_eq!(schema(combined(&short)), Ok(()));
        assert!(schema(combined(&long)).is_err());
        let beside = |text: &str| json!({ "items": { "enum": ["a", "b"], "pattern": text, "type": "string" } });
        assert!(schema(beside(&short)).is_ok() && schema(beside(&long)).is_err());
        let referring =
            |text: &str| json!({ "$defs": { "a": { "pattern": text } }, "$ref": "#/$defs/a", "minLength": 1 });
        assert!(schema(referring(&short)).is_ok() && schema(referring(&long)).is_err());
        // Each of these is one way to describe the value.
        for alone in [
            json!({ "anyOf": [{ "pattern": long }, { "type": "null" }], "description": long, "default": null }),
            json!({ "properties": { "input": { "type": "string", "pattern": long } }, "required": ["input"] }),
            json!({ "type": "string", "enum": [long, "b"] }),
            json!({ "$defs": { "a": { "pattern": long } }, "allOf": [{ "$ref": "#/$defs/a" }] }),
            json!({ "anyOf": [{}, {}], "required": ["a"], "description": long }),
        ] {
            assert_eq!(schema(alone.clone()), Ok(()), "{alone}");
        }
    }
}
