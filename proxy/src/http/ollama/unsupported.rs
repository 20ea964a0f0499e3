//! Routes that this server refuses.

use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;

use super::failure::OllamaFailure;
use crate::http::HttpFailure;

/// Refuses requests that would make a model of others, or publish one.
pub(super) async fn change() -> OllamaFailure {
    let message = "this server's models are chosen by its operator: they cannot be created or pushed";
    OllamaFailure(HttpFailure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)))
}
