//! The public HTTP surface: sockets, limits and access on one side, dialects on the other.
//!
//! [`server::serve`] owns the sockets and [`router`] everything between a request's head and a reply. What generates
//! is behind [`Backend`]. Nothing here knows engines, queues or routes, and only a dialect knows its JSON.

pub mod auth;
pub mod backend;
pub mod body;
pub mod config;
pub mod cors;
pub mod errors;
pub mod health;
pub mod host;
pub mod openai;
pub mod origin;
pub mod plan;
pub mod request_id;
pub mod server;
pub mod steps;

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;

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
}

/// All routes with everything around them.
pub fn router(backend: Arc<dyn Backend>, config: HttpConfig) -> Router {
    let keys = auth::Keys::new(&config.api_keys, config.share_prefix_cache);
    let hosts = config.check_host.then(|| Arc::new(host::AllowedHosts::new(&config.allowed_hosts)));
    let origins = origin::AllowedOrigins::new(&config.allowed_origins);
    let cors = cors::layer(origins.clone());
    let state = HttpState { backend, config: Arc::new(config) };

    let router = Router::new()
        .route("/", get(welcome))
        .route("/v1/chat/completions", post(openai::chat::complete))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::show))
        .route("/baton/plan", post(plan::explain))
        .route("/health", get(health::health))
        .route("/v1/health", get(health::health))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(state);

    // The last layer meets a request first. CORS stands outside the key check because a preflight carries no key, and
    // inside the Host and Origin checks because a page that is refused must not get past a preflight either.
    let router = router.layer(from_fn_with_state(Arc::new(keys), auth::check)).layer(cors);
    let router = router.layer(from_fn_with_state(origins, origin::check));
    let router = router.layer(from_fn_with_state(hosts, host::check));
    router.layer(CatchPanicLayer::custom(errors::panicked)).layer(from_fn(request_id::attach))
}

/// What the API has: shown to whoever asks for something else.
const ROUTES: [&str; 5] =
    ["POST /v1/chat/completions", "GET /v1/models", "GET /v1/models/{id}", "POST /baton/plan", "GET /health"];

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
