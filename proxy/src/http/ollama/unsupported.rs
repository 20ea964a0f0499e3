//! Routes that this server refuses.

use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;

use super::failure::OllamaFailure;
use crate::http::HttpFailure;

/// Refuses requests that would add, change or delete models.
pub(super) async fn change() -> OllamaFailure {
    let message = "this server's models are chosen by its operator: they cannot be created, copied, pushed or deleted";
    OllamaFailure(HttpFailure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)))
}
