//! `POST /v1/rerank`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::embed::EmbedInput;
use baton_schemas::llama_server::rerank::{Rerank, RerankReply};

use super::model_or_first;
use crate::http::body::JsonBody;
use crate::http::reply::request_steps::{Drain, or_drained};
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// Scores documents. When the client disconnects, the server drops this future and cancels the rest.
pub(super) async fn rerank(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Json<RerankReply>, HttpFailure> {
    let Rerank { mut embed, form } = body.parse(Rerank::parse).await?;
    embed.model = model_or_first(embed.model, &state, &caller);
    let model = embed.model.clone();
    let text = |input: &EmbedInput| match input {
        EmbedInput::Text(text) => text.clone(),
        EmbedInput::Tokens(_) => String::new(),
    };
    let documents = if form.has_documents { embed.inputs.iter().map(text).collect() } else { Vec::new() };
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let embedded = or_drained(&drain, state.backend.embed(embed, &caller)).await.and_then(|outcome| outcome);
    let embedded = embedded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    // Nodes and upstreams are checked to send one value for each document.
    let scores: Vec<f32> = embedded.vectors.into_iter().flatten().collect();
    Ok(Json(RerankReply::new(model, &scores, documents, form, embedded.n_tokens)))
}
