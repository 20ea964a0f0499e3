//! The threads that decompress and parse request bodies, for the whole process. None of them serves connections, since a
//! body may take long: it may become much larger values, images, or the rules of a grammar.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::super::errors::{HttpFailure, Retry};
use crate::account::request_memory::{FULL, MemoryFull, ORDINARY_BODY, SMALL_BODY};

/// Small bodies that are parsed at once. Most take less than a millisecond; a grammar takes some.
const MAX_SMALL_AT_ONCE: usize = 2;

/// Bodies of an ordinary size that are parsed at once, and any that are decompressed. Each takes milliseconds.
const MAX_ORDINARY_AT_ONCE: usize = 2;

/// Large bodies parsed at once. More would take processor time from streams, and each takes up to 112 MiB: its bytes, its
/// texts twice while they become shared ones, its values.
const MAX_LARGE_AT_ONCE: usize = 1;

/// How long a body waits for a thread. A stream's head waits the less for its first result, so that its first byte comes
/// within 10 s.
const MAX_WAIT: Duration = Duration::from_secs(6);

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The threads, shared by all requests.
#[derive(Debug, Clone)]
pub struct ParserThreads {
    small: Arc<Semaphore>,
    ordinary: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for ParserThreads {
    fn default() -> Self {
        ParserThreads {
            small: Arc::new(Semaphore::new(MAX_SMALL_AT_ONCE)),
            ordinary: Arc::new(Semaphore::new(MAX_ORDINARY_AT_ONCE)),
            large: Arc::new(Semaphore::new(MAX_LARGE_AT_ONCE)),
        }
    }
}

impl ParserThreads {
    /// Returns the time until which a body that arrived now waits for threads.
    pub(in crate::http) fn deadline() -> Instant {
        Instant::now() + MAX_WAIT
    }

    /// Waits for a thread that parses a body of `n_bytes`. Bodies do not wait for those of a larger kind. Errors: none was
    /// free in time.
    pub(in crate::http) async fn thread(
        &self,
        n_bytes: usize,
        deadline: Instant,
    ) -> Result<OwnedSemaphorePermit, HttpFailure> {
        let threads = if n_bytes <= SMALL_BODY {
            &self.small
        } else if n_bytes <= ORDINARY_BODY {
            &self.ordinary
        } else {
            &self.large
        };
        let permit = timeout_at(deadline, Arc::clone(threads).acquire_owned()).await;
        permit.ok().and_then(Result::ok).ok_or_else(busy)
    }

    /// Waits for a thread that decompresses a body. Errors: as of [`thread`](Self::thread).
    pub(in crate::http) async fn decoder(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, HttpFailure> {
        self.thread(ORDINARY_BODY, deadline).await
    }
}

impl From<MemoryFull> for HttpFailure {
    fn from(_: MemoryFull) -> HttpFailure {
        refused(FULL)
    }
}

/// No thread was free in time.
fn busy() -> HttpFailure {
    refused("The server is reading other long requests. Try again shortly.")
}

fn refused(message: &str) -> HttpFailure {
    let error = ErrorBody::new(ErrorKind::Unavailable, message).code(ErrorCode::QueueFull);
    HttpFailure { retry: Retry::After(RETRY_AFTER), ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ordinary_bodies_do_not_wait_for_large_ones_and_no_body_waits_too_long() {
        let threads = ParserThreads::default();
        let asked = Instant::now();
        let _large = threads.thread(32 << 20, ParserThreads::deadline()).await.unwrap();
        let ordinary = [(); 2].map(|()| threads.thread(65 << 10, ParserThreads::deadline()));
        let ordinary = futures::future::join_all(ordinary).await;
        assert!(ordinary.iter().all(Result::is_ok));
        assert!(threads.thread(64 << 10, ParserThreads::deadline()).await.is_ok(), "small bodies wait for neither");
        assert_eq!(asked.elapsed(), Duration::ZERO);
        assert_eq!(threads.thread(32 << 20, ParserThreads::deadline()).await.unwrap_err().status, 503);
        assert!(asked.elapsed() < Duration::from_secs(8), "before a stream's head is due");
    }
}
