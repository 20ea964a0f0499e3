//! References to schemas that contain them, as of a tree whose children are trees.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Keywords beside a reference that say nothing about the text.
pub(super) const MAY_STAND_BESIDE: [&str; 14] = [
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
];

/// The most values that are looked at. In a larger schema every reference counts as one that comes back.
const MAX_VALUES: usize = 1_000_000;

/// The references of a schema that come back to themselves.
pub(super) struct CircularReferences {
    references: HashSet<String>,
}

impl CircularReferences {
    pub(super) fn of(root: &Value) -> CircularReferences {
        let mut n_left = MAX_VALUES;
        let mut all = HashSet::new();
        collect(root, &mut all, &mut n_left);
        let mut comes_back = |start: &String| {
            let (mut seen, mut left) = (HashSet::new(), vec![start.clone()]);
            while let Some(reference) = left.pop() {
                let Some(target) = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) else {
                    continue;
                };
                let mut inner = HashSet::new();
                collect(target, &mut inner, &mut n_left);
                if n_left == 0 || inner.contains(start) {
                    return true;
                }
                left.extend(inner.into_iter().filter(|reference| seen.insert(reference.clone())));
            }
            false
        };
        CircularReferences { references: all.into_iter().filter(|reference| comes_back(reference)).collect() }
    }

    /// Returns true if a schema is such a reference.
    pub(super) fn is_at(&self, schema: &Value) -> bool {
        schema.get("$ref").and_then(Value::as_str).is_some_and(|reference| self.references.contains(reference))
    }

    /// The keyword of a schema that has such a reference for the value itself.
    pub(super) fn place(&self, fields: &Map<String, Value>) -> Option<&'static str> {
        let in_list = |key: &&str| {
            fields.get(*key).and_then(Value::as_array).is_some_and(|all| all.iter().any(|one| self.is_at(one)))
        };
        let is_here = fields.get("$ref").and_then(Value::as_str).is_some_and(|one| self.references.contains(one));
        if is_here { Some("$ref") } else { ["allOf", "anyOf", "oneOf"].into_iter().find(in_list) }
    }
}

/// Adds the references within a value.
fn collect(value: &Value, references: &mut HashSet<String>, n_left: &mut usize) {
    *n_left = n_left.saturating_sub(1);
    if *n_left == 0 {
        return;
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, references, n_left)),
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                references.insert(reference.clone());
            }
            fields.values().for_each(|inner| collect(inner, references, n_left));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
