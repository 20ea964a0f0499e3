//! The body of `/api/copy`.

use serde_json::json;

use crate::request::InvalidRequest;
use crate::request::field::{Required, object};
use crate::request::read::read;
use crate::request::values::ModelName;

object! {
    /// Gives a model a second name.
    #[schemars(rename = "OllamaCopyRequest", example = json!({ "source": "hf.co/owner/repo", "destination": "coder" }))]
    pub struct OllamaCopyBody {
        /// A name of the model, as `/api/tags` lists it.
        source: Required<ModelName>,
        /// The new name.
        destination: Required<ModelName>,
    }
}

/// A checked body of `/api/copy`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OllamaCopyRequest {
    /// A name of the model, as the client wrote it.
    pub source: String,
    /// The new name.
    pub destination: String,
}

impl OllamaCopyRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let OllamaCopyBody { source, destination } = read(body)?;
        Ok(OllamaCopyRequest { source: source.get("")?.0, destination: destination.get("")?.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_are_needed() {
        let parse = |body: &str| OllamaCopyRequest::parse(body.as_bytes()).ok();
        let both = parse(r#"{"source": "a", "destination": "b"}"#);
        assert_eq!(both, Some(OllamaCopyRequest { source: "a".into(), destination: "b".into() }));
        for body in [r#"{"source": "a"}"#, r#"{"source": "a", "destination": ""}"#, r#"{"destination": "b"}"#, "[]"] {
            assert_eq!(parse(body), None, "{body}");
        }
    }
}
