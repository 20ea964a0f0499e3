//! `POST /models/load` and `POST /models/unload`: for an operator, where the configuration allows model management.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::llama_server::load::{ModelLoadReply, parse};

use crate::http::baton::models::may_manage;
use crate::http::body::JsonBody;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// Loads a model. Unlike llama-server, it answers when the model is loaded.
pub(super) async fn load(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<ModelLoadReply>, HttpFailure> {
    may_manage(&state, &caller)?;
    let model = body.parse(parse).await?;
    let loaded = state.backend.load(&model, None, &caller).await;
    loaded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(ModelLoadReply { success: true }))
}

/// Unloads a model as soon as nothing uses it.
pub(super) async fn unload(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<ModelLoadReply>, HttpFailure> {
    may_manage(&state, &caller)?;
    let model = body.parse(parse).await?;
    let unloaded = state.backend.unload(&model, &caller).await;
    unloaded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(ModelLoadReply { success: true }))
}
