//! The client of one upstream.

use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_schemas::GenerateRequest;
use baton_schemas::embed::EmbedRequest;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::ollama::told::ToldModel;
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

use super::stream::{Reading, deltas};
use super::{
    Call, Kind, Protocol, TextStream, TextVectors, TokenAnswer, TokenQuestion, UpstreamError, UpstreamSettings, Wish,
    about, memory, refusal, request_id, tokens, vectors, vllm,
};
use crate::remote::trouble;
use crate::trace;
use crate::transport::{Transport, explain};

/// Idle connections that are kept.
const MAX_IDLE_CONNECTIONS: usize = 16;

/// The largest reply that is read in one piece: a list of models, an error, a prefill server's answer.
const MAX_WHOLE_BYTES: usize = 4 << 20;

/// The largest reply with a batch of vectors, as numbers in text; or with tokens.
const MAX_VECTORS_BYTES: usize = 64 << 20;

/// How long a list of models may take, or what is told of one.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an error's body is waited for.
const ERROR_TIMEOUT: Duration = Duration::from_secs(5);

/// Deltas ahead of whoever reads a reply that must not be aborted.
const DELTAS_AHEAD: usize = 64;

/// One upstream. Nothing is sent before it is asked.
#[derive(Debug)]
pub struct Upstream {
    settings: UpstreamSettings,
    client: Client,
    base: String,
    headers: HeaderMap,
    protocol: Box<dyn Protocol>,
    next_prefill: AtomicUsize,
}

/// What one choice is asked for with.
pub struct Asked<'a> {
    /// The request.
    pub request: &'a GenerateRequest,
    /// Which of its choices, from 0.
    pub choice: u32,
    /// The upstream's own name for the model.
    pub model: &'a str,
    /// As in `x-request-id`; goes along.
    pub request_id: &'a str,
}

/// A reply that has begun, or a head whose reply is under way.
pub struct Reply {
    /// Its deltas.
    pub deltas: TextStream,
    /// What became of a prefill server, where there is one: its failure in one word.
    pub prefill: Option<Result<(), &'static str>>,
}

impl Upstream {
    /// A client that trusts and may do what `transport` says. Errors, for the operator: a header that is none, or no
    /// client can be made.
    pub fn new(settings: UpstreamSettings, transport: &Transport) -> Result<Upstream, String> {
        let builder = transport.client().connect_timeout(settings.deadlines.connect);
        let client = builder.pool_max_idle_per_host(MAX_IDLE_CONNECTIONS).build().map_err(|e| explain(&e))?;
        let mut headers = HeaderMap::new();
        let key = settings.key.iter().map(|key| ("authorization".to_owned(), format!("Bearer {key}")));
        for (name, value) in key.chain(settings.headers.iter().cloned()) {
            let header = HeaderName::try_from(&name).map_err(|_| format!("{name:?} is no header's name"))?;
            let mut value = HeaderValue::try_from(value).map_err(|_| format!("the value of {name} is no header's"))?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        let (base, protocol) = (settings.kind.base(&settings.url), settings.kind.protocol());
        Ok(Upstream { settings, client, base, headers, protocol, next_prefill: AtomicUsize::new(0) })
    }

    /// What it was made from.
    pub fn settings(&self) -> &UpstreamSettings {
        &self.settings
    }

    /// The models that it lists, by its own names. The list may be empty.
    pub async fn models(&self) -> Result<Vec<String>, UpstreamError> {
        let request = self.client.get(format!("{}/{}", self.base, self.protocol.models_path()));
        let list = self.whole(request.headers(self.headers.clone()).timeout(LIST_TIMEOUT), MAX_WHOLE_BYTES).await?;
        Ok(self.protocol.model_names(&list))
    }

    /// What it tells of a model. Nothing is asked of a kind that has no words for it.
    pub async fn told(&self, model: &str, request_id: &str) -> Result<ToldModel, UpstreamError> {
        let request = match self.settings.kind {
            Kind::Ollama => self.client.post(format!("{}/api/show", self.base)).json(&json!({ "model": model })),
            Kind::LlamaServer => self.client.get(format!("{}/props", self.root())).query(&[("model", model)]),
            Kind::Vllm => self.client.get(format!("{}/{}", self.base, self.protocol.models_path())),
            Kind::OpenAi => return Ok(ToldModel::default()),
        };
        let request = request
            .headers(self.headers.clone())
            .header("x-request-id", &*self.their_id(request_id))
            .timeout(LIST_TIMEOUT);
        let reply = self.whole(request, MAX_WHOLE_BYTES).await?;
        Ok(about::read(self.settings.kind, model, &reply))
    }

    /// Whether it could be asked for that. Sends nothing.
    pub fn check(&self, asked: &Asked<'_>) -> Result<(), UpstreamError> {
        self.call(asked).map(drop)
    }

    /// Asks for one choice. Returns with the reply's head. `hold` lives until the upstream has stopped working on it.
    pub async fn generate(&self, asked: &Asked<'_>, hold: impl Send + Sync + 'static) -> Result<Reply, UpstreamError> {
        let mut call = self.call(asked)?;
        let first = self.settings.deadlines.first;
        // A prefill server that says nothing must leave time to do without it.
        let prefill = self.prefill(&mut call, asked.request_id, Instant::now() + first / 2).await;
        let first_due = Instant::now() + first;
        let request = self.post(&self.base, &call, asked.request_id);
        let response = timeout_at(first_due, request.send()).await.map_err(|_| late())?;
        let response = accepted(response.map_err(unreachable)?).await?;
        let reading = Reading {
            is_sse: self.protocol.is_sse(),
            deadlines: self.settings.deadlines,
            first_due,
            reader: self.protocol.reader(&call),
        };
        let deltas = deltas(response.bytes_stream(), reading);
        Ok(Reply { deltas: if self.settings.abort { held(deltas, hold) } else { to_its_end(deltas, hold) }, prefill })
    }

    /// Whether it could be asked for these vectors. Sends nothing.
    pub fn check_embed(&self, request: &EmbedRequest, model: &str) -> Result<(), UpstreamError> {
        vectors::call(&self.settings, model, request, &request.inputs).map(drop)
    }

    /// Has a model in memory, or out of it if `keep_alive` is nothing, as far as its kind lets others decide that.
    pub async fn keep(
        &self,
        model: &str,
        keep_alive: Option<KeepAlive>,
        request_id: &str,
    ) -> Result<(), UpstreamError> {
        let Some(call) = memory::call(self.settings.kind, model, keep_alive)? else { return Ok(()) };
        let asked = self.whole(self.post(&self.base, &call, request_id), MAX_WHOLE_BYTES);
        timeout(self.settings.deadlines.first, asked).await.map_err(|_| late())?.map(drop)
    }

    /// Whether it tells tokens. Sends nothing.
    pub fn check_tokens(&self, question: TokenQuestion<'_>, model: &str) -> Result<(), UpstreamError> {
        tokens::call(self.settings.kind, model, question).map(drop)
    }

    /// Vectors of texts. They are asked for in batches, one after another.
    pub async fn embed(
        &self,
        request: &EmbedRequest,
        model: &str,
        request_id: &str,
    ) -> Result<TextVectors, UpstreamError> {
        let mut all = TextVectors { vectors: Vec::with_capacity(request.inputs.len()), n_tokens: Some(0) };
        for batch in request.inputs.chunks(vectors::BATCH) {
            let call = vectors::call(&self.settings, model, request, batch)?;
            let asked = self.whole(self.post(&self.base, &call, request_id), MAX_VECTORS_BYTES);
            let reply = timeout(self.settings.deadlines.first, asked).await.map_err(|_| late())??;
            let read = vectors::read(self.settings.kind, &reply, batch.len())?;
            all.vectors.extend(read.vectors);
            all.n_tokens = all.n_tokens.zip(read.n_tokens).map(|(sum, n)| sum.saturating_add(n));
        }
        Ok(all)
    }

    /// A text's tokens, the text of tokens, or a chat's prompt, from kinds that tell.
    pub async fn tokens(
        &self,
        question: TokenQuestion<'_>,
        model: &str,
        request_id: &str,
    ) -> Result<TokenAnswer, UpstreamError> {
        let (TokenQuestion::TokenizeChat(chat), Kind::LlamaServer) = (question, self.settings.kind) else {
            return self.tokens_at_once(question, model, request_id).await;
        };
        // It has no route for both.
        let prompt = self.tokens_at_once(TokenQuestion::Render(chat), model, request_id).await?;
        let TokenAnswer::Text(text) = prompt else { return Ok(prompt) };
        let text = TokenizeRequest { text, add_special: true, parse_special: true };
        self.tokens_at_once(TokenQuestion::Tokenize(&text), model, request_id).await
    }

    async fn tokens_at_once(
        &self,
        question: TokenQuestion<'_>,
        model: &str,
        request_id: &str,
    ) -> Result<TokenAnswer, UpstreamError> {
        let (path, body) = tokens::call(self.settings.kind, model, question)?;
        let request = self.client.post(format!("{}/{path}", self.root())).headers(self.headers.clone());
        let asked =
            self.whole(request.header("x-request-id", &*self.their_id(request_id)).json(&body), MAX_VECTORS_BYTES);
        let reply = timeout(self.settings.deadlines.first, asked).await.map_err(|_| late())??;
        tokens::read(question, &reply)
    }

    /// Where routes lie beside the version of OpenAI's dialect.
    fn root(&self) -> &str {
        self.base.strip_suffix("/v1").unwrap_or(&self.base)
    }

    fn call(&self, asked: &Asked<'_>) -> Result<Call, UpstreamError> {
        let Asked { request, choice, model, .. } = *asked;
        self.protocol.call(&Wish { request, choice, model, settings: &self.settings })
    }

    /// As which the upstream is told of a request.
    fn their_id<'a>(&self, request_id: &'a str) -> Cow<'a, str> {
        request_id::of(self.settings.kind, request_id)
    }

    fn post(&self, base: &str, call: &Call, request_id: &str) -> RequestBuilder {
        let request = self.client.post(format!("{base}/{}", call.path)).headers(self.headers.clone());
        let request = request.header("x-request-id", &*self.their_id(request_id)).json(&call.body);
        match trace::traceparent(&tracing::Span::current()) {
            Some(parent) => request.header(trace::TRACEPARENT, parent),
            None => request,
        }
    }

    /// Has a prefill server compute the prompt, if there are any; they take turns.
    async fn prefill(&self, call: &mut Call, request_id: &str, due: Instant) -> Option<Result<(), &'static str>> {
        let servers = &self.settings.prefill;
        let turn = self.next_prefill.fetch_add(1, Ordering::Relaxed);
        let server = servers.get(turn.checked_rem(servers.len())?)?;
        let request = self.post(&Kind::Vllm.base(server), &vllm::prefill_call(call), request_id);
        let outcome = timeout_at(due, self.whole(request, MAX_WHOLE_BYTES)).await.unwrap_or_else(|_| Err(late()));
        Some(match outcome {
            Ok(reply) if vllm::with_kv_of(call, &reply) => Ok(()),
            Ok(_) => Err("no_kv_transfer_params"),
            Err(error) => {
                tracing::info!(upstream = self.settings.name, reason = error.reason(), "a prefill server failed");
                // Its words may quote the prompt.
                tracing::debug!(upstream = self.settings.name, %error, "why it failed");
                Err("prefill_failed")
            }
        })
    }

    /// A reply in one piece.
    async fn whole(&self, request: RequestBuilder, max_bytes: usize) -> Result<Value, UpstreamError> {
        let body = bounded(accepted(request.send().await.map_err(unreachable)?).await?, max_bytes).await?;
        serde_json::from_slice(&body).map_err(UpstreamError::malformed)
    }
}

/// A reply that is closed when nobody reads it any more.
fn held(mut deltas: TextStream, hold: impl Send + Sync + 'static) -> TextStream {
    let deltas = async_stream::stream! {
        let _hold = hold;
        while let Some(delta) = deltas.next().await {
            yield delta;
        }
    };
    deltas.boxed()
}

/// A reply that is read to its end, even if nobody listens any more.
fn to_its_end(mut deltas: TextStream, hold: impl Send + Sync + 'static) -> TextStream {
    let (sender, receiver) = mpsc::channel(DELTAS_AHEAD);
    tokio::spawn(async move {
        let _hold = hold;
        while let Some(delta) = deltas.next().await {
            // Whoever listened has left: the rest is read all the same.
            let _ = sender.send(delta).await;
        }
    });
    ReceiverStream::new(receiver).boxed()
}

/// A successful response, or what the upstream says instead.
async fn accepted(response: Response) -> Result<Response, UpstreamError> {
    if response.status().is_success() {
        return Ok(response);
    }
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let body = timeout(ERROR_TIMEOUT, bounded(response, MAX_WHOLE_BYTES)).await;
    Err(refusal::of_status(status, &headers, &body.ok().and_then(Result::ok).unwrap_or_default()))
}

async fn bounded(response: Response, max_bytes: usize) -> Result<Vec<u8>, UpstreamError> {
    let (mut body, mut chunks) = (Vec::new(), response.bytes_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(unreachable)?;
        if body.len() + chunk.len() > max_bytes {
            return Err(UpstreamError::malformed(format_args!("a reply of more than {max_bytes} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn unreachable(error: reqwest::Error) -> UpstreamError {
    let reason = if error.is_timeout() && !error.is_connect() { "timed_out" } else { "unreachable" };
    UpstreamError::failed(reason, trouble::describe(&error))
}

fn late() -> UpstreamError {
    UpstreamError::failed("timed_out", "there was no reply in time")
}
