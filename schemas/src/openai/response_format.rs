//! `response_format`.

use serde_json::Value;

use crate::constraint::{Constraint, check_schema};
use crate::request::InvalidRequest;
use crate::request::fields::Fields;

const FIELD: &str = "response_format";

/// What the reply has to be; `None` for text.
pub(super) fn parse(root: Fields<'_>) -> Result<Option<Constraint>, InvalidRequest> {
    let Some(format) = root.get(FIELD) else { return Ok(None) };
    match Fields::at(format, FIELD)?.string("type")? {
        // One beside it has no effect, and is still to be a schema.
        None | Some("text") => match schema_of(format).filter(|schema| !schema.is_object()) {
            Some(_) => Err(InvalidRequest::at(FIELD, "schema must be an object")),
            None => Ok(None),
        },
        // llama-server takes a schema here too, and nobody sends one that is not to be kept.
        Some("json_object") => match schema_of(format) {
            Some(schema) => held_to(schema).map(Some),
            None => Ok(Some(Constraint::JsonObject)),
        },
        Some("json_schema") => {
            // OpenAI nests the schema under its name; some servers take it beside `type`.
            let schema = schema_of(format.get("json_schema").unwrap_or(format));
            held_to(schema.ok_or_else(|| InvalidRequest::at(FIELD, "needs json_schema.schema"))?).map(Some)
        }
        Some(_) => Err(InvalidRequest::at(FIELD, "type must be text, json_object or json_schema")),
    }
}

fn schema_of(format: &Value) -> Option<&Value> {
    format.get("schema").filter(|schema| !schema.is_null())
}

fn held_to(schema: &Value) -> Result<Constraint, InvalidRequest> {
    check_schema(schema).map_err(|e| InvalidRequest::at(FIELD, e))?;
    Ok(Constraint::JsonSchema { schema: schema.clone(), field: FIELD.to_owned() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(body: Value) -> Result<Option<Constraint>, String> {
        parse(Fields::root(body.as_object().unwrap())).map_err(|e| e.to_string())
    }

    #[test]
    fn text_objects_and_schemas_are_told_apart() {
        assert_eq!(parsed(json!({})), Ok(None));
        assert_eq!(parsed(json!({ "response_format": { "type": "text" } })), Ok(None));
        let object = json!({ "response_format": { "type": "json_object" } });
        assert_eq!(parsed(object), Ok(Some(Constraint::JsonObject)));
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let named = json!({ "response_format": { "type": "json_schema",
            "json_schema": { "name": "n", "strict": true, "schema": schema } } });
        let held = Ok(Some(Constraint::JsonSchema { schema: schema.clone(), field: FIELD.to_owned() }));
        assert_eq!(parsed(named), held);
        let beside = |kind: &str| json!({ "response_format": { "type": kind, "schema": schema } });
        assert_eq!(parsed(beside("json_schema")), held);
        assert_eq!(parsed(beside("json_object")), held, "llama-server's form");
        let null = json!({ "response_format": { "type": "json_object", "schema": null } });
        assert_eq!(parsed(null), Ok(Some(Constraint::JsonObject)));
        for wrong in [
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n" } } }),
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 3 } } }),
            json!({ "response_format": { "type": "json_object", "schema": "object" } }),
            json!({ "response_format": { "type": "text", "schema": [null, null] } }),
            json!({ "response_format": { "type": "xml" } }),
            json!({ "response_format": 5 }),
        ] {
            let message = parsed(wrong.clone()).unwrap_err();
            assert!(message.contains("response_format"), "{wrong}: {message}");
        }
    }
}
