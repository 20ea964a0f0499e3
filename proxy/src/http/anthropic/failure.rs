//! Errors in Anthropic's envelope.

use axum::response::{IntoResponse, Response};
use baton_schemas::openai::InvalidRequest;

use crate::http::HttpFailure;
use crate::http::dialect::Dialect;

/// An error in Anthropic's envelope.
#[derive(Debug)]
pub(super) struct AnthropicFailure(HttpFailure);

impl From<HttpFailure> for AnthropicFailure {
    fn from(failure: HttpFailure) -> Self {
        AnthropicFailure(failure)
    }
}

impl From<InvalidRequest> for AnthropicFailure {
    fn from(invalid: InvalidRequest) -> Self {
        AnthropicFailure(invalid.into())
    }
}

impl IntoResponse for AnthropicFailure {
    fn into_response(self) -> Response {
        self.0.respond(Dialect::Anthropic)
    }
}
