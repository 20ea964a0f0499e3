//! Accepts, limits and drains a node's connections.

use std::io;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::connection::DEADLINES;
use super::listen::Listener;
use super::loads::NOTICE;
use crate::connections::Connections;

/// The most connections; further ones wait in the kernel's backlog. Enough for the calls of many endpoints and the pulls
/// of a cluster's decode nodes.
const MAX_CONNECTIONS: usize = 4_096;

/// The longest head of a request, bytes; Baton's have some hundreds.
const MAX_HEAD_BYTES: u32 = 16 << 10;

/// How long running calls may continue after a stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);

impl Listener {
    /// Serves until `stop` is cancelled and for 0.3 s after it, then lets running calls end, for at most 60 s. Errors: the
    /// socket no longer listens.
    pub async fn serve(self, router: Router, stop: CancellationToken) -> io::Result<()> {
        let mut connections = Connections::new(DEADLINES, MAX_HEAD_BYTES, MAX_CONNECTIONS);
        let closing = async {
            stop.cancelled().await;
            tokio::time::sleep(NOTICE).await;
        };
        tokio::pin!(closing);
        loop {
            let (place, accepted) = tokio::select! {
                biased;
                () = &mut closing => break,
                next = connections.accept(|| self.accept()) => next?,
            };
            let router = router.clone();
            let end = accepted.end();
            let answer = move |mut request: Request<Body>| {
                if let Some(end) = end {
                    request.extensions_mut().insert(end);
                }
                let reply = router.clone().oneshot(request);
                async move { reply.await.unwrap_or_else(|never| match never {}) }
            };
            connections.serve(place, accepted.open(), answer);
        }
        drop(self);
        if tokio::time::timeout(DRAIN_DEADLINE, connections.close()).await.is_err() {
            // Dropping `connections` closes them. Readers see a stream that was cut.
            tracing::warn!("some calls still run at the drain deadline; their connections are closed");
        }
        Ok(())
    }
}
