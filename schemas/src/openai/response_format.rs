//! `response_format`.

use crate::constraint::{Constraint, check_schema};
use crate::request::InvalidRequest;
use crate::request::fields::Fields;

/// What the reply has to be; `None` for text.
pub(super) fn parse(root: Fields<'_>) -> Result<Option<Constraint>, InvalidRequest> {
    const FIELD: &str = "response_format";
    let Some(format) = root.get(FIELD) else { return Ok(None) };
    match Fields::at(format, FIELD)?.string("type")? {
        None | Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => {
            // OpenAI nests the schema under its name; some servers take it beside `type`.
            let named = format.get("json_schema").unwrap_or(format);
            let schema = named.get("schema").filter(|schema| !schema.is_null());
            let schema = schema.ok_or_else(|| InvalidRequest::at(FIELD, "needs json_schema.schema"))?;
            check_schema(schema).map_err(|e| InvalidRequest::at(FIELD, e))?;
            Ok(Some(Constraint::JsonSchema { schema: schema.clone() }))
        }
        Some(_) => Err(InvalidRequest::at(FIELD, "type must be text, json_object or json_schema")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
        assert_eq!(parsed(named), Ok(Some(Constraint::JsonSchema { schema })));
        for wrong in [
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n" } } }),
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 3 } } }),
            json!({ "response_format": { "type": "xml" } }),
            json!({ "response_format": 5 }),
        ] {
            let message = parsed(wrong.clone()).unwrap_err();
            assert!(message.contains("response_format"), "{wrong}: {message}");
        }
    }
}
