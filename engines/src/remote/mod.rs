//! The client of the node protocol: an engine in another process.

pub(crate) mod call_failure;

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use baton_schemas::embed::{EmbedEvent, EmbedSequences};
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement};
use baton_schemas::node::{
    BASE_PATH, DetokenizedText, NodeErrorReply, NodeInfo, NodeLoad, RenderRequest, StreamLine, TokenList,
    TokenizeRequest,
};
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use futures::stream::BoxStream;
use http::header::CONTENT_TYPE;
use reqwest::{Client, Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::Span;

use crate::awake;
use crate::engine::{EmbedStream, Engine, LoadStream, SequenceStream};
use crate::lines::ByteLines;
use crate::transport::{AddressError, Transport, explain};
use crate::{long_json, trace};

/// The deadline of connecting. A node on the same machine or in the same network needs much less.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of calls for which the node computes nothing: its description, its load, measurements.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The deadline of a reply's head, and of a whole reply that is not a stream. Callers decide by the node's signs of
/// life how long to wait; this deadline only ends calls that would never end. It equals the default of `max_ms` in an
/// endpoint's deadlines.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// The longest silence in a stream. The node sends a sign of life every second, so a longer silence means that it is
/// frozen or cut off.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Idle connections that are kept for each node. More are opened for a burst of streams and closed after it.
const MAX_IDLE_CONNECTIONS: usize = 32;

/// Bytes of each text of a node's error. A template's or a grammar's complaint is shorter.
const MAX_ERROR_BYTES: usize = 2 << 10;

/// Largest JSON reply that is read into memory.
const MAX_REPLY_BYTES: usize = 64 << 20;

#[derive(Debug, Clone)]
pub enum NodeAddress {
    /// The Unix socket of a child on this machine.
    Unix(PathBuf),
    /// `http://host:port` or `https://host:port`.
    Url(String),
}

/// A node's client. Cheap to share.
pub struct RemoteEngine {
    client: Client,
    base: String,
    key: String,
}

/// Why a client for an address cannot be created. For the operator.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The cluster key must not be sent there.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The HTTP client cannot be set up.
    #[error("no HTTP client: {0}")]
    Setup(String),
}

impl RemoteEngine {
    /// A client that trusts the system's certificates and uses plain HTTP only to this machine. It sends nothing yet.
    pub fn new(address: &NodeAddress, cluster_key: &str) -> Result<RemoteEngine, ClientError> {
        RemoteEngine::with_transport(address, cluster_key, &Transport::default())
    }

    /// A client with the certificates and permissions of `transport`. It sends nothing yet.
    pub fn with_transport(
        address: &NodeAddress,
        cluster_key: &str,
        transport: &Transport,
    ) -> Result<RemoteEngine, ClientError> {
        let builder = transport.client().connect_timeout(CONNECT_TIMEOUT).pool_max_idle_per_host(MAX_IDLE_CONNECTIONS);
        let (builder, base) = match address {
            NodeAddress::Unix(path) => (builder.unix_socket(path.clone()), "http://node".to_owned()),
            NodeAddress::Url(url) => {
                transport.check(url)?;
                (builder, url.trim_end_matches('/').to_owned())
            }
        };
        let client = builder.build().map_err(|e| ClientError::Setup(explain(&e)))?;
        Ok(RemoteEngine { client, base, key: cluster_key.to_owned() })
    }

    fn request(&self, method: Method, call: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{BASE_PATH}/{call}", self.base)).bearer_auth(&self.key);
        match trace::traceparent(&Span::current()) {
            Some(parent) => request.header(trace::TRACEPARENT, parent),
            None => request,
        }
    }

    async fn get<T: DeserializeOwned + Send + 'static>(&self, call: &str) -> Result<T, EngineError> {
        read(self.request(Method::GET, call).timeout(CALL_TIMEOUT).send().await).await
    }

    async fn post<T: DeserializeOwned + Send + 'static>(
        &self,
        call: &str,
        body: impl Serialize + Send + 'static,
        timeout: Duration,
    ) -> Result<T, EngineError> {
        let call = with_json(self.request(Method::POST, call), body).await?;
        read(call.timeout(timeout).send().await).await
    }
}

#[async_trait]
impl Engine for RemoteEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        self.get("info").await
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.get("load").await
    }

    async fn loads(&self) -> Result<LoadStream, EngineError> {
        let reply = head_of(self.request(Method::GET, "load/stream"), CALL_TIMEOUT).await?;
        Ok(steps(reply, SILENCE_TIMEOUT))
    }

    async fn render(&self, conversation: &Conversation) -> Result<Vec<Token>, EngineError> {
        let request = RenderRequest { conversation: conversation.clone() };
        Ok(self.post::<TokenList>("render", request, ANSWER_TIMEOUT).await?.tokens)
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        Ok(self.post::<TokenList>("tokenize", request.clone(), ANSWER_TIMEOUT).await?.tokens)
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        Ok(self
            .post::<DetokenizedText>("detokenize", TokenList { tokens: tokens.to_vec() }, ANSWER_TIMEOUT)
            .await?
            .text)
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        self.post("link", source.clone(), CALL_TIMEOUT).await
    }

    /// Dropping the stream closes the connection, which makes the node cancel the sequence.
    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.stream("generate", request, |event| matches!(event, SequenceEvent::Finished { .. })).await
    }

    /// Like [`RemoteEngine::generate`](Engine::generate).
    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        self.stream("embed", request, |event| matches!(event, EmbedEvent::Finished { .. })).await
    }
}

impl RemoteEngine {
    /// Requests a stream of events and reads it up to the last event or an error.
    async fn stream<D: DeserializeOwned + Send + 'static>(
        &self,
        call: &str,
        request: impl Serialize + Send + 'static,
        is_last: fn(&D) -> bool,
    ) -> Result<BoxStream<'static, Result<D, EngineError>>, EngineError> {
        // The head comes once the request is queued. The stream has no deadline in all, only one for silence.
        let reply = head_of(with_json(self.request(Method::POST, call), request).await?, ANSWER_TIMEOUT).await?;
        let mut steps = steps(reply, SILENCE_TIMEOUT);
        let events = async_stream::stream! {
            loop {
                let event = steps.next().await.unwrap_or_else(|| Err(EngineError::lost("the stream ended early")));
                let ends = event.as_ref().map_or(true, is_last);
                yield event;
                if ends {
                    break;
                }
            }
        };
        Ok(events.boxed())
    }
}

async fn with_json(call: RequestBuilder, body: impl Serialize + Send + 'static) -> Result<RequestBuilder, EngineError> {
    let body = long_json::written(body).await.map_err(EngineError::internal)?;
    Ok(call.header(CONTENT_TYPE, "application/json").body(body))
}

/// Sends a call and waits for the head of its reply, or for the whole error.
async fn head_of(call: RequestBuilder, deadline: Duration) -> Result<Response, EngineError> {
    let accepted = async { accepted(call.send().await).await };
    tokio::time::timeout(deadline, accepted).await.map_err(|_| timed_out())?
}

/// The values in a reply's lines, up to its end or the first error. A longer silence than `silence` is an error.
fn steps<D: DeserializeOwned + Send + 'static>(
    reply: Response,
    silence: Duration,
) -> BoxStream<'static, Result<D, EngineError>> {
    let mut lines = ByteLines::new(reply.bytes_stream());
    let steps = async_stream::stream! {
        loop {
            let line = match awake::timeout(silence, lines.next()).await {
                Ok(Ok(Some(line))) if line.is_empty() => continue,
                Ok(Ok(None)) => break,
                Ok(line) => line,
                Err(_) => Err(EngineError::lost(format!("no sign of life for {} s", silence.as_secs()))),
            };
            let step = match line.map(|line| serde_json::from_slice::<StreamLine<D>>(&line.unwrap_or_default())) {
                Ok(Ok(line)) => line.into_step().map_err(from_node),
                Ok(Err(error)) => Err(EngineError::lost(format!("unreadable event: {error}"))),
                Err(error) => Err(error),
            };
            let ends = step.is_err();
            yield step;
            if ends {
                break;
            }
        }
    };
    steps.boxed()
}

/// A successful response, or the node's error. The caller sets the deadline, since an error's body may be late.
pub(crate) async fn accepted(sent: reqwest::Result<Response>) -> Result<Response, EngineError> {
    let response = sent.map_err(unreachable)?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let body = bounded_body(response).await?;
    match serde_json::from_slice::<NodeErrorReply>(&body) {
        Ok(reply) => Err(from_node(reply.error)),
        // A node gives a reason with every refusal.
        Err(_) => Err(EngineError::lost(format!("what answers there is not a Baton node (HTTP {})", status.as_u16()))),
    }
}

async fn read<T: DeserializeOwned + Send + 'static>(sent: reqwest::Result<Response>) -> Result<T, EngineError> {
    let body = bounded_body(accepted(sent).await?).await?;
    let parsed = long_json::parsed(body, |body| serde_json::from_slice(body)).await.map_err(EngineError::internal)?;
    parsed.map_err(|e| {
        EngineError::lost(format!("what answers there is not a Baton node, or one of another version ({e})"))
    })
}

async fn bounded_body(response: Response) -> Result<Vec<u8>, EngineError> {
    let mut body = Vec::new();
    let mut chunks = response.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(unreachable)?;
        if body.len() + chunk.len() > MAX_REPLY_BYTES {
            return Err(EngineError::lost(format!("the node's reply is larger than {MAX_REPLY_BYTES} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// A node's error as far as it is believed: in few words, and nothing that only an endpoint can know.
fn from_node(error: EngineError) -> EngineError {
    match error {
        EngineError::Poison { .. } => EngineError::internal("the node claims that its engines died of this request"),
        error => error.shortened(MAX_ERROR_BYTES),
    }
}

fn unreachable(error: reqwest::Error) -> EngineError {
    // A slow node is not lost: retrying would only add to its work.
    if error.is_timeout() && !error.is_connect() {
        timed_out()
    } else {
        EngineError::lost(call_failure::describe(&error))
    }
}

fn timed_out() -> EngineError {
    EngineError::Unavailable { reason: "the engine did not answer in time".into() }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// The outcome of a tokenize call to a node that answers after some seconds.
    async fn answered_after(seconds: u64) -> Result<Vec<Token>, EngineError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = NodeAddress::Url(format!("http://{}", listener.local_addr().unwrap()));
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            // Only this wait uses paused time; the sockets need real time.
            tokio::time::pause();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            tokio::time::resume();
            let body = r#"{"tokens":[7]}"#;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + body).as_bytes()).await;
            stream
        };
        let engine = RemoteEngine::new(&address, "key").unwrap();
        let request = TokenizeRequest { text: "text".into(), add_special: false, parse_special: false };
        let (answer, _stream) = tokio::join!(engine.tokenize(&request), server);
        answer
    }

    #[test]
    fn a_nodes_error_is_believed_within_bounds() {
        let long = "ü".repeat(600 << 10);
        let EngineError::InvalidRequest { message, field } = from_node(EngineError::invalid_field(&long, &long)) else {
            panic!("the kind stays");
        };
        assert!(message.len() <= MAX_ERROR_BYTES + 3 && field.is_some_and(|field| field.len() <= MAX_ERROR_BYTES + 3));
        assert!(matches!(from_node(EngineError::Poison { n_processes: u32::MAX }), EngineError::Internal { .. }));
        let usual = EngineError::invalid_field("n", "must be at most 4");
        assert_eq!(from_node(usual.clone()), usual);
    }

    #[tokio::test]
    async fn a_late_answer_is_awaited_up_to_the_deadline() {
        assert_eq!(answered_after(300).await, Ok(vec![7]));
        assert!(matches!(answered_after(601).await, Err(EngineError::Unavailable { .. })));
    }
}
