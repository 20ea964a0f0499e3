//! The public HTTP surface: sockets, limits and access on one side, dialects on the other.
//!
//! [`edge::server::serve`] owns the sockets, and [`router`] everything between a request's head and its reply. Generation is
//! behind [`HttpBackend`]. Nothing here knows engines, queues or planned routes, and only a dialect knows its JSON.
//!
//! Each dialect is a folder: `mod.rs` has its routes, `stream.rs` and `whole.rs` write a reply, `failure.rs` writes errors
//! where they differ from OpenAI's. Each further file is named after its route. A new dialect also touches this file
//! (its routes) and `dialect.rs` (its paths and the envelope of its errors).

pub mod access;
mod anthropic;
pub mod baton;
pub mod body;
pub mod config;
pub mod dialect;
pub mod edge;
pub mod errors;
pub mod http_backend;
mod http_state;
pub mod llama_server;
mod lm_studio;
pub mod ollama;
pub mod openai;
mod openapi;
pub mod reply;

use std::sync::Arc;

use access::cors;
use access::host_check::HostCheck;
use access::key_check::KeyCheck;
pub use access::{AccessConfig, ConfiguredKey, SharedAccess, key_hash};
use axum::Router;
use axum::extract::{MatchedPath, State};
use axum::http::{Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::get;
use body::parser_threads::ParserThreads;
pub use config::HttpConfig;
use dialect::Dialect;
use edge::passage::{Checks, Passage};
pub use edge::server::serve;
pub use errors::HttpFailure;
pub use http_backend::HttpBackend;
pub use http_state::HttpState;
use openapi::{DocumentText, Routes};

/// Builds all routes with all layers.
pub fn router(backend: Arc<dyn HttpBackend>, config: HttpConfig) -> Router {
    let access = access::shared(&config.access);
    let checks_names = config.check_host;
    listener(&api(backend, config, access.clone()), HostCheck { access, checks_names })
}

/// All routes, and the checks before them.
pub struct Api {
    router: Router,
    checks: Arc<Checks>,
}

/// Builds all routes. Several listeners can use the result: they share the callers' accounts and prefix-cache scopes.
/// Access can change while it serves.
pub fn api(backend: Arc<dyn HttpBackend>, config: HttpConfig, access: SharedAccess) -> Api {
    let routes = routes();
    let checks = Checks {
        backend: Arc::clone(&backend),
        keys: KeyCheck { access: access.clone(), public_paths: routes.public_paths() },
        cors: cors::layer(access.clone()),
        access: access.clone(),
        while_stopping: routes.paths_while_stopping(),
    };
    let watchers = http_state::Watchers::default();
    let parser_threads = ParserThreads::default();
    let config = Arc::new(config);
    let state = HttpState { backend, config, access, watchers, parser_threads, routes: routes.listed().into() };
    let document = DocumentText::new(routes.documented);
    let router = routes
        .router
        .route(openapi::PATH, get(move || openapi::show(document)))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(state);
    Api { router, checks: Arc::new(checks) }
}

/// Lists all routes with their entries in `/openapi.json`. [`api`] adds the handler of that document.
fn routes() -> Routes {
    openai::routes()
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(llama_server::routes())
        .merge(lm_studio::routes())
        .merge(baton::routes().describe(Method::GET, openapi::PATH, openapi::operation()))
}

/// The routes behind the checks of one listener.
pub fn listener(api: &Api, host: HostCheck) -> Router {
    api.router.clone().layer(from_fn_with_state(Passage { host, checks: Arc::clone(&api.checks) }, edge::passage::pass))
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
    // The list has the paths with `/v1`.
    let is_it =
        |path: &str| route.as_deref().is_some_and(|route| path == route || path.strip_prefix("/v1") == Some(route));
    let of_path = routes.filter(|(_, path)| is_it(path));
    let allowed: Vec<&str> = of_path.map(|(allowed, _)| allowed).collect();
    HttpFailure::wrong_method(&method, uri.path(), &allowed).respond(Dialect::of(uri.path()))
}

#[cfg(test)]
mod tests;
