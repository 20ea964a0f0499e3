//! `GET /node/v1/streams`: turns an HTTP connection into one that carries all streams of an endpoint
//! (docs/node-streams.md).

mod connection;
mod limits;
mod reader;
mod run;
#[cfg(test)]
mod tests;
mod work;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use baton_schemas::EngineError;
use baton_schemas::streams::{StreamVersions, UPGRADE, VERSION_HEADER, VERSIONS_HEADER, VersionMismatch};
use http::{HeaderMap, HeaderValue, StatusCode, Version, header};
use hyper_util::rt::TokioIo;

use self::connection::serve;
pub(super) use self::limits::StreamLimits;
use super::{NodeService, refusal};
use crate::connections::TakeOver;

/// Answers an upgrade. The connection then carries frames until it ends.
pub(super) fn respond(node: NodeService, mut request: Request) -> Response {
    let chosen = if request.version() == Version::HTTP_11 {
        chosen(request.headers(), node.versions)
    } else {
        Err(no_upgrade())
    };
    let version = match chosen {
        Ok(version) => version,
        Err(error) => return refusal(StatusCode::UPGRADE_REQUIRED, error),
    };
    let upgrade = hyper::upgrade::on(&mut request);
    let take_over = TakeOver::new(move |closing| async move {
        match upgrade.await {
            Ok(upgraded) => serve(TokioIo::new(upgraded), node, closing).await,
            Err(error) => tracing::debug!(%error, "a connection was not upgraded"),
        }
    });
    let mut reply = (StatusCode::SWITCHING_PROTOCOLS, Body::empty()).into_response();
    reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    reply.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(UPGRADE));
    reply.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version));
    reply.extensions_mut().insert(take_over);
    reply
}

/// The newest version that both sides speak.
fn chosen(headers: &HeaderMap, ours: StreamVersions) -> Result<u16, EngineError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !text(header::UPGRADE.as_str()).eq_ignore_ascii_case(UPGRADE) {
        return Err(no_upgrade());
    }
    let theirs = text(VERSIONS_HEADER).parse::<StreamVersions>();
    let theirs =
        theirs.map_err(|()| EngineError::invalid(format!("the header {VERSIONS_HEADER} is not like `1-2`")))?;
    VersionMismatch::check(ours, theirs).map_err(EngineError::VersionMismatch)
}

fn no_upgrade() -> EngineError {
    EngineError::invalid(format!("this call needs the header `upgrade: {UPGRADE}` over HTTP/1.1"))
}
