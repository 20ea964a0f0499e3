//! LM Studio's own routes, as far as they are about models. Its clients generate by OpenAI's. Errors have OpenAI's envelope. The JSON
//! types are in `baton_schemas::lm_studio`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::lm_studio::{
    LmStudioLoadBody, LmStudioLoadReply, LmStudioLoadRequest, LmStudioModel, LmStudioModelList, LmStudioUnloadBody,
    LmStudioUnloadReply, parse_unload,
};
use tokio::time::Instant;

use super::baton::models::may_manage;
use super::body::JsonBody;
use super::openapi::{Operation, Routes};
use super::{HttpFailure, HttpState};
use crate::request::caller::Caller;
use crate::request::models;

pub(super) fn routes() -> Routes {
    let load = Operation::new("Load a model, for operators").takes::<LmStudioLoadBody>().replies::<LmStudioLoadReply>();
    let unload =
        Operation::new("Unload a model, for operators").takes::<LmStudioUnloadBody>().replies::<LmStudioUnloadReply>();
    Routes::of("LM Studio")
        .get("/api/v1/models", list, Operation::new("List the models").replies::<LmStudioModelList>())
        .post("/api/v1/models/load", self::load, load.of_model())
        .post("/api/v1/models/unload", self::unload, unload.of_model())
}

/// Lists the models that the caller's key may use.
async fn list(State(state): State<HttpState>, Extension(caller): Extension<Caller>) -> Json<LmStudioModelList> {
    let models = state.models_for(&caller);
    let listed = models.iter().flat_map(|model| {
        model.listed_names().map(|name| LmStudioModel::new(name, model.info.as_deref(), model.is_loaded()))
    });
    Json(LmStudioModelList { models: listed.collect() })
}

/// Loads a model, and answers when it is loaded.
async fn load(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<LmStudioLoadReply>, HttpFailure> {
    may_manage(&state, &caller)?;
    let LmStudioLoadRequest { model, echoes_config } = body.parse(LmStudioLoadRequest::parse).await?;
    let began = Instant::now();
    let loaded = state.backend.load(&model, None, &caller).await;
    let failed = |error| HttpFailure::of_request(&error, &caller.request_id);
    loaded.map_err(failed)?;
    let seconds = began.elapsed().as_secs_f64();
    let info = models::find(state.models_for(&caller), &model).map_err(failed)?.info;
    Ok(Json(LmStudioLoadReply::new(model, info.as_deref(), seconds, echoes_config)))
}

/// Unloads a model as soon as nothing uses it.
async fn unload(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<LmStudioUnloadReply>, HttpFailure> {
    may_manage(&state, &caller)?;
    let instance_id = body.parse(parse_unload).await?;
    let unloaded = state.backend.unload(&instance_id, &caller).await;
    unloaded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(LmStudioUnloadReply { instance_id }))
}
