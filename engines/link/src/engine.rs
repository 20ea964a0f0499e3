//! [`Engine`]: the interface between the code that requests tokens and the code that computes them.

use async_trait::async_trait;
use baton_schemas::embed::{EmbedEvent, EmbedSequences};
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::kv::{Chunk, PrefillTimings, StatePart};
use baton_schemas::machine_models::{MachineModels, ModelOrder, OrderTaken};
use baton_schemas::node::{NodeInfo, NodeLoad, PairRequest, TokenizeRequest};
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceEvent, SequenceRequest, Token};
use futures::stream::BoxStream;

/// `Started`, then tokens, then exactly one `Finished` or an error; see [`SequenceEvent`].
///
/// Dropping the stream cancels the sequence: the engine frees its slot within one step.
pub type SequenceStream = BoxStream<'static, Result<SequenceEvent, EngineError>>;

/// Vectors in the order of their inputs, then exactly one `Finished` or an error; see [`EmbedEvent`].
///
/// Dropping the stream cancels the texts that are not computed yet, within one step.
pub type EmbedStream = BoxStream<'static, Result<EmbedEvent, EngineError>>;

/// Chunks in the order of their positions, without gaps, then exactly one `End` or an error.
///
/// Dropping the stream cancels the prefill within one chunk. A slow reader pauses it: the engine runs at most
/// [`CHUNK_WINDOW`] chunks ahead.
pub type KvStream = BoxStream<'static, Result<KvEvent, EngineError>>;

/// An engine's load: the first value at once, then one on each change and one after every
/// [`HEARTBEAT`](crate::node::HEARTBEAT) without a change, so that silence shows a fault. Ends with the engine.
pub type LoadStream = BoxStream<'static, Result<NodeLoad, EngineError>>;

/// Chunks that an engine computes ahead of their reader.
pub const CHUNK_WINDOW: usize = 2;

/// A step of a handoff: that it has begun, chunks in the order of their positions, then exactly one end. A prefill yields computed
/// [`Chunk`]s and ends with the node's times; a pull yields verified ones and ends with a report
/// ([`PullEvent`](crate::handoff::PullEvent)).
#[derive(Debug, Clone, PartialEq)]
pub enum KvEvent<K = Chunk, S = StatePart, E = PrefillTimings> {
    /// It has a slot where it is computed. A pull from a node of an earlier version does not say so.
    Begun,
    /// The next positions' KV.
    Chunk(K),
    /// States of recurrent layers. They may come before the chunk that ends at their position.
    State(S),
    /// Nothing follows.
    End(E),
}

/// Anything that runs one model.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// The engine's model, limits and abilities.
    async fn info(&self) -> Result<NodeInfo, EngineError>;

    /// The current load.
    async fn load(&self) -> Result<NodeLoad, EngineError>;

    /// The load as it changes. An engine in this process has no such stream: call [`Engine::load`] instead.
    async fn loads(&self) -> Result<LoadStream, EngineError> {
        Err(EngineError::Unsupported { feature: "a stream of loads".into() })
    }

    /// What the engine holds of earlier prompts, as hashes.
    async fn held(&self, _key: &HeldKey) -> Result<HeldDigest, EngineError> {
        Err(EngineError::Unsupported { feature: "telling what it holds".into() })
    }

    /// Renders a conversation with the model's own chat template and tokenizes the result. Keys take turns.
    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError>;

    /// Tokenizes plain text.
    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError>;

    /// Tokenizes a query and a document, as the model was trained to judge them.
    async fn pair(&self, _request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        Err(EngineError::Unsupported { feature: "reranking".into() })
    }

    /// The text of tokens, control tokens included.
    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError>;

    /// The bytes of each token, which may not be UTF-8.
    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError>;

    /// Continues a sequence. Returns once the request is in the engine's bounded queue. Errors that show before any
    /// computation (a bad token, an overlong prompt, a full queue) are returned here and not in the stream.
    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError>;

    /// Computes one vector for each text, or one score for each pair. Returns and refuses like [`Engine::generate`].
    async fn embed(&self, _request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        Err(EngineError::Unsupported { feature: "embeddings".into() })
    }

    /// Computes a prompt's KV for another node, chunk by chunk. Returns and refuses like [`Engine::generate`]. The
    /// client of an engine in another process does not implement it: KV goes directly from node to node.
    async fn prefill(&self, _request: PrefillRequest) -> Result<KvStream, EngineError> {
        Err(EngineError::Unsupported { feature: "prefilling for others".into() })
    }

    /// Measures the link from a prefill node to this engine by pulling some megabytes.
    async fn measure_link(&self, _source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        Err(EngineError::Unsupported { feature: "pulling from others".into() })
    }

    /// The model files on the engine's machine, if it is another one.
    async fn machine_models(&self) -> Result<MachineModels, EngineError> {
        Err(EngineError::Unsupported { feature: "listing model files".into() })
    }

    /// Changes the model files there.
    async fn order_models(&self, _order: &ModelOrder) -> Result<OrderTaken, EngineError> {
        Err(EngineError::Unsupported { feature: "changing model files".into() })
    }

    /// Forgets the KV of these scopes, whose API keys were removed: that of conversations which are idle, in memory and on disk.
    async fn forget(&self, _scopes: &[CacheScope]) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { feature: "forgetting a key's KV".into() })
    }

    /// Writes KV to disk that would be lost with the process, which ends now. Takes some seconds at most, and no time if there is
    /// nothing to write. The client of an engine in another process does not implement it: that process does so itself.
    async fn store_kv(&self) {}
}
