//! `format` of Ollama's routes: `"json"` or a JSON schema.

use schemars::json_schema;
use serde::de::MapAccess;
use serde_json::Value;

use crate::constraint::Constraint;
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;

/// The constraint on the reply; `None` for plain text.
#[derive(Debug, PartialEq)]
pub(crate) struct Format(pub(super) Option<Constraint>);

impl Read for Format {
    const EXPECTED: &'static str = "\"json\" or a JSON schema";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn string(word: &str) -> Reading<Self> {
        match word {
            "" => Ok(Format(None)),
            "json" => Ok(Format(Some(Constraint::JsonObject))),
            _ => Err(Self::wrong("a string")),
        }
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Value::object(fields)?.and_then(|schema| {
            if schema.as_object().is_some_and(serde_json::Map::is_empty) {
                return Ok(Format(None));
            }
            let constraint = Constraint::json_schema(schema, "format", false);
            constraint.map(|held| Format(Some(held))).map_err(|e| ValueProblem::value(e.to_string()))
        }))
    }
}

described!([] Format: named "OllamaFormat", |_generator| {
    json_schema!({
        "description": "The form that a reply must have.",
        "anyOf": [
            {
                "description": "`json`: any JSON object. Empty: any text.",
                "type": "string", "enum": ["json", ""],
            },
            {
                "description": "A JSON schema for the reply. An empty object allows any text.",
                "type": "object", "additionalProperties": true,
            },
        ],
    })
});

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::field::{Field, object};
    use crate::request::read::read;

    object! {
        /// Has a format.
        struct FormatBody {
            format: Field<Format>,
        }
    }

    #[test]
    fn json_and_schemas_are_constraints() {
        let parsed = |body: Value| {
            let format = read::<FormatBody>(body.to_string().as_bytes()).unwrap().format.get("");
            format.map(|format| format.and_then(|format| format.0)).map_err(|e| e.param)
        };
        for off in [json!({}), json!({ "format": null }), json!({ "format": "" }), json!({ "format": {} })] {
            assert_eq!(parsed(off), Ok(None));
        }
        assert_eq!(parsed(json!({ "format": "json" })), Ok(Some(Constraint::JsonObject)));
        let schema = json!({ "type": "object" });
        let held = Constraint::json_schema(schema.clone(), "format", false).unwrap();
        assert_eq!(parsed(json!({ "format": schema })), Ok(Some(held)));
        for wrong in [json!({ "format": "xml" }), json!({ "format": 3 }), json!({ "format": false })] {
            assert_eq!(parsed(wrong), Err(Some("format".to_owned())));
        }
    }
}
