//! The client of one upstream.

use std::time::Duration;

use baton_link::transport::Transport;
use baton_link::{long_json, trace};
use baton_schemas::embed::EmbedRequest;
use baton_schemas::generate::PromptLogprobs;
use baton_schemas::json_values::count_values;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

use crate::connections::{BodyError, Call, CallConnections, Reply, ReplyBody, X_REQUEST_ID};
use crate::kinds::{protocol::Protocol, tokens};
use crate::reply::foreign::tree;
use crate::reply::stream::{Framing, MAX_WHOLE_BYTES, ReplyReading, deltas};
use crate::reply::{model_list, refusal, vectors};
use crate::{
    ApiCall, ApiPath, ChoiceRequest, ModelInfoCall, ModelListing, PrefillFailure, PreparedChoice, PromptCount,
    ReceivedVectors, ReplyDelivery, TextStream, TokenAnswer, TokenQuestion, UpstreamError, UpstreamFailure,
    UpstreamSettings,
};

/// Connections beyond those of `max_concurrent` choices: for the lists and descriptions of models.
const SPARE_CONNECTIONS: usize = 2;

/// The largest reply with a batch of vectors, as numbers in text, or with tokens.
const MAX_VECTORS_BYTES: usize = 64 << 20;

/// The most values of a reply in one piece: 32 vectors of 32,000 numbers. Each takes about 70 bytes.
const MAX_VALUES: usize = 1 << 20;

/// The deadline of a list of models, or of a model's description.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of a prefill server's probe: a cold one on a processor needs this long for its first token.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The deadline of an error's body.
const ERROR_TIMEOUT: Duration = Duration::from_secs(5);

/// Deltas that are buffered of a reply that must be read to its end.
const DELTAS_AHEAD: usize = 64;

/// The client of one upstream. It sends nothing by itself.
#[derive(Debug)]
pub struct Upstream {
    settings: UpstreamSettings,
    server: ApiServer,
    /// Servers that compute prompts for it.
    prefill_servers: Vec<ApiServer>,
    headers: HeaderMap,
    protocol: &'static dyn Protocol,
}

/// A server, and the path of its API.
#[derive(Debug)]
struct ApiServer {
    connections: CallConnections,
    /// The path that API paths begin with, without a slash at its end.
    root: String,
}

/// A prompt that a prefill server has computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefilledPrompt {
    /// Its tokens, if the server reports them.
    pub n_tokens: Option<u32>,
}

impl Upstream {
    /// A client with the certificates and permissions of `transport`. Errors, for the operator: a header is invalid, or
    /// no client can be made.
    pub fn new(settings: UpstreamSettings, transport: &Transport) -> Result<Upstream, String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
        let key = settings.key.iter().map(|key| ("authorization".to_owned(), format!("Bearer {key}")));
        for (name, value) in key.chain(settings.headers.iter().cloned()) {
            let header = HeaderName::try_from(&name).map_err(|_| format!("{name:?} is not a valid header name"))?;
            let mut value =
                HeaderValue::try_from(value).map_err(|_| format!("the value of {name} is not a valid header value"))?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        let protocol = settings.kind.protocol();
        let server = |url: &String| ApiServer::new(url, &settings, transport);
        let prefill_servers = settings.prefill.iter().map(server).collect::<Result<_, _>>()?;
        let server = server(&settings.url)?;
        Ok(Upstream { settings, server, prefill_servers, headers, protocol })
    }

    /// The settings that it was made from.
    pub fn settings(&self) -> &UpstreamSettings {
        &self.settings
    }

    /// Closes the connections to prefill servers that were idle for too long, as calls to them do, too.
    pub fn close_unused(&self) {
        self.prefill_servers.iter().for_each(|server| server.connections.close_unused());
    }

    /// The models that it lists. The list may be empty.
    pub async fn models(&self) -> Result<ModelListing, UpstreamError> {
        let path = self.protocol.models_path();
        model_list::read(&in_time(LIST_TIMEOUT, self.get(path, None, self.headers.clone())).await?)
    }

    /// The upstream's description of a model. Empty for a kind that describes none.
    pub async fn model_info(&self, model: &str, request_id: &str) -> Result<UpstreamModelInfo, UpstreamError> {
        let Some(call) = self.protocol.model_info_call(model) else { return Ok(UpstreamModelInfo::default()) };
        let reply = async {
            match call {
                ModelInfoCall::Get(path) => self.get(path, None, self.headers(request_id)).await,
                ModelInfoCall::GetModel(path, model) => self.get(path, Some(model), self.headers(request_id)).await,
                ModelInfoCall::Post(call) => self.ask(call, request_id, MAX_WHOLE_BYTES).await,
            }
        };
        Ok(self.protocol.read_model_info(model, &in_time(LIST_TIMEOUT, reply).await?))
    }

    /// Prepares the call for one choice. Sends nothing. Errors: the upstream does not take this request.
    pub fn prepare(&self, asked: &ChoiceRequest<'_>) -> Result<PreparedChoice, UpstreamError> {
        if let Some(PromptLogprobs { field, .. }) = asked.request.prompt_logprobs {
            return Err(UpstreamError::Unsupported { field });
        }
        self.protocol.generate_call(asked, &self.settings).map(PreparedChoice)
    }

    /// Has the upstream count the tokens of the choice's prompt. `None`: it does not.
    pub async fn count_prompt(
        &self,
        PreparedChoice(call): &PreparedChoice,
        request_id: &str,
    ) -> Result<Option<PromptCount>, UpstreamError> {
        let Some(steps) = self.protocol.count_steps() else { return Ok(None) };
        Ok((steps.read)(&self.ask((steps.call)(call), request_id, MAX_VECTORS_BYTES).await?))
    }

    /// Has the prefill server of this index in the settings compute the choice's prompt. From then on the choice says
    /// where the KV cache lies. `request_id` must be that of the choice; `due` must leave time to do without the server.
    pub async fn prefill(
        &self,
        prefill_server: usize,
        PreparedChoice(call): &mut PreparedChoice,
        request_id: &str,
        due: Instant,
    ) -> Result<PrefilledPrompt, PrefillFailure> {
        let Some((steps, server)) = self.protocol.prefill_steps().zip(self.prefill_servers.get(prefill_server)) else {
            return Err(PrefillFailure::Failed);
        };
        let reply = self.ask_server(server, (steps.call)(call), request_id, MAX_WHOLE_BYTES);
        match timeout_at(due, reply).await.unwrap_or_else(|_| Err(UpstreamError::late())) {
            Ok(reply) if (steps.add_kv)(call, &reply) => Ok(PrefilledPrompt { n_tokens: (steps.n_tokens)(&reply) }),
            Ok(_) => Err(PrefillFailure::NoKvTransferParams),
            Err(error) => {
                // The server's message may quote the prompt.
                tracing::debug!(upstream = self.settings.name, %error, "the prefill server's error");
                Err(match error {
                    UpstreamError::Failed { failure: UpstreamFailure::TimedOut, .. } => PrefillFailure::TimedOut,
                    UpstreamError::Failed { failure: UpstreamFailure::ServerError, .. } => PrefillFailure::ServerError,
                    // It was not asked.
                    UpstreamError::Failed { failure: UpstreamFailure::NoResources, .. } => PrefillFailure::Busy,
                    UpstreamError::Failed { .. } | UpstreamError::NoRoute { .. } => PrefillFailure::Failed,
                    UpstreamError::Refused(_) | UpstreamError::Unsupported { .. } | UpstreamError::TooLong { .. } => {
                        PrefillFailure::Refused
                    }
                    UpstreamError::Busy { .. } => PrefillFailure::Busy,
                })
            }
        }
    }

    /// Asks a prefill server for one token of this model. Returns true if it answers, be it that it has no such model. Its
    /// list of models would not show that it computes: a server may send that while its engine hangs.
    pub async fn prefill_server_computes(&self, prefill_server: usize, model: &str) -> bool {
        let Some((steps, server)) = self.protocol.prefill_steps().zip(self.prefill_servers.get(prefill_server)) else {
            return false;
        };
        let request_id = format!("probe-{:016x}", rand::random::<u64>());
        let probe = self.ask_server(server, (steps.probe)(model), &request_id, MAX_WHOLE_BYTES);
        match in_time(PROBE_TIMEOUT.min(self.settings.deadlines.first), probe).await {
            Ok(_)
            | Err(
                UpstreamError::Refused(_)
                | UpstreamError::Unsupported { .. }
                | UpstreamError::NoRoute { .. }
                | UpstreamError::TooLong { .. }
                | UpstreamError::Failed { failure: UpstreamFailure::ModelMissing, .. },
            ) => true,
            Err(UpstreamError::Busy { .. } | UpstreamError::Failed { .. }) => false,
        }
    }

    /// Requests one choice. Returns with the reply's head. `request_id` is sent as `x-request-id`. The first delta must come
    /// until `first_due`. `hold` lives until the upstream has stopped working on the choice.
    pub async fn generate(
        &self,
        PreparedChoice(call): PreparedChoice,
        request_id: &str,
        first_due: Instant,
        hold: impl Send + Sync + 'static,
    ) -> Result<TextStream, UpstreamError> {
        let reader = self.protocol.delta_reader(&call);
        let form = call.form;
        let route = call.path.route();
        let reply = async {
            let call = self.post(&self.server, call, request_id).await?;
            self.server.connections.send(&call).await
        };
        let reply = timeout_at(first_due, reply).await.map_err(|_| UpstreamError::late())??;
        let reply = accepted(reply, route).await?;
        let framing = match self.protocol.framing() {
            Framing::ServerSentEvents if form_of(&reply.headers, form) == ReplyDelivery::Whole => Framing::Whole,
            framing => framing,
        };
        let reading = ReplyReading { framing, deadlines: self.settings.deadlines, first_due, reader };
        let deltas = deltas(reply.body, reading, hold, ReplyBody::finish);
        Ok(if self.settings.abort { deltas } else { read_to_its_end(deltas) })
    }

    /// Checks that the upstream takes this request for vectors or scores. Sends nothing.
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
        self.ask(call, request_id, MAX_WHOLE_BYTES).await.map(drop)
    }

    /// Checks that the upstream has a route for this question. Sends nothing.
    pub fn check_tokens(&self, question: TokenQuestion<'_>, model: &str) -> Result<(), UpstreamError> {
        self.protocol.token_call(&self.settings, model, question).map(drop)
    }

    /// Vectors of texts, or scores of documents. They are requested in batches, one after another.
    pub async fn embed(
        &self,
        request: &EmbedRequest,
        model: &str,
        request_id: &str,
    ) -> Result<ReceivedVectors, UpstreamError> {
        let mut all = ReceivedVectors { vectors: Vec::with_capacity(request.inputs.len()), n_tokens: Some(0) };
        for batch in request.inputs.chunks(vectors::BATCH) {
            let call = self.protocol.embed_call(&self.settings, model, request, batch)?;
            let reply = self.ask(call, request_id, MAX_VECTORS_BYTES).await?;
            let read = self.protocol.read_embed_reply(&request.task, &reply, batch.len())?;
            all.vectors.extend(read.vectors);
            all.n_tokens = all.n_tokens.zip(read.n_tokens).map(|(sum, n)| sum.saturating_add(n));
        }
        all.check_lengths().map(|()| all)
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
        let text =
            TokenizeRequest { text: text.into(), add_special: true, parse_special: true, key: Default::default() };
        self.tokens_at_once(TokenQuestion::Tokenize(&text), model, request_id).await
    }

    async fn tokens_at_once(
        &self,
        question: TokenQuestion<'_>,
        model: &str,
        request_id: &str,
    ) -> Result<TokenAnswer, UpstreamError> {
        let call = self.protocol.token_call(&self.settings, model, question)?;
        tokens::read(question, &self.ask(call, request_id, MAX_VECTORS_BYTES).await?)
    }

    /// The headers of a call.
    fn headers(&self, request_id: &str) -> HeaderMap {
        let mut headers = self.headers.clone();
        // A request id is checked where it comes in, and what is derived from it has no other characters.
        if let Ok(id) = HeaderValue::try_from(&*self.protocol.request_id(request_id)) {
            headers.insert(X_REQUEST_ID, id);
        }
        let parent =
            trace::traceparent(&tracing::Span::current()).and_then(|parent| HeaderValue::try_from(parent).ok());
        if let Some(parent) = parent {
            headers.insert(HeaderName::from_static(trace::TRACEPARENT), parent);
        }
        headers
    }

    /// The reply to a GET request, with the parameter `model` if there is one.
    async fn get(&self, path: ApiPath, model: Option<&str>, headers: HeaderMap) -> Result<Value, UpstreamError> {
        let mut target = self.server.path(path);
        if let Some(model) = model {
            let query = form_urlencoded::Serializer::new(String::new()).append_pair("model", model).finish();
            target = format!("{target}?{query}");
        }
        let call = Call { method: Method::GET, path: target, headers, body: Bytes::new() };
        whole(&self.server, &call, MAX_WHOLE_BYTES, path.route()).await
    }

    async fn post(&self, server: &ApiServer, call: ApiCall, request_id: &str) -> Result<Call, UpstreamError> {
        let mut headers = self.headers(request_id);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let path = server.path(call.path);
        let body = long_json::written(call.body).await.map_err(UpstreamError::malformed)?;
        Ok(Call { method: Method::POST, path, headers, body: body.into() })
    }

    /// Sends a call whose reply comes in one piece.
    async fn ask(&self, call: ApiCall, request_id: &str, max_bytes: usize) -> Result<Value, UpstreamError> {
        in_time(self.settings.deadlines.first, self.ask_server(&self.server, call, request_id, max_bytes)).await
    }

    async fn ask_server(
        &self,
        server: &ApiServer,
        call: ApiCall,
        request_id: &str,
        max_bytes: usize,
    ) -> Result<Value, UpstreamError> {
        let route = call.path.route();
        let call = self.post(server, call, request_id).await?;
        whole(server, &call, max_bytes, route).await
    }
}

impl ApiServer {
    fn new(url: &str, settings: &UpstreamSettings, transport: &Transport) -> Result<ApiServer, String> {
        let n_calls = settings.max_concurrent.saturating_add(SPARE_CONNECTIONS);
        let path =
            reqwest::Url::parse(url).map_err(|error| format!("the URL is not valid: {error}"))?.path().to_owned();
        let root = match path.trim_end_matches('/') {
            "" => settings.kind.protocol().api_root(),
            root => root,
        };
        let connections = CallConnections::new(url, transport, settings.deadlines.connect, n_calls)?;
        Ok(ApiServer { connections, root: root.to_owned() })
    }

    fn path(&self, path: ApiPath) -> String {
        match path {
            ApiPath::Api(path) => format!("{}/{path}", self.root),
            ApiPath::Root(path) => format!("{}/{path}", self.root.strip_suffix("/v1").unwrap_or(&self.root)),
        }
    }
}

/// A reply of `route` in one piece.
async fn whole(server: &ApiServer, call: &Call, max_bytes: usize, route: &'static str) -> Result<Value, UpstreamError> {
    let body = bounded(accepted(server.connections.send(call).await?, route).await?, max_bytes).await?;
    long_json::parsed(body, parsed).await.map_err(UpstreamError::malformed)?
}

/// The result of a call that must end within this time.
async fn in_time<T>(limit: Duration, call: impl Future<Output = Result<T, UpstreamError>>) -> Result<T, UpstreamError> {
    timeout(limit, call).await.map_err(|_| UpstreamError::late())?
}

fn parsed(body: &[u8]) -> Result<Value, UpstreamError> {
    if count_values(body) > MAX_VALUES {
        return Err(UpstreamError::malformed(format_args!("a reply of more than {MAX_VALUES} values")));
    }
    tree(body).map_err(UpstreamError::malformed)
}

/// Reads the reply to its end, even after the stream is dropped.
fn read_to_its_end(mut deltas: TextStream) -> TextStream {
    let (sender, receiver) = mpsc::channel(DELTAS_AHEAD);
    tokio::spawn(async move {
        while let Some(delta) = deltas.next().await {
            // An error says that the client has left: the rest is read all the same.
            let _ = sender.send(delta).await;
        }
    });
    ReceiverStream::new(receiver).boxed()
}

/// A successful reply of `route`, or the upstream's error.
async fn accepted(reply: Reply, route: &'static str) -> Result<Reply, UpstreamError> {
    if reply.status.is_success() {
        return Ok(reply);
    }
    let status = reply.status.as_u16();
    let headers = reply.headers.clone();
    let body = timeout(ERROR_TIMEOUT, bounded(reply, MAX_WHOLE_BYTES)).await;
    Err(refusal::of_status(status, &headers, &body.ok().and_then(Result::ok).unwrap_or_default(), route))
}

/// The form in which a reply comes: as its head says, otherwise as it was requested.
fn form_of(headers: &HeaderMap, requested: ReplyDelivery) -> ReplyDelivery {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match kind.split(';').next().unwrap_or_default().trim() {
        kind if kind.eq_ignore_ascii_case("application/json") => ReplyDelivery::Whole,
        kind if kind.eq_ignore_ascii_case("text/event-stream") => ReplyDelivery::Streamed,
        _ => requested,
    }
}

/// Reads a body to its end, so that its connection can be used again.
async fn bounded(mut reply: Reply, max_bytes: usize) -> Result<Vec<u8>, UpstreamError> {
    let mut body = Vec::new();
    while let Some(piece) = reply.body.next().await {
        let piece = piece.map_err(BodyError::failure)?;
        if body.len() + piece.len() > max_bytes {
            return Err(UpstreamError::malformed(format_args!("a reply of more than {max_bytes} bytes")));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::UpstreamKind;
    use crate::kinds::openai::tests::settings;

    #[tokio::test]
    async fn idle_connections_to_prefill_servers_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let settings = UpstreamSettings { prefill: vec![url], ..settings(UpstreamKind::Vllm) };
        let upstream = Upstream::new(settings, &Transport::default()).unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwell").await.unwrap();
            stream.read(&mut [0; 4096]).await.unwrap()
        });
        let body = Bytes::new();
        let call = Call { method: Method::GET, path: "/".to_owned(), headers: HeaderMap::new(), body };
        let reply = upstream.prefill_servers[0].connections.send(&call).await.unwrap();
        assert_eq!(bounded(reply, 100).await.unwrap(), b"well");
        // Longer than connections are kept.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(31)).await;
        tokio::time::resume();
        upstream.close_unused();
        assert_eq!(timeout(Duration::from_secs(20), served).await.unwrap().unwrap(), 0, "the connection is closed");
    }

    #[test]
    fn a_reply_of_countless_values_is_malformed() {
        let array = |n: usize| format!("[0{}]", ",0".repeat(n - 1));
        assert!(parsed(array(MAX_VALUES / 2).as_bytes()).is_ok());
        assert!(parsed(array(MAX_VALUES + 1).as_bytes()).is_err());
    }
}
