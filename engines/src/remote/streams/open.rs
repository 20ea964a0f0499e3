//! Opens a connection for streams: the upgrade, and the choice of a version.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::streams::{StreamVersions, UPGRADE, VERSION_HEADER, VERSIONS_HEADER, VersionMismatch};
use http::{StatusCode, header};
use reqwest::Method;

use super::super::calls::{NodeCalls, accepted, unreachable};
use super::connection::Connection;
use crate::awake;

/// The deadline of connecting and upgrading.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a connection. Errors: the node cannot be reached, refuses the key, or speaks no common version.
pub(super) async fn open(calls: Arc<NodeCalls>) -> Result<Arc<Connection>, EngineError> {
    let opened = awake::timeout(OPEN_TIMEOUT, upgrade(&calls)).await;
    opened.unwrap_or_else(|_| Err(EngineError::lost("the node did not open a connection for streams in time")))
}

async fn upgrade(calls: &NodeCalls) -> Result<Arc<Connection>, EngineError> {
    let call = calls.request(Method::GET, "streams");
    let call = call.header(header::CONNECTION, "upgrade").header(header::UPGRADE, UPGRADE);
    let reply = call.header(VERSIONS_HEADER, calls.versions.to_string()).send().await.map_err(unreachable)?;
    match reply.status() {
        StatusCode::SWITCHING_PROTOCOLS => {}
        // A node that does not know the call is from before this protocol.
        StatusCode::NOT_FOUND => {
            let mismatch = VersionMismatch { node: StreamVersions::BEFORE, endpoint: calls.versions };
            return Err(EngineError::VersionMismatch(mismatch));
        }
        _ => {
            accepted(Ok(reply)).await?;
            return Err(EngineError::lost("the node did not switch to the stream protocol"));
        }
    }
    let version = reply.headers().get(VERSION_HEADER).and_then(|value| value.to_str().ok()?.parse::<u16>().ok());
    if !version.is_some_and(|version| (calls.versions.oldest..=calls.versions.newest).contains(&version)) {
        return Err(EngineError::lost("the node chose a version of the stream protocol that was not offered"));
    }
    let upgraded = reply.upgrade().await.map_err(EngineError::lost)?;
    Ok(Connection::over(upgraded))
}
