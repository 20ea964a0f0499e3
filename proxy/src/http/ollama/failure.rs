//! Failures in Ollama's words and envelope.

use axum::response::{IntoResponse, Response};
use baton_schemas::ollama::ErrorReply;
use baton_schemas::openai::InvalidRequest;

use crate::error::RequestError;
use crate::http::Failure;
use crate::http::dialect::Dialect;

/// A failure that becomes `{"error": "…"}`.
#[derive(Debug)]
pub(super) struct OllamaFailure(pub(super) Failure);

impl OllamaFailure {
    /// A failed request, as its client may see it. The rest is logged here.
    pub(super) fn of_request(error: &RequestError, request_id: &str) -> Self {
        let failure = Failure::of_request(error, request_id);
        match error {
            RequestError::ModelNotFound { model } => OllamaFailure(missing(failure, model)),
            _ => OllamaFailure(failure),
        }
    }
}

/// A failure as the last line of a stream.
pub(super) fn line(failure: Failure) -> ErrorReply {
    failure.error.into()
}

/// Clients look for these words to offer a download.
fn missing(mut failure: Failure, model: &str) -> Failure {
    failure.error.message = format!("model '{}' not found", model.escape_debug());
    failure
}

impl From<Failure> for OllamaFailure {
    fn from(failure: Failure) -> Self {
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
