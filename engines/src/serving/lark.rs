//! A [`Rule`] in llguidance's dialect of Lark.
//!
//! The vocabulary distinguishes text from control tokens here: text in a literal that spells a control token becomes
//! that token, and no pattern matches one.

use std::fmt::Write;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use baton_schemas::constraint::Rule;
use serde_json::{Value, json};

/// The grammar of a rule.
pub(crate) fn write(rule: &Rule, vocabulary: &Vocabulary) -> String {
    let control = vocabulary.control().map(|t| (vocabulary.piece(t), t));
    let control = control.filter_map(|(piece, t)| Some((String::from_utf8(piece).ok()?, t)));
    write_with(rule, control.filter(|(piece, _)| !piece.is_empty()).collect())
}

fn write_with(rule: &Rule, control: Vec<(String, Token)>) -> String {
    let mut writer = LarkWriter { control, rules: String::new(), n_rules: 0, named: Vec::new() };
    let start = writer.expression(rule);
    format!("start: {start}\n{}", writer.rules)
}

struct LarkWriter {
    control: Vec<(String, Token)>,
    /// Rules that expressions refer to.
    rules: String,
    n_rules: usize,
    /// The names of the rules that a [`Rule::Ref`] may mean.
    named: Vec<String>,
}

impl LarkWriter {
    fn expression(&mut self, rule: &Rule) -> String {
        match rule {
            Rule::Literal(text) => self.literal(text),
            Rule::Plain(text) => quoted(text),
            Rule::Json(schema) => {
                let schema = if *schema == Value::Null { Value::Bool(true) } else { with_settings(schema.clone()) };
                self.rule("j", "", &format!("%json {schema}"))
            }
            Rule::Pattern(pattern) => format!("/{}/", slashed(pattern)),
            Rule::Until(end) => match self.control_at(end) {
                Some((token, "")) => format!("/(.|\\n)*/ <[{token}]>"),
                _ => self.rule("u", "[lazy]", &format!("/(.|\\n)*/ {}", quoted(end))),
            },
            Rule::Sequence(rules) => self.joined(rules, " "),
            Rule::OneOf(rules) => self.joined(rules, " | "),
            // The compiler decides about the alternatives.
            Rule::FirstKnown(rules) => self.joined(&rules[..rules.len().min(1)], " "),
            Rule::For { rule, .. } => self.expression(rule),
            Rule::Rules(rules) => {
                let names = rules.iter().map(|_| self.new_name("g")).collect();
                let outer = std::mem::replace(&mut self.named, names);
                for (at, rule) in rules.iter().enumerate() {
                    let body = self.expression(rule);
                    let name = self.named[at].clone();
                    self.write(&name, &body);
                }
                let names = std::mem::replace(&mut self.named, outer);
                names.into_iter().next().unwrap_or_else(|| quoted(""))
            }
            // A reference to no rule leads to none, so the compiler refuses it.
            Rule::Ref(at) => self.named.get(*at as usize).cloned().unwrap_or_else(|| "no_rule".to_owned()),
            // Lark cannot express zero repetitions.
            Rule::Repeat { max: Some(0), .. } => quoted(""),
            Rule::Repeat { rule, min, max } => {
                let expression = self.expression(rule);
                match max {
                    Some(max) => format!("({expression}){{{min},{max}}}"),
                    None => format!("({expression}){{{min},}}"),
                }
            }
        }
    }

    fn joined(&mut self, rules: &[Rule], by: &str) -> String {
        let expressions: Vec<String> = rules.iter().map(|rule| self.expression(rule)).collect();
        if expressions.is_empty() { "\"\"".to_owned() } else { format!("({})", expressions.join(by)) }
    }

    fn rule(&mut self, prefix: &str, attribute: &str, body: &str) -> String {
        let name = self.new_name(prefix);
        self.write(&format!("{name}{attribute}"), body);
        name
    }

    fn new_name(&mut self, prefix: &str) -> String {
        self.n_rules += 1;
        format!("{prefix}{}", self.n_rules - 1)
    }

    fn write(&mut self, head: &str, body: &str) {
        let written = writeln!(self.rules, "{head}: {body}");
        debug_assert!(written.is_ok(), "a String takes everything");
    }

    /// A literal as a sequence of strings and control tokens.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            if let Some((token, after)) = self.control_at(rest) {
                if !plain.is_empty() {
                    parts.push(quoted(&std::mem::take(&mut plain)));
                }
                parts.push(format!("<[{token}]>"));
                rest = after;
            } else {
                plain.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
        if !plain.is_empty() || parts.is_empty() {
            parts.push(quoted(&plain));
        }
        parts.join(" ")
    }

    /// The longest control token at the start of a text, and the text after it.
    fn control_at<'t>(&self, text: &'t str) -> Option<(Token, &'t str)> {
        let found =
            self.control.iter().filter_map(|(piece, token)| Some((piece.len(), *token, text.strip_prefix(piece)?)));
        found.max_by_key(|(n_bytes, ..)| *n_bytes).map(|(_, token, rest)| (token, rest))
    }
}

/// A regular expression whose slashes are escaped, because a slash ends it.
fn slashed(pattern: &str) -> String {
    let mut is_escaped = false;
    let mut slashed = String::with_capacity(pattern.len());
    for c in pattern.chars() {
        if c == '/' && !is_escaped {
            slashed.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        slashed.push(c);
    }
    slashed
}

/// A string literal. Lark's are JSON's, except for one character that JSON does not escape.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// The schema with Baton's settings: one space after commas and colons, and no other white space. Unbounded white space can
/// be written forever, and bounded indentation makes replies longer, not better (docs/engine.md).
pub(crate) fn with_settings(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        let settings = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
        fields.insert("x-guidance".into(), settings);
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: Rule, expected: &str) {
        assert_eq!(write_with(&rule, vec![("<|m|>".to_owned(), 7), ("<|m|>x".to_owned(), 8)]), expected);
    }

    #[test]
    fn rules_become_lark() {
        check(Rule::literal("a\n\"b\""), "start: \"a\\n\\\"b\\\"\"\n");
        check(Rule::literal("a<|m|>b<|m|>x"), "start: \"a\" <[7]> \"b\" <[8]>\n");
        check(Rule::Plain("a<|m|>b".into()), "start: \"a<|m|>b\"\n");
        check(Rule::literal(""), "start: \"\"\n");
        check(Rule::Repeat { rule: Box::new(Rule::text()), min: 0, max: Some(0) }, "start: \"\"\n");
        check(Rule::text(), "start: /(.|\\n)*/\n");
        check(Rule::Pattern(r"a/\/\\/b".into()), "start: /a\\/\\/\\\\\\/b/\n");
        check(Rule::Until("</t>".into()), "start: u0\nu0[lazy]: /(.|\\n)*/ \"</t>\"\n");
        check(Rule::Until("<|m|>".into()), "start: /(.|\\n)*/ <[7]>\n");
        check(
            Rule::Sequence(vec![
                Rule::literal("a"),
                Rule::optional(Rule::OneOf(vec![Rule::literal("b"), Rule::text()])),
            ]),
            "start: (\"a\" ((\"b\" | /(.|\\n)*/)){0,1})\n",
        );
        let list = Rule::Rules(vec![Rule::Sequence(vec![Rule::Plain("(".into()), Rule::optional(Rule::Ref(0))])]);
        check(Rule::OneOf(vec![list, Rule::Plain("x".into())]), "start: (g0 | \"x\")\ng0: (\"(\" (g0){0,1})\n");
        let json = write_with(&Rule::Json(json!({ "type": "object" })), Vec::new());
        assert!(json.starts_with("start: j0\nj0: %json {\"type\":\"object\",\"x-guidance\":{"), "{json}");
    }
}
