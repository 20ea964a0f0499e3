//! `POST /api/embed` and `POST /api/embeddings`.

use std::time::Instant;

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::embed::{EmbedRequest, EmbedTimings};
use baton_schemas::ollama::embed::{EmbedReply, OlderEmbedReply, parse, parse_older};

use super::failure::OllamaFailure;
use crate::error::RequestError;
use crate::http::HttpState;
use crate::http::body::ReadBody;
use crate::http::reply::request_steps::{Drain, or_drained};
use crate::request::caller::Caller;
use crate::targets::Embedded;

/// `POST /api/embed`: any number of texts.
pub(super) async fn embed(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: ReadBody,
) -> Result<Json<EmbedReply>, OllamaFailure> {
    let since = Instant::now();
    let request = body?.parse(parse).await?;
    let model = request.model.clone();
    let embedded = answer(&state, &caller, drain, request).await?;
    Ok(Json(EmbedReply {
        model,
        embeddings: embedded.vectors,
        total_duration: u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX),
        load_duration: (embedded.timings.queue_ms * 1e6).round() as u64,
        prompt_eval_count: embedded.n_tokens,
    }))
}

/// `POST /api/embeddings`: one text.
pub(super) async fn embed_older(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: ReadBody,
) -> Result<Json<OlderEmbedReply>, OllamaFailure> {
    let request = body?.parse(parse_older).await?;
    let embedded = answer(&state, &caller, drain, request).await?;
    Ok(Json(OlderEmbedReply { embedding: embedded.vectors.into_iter().next().unwrap_or_default() }))
}

/// Computes the embeddings. When the client disconnects, the server drops this future and cancels the rest. Without a
/// text, it waits until the model is ready.
async fn answer(
    state: &HttpState,
    caller: &Caller,
    drain: Drain,
    request: EmbedRequest,
) -> Result<Embedded, OllamaFailure> {
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let embedded = async {
        if request.inputs.is_empty() {
            state.backend.load(&request.model, request.keep_alive, caller).await?;
            return Ok(Embedded { vectors: Vec::new(), n_tokens: 0, timings: EmbedTimings::default() });
        }
        state.backend.embed(request, caller).await
    };
    let embedded: Result<Embedded, RequestError> = or_drained(&drain, embedded).await.and_then(|outcome| outcome);
    embedded.map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))
}
