//! How many requests may run and wait at once.

use std::time::Duration;

/// Requests admitted at once by default, for each slot of the engines: one that runs, and one that is ready when that
/// ends. An engine's own queue has no lanes, so a request that waits there for long has lost its fair share.
pub const REQUESTS_PER_SLOT: usize = 2;

/// Requests admitted while no engine is ready. The number of slots is not known then, and admitted requests wait for
/// one. More of them than the slots turn out to allow would have passed the lanes.
pub(super) const WITHOUT_SLOTS: usize = 16;

/// Requests at once that generate nothing. They take milliseconds, so none of them waits.
pub(super) const MAX_BRIEF: usize = 64;

/// Requests that wait to be admitted, by default.
pub const DEFAULT_MAX_WAITING: usize = 256;

/// How long a request waits by default. A stream shows its place meanwhile; most clients of whole replies wait longer.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

/// When a refused client should come back: about as long as a short reply takes.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The bounds of admission, as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Requests served at once; by default as many as the engines have room for.
    pub max_requests: Option<usize>,
    /// Requests that wait for that.
    pub max_waiting: usize,
    /// How long a request waits.
    pub max_wait: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { max_requests: None, max_waiting: DEFAULT_MAX_WAITING, max_wait: DEFAULT_MAX_WAIT }
    }
}
