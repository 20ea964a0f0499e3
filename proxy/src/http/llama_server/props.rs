//! `GET /props`, `GET /slots` and `GET /tokenizer_info`, for the model in `?model=` or the first one.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::{Extension, Json};
use baton_schemas::llama_server::{Props, SlotInfo, TokenizerInfo, slots};
use serde::Deserialize;

use crate::error::RequestError;
use crate::http::openai::SYSTEM_FINGERPRINT;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// The query parameters. Unknown and invalid ones are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    model: Option<String>,
    /// Any value asks for 503 if no slot is free. Load balancers use it.
    fail_on_no_slot: Option<String>,
}

/// `GET /props`: describes a model.
pub(super) async fn props(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<Props>, HttpFailure> {
    let wanted = wanted.map(|Query(wanted)| wanted).unwrap_or_default();
    let model = state.backend.describe(wanted.model.as_deref(), &caller).await;
    let model = model.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    let props = Props::new(&model.name, &model.info, &model.sampling, SYSTEM_FINGERPRINT);
    Ok(Json(Props { is_sleeping: model.is_sleeping, ..props }))
}

/// `GET /tokenizer_info`: what vLLM's clients need to tokenize and to render chats.
pub(super) async fn tokenizer_info(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<TokenizerInfo>, HttpFailure> {
    let wanted = wanted.map(|Query(wanted)| wanted).unwrap_or_default();
    let model = state.backend.describe(wanted.model.as_deref(), &caller).await;
    let model = model.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    let facts = &model.info.facts;
    let present = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Ok(Json(TokenizerInfo {
        bos_token: present(&facts.bos_token),
        eos_token: present(&facts.eos_token),
        pad_token: None,
        chat_template: present(&facts.chat_template),
        model_max_length: model.info.n_ctx,
    }))
}

/// `GET /slots`: lists a model's slots.
pub(super) async fn list_slots(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<Vec<SlotInfo>>, HttpFailure> {
    let Wanted { model, fail_on_no_slot } = wanted.map(|Query(wanted)| wanted).unwrap_or_default();
    let failed = |error: RequestError| HttpFailure::of_request(&error, &caller.request_id);
    let model = state.backend.describe(model.as_deref(), &caller).await.map_err(failed)?;
    let slots = slots(&model.info, &model.load);
    if fail_on_no_slot.is_some() && slots.iter().all(|slot| slot.is_processing) {
        return Err(failed(RequestError::Overloaded {
            n_running: slots.len(),
            n_waiting: model.load.queued as usize,
            retry_after: std::time::Duration::from_secs(1),
        }));
    }
    Ok(Json(slots))
}
