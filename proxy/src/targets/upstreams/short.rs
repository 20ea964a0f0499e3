//! What upstreams answer in one piece: vectors of texts, tokens, and whether a model is in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::upstream::{TextVectors, TokenAnswer, TokenQuestion, UpstreamError};
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTimings};
use baton_schemas::keep_alive::KeepAlive;

use super::asking::{Question, first_answer, told};
use super::member::Place;
use super::sight::check_sight;
use super::{Member, ServedByUpstreams};
use crate::error::RequestError;
use crate::targets::Embedded;

/// Bytes of a text that are one token, on average, where nobody counts.
const BYTES_PER_TOKEN: usize = 4;

/// Vectors of a request's texts. Dropping the future cancels it.
pub async fn embed(
    serving: &ServedByUpstreams,
    request: &EmbedRequest,
    request_id: &str,
) -> Result<Embedded, RequestError> {
    let since = Instant::now();
    let (_, _, TextVectors { vectors, n_tokens }) = first_answer(serving, &Embedding { request, request_id }).await?;
    let estimated = || request.inputs.iter().map(estimated_tokens).sum::<usize>();
    let n_tokens = n_tokens.unwrap_or_else(|| u32::try_from(estimated()).unwrap_or(u32::MAX));
    let timings = EmbedTimings { compute_ms: since.elapsed().as_secs_f64() * 1e3, ..EmbedTimings::default() };
    Ok(Embedded { vectors, n_tokens, timings })
}

fn estimated_tokens(input: &EmbedInput) -> usize {
    match input {
        EmbedInput::Text(text) => text.len().div_ceil(BYTES_PER_TOKEN),
        EmbedInput::Tokens(tokens) => tokens.len(),
    }
}

/// Answers a question about tokens.
pub async fn tokens(
    serving: &ServedByUpstreams,
    question: TokenQuestion<'_>,
    request_id: &str,
) -> Result<TokenAnswer, RequestError> {
    if let TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) = question {
        check_sight(&chat.conversation.images)?;
    }
    Ok(first_answer(serving, &Asking { question, request_id }).await?.2)
}

/// Has the model in memory. Where upstreams have theirs for as long as they run, that is so.
pub async fn load(
    serving: &ServedByUpstreams,
    keep_alive: Option<KeepAlive>,
    request_id: &str,
) -> Result<(), RequestError> {
    first_answer(serving, &Keeping { keep_alive, request_id }).await.map(drop)
}

/// Has the model leave the memory of all upstreams that serve it. Errors: none of them lets it go.
pub async fn unload(serving: &ServedByUpstreams, request_id: &str) -> Result<(), RequestError> {
    let nothing = Some(KeepAlive::For(Duration::ZERO));
    let asked = serving.members.iter().map(|(member, model)| member.client.keep(model, nothing, request_id));
    let outcomes = futures::future::join_all(asked).await;
    if outcomes.iter().any(Result::is_ok) {
        return Ok(());
    }
    outcomes.into_iter().collect::<Result<(), _>>().map_err(told)
}

struct Embedding<'a> {
    request: &'a EmbedRequest,
    request_id: &'a str,
}

impl Question for Embedding<'_> {
    type Answer = TextVectors;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_places(&self) -> u32 {
        1
    }

    fn fits(&self, member: &Member, model: &str) -> Result<(), UpstreamError> {
        member.client.check_embed(self.request, model)
    }

    async fn ask(&self, member: &Arc<Member>, model: &str, _: Vec<Place>) -> Result<TextVectors, UpstreamError> {
        member.client.embed(self.request, model, self.request_id).await
    }
}

struct Keeping<'a> {
    keep_alive: Option<KeepAlive>,
    request_id: &'a str,
}

impl Question for Keeping<'_> {
    type Answer = ();

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_places(&self) -> u32 {
        1
    }

    fn fits(&self, _: &Member, _: &str) -> Result<(), UpstreamError> {
        Ok(())
    }

    async fn ask(&self, member: &Arc<Member>, model: &str, _: Vec<Place>) -> Result<(), UpstreamError> {
        member.client.keep(model, self.keep_alive, self.request_id).await
    }
}

struct Asking<'a> {
    question: TokenQuestion<'a>,
    request_id: &'a str,
}

impl Question for Asking<'_> {
    type Answer = TokenAnswer;

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn n_places(&self) -> u32 {
        1
    }

    /// One that does not tell tokens says so when it is asked: another one of the model's may.
    fn fits(&self, member: &Member, model: &str) -> Result<(), UpstreamError> {
        member.client.check_tokens(self.question, model)
    }

    async fn ask(&self, member: &Arc<Member>, model: &str, _: Vec<Place>) -> Result<TokenAnswer, UpstreamError> {
        member.client.tokens(self.question, model, self.request_id).await
    }
}
