//! What a response and its stream have in common.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_reply::TokenLogprobs;
use baton_schemas::openai::logprobs::TokenLogprob;
use baton_schemas::openai::responses::response::ResponseUsage;

use crate::http::reply_totals::ReplyTotals;

/// Seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(super) fn usage(totals: &ReplyTotals) -> ResponseUsage {
    ResponseUsage::new(totals.n_prompt, totals.n_cached, totals.n_completion, totals.n_reasoning)
}

/// Empty unless they were asked for.
pub(super) fn logprobs(tokens: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect()
}
