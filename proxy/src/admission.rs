//! Admission: how many requests are in the house at once.
//!
//! A permit is taken before any work is done for a request and lives to its last token, not to the response head: it
//! travels inside the stream and is given back when that is dropped.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RequestError;

/// Requests admitted at once by default. Each costs some kilobytes here and a place in an engine's queue there.
pub const DEFAULT_MAX_REQUESTS: usize = 1_024;

/// When a refused client should come back: about as long as a short reply takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The door.
pub struct Admission {
    places: Arc<Semaphore>,
    limit: usize,
}

/// The right to be served. Dropping it frees the place.
#[derive(Debug)]
pub struct Permit(#[allow(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

impl Admission {
    /// A door for `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Admission { places: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Lets a request in, or refuses it at once: the place to wait is an engine's queue, which knows its length.
    pub fn admit(&self) -> Result<Permit, RequestError> {
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(permit) => Ok(Permit(permit)),
            Err(_) => Err(RequestError::Overloaded { limit: self.limit, retry_after: RETRY_AFTER }),
        }
    }

    /// Requests served at once at most.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Requests that are being served.
    pub fn n_admitted(&self) -> usize {
        self.limit - self.places.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_its_permit_is_dropped() {
        let door = Admission::new(1);
        let permit = door.admit().unwrap();
        assert!(matches!(door.admit(), Err(RequestError::Overloaded { limit: 1, .. })));
        assert_eq!(door.n_admitted(), 1);
        drop(permit);
        assert!(door.admit().is_ok());
    }
}
