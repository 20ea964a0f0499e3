//! The course of a request, with predicted and measured times, and the last requests that ended.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use baton_planner::cost::Prediction;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::DraftCounts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TokenSources;

/// Served requests that are kept: some screens of a terminal, some kilobytes of memory.
pub const MAX_RECORDS: usize = 64;

/// Other requests that are kept: refused ones, and those that ended before they had a route. They have a bound of their own: a flood
/// of them drives no served request out.
pub const MAX_UNSERVED: usize = 16;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "Outcome")]
pub enum RequestOutcome {
    /// Every choice finished.
    Done,
    /// The client disconnected.
    Cancelled,
    /// It ended with an error.
    Failed,
    /// It was refused before it had a route, or by the engine before it began.
    Refused,
}

impl RequestOutcome {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One request's course: what has happened to it so far, or until its end. Times in milliseconds, from its arrival unless
/// stated otherwise. What has not happened yet is missing, or empty.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouteRecord {
    /// When the request arrived, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// As in `x-request-id`.
    pub request_id: String,
    /// The model's public name.
    pub model: String,
    /// The node or the upstream that generates, or computes vectors. Empty until the request has a route.
    pub decode: String,
    /// The node, or the prefill servers of an upstream, that compute the prompt, if another one generates.
    pub prefill: Option<String>,
    /// The policy that decided.
    pub policy: String,
    /// The reason, in one word.
    pub reason: String,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Tokens of the prompt that were cached, in a slot or in the store of the node that generates.
    pub n_cached: u32,
    /// Tokens of the prompt, by the source of their KV.
    #[serde(default)]
    pub sources: TokenSources,
    /// The way of KV back from the store of the node that generates, before its slot counts as taken.
    #[serde(default)]
    pub restore_ms: f64,
    /// Tokens generated, over all choices.
    pub n_completion: u32,
    /// Guessed tokens that were verified, and how many of them were right, over all choices that have ended.
    #[serde(default, skip_serializing_if = "DraftCounts::is_empty")]
    pub drafts: DraftCounts,
    /// Vectors, or scores of documents, that were computed; missing for a request for text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_vectors: Option<u64>,
    /// From arrival to admission.
    #[serde(default)]
    pub admitted_ms: Option<f64>,
    /// From arrival to the plan: admission, rendering, tokenizing.
    pub before_plan_ms: f64,
    /// From arrival to the slot in the engine that generates.
    #[serde(default)]
    pub slot_ms: Option<f64>,
    /// From arrival to when the request began to wait, for one that waits: no engine works for it, or none does any more. About 0
    /// before the first one has begun. Missing once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_since_ms: Option<f64>,
    /// From arrival to when an engine began to work for it, for one that does not wait. Missing once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_since_ms: Option<f64>,
    /// The predicted times of this route, from the plan on.
    #[serde(default)]
    pub predicted: Option<Prediction>,
    /// From the plan to the first token, predicted.
    pub predicted_ttft_ms: Option<f64>,
    /// From the plan to the first token, predicted for the direct route.
    pub predicted_direct_ttft_ms: Option<f64>,
    /// The predicted times of the machine that alone was predicted to be done first, from the plan on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_direct: Option<DirectPrediction>,
    /// How much earlier a prompt that was handed over was done than `predicted_direct` says for as many tokens; negative: later. If the
    /// same machine generated, only its first token counts. Only complete replies with one choice have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved_ms: Option<f64>,
    /// From the plan to the first token, measured.
    pub ttft_ms: Option<f64>,
    /// From arrival to the end, or until now.
    pub e2e_ms: f64,
    /// The handoff, if there was one.
    pub handoff: Option<HandoffReport>,
    /// The work of an upstream's prefill servers, if a choice began with their KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_prefill: Option<UpstreamPrefill>,
    /// True if a node of the route is simulated: then the times are.
    #[serde(default)]
    pub simulated: bool,
    /// The node that generates now or did last, if the reply moved there after its first token: the one before was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_to: Option<String>,
    /// How it ended; missing while it runs.
    pub outcome: Option<RequestOutcome>,
    /// Why it failed or was refused, in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl RouteRecord {
    /// Returns true if it had a route, and was not refused there.
    pub fn is_served(&self) -> bool {
        !self.decode.is_empty() && self.outcome != Some(RequestOutcome::Refused)
    }

    /// From arrival to the first token, measured, ms.
    pub fn first_token_ms(&self) -> Option<f64> {
        Some(self.before_plan_ms + self.ttft_ms?)
    }

    /// From arrival to the first token, as the plan predicted it when it was made, ms.
    pub fn predicted_first_token_ms(&self) -> Option<f64> {
        Some(self.before_plan_ms + self.predicted_ttft_ms?)
    }
}

/// The predicted times of one machine that does both, milliseconds from the plan on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DirectPrediction {
    /// The node.
    pub node: String,
    /// Until the first token.
    pub ttft_ms: f64,
    /// One decode step.
    pub step_ms: f64,
}

impl DirectPrediction {
    /// From the first to the last of `n_tokens` tokens, ms.
    pub fn decode_ms(&self, n_tokens: u32) -> f64 {
        f64::from(n_tokens.saturating_sub(1)) * self.step_ms
    }
}

/// The work of an upstream's prefill servers for the choices of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UpstreamPrefill {
    /// From the request to the prefill server's answer; of several choices, the longest time.
    pub prefill_ms: f64,
    /// The most tokens that can have come by transfer, of all complete choices and as far as the servers report them.
    pub n_transferred: u32,
}

/// The last requests that ended: at most [`MAX_RECORDS`] that were served, and [`MAX_UNSERVED`] others.
#[derive(Debug, Default)]
pub struct Journal(Mutex<VecDeque<RouteRecord>>);

impl Journal {
    /// Adds a request, and drops the oldest one of its kind if there are too many.
    pub fn push(&self, record: RouteRecord) {
        let is_served = record.is_served();
        let most = if is_served { MAX_RECORDS } else { MAX_UNSERVED };
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alike = (0..records.len()).filter(|idx| records[*idx].is_served() == is_served);
        let oldest = alike.next().filter(|_| alike.count() + 1 >= most);
        oldest.map(|idx| records.remove(idx));
        records.push_back(record);
    }

    /// The kept requests, the newest first.
    pub fn latest(&self) -> Vec<RouteRecord> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_requests_are_kept_newest_first() {
        let journal = Journal::default();
        let record = |at_ms| RouteRecord { at_ms, decode: "node".into(), ..RouteRecord::default() };
        for at_ms in 0..100 {
            journal.push(record(at_ms));
        }
        let kept = || journal.latest().iter().map(|record| record.at_ms).collect::<Vec<_>>();
        let served = (100 - MAX_RECORDS as u64..100).rev().collect::<Vec<_>>();
        assert_eq!(kept(), served);
        for at_ms in 100..1_000 {
            journal.push(RouteRecord { outcome: Some(RequestOutcome::Refused), ..record(at_ms) });
            let outcome = Some(RequestOutcome::Cancelled);
            journal.push(RouteRecord { outcome, decode: String::new(), ..record(at_ms) });
        }
        let others = (1_000 - MAX_UNSERVED as u64 / 2..1_000).rev().flat_map(|at_ms| [at_ms; 2]);
        let all = others.chain(served).collect::<Vec<_>>();
        assert_eq!(kept(), all, "neither refused requests nor those that left in the queue drive a served one out");
    }
}
