//! What this server does not do.

use axum::Extension;
use axum::extract::State;
use baton_schemas::ollama::ModelRequest;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;

use super::failure::OllamaFailure;
use crate::generate::Caller;
use crate::http::body::JsonBody;
use crate::http::{Failure, HttpState, backend};

/// `POST /api/embed` and `/api/embeddings`: 404 for a model that is not there, 501 for one that is.
pub(super) async fn embed(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: Result<JsonBody, Failure>,
) -> OllamaFailure {
    let parsed = body.map_err(OllamaFailure).and_then(|body| Ok(ModelRequest::parse(&body.0)?));
    match parsed {
        Ok(request) => {
            let error = backend::no_embeddings(state.models_for(&caller), &request.model);
            OllamaFailure::of_request(&error, &caller.request_id)
        }
        Err(failure) => failure,
    }
}

/// Whatever would change which models there are.
pub(super) async fn change() -> OllamaFailure {
    let message = "this server's models are chosen by its operator: they cannot be created, copied, pushed or deleted";
    OllamaFailure(Failure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, message)))
}
