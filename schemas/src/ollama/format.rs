//! `format`: `"json"` or a schema.

use serde_json::Value;

use crate::constraint::{Constraint, check_schema};
use crate::request::InvalidRequest;
use crate::request::fields::Fields;

/// What the reply has to be; `None` for text.
pub(super) fn parse(root: Fields<'_>) -> Result<Option<Constraint>, InvalidRequest> {
    match root.get("format") {
        None => Ok(None),
        Some(Value::String(name)) if name.is_empty() => Ok(None),
        Some(Value::Object(schema)) if schema.is_empty() => Ok(None),
        Some(Value::String(name)) if name == "json" => Ok(Some(Constraint::JsonObject)),
        Some(schema @ Value::Object(_)) => {
            check_schema(schema).map_err(|e| InvalidRequest::at("format", e))?;
            Ok(Some(Constraint::JsonSchema { schema: schema.clone(), field: "format".to_owned() }))
        }
        Some(_) => Err(InvalidRequest::at("format", "must be \"json\" or a JSON schema")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_and_schemas_are_constraints() {
        let parsed = |body: Value| parse(Fields::root(body.as_object().unwrap())).map_err(|e| e.param);
        for off in [json!({}), json!({ "format": null }), json!({ "format": "" }), json!({ "format": {} })] {
            assert_eq!(parsed(off), Ok(None));
        }
        assert_eq!(parsed(json!({ "format": "json" })), Ok(Some(Constraint::JsonObject)));
        let schema = json!({ "type": "object" });
        let held = Constraint::JsonSchema { schema: schema.clone(), field: "format".to_owned() };
        assert_eq!(parsed(json!({ "format": schema })), Ok(Some(held)));
        for wrong in [json!({ "format": "xml" }), json!({ "format": 3 }), json!({ "format": false })] {
            assert_eq!(parsed(wrong), Err(Some("format".to_owned())));
        }
    }
}
