//! Checks that a JSON Schema describes at least one finite value.
//!
//! A recursive schema may describe none: `{"$ref": "#"}` has no content, and the text of an object that requires an
//! object of its own schema never ends. Both compile. The check is conservative: a keyword that it ignores counts as
//! allowing some value, and so does a reference that it cannot follow.

use std::collections::HashMap;

use serde_json::Value;

/// The most rounds over the references. Two are enough for most schemas, whatever the order of their definitions. A
/// schema that needs more counts as describing some value.
const MAX_ROUNDS: usize = 100;

/// Returns true if the schema describes at least one finite value.
pub(crate) fn is_derivable(schema: &Value) -> bool {
    let mut search = Search { root: schema, references: Vec::new(), places: HashMap::new() };
    for round in 0..MAX_ROUNDS {
        let before = search.progress();
        if search.ends(schema) {
            return true;
        }
        // The list grows during the loop. Definitions mostly refer to later ones, so every other round runs backwards.
        let mut n_looked_at = 0;
        while n_looked_at < search.references.len() {
            let at = if round % 2 == 0 { n_looked_at } else { search.references.len() - 1 - n_looked_at };
            search.look_at(at);
            n_looked_at += 1;
        }
        if search.progress() == before {
            return false;
        }
    }
    true
}

/// Computes a least fixed point: a definition describes a value once that is shown without assuming it.
struct Search<'s> {
    root: &'s Value,
    /// The targets of references, with true if they are known to describe a value.
    references: Vec<(&'s Value, bool)>,
    places: HashMap<&'s str, usize>,
}

impl<'s> Search<'s> {
    /// The number of targets and the number of those that describe a value. Both only grow.
    fn progress(&self) -> (usize, usize) {
        (self.references.len(), self.references.iter().filter(|(_, ends)| *ends).count())
    }

    fn look_at(&mut self, at: usize) {
        let (target, known) = self.references[at];
        if !known && self.ends(target) {
            self.references[at].1 = true;
        }
    }

    fn ends(&mut self, schema: &'s Value) -> bool {
        match schema {
            Value::Bool(anything) => *anything,
            Value::Object(fields) => {
                let all = |key: &str| fields.get(key).and_then(Value::as_array).filter(|all| !all.is_empty());
                fields.get("$ref").and_then(Value::as_str).is_none_or(|reference| self.follow(reference))
                    && all("allOf").is_none_or(|all| all.iter().all(|schema| self.ends(schema)))
                    && all("anyOf").is_none_or(|any| any.iter().any(|schema| self.ends(schema)))
                    && all("oneOf").is_none_or(|any| any.iter().any(|schema| self.ends(schema)))
                    && match fields.get("type") {
                        Some(Value::String(kind)) => self.kind_ends(kind, schema),
                        Some(Value::Array(kinds)) if !kinds.is_empty() => {
                            kinds.iter().any(|kind| kind.as_str().is_none_or(|kind| self.kind_ends(kind, schema)))
                        }
                        _ => true,
                    }
            }
            // Not a schema: the compiler reports that.
            _ => true,
        }
    }

    fn follow(&mut self, reference: &'s str) -> bool {
        if let Some(&at) = self.places.get(reference) {
            return self.references[at].1;
        }
        // Escaped references and other documents are left to the compiler.
        let pointer = reference.strip_prefix('#').filter(|pointer| !pointer.contains('%'));
        let Some(target) = pointer.and_then(|pointer| self.root.pointer(pointer)) else { return true };
        self.places.insert(reference, self.references.len());
        self.references.push((target, false));
        false
    }

    /// Returns true if the schema describes a finite value of this type.
    fn kind_ends(&mut self, kind: &str, schema: &'s Value) -> bool {
        match kind {
            "object" => {
                let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
                let required = required.filter_map(|name| schema.get("properties")?.get(name.as_str()?));
                required.into_iter().all(|property| self.ends(property))
            }
            "array" => {
                let least = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0);
                let first = schema.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
                let n_first = usize::try_from(least).unwrap_or(usize::MAX).min(first.len());
                first[..n_first].iter().all(|item| self.ends(item))
                    && (least <= first.len() as u64 || schema.get("items").is_none_or(|item| self.ends(item)))
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(schema: Value, expected: bool) {
        assert_eq!(is_derivable(&schema), expected, "{schema}");
    }

    #[test]
    fn schemas_that_require_themselves_describe_nothing() {
        let object = |inner: Value| json!({ "type": "object", "properties": { "a": inner }, "required": ["a"] });
        for nothing in [
            json!({ "$ref": "#" }),
            json!({ "anyOf": [{ "$ref": "#" }] }),
            json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
            json!({ "allOf": [{ "type": "object" }, { "$ref": "#" }] }),
            object(json!({ "$ref": "#" })),
            object(json!({ "type": "object", "properties": { "b": { "$ref": "#" } }, "required": ["b"] })),
            json!({ "type": "array", "items": { "$ref": "#" }, "minItems": 1 }),
            json!({ "type": "array", "prefixItems": [{ "type": "null" }, { "$ref": "#" }], "minItems": 2 }),
            object(json!(false)),
        ] {
            check(nothing, false);
        }
    }

    #[test]
    fn recursion_that_can_end_describes_something() {
        let node = |children: Value| json!({ "type": "object", "properties": { "c": children }, "required": ["c"] });
        for something in [
            json!({}),
            json!({ "type": "object", "properties": { "a": { "$ref": "#" } } }),
            node(json!({ "type": "array", "items": { "$ref": "#" } })),
            node(json!({ "anyOf": [{ "$ref": "#" }, { "type": "null" }] })),
            node(json!({ "type": ["object", "null"], "properties": { "d": { "$ref": "#" } }, "required": ["d"] })),
            json!({ "type": "array", "items": { "$ref": "#" } }),
            json!({ "type": "array", "prefixItems": [{ "type": "null" }, { "$ref": "#" }], "minItems": 1 }),
            json!({ "$ref": "https://example.com/other" }),
            json!({ "$ref": "#/$defs/a%20b" }),
        ] {
            check(something, true);
        }
    }

    #[test]
    fn chains_of_definitions_are_followed_in_either_order() {
        let chain = |next: &dyn Fn(usize) -> usize, last: usize| {
            let definition = |i: usize| match i == last {
                true => (i.to_string(), json!({ "type": "integer" })),
                false => (i.to_string(), json!({ "$ref": format!("#/$defs/{}", next(i)) })),
            };
            let definitions: serde_json::Map<_, _> = (0..500).map(definition).collect();
            json!({ "allOf": [{ "$ref": "#/$defs/0" }, { "$ref": "#/$defs/499" }], "$defs": definitions })
        };
        check(chain(&|i| i + 1, 499), true);
        check(chain(&|i| i.saturating_sub(1), 0), true);
        check(chain(&|i| (i + 1) % 500, usize::MAX), false);
    }
}
