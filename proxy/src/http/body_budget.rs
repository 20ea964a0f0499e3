//! The memory and the threads that request bodies may use, for the whole process.
//!
//! A body is charged before it costs anything: its bytes as they arrive, its decompressed bytes as they are written, and
//! a thread while it is decompressed or parsed. The memory stays charged until every prompt of the body is accepted: from
//! then on, the texts are tokens, or an upstream has them. What a request keeps until its reply ends stays charged so
//! long: images, tools, a schema, echoed prompts. Of the memory each key has a share, so that no key can use it up.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::errors::{HttpFailure, Retry};
use crate::account::Account;
use crate::account::body_memory::{BodyCharge, BodyMemory, BodyMemoryFull, ORDINARY_BODY};

/// Bodies of an ordinary size that are parsed at once, and any that are decompressed. Each takes milliseconds.
const MAX_ORDINARY_AT_ONCE: usize = 2;

/// Large bodies parsed at once. More would take processor time from streams, and each takes up to 80 MiB.
const MAX_LARGE_AT_ONCE: usize = 2;

/// How long a body waits for a thread. A stream's head waits the less for its first result, so that its first byte comes
/// within 10 s.
const MAX_WAIT: Duration = Duration::from_secs(6);

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The budgets, shared by all requests.
#[derive(Debug, Clone)]
pub struct BodyBudget {
    memory: Arc<BodyMemory>,
    ordinary: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for BodyBudget {
    fn default() -> Self {
        BodyBudget {
            memory: BodyMemory::of_endpoint(),
            ordinary: Arc::new(Semaphore::new(MAX_ORDINARY_AT_ONCE)),
            large: Arc::new(Semaphore::new(MAX_LARGE_AT_ONCE)),
        }
    }
}

impl BodyBudget {
    /// Starts to count the bytes of a body that arrives.
    pub(super) fn charge(&self, account: Option<&Account>) -> BodyCharge {
        BodyCharge::new(Arc::clone(&self.memory), account.and_then(|account| account.body_memory.clone()))
    }

    /// Returns the time until which a body that arrived now waits for threads.
    pub(super) fn deadline() -> Instant {
        Instant::now() + MAX_WAIT
    }

    /// Waits for a thread that parses a body of `n_bytes`. Bodies of an ordinary size do not wait for large ones. Errors:
    /// none was free in time.
    pub(super) async fn thread(&self, n_bytes: usize, deadline: Instant) -> Result<OwnedSemaphorePermit, HttpFailure> {
        let threads = if n_bytes <= ORDINARY_BODY { &self.ordinary } else { &self.large };
        let permit = timeout_at(deadline, Arc::clone(threads).acquire_owned()).await;
        permit.ok().and_then(Result::ok).ok_or_else(busy)
    }

    /// Waits for a thread that decompresses a body. Errors: as of [`thread`](Self::thread).
    pub(super) async fn decoder(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, HttpFailure> {
        self.thread(0, deadline).await
    }
}

impl From<BodyMemoryFull> for HttpFailure {
    fn from(_: BodyMemoryFull) -> HttpFailure {
        busy()
    }
}

fn busy() -> HttpFailure {
    let message = "The server is at its limit of large request bodies. Try again shortly.";
    let error = ErrorBody::new(ErrorKind::Unavailable, message).code(ErrorCode::QueueFull);
    HttpFailure { retry: Retry::After(RETRY_AFTER), ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ordinary_bodies_do_not_wait_for_large_ones_and_no_body_waits_too_long() {
        let budget = BodyBudget::default();
        let asked = Instant::now();
        let large = [(); 2].map(|()| budget.thread(32 << 20, BodyBudget::deadline()));
        let large = futures::future::join_all(large).await;
        assert!(large.iter().all(Result::is_ok));
        assert!(budget.thread(65 << 10, BodyBudget::deadline()).await.is_ok());
        assert_eq!(asked.elapsed(), Duration::ZERO);
        assert_eq!(budget.thread(32 << 20, BodyBudget::deadline()).await.unwrap_err().status, 503);
        assert!(asked.elapsed() < Duration::from_secs(8), "before a stream's head is due");
    }
}
