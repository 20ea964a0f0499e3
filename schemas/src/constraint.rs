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
    },
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
    if !schema.is_object() {
        return Err(SchemaError::NotAnObject);
    }
    let mut left = MAX_VALUES;
    if fits(schema, MAX_DEPTH, &mut left) { Ok(()) } else { Err(SchemaError::TooLarge) }
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
    fn schemas_are_objects_of_a_bounded_size() {
        assert_eq!(check_schema(&json!({ "type": "object" })), Ok(()));
        assert_eq!(check_schema(&json!("object")), Err(SchemaError::NotAnObject));
        let deep = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({ "items": inner }));
        assert_eq!(check_schema(&deep), Err(SchemaError::TooLarge));
        let wide = json!({ "enum": vec![1; MAX_VALUES] });
        assert_eq!(check_schema(&wide), Err(SchemaError::TooLarge));
    }
}
