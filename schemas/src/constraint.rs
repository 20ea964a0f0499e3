//! Constraints on the form of generated text.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::held_schema::{HeldSchema, MAX_DEPTH, Unheld, held};
use crate::json_values;
use crate::written_number::text_of;

/// A constraint on the text. The engine's sampler enforces it at every token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema {
        /// JSON Schema (draft 2020-12), as the client wrote it.
        schema: Value,
        /// The part of it that engines hold, if that is not all of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        held: Option<Value>,
        /// The parts that they do not hold.
        #[serde(skip)]
        unheld: Unheld,
        /// What the client says of it. Only upstreams are told.
        #[serde(skip)]
        label: SchemaLabel,
        /// The field of the request that sets it, for errors.
        #[serde(default = "default_field")]
        field: String,
    },
    /// Text in another form, such as calls of tools.
    Grammar {
        /// The rule for the whole text.
        rule: Rule,
        /// The field of the request that sets it, for errors.
        field: String,
    },
}

/// A client's words about the schema for its reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchemaLabel {
    /// Its name.
    pub name: Option<String>,
    /// What the reply is for.
    pub description: Option<String>,
    /// How closely the reply follows it.
    pub promise: SchemaPromise,
}

/// How closely a reply follows its schema, by the field that sets it. Engines hold as much of each as they can.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SchemaPromise {
    /// The client leaves OpenAI's `strict` out. Servers of that dialect need not hold the schema then.
    #[default]
    Unsaid,
    /// The client's `strict`. True: the reply follows the schema exactly, or the request is refused.
    Strict(bool),
    /// The field has no `strict`: its dialect promises that the reply follows the schema.
    ByDialect,
}

impl SchemaPromise {
    /// The promise of a field that has OpenAI's `strict`.
    pub(crate) fn said(strict: Option<bool>) -> SchemaPromise {
        strict.map_or(SchemaPromise::Unsaid, SchemaPromise::Strict)
    }
}

/// The field to assume if an older peer sends none.
fn default_field() -> String {
    DEFAULT_FIELD.to_owned()
}

/// OpenAI's field for the form of a reply.
const DEFAULT_FIELD: &str = "response_format";

impl Constraint {
    /// JSON that follows a schema, which a field of the request sets: one without `strict`, or exactly.
    pub fn json_schema(schema: Value, field: impl Into<String>, is_strict: bool) -> Result<Constraint, SchemaError> {
        let promise = if is_strict { SchemaPromise::Strict(true) } else { SchemaPromise::ByDialect };
        Constraint::labelled_schema(schema, field, SchemaLabel { promise, ..SchemaLabel::default() })
    }

    /// The same with what the client says of the schema.
    pub fn labelled_schema(
        schema: Value,
        field: impl Into<String>,
        label: SchemaLabel,
    ) -> Result<Constraint, SchemaError> {
        check_schema(&schema)?;
        let HeldSchema { schema: held, unheld } = held(&schema, label.promise == SchemaPromise::Strict(true));
        Ok(Constraint::JsonSchema { schema, held, unheld, label, field: field.into() })
    }

    /// JSON that follows a schema of which engines hold every part, or refuse it.
    pub fn exactly(schema: Value, field: impl Into<String>) -> Constraint {
        let (unheld, label) = (Unheld::default(), SchemaLabel::default());
        Constraint::JsonSchema { schema, held: None, unheld, label, field: field.into() }
    }

    /// Returns the field of the request that sets it.
    pub fn field(&self) -> &str {
        match self {
            Constraint::JsonObject => DEFAULT_FIELD,
            Constraint::JsonSchema { field, .. } | Constraint::Grammar { field, .. } => field,
        }
    }

    /// Returns the bytes that it takes in memory. Reads all of it.
    pub fn memory_bytes(&self) -> usize {
        let inside = match self {
            Constraint::JsonObject => 0,
            Constraint::JsonSchema { schema, held, label, field, .. } => {
                let held = held.as_ref().map_or(0, json_values::memory_bytes);
                let said = [&label.name, &label.description].into_iter().flatten().map(String::capacity).sum::<usize>();
                json_values::memory_bytes(schema) + held + said + field.capacity()
            }
            Constraint::Grammar { rule, field } => rule.memory_bytes() + field.capacity(),
        };
        size_of::<Constraint>() + inside
    }
}

/// A rule for the form of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Exactly this text. A control token's spelling in it stands for the control token.
    Literal(String),
    /// Exactly this text, without control tokens, because a client chose it.
    Plain(String),
    /// JSON that follows a schema.
    Json(Value),
    /// Text that matches a regular expression, in the syntax of Rust's `regex`, without look-around.
    Pattern(String),
    /// Any text up to and including the first occurrence of this, which may be a control token.
    Until(String),
    /// These rules, one after the other.
    Sequence(Vec<Rule>),
    /// Any one of these rules.
    OneOf(Vec<Rule>),
    /// The first of these rules that the engine supports completely; the last one if it supports none.
    FirstKnown(Vec<Rule>),
    /// Rules that may refer to each other by [`Rule::Ref`]. The first is the whole.
    Rules(Vec<Rule>),
    /// The rule with this index in the [`Rule::Rules`] around it.
    Ref(u32),
    /// A rule that one field of the request, or one tool, sets. Errors name them.
    For {
        /// The field.
        field: String,
        /// The tool's name, if the field has several.
        tool: Option<String>,
        /// The rule.
        rule: Box<Rule>,
    },
    /// A rule, several times.
    Repeat {
        /// The rule.
        rule: Box<Rule>,
        /// The fewest times.
        min: u32,
        /// The most times; `None`: no limit.
        max: Option<u32>,
    },
}

impl Rule {
    /// Creates a [`Rule::Literal`].
    pub fn literal(text: impl Into<String>) -> Rule {
        Rule::Literal(text.into())
    }

    /// Creates a rule for any text.
    pub fn text() -> Rule {
        Rule::Pattern(r"(.|\n)*".to_owned())
    }

    /// Returns true if it contains a [`Rule::FirstKnown`].
    pub fn has_alternatives(&self) -> bool {
        match self {
            Rule::FirstKnown(_) => true,
            Rule::Sequence(rules) | Rule::OneOf(rules) | Rule::Rules(rules) => rules.iter().any(Rule::has_alternatives),
            Rule::Repeat { rule, .. } | Rule::For { rule, .. } => rule.has_alternatives(),
            Rule::Literal(_) | Rule::Plain(_) | Rule::Json(_) | Rule::Pattern(_) | Rule::Until(_) | Rule::Ref(_) => {
                false
            }
        }
    }

    /// Replaces each [`Rule::FirstKnown`] by the first of its rules for which `knows` returns true, else by the last.
    pub fn decided(&self, knows: &mut impl FnMut(&Rule) -> bool) -> Rule {
        match self {
            Rule::FirstKnown(rules) => {
                let Some((last, earlier)) = rules.split_last() else { return Rule::Sequence(Vec::new()) };
                let earlier = earlier.iter().map(|rule| rule.decided(knows)).collect::<Vec<_>>();
                earlier.into_iter().find(|rule| knows(rule)).unwrap_or_else(|| last.decided(knows))
            }
            Rule::Sequence(rules) => Rule::Sequence(rules.iter().map(|rule| rule.decided(knows)).collect()),
            Rule::OneOf(rules) => Rule::OneOf(rules.iter().map(|rule| rule.decided(knows)).collect()),
            Rule::Rules(rules) => Rule::Rules(rules.iter().map(|rule| rule.decided(knows)).collect()),
            Rule::Repeat { rule, min, max } => {
                Rule::Repeat { rule: Box::new(rule.decided(knows)), min: *min, max: *max }
            }
            Rule::For { field, tool, rule } => {
                Rule::For { field: field.clone(), tool: tool.clone(), rule: Box::new(rule.decided(knows)) }
            }
            Rule::Literal(_) | Rule::Plain(_) | Rule::Json(_) | Rule::Pattern(_) | Rule::Until(_) | Rule::Ref(_) => {
                self.clone()
            }
        }
    }

    /// Returns every schema in the rule with the part of the request that sets it. `asker` is the part that sets the
    /// whole rule. Of a [`Rule::FirstKnown`], only the first rule counts.
    pub fn schemas<'r>(&'r self, asker: Asker<'r>) -> Vec<(Asker<'r>, &'r Value)> {
        match self {
            Rule::Json(schema) => vec![(asker, schema)],
            Rule::For { field, tool, rule } => rule.schemas(Asker { field, tool: tool.as_deref() }),
            Rule::Sequence(rules) | Rule::OneOf(rules) | Rule::Rules(rules) => {
                rules.iter().flat_map(|rule| rule.schemas(asker)).collect()
            }
            Rule::FirstKnown(rules) => rules.first().map(|rule| rule.schemas(asker)).unwrap_or_default(),
            Rule::Repeat { rule, .. } => rule.schemas(asker),
            Rule::Literal(_) | Rule::Plain(_) | Rule::Pattern(_) | Rule::Until(_) | Rule::Ref(_) => Vec::new(),
        }
    }

    /// Returns the bytes that it takes in memory. Reads all of it.
    pub fn memory_bytes(&self) -> usize {
        let inside = match self {
            Rule::Literal(text) | Rule::Plain(text) | Rule::Pattern(text) | Rule::Until(text) => text.capacity(),
            Rule::Json(schema) => json_values::memory_bytes(schema),
            Rule::Sequence(rules) | Rule::OneOf(rules) | Rule::FirstKnown(rules) | Rule::Rules(rules) => {
                let unused = rules.capacity() - rules.len();
                unused * size_of::<Rule>() + rules.iter().map(Rule::memory_bytes).sum::<usize>()
            }
            Rule::For { field, tool, rule } => {
                field.capacity() + tool.as_ref().map_or(0, String::capacity) + rule.memory_bytes()
            }
            Rule::Repeat { rule, .. } => rule.memory_bytes(),
            Rule::Ref(_) => 0,
        };
        size_of::<Rule>() + inside
    }

    /// Creates a rule for this or nothing.
    pub fn optional(rule: Rule) -> Rule {
        Rule::Repeat { rule: Box::new(rule), min: 0, max: Some(1) }
    }
}

/// The part of a request that sets a rule: a field, or one tool of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asker<'r> {
    /// The field.
    pub field: &'r str,
    /// The tool's name, if it is one of several.
    pub tool: Option<&'r str>,
}

impl From<Constraint> for Rule {
    fn from(constraint: Constraint) -> Rule {
        match constraint {
            Constraint::JsonObject => Rule::Json(serde_json::json!({ "type": "object" })),
            Constraint::JsonSchema { schema, held, field, .. } => {
                Rule::For { field, tool: None, rule: Box::new(Rule::Json(held.unwrap_or(schema))) }
            }
            Constraint::Grammar { rule, .. } => rule,
        }
    }
}

/// The most values (objects, arrays, numbers, …) in the schemas of a request.
const MAX_VALUES: usize = 20_000;

/// The most bytes in the texts of these schemas: names and strings. A schema is copied for each choice of a reply, and
/// to each engine that works on it. OpenAI allows 120,000 characters without descriptions.
const MAX_TEXT_BYTES: usize = 512 << 10;

/// The most bytes of memory that copies of definitions may take. Some formats of calls hold each argument to a schema of
/// its own, which needs them all.
const MAX_COPIED_BYTES: usize = 8 << 20;

/// The keys under which a schema has what its references name.
pub const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Why a schema is refused before it is compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// It is not an object. JSON Schema also allows `true` and `false`, which are not supported here.
    #[error("a JSON schema is an object")]
    NotAnObject,
    /// It would be too expensive to compile.
    #[error(
        "the schema is larger than {MAX_VALUES} values or {} KiB of text, or nested deeper than {MAX_DEPTH}",
        MAX_TEXT_BYTES >> 10
    )]
    TooLarge,
    /// Its definitions would be copied too often.
    #[error("the schema has too many or too large definitions for its number of properties")]
    TooManyCopies,
}

/// Checks that a schema is an object of bounded size. The engine checks its keywords.
pub fn check_schema(schema: &Value) -> Result<(), SchemaError> {
    Budget::default().take(schema)
}

/// The values and bytes that are left for the schemas of a request.
#[derive(Debug)]
pub(crate) struct Budget {
    n_values: usize,
    n_text_bytes: usize,
    n_copied_bytes: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { n_values: MAX_VALUES, n_text_bytes: MAX_TEXT_BYTES, n_copied_bytes: MAX_COPIED_BYTES }
    }
}

impl Budget {
    /// Checks a schema as [`check_schema`] does, and subtracts its size.
    pub(crate) fn take(&mut self, schema: &Value) -> Result<(), SchemaError> {
        if !schema.is_object() {
            return Err(SchemaError::NotAnObject);
        }
        self.take_value(schema, MAX_DEPTH).ok_or(SchemaError::TooLarge)
    }

    /// Checks the schema of a tool's arguments, and subtracts its size and that of one copy of its definitions for each
    /// property.
    pub(crate) fn take_arguments(&mut self, schema: &Value) -> Result<(), SchemaError> {
        self.take(schema)?;
        let n_properties = schema.get("properties").and_then(Value::as_object).map_or(0, serde_json::Map::len);
        let definitions = DEFINITIONS.iter().filter_map(|key| schema.get(key)).map(json_values::memory_bytes);
        let n_bytes = definitions.sum::<usize>().saturating_mul(n_properties);
        self.n_copied_bytes = self.n_copied_bytes.checked_sub(n_bytes).ok_or(SchemaError::TooManyCopies)?;
        Ok(())
    }

    /// Subtracts a value that may be nested to `depth`. `None`: it is too large.
    fn take_value(&mut self, value: &Value, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        self.n_values = self.n_values.checked_sub(1)?;
        match value {
            _ if text_of(value).is_some() => Some(()),
            Value::String(text) => self.take_text(text),
            Value::Array(items) => items.iter().try_for_each(|item| self.take_value(item, depth)),
            Value::Object(fields) => fields.iter().try_for_each(|(name, field)| {
                self.take_text(name)?;
                self.take_value(field, depth)
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) => Some(()),
        }
    }

    fn take_text(&mut self, text: &str) -> Option<()> {
        self.n_text_bytes = self.n_text_bytes.checked_sub(text.len())?;
        Some(())
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
        let text = Rule::from(Constraint::json_schema(json!({ "minimum": 4 }), "format", false).unwrap());
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
    fn a_rule_takes_the_memory_of_its_texts_and_of_each_part() {
        let text = || Rule::Plain("x".repeat(1000));
        let rule = Rule::OneOf(vec![text(), Rule::optional(text()), Rule::Json(json!({ "const": "x".repeat(1000) }))]);
        let n_bytes = Constraint::Grammar { rule, field: "f".to_owned() }.memory_bytes();
        assert!((3000 + 5 * size_of::<Rule>()..4000).contains(&n_bytes), "{n_bytes}");
    }

    #[test]
    fn schemas_are_objects_of_a_bounded_size() {
        assert_eq!(check_schema(&json!({ "type": "object" })), Ok(()));
        assert_eq!(check_schema(&json!("object")), Err(SchemaError::NotAnObject));
        let deep = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({ "items": inner }));
        assert_eq!(check_schema(&deep), Err(SchemaError::TooLarge));
        let wide = json!({ "enum": vec![1; MAX_VALUES] });
        assert_eq!(check_schema(&wide), Err(SchemaError::TooLarge));
        let described = |n_bytes: usize| json!({ "description": "x".repeat(n_bytes - "description".len()) });
        assert_eq!(check_schema(&described(MAX_TEXT_BYTES)), Ok(()));
        let name = "x".repeat(MAX_TEXT_BYTES + 1);
        for long in [described(MAX_TEXT_BYTES + 1), json!({ "enum": [name] }), json!({ "properties": { name: {} } })] {
            assert_eq!(check_schema(&long), Err(SchemaError::TooLarge));
        }
        let with_definitions = |n_properties: u32, n_definitions: u32| {
            let of = |prefix: &str, n| {
                (0..n).map(|i| (format!("{prefix}{i}"), json!({}))).collect::<serde_json::Map<_, _>>()
            };
            json!({ "properties": of("p", n_properties), "$defs": of("d", n_definitions) })
        };
        let arguments = |n_properties, n_definitions| {
            Budget::default().take_arguments(&with_definitions(n_properties, n_definitions))
        };
        assert_eq!([arguments(1, 9_000), arguments(100, 100)], [Ok(()), Ok(())]);
        assert_eq!(arguments(9_000, 9_000), Err(SchemaError::TooManyCopies));
        // The schemas of one request have one budget.
        let mut budget = Budget::default();
        assert_eq!(budget.take(&described(MAX_TEXT_BYTES / 2)), Ok(()));
        assert_eq!(budget.take(&described(MAX_TEXT_BYTES / 2 + 1)), Err(SchemaError::TooLarge));
    }
}
