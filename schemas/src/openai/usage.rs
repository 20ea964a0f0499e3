//! `usage`, and llama-server's `timings`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::handoff::HandoffReport;
use crate::sequence::{DraftCounts, Timings};

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Usage {
    /// Tokens in the prompt. Counted once, even with several choices.
    pub prompt_tokens: u32,
    /// Generated tokens of all choices.
    pub completion_tokens: u32,
    /// The sum of both.
    pub total_tokens: u32,
    /// Details about the prompt's tokens.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Details about the generated tokens.
    pub completion_tokens_details: CompletionTokensDetails,
}

impl Usage {
    /// The usage of a request without reasoning.
    pub fn new(n_prompt: u32, n_cached: u32, n_completion: u32) -> Self {
        Usage {
            prompt_tokens: n_prompt,
            completion_tokens: n_completion,
            total_tokens: n_prompt.saturating_add(n_completion),
            prompt_tokens_details: PromptTokensDetails { cached_tokens: n_cached },
            completion_tokens_details: CompletionTokensDetails::default(),
        }
    }

    /// Sets how many of the generated tokens are reasoning.
    pub fn with_reasoning(self, n_reasoning: u32) -> Self {
        let details = CompletionTokensDetails { reasoning_tokens: n_reasoning, ..self.completion_tokens_details };
        Usage { completion_tokens_details: details, ..self }
    }

    /// Sets how many tokens of the client's prediction were tried, if any were.
    pub fn with_prediction(self, tried: DraftCounts) -> Self {
        let DraftCounts { n, n_accepted } = tried;
        let (accepted, rejected) = (n > 0).then(|| (n_accepted, n.saturating_sub(n_accepted))).unzip();
        let details = CompletionTokensDetails {
            accepted_prediction_tokens: accepted,
            rejected_prediction_tokens: rejected,
            ..self.completion_tokens_details
        };
        Usage { completion_tokens_details: details, ..self }
    }
}

/// Details about the prompt's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Tokens that were not computed: their KV was in a slot, in a store, or cached on the node that it was pulled from.
    pub cached_tokens: u32,
}

/// Details about the generated tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CompletionTokensDetails {
    /// Tokens of reasoning.
    pub reasoning_tokens: u32,
    /// Tokens of `prediction` that were tried and are in the reply. Absent if none was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<u32>,
    /// Tokens of `prediction` that were tried and are not in the reply. They are not among the generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<u32>,
}

/// llama-server's `timings`: where a request's time went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct TimingsReport {
    /// Cached tokens of the prompt.
    pub cache_n: u32,
    /// Computed tokens of the prompt.
    pub prompt_n: u32,
    /// Milliseconds to compute them.
    pub prompt_ms: f64,
    /// Milliseconds per computed token.
    pub prompt_per_token_ms: f64,
    /// Computed tokens per second.
    pub prompt_per_second: f64,
    /// Generated tokens.
    pub predicted_n: u32,
    /// Milliseconds to generate them.
    pub predicted_ms: f64,
    /// Milliseconds per generated token.
    pub predicted_per_token_ms: f64,
    /// Generated tokens per second.
    pub predicted_per_second: f64,
    /// Tokens that were guessed and verified together with others. Absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_n: Option<u32>,
    /// The right ones among them, which are generated tokens, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_n_accepted: Option<u32>,
    /// How the handoff of the prompt's KV went, if one was tried. Not in llama-server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<HandoffReport>,
}

impl TimingsReport {
    /// The report of one sequence, or of the sum of several.
    pub fn new(n_cached: u32, timings: &Timings, handoff: Option<HandoffReport>) -> Self {
        // Tokens computed here or on the prefill node: `prompt_ms` covers both.
        let prompt_n =
            timings.prompt_n.saturating_add(handoff.map_or(0, |handoff| handoff.n_tokens - handoff.n_reused()));
        let drafts = Some(timings.drafts.all()).filter(|drafts| drafts.n > 0);
        TimingsReport {
            cache_n: n_cached,
            prompt_n,
            prompt_ms: timings.prompt_ms,
            prompt_per_token_ms: ratio(timings.prompt_ms, prompt_n.into()),
            prompt_per_second: ratio(1e3 * f64::from(prompt_n), timings.prompt_ms),
            predicted_n: timings.predicted_n,
            predicted_ms: timings.predicted_ms,
            predicted_per_token_ms: ratio(timings.predicted_ms, timings.predicted_n.into()),
            predicted_per_second: ratio(1e3 * f64::from(timings.predicted_n), timings.predicted_ms),
            draft_n: drafts.map(|drafts| drafts.n),
            draft_n_accepted: drafts.map(|drafts| drafts.n_accepted),
            handoff,
        }
    }
}

/// Divides, with 0 for nothing measured: JSON has no infinity, and null would break typed clients.
fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator > 0.0 { numerator / denominator } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::DraftTotals;

    fn check(value: impl Serialize, expected: &str) {
        assert_eq!(serde_json::to_string(&value).unwrap(), expected);
    }

    #[test]
    fn shapes_and_order_are_openais_and_llama_servers() {
        check(
            Usage::new(10, 4, 3),
            r#"{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":0}}"#,
        );
        let timings = Timings {
            queue_ms: 1.0,
            prompt_n: 6,
            prompt_ms: 12.0,
            predicted_n: 4,
            predicted_ms: 20.0,
            ..Timings::default()
        };
        check(
            TimingsReport::new(4, &timings, None),
            r#"{"cache_n":4,"prompt_n":6,"prompt_ms":12.0,"prompt_per_token_ms":2.0,"prompt_per_second":500.0,"predicted_n":4,"predicted_ms":20.0,"predicted_per_token_ms":5.0,"predicted_per_second":200.0}"#,
        );
        assert_eq!(TimingsReport::new(0, &Timings::default(), None), TimingsReport::default());
        let counts = |n, n_accepted| DraftCounts { n, n_accepted };
        check(
            Usage::new(10, 4, 3).with_prediction(counts(8, 5)).with_reasoning(2).completion_tokens_details,
            r#"{"reasoning_tokens":2,"accepted_prediction_tokens":5,"rejected_prediction_tokens":3}"#,
        );
        let drafts = DraftTotals { lookup: counts(10, 4), prediction: counts(8, 5), ..DraftTotals::default() };
        let timings = Timings { drafts, ..timings };
        let report = TimingsReport::new(0, &timings, None);
        assert_eq!((report.draft_n, report.draft_n_accepted), (Some(18), Some(9)));
    }
}
