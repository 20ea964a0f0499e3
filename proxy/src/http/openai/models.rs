//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::time::UNIX_EPOCH;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::{Extension, Json};
use baton_schemas::openai::models::{ModelCard, ModelList, ModelStatus};

use crate::error::RequestError;
use crate::http::openapi::Operation;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;
use crate::request::models::ListedModel;
use crate::targets::model_loading::LoadState;

/// `GET /v1/models`: lists the models that the caller's key may use, each once.
pub async fn list(State(state): State<HttpState>, Extension(caller): Extension<Caller>) -> Json<ModelList> {
    Json(ModelList::new(state.models_for(&caller).iter().filter_map(card).collect()))
}

/// The entry of [`describe`] in `/openapi.json`.
pub(super) fn operation() -> Operation {
    Operation::new("Describe a model, whose name may hold slashes").replies::<ModelCard>().fails(&[404])
}

/// `GET /v1/models/{id}`. The id is the rest of the path: ids contain `/`, percent-encoded or not.
pub async fn show(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, HttpFailure> {
    // A path whose percent-encoding is not UTF-8 names no model.
    let id = id.map(|Path(id)| id).unwrap_or_default();
    let models = state.models_for(&caller);
    let card = models.iter().find(|model| model.is_called(&id)).and_then(card);
    card.map(Json)
        .ok_or_else(|| HttpFailure::of_request(&RequestError::ModelNotFound { model: id }, &caller.request_id))
}

/// Writes a model's card. `None` until a node has reported the model's name.
fn card(model: &ListedModel) -> Option<ModelCard> {
    let (name, aliases) = model.names.split_first()?;
    let created = model.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // A model that is being unloaded counts as unloaded.
    let status = model.load_report.as_ref().map(|load_report| match load_report.state {
        LoadState::Unloading => ModelStatus { value: LoadState::Unloaded.as_str() },
        state => ModelStatus { value: state.as_str() },
    });
    Some(ModelCard { aliases: aliases.to_vec(), status, ..ModelCard::new(name, created) })
}
