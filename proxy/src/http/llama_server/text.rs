//! `POST /tokenize`, `/detokenize` and `/apply-template`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::llama_server::{
    ApplyTemplate, ApplyTemplateReply, Detokenize, DetokenizeReply, Tokenize, TokenizeReply,
};

use crate::http::body::JsonBody;
use crate::http::{Failure, HttpState};
use crate::request::caller::Caller;

/// A text's tokens.
pub(super) async fn tokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Json<TokenizeReply>, Failure> {
    let Tokenize { model, text } = Tokenize::parse(&body)?;
    let tokens = state.backend.tokenize(model.as_deref(), text, &caller).await;
    tokens.map(|tokens| Json(TokenizeReply { tokens })).map_err(|error| Failure::of_request(&error, &caller.request_id))
}

/// The text of tokens.
pub(super) async fn detokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Json<DetokenizeReply>, Failure> {
    let Detokenize { model, tokens } = Detokenize::parse(&body)?;
    let text = state.backend.detokenize(model.as_deref(), tokens, &caller).await;
    text.map(|content| Json(DetokenizeReply { content }))
        .map_err(|error| Failure::of_request(&error, &caller.request_id))
}

/// The prompt that a chat would get.
pub(super) async fn apply_template(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Json<ApplyTemplateReply>, Failure> {
    let ApplyTemplate { model, chat } = ApplyTemplate::parse(&body)?;
    let prompt = state.backend.render(model.as_deref(), chat, &caller).await;
    prompt
        .map(|prompt| Json(ApplyTemplateReply { prompt }))
        .map_err(|error| Failure::of_request(&error, &caller.request_id))
}
