//! Bodies that name a model: `/api/show` and `/api/pull`.

use schemars::Schema;
use serde_json::json;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, object};
use crate::request::read::read;
use crate::request::values::ModelName;

object! {
    /// Names a model as `model` or, in older clients, as `name`.
    #[schemars(rename = "OllamaModelRequest", example = json!({ "model": "smollm2" }), transform = either_name)]
    pub struct ModelBody {
        /// A model's name, as `/api/tags` lists it.
        model: Required<ModelName>,
        /// The older name of `model`, which takes precedence.
        name: Field<String>,
        /// Stream the reply as lines of JSON, if the route streams.
        stream: Field<bool>,
    }
}

/// Requires `name` if `model` is missing.
fn either_name(schema: &mut Schema) {
    let object = schema.ensure_object();
    object.remove("required");
    let name = json!({ "type": "string", "minLength": 1 });
    object["properties"]["model"]["type"] = json!(["string", "null"]);
    object.insert(
        "anyOf".to_owned(),
        json!([
            { "required": ["model"], "properties": { "model": name } },
            { "required": ["name"], "properties": { "name": name, "model": { "type": "null" } } },
        ]),
    );
}

/// A checked body that names a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRequest {
    /// The model's name, as the client wrote it.
    pub model: String,
    /// Stream the reply as lines of JSON, if the route streams.
    pub stream: bool,
}

impl ModelRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let body: ModelBody = read(body)?;
        let older = body.name.get("")?.filter(|name| !name.is_empty());
        let model = match (body.model.is_given(), older) {
            (false, Some(name)) => name,
            _ => body.model.get("")?.0,
        };
        Ok(ModelRequest { model, stream: body.stream.get("")?.unwrap_or(true) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: Option<(&str, bool)>) {
        let got = ModelRequest::parse(body.as_bytes()).ok();
        assert_eq!(got.as_ref().map(|request| (request.model.as_str(), request.stream)), expected, "{body}");
    }

    #[test]
    fn both_names_of_the_field_are_read() {
        check(r#"{"model": "m"}"#, Some(("m", true)));
        check(r#"{"name": "m", "stream": false}"#, Some(("m", false)));
        check(r#"{"model": "m", "name": "n"}"#, Some(("m", true)));
        check(r#"{"model": "", "name": ""}"#, None);
        check(r#"{"model": 3}"#, None);
        check("{}", None);
    }
}
