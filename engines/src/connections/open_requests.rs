//! Counts a connection's open requests, to close idle connections.

use std::time::Duration;

use tokio::sync::watch;

use crate::awake;

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

    /// Waits until no request has been open for this long, without time in which the process was stopped.
    pub(super) async fn idle_for(&self, limit: Duration) {
        let mut n_open = self.0.subscribe();
        loop {
            // Neither wait fails, because `self` keeps the sender.
            _ = n_open.wait_for(|n_open| *n_open == 0).await;
            if awake::timeout(limit, n_open.changed()).await.is_err() {
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

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn time_in_which_this_process_was_stopped_is_not_idle_time() {
        const LIMIT: Duration = Duration::from_secs(60);
        let open_requests = OpenRequests::default();
        // A request waits in the socket when the process runs again, and is read a little later.
        let request_after_stop = async {
            sleep(Duration::from_secs(1)).await;
            advance(2 * LIMIT).await;
            sleep(Duration::from_millis(100)).await;
            let _open_request = open_requests.begin();
            sleep(2 * LIMIT).await;
        };
        tokio::select! {
            biased;
            () = open_requests.idle_for(LIMIT) => panic!("the connection is closed before its request is read"),
            () = request_after_stop => {}
        }
        assert!(tokio::time::timeout(2 * LIMIT, open_requests.idle_for(LIMIT)).await.is_ok());
    }
}
