//! `POST /tokenize` and `POST /detokenize`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::llama_server::{
    Detokenize, DetokenizeReply, ListedTokens, Piece, TokenPiece, Tokenize, TokenizeForm, TokenizeReply,
};
use baton_schemas::node::TokenizeRequest;

use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// `POST /tokenize`.
pub(super) async fn tokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<TokenizeReply>, HttpFailure> {
    let Tokenize { model, text, form } = body.parse(Tokenize::parse).await?;
    let reply = tokenized(&state, model.as_deref(), text, form, &caller).await;
    reply.map(Json).map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

async fn tokenized(
    state: &HttpState,
    model: Option<&str>,
    text: TokenizeRequest,
    form: TokenizeForm,
    caller: &Caller,
) -> Result<TokenizeReply, RequestError> {
    let tokens = state.backend.tokenize(model, text, caller).await?;
    let max_model_len = match form {
        TokenizeForm::Vllms => state.backend.n_ctx(model, caller),
        TokenizeForm::Tokens | TokenizeForm::Pieces => None,
    };
    let count = (form == TokenizeForm::Vllms).then(|| u32::try_from(tokens.len()).unwrap_or(u32::MAX));
    let tokens = match form {
        TokenizeForm::Tokens | TokenizeForm::Vllms => ListedTokens::Ids(tokens),
        TokenizeForm::Pieces => {
            let pieces = state.backend.pieces(model, &tokens, caller).await?;
            let listed = tokens.into_iter().zip(pieces);
            ListedTokens::Pieces(listed.map(|(id, bytes)| TokenPiece { id, piece: Piece::new(bytes) }).collect())
        }
    };
    Ok(TokenizeReply { tokens, count, max_model_len })
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<DetokenizeReply>, HttpFailure> {
    let Detokenize { model, tokens } = body.parse(Detokenize::parse).await?;
    let text = state.backend.detokenize(model.as_deref(), tokens, &caller).await;
    text.map(|content| Json(DetokenizeReply { prompt: content.clone(), content }))
        .map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}
