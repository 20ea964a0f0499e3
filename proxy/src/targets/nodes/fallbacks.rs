//! Counts departures from plans, by reason.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use baton_schemas::handoff::HandoffFailure;

/// The reason why a request on nodes departed from its plan. Its client notices only the delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FallbackReason {
    /// The decode node's queue was full: another node is asked.
    DecodeBusy,
    /// The decode node accepts no requests now: another node is asked.
    DecodeUnavailable,
    /// The decode node was lost: the request starts again, or its stream continues, elsewhere.
    DecodeLost,
    /// The engine failed at the request: another engine tries it once.
    EngineFailed,
    /// Two processes ended under the request: no other engine tries it.
    Poison,
    /// The first token is later than its deadline.
    FirstTokenLate,
    /// A later token is later than its deadline.
    NextTokenLate,
    /// A second route was started because the first token was late.
    Hedged,
    /// The second route gave the first token.
    HedgeWon,
    /// A machine was woken for the request and did not answer in time: another route is planned.
    NotWoken,
    /// No engine took the request: an upstream is asked.
    Upstream,
    /// A handoff failed: the decode node computed the rest of the prompt itself.
    #[strum(transparent)]
    Handoff(HandoffFailure),
}

impl FallbackReason {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Counts by reason: [`FallbackReason`] for a model on nodes, another enum for an upstream.
#[derive(Debug)]
pub struct Fallbacks<R>(Mutex<BTreeMap<R, Fallback>>);

/// One reason's count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fallback {
    /// Since the start.
    pub count: u64,
    /// The last time.
    pub last: SystemTime,
}

impl<R> Default for Fallbacks<R> {
    fn default() -> Fallbacks<R> {
        Fallbacks(Mutex::default())
    }
}

impl<R: Copy + Ord> Fallbacks<R> {
    /// Counts one more.
    pub fn count(&self, reason: R) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(reason).or_insert(Fallback { count: 0, last: SystemTime::UNIX_EPOCH });
        *known = Fallback { count: known.count + 1, last: SystemTime::now() };
    }

    /// All reasons that occurred.
    pub fn view(&self) -> BTreeMap<R, Fallback> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
