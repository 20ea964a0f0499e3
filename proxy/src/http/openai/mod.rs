//! OpenAI's dialect: its routes, and its events out of ours. The JSON itself is in `baton_schemas::openai`.

pub mod chat;
pub mod models;

mod chunks;
mod collect;
mod sse;
mod tally;

use baton_schemas::openai::chat_response::ReplyHead;
use baton_schemas::openai::logprobs::{ChoiceLogprobs, TokenLogprob};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::generate::TokenLogprobs;

/// Where a request ran and why.
pub const X_BATON_ROUTE: HeaderName = HeaderName::from_static("x-baton-route");

/// What of a request its reply depends on.
struct ReplyShape {
    head: ReplyHead,
    n: u32,
    logprobs: bool,
    include_usage: bool,
}

impl ReplyShape {
    /// The `logprobs` of these tokens, null unless asked for.
    fn logprobs_of(&self, tokens: &[TokenLogprobs]) -> Option<ChoiceLogprobs> {
        let content = || tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect();
        self.logprobs.then(|| ChoiceLogprobs { content: content(), refusal: None })
    }
}

/// Says where a request ran. A route that cannot stand in a header is left out: the reply matters more.
fn insert_route(headers: &mut HeaderMap, route: &str) {
    if let Ok(value) = HeaderValue::from_str(route) {
        headers.insert(X_BATON_ROUTE, value);
    }
}
