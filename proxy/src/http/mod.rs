//! The public HTTP surface: sockets, limits and access on one side, dialects on the other.
//!
//! [`server::serve`] owns the sockets, and [`router`] everything between a request's head and its reply. Generation is
//! behind [`HttpBackend`]. Nothing here knows engines, queues or planned routes, and only a dialect knows its JSON.
//!
//! Each dialect is a folder: `mod.rs` has its routes, `stream.rs` and `whole.rs` write a reply, `failure.rs` writes errors
//! where they differ from OpenAI's, and each further file is named after its route. A new dialect also touches this file
//! (its routes) and `dialect.rs` (its paths and the envelope of its errors).

pub mod access;
mod anthropic;
pub mod baton;
pub mod body;
pub mod body_budget;
pub mod config;
pub mod dialect;
pub mod errors;
mod event_stream;
pub mod http_backend;
mod http_state;
pub mod llama_server;
pub mod ollama;
pub mod open_files;
pub mod openai;
mod openapi;
pub mod request_id;
pub mod request_steps;
pub mod route_header;
pub mod server;

mod draining;
mod parse_errors;
mod reply_totals;
mod streamed;
mod unread_body;

use std::sync::Arc;

use access::key_check::{self, KeyCheck};
pub use access::{AccessConfig, ConfiguredKey, SharedAccess, key_hash};
use access::{cors, host_check, origin_check};
use axum::Router;
use axum::extract::{MatchedPath, State};
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use baton::metrics;
use body_budget::BodyBudget;
use bytes::Bytes;
pub use config::HttpConfig;
use dialect::Dialect;
pub use errors::HttpFailure;
pub use http_backend::HttpBackend;
pub use http_state::HttpState;
use openapi::Routes;
pub use server::serve;
use tower_http::catch_panic::CatchPanicLayer;

/// Builds all routes with all layers.
pub fn router(backend: Arc<dyn HttpBackend>, config: HttpConfig) -> Router {
    let access = access::shared(&config.access);
    let checks_names = config.check_host;
    listener(api(backend, config, access.clone()), host_check::HostCheck { access, checks_names })
}

/// Builds all routes behind the checks of keys and origins. Several listeners can use the result: they share the
/// callers' accounts and prefix-cache scopes. Access can change while it serves.
pub fn api(backend: Arc<dyn HttpBackend>, config: HttpConfig, access: SharedAccess) -> Router {
    let cors = cors::layer(access.clone());
    let counted = Arc::clone(&backend);
    let routes = routes();
    let while_stopping = routes.paths_while_stopping();
    let keys = KeyCheck { access: access.clone(), public_paths: routes.public_paths() };
    let watchers = http_state::Watchers::default();
    let bodies = BodyBudget::default();
    let state = HttpState { backend, config: Arc::new(config), watchers, bodies, routes: routes.listed().into() };
    let document = Bytes::from(openapi::document(&routes.documented).to_string());
    let router = routes
        .router
        .route(openapi::PATH, get(move || openapi::show(document)))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(state);

    // The last layer sees a request first. CORS is outside the key check because a preflight carries no key, and inside
    // the Host and Origin checks because a refused page must not pass a preflight either.
    let router = router.layer(from_fn_with_state(while_stopping, draining::refuse));
    let router = router.layer(from_fn_with_state(keys, key_check::check)).layer(cors);
    router.layer(from_fn_with_state(access, origin_check::check)).layer(from_fn_with_state(counted, metrics::count))
}

/// Lists all routes with their entries in `/openapi.json`. [`api`] adds the handler of that document.
fn routes() -> Routes {
    openai::routes()
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(llama_server::routes())
        .merge(baton::routes().describe(Method::GET, openapi::PATH, openapi::operation()))
}

/// Adds the layers of one listener: the check of host names, and the headers of every reply.
pub fn listener(api: Router, host: host_check::HostCheck) -> Router {
    let router = api.layer(from_fn_with_state(host, host_check::check));
    let panicked = |panic| errors::panicked(panic, Dialect::OpenAi);
    router
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(unread_body::settle))
        .layer(from_fn(request_id::attach))
}

async fn unknown_route(State(state): State<HttpState>, method: Method, uri: Uri) -> Response {
    HttpFailure::unknown_route(&method, uri.path(), &state.routes).respond(Dialect::of(uri.path()))
}

async fn wrong_method(
    State(state): State<HttpState>,
    route: Option<MatchedPath>,
    method: Method,
    uri: Uri,
) -> Response {
    // As in the list of routes.
    let route = route.map(|route| route.as_str().replace("{*", "{"));
    let routes = state.routes.iter().filter_map(|listed| listed.split_once(' '));
    let of_path = routes.filter(|(_, path)| route.as_deref() == Some(path));
    let allowed: Vec<&str> = of_path.map(|(allowed, _)| allowed).collect();
    HttpFailure::wrong_method(&method, uri.path(), &allowed).respond(Dialect::of(uri.path()))
}

#[cfg(test)]
mod tests;
