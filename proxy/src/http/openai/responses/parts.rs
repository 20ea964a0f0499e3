//! Helpers shared by a whole response and a streamed response.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_reply::TokenLogprobs;
use baton_schemas::openai::logprobs::TokenLogprob;
use baton_schemas::openai::responses::response::ResponseUsage;

use crate::http::reply::reply_totals::ReplyTotals;

/// The current time in seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(super) fn usage(totals: &ReplyTotals) -> ResponseUsage {
    ResponseUsage::new(totals.counts.n_prompt, totals.n_cached(), totals.counts.n_completion, totals.n_reasoning)
}

/// Writes log-probabilities; empty unless requested.
pub(super) fn logprobs(tokens: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect()
}
