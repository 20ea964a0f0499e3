//! `response_format`: the form that a reply must have.

use serde_json::Value;

use crate::constraint::{Constraint, SchemaLabel, SchemaPromise};
use crate::request::field::{Field, Required, join, missing, object};
use crate::request::schema::Variant;
use crate::request::values::SchemaObject;
use crate::request::{InvalidRequest, notes};

const FIELD: &str = "response_format";
const NAMED: &str = "response_format.json_schema";

object! {
    /// The form that the reply must have: any text, any JSON object, or JSON that follows a schema.
    pub(crate) struct ResponseFormat {
        /// The kind of form.
        r#type: Field<String>,
        /// With `json_object`: a schema for the object, as in llama-server.
        schema: Field<SchemaObject>,
        /// OpenAI's place for a schema.
        json_schema: Field<NamedSchema>,
    }
    by "type" {
        Variant { words: &["text"], is_default: true, ..Variant::NEW },
        Variant { words: &["json_object"], may_have: &["schema"], ..Variant::NEW },
        Variant { words: &["json_schema"], needs: &["json_schema"], ..Variant::NEW },
    }
}

object! {
    /// A schema with a name.
    pub(crate) struct NamedSchema {
        /// Its name. Only upstreams are told it.
        name: Field<String>,
        /// The purpose of the reply. Only upstreams are told it.
        description: Field<String>,
        /// The schema.
        schema: Required<SchemaObject>,
        /// A schema of which a part cannot be enforced is a 400. Otherwise that part is left out, and the header
        /// `x-baton-warning` names it.
        strict: Field<bool>,
    }
}

impl ResponseFormat {
    /// Returns the constraint on the reply, or `None` for plain text.
    pub(crate) fn check(self) -> Result<Option<Constraint>, InvalidRequest> {
        let has_named = self.json_schema.is_given();
        let schema = self.schema.sound().map(|schema| schema.0);
        let kind = self.r#type.get(FIELD)?;
        match kind.as_deref() {
            None if has_named || schema.is_some() => Err(missing(FIELD, "type")),
            // A schema next to `text` has no effect, but must be an object.
            None | Some("text") => match schema {
                Some(schema) if !schema.is_object() => Err(InvalidRequest::at(FIELD, "schema must be an object")),
                schema => {
                    let unheld = [("schema", schema.is_some()), ("json_schema", has_named)];
                    unheld
                        .iter()
                        .filter(|(_, is_given)| *is_given)
                        .for_each(|(field, _)| notes::ignored(&join(FIELD, field)));
                    Ok(None)
                }
            },
            Some("json_object") if has_named => {
                Err(InvalidRequest::at(FIELD, "type must be json_schema beside json_schema"))
            }
            // As in llama-server, a schema here is enforced.
            Some("json_object") => match schema {
                Some(schema) => held_to(schema, without_strict()).map(Some),
                None => Ok(Some(Constraint::JsonObject)),
            },
            Some("json_schema") => {
                // OpenAI nests the schema in `json_schema`. Some servers take it next to `type`.
                if has_named && schema.is_some() {
                    notes::ignored(&join(FIELD, "schema"));
                }
                let (schema, label) = match self.json_schema.has_key() {
                    true => self.json_schema.sound().map(NamedSchema::check).transpose()?.unwrap_or_default(),
                    false => (schema, without_strict()),
                };
                let schema = schema.ok_or_else(|| InvalidRequest::at(FIELD, "needs json_schema.schema"))?;
                held_to(schema, label).map(Some)
            }
            Some(_) => Err(InvalidRequest::at(FIELD, "type must be text, json_object or json_schema")),
        }
    }
}

impl NamedSchema {
    fn check(self) -> Result<(Option<Value>, SchemaLabel), InvalidRequest> {
        let (name, description) = (self.name.get(NAMED)?, self.description.get(NAMED)?);
        let label = SchemaLabel { name, description, promise: SchemaPromise::said(self.strict.get(NAMED)?) };
        Ok((self.schema.sound().map(|schema| schema.0), label))
    }
}

/// The label of a schema beside `type`. Servers that have it there always hold it.
fn without_strict() -> SchemaLabel {
    SchemaLabel { promise: SchemaPromise::ByDialect, ..SchemaLabel::default() }
}

fn held_to(schema: Value, label: SchemaLabel) -> Result<Constraint, InvalidRequest> {
    Constraint::labelled_schema(schema, FIELD, label).map_err(|e| InvalidRequest::at(FIELD, e))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::measured;
    use crate::request::read::read;

    object! {
        /// Has a format.
        struct WithFormat {
            response_format: Field<ResponseFormat>,
        }
    }

    fn parsed(body: Value) -> Result<Option<Constraint>, String> {
        let format = read::<WithFormat>(body.to_string().as_bytes()).unwrap().response_format.get("");
        format.and_then(|format| format.map_or(Ok(None), ResponseFormat::check)).map_err(|e| e.to_string())
    }

    #[test]
    fn a_schema_is_held_or_named_whatever_is_said_of_its_type() {
        let schema = json!({ "type": "object" });
        let named = json!({ "name": "n", "schema": schema });
        for fields in [json!({ "schema": schema }), json!({ "json_schema": named }), json!({ "json_schema": 3 })] {
            for kind in [None, Some(Value::Null)] {
                let mut format = fields.clone();
                kind.into_iter().for_each(|kind| format["type"] = kind);
                let message = parsed(json!({ "response_format": format })).unwrap_err();
                assert!(message.contains("response_format.type"), "{message}");
            }
        }
        let noted = |format: Value| measured(|| parsed(json!({ "response_format": format })).unwrap()).notes.ignored;
        let both = json!({ "type": "text", "schema": schema, "json_schema": named });
        assert_eq!(noted(both), ["response_format.schema", "response_format.json_schema"]);
        let both = json!({ "type": "json_schema", "schema": schema, "json_schema": named });
        assert_eq!(noted(both), ["response_format.schema"]);
        for nothing in [json!({}), json!({ "type": null, "schema": null, "json_schema": null })] {
            assert_eq!(noted(nothing), [""; 0]);
        }
    }

    #[test]
    fn text_objects_and_schemas_are_told_apart() {
        assert_eq!(parsed(json!({})), Ok(None));
        assert_eq!(parsed(json!({ "response_format": { "type": "text" } })), Ok(None));
        let object = json!({ "response_format": { "type": "json_object" } });
        assert_eq!(parsed(object), Ok(Some(Constraint::JsonObject)));
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let named = json!({ "response_format": { "type": "json_schema",
            "json_schema": { "name": "n", "description": "d", "strict": true, "schema": schema } } });
        let promise = SchemaPromise::Strict(true);
        let label = SchemaLabel { name: Some("n".into()), description: Some("d".into()), promise };
        assert_eq!(parsed(named), Ok(Some(Constraint::labelled_schema(schema.clone(), FIELD, label).unwrap())));
        let null = json!({ "response_format": { "type": "json_schema",
            "json_schema": { "name": null, "strict": null, "schema": schema } } });
        let unsaid = Constraint::labelled_schema(schema.clone(), FIELD, SchemaLabel::default()).unwrap();
        assert_eq!(parsed(null), Ok(Some(unsaid)));
        let held = Constraint::json_schema(schema.clone(), FIELD, false).map(Some).map_err(|e| e.to_string());
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
            json!({ "response_format": { "type": "json_object", "json_schema": { "schema": {} } } }),
            json!({ "response_format": 5 }),
        ] {
            let message = parsed(wrong.clone()).unwrap_err();
            assert!(message.contains("response_format"), "{wrong}: {message}");
        }
    }
}
