//! The client of one upstream.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_schemas::embed::EmbedRequest;
use baton_schemas::json_values::count_values;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

use super::protocol::Protocol;
use super::stream::{ReplyReading, deltas};
use super::{
    ApiCall, ApiPath, ChoiceRequest, ModelInfoCall, PrefillFailure, TextStream, TextVectors, TokenAnswer,
    TokenQuestion, UpstreamError, UpstreamFailure, UpstreamSettings, refusal, tokens, vectors,
};
use crate::remote::call_failure;
use crate::transport::{Transport, explain};
use crate::{long_json, trace};

/// Idle connections that are kept.
const MAX_IDLE_CONNECTIONS: usize = 16;

/// The largest reply in one piece: a list of models, an error, a prefill server's answer.
const MAX_WHOLE_BYTES: usize = 4 << 20;

/// The largest reply with a batch of vectors, as numbers in text, or with tokens.
const MAX_VECTORS_BYTES: usize = 64 << 20;

/// The most values of a reply in one piece: 32 vectors of 32,000 numbers. Each takes about 70 bytes.
const MAX_VALUES: usize = 1 << 20;

/// The deadline of a list of models, or of a model's description.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of an error's body.
const ERROR_TIMEOUT: Duration = Duration::from_secs(5);

/// Deltas that are buffered of a reply that must be read to its end.
const DELTAS_AHEAD: usize = 64;

/// The client of one upstream. It sends nothing by itself.
#[derive(Debug)]
pub struct Upstream {
    settings: UpstreamSettings,
    client: Client,
    base: String,
    headers: HeaderMap,
    protocol: &'static dyn Protocol,
    next_prefill: AtomicUsize,
}

/// A reply whose head has come.
pub struct UpstreamReply {
    pub deltas: TextStream,
    /// `Ok` if a prefill server computed the prompt. `None`: no prefill server is configured.
    pub prefill: Option<Result<(), PrefillFailure>>,
}

impl Upstream {
    /// A client with the certificates and permissions of `transport`. Errors, for the operator: a header is invalid, or
    /// no client can be made.
    pub fn new(settings: UpstreamSettings, transport: &Transport) -> Result<Upstream, String> {
        let builder = transport.client().connect_timeout(settings.deadlines.connect);
        let client = builder.pool_max_idle_per_host(MAX_IDLE_CONNECTIONS).build().map_err(|e| explain(&e))?;
        let mut headers = HeaderMap::new();
        let key = settings.key.iter().map(|key| ("authorization".to_owned(), format!("Bearer {key}")));
        for (name, value) in key.chain(settings.headers.iter().cloned()) {
            let header = HeaderName::try_from(&name).map_err(|_| format!("{name:?} is not a valid header name"))?;
            let mut value =
                HeaderValue::try_from(value).map_err(|_| format!("the value of {name} is not a valid header value"))?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        let protocol = settings.kind.protocol();
        let base = base(&settings.url, protocol);
        Ok(Upstream { settings, client, base, headers, protocol, next_prefill: AtomicUsize::new(0) })
    }

    /// The settings that it was made from.
    pub fn settings(&self) -> &UpstreamSettings {
        &self.settings
    }

    /// The names of the models that it lists. The list may be empty.
    pub async fn models(&self) -> Result<Vec<String>, UpstreamError> {
        let request = self.client.get(self.url(self.protocol.models_path())).headers(self.headers.clone());
        let list = self.whole(request.timeout(LIST_TIMEOUT), MAX_WHOLE_BYTES).await?;
        Ok(self.protocol.model_names(&list))
    }

    /// The upstream's description of a model. Empty for a kind that describes none.
    pub async fn model_info(&self, model: &str, request_id: &str) -> Result<UpstreamModelInfo, UpstreamError> {
        let request = match self.protocol.model_info_call(model) {
            None => return Ok(UpstreamModelInfo::default()),
            Some(ModelInfoCall::Get(path)) => self.client.get(self.url(path)),
            Some(ModelInfoCall::GetModel(path, model)) => self.client.get(self.url(path)).query(&[("model", model)]),
            Some(ModelInfoCall::Post(call)) => self.client.post(self.url(call.path)).json(&call.body),
        };
        let request = self.with_headers(request, request_id).timeout(LIST_TIMEOUT);
        let reply = self.whole(request, MAX_WHOLE_BYTES).await?;
        Ok(self.protocol.read_model_info(model, &reply))
    }

    /// Checks that the upstream takes this request. Sends nothing.
    pub fn check(&self, asked: &ChoiceRequest<'_>) -> Result<(), UpstreamError> {
        self.protocol.generate_call(asked, &self.settings).map(drop)
    }

    /// Requests one choice. Returns with the reply's head. `hold` lives until the upstream has stopped working on it.
    pub async fn generate(
        &self,
        asked: &ChoiceRequest<'_>,
        hold: impl Send + Sync + 'static,
    ) -> Result<UpstreamReply, UpstreamError> {
        let mut call = self.protocol.generate_call(asked, &self.settings)?;
        let first = self.settings.deadlines.first;
        // A silent prefill server must leave time to do without it.
        let prefill = self.prefill(&mut call, asked.request_id, Instant::now() + first / 2).await;
        let first_due = Instant::now() + first;
        let request = self.post(&self.base, &call, asked.request_id);
        let response = timeout_at(first_due, request.send()).await.map_err(|_| UpstreamError::late())?;
        let response = accepted(response.map_err(unreachable)?).await?;
        let reading = ReplyReading {
            framing: self.protocol.framing(),
            deadlines: self.settings.deadlines,
            first_due,
            reader: self.protocol.delta_reader(&call),
        };
        let deltas = deltas(response.bytes_stream(), reading);
        let deltas = if self.settings.abort { held(deltas, hold) } else { read_to_its_end(deltas, hold) };
        Ok(UpstreamReply { deltas, prefill })
    }

    /// Checks that the upstream takes this request for vectors. Sends nothing.
    pub fn check_embed(&self, request: &EmbedRequest, model: &str) -> Result<(), UpstreamError> {
        self.protocol.embed_call(&self.settings, model, request, &request.inputs).map(drop)
    }

    /// Loads a model, or unloads it if `keep_alive` is zero. Does nothing for a kind that has its models in memory for
    /// as long as it runs. Errors: such a model cannot be unloaded, or the upstream fails.
    pub async fn keep(
        &self,
        model: &str,
        keep_alive: Option<KeepAlive>,
        request_id: &str,
    ) -> Result<(), UpstreamError> {
        let Some(call) = self.protocol.keep_call(&self.settings, model, keep_alive)? else { return Ok(()) };
        self.ask(&call, request_id, MAX_WHOLE_BYTES).await.map(drop)
    }

    /// Checks that the upstream has a route for this question. Sends nothing.
    pub fn check_tokens(&self, question: TokenQuestion<'_>, model: &str) -> Result<(), UpstreamError> {
        self.protocol.token_call(&self.settings, model, question).map(drop)
    }

    /// Vectors of texts. They are requested in batches, one after another.
    pub async fn embed(
        &self,
        request: &EmbedRequest,
        model: &str,
        request_id: &str,
    ) -> Result<TextVectors, UpstreamError> {
        let mut all = TextVectors { vectors: Vec::with_capacity(request.inputs.len()), n_tokens: Some(0) };
        for batch in request.inputs.chunks(vectors::BATCH) {
            let call = self.protocol.embed_call(&self.settings, model, request, batch)?;
            let reply = self.ask(&call, request_id, MAX_VECTORS_BYTES).await?;
            let read = self.protocol.read_embed_reply(&reply, batch.len())?;
            all.vectors.extend(read.vectors);
            all.n_tokens = all.n_tokens.zip(read.n_tokens).map(|(sum, n)| sum.saturating_add(n));
        }
        Ok(all)
    }

    /// The answer to a question about tokens.
    pub async fn tokens(
        &self,
        question: TokenQuestion<'_>,
        model: &str,
        request_id: &str,
    ) -> Result<TokenAnswer, UpstreamError> {
        let TokenQuestion::TokenizeChat(chat) = question else {
            return self.tokens_at_once(question, model, request_id).await;
        };
        if !self.protocol.renders_before_tokenizing() {
            return self.tokens_at_once(question, model, request_id).await;
        }
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
        let call = self.protocol.token_call(&self.settings, model, question)?;
        tokens::read(question, &self.ask(&call, request_id, MAX_VECTORS_BYTES).await?)
    }

    fn url(&self, path: ApiPath) -> String {
        url(&self.base, path)
    }

    fn with_headers(&self, request: RequestBuilder, request_id: &str) -> RequestBuilder {
        let request_id = self.protocol.request_id(request_id);
        let request = request.headers(self.headers.clone()).header("x-request-id", &*request_id);
        match trace::traceparent(&tracing::Span::current()) {
            Some(parent) => request.header(trace::TRACEPARENT, parent),
            None => request,
        }
    }

    fn post(&self, base: &str, call: &ApiCall, request_id: &str) -> RequestBuilder {
        self.with_headers(self.client.post(url(base, call.path)).json(&call.body), request_id)
    }

    /// Sends a call whose reply comes in one piece.
    async fn ask(&self, call: &ApiCall, request_id: &str, max_bytes: usize) -> Result<Value, UpstreamError> {
        let reply = self.whole(self.post(&self.base, call, request_id), max_bytes);
        timeout(self.settings.deadlines.first, reply).await.map_err(|_| UpstreamError::late())?
    }

    /// Has a prefill server compute the prompt, if there are any; they take turns.
    async fn prefill(&self, call: &mut ApiCall, request_id: &str, due: Instant) -> Option<Result<(), PrefillFailure>> {
        let steps = self.protocol.prefill_steps()?;
        let servers = &self.settings.prefill;
        let turn = self.next_prefill.fetch_add(1, Ordering::Relaxed);
        let server = servers.get(turn.checked_rem(servers.len())?)?;
        let request = self.post(&base(server, self.protocol), &(steps.call)(call), request_id);
        let outcome = timeout_at(due, self.whole(request, MAX_WHOLE_BYTES)).await;
        Some(match outcome.unwrap_or_else(|_| Err(UpstreamError::late())) {
            Ok(reply) if (steps.add_kv)(call, &reply) => Ok(()),
            Ok(_) => Err(PrefillFailure::NoKvTransferParams),
            Err(error) => {
                tracing::info!(
                    upstream = self.settings.name,
                    reason = error.as_str(),
                    "a prefill server failed; the upstream computes the prompt itself"
                );
                // The server's message may quote the prompt.
                tracing::debug!(upstream = self.settings.name, %error, "the prefill server's error");
                Err(PrefillFailure::Failed)
            }
        })
    }

    /// A reply in one piece.
    async fn whole(&self, request: RequestBuilder, max_bytes: usize) -> Result<Value, UpstreamError> {
        let body = bounded(accepted(request.send().await.map_err(unreachable)?).await?, max_bytes).await?;
        long_json::parsed(body, parsed).await.map_err(UpstreamError::malformed)?
    }
}

fn parsed(body: &[u8]) -> Result<Value, UpstreamError> {
    if count_values(body) > MAX_VALUES {
        return Err(UpstreamError::malformed(format_args!("a reply of more than {MAX_VALUES} values")));
    }
    serde_json::from_slice(body).map_err(UpstreamError::malformed)
}

/// Closes the connection when the stream is dropped.
fn held(mut deltas: TextStream, hold: impl Send + Sync + 'static) -> TextStream {
    let deltas = async_stream::stream! {
        let _hold = hold;
        while let Some(delta) = deltas.next().await {
            yield delta;
        }
    };
    deltas.boxed()
}

/// Reads the reply to its end, even after the stream is dropped.
fn read_to_its_end(mut deltas: TextStream, hold: impl Send + Sync + 'static) -> TextStream {
    let (sender, receiver) = mpsc::channel(DELTAS_AHEAD);
    tokio::spawn(async move {
        let _hold = hold;
        while let Some(delta) = deltas.next().await {
            // An error says that the client has left: the rest is read all the same.
            let _ = sender.send(delta).await;
        }
    });
    ReceiverStream::new(receiver).boxed()
}

/// A successful response, or the upstream's error.
async fn accepted(response: Response) -> Result<Response, UpstreamError> {
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    let body = timeout(ERROR_TIMEOUT, bounded(response, MAX_WHOLE_BYTES)).await;
    Err(refusal::of_status(status, &headers, &body.ok().and_then(Result::ok).unwrap_or_default()))
}

async fn bounded(response: Response, max_bytes: usize) -> Result<Vec<u8>, UpstreamError> {
    let mut body = Vec::new();
    let mut chunks = response.bytes_stream();
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
    let is_late = error.is_timeout() && !error.is_connect();
    let failure = if is_late { UpstreamFailure::TimedOut } else { UpstreamFailure::Unreachable };
    UpstreamError::failed(failure, call_failure::describe(&error))
}

/// The address of a server's API, where the configured URL has no path.
fn base(url: &str, protocol: &dyn Protocol) -> String {
    let url = url.trim_end_matches('/');
    let is_bare = reqwest::Url::parse(url).is_ok_and(|url| url.path() == "/");
    format!("{url}{}", if is_bare { protocol.api_root() } else { "" })
}

fn url(base: &str, path: ApiPath) -> String {
    match path {
        ApiPath::Api(path) => format!("{base}/{path}"),
        ApiPath::Root(path) => format!("{}/{path}", base.strip_suffix("/v1").unwrap_or(base)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_of_countless_values_is_malformed() {
        let array = |n: usize| format!("[0{}]", ",0".repeat(n - 1));
        assert!(parsed(array(MAX_VALUES / 2).as_bytes()).is_ok());
        assert!(parsed(array(MAX_VALUES + 1).as_bytes()).is_err());
    }
}
