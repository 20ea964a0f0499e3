//! Whether a JSON Schema describes any value that ends.
//!
//! A recursive schema may describe none: text that `{"$ref": "#"}` holds goes nowhere, and text of an object that needs
//! one of its own kind inside goes on for ever. Both compile. Only what is certain counts here: a keyword that is not
//! looked at is taken to allow something, and so is a reference that cannot be followed.

use std::collections::HashMap;

use serde_json::Value;

/// Rounds over the references. Two are enough for most schemas, in whatever order their definitions stand; one that
/// takes more than this is taken to describe something.
const MAX_ROUNDS: usize = 100;

/// Whether there is a value that the schema describes.
pub(super) fn is_derivable(schema: &Value) -> bool {
    let mut search = Search { root: schema, references: Vec::new(), places: HashMap::new() };
    for round in 0..MAX_ROUNDS {
        let before = search.progress();
        if search.ends(schema) {
            return true;
        }
        // More may be found on the way. Definitions mostly lean on those that are found after them, so every other
        // round goes back.
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

/// The least fixed point: a definition describes something once it is shown to without itself.
struct Search<'s> {
    root: &'s Value,
    /// What references lead to, and whether that is known to describe something.
    references: Vec<(&'s Value, bool)>,
    places: HashMap<&'s str, usize>,
}

impl<'s> Search<'s> {
    /// Grows with everything that is learned.
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
            // No schema: the compiler says so.
            _ => true,
        }
    }

    fn follow(&mut self, reference: &'s str) -> bool {
        if let Some(&at) = self.places.get(reference) {
            return self.references[at].1;
        }
        // What is escaped, or another document, is for the compiler.
        let pointer = reference.strip_prefix('#').filter(|pointer| !pointer.contains('%'));
        let Some(target) = pointer.and_then(|pointer| self.root.pointer(pointer)) else { return true };
        self.places.insert(reference, self.references.len());
        self.references.push((target, false));
        false
    }

    /// Whether a value of this type can be.
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
    fn what_needs_itself_describes_nothing() {
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
