//! The predicted times of one route.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::snapshot::RequestSize;

/// The predicted times of a route, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// The time until sleeping machines are awake.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wake_ms: f64,
    /// The wait for slots and for earlier prompts.
    pub queue_ms: f64,
    /// The way of the prompt's KV back from the nodes' stores. Of a handoff: without what the decode node restores while the rest is
    /// computed and sent.
    #[serde(default)]
    pub restore_ms: f64,
    /// The computation of the prompt.
    pub prefill_ms: f64,
    /// The KV's time on the wire. Most of it overlaps with the prefill.
    pub wire_ms: f64,
    /// The part of the transfer after the prefill.
    #[serde(alias = "unhidden_ms")]
    pub after_prefill_ms: f64,
    /// One decode step.
    pub step_ms: f64,
    /// Until the first token.
    pub ttft_ms: f64,
    /// Until the last token.
    pub completion_ms: f64,
}

fn is_zero(milliseconds: &f64) -> bool {
    *milliseconds == 0.0
}

impl Prediction {
    /// The time to the first token without the wait for other requests and for sleeping machines.
    pub fn own_ms(&self) -> f64 {
        (self.ttft_ms - self.wake_ms - self.queue_ms).max(0.0)
    }

    /// The same if the prompt's computation had been predicted rightly. What a rate got wrong, the rate learns: a correction is
    /// for the rest. Where the wire takes longer than the computation, that makes no difference.
    pub fn own_ms_given(&self, prefill_ms: f64) -> f64 {
        let is_known = prefill_ms > 0.0 && self.wire_ms <= self.prefill_ms;
        let shift = if is_known { prefill_ms - self.prefill_ms } else { 0.0 };
        (self.own_ms() + shift).max(prefill_ms)
    }
}

/// Seconds of each part.
pub(super) struct RouteSeconds {
    pub(super) queue: f64,
    pub(super) restore: f64,
    pub(super) prefill: f64,
    pub(super) wire: f64,
    pub(super) after_prefill: f64,
    pub(super) step: f64,
    pub(super) ttft: f64,
}

pub(super) fn prediction(request: &RequestSize, parts: RouteSeconds) -> Prediction {
    let RouteSeconds { queue, restore, prefill, wire, after_prefill, step, ttft } = parts;
    Prediction {
        wake_ms: 0.0,
        queue_ms: queue * 1e3,
        restore_ms: restore * 1e3,
        prefill_ms: prefill * 1e3,
        wire_ms: wire * 1e3,
        after_prefill_ms: after_prefill * 1e3,
        step_ms: step * 1e3,
        ttft_ms: ttft * 1e3,
        completion_ms: (ttft + (request.n_output - 1.0).max(0.0) * step) * 1e3,
    }
}

/// Multiplies the route's own part of the time to the first token by `correction`. What computes or crosses the wire at a
/// measured rate takes its time all the same: other requests may have taught a correction that does not fit this one.
pub(super) fn corrected(prediction: Prediction, correction: f64) -> Prediction {
    let longest_part = (prediction.restore_ms + prediction.prefill_ms).max(prediction.wire_ms);
    let ttft_ms = prediction.queue_ms + (prediction.own_ms() * correction).max(longest_part);
    Prediction { ttft_ms, completion_ms: prediction.completion_ms + ttft_ms - prediction.ttft_ms, ..prediction }
}

/// The same after the machines of the route have woken up.
pub(super) fn after_waking(prediction: Prediction, wake_ms: f64) -> Prediction {
    let Prediction { ttft_ms, completion_ms, .. } = prediction;
    Prediction { wake_ms, ttft_ms: ttft_ms + wake_ms, completion_ms: completion_ms + wake_ms, ..prediction }
}
