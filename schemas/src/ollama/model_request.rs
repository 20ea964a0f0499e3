//! A body that names a model: `/api/show` and `/api/pull`.

use crate::request::fields::Fields;
use crate::request::{InvalidRequest, json};

/// Which model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRequest {
    /// As the client wrote it.
    pub model: String,
    /// As lines of JSON, where the call streams.
    pub stream: bool,
}

impl ModelRequest {
    /// Reads a body. The model stands under `model`, in older clients under `name`.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        let older = root.string("name")?.filter(|name| !name.is_empty()).map(str::to_owned);
        let model = match (root.get("model"), older) {
            (None, Some(name)) => name,
            _ => root.model()?,
        };
        Ok(ModelRequest { model, stream: super::common::stream(root)? })
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
