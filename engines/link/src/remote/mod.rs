//! The client of the node protocol: an engine in another process.

pub mod call_failure;
mod calls;
mod models;
mod paths;
mod prove;
mod streams;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use baton_schemas::draft::DraftRequest;
use baton_schemas::embed::{EmbedEvent, EmbedSequences};
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::image::Image;
use baton_schemas::json_values::memory_bytes;
use baton_schemas::machine_models::{MachineModels, ModelOrder, OrderTaken};
use baton_schemas::node::{
    DetokenizedText, NodeDescription, NodeInfo, NodeLoad, PairRequest, RenderRequest, TokenList, TokenPieces,
    TokenizeRequest,
};
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::stream_versions::{StreamVersions, VersionMismatch};
use baton_schemas::streams::StreamWork;
use baton_schemas::{CacheScope, EngineError, KeyTag, ScopeList, SequenceRequest, Token};
use futures::StreamExt;
use futures::stream::BoxStream;
use serde::Serialize;

use self::calls::{ANSWER_TIMEOUT, CALL_TIMEOUT, NodeCalls};
pub(crate) use self::calls::{accepted, unreachable};
pub use self::models::ModelSource;
pub use self::paths::{NodePaths, is_open};
pub use self::prove::{ProofFailure, Prover};
pub(crate) use self::streams::RemoteDraftStream;
use self::streams::{NodeStreams, StreamEvent};
use crate::drafts::DraftBoard;
use crate::engine::{EmbedStream, Engine, LoadStream, SequenceStream};
use crate::long_json;
use crate::transport::{AddressError, Transport, explain};

/// The deadline of connecting. A node on the same machine or in the same network needs much less.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Idle connections that are kept for each node, for calls that are not streams.
const MAX_IDLE_CONNECTIONS: usize = 32;

#[derive(Debug, Clone)]
pub enum NodeAddress {
    /// The Unix socket of a child on this machine.
    Unix(PathBuf),
    /// `http://host:port` or `https://host:port`.
    Url(String),
    /// The same, with a host whose addresses are these.
    Paths(String, NodePaths),
}

/// A node's client. Cheap to share.
pub struct RemoteEngine {
    calls: Arc<NodeCalls>,
    streams: NodeStreams,
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
            NodeAddress::Paths(url, paths) => {
                transport.check(url)?;
                // A kept connection would stay on its path, and hang when that goes.
                let builder = builder.pool_max_idle_per_host(0).dns_resolver(Arc::new(paths.clone()));
                (builder, url.trim_end_matches('/').to_owned())
            }
        };
        let client = builder.build().map_err(|e| ClientError::Setup(explain(&e)))?;
        let address = match address {
            NodeAddress::Unix(path) => path.display().to_string(),
            NodeAddress::Url(_) | NodeAddress::Paths(..) => base.clone(),
        };
        let key = cluster_key.to_owned();
        let calls = NodeCalls::new(client, base, address, key);
        Ok(RemoteEngine { calls: Arc::new(calls), streams: NodeStreams::default() })
    }

    /// The same client as an endpoint that speaks other versions of the stream protocol.
    pub fn speaking(self, versions: StreamVersions) -> RemoteEngine {
        let calls = NodeCalls { versions, ..NodeCalls::clone(&self.calls) };
        RemoteEngine { calls: Arc::new(calls), streams: NodeStreams::default() }
    }
}

#[async_trait]
impl Engine for RemoteEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        let description: NodeDescription = self.calls.get("info").await?;
        let checked = VersionMismatch::check(description.streams, self.calls.versions);
        checked.map_err(EngineError::VersionMismatch)?;
        Ok(description.info.with_printable_names())
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        self.calls.get("load").await
    }

    async fn loads(&self) -> Result<LoadStream, EngineError> {
        Ok(self.streams.start::<NodeLoad>(&self.calls, StreamWork::Loads, Vec::new()).await?.boxed())
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        self.calls.post::<HeldDigest>("held", *key, CALL_TIMEOUT).await?.checked()
    }

    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        let Conversation { messages, tools, template_args, images, linked_images } = conversation;
        if let Some(link) = linked_images.first() {
            return Err(EngineError::not_fetched(link));
        }
        let texts: usize = messages.iter().map(|message| message.content.len()).sum();
        let values: usize = tools.iter().chain(template_args.values()).map(memory_bytes).sum();
        let _room = self.calls.room(texts + values + n_bytes_of(images)).await?;
        let request = RenderRequest { conversation: conversation.clone(), key };
        Ok(self.calls.post::<TokenList>("render", request, ANSWER_TIMEOUT).await?.tokens)
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        let _room = self.calls.room(request.text.len()).await?;
        Ok(self.calls.post::<TokenList>("tokenize", request.clone(), ANSWER_TIMEOUT).await?.tokens)
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        let _room = self.calls.room(request.query.len() + request.document.len()).await?;
        Ok(self.calls.post::<TokenList>("pair", request.clone(), ANSWER_TIMEOUT).await?.tokens)
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        let tokens = TokenList { tokens: tokens.to_vec() };
        Ok(self.calls.post::<DetokenizedText>("detokenize", tokens, ANSWER_TIMEOUT).await?.text)
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        let list = TokenList { tokens: tokens.to_vec() };
        let pieces = self.calls.post::<TokenPieces>("pieces", list, ANSWER_TIMEOUT).await?.pieces;
        match pieces.len() == tokens.len() {
            true => Ok(pieces),
            false => Err(EngineError::internal("a node has sent the bytes of another number of tokens")),
        }
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        self.calls.post("link", source.clone(), CALL_TIMEOUT).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        self.calls.post("forget", ScopeList { scopes: scopes.to_vec() }, CALL_TIMEOUT).await
    }

    async fn machine_models(&self) -> Result<MachineModels, EngineError> {
        Ok(self.calls.get::<MachineModels>("models").await?.bounded())
    }

    async fn order_models(&self, order: &ModelOrder) -> Result<OrderTaken, EngineError> {
        self.calls.post("models", order.clone(), CALL_TIMEOUT).await
    }

    /// Dropping the stream cancels the sequence.
    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let images = request.images.as_ref().map_or(0, |images| n_bytes_of(&images.images));
        let _room = self.calls.room(images + TOKEN_BYTES * (request.prompt.len() + request.generated.len())).await?;
        self.stream::<SequenceEvent>(StreamWork::Generate, request).await
    }

    /// Like [`RemoteEngine::generate`](Engine::generate).
    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        self.stream::<EmbedEvent>(StreamWork::Embed, request).await
    }
}

impl RemoteEngine {
    /// Starts a stream, which has no deadline in all: the connection has one for silence.
    async fn stream<D: StreamEvent>(
        &self,
        work: StreamWork,
        request: impl Serialize + Send + 'static,
    ) -> Result<BoxStream<'static, Result<D, EngineError>>, EngineError> {
        let body = long_json::written(request).await.map_err(EngineError::internal)?;
        Ok(self.streams.start::<D>(&self.calls, work, body).await?.boxed())
    }
}

impl RemoteEngine {
    /// Lets a draft node follow a sequence. Its candidates go to the board. Errors: it refuses, or cannot be reached.
    pub(crate) async fn drafts(
        &self,
        request: DraftRequest,
        board: Arc<DraftBoard>,
    ) -> Result<RemoteDraftStream, EngineError> {
        let _room = self.calls.room(TOKEN_BYTES * request.tokens.len()).await?;
        let body = long_json::written(request).await.map_err(EngineError::internal)?;
        self.streams.draft(&self.calls, board, body).await
    }
}

/// The bytes of a token in JSON, with its comma.
const TOKEN_BYTES: usize = 6;

fn n_bytes_of(images: &[Image]) -> usize {
    images.iter().map(|image| image.bytes().len()).sum()
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
        let request =
            TokenizeRequest { text: "text".into(), add_special: false, parse_special: false, key: Default::default() };
        let (answer, _stream) = tokio::join!(engine.tokenize(&request), server);
        answer
    }

    #[tokio::test]
    async fn a_late_answer_is_awaited_up_to_the_deadline() {
        assert_eq!(answered_after(300).await, Ok(vec![7]));
        assert!(matches!(answered_after(601).await, Err(EngineError::Unavailable { .. })));
    }
}
