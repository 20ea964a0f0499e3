//! The public HTTP surface: sockets, limits and access on one side, dialects on the other.
//!
//! [`server::serve`] owns the sockets, and [`router`] everything between a request's head and its reply. Generation is
//! behind [`HttpBackend`]. Nothing here knows engines, queues or planned routes, and only a dialect knows its JSON.
//!
//! A new dialect is a folder beside `openai/`: it touches this file (its routes and the list `ROUTES`), `dialect.rs` (its
//! paths) and `errors.rs` (its form of an error). A new route touches its dialect's file and `ROUTES`.

pub mod access;
mod access_config;
pub mod allowed_hosts;
pub mod allowed_origins;
pub mod anthropic;
pub mod auth;
pub mod body;
pub mod config;
pub mod cors;
pub mod dialect;
pub mod errors;
mod event_stream;
pub mod health;
pub mod host;
pub mod http_backend;
mod http_state;
pub mod keys;
pub mod llama_server;
pub mod metrics;
pub mod ollama;
pub mod open_files;
pub mod openai;
mod openapi;
pub mod origin;
pub mod plan;
mod rate_limit;
pub mod request_id;
pub mod request_steps;
pub mod route_header;
pub mod server;
pub mod state;

mod draining;
mod parse_errors;
mod reply_totals;
mod streamed;
mod unread_body;
mod welcome;

use std::sync::Arc;

pub use access::SharedAccess;
pub use access_config::{AccessConfig, ConfiguredKey, key_hash};
use axum::Router;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
pub use config::HttpConfig;
use dialect::Dialect;
pub use errors::HttpFailure;
pub use http_backend::HttpBackend;
pub use http_state::HttpState;
use openapi::{Operation, Routes};
pub use server::serve;
use tower_http::catch_panic::CatchPanicLayer;

/// Builds all routes with all layers.
pub fn router(backend: Arc<dyn HttpBackend>, config: HttpConfig) -> Router {
    let access = access::shared(&config.access);
    let checked = config.check_host;
    listener(api(backend, config, access.clone()), host::Names { access, checked })
}

/// Builds all routes behind the checks of keys and origins. Several listeners can use the result: they share the
/// callers' accounts and prefix-cache scopes. Access can change while it serves.
pub fn api(backend: Arc<dyn HttpBackend>, config: HttpConfig, access: SharedAccess) -> Router {
    let cors = cors::layer(access.clone());
    let counted = Arc::clone(&backend);
    let state = HttpState { backend, config: Arc::new(config), watchers: http_state::Watchers::default() };

    let routes = routes();
    let document = Bytes::from(openapi::document(&routes.documented).to_string());
    let router = routes
        .router
        .route("/openapi.json", get(move || openapi::show(document)))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(state);

    // The last layer sees a request first. CORS is outside the key check because a preflight carries no key, and inside
    // the Host and Origin checks because a refused page must not pass a preflight either.
    let router = router.layer(from_fn(draining::refuse));
    let router = router.layer(from_fn_with_state(access.clone(), auth::check)).layer(cors);
    router.layer(from_fn_with_state(access, origin::check)).layer(from_fn_with_state(counted, metrics::count))
}

/// Lists all routes with their entries in `/openapi.json`. [`api`] adds the handler of that document.
fn routes() -> Routes {
    let mut routes = Routes::default()
        .merge(openai::routes())
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(llama_server::routes())
        .get("/", welcome::welcome, Operation::new("Liveness check").public().replies_text("text/plain"))
        .get("/health", health::health, health::operation())
        .get("/v1/health", health::health, health::operation())
        .get("/metrics", metrics::scrape, metrics::operation())
        .get("/baton/state", state::show, state::operation())
        .post("/baton/plan", plan::explain, plan::operation());
    routes.describe("/openapi.json", openapi::operation());
    routes
}

/// Adds the layers of one listener: the check of host names, and the headers of every reply.
pub fn listener(api: Router, names: host::Names) -> Router {
    let router = api.layer(from_fn_with_state(names, host::check));
    let panicked = |panic| errors::panicked(panic, Dialect::OpenAi);
    router
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(unread_body::settle))
        .layer(from_fn(request_id::attach))
}

/// All routes, as listed in the error for an unknown path.
const ROUTES: [&str; 28] = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "GET /api/tags",
    "GET /api/ps",
    "POST /api/show",
    "POST /api/pull",
    "GET /api/version",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "GET /props",
    "GET /slots",
    "POST /baton/plan",
    "GET /baton/state",
    "GET /metrics",
    "GET /health",
    "GET /openapi.json",
    "GET /",
];

async fn unknown_route(method: Method, uri: Uri) -> Response {
    HttpFailure::unknown_route(&method, uri.path(), &ROUTES).respond(Dialect::of(uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    HttpFailure::wrong_method(&method, uri.path()).respond(Dialect::of(uri.path()))
}

#[cfg(test)]
mod tests;
