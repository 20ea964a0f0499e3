//! The public HTTP surface: sockets, limits and access on one side, dialects on the other.
//!
//! [`server::serve`] owns the sockets and [`router`] everything between a request's head and a reply. What generates
//! is behind [`Backend`]. Nothing here knows engines, queues or routes, and only a dialect knows its JSON.

pub mod access;
pub mod auth;
pub mod backend;
pub mod body;
pub mod config;
pub mod cors;
pub mod errors;
mod event_stream;
pub mod health;
pub mod host;
pub mod metrics;
pub mod open_files;
pub mod openai;
pub mod origin;
mod rate_limit;
pub mod request_id;
pub mod server;
pub mod state;
pub mod steps;

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;

pub use access::{AccessConfig, SharedAccess};
pub use backend::{Backend, Health};
pub use config::HttpConfig;
pub use errors::Failure;
pub use server::serve;

/// What handlers share.
#[derive(Clone)]
pub struct HttpState {
    /// What generates.
    pub backend: Arc<dyn Backend>,
    /// Limits and times.
    pub config: Arc<HttpConfig>,
    /// Bounds the streams of states.
    pub watchers: state::Watchers,
}

/// All routes with everything around them.
pub fn router(backend: Arc<dyn Backend>, config: HttpConfig) -> Router {
    let access = access::shared(&config.access);
    router_with(backend, config, access)
}

/// The same with access that can change while it serves.
pub fn router_with(backend: Arc<dyn Backend>, config: HttpConfig, access: SharedAccess) -> Router {
    let cors = cors::layer(access.clone());
    let counted = Arc::clone(&backend);
    let state = HttpState { backend, config: Arc::new(config), watchers: state::Watchers::default() };

    let router = Router::new()
        .route("/", get(welcome))
        .route("/v1/chat/completions", post(openai::chat::complete))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::show))
        .route("/baton/state", get(state::show))
        .route("/metrics", get(metrics::scrape))
        .route("/health", get(health::health))
        .route("/v1/health", get(health::health))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(state);

    // The last layer meets a request first. CORS stands outside the key check because a preflight carries no key, and
    // inside the Host and Origin checks because a page that is refused must not get past a preflight either.
    let router = router.layer(from_fn_with_state(access.clone(), auth::check)).layer(cors);
    let router = router.layer(from_fn_with_state(access.clone(), origin::check));
    let router = router.layer(from_fn_with_state(access, host::check));
    let router = router.layer(CatchPanicLayer::custom(errors::panicked));
    router.layer(from_fn_with_state(counted, metrics::count)).layer(from_fn(request_id::attach))
}

/// What the API has: shown to whoever asks for something else.
const ROUTES: [&str; 6] = [
    "POST /v1/chat/completions",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "GET /baton/state",
    "GET /metrics",
    "GET /health",
];

/// For a person who opens the address in a browser, and for tools that only look whether somebody is there.
async fn welcome() -> String {
    format!("Baton is running. Its API is OpenAI's:\n\n  {}\n", ROUTES.join("\n  "))
}

async fn unknown_route(method: Method, uri: Uri) -> Failure {
    Failure::unknown_route(&method, uri.path(), &ROUTES)
}

async fn wrong_method(method: Method, uri: Uri) -> Failure {
    Failure::wrong_method(&method, uri.path())
}

#[cfg(test)]
mod tests;
