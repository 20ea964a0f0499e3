//! What the generated text has to be.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A constraint on the text, kept by the engine's sampler at every token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// JSON Schema (draft 2020-12).
        schema: Value,
        /// The field of the request that asks for it, for errors.
        #[serde(default = "default_field")]
        field: String,
    },
    /// Text in a form of its own, such as calls of tools.
    Grammar {
        /// The whole text.
        rule: Rule,
        /// The field of the request that asks for it, for errors.
        field: String,
    },
}

/// What an older peer means that names no field.
fn default_field() -> String {
    DEFAULT_FIELD.to_owned()
}

/// OpenAI's name for what text has to be.
const DEFAULT_FIELD: &str = "response_format";

impl Constraint {
    /// The field of the request that asks for it.
    pub fn field(&self) -> &str {
        match self {
            Constraint::JsonObject => DEFAULT_FIELD,
            Constraint::JsonSchema { field, .. } | Constraint::Grammar { field, .. } => field,
        }
    }
}

/// A form that text can have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Exactly this. Control tokens that are spelled in it are meant as such.
    Literal(String),
    /// Exactly this, and no control tokens: words of a client's.
    Plain(String),
    /// JSON that a schema describes.
    Json(Value),
    /// What a regular expression describes, in the syntax of Rust's `regex` without look-around.
    Pattern(String),
    /// Any text, up to and with the first occurrence of this, which may be a control token.
    Until(String),
    /// One after the other.
    Sequence(Vec<Rule>),
    /// One of these.
    OneOf(Vec<Rule>),
    /// The first of these that the engine knows all of; the last one if it knows none.
    FirstKnown(Vec<Rule>),
    /// What one field of the request, or one tool, asks for: errors name it.
    For {
        /// The field.
        field: String,
        /// The tool, by its name, if the field has several.
        tool: Option<String>,
        /// What it asks for.
        rule: Box<Rule>,
    },
    /// As often as that.
    Repeat {
        /// What.
        rule: Box<Rule>,
        /// At least.
        min: u32,
        /// At most; `None` for as often as it comes.
        max: Option<u32>,
    },
}

impl Rule {
    /// Exactly this.
    pub fn literal(text: impl Into<String>) -> Rule {
        Rule::Literal(text.into())
    }

    /// Any text.
    pub fn text() -> Rule {
        Rule::Pattern(r"(.|\n)*".to_owned())
    }

    /// Returns true if it contains a [`Rule::FirstKnown`].
    pub fn has_alternatives(&self) -> bool {
        match self {
            Rule::FirstKnown(_) => true,
            Rule::Sequence(rules) | Rule::OneOf(rules) => rules.iter().any(Rule::has_alternatives),
            Rule::Repeat { rule, .. } | Rule::For { rule, .. } => rule.has_alternatives(),
            Rule::Literal(_) | Rule::Plain(_) | Rule::Json(_) | Rule::Pattern(_) | Rule::Until(_) => false,
        }
    }

    /// The rule with each [`Rule::FirstKnown`] decided by `knows`.
    pub fn decided(&self, knows: &mut impl FnMut(&Rule) -> bool) -> Rule {
        match self {
            Rule::FirstKnown(rules) => {
                let Some((last, earlier)) = rules.split_last() else { return Rule::Sequence(Vec::new()) };
                let earlier = earlier.iter().map(|rule| rule.decided(knows)).collect::<Vec<_>>();
                earlier.into_iter().find(|rule| knows(rule)).unwrap_or_else(|| last.decided(knows))
            }
            Rule::Sequence(rules) => Rule::Sequence(rules.iter().map(|rule| rule.decided(knows)).collect()),
            Rule::OneOf(rules) => Rule::OneOf(rules.iter().map(|rule| rule.decided(knows)).collect()),
            Rule::Repeat { rule, min, max } => {
                Rule::Repeat { rule: Box::new(rule.decided(knows)), min: *min, max: *max }
            }
            Rule::For { field, tool, rule } => {
                Rule::For { field: field.clone(), tool: tool.clone(), rule: Box::new(rule.decided(knows)) }
            }
            Rule::Literal(_) | Rule::Plain(_) | Rule::Json(_) | Rule::Pattern(_) | Rule::Until(_) => self.clone(),
        }
    }

    /// The schemas that its text has to keep, each with who asks for it; `asker` is who asks for the whole. Of a
    /// [`Rule::FirstKnown`] those of the first.
    pub fn schemas<'r>(&'r self, asker: Asker<'r>) -> Vec<(Asker<'r>, &'r Value)> {
        match self {
            Rule::Json(schema) => vec![(asker, schema)],
            Rule::For { field, tool, rule } => rule.schemas(Asker { field, tool: tool.as_deref() }),
            Rule::Sequence(rules) | Rule::OneOf(rules) => rules.iter().flat_map(|rule| rule.schemas(asker)).collect(),
            Rule::FirstKnown(rules) => rules.first().map(|rule| rule.schemas(asker)).unwrap_or_default(),
            Rule::Repeat { rule, .. } => rule.schemas(asker),
            Rule::Literal(_) | Rule::Plain(_) | Rule::Pattern(_) | Rule::Until(_) => Vec::new(),
        }
    }

    /// This or nothing.
    pub fn optional(rule: Rule) -> Rule {
        Rule::Repeat { rule: Box::new(rule), min: 0, max: Some(1) }
    }
}

/// The part of a request that asks for a form: a field, and one of its tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asker<'r> {
    /// The field.
    pub field: &'r str,
    /// The tool, by its name.
    pub tool: Option<&'r str>,
}

impl From<Constraint> for Rule {
    fn from(constraint: Constraint) -> Rule {
        match constraint {
            Constraint::JsonObject => Rule::Json(serde_json::json!({ "type": "object" })),
            Constraint::JsonSchema { schema, field } => {
                Rule::For { field, tool: None, rule: Box::new(Rule::Json(schema)) }
            }
            Constraint::Grammar { rule, .. } => rule,
        }
    }
}

/// Values (objects, arrays, numbers, …) a schema may consist of.
const MAX_VALUES: usize = 20_000;

/// How deep they may be nested.
const MAX_DEPTH: usize = 64;

/// Why a schema is not taken, before anything is compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// Schemas are objects, or `true` and `false`.
    #[error("a JSON schema is an object")]
    NotAnObject,
    /// Too much work to compile.
    #[error("the schema is larger than {MAX_VALUES} values or nested deeper than {MAX_DEPTH}")]
    TooLarge,
}

/// Checks a schema's size and kind. What its keywords mean is the engine's to check.
pub fn check_schema(schema: &Value) -> Result<(), SchemaError> {
    Budget::default().take(schema)
}

/// What the schemas of one request may hold together.
#[derive(Debug)]
pub(crate) struct Budget {
    n_values: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { n_values: MAX_VALUES }
    }
}

impl Budget {
    /// Checks a schema as [`check_schema`] does, within what those before it have left.
    pub(crate) fn take(&mut self, schema: &Value) -> Result<(), SchemaError> {
        if !schema.is_object() {
            return Err(SchemaError::NotAnObject);
        }
        if fits(schema, MAX_DEPTH, &mut self.n_values) { Ok(()) } else { Err(SchemaError::TooLarge) }
    }
}

fn fits(value: &Value, depth: usize, left: &mut usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else { return false };
    let Some(fewer) = left.checked_sub(1) else { return false };
    *left = fewer;
    match value {
        Value::Array(items) => items.iter().all(|item| fits(item, depth, left)),
        Value::Object(fields) => fields.values().all(|field| fits(field, depth, left)),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn alternatives_are_decided_one_by_one_wherever_they_stand() {
        let either = |a: &str, b: &str| Rule::FirstKnown(vec![Rule::literal(a), Rule::literal(b)]);
        let rule = |a: Rule, b: Rule| Rule::Sequence(vec![Rule::optional(a), Rule::OneOf(vec![b, Rule::text()])]);
        let open = rule(either("a", "b"), either("c", "d"));
        assert!(open.has_alternatives());
        let mut asked = 0;
        let decided = open.decided(&mut |rule| {
            asked += 1;
            *rule == Rule::literal("c")
        });
        assert_eq!((&decided, asked), (&rule(Rule::literal("b"), Rule::literal("c")), 2));
        assert!(!decided.has_alternatives());
        assert_eq!(Rule::FirstKnown(Vec::new()).decided(&mut |_| true), Rule::Sequence(Vec::new()));
    }

    #[test]
    fn each_schema_of_a_rule_is_known_by_who_asks_for_it() {
        let of = |tool: &str, rule| Rule::For { field: "tools".into(), tool: Some(tool.into()), rule: Box::new(rule) };
        let json = |n: u32| Rule::Json(json!({ "minimum": n }));
        let text = Rule::from(Constraint::JsonSchema { schema: json!({ "minimum": 4 }), field: "format".to_owned() });
        let calls = vec![
            of("a", Rule::Sequence(vec![Rule::literal("a "), json(1)])),
            of("b", Rule::FirstKnown(vec![json(2), json(9)])),
        ];
        let rule = Rule::OneOf(vec![Rule::optional(Rule::OneOf(calls)), json(3), text]);
        let schemas = rule.schemas(Asker { field: "whole", tool: None });
        let shown = schemas.iter().map(|(by, schema)| format!("{}/{:?}: {}", by.field, by.tool, schema["minimum"]));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            ["tools/Some(\"a\"): 1", "tools/Some(\"b\"): 2", "whole/None: 3", "format/None: 4"]
        );
        assert!(rule.has_alternatives() && !rule.decided(&mut |_| true).has_alternatives());
    }

    #[test]
    fn schemas_are_objects_of_a_bounded_size() {
        assert_eq!(check_schema(&json!({ "type": "object" })), Ok(()));
        assert_eq!(check_schema(&json!("object")), Err(SchemaError::NotAnObject));
        let deep = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({ "items": inner }));
        assert_eq!(check_schema(&deep), Err(SchemaError::TooLarge));
        let wide = json!({ "enum": vec![1; MAX_VALUES] });
        assert_eq!(check_schema(&wide), Err(SchemaError::TooLarge));
    }
}
