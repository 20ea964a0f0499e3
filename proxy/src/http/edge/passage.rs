//! The checks that every request passes before its route, and the headers that every reply gets.
//!
//! One layer, because axum clones the rest of the stack at each layer and boxes it twice.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use futures::FutureExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_http::cors::CorsLayer;
use tracing::Instrument;

use super::super::access::host_check::{self, HostCheck};
use super::super::access::key_check::{self, KeyCheck};
use super::super::access::{SharedAccess, origin_check, rate_headers};
use super::super::body::unread_body::UnreadBody;
use super::super::dialect::Dialect;
use super::super::reply::warning::warn;
use super::super::{HttpBackend, errors};
use super::draining;
use super::request_id::RequestId;

/// The checks that all listeners share.
pub(in crate::http) struct Checks {
    pub(in crate::http) backend: Arc<dyn HttpBackend>,
    pub(in crate::http) access: SharedAccess,
    pub(in crate::http) keys: KeyCheck,
    pub(in crate::http) cors: CorsLayer,
    /// The paths that are answered during the shutdown, too.
    pub(in crate::http) while_stopping: Arc<[&'static str]>,
}

/// The checks of one listener.
#[derive(Clone)]
pub(in crate::http) struct Passage {
    pub(in crate::http) host: HostCheck,
    pub(in crate::http) checks: Arc<Checks>,
}

/// Lets a request pass. Every reply gets the request's id, a panic becomes a reply, and a body that nothing read does not
/// break its connection.
pub(in crate::http) async fn pass(State(passage): State<Passage>, mut request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path());
    let id = RequestId::attach(&mut request);
    let span =
        tracing::info_span!("request", id = id.as_str(), method = %request.method(), path = request.uri().path());
    let reply = async {
        let unread = UnreadBody::lend(&mut request);
        let mut reply = caught(dialect, answer(passage, dialect, request, next)).await;
        if let Some(unread) = unread {
            unread.settle(&mut reply).await;
        }
        reply
    };
    let mut reply = reply.instrument(span).await;
    id.insert(&mut reply, dialect);
    reply
}

async fn answer(Passage { host, checks }: Passage, dialect: Dialect, request: Request, next: Next) -> Response {
    if let Err(failure) = host_check::check(&host, &request) {
        return failure.respond(dialect);
    }
    // By the route's pattern: paths as clients send them would create unbounded labels.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let reply = match origin_check::check(&checks.access, &request) {
        Ok(()) => with_cors(&checks, dialect, request, next).await,
        Err(failure) => failure.respond(dialect),
    };
    checks.backend.replied(route.as_ref().map_or("other", MatchedPath::as_str), reply.status().as_u16());
    reply
}

/// CORS is outside the key check because a preflight carries no key, and inside the checks of host and origin because a
/// refused page must not pass a preflight either.
async fn with_cors(checks: &Arc<Checks>, dialect: Dialect, request: Request, next: Next) -> Response {
    let identified = service_fn(|request| {
        let (checks, next) = (Arc::clone(checks), next.clone());
        async move { Ok::<_, Infallible>(identified(&checks, dialect, request, next).await) }
    });
    let reply = checks.cors.layer(identified).oneshot(request).await;
    reply.unwrap_or_else(|never| match never {})
}

/// Identifies the caller by its key, and answers unless the server is stopping.
async fn identified(checks: &Checks, dialect: Dialect, mut request: Request, next: Next) -> Response {
    let (account, warnings) = match key_check::check(&checks.keys, &mut request) {
        Ok(known) => known,
        Err(failure) => return failure.respond(dialect),
    };
    let mut reply = caught(dialect, draining::refuse(&checks.while_stopping, request, next)).await;
    rate_headers::insert(reply.headers_mut(), &account);
    if let Some(text) = warnings.text() {
        warn(reply.headers_mut(), &text);
    }
    reply
}

/// Answers with an error if the work panics. The headers of the checks outside are added all the same.
async fn caught(dialect: Dialect, work: impl Future<Output = Response>) -> Response {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| errors::panicked(panic, dialect))
}
