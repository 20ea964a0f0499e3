//! Counts a connection's open requests, to close idle connections.

use std::time::Duration;

use tokio::sync::watch;

/// The number of requests whose reply has not ended. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenRequests(watch::Sender<usize>);

/// An open request. Dropping this ends it.
pub(super) struct OpenRequest(OpenRequests);

impl OpenRequests {
    pub(super) fn begin(&self) -> OpenRequest {
        self.0.send_modify(|n_open| *n_open += 1);
        OpenRequest(self.clone())
    }

    /// Waits until no request has been open for this long.
    pub(super) async fn idle_for(&self, limit: Duration) {
        let mut n_open = self.0.subscribe();
        loop {
            // Neither wait fails, because `self` keeps the sender.
            _ = n_open.wait_for(|n_open| *n_open == 0).await;
            if tokio::time::timeout(limit, n_open.changed()).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.send_modify(|n_open| *n_open -= 1);
    }
}
