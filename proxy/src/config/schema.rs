//! The form of a configuration file: the JSON schema that is derived from [`RawConfig`], as a tree of tables and values.
//!
//! A new field is a new key without further work. `#[schemars(range(…))]` at a field is its range. `extend("x-secret" =
//! true)` at a field keeps its value out of messages. `extend("x-expected" = "…")` at a type says in words what it takes,
//! where its schema has several forms.

use std::sync::LazyLock;

use schemars::Schema;
use serde_json::Value;

use super::raw::RawConfig;

static FILE: LazyLock<Schema> = LazyLock::new(|| schemars::schema_for!(RawConfig));

/// A table or a value of the file.
#[derive(Clone, Copy)]
pub(super) struct SchemaPlace {
    schema: &'static Value,
}

/// The type of a place.
pub(super) enum Takes {
    /// A table with these keys, or with any key if it has none of its own.
    Table,
    List(SchemaPlace),
    Text,
    /// A date, as TOML has it, or a text that is one.
    Day,
    OneOf(Vec<&'static str>),
    WholeNumber,
    Number,
    Boolean,
    /// Several forms, each of them a value.
    AnyOf(Vec<SchemaPlace>),
}

impl SchemaPlace {
    /// The top of the file.
    pub(super) fn root() -> SchemaPlace {
        SchemaPlace { schema: FILE.as_value() }
    }

    /// The place of a table's key. `None`: the table has no such key.
    pub(super) fn key(self, key: &str) -> Option<SchemaPlace> {
        let of_any_key = || self.schema.get("additionalProperties").filter(|schema| schema.is_object());
        self.schema.get("properties").and_then(|keys| keys.get(key)).or_else(of_any_key).map(SchemaPlace::resolve)
    }

    /// The keys of a table, in the order of the struct's fields.
    pub(super) fn keys(self) -> impl Iterator<Item = (&'static str, SchemaPlace)> {
        let keys = self.schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        keys.map(|(key, schema)| (key.as_str(), SchemaPlace::resolve(schema)))
    }

    pub(super) fn takes(self) -> Takes {
        // schemars writes words with descriptions as `oneOf`, words without as `enum`.
        if let Some(words) = self.schema.get("enum").and_then(Value::as_array) {
            return Takes::OneOf(words.iter().filter_map(Value::as_str).collect());
        }
        if let Some(forms) = self.schema.get("oneOf").or_else(|| self.schema.get("anyOf")).and_then(Value::as_array) {
            let words: Vec<&str> = forms.iter().filter_map(|form| form.get("const")?.as_str()).collect();
            return match words.len() == forms.len() {
                true => Takes::OneOf(words),
                false => Takes::AnyOf(forms.iter().map(SchemaPlace::resolve).collect()),
            };
        }
        match self.type_name() {
            "object" => Takes::Table,
            "array" => Takes::List(SchemaPlace::resolve(&self.schema["items"])),
            "integer" => Takes::WholeNumber,
            "number" => Takes::Number,
            "boolean" => Takes::Boolean,
            "string" if self.is_day() => Takes::Day,
            _ => Takes::Text,
        }
    }

    /// Returns true if messages must not repeat its value.
    pub(super) fn is_secret(self) -> bool {
        self.schema.get("x-secret").and_then(Value::as_bool) == Some(true)
    }

    /// The smallest and the largest number of its range; infinite without a bound.
    pub(super) fn range(self) -> (f64, f64) {
        let bound = |key| self.schema.get(key).and_then(Value::as_f64);
        (bound("minimum").unwrap_or(f64::NEG_INFINITY), bound("maximum").unwrap_or(f64::INFINITY))
    }

    /// The whole numbers that the field's type holds, least and most. 64 bits count as no limit.
    pub(super) fn type_range(self) -> (f64, f64) {
        match self.schema.get("format").and_then(Value::as_str) {
            Some("uint8") => (0.0, u8::MAX.into()),
            Some("uint32") => (0.0, u32::MAX.into()),
            Some("int32") => (i32::MIN.into(), i32::MAX.into()),
            Some("int64") => (f64::NEG_INFINITY, f64::INFINITY),
            _ => (0.0, f64::INFINITY),
        }
    }

    /// Its type in words that complete "must be …".
    pub(super) fn expected(self) -> String {
        if let Some(words) = self.schema.get("x-expected").and_then(Value::as_str) {
            return words.to_owned();
        }
        match self.takes() {
            Takes::Table => "a table".to_owned(),
            Takes::List(_) => "a list".to_owned(),
            Takes::Text | Takes::Day => "a string".to_owned(),
            Takes::OneOf(words) => format!("one of {}", words.join(", ")),
            Takes::Number => "a number".to_owned(),
            Takes::Boolean => "true or false".to_owned(),
            Takes::WholeNumber => {
                let (least, most) = self.range();
                let (type_least, type_most) = self.type_range();
                let from = Some(least.max(type_least)).filter(|least| least.is_finite());
                let to = Some(most.min(type_most)).filter(|most| most.is_finite());
                let from = from.map(|least| format!(" from {least}")).unwrap_or_default();
                let to = to.map(|most| format!(" to {most}")).unwrap_or_default();
                format!("a whole number{from}{to}")
            }
            Takes::AnyOf(forms) => forms.into_iter().map(SchemaPlace::expected).collect::<Vec<_>>().join(" or "),
        }
    }

    fn is_day(self) -> bool {
        self.schema.get("format").and_then(Value::as_str) == Some("date")
    }

    fn type_name(self) -> &'static str {
        let name = |value: &'static Value| value.as_str().filter(|name| *name != "null");
        match &self.schema["type"] {
            Value::Array(names) => names.iter().find_map(name),
            single => name(single),
        }
        .unwrap_or_default()
    }

    /// Follows references, and takes the one form of an optional value that is not null.
    fn resolve(schema: &'static Value) -> SchemaPlace {
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let definition = reference.strip_prefix('#').and_then(|pointer| FILE.as_value().pointer(pointer));
            return definition.map_or(SchemaPlace { schema }, SchemaPlace::resolve);
        }
        let is_null = |form: &&Value| form.get("type").and_then(Value::as_str) == Some("null");
        match schema.get("anyOf").and_then(Value::as_array) {
            Some(forms) if forms.iter().any(|form| is_null(&form)) && forms.len() == 2 => {
                forms.iter().find(|form| !is_null(form)).map_or(SchemaPlace { schema }, SchemaPlace::resolve)
            }
            _ => SchemaPlace { schema },
        }
    }
}
