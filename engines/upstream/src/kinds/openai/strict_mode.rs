//! Which schemas OpenAI's strict mode takes. Without it, a reply of OpenAI's servers need not follow its schema.

use std::collections::{BTreeMap, BTreeSet};

use baton_schemas::GenerateRequest;
use baton_schemas::constraint::{Constraint, SchemaLabel, SchemaPromise};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// The most levels of objects and arrays.
const MAX_LEVELS: usize = 10;
/// The most properties of all objects together.
const MAX_PROPERTIES: usize = 5_000;
/// The most characters of all names and of all texts to choose from.
const MAX_CHARS: usize = 120_000;
/// The most values to choose from.
const MAX_CHOICES: usize = 1_000;
/// A choice of more texts than this may have [`MAX_CHARS_OF_LONG_CHOICE`] at most.
const MAX_SHORT_CHOICE: usize = 250;
const MAX_CHARS_OF_LONG_CHOICE: usize = 15_000;

/// Why OpenAI's strict mode does not take a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrictGap {
    RootIsNoObject,
    OpenObject,
    OptionalProperty,
    /// Or a value of a keyword.
    UnknownKeyword,
    TooLarge,
}

impl StrictGap {
    /// The gap in a sentence's end, for clients.
    pub fn as_str(self) -> &'static str {
        match self {
            StrictGap::RootIsNoObject => "the whole is no object",
            StrictGap::OpenObject => "an object may have other properties",
            StrictGap::OptionalProperty => "a property is not required",
            StrictGap::UnknownKeyword => "a keyword or its value is not known there",
            StrictGap::TooLarge => "it is too large",
        }
    }
}

/// The `strict` that a server gets with this schema: the client's own. A server that needs it for each schema gets true for a
/// promised one that strict mode takes.
pub(super) fn strict_of(schema: &Value, label: &SchemaLabel, is_needed: bool) -> Option<bool> {
    match label.promise {
        SchemaPromise::Unsaid => None,
        SchemaPromise::Strict(strict) => Some(strict),
        SchemaPromise::ByDialect => (is_needed && gap(schema).is_none()).then_some(true),
    }
}

/// Why a server that only holds strict schemas may break the promise that a request's dialect makes of its schema. `None`: it
/// makes none, or the server keeps it.
pub(crate) fn broken_promise(request: &GenerateRequest) -> Option<StrictGap> {
    match request.constraint.as_deref() {
        Some(Constraint::JsonSchema { schema, label, .. }) if label.promise == SchemaPromise::ByDialect => gap(schema),
        _ => None,
    }
}

/// What keeps strict mode from taking this schema. The rules are those of OpenAI's guide to structured outputs, "Supported
/// schemas" (developers.openai.com/api/docs/guides/structured-outputs, November 2026): a root that is an object, all
/// properties required, `additionalProperties: false` everywhere, a list of keywords, and limits of size. What the guide
/// leaves open counts as not taken, as a refused request is worse than a warning.
fn gap(schema: &Value) -> Option<StrictGap> {
    let Ok(root) = StrictSchema::deserialize(schema) else { return Some(StrictGap::UnknownKeyword) };
    if !root.is(JsonType::Object) || root.any_of.is_some() {
        return Some(StrictGap::RootIsNoObject);
    }
    Checked { whole: schema, n_properties: 0, n_chars: 0, n_choices: 0 }.take(&root, 1).err()
}

/// A schema of the keywords that strict mode has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct StrictSchema {
    #[serde(rename = "$ref")]
    reference: Option<String>,
    #[serde(rename = "type")]
    types: Option<JsonTypes>,
    any_of: Option<Vec<StrictSchema>>,
    #[serde(rename = "enum")]
    choices: Option<Vec<Value>>,
    #[serde(rename = "const")]
    constant: Option<Value>,
    properties: Option<BTreeMap<String, StrictSchema>>,
    required: Option<Vec<String>>,
    additional_properties: Option<Value>,
    items: Option<Box<StrictSchema>>,
    min_items: Option<u64>,
    max_items: Option<u64>,
    pattern: Option<String>,
    format: Option<StringFormat>,
    minimum: Option<IgnoredAny>,
    maximum: Option<IgnoredAny>,
    exclusive_minimum: Option<IgnoredAny>,
    exclusive_maximum: Option<IgnoredAny>,
    multiple_of: Option<IgnoredAny>,
    #[serde(rename = "$defs", default)]
    defs: BTreeMap<String, StrictSchema>,
    #[serde(default)]
    definitions: BTreeMap<String, StrictSchema>,
    title: Option<String>,
    description: Option<String>,
    #[serde(rename = "$schema")]
    dialect: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum JsonTypes {
    One(JsonType),
    Several(Vec<JsonType>),
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum JsonType {
    String,
    Number,
    Boolean,
    Integer,
    Object,
    Array,
    Null,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum StringFormat {
    DateTime,
    Time,
    Date,
    Duration,
    Email,
    Hostname,
    Ipv4,
    Ipv6,
    Uuid,
}

impl StrictSchema {
    fn is(&self, one: JsonType) -> bool {
        match &self.types {
            None => false,
            Some(JsonTypes::One(only)) => *only == one,
            Some(JsonTypes::Several(types)) => types.contains(&one),
        }
    }

    /// Returns true if each keyword stands beside a type that it is for.
    fn is_of_its_types(&self) -> bool {
        let has_bounds =
            [&self.minimum, &self.maximum, &self.exclusive_minimum, &self.exclusive_maximum, &self.multiple_of];
        let of_text = self.pattern.is_some() || self.format.is_some();
        let of_number = has_bounds.iter().any(|bound| bound.is_some());
        let of_array = self.items.is_some() || self.min_items.is_some() || self.max_items.is_some();
        let of_object = self.properties.is_some() || self.required.is_some() || self.additional_properties.is_some();
        (!of_text || self.is(JsonType::String))
            && (!of_number || self.is(JsonType::Number) || self.is(JsonType::Integer))
            && (!of_array || self.is(JsonType::Array))
            && (!of_object || self.is(JsonType::Object))
    }

    /// Returns true if it is a reference and nothing else.
    fn is_bare_reference(&self) -> bool {
        let says_more = [&self.title, &self.description, &self.dialect].into_iter().any(Option::is_some);
        let is_more =
            self.types.is_some() || self.any_of.is_some() || self.choices.is_some() || self.constant.is_some();
        !is_more && !says_more && self.is_of_its_types() && self.defs.is_empty() && self.definitions.is_empty()
    }
}

/// What has been counted of a schema.
struct Checked<'s> {
    whole: &'s Value,
    n_properties: usize,
    n_chars: usize,
    n_choices: usize,
}

impl Checked<'_> {
    /// Takes a schema that stands at a level, from 1.
    fn take(&mut self, schema: &StrictSchema, level: usize) -> Result<(), StrictGap> {
        if let Some(target) = &schema.reference {
            let is_defined = target.strip_prefix('#').is_some_and(|path| self.whole.pointer(path).is_some());
            return if is_defined && schema.is_bare_reference() { Ok(()) } else { Err(StrictGap::UnknownKeyword) };
        }
        // Alternatives have types of their own.
        if schema.types.is_some() == schema.any_of.is_some() || !schema.is_of_its_types() {
            return Err(StrictGap::UnknownKeyword);
        }
        if schema.pattern.as_ref().is_some_and(|pattern| looks_around(pattern)) {
            return Err(StrictGap::UnknownKeyword);
        }
        let is_nested = schema.is(JsonType::Object) || schema.is(JsonType::Array);
        if is_nested && level > MAX_LEVELS {
            return Err(StrictGap::TooLarge);
        }
        self.choices(schema.choices.as_deref().unwrap_or_default())?;
        self.choices(schema.constant.as_slice())?;
        for (name, definition) in schema.defs.iter().chain(&schema.definitions) {
            self.chars(name)?;
            self.take(definition, 1)?;
        }
        schema.any_of.iter().flatten().try_for_each(|one| self.take(one, level))?;
        if schema.is(JsonType::Array) {
            let items = schema.items.as_ref().ok_or(StrictGap::UnknownKeyword)?;
            self.take(items, level + 1)?;
        }
        if schema.is(JsonType::Object) { self.object(schema, level) } else { Ok(()) }
    }

    fn object(&mut self, schema: &StrictSchema, level: usize) -> Result<(), StrictGap> {
        if schema.additional_properties != Some(Value::Bool(false)) {
            return Err(StrictGap::OpenObject);
        }
        let properties = schema.properties.as_ref().ok_or(StrictGap::UnknownKeyword)?;
        let required: BTreeSet<&String> = schema.required.iter().flatten().collect();
        if !properties.keys().all(|name| required.contains(name)) {
            return Err(StrictGap::OptionalProperty);
        }
        if required.len() > properties.len() {
            return Err(StrictGap::UnknownKeyword);
        }
        self.n_properties += properties.len();
        if self.n_properties > MAX_PROPERTIES {
            return Err(StrictGap::TooLarge);
        }
        properties.iter().try_for_each(|(name, property)| {
            self.chars(name)?;
            self.take(property, level + 1)
        })
    }

    /// Takes values to choose from.
    fn choices(&mut self, values: &[Value]) -> Result<(), StrictGap> {
        self.n_choices += values.len();
        let before = self.n_chars;
        values.iter().filter_map(Value::as_str).try_for_each(|text| self.chars(text))?;
        let is_long = values.len() > MAX_SHORT_CHOICE && self.n_chars - before > MAX_CHARS_OF_LONG_CHOICE;
        if is_long || self.n_choices > MAX_CHOICES { Err(StrictGap::TooLarge) } else { Ok(()) }
    }

    fn chars(&mut self, text: &str) -> Result<(), StrictGap> {
        self.n_chars += text.chars().count();
        if self.n_chars > MAX_CHARS { Err(StrictGap::TooLarge) } else { Ok(()) }
    }
}

/// Whether a pattern looks around itself, which the guide does not promise.
fn looks_around(pattern: &str) -> bool {
    pattern.match_indices("(?").any(|(at, _)| !pattern[at..].starts_with("(?:"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An object whose only property has this schema.
    fn of(property: Value) -> Value {
        json!({ "type": "object", "properties": { "a": property }, "required": ["a"], "additionalProperties": false })
    }

    #[test]
    fn schemas_of_the_guide_are_taken() {
        for property in [
            json!({ "type": "string", "pattern": "^(?:a|b)$", "description": "d", "title": "A" }),
            json!({ "type": ["string", "null"], "format": "date-time", "enum": ["x", null] }),
            json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1.5, "multipleOf": 0.1 }),
            json!({ "type": "integer", "const": 3 }),
            json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 1, "maxItems": 3 }),
            json!({ "anyOf": [of(json!({ "type": "string" })), { "type": "null" }] }),
            json!({ "$ref": "#" }),
            of(of(json!({ "type": "string" }))),
        ] {
            assert_eq!(gap(&of(property.clone())), None, "{property}");
        }
        let mut list = of(json!({ "$ref": "#/$defs/node" }));
        list["$defs"] = json!({ "node": of(json!({ "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] })) });
        list["$schema"] = "http://json-schema.org/draft-07/schema#".into();
        assert_eq!(gap(&list), None);
        assert_eq!(
            gap(&json!({ "type": "object", "properties": {}, "additionalProperties": false })),
            None,
            "an empty object requires nothing"
        );
    }

    #[test]
    fn what_the_guide_does_not_have_is_a_gap() {
        let (text, closed) = (json!({ "type": "string" }), of(json!({ "type": "string" })));
        let with = |key: &str, value: Value| {
            let mut schema = closed.clone();
            schema[key] = value;
            schema
        };
        let open = json!({ "type": "object", "properties": { "a": text }, "required": ["a"] });
        assert_eq!(gap(&open), Some(StrictGap::OpenObject));
        assert_eq!(gap(&of(open)), Some(StrictGap::OpenObject), "everywhere");
        assert_eq!(gap(&with("additionalProperties", json!(true))), Some(StrictGap::OpenObject));
        assert_eq!(gap(&with("additionalProperties", text.clone())), Some(StrictGap::OpenObject));
        assert_eq!(gap(&with("required", json!([]))), Some(StrictGap::OptionalProperty));
        assert_eq!(gap(&of(with("required", json!(null)))), Some(StrictGap::OptionalProperty));
        for root in
            [json!({ "type": "array", "items": text }), json!({ "anyOf": [closed] }), json!({ "$ref": "#" }), json!({})]
        {
            assert_eq!(gap(&root), Some(StrictGap::RootIsNoObject), "{root}");
        }
        for property in [
            json!({}),
            json!(true),
            json!({ "enum": ["x"] }),
            json!({ "type": "string", "default": "x" }),
            json!({ "type": "string", "minLength": 1 }),
            json!({ "type": "string", "format": "uri" }),
            json!({ "type": "string", "pattern": "a(?=b)" }),
            json!({ "type": "string", "minItems": 1 }),
            json!({ "type": "tuple" }),
            json!({ "type": "array" }),
            json!({ "type": "array", "items": { "type": "string" }, "uniqueItems": true }),
            json!({ "type": "array", "prefixItems": [{ "type": "string" }] }),
            json!({ "type": "object", "additionalProperties": false }),
            json!({ "allOf": [{ "type": "string" }] }),
            json!({ "oneOf": [{ "type": "string" }] }),
            json!({ "not": { "type": "string" } }),
            json!({ "$ref": "#", "description": "d" }),
            json!({ "$ref": "#/$defs/missing" }),
            json!({ "$ref": "http://elsewhere/schema" }),
        ] {
            assert_eq!(gap(&of(property.clone())), Some(StrictGap::UnknownKeyword), "{property}");
        }
        assert_eq!(gap(&with("required", json!(["a", "b"]))), Some(StrictGap::UnknownKeyword));
    }

    #[test]
    fn limits_of_size_are_those_of_the_guide() {
        let nested = |n: usize| (1..n).fold(of(json!({ "type": "string" })), |inner, _| of(inner));
        assert_eq!((gap(&nested(10)), gap(&nested(11))), (None, Some(StrictGap::TooLarge)));
        let wide = |n: usize, name: &dyn Fn(usize) -> String| {
            let names: Vec<String> = (0..n).map(name).collect();
            let properties: serde_json::Map<_, _> =
                names.iter().map(|n| (n.clone(), json!({ "type": "null" }))).collect();
            json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false })
        };
        let short = |i: usize| format!("p{i}");
        assert_eq!((gap(&wide(5_000, &short)), gap(&wide(5_001, &short))), (None, Some(StrictGap::TooLarge)));
        let long = |i: usize| format!("{i:01200}");
        assert_eq!((gap(&wide(100, &long)), gap(&wide(101, &long))), (None, Some(StrictGap::TooLarge)));
        let choice = |n: usize, width: usize| {
            let values: Vec<String> = (0..n).map(|i| format!("{i:0width$}")).collect();
            gap(&of(json!({ "type": "string", "enum": values })))
        };
        assert_eq!((choice(1_000, 15), choice(1_001, 4)), (None, Some(StrictGap::TooLarge)));
        assert_eq!((choice(250, 400), choice(251, 60)), (None, Some(StrictGap::TooLarge)));
    }
}
