//! Limits new tokens to what the model's context has left after the prompt.
//!
//! vLLM refuses a request for more, and a pair of servers does so only after the first one has computed the prompt. vLLM
//! lists the size of the context, so a request that may well not fit is counted before anything is computed. Any other one
//! is counted when vLLM has refused it. Engines of Baton's own end such a reply at the end of the context, too.

use std::time::Duration;

use baton_schemas::generate::Input;
use baton_schemas::{EngineError, GenerateRequest};
use baton_upstream::{PreparedChoice, PromptCount, UpstreamError};
use tokio::time::{Instant, timeout_at};

use super::prompt_estimate::estimated_tokens;
use super::{ServingUpstream, UpstreamServer};

/// Tokens that a template may add to a prompt, such as a system message of its own.
const TEMPLATE_TOKENS: u32 = 1_024;

/// How many times its estimate a prompt may well have: two bytes for each token, as in code and in many languages.
const DENSE: u32 = 2;

/// The deadline of counting a prompt. Without an answer the request goes out as it is.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns true if the prompt and the tokens that the request asks for may well exceed the model's context. A prompt of
/// unusually short tokens may exceed it all the same.
pub(super) fn may_exceed_context(upstream: &ServingUpstream, request: &GenerateRequest) -> bool {
    let n_prompt = match &request.input {
        Input::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        _ => estimated_tokens(request).saturating_mul(DENSE).saturating_add(TEMPLATE_TOKENS),
    };
    limits(upstream, request).is_some_and(|(n_ctx, max_tokens)| n_prompt.saturating_add(max_tokens) > n_ctx)
}

/// Returns true if the upstream says that the prompt, or the prompt and the tokens that are asked for, do not fit.
pub(super) fn is_overflow(error: &UpstreamError) -> bool {
    use EngineError::{ContextExceeded, ContextOverflow};
    matches!(error, UpstreamError::Refused(ContextExceeded { .. } | ContextOverflow { .. }))
}

/// Counts the prompt of this call until `due`. Returns the tokens that are left after it, if the request asks for more.
/// `None`: it does not, or nobody knows.
///
/// Errors: the prompt alone does not fit.
pub(super) async fn n_left(
    upstream: &ServingUpstream,
    request: &GenerateRequest,
    call: &PreparedChoice,
    request_id: &str,
    due: Instant,
) -> Result<Option<u32>, UpstreamError> {
    let Some((n_ctx, max_tokens)) = limits(upstream, request) else { return Ok(None) };
    let counted = match &request.input {
        Input::Tokens(tokens) => u32::try_from(tokens.len()).ok().map(|n_tokens| PromptCount { n_tokens, n_ctx: None }),
        _ => count(&upstream.server, call, request_id, due).await,
    };
    let Some(PromptCount { n_tokens, n_ctx: now }) = counted else { return Ok(None) };
    // The list may be older than the server that has counted.
    let n_ctx = now.unwrap_or(n_ctx);
    // A reply needs a token.
    match n_ctx.saturating_sub(n_tokens) {
        0 => Err(UpstreamError::TooLong { n_prompt: n_tokens, n_ctx }),
        n_left => Ok(Some(n_left).filter(|n_left| *n_left < max_tokens)),
    }
}

/// The size of the model's context and the tokens that the request asks for, if both are known.
fn limits(ServingUpstream { server, model }: &ServingUpstream, request: &GenerateRequest) -> Option<(u32, u32)> {
    server.n_ctx(model).zip(server.client.settings().max_tokens(request))
}

async fn count(server: &UpstreamServer, call: &PreparedChoice, request_id: &str, due: Instant) -> Option<PromptCount> {
    let due = due.min(Instant::now() + COUNT_TIMEOUT);
    match timeout_at(due, server.client.count_prompt(call, request_id)).await.ok()? {
        Ok(counted) => counted,
        Err(error) => {
            // The upstream's own message may quote the prompt.
            tracing::debug!(request_id, upstream = server.name(), %error, "an upstream did not count a prompt");
            None
        }
    }
}
