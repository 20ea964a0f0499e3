//! `GET /props` and `GET /slots`, both of the model in `?model=`, else of the first one.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::{Extension, Json};
use baton_schemas::llama_server::{Props, Slot, slots};
use serde::Deserialize;

use crate::error::RequestError;
use crate::http::openai::SYSTEM_FINGERPRINT;
use crate::http::{Failure, HttpState};
use crate::request::caller::Caller;

/// What stands behind the path. Anything else there is ignored, and so is what cannot be read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    model: Option<String>,
    /// 503 if no slot is free: a load balancer's question. Any value asks it.
    fail_on_no_slot: Option<String>,
}

/// What a model is.
pub(super) async fn props(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<Props>, Failure> {
    let wanted = wanted.map(|Query(wanted)| wanted).unwrap_or_default();
    let model = state.backend.describe(wanted.model.as_deref(), &caller).await;
    let model = model.map_err(|error| Failure::of_request(&error, &caller.request_id))?;
    let props = Props::new(&model.name, &model.info, &model.sampling, SYSTEM_FINGERPRINT);
    Ok(Json(Props { is_sleeping: model.is_sleeping, ..props }))
}

/// What it is doing.
pub(super) async fn list_slots(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<Vec<Slot>>, Failure> {
    let Wanted { model, fail_on_no_slot } = wanted.map(|Query(wanted)| wanted).unwrap_or_default();
    let failed = |error: RequestError| Failure::of_request(&error, &caller.request_id);
    let model = state.backend.describe(model.as_deref(), &caller).await.map_err(failed)?;
    let slots = slots(&model.info, &model.load);
    if fail_on_no_slot.is_some() && slots.iter().all(|slot| slot.is_processing) {
        return Err(failed(RequestError::Overloaded {
            limit: slots.len(),
            retry_after: std::time::Duration::from_secs(1),
        }));
    }
    Ok(Json(slots))
}
