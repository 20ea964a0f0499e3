//! `POST /v1/embeddings`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::openai::EmbeddingsBody;
use baton_schemas::openai::embeddings::{EmbeddingList, EmbeddingsRequest};

use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::reply::request_steps::{Drain, or_drained};
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

pub(super) fn operation() -> Operation {
    Operation::new("Compute the embeddings of texts").takes::<EmbeddingsBody>().replies::<EmbeddingList>().of_model()
}

/// `POST /v1/embeddings`. When the client disconnects, the server drops this future and cancels the rest.
pub async fn embed(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Json<EmbeddingList>, HttpFailure> {
    let EmbeddingsRequest { embed, encoding } = body.parse(EmbeddingsRequest::parse).await?;
    let model = embed.model.clone();
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let embedded = or_drained(&drain, state.backend.embed(embed, &caller)).await.and_then(|outcome| outcome);
    let embedded = embedded.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(EmbeddingList::new(model, embedded.vectors, encoding, embedded.n_tokens)))
}
