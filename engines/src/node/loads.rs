//! Streams the node's load as it changes, within a tenth of a second.
//!
//! A line is made only when the connection has room for it: a slow reader gets newer loads, not more of them.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use baton_schemas::EngineError;
use baton_schemas::node::{NodeLoad, Phase};
use futures::StreamExt;
use http::StatusCode;
use tokio::time::Instant;

use super::{NodeService, lines, refusal};

/// Streams at once. An endpoint has one.
pub(super) const MAX_STREAMS: usize = 64;

/// The interval of lines while the load does not change.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// A change is sent within this time.
const TICK: Duration = Duration::from_millis(100);

/// How long a node that was told to stop takes new requests, so that those who send them have heard of it.
pub(super) const NOTICE: Duration = Duration::from_millis(300);

impl NodeService {
    /// What the engine is doing, and how far the node is.
    pub(super) async fn load(&self) -> Result<NodeLoad, EngineError> {
        let load = self.engine.load().await?;
        let stops = self.stop.is_cancelled() && load.phase == Phase::Serving;
        Ok(if stops { NodeLoad { phase: Phase::Stopping, ..load } } else { load })
    }
}

/// Loads as lines, until the node has been told to stop and runs nothing any more.
pub(super) fn respond(node: NodeService) -> Response {
    let Ok(place) = std::sync::Arc::clone(&node.load_streams).try_acquire_owned() else {
        let reason = format!("{MAX_STREAMS} streams of loads run already");
        return refusal(StatusCode::SERVICE_UNAVAILABLE, EngineError::Unavailable { reason });
    };
    let loads = async_stream::stream! {
        let _place = place;
        let mut last: Option<(NodeLoad, Instant)> = None;
        let mut stopping_since = None;
        loop {
            let load = node.load().await;
            let Ok(load) = load else {
                yield load;
                break;
            };
            if last.is_none_or(|(told, at)| told != load || at.elapsed() >= HEARTBEAT) {
                last = Some((load, Instant::now()));
                yield Ok(load);
            }
            if load.phase == Phase::Stopping {
                let since = *stopping_since.get_or_insert_with(Instant::now);
                // Until then somebody who has not heard may still send something.
                if since.elapsed() > NOTICE && load.active_slots == 0 && load.queued == 0 {
                    break;
                }
                tokio::time::sleep(TICK).await;
            } else {
                tokio::select! {
                    () = tokio::time::sleep(TICK) => {}
                    () = node.stop.cancelled() => {}
                }
            }
        }
    };
    lines(loads.boxed()).into_response()
}
