//! Limits new tokens to what the model's context has left after the prompt.
//!
//! vLLM refuses a request for more, and a pair of servers does so only after the first one has computed the prompt. vLLM
//! lists the size of the context, so a request that may not fit is counted before anything is computed. Engines of Baton's
//! own end such a reply at the end of the context, too.

use std::time::Duration;

use baton_engines::upstream::{TokenAnswer, TokenQuestion, UpstreamError};
use baton_schemas::GenerateRequest;
use baton_schemas::generate::{ChatPrompt, Input};
use baton_schemas::node::TokenizeRequest;
use tokio::time::timeout;

use super::prompt_estimate::{BYTES_PER_TOKEN, estimated_tokens};
use super::{ServingUpstream, UpstreamServer};

/// Tokens that a template may add to a prompt, such as a system message of its own.
const TEMPLATE_TOKENS: u32 = 1_024;

/// The deadline of counting a prompt. Without an answer the request goes out as it is.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// The tokens that are left after the prompt, if the request asks for more. `None`: it does not, or nobody knows.
///
/// Errors: the prompt alone does not fit.
pub(super) async fn n_left(
    ServingUpstream { server, model }: &ServingUpstream,
    request: &GenerateRequest,
    request_id: &str,
) -> Result<Option<u32>, UpstreamError> {
    let known = server.n_ctx(model).zip(server.client.settings().max_tokens(request));
    let Some((n_ctx, max_tokens)) = known.filter(|(n_ctx, n)| at_most(request).saturating_add(*n) > *n_ctx) else {
        return Ok(None);
    };
    let Some(n_prompt) = count(server, model, request, request_id).await else { return Ok(None) };
    // A reply needs a token.
    match n_ctx.saturating_sub(n_prompt) {
        0 => Err(UpstreamError::TooLong { n_prompt, n_ctx }),
        n_left => Ok(Some(n_left).filter(|n_left| *n_left < max_tokens)),
    }
}

/// The most tokens that the prompt may have: one for each byte.
fn at_most(request: &GenerateRequest) -> u32 {
    match &request.input {
        Input::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        _ => estimated_tokens(request)
            .saturating_add(1)
            .saturating_mul(BYTES_PER_TOKEN as u32)
            .saturating_add(TEMPLATE_TOKENS),
    }
}

/// The number of the prompt's tokens. `None`: the upstream does not say.
async fn count(server: &UpstreamServer, model: &str, request: &GenerateRequest, request_id: &str) -> Option<u32> {
    let ask = async |question: TokenQuestion<'_>| {
        let answer = timeout(COUNT_TIMEOUT, server.client.tokens(question, model, request_id)).await;
        match answer {
            Ok(Ok(TokenAnswer::Tokens(tokens))) => u32::try_from(tokens.len()).ok(),
            Ok(Ok(TokenAnswer::Text(_) | TokenAnswer::Pieces(_))) => None,
            Ok(Err(error)) => {
                // The upstream's own message may quote the prompt.
                tracing::debug!(request_id, upstream = server.name(), %error, "an upstream did not count a prompt");
                None
            }
            Err(_) => None,
        }
    };
    match &request.input {
        Input::Tokens(tokens) => u32::try_from(tokens.len()).ok(),
        Input::Text(text) => {
            let text = TokenizeRequest { text: text.clone(), add_special: true, parse_special: true };
            ask(TokenQuestion::Tokenize(&text)).await
        }
        Input::Chat(conversation) => {
            let chat = ChatPrompt { conversation: conversation.clone(), tools: request.tools.clone() };
            ask(TokenQuestion::TokenizeChat(&chat)).await
        }
        Input::Infill { .. } => None,
    }
}
