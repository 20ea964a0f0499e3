//! Opens a connection for streams: the upgrade, and the choice of a version.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::stream_versions::{StreamVersions, VersionMismatch};
use baton_schemas::streams::{STREAMS_UPGRADE, VERSION_HEADER, VERSIONS_HEADER};
use http::{StatusCode, header};
use reqwest::{Method, Response};

use super::super::calls::{NodeCalls, accepted, unreachable};
use super::connection::NodeConnection;
use crate::awake;

/// The deadline of connecting and upgrading.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a connection. Errors: the node cannot be reached, refuses the key, or speaks no common version.
pub(super) async fn open(calls: Arc<NodeCalls>) -> Result<Arc<NodeConnection>, EngineError> {
    let opened = awake::timeout(OPEN_TIMEOUT, upgrade(&calls)).await;
    opened.unwrap_or_else(|_| Err(EngineError::lost("the node did not open a connection for streams in time")))
}

async fn upgrade(calls: &NodeCalls) -> Result<Arc<NodeConnection>, EngineError> {
    let call = calls.request(Method::GET, "streams");
    let call = call.header(header::CONNECTION, "upgrade").header(header::UPGRADE, STREAMS_UPGRADE);
    let reply = call.header(VERSIONS_HEADER, calls.versions.to_string()).send().await.map_err(unreachable)?;
    if reply.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(refusal(reply, calls.versions).await);
    }
    let version = reply.headers().get(VERSION_HEADER).and_then(|value| value.to_str().ok()?.parse::<u16>().ok());
    if !version.is_some_and(|version| (calls.versions.oldest..=calls.versions.newest).contains(&version)) {
        return Err(EngineError::lost("the node chose a version of the stream protocol that was not offered"));
    }
    let upgraded = reply.upgrade().await.map_err(EngineError::lost)?;
    Ok(NodeConnection::over(upgraded, calls.address.clone()))
}

/// Why there is no connection. The request that needs it is never the cause, so no error blames it.
async fn refusal(reply: Response, endpoint: StreamVersions) -> EngineError {
    let status = reply.status();
    match accepted(Ok(reply)).await {
        Ok(_) => EngineError::lost("the node did not switch to the stream protocol"),
        Err(
            error @ (EngineError::VersionMismatch(_)
            | EngineError::Unauthorized
            | EngineError::Unavailable { .. }
            | EngineError::NoResources { .. }
            | EngineError::Lost { .. }),
        ) => error,
        // A node that does not know the call is from before this protocol. It says so in its own words.
        Err(_) if status == StatusCode::NOT_FOUND => {
            EngineError::VersionMismatch(VersionMismatch { node: StreamVersions::BEFORE, endpoint })
        }
        Err(error) => EngineError::lost(format!(
            "the node refused the upgrade to the stream protocol (HTTP {}: {error}). If a reverse proxy stands before \
             it, let the proxy pass the header `upgrade`",
            status.as_u16()
        )),
    }
}
