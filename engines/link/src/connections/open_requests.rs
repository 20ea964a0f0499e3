//! Counts a connection's open requests, to close idle connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The interval at which an idle connection is noticed. A timer for each request would cost more than its head.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The requests of a connection, and those whose reply has ended. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenRequests(Arc<RequestCounts>);

#[derive(Debug, Default)]
struct RequestCounts {
    n_begun: AtomicU64,
    n_ended: AtomicU64,
}

/// An open request. Dropping this ends it.
pub(super) struct OpenRequest(OpenRequests);

impl OpenRequests {
    pub(super) fn begin(&self) -> OpenRequest {
        self.0.n_begun.fetch_add(1, Ordering::Relaxed);
        OpenRequest(self.clone())
    }

    /// Waits until no request has been open for this long, or a [`CHECK_INTERVAL`] longer, without time in which the
    /// process was stopped.
    pub(super) async fn idle_for(&self, limit: Duration) {
        let mut n_before = self.n_ended();
        let mut left = limit;
        while !left.is_zero() {
            let part = left.min(CHECK_INTERVAL);
            tokio::time::sleep(part).await;
            let n_ended = self.n_ended();
            let was_idle = n_ended == n_before && n_ended == self.0.n_begun.load(Ordering::Relaxed);
            left = if was_idle { left - part } else { limit };
            n_before = n_ended;
        }
    }

    fn n_ended(&self) -> u64 {
        self.0.n_ended.load(Ordering::Relaxed)
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.n_ended.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_time_without_a_request_is_idle_time() {
        const LIMIT: Duration = Duration::from_secs(60);
        let open_requests = OpenRequests::default();
        let busy = async {
            for _ in 0..3 {
                let open_request = open_requests.begin();
                sleep(3 * LIMIT).await;
                drop(open_request);
                sleep(LIMIT * 9 / 10).await;
            }
            // Shorter than the interval of the checks.
            drop(open_requests.begin());
            sleep(LIMIT * 9 / 10).await;
        };
        tokio::select! {
            () = open_requests.idle_for(LIMIT) => panic!("the connection is closed, but it was used"),
            () = busy => {}
        }
        assert!(tokio::time::timeout(LIMIT + 2 * CHECK_INTERVAL, open_requests.idle_for(LIMIT)).await.is_ok());
    }

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
