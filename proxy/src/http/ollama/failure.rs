//! Errors in Ollama's wording and envelope.

use axum::response::{IntoResponse, Response};
use baton_schemas::ollama::OllamaErrorReply;
use baton_schemas::openai::InvalidRequest;

use crate::error::RequestError;
use crate::http::HttpFailure;
use crate::http::dialect::Dialect;

/// An error that is written as `{"error": "…"}`.
#[derive(Debug)]
pub(super) struct OllamaFailure(pub(super) HttpFailure);

impl OllamaFailure {
    /// Maps a failed request to what its client may see, and logs the cause.
    pub(super) fn of_request(error: &RequestError, request_id: &str) -> Self {
        let failure = HttpFailure::of_request(error, request_id);
        match error {
            RequestError::ModelNotFound { model } => OllamaFailure(missing(failure, model)),
            _ => OllamaFailure(failure),
        }
    }
}

/// Writes a failure as the last line of a stream.
pub(super) fn line(failure: HttpFailure) -> OllamaErrorReply {
    failure.error.into()
}

/// Clients match on this message to offer a download.
fn missing(mut failure: HttpFailure, model: &str) -> HttpFailure {
    failure.error.message = format!("model '{}' not found", model.escape_debug());
    failure
}

impl From<HttpFailure> for OllamaFailure {
    fn from(failure: HttpFailure) -> Self {
        OllamaFailure(failure)
    }
}

impl From<InvalidRequest> for OllamaFailure {
    fn from(invalid: InvalidRequest) -> Self {
        OllamaFailure(invalid.into())
    }
}

impl IntoResponse for OllamaFailure {
    fn into_response(self) -> Response {
        self.0.respond(Dialect::Ollama)
    }
}
