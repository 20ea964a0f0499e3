//! What this server does not do.

use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;

use super::failure::OllamaFailure;
use crate::http::Failure;

/// Whatever would change which models there are.
pub(super) async fn change() -> OllamaFailure {
    let message = "this server's models are chosen by its operator: they cannot be created, copied, pushed or deleted";
    OllamaFailure(Failure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)))
}
