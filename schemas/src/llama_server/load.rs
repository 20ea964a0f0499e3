//! `POST /models/load` and `POST /models/unload`, as llama-server has them when it serves several models.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::request::InvalidRequest;
use crate::request::field::{Required, object};
use crate::request::read::read;
use crate::request::values::ModelName;

object! {
    /// Names a model to load or to unload.
    #[schemars(rename = "ModelLoadRequest", example = json!({ "model": "smollm2" }))]
    pub struct ModelLoadBody {
        /// The model's name.
        model: Required<ModelName>,
    }
}

/// Reads a body. Returns the model's name.
pub fn parse(body: &[u8]) -> Result<String, InvalidRequest> {
    let ModelLoadBody { model } = read(body)?;
    Ok(model.get("")?.0)
}

/// The reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ModelLoadReply")]
pub struct ModelLoadReply {
    /// Always true: failures have an error.
    pub success: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_names_a_model() {
        assert_eq!(parse(br#"{"model": "m"}"#).unwrap(), "m");
        assert!(parse(br#"{"model": ""}"#).is_err() && parse(b"{}").is_err() && parse(br#"{"model": 3}"#).is_err());
    }
}
