//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use baton_schemas::openai::models::{ModelCard, ModelList};

use crate::error::RequestError;
use crate::generate::Caller;
use crate::http::{Failure, HttpState};

/// All models that the caller's key may use.
pub async fn list(State(state): State<HttpState>, axum::Extension(caller): axum::Extension<Caller>) -> Json<ModelList> {
    let mut cards = state.backend.models();
    cards.retain(|card| caller.account.may_use(&card.id));
    Json(ModelList::new(cards))
}

/// One model. Its id is the rest of the path: ids contain `/`, percent-encoded or not.
pub async fn show(
    State(state): State<HttpState>,
    axum::Extension(caller): axum::Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, Failure> {
    // A path whose percent-encoding is not UTF-8 names no model.
    let id = id.map(|Path(id)| id).unwrap_or_default();
    // Whatever its case, as in a request.
    let card = state
        .backend
        .models()
        .into_iter()
        .find(|card| card.id.eq_ignore_ascii_case(&id) && caller.account.may_use(&card.id));
    card.map(Json).ok_or_else(|| Failure::of_request(&RequestError::ModelNotFound { model: id }, &caller.request_id))
}
