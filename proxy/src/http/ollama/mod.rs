//! Ollama's dialect: its routes, and its events out of ours. The JSON itself is in `baton_schemas::ollama`.

mod embed;
mod failure;
mod generate;
mod models;
mod ndjson;
mod pull;
mod refused;
mod reply;

use axum::Router;
use axum::routing::{any, delete, get, post};
use tower_http::catch_panic::CatchPanicLayer;

use super::dialect::Dialect;
use super::{HttpState, errors};

/// All routes under `/api`.
pub(super) fn routes() -> Router<HttpState> {
    Router::new()
        .route("/api/chat", post(generate::chat))
        .route("/api/generate", post(generate::generate))
        .route("/api/tags", get(models::tags))
        .route("/api/ps", get(models::running))
        .route("/api/show", post(models::show))
        .route("/api/version", get(models::version))
        .route("/api/pull", post(pull::pull))
        .route("/api/embed", post(embed::embed))
        .route("/api/embeddings", post(embed::embed_older))
        .route("/api/create", post(refused::change))
        .route("/api/copy", post(refused::change))
        .route("/api/push", post(refused::change))
        .route("/api/delete", delete(refused::change))
        .route("/api/blobs/{digest}", any(refused::change))
        .layer(CatchPanicLayer::custom(|panic| errors::panicked(panic, Dialect::Ollama)))
}
