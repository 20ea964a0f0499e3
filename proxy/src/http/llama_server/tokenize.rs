//! `POST /tokenize` and `POST /detokenize`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::llama_server::{Detokenize, DetokenizeReply, Tokenize, TokenizeReply};

use crate::http::body::JsonBody;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// `POST /tokenize`.
pub(super) async fn tokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<TokenizeReply>, HttpFailure> {
    let Tokenize { model, text } = body.parse(Tokenize::parse).await?;
    let tokens = state.backend.tokenize(model.as_deref(), text, &caller).await;
    tokens
        .map(|tokens| Json(TokenizeReply { tokens }))
        .map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<DetokenizeReply>, HttpFailure> {
    let Detokenize { model, tokens } = body.parse(Detokenize::parse).await?;
    let text = state.backend.detokenize(model.as_deref(), tokens, &caller).await;
    text.map(|content| Json(DetokenizeReply { content }))
        .map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}
