//! The dialects: which paths are theirs, and the envelope of their errors.
//!
//! Errors are often answered before or instead of a dialect's handler: an unknown path, a missing key, a stopping server.

use axum::Json;
use axum::response::{IntoResponse, Response};
use baton_schemas::anthropic::AnthropicErrorReply;
use baton_schemas::ollama::OllamaErrorReply;
use baton_schemas::openai::{ErrorBody, ErrorEnvelope};
use http::StatusCode;
use schemars::{Schema, SchemaGenerator};

/// A public API shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's API, and llama-server's and LM Studio's, which have the same errors.
    OpenAi,
    Ollama,
    Anthropic,
}

impl Dialect {
    /// Returns the dialect of a path, also for paths without a route.
    pub fn of(path: &str) -> Dialect {
        let is_under =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        match () {
            () if is_under("/api/v1") => Dialect::OpenAi,
            () if is_under("/api") => Dialect::Ollama,
            () if is_under("/v1/messages") || is_under("/messages") => Dialect::Anthropic,
            () => Dialect::OpenAi,
        }
    }

    /// Writes an error in this dialect's envelope.
    pub(super) fn envelope(self, status: StatusCode, error: ErrorBody) -> Response {
        match self {
            Dialect::OpenAi => Json(ErrorEnvelope { error }).into_response(),
            Dialect::Ollama => Json(OllamaErrorReply::from(error)).into_response(),
            Dialect::Anthropic => Json(AnthropicErrorReply::new(status.as_u16(), error)).into_response(),
        }
    }

    pub(super) fn envelope_schema(self, generator: &mut SchemaGenerator) -> Schema {
        match self {
            Dialect::OpenAi => generator.subschema_for::<ErrorEnvelope>(),
            Dialect::Ollama => generator.subschema_for::<OllamaErrorReply>(),
            Dialect::Anthropic => generator.subschema_for::<AnthropicErrorReply>(),
        }
    }
}
