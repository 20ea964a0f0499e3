//! Requests that upstreams answer in one piece: vectors of texts, tokens, and loading and unloading of a model.

use std::time::{Duration, Instant};

use baton_engines::upstream::{TextVectors, TokenAnswer, TokenQuestion, UpstreamError};
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTimings};
use baton_schemas::keep_alive::KeepAlive;

use super::client_error::client_error;
use super::image_support::refuse_images;
use super::prompt_estimate::{BYTES_PER_TOKEN, most_tokens};
use super::retry::{UpstreamQuestion, first_answer};
use super::server::UpstreamPermit;
use super::{ServedByUpstreams, ServingUpstream};
use crate::error::RequestError;
use crate::targets::Embedded;

/// Vectors of a request's texts. Dropping the future cancels it.
pub async fn embed(
    serving: &ServedByUpstreams,
    request: &EmbedRequest,
    request_id: &str,
) -> Result<Embedded, RequestError> {
    let since = Instant::now();
    let TextVectors { vectors, n_tokens } = first_answer(serving, &EmbedQuestion { request, request_id }).await?.answer;
    let estimated = request.inputs.iter().map(estimated_tokens).sum::<usize>();
    let estimated = u32::try_from(estimated).unwrap_or(u32::MAX);
    let n_tokens = n_tokens.map_or(estimated, |reported| reported.min(most_tokens(estimated)));
    let timings = EmbedTimings { compute_ms: since.elapsed().as_secs_f64() * 1e3, ..EmbedTimings::default() };
    Ok(Embedded { vectors, n_tokens, timings })
}

fn estimated_tokens(input: &EmbedInput) -> usize {
    match input {
        EmbedInput::Text(text) => text.len().div_ceil(BYTES_PER_TOKEN),
        EmbedInput::Tokens(tokens) => tokens.len(),
    }
}

/// The answer to a question about tokens.
pub async fn tokens(
    serving: &ServedByUpstreams,
    question: TokenQuestion<'_>,
    request_id: &str,
) -> Result<TokenAnswer, RequestError> {
    if let TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) = question {
        refuse_images(&chat.conversation.images)?;
    }
    Ok(first_answer(serving, &TokensQuestion { question, request_id }).await?.answer)
}

/// Loads the model into one upstream's memory. Most upstreams always keep their models in memory.
pub async fn load(
    serving: &ServedByUpstreams,
    keep_alive: Option<KeepAlive>,
    request_id: &str,
) -> Result<(), RequestError> {
    first_answer(serving, &LoadQuestion { keep_alive, request_id }).await.map(drop)
}

/// Unloads the model from all upstreams that serve it. Errors: none of them can unload it.
pub async fn unload(serving: &ServedByUpstreams, request_id: &str) -> Result<(), RequestError> {
    let zero = Some(KeepAlive::For(Duration::ZERO));
    let unloading = serving.upstreams.iter().map(|upstream| {
        let ServingUpstream { server, model } = upstream;
        server.client.keep(model, zero, request_id)
    });
    let outcomes = futures::future::join_all(unloading).await;
    if outcomes.iter().any(Result::is_ok) {
        return Ok(());
    }
    outcomes.into_iter().collect::<Result<(), _>>().map_err(client_error)
}

struct EmbedQuestion<'a> {
    request: &'a EmbedRequest,
    request_id: &'a str,
}

impl UpstreamQuestion for EmbedQuestion<'_> {
    type Answer = TextVectors;
    type Prepared = ();

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn prepare(&self, ServingUpstream { server, model }: &ServingUpstream) -> Result<(), UpstreamError> {
        server.client.check_embed(self.request, model)
    }

    async fn ask(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        (): (),
        _permits: Vec<UpstreamPermit>,
    ) -> Result<TextVectors, UpstreamError> {
        server.client.embed(self.request, model, self.request_id).await
    }
}

struct LoadQuestion<'a> {
    keep_alive: Option<KeepAlive>,
    request_id: &'a str,
}

impl UpstreamQuestion for LoadQuestion<'_> {
    type Answer = ();
    type Prepared = ();

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn prepare(&self, _upstream: &ServingUpstream) -> Result<(), UpstreamError> {
        Ok(())
    }

    async fn ask(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        (): (),
        _permits: Vec<UpstreamPermit>,
    ) -> Result<(), UpstreamError> {
        server.client.keep(model, self.keep_alive, self.request_id).await
    }
}

struct TokensQuestion<'a> {
    question: TokenQuestion<'a>,
    request_id: &'a str,
}

impl UpstreamQuestion for TokensQuestion<'_> {
    type Answer = TokenAnswer;
    type Prepared = ();

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn prepare(&self, ServingUpstream { server, model }: &ServingUpstream) -> Result<(), UpstreamError> {
        server.client.check_tokens(self.question, model)
    }

    async fn ask(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        (): (),
        _permits: Vec<UpstreamPermit>,
    ) -> Result<TokenAnswer, UpstreamError> {
        server.client.tokens(self.question, model, self.request_id).await
    }
}
