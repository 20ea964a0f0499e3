//! Schemas of the keywords that OpenAI's strict mode has.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Number, Value};

/// A schema of the keywords that strict mode has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct StrictSchema {
    #[serde(rename = "$ref")]
    pub(super) reference: Option<String>,
    #[serde(rename = "type")]
    pub(super) types: Option<JsonTypes>,
    pub(super) any_of: Option<Vec<StrictSchema>>,
    #[serde(rename = "enum")]
    pub(super) choices: Option<Vec<Value>>,
    #[serde(rename = "const")]
    pub(super) constant: Option<Value>,
    pub(super) properties: Option<BTreeMap<String, StrictSchema>>,
    pub(super) required: Option<Vec<String>>,
    pub(super) additional_properties: Option<Value>,
    pub(super) items: Option<Box<StrictSchema>>,
    pub(super) min_items: Option<u64>,
    pub(super) max_items: Option<u64>,
    pub(super) pattern: Option<String>,
    pub(super) format: Option<StringFormat>,
    pub(super) minimum: Option<Number>,
    pub(super) maximum: Option<Number>,
    pub(super) exclusive_minimum: Option<Number>,
    pub(super) exclusive_maximum: Option<Number>,
    pub(super) multiple_of: Option<Number>,
    #[serde(rename = "$defs", default)]
    pub(super) defs: BTreeMap<String, StrictSchema>,
    #[serde(default)]
    pub(super) definitions: BTreeMap<String, StrictSchema>,
    pub(super) title: Option<String>,
    pub(super) description: Option<String>,
    #[serde(rename = "$schema")]
    pub(super) dialect: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum JsonTypes {
    One(JsonType),
    /// Of the guide: one simple type or null.
    Several([JsonType; 2]),
}

impl JsonTypes {
    pub(super) fn as_slice(&self) -> &[JsonType] {
        match self {
            JsonTypes::One(one) => std::slice::from_ref(one),
            JsonTypes::Several(types) => types,
        }
    }

    pub(super) fn are_taken(&self) -> bool {
        match self {
            JsonTypes::One(_) => true,
            JsonTypes::Several(types) => {
                let is_nested = |one: &JsonType| matches!(one, JsonType::Object | JsonType::Array);
                types[0] != types[1] && types.contains(&JsonType::Null) && !types.iter().any(is_nested)
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum JsonType {
    String,
    Number,
    Boolean,
    Integer,
    Object,
    Array,
    Null,
}

impl JsonType {
    pub(super) fn has(self, value: &Value) -> bool {
        match self {
            JsonType::String => value.is_string(),
            JsonType::Number => value.is_number(),
            JsonType::Integer => value.is_i64() || value.is_u64(),
            JsonType::Boolean => value.is_boolean(),
            JsonType::Null => value.is_null(),
            // The guide has choices among simple values alone.
            JsonType::Object | JsonType::Array => false,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum StringFormat {
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
    pub(super) fn is(&self, one: JsonType) -> bool {
        self.types.as_ref().is_some_and(|types| types.as_slice().contains(&one))
    }

    /// Returns true if each keyword stands beside a type that it is for.
    pub(super) fn is_of_its_types(&self) -> bool {
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
    pub(super) fn is_bare_reference(&self) -> bool {
        let says_more = [&self.title, &self.description, &self.dialect].into_iter().any(Option::is_some);
        let is_more =
            self.types.is_some() || self.any_of.is_some() || self.choices.is_some() || self.constant.is_some();
        !is_more && !says_more && self.is_of_its_types() && !self.has_definitions()
    }

    pub(super) fn has_definitions(&self) -> bool {
        !self.defs.is_empty() || !self.definitions.is_empty()
    }
}

/// Returns true if a pattern looks around itself, which the guide does not promise.
pub(super) fn looks_around(pattern: &str) -> bool {
    let mut rest = pattern;
    while let Some(at) = rest.find(['\\', '(']) {
        let (_, found) = rest.split_at(at);
        if found.starts_with("(?") && !found.starts_with("(?:") {
            return true;
        }
        let n_skipped = if found.starts_with('\\') { 2 } else { 1 };
        let (end, _) = found.char_indices().nth(n_skipped).unwrap_or((found.len(), ' '));
        rest = &found[end..];
    }
    false
}
