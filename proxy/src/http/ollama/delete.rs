//! `DELETE /api/delete`.

use axum::Extension;
use axum::extract::State;
use baton_schemas::machine_models::ClusterOrder;
use baton_schemas::ollama::ModelRequest;

use super::failure::OllamaFailure;
use super::model_name::{to_fetch, without_tag};
use crate::error::RequestError;
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
    let failed = |error| OllamaFailure::of_request(&error, &caller.request_id);
    let served = models::find(state.models_for(&caller), &model).ok();
    if served.as_ref().is_some_and(|served| served.is_upstream) {
        let problem = "is a model of an upstream: delete it there".to_owned();
        return Err(failed(RequestError::InvalidField { field: "model", problem }));
    }
    let file = if served.is_some() { without_tag(&model) } else { to_fetch(&model) };
    // Ollama's clients tell a model that is not there by the status.
    if served.is_none() && !state.backend.has_model_file(file).await {
        return Err(failed(RequestError::ModelNotFound { model }));
    }
    let order = ClusterOrder::Delete { model: file.to_owned(), on: LOCAL.to_owned() };
    state.backend.order_models(order).await.map(drop).map_err(failed)
}
