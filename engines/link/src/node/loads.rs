//! Streams the node's load: each change within a tenth of a second.
//!
//! A load is taken only when its reader has granted credit for it, so a slow reader gets fewer but current loads.

use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::node::{NodeLoad, Phase};
use futures::StreamExt;
use tokio::time::Instant;

use super::NodeService;
use crate::engine::LoadStream;

/// The most streams at once. Each endpoint uses one.
pub(super) const MAX_STREAMS: usize = 64;

/// The interval of loads while the load does not change.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// The interval in which the load is checked for changes.
const TICK: Duration = Duration::from_millis(100);

/// How long a stopping node still accepts requests: endpoints need this time to learn that it is stopping.
pub(super) const NOTICE: Duration = Duration::from_millis(300);

impl NodeService {
    /// The engine's load, with the phase `Stopping` if the node is stopping.
    pub(super) async fn load(&self) -> Result<NodeLoad, EngineError> {
        let load = self.engine.load().await?;
        let stops = self.stop.is_cancelled() && load.phase == Phase::Serving;
        Ok(if stops { NodeLoad { phase: Phase::Stopping, ..load } } else { load })
    }
}

/// The node's loads, until the node is stopping and has no requests left. Errors: too many of these streams run.
pub(super) fn stream(node: NodeService) -> Result<LoadStream, EngineError> {
    let Ok(place) = std::sync::Arc::clone(&node.load_streams).try_acquire_owned() else {
        let reason = format!("{MAX_STREAMS} streams of loads run already");
        return Err(EngineError::Unavailable { reason });
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
            if last.is_none_or(|(sent, at)| sent != load || at.elapsed() >= HEARTBEAT) {
                last = Some((load, Instant::now()));
                yield Ok(load);
            }
            if load.phase == Phase::Stopping {
                let since = *stopping_since.get_or_insert_with(Instant::now);
                // Until then, endpoints that do not know it yet may still send requests.
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
    Ok(loads.boxed())
}
