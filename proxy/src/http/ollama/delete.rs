//! `DELETE /api/delete`.

use axum::Extension;
use axum::extract::State;
use baton_schemas::machine_models::ClusterOrder;
use baton_schemas::ollama::ModelRequest;

use super::failure::OllamaFailure;
use super::model_name::{to_fetch, without_tag};
use crate::http::HttpState;
use crate::http::baton::models::{LOCAL, may_manage};
use crate::http::body::ReadBody;
use crate::request::caller::Caller;
use crate::request::models;

/// Deletes a model that was fetched, or the files of one on this machine that no process uses.
pub(super) async fn delete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<(), OllamaFailure> {
    may_manage(&state, &caller)?;
    let ModelRequest { model, .. } = body?.parse(ModelRequest::parse).await?;
    let is_served = models::find(state.models_for(&caller), &model).is_ok();
    let model = if is_served { without_tag(&model) } else { to_fetch(&model) };
    let order = ClusterOrder::Delete { model: model.to_owned(), on: LOCAL.to_owned() };
    let deleted = state.backend.order_models(order).await;
    deleted.map(drop).map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))
}
