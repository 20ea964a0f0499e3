//! `GET /node/v1/streams`: turns an HTTP connection into one that carries all streams of an endpoint
//! (docs/node-streams.md).

mod connection;
mod endpoint_deadline;
mod limits;
mod open_streams;
mod run;
#[cfg(test)]
mod tests;
mod work;

use axum::extract::Request;
use axum::response::Response;
use baton_schemas::EngineError;
use baton_schemas::stream_versions::{StreamVersions, VersionMismatch};
use baton_schemas::streams::{STREAMS_UPGRADE, VERSION_HEADER, VERSIONS_HEADER};
use http::{HeaderMap, HeaderValue, StatusCode};

use self::connection::serve;
pub(super) use self::limits::StreamLimits;
use super::{NodeService, refusal};
use crate::connections::UpgradeOffer;

/// Answers an upgrade. The connection then carries frames until it ends.
pub(super) fn respond(node: NodeService, mut request: Request) -> Response {
    let Some(offer) = UpgradeOffer::of(&mut request, STREAMS_UPGRADE) else {
        let message = format!("this call needs the header `upgrade: {STREAMS_UPGRADE}` over HTTP/1.1");
        return refusal(StatusCode::UPGRADE_REQUIRED, EngineError::invalid(message));
    };
    let version = match chosen(request.headers(), node.versions) {
        Ok(version) => version,
        Err(error) => return refusal(StatusCode::UPGRADE_REQUIRED, error),
    };
    let mut reply = offer.accept(|io, closing| serve(io, node, closing));
    reply.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version));
    reply
}

/// The newest version that both sides speak.
fn chosen(headers: &HeaderMap, ours: StreamVersions) -> Result<u16, EngineError> {
    let theirs = headers.get(VERSIONS_HEADER).and_then(|value| value.to_str().ok()?.parse::<StreamVersions>().ok());
    let theirs =
        theirs.ok_or_else(|| EngineError::invalid(format!("the header {VERSIONS_HEADER} is not like `1-2`")))?;
    VersionMismatch::check(ours, theirs).map_err(EngineError::VersionMismatch)
}
