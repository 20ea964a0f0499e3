//! Requests that upstreams answer in one piece: vectors of texts, tokens, and loading and unloading of a model.

use std::time::{Duration, Instant};

use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTask, EmbedTimings};
use baton_schemas::keep_alive::KeepAlive;
use baton_upstream::{ModelCapability, ReceivedVectors, TokenAnswer, TokenQuestion, UpstreamError};

use super::client_error::client_error;
use super::image_support::refuse_images;
use super::prompt_estimate::{BYTES_PER_TOKEN, most_tokens};
use super::retry::{UpstreamQuestion, first_answer};
use super::{ServedByUpstreams, ServingUpstream};
use crate::admission::{Place, RequestPlaces};
use crate::error::RequestError;
use crate::targets::Embedded;

/// Vectors of a request's texts. Dropping the future cancels it.
pub async fn embed(
    serving: &ServedByUpstreams,
    places: &RequestPlaces,
    question: &EmbedQuestion<'_>,
) -> Result<Embedded, RequestError> {
    let since = Instant::now();
    let ReceivedVectors { vectors, n_tokens } = first_answer(serving, places, question).await?.answer;
    let EmbedRequest { task, inputs, .. } = question.request;
    let estimated = u32::try_from(estimated_input_tokens(task, inputs)).unwrap_or(u32::MAX);
    let n_tokens = n_tokens.map_or(estimated, |reported| reported.min(most_tokens(estimated)));
    let timings = EmbedTimings { compute_ms: since.elapsed().as_secs_f64() * 1e3, ..EmbedTimings::default() };
    Ok(Embedded { vectors, n_tokens, timings })
}

/// An estimate of all that is computed. A reranker reads the query with each document.
pub(crate) fn estimated_input_tokens(task: &EmbedTask, inputs: &[EmbedInput]) -> usize {
    let of_text = |text: &str| text.len().div_ceil(BYTES_PER_TOKEN);
    let query = match task {
        EmbedTask::Embed => 0,
        EmbedTask::Rerank { query } => of_text(query),
    };
    let of_input = |input: &EmbedInput| match input {
        EmbedInput::Text(text) => of_text(text),
        EmbedInput::Tokens(tokens) => tokens.len(),
    };
    inputs.iter().map(|input| query + of_input(input)).sum()
}

/// The answer to a question about tokens.
pub async fn tokens(
    serving: &ServedByUpstreams,
    places: &RequestPlaces,
    question: TokenQuestion<'_>,
    request_id: &str,
) -> Result<TokenAnswer, RequestError> {
    if let TokenQuestion::Render(chat) | TokenQuestion::TokenizeChat(chat) = question {
        refuse_images(&chat.conversation)?;
    }
    Ok(first_answer(serving, places, &TokensQuestion { question, request_id }).await?.answer)
}

/// Loads the model into one upstream's memory. Most upstreams always keep their models in memory.
pub async fn load(
    serving: &ServedByUpstreams,
    places: &RequestPlaces,
    keep_alive: Option<KeepAlive>,
    request_id: &str,
) -> Result<(), RequestError> {
    first_answer(serving, places, &LoadQuestion { keep_alive, request_id }).await.map(drop)
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

/// A request for vectors of texts.
pub struct EmbedQuestion<'a> {
    pub request: &'a EmbedRequest,
    pub request_id: &'a str,
    /// The upstream with this name is about to be asked.
    pub asks: &'a (dyn Fn(&str) + Send + Sync),
}

impl UpstreamQuestion for EmbedQuestion<'_> {
    type Answer = ReceivedVectors;
    type Prepared = ();

    fn request_id(&self) -> &str {
        self.request_id
    }

    fn admitted(&self, upstream: &ServingUpstream) {
        (self.asks)(upstream.server.name());
    }

    fn prepare(&self, ServingUpstream { server, model }: &ServingUpstream) -> Result<(), UpstreamError> {
        let (need, route) = match self.request.task {
            EmbedTask::Embed => (ModelCapability::Embeddings, "embeddings"),
            EmbedTask::Rerank { .. } => (ModelCapability::Rerank, "rerank"),
        };
        if server.lacks(model, &[need]).is_some() {
            return Err(UpstreamError::NoRoute { route });
        }
        server.client.check_embed(self.request, model)
    }

    async fn ask(
        &self,
        ServingUpstream { server, model }: &ServingUpstream,
        (): (),
        _held: Vec<Place>,
    ) -> Result<ReceivedVectors, UpstreamError> {
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
        _held: Vec<Place>,
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
        _held: Vec<Place>,
    ) -> Result<TokenAnswer, UpstreamError> {
        server.client.tokens(self.question, model, self.request_id).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_with_each_document() {
        let inputs = [EmbedInput::Text("a document".into()), EmbedInput::Tokens(vec![1; 7])];
        let ranked = EmbedTask::Rerank { query: "q".repeat(40 * BYTES_PER_TOKEN).into() };
        assert_eq!(estimated_input_tokens(&ranked, &inputs), estimated_input_tokens(&EmbedTask::Embed, &inputs) + 80);
    }
}
