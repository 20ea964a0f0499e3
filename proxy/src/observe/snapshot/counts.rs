//! Breakers and fallbacks of nodes, links and upstreams.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::targets::nodes::{BreakerView, Fallback, Fallbacks};

/// A breaker: of a node's task, of a link, or of an upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "BreakerState")]
pub struct BreakerReport {
    /// True while requests are kept away, except for occasional probes.
    pub is_open: bool,
    /// Failures since the last success.
    pub failures_in_a_row: u32,
    /// The reason of the last failure.
    pub last_reason: Option<String>,
    /// Failures by reason since the start.
    pub failures: BTreeMap<String, u64>,
}

/// Requests that took another route for one reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FallbackState {
    /// Since the start.
    pub count: u64,
    /// The last time, milliseconds since the Unix epoch.
    pub last_ms: u64,
}

/// `word` names a reason.
pub(super) fn breaker<R>(view: BreakerView<R>, word: fn(R) -> &'static str) -> BreakerReport {
    BreakerReport {
        is_open: view.is_open,
        failures_in_a_row: view.n_in_a_row,
        last_reason: view.last_reason.map(|reason| word(reason).to_owned()),
        failures: view.counts.into_iter().map(|(reason, n)| (word(reason).to_owned(), n)).collect(),
    }
}

/// `word` names a reason.
pub(super) fn fallbacks<R: Copy + Ord>(
    fallbacks: &Fallbacks<R>,
    word: fn(R) -> &'static str,
) -> BTreeMap<String, FallbackState> {
    let state = |(reason, fallback): (R, Fallback)| {
        (word(reason).to_owned(), FallbackState { count: fallback.count, last_ms: unix_ms(fallback.last) })
    };
    fallbacks.view().into_iter().map(state).collect()
}

pub(super) fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
