//! The limits of running and waiting requests.

use std::time::Duration;

/// The maximum number of concurrent requests that generate nothing. They take milliseconds, or seconds for long texts.
pub(super) const MAX_BRIEF: usize = 64;

/// How long one of these waits, in the order of arrival, for others of its key and then for those of all keys.
pub(super) const BRIEF_WAIT: Duration = Duration::from_secs(2);

/// The default maximum number of requests that wait for admission.
pub const DEFAULT_MAX_WAITING: usize = 256;

/// The default maximum wait of a request. A stream shows its place meanwhile; most clients of whole replies wait
/// longer.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

/// When a refused client should retry: about the duration of a short reply.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The limits of admission, as configured. Each target has its own number of places besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// The most places that are taken of all targets together; `None` for no such limit.
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
