//! `POST /v1/embeddings`: refused, since no engine here runs embedding models.

use axum::Extension;
use axum::extract::State;
use baton_schemas::openai::embeddings;

use crate::generate::Caller;
use crate::http::body::JsonBody;
use crate::http::{Failure, HttpState, backend};

/// 404 for a model that is not there, 501 for one that is.
pub async fn embed(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Failure {
    match embeddings::model(&body) {
        Ok(model) => {
            let error = backend::no_embeddings(state.models_for(&caller), &model);
            Failure::of_request(&error, &caller.request_id)
        }
        Err(invalid) => invalid.into(),
    }
}
