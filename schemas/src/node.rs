//! The node protocol: how the proxy speaks to an engine in another process, over a Unix socket or TCP.
//!
//! HTTP with a cluster key on every call, versioned paths. Requests and replies are JSON; a stream of deltas is one
//! JSON value a line ([`SequenceLine`], [`EmbedLine`]), and a stream that ends without a `finished` or `error` line was cut. An empty line
//! is a sign of life: there is one in every second without a delta.
//!
//! | call | body | reply |
//! |---|---|---|
//! | `GET  /node/v1/info` | – | [`NodeInfo`] |
//! | `GET  /node/v1/load` | – | [`NodeLoad`] |
//! | `GET  /node/v1/load/stream` | – | lines of [`LoadLine`]: at once, when something changes, and twice a second |
//! | `POST /node/v1/render` | [`RenderRequest`] | [`TokenList`] |
//! | `POST /node/v1/tokenize` | [`TokenizeRequest`] | [`TokenList`] |
//! | `POST /node/v1/detokenize` | [`TokenList`] | [`DetokenizedText`] |
//! | `POST /node/v1/generate` | [`SequenceRequest`](crate::SequenceRequest) | lines of [`SequenceLine`] |
//! | `POST /node/v1/embed` | [`EmbedSequences`](crate::embed::EmbedSequences) | lines of [`EmbedLine`] |
//! | `POST /node/v1/prefill` | [`PrefillRequest`](crate::handoff::PrefillRequest) | records of [`kv`](crate::kv) |
//! | `POST /node/v1/link` | [`KvSource`](crate::handoff::KvSource) | [`LinkMeasurement`](crate::handoff::LinkMeasurement) |
//! | `GET  /node/v1/noise?bytes=N` | – | N bytes that do not compress, to measure a link by |
//!
//! A node whose model is still loading answers `load` and `load/stream`, and refuses everything else.
//!
//! A refused call answers with [`NodeErrorReply`] and a 4xx or 5xx status.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::embed::{EmbedEvent, EmbeddingFacts};
use crate::error::EngineError;
use crate::generate::Conversation;
use crate::kv::{Fingerprint, KvLayout};
use crate::sequence::{SequenceEvent, Token};

/// Path prefix of this version of the protocol.
pub const BASE_PATH: &str = "/node/v1";

/// The environment variable that carries the cluster key into a child node: an argument would show in `ps`.
pub const KEY_VARIABLE: &str = "BATON_CLUSTER_KEY";

/// The environment variable with the key that a node presents to prefill nodes, where that is not its own: the child of
/// an endpoint has one key for its parent and needs the cluster's for others.
pub const PULL_KEY_VARIABLE: &str = "BATON_PULL_KEY";

/// What a node is. Constant for the life of its process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The model's name, from the file's metadata or its file name. The public name is the proxy's affair.
    pub model: String,
    /// `llama` or `sim`.
    pub engine: String,
    /// llama.cpp's architecture name, e.g. `llama`, `gemma3`.
    pub architecture: String,
    /// Tokens one sequence may hold, prompt and output together.
    pub n_ctx: u32,
    /// Tokens the model was trained on.
    pub n_ctx_train: u32,
    /// Vocabulary size.
    pub n_vocab: u32,
    /// Sequences decoded together.
    pub n_slots: u32,
    /// Memory the engine reports for itself, in bytes.
    pub memory: Memory,
    /// Whether the model can render a conversation.
    pub has_chat_template: bool,
    /// Whether the model continues texts. Encoders do not: they are there for their vectors.
    #[serde(default = "yes")]
    pub generates: bool,
    /// How its vectors come about, if it gives any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingFacts>,
    /// Which projector it sees images with: a hash of its weights. `None`: it sees none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projector: Option<String>,
    /// What it computes on, in the words of the engine: `CUDA0 (NVIDIA GB10)`, `Metal (Apple M3 Ultra)`, `CPU`.
    #[serde(default)]
    pub devices: Vec<String>,
    /// What the node does for others.
    #[serde(default)]
    pub role: Role,
    /// What its KV is, if it can be handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvIdentity>,
    /// What is told to clients who ask about the model.
    #[serde(default)]
    pub facts: ModelFacts,
}

fn yes() -> bool {
    true
}

/// What clients ask about a model and serving it does not need, but for the tokens of infilling.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelFacts {
    /// Parameters; 0 if not known.
    pub n_params: u64,
    /// The model file, in bytes; 0 if there is none.
    pub file_bytes: u64,
    /// llama.cpp's name of the file's quantization, e.g. `Q4_K_M`; empty if not known.
    pub quantization: String,
    /// The Jinja source in use; empty without one.
    pub chat_template: String,
    /// The spelling of the token that begins a prompt; empty without one.
    pub bos_token: String,
    /// The spelling of the token that ends a text; empty without one.
    pub eos_token: String,
    /// How the model is asked for the text between two others, if it was trained for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infill: Option<InfillTokens>,
}

/// The control tokens of an infilling prompt: `prefix` A `suffix` B `middle`, upon which the model writes what stands
/// between A and B.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfillTokens {
    /// Before the text that comes first.
    pub prefix: Token,
    /// Before the text that comes last.
    pub suffix: Token,
    /// Before what is to be written.
    pub middle: Token,
}

/// What a node does for others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts' KV for decode nodes.
    Prefill,
    /// Generates.
    Decode,
    /// Either.
    #[default]
    Both,
}

impl Role {
    /// Whether the node computes KV for others.
    pub fn prefills(self) -> bool {
        self != Role::Decode
    }

    /// Whether the node generates.
    pub fn decodes(self) -> bool {
        self != Role::Prefill
    }
}

/// What two nodes compare before one takes the other's KV.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvIdentity {
    /// Vocabulary and weights.
    pub fingerprint: Fingerprint,
    /// Layers, rows, order of K's elements.
    pub layout: KvLayout,
    /// Tokens of a fixed text, whose KV is compared where the weights differ.
    pub canary: Vec<Token>,
}

/// An engine's own account of its memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Weights.
    pub model: u64,
    /// KV cache.
    pub kv: u64,
}

impl Memory {
    /// Both.
    pub fn bytes(self) -> u64 {
        self.model.saturating_add(self.kv)
    }
}

/// How far a node is, by its own account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its model is loading.
    Starting,
    /// It takes requests.
    #[default]
    Serving,
    /// It was told to stop: it finishes what it runs, and takes nothing new.
    Stopping,
}

/// What a node is doing now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeLoad {
    /// How far it is.
    pub phase: Phase,
    /// Slots with a running sequence.
    pub active_slots: u32,
    /// Sequences waiting for a slot.
    pub queued: u32,
    /// Prompt tokens accepted and not computed yet.
    pub prefill_backlog: u32,
    /// KV cells that no running sequence holds.
    pub free_cells: u32,
    /// Recent prefill rate, tokens per second; 0 until measured.
    pub prefill_tps: f64,
    /// Recent decode rate of one sequence, tokens per second; 0 until measured.
    pub decode_tps: f64,
}

/// Render a conversation with the model's chat template and tokenize it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RenderRequest {
    /// What to render.
    pub conversation: Conversation,
}

/// Tokenize plain text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// The text.
    pub text: String,
    /// Add the model's BOS/EOS as its file says.
    pub add_special: bool,
    /// Read `<|im_end|>` and its kind as control tokens.
    pub parse_special: bool,
}

/// A list of tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenList {
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// A text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DetokenizedText {
    /// The text, U+FFFD where the tokens' bytes are not UTF-8.
    pub text: String,
}

/// One line of a stream of deltas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StreamLine<D> {
    /// The stream failed; nothing follows.
    Error(NodeErrorReply),
    /// A step of the answer.
    Step(D),
}

/// One line of a generate stream.
pub type SequenceLine = StreamLine<SequenceEvent>;

/// One line of an embed stream.
pub type EmbedLine = StreamLine<EmbedEvent>;

/// One line of a stream of loads. It has no last one: it ends with its node.
pub type LoadLine = StreamLine<NodeLoad>;

impl<D> From<Result<D, EngineError>> for StreamLine<D> {
    fn from(step: Result<D, EngineError>) -> Self {
        match step {
            Ok(delta) => StreamLine::Step(delta),
            Err(error) => StreamLine::Error(NodeErrorReply { error }),
        }
    }
}

impl<D> StreamLine<D> {
    /// The step that the line says.
    pub fn into_step(self) -> Result<D, EngineError> {
        match self {
            StreamLine::Step(delta) => Ok(delta),
            StreamLine::Error(reply) => Err(reply.error),
        }
    }
}

/// A refused or failed call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeErrorReply {
    /// What happened.
    pub error: EngineError,
}

/// What a child node tells the process that started it: one JSON line on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// The socket answers and the model is loaded.
    Ready {
        /// Where, if it listens on TCP: the system may have chosen the port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<SocketAddr>,
    },
    /// The node cannot start; it exits.
    Failed {
        /// For the operator: may name files.
        message: String,
        /// For clients: no paths or addresses.
        summary: String,
    },
}
