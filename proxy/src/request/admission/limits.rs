//! The limits of running and waiting requests.

use std::time::Duration;

/// Places by default, for each slot of the engines: one for a sequence that runs, and one for a sequence that starts
/// when it ends. An engine's own queue has no lanes, so a request that waits there for long loses its fair share.
pub const PLACES_PER_SLOT: usize = 2;

/// Places while no engine is ready, when the number of slots is unknown. A larger number could admit more requests than
/// the slots allow, past the lanes.
pub(super) const WITHOUT_SLOTS: usize = 16;

/// The maximum number of concurrent requests that generate nothing. They take milliseconds, so none of them waits.
pub(super) const MAX_BRIEF: usize = 64;

/// The default maximum number of requests that wait for admission.
pub const DEFAULT_MAX_WAITING: usize = 256;

/// The default maximum wait of a request. A stream shows its place meanwhile; most clients of whole replies wait
/// longer.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

/// When a refused client should retry: about the duration of a short reply.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The limits of admission, as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// The number of places; `None` for as many as the engines have room for.
    pub max_requests: Option<usize>,
    /// The maximum number of waiting requests.
    pub max_waiting: usize,
    /// The maximum wait of a request.
    pub max_wait: Duration,
}

impl Default for AdmissionLimits {
    fn default() -> Self {
        AdmissionLimits { max_requests: None, max_waiting: DEFAULT_MAX_WAITING, max_wait: DEFAULT_MAX_WAIT }
    }
}
