//! `POST /api/copy`: in Ollama a copy is a second name of a model, and so it is here.

use axum::Extension;
use axum::extract::State;
use baton_schemas::machine_models::ClusterOrder;
use baton_schemas::ollama::OllamaCopyRequest;

use super::failure::OllamaFailure;
use super::model_name::without_tag;
use crate::http::HttpState;
use crate::http::baton::models::may_manage;
use crate::http::body::ReadBody;
use crate::request::caller::Caller;
use crate::request::models;

/// Gives a model that was fetched a second name. Errors: other models have the names that the configuration gives them.
pub(super) async fn copy(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<(), OllamaFailure> {
    may_manage(&state, &caller)?;
    let OllamaCopyRequest { source, destination } = body?.parse(OllamaCopyRequest::parse).await?;
    let failed = |error| OllamaFailure::of_request(&error, &caller.request_id);
    models::find(state.models_for(&caller), &source).map_err(failed)?;
    let order =
        ClusterOrder::Name { model: without_tag(&source).to_owned(), name: without_tag(&destination).to_owned() };
    state.backend.order_models(order).await.map(drop).map_err(failed)
}
