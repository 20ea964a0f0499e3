//! The node protocol: how the proxy calls an engine in another process, over a Unix socket or TCP.
//!
//! HTTP with the cluster key in every call but one, and a version in the path. Requests and replies are JSON. Sequences, vectors
//! and loads come over one connection for all streams, in the frames of [`streams`](crate::streams).
//!
//! | call | body | reply |
//! |---|---|---|
//! | `GET  /node/v1/info` | – | [`NodeDescription`] |
//! | `GET  /node/v1/proof?message=HEX` | – | [`KeyProof`]; the only call without the key |
//! | `GET  /node/v1/load` | – | [`NodeLoad`] |
//! | `POST /node/v1/held` | [`HeldKey`](crate::held::HeldKey) | [`HeldDigest`](crate::held::HeldDigest) |
//! | `GET  /node/v1/streams` | – | an upgrade to [`streams`](crate::streams) |
//! | `POST /node/v1/render` | [`RenderRequest`] | [`TokenList`] |
//! | `POST /node/v1/tokenize` | [`TokenizeRequest`] | [`TokenList`] |
//! | `POST /node/v1/pair` | [`PairRequest`] | [`TokenList`] |
//! | `POST /node/v1/detokenize` | [`TokenList`] | [`DetokenizedText`] |
//! | `POST /node/v1/pieces` | [`TokenList`] | [`TokenPieces`] |
//! | `POST /node/v1/prefill` | [`PrefillRequest`](crate::handoff::PrefillRequest) | records of [`kv`](crate::kv) |
//! | `POST /node/v1/link` | [`KvSource`](crate::handoff::KvSource) | [`LinkMeasurement`](crate::handoff::LinkMeasurement) |
//! | `POST /node/v1/forget` | [`ScopeList`](crate::ScopeList) | `null` |
//! | `GET  /node/v1/noise?bytes=N` | – | N incompressible bytes, to measure a link |
//!
//! While its model loads, a node answers `load` and streams its loads, and refuses all other calls.
//!
//! The reply to a refused call is a [`NodeErrorReply`] with a 4xx or 5xx status.

use std::net::SocketAddr;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::embed::{EmbeddingFacts, RerankFacts};
use crate::error::EngineError;
use crate::held::RestoreRates;
use crate::kv::{CodecLoss, CodecProfile, Fingerprint, KeyRotation, KvLayout, RowTypes};
use crate::no_handoff::NoHandoffReason;
pub use crate::node_texts::{DetokenizedText, PairRequest, RenderRequest, TokenList, TokenPieces, TokenizeRequest};
use crate::sequence::Token;
use crate::store_report::StoreReport;
use crate::stream_versions::StreamVersions;
use crate::worker::WorkerShare;

/// The path prefix of this version of the protocol.
pub const BASE_PATH: &str = "/node/v1";

/// The environment variable with a child node's cluster key. An argument would be visible in `ps`.
pub const KEY_VARIABLE: &str = "BATON_CLUSTER_KEY";

/// The same with the key that a node presents to prefill nodes, if it differs: an endpoint's child has one for its parent.
pub const PULL_KEY_VARIABLE: &str = "BATON_PULL_KEY";

/// The environment variable with the key that a node presents to its workers, if it differs from its own.
pub const WORKERS_KEY_VARIABLE: &str = "BATON_WORKERS_KEY";

/// The environment variable with the secret of the KV store on disk, for an endpoint's child whose options name a disk.
pub const STORE_SECRET_VARIABLE: &str = "BATON_STORE_SECRET";

/// The property of a node's announcement that says that it speaks TLS: the certificate's host name, or nothing.
pub const TLS_PROPERTY: &str = "tls";

/// What a node runs. Constant for the life of its process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The model's name, from the file's metadata or the file's name. The proxy decides the public name.
    pub model: String,
    /// The engine's name, `llama` or `sim`.
    pub engine: String,
    /// llama.cpp's architecture name, e.g. `llama`, `gemma3`.
    pub architecture: String,
    /// Tokens that one sequence can hold, prompt and output together.
    pub n_ctx: u32,
    /// The context size that the model was trained with, in tokens.
    pub n_ctx_train: u32,
    /// The size of the vocabulary.
    pub n_vocab: u32,
    /// The number of slots: sequences that are decoded together.
    pub n_slots: u32,
    /// The engine's memory.
    pub memory: Memory,
    /// True if the model has a chat template.
    pub has_chat_template: bool,
    /// True if the model generates text. Encoders only compute vectors.
    #[serde(default = "yes")]
    pub generates: bool,
    /// How the model computes vectors, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingFacts>,
    /// How the model scores documents, if it is a reranker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reranking: Option<RerankFacts>,
    /// A hash of the projector's weights. `None`: the model cannot see images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projector: Option<String>,
    /// The devices that compute, as the engine names them: `CUDA0 (NVIDIA GB10)`, `CPU (AMD EPYC, x86_64)`.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Workers that compute a part of the layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WorkerShare>,
    /// The node's role.
    #[serde(default)]
    pub role: Role,
    /// Hashes of vocabulary and weights, whether or not its KV can be handed over. `None` from a node of an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// The identity of its KV, if the KV can be handed over.
    #[serde(flatten, with = "crate::node_kv")]
    pub kv: Option<KvIdentity>,
    /// The types of the KV cache's rows, if the operator has chosen others than f16. `None`, too, for a model without rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_types: Option<RowTypes>,
    /// Why its KV is not handed over. `None` if it is, or for a model that does not generate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_handoff: Option<NoHandoffReason>,
    /// The operator lets it take KV of other weights of its model, which its canary judges. False: only of equal weights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub takes_other_weights: bool,
    /// Its streams say, if they are asked to, when a prompt has begun at its prefill node, and when inputs for vectors have begun.
    /// False from a node of an older version.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_begin: bool,
    /// It hands over prompts with images, in both roles, if it has the projector. False from a node of an older version.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hands_over_images: bool,
    /// Facts about the model for clients.
    #[serde(default)]
    pub facts: ModelFacts,
    /// A random number of the node's process, which shows that a process was replaced. 0 from a node of an older version.
    #[serde(default)]
    pub process: u64,
    /// The version of the node's program, such as `0.1.0`. Empty from a node of an older version.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
}

fn yes() -> bool {
    true
}

/// The reply to a call of `info`: what a node runs, and how it can be reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeDescription {
    /// What it runs.
    #[serde(flatten)]
    pub info: NodeInfo,
    /// The versions of the stream protocol that it speaks.
    #[serde(default = "before_streams")]
    pub streams: StreamVersions,
}

/// A node's proof that it has the cluster key, and which end of the connection it is. See `engines/link/src/proof/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyProof {
    /// The node's message of SPAKE2, hexadecimal.
    pub message: String,
    /// Where the call has reached the node, by the node's own socket.
    pub address: SocketAddr,
    /// [`NodeInfo::process`].
    pub process: u64,
    /// The node's role.
    pub role: Role,
    /// A MAC of the end of the connection, the process and the role under the key that both ends have agreed on; hexadecimal.
    pub confirmation: String,
}

fn before_streams() -> StreamVersions {
    StreamVersions::BEFORE
}

/// Facts about a model for clients. Only `infill` is also needed to serve the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelFacts {
    /// The number of parameters; 0 if unknown.
    pub n_params: u64,
    /// The size of the model file in bytes; 0 if there is none.
    pub file_bytes: u64,
    /// llama.cpp's name of the file's quantization, e.g. `Q4_K_M`; empty if unknown.
    pub quantization: String,
    /// The chat template in use, in Jinja; empty if there is none.
    pub chat_template: String,
    /// The spelling of the token that begins a prompt; empty if there is none.
    pub bos_token: String,
    /// The spelling of the token that ends a text; empty if there is none.
    pub eos_token: String,
    /// The control tokens of infilling prompts, if the model was trained for infilling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infill: Option<InfillTokens>,
}

/// The control tokens of an infilling prompt: after `prefix` A `suffix` B `middle`, the text between A and B follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfillTokens {
    /// The token before A.
    pub prefix: Token,
    /// The token before B.
    pub suffix: Token,
    /// The token before the text to write.
    pub middle: Token,
}

/// What a node does in a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It computes prompts' KV for decode nodes.
    Prefill,
    /// It generates.
    Decode,
    /// It does both.
    #[default]
    Both,
    /// It only sends decode nodes candidates for their next tokens.
    Draft,
}

impl Role {
    /// The word for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
            Role::Draft => "draft",
        }
    }

    /// Returns true if the node computes KV for others.
    pub fn prefills(self) -> bool {
        matches!(self, Role::Prefill | Role::Both)
    }

    /// Returns true if the node generates.
    pub fn decodes(self) -> bool {
        matches!(self, Role::Decode | Role::Both)
    }

    /// Returns true if the node sends candidates.
    pub fn drafts(self) -> bool {
        self == Role::Draft
    }
}

/// The identity of a model's KV. Two nodes compare it before one uses the other's KV.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvIdentity {
    /// Hashes of vocabulary and weights.
    pub fingerprint: Fingerprint,
    /// The shape of the KV: layers, rows, and the order of K's elements.
    pub layout: KvLayout,
    /// The tokens of a fixed text. Its KV is compared if the weights differ.
    pub canary: Vec<Token>,
    /// How K is rotated. `None`: not known, so no codec undoes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotation: Option<KeyRotation>,
    /// How its lossy codecs quantize the KV. It stays on the node.
    #[serde(skip)]
    pub profile: Option<Arc<CodecProfile>>,
    /// How much lossy codecs change predictions, by the profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "CodecLoss::known")]
    pub losses: Vec<CodecLoss>,
    /// Of a simulator: bytes of KV that a token of the simulated model has. Frames carry those of `layout` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated_bytes: Option<u32>,
}

impl KvIdentity {
    /// The identity of a model that is not simulated.
    pub fn new(
        fingerprint: Fingerprint,
        layout: KvLayout,
        canary: Vec<Token>,
        rotation: Option<KeyRotation>,
        profile: Option<Arc<CodecProfile>>,
    ) -> KvIdentity {
        let losses = profile.as_ref().map(|profile| profile.losses.clone()).unwrap_or_default();
        KvIdentity { fingerprint, layout, canary, rotation, profile, losses, simulated_bytes: None }
    }

    /// Bytes of KV for each token, whose transfer takes time.
    pub fn bytes_per_token(&self) -> usize {
        self.simulated_bytes.map_or_else(|| self.layout.bytes_per_position(), |n| n as usize)
    }

    /// Bytes of the states of a sequence, whose transfer takes time, too.
    pub fn state_bytes(&self) -> u64 {
        self.layout.state_bytes() as u64
    }
}

/// An engine's memory in bytes, as the engine reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// The weights.
    pub model: u64,
    /// The KV cache, and the states of recurrent layers.
    pub kv: u64,
}

impl Memory {
    /// Returns the sum.
    pub fn bytes(self) -> u64 {
        self.model.saturating_add(self.kv)
    }
}

/// The phase of a node's life, as the node reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its model is loading.
    Starting,
    /// It takes requests.
    #[default]
    Serving,
    /// It stops: it finishes its sequences and accepts no new ones.
    Stopping,
}

/// The current load of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeLoad {
    /// The phase of the node's life.
    pub phase: Phase,
    /// Slots with a running sequence.
    pub active_slots: u32,
    /// Sequences waiting for a slot.
    pub queued: u32,
    /// Prompt tokens that are accepted and not computed yet.
    pub prefill_backlog: u32,
    /// KV cells that no running sequence holds.
    pub free_cells: u32,
    /// All KV cells, of all slots together; 0 from nodes of older versions.
    pub n_cells: u32,
    /// The recent prefill rate in tokens per second; 0 until measured.
    pub prefill_tps: f64,
    /// The recent decode rate of one sequence in tokens per second; 0 until measured.
    pub decode_tps: f64,
    /// Changes with what the node [holds](crate::held); 0 from nodes that do not say what they hold.
    pub held: u64,
    /// How fast its store gives KV back.
    pub restore: RestoreRates,
    /// What its store holds. `None`: it has none, or is of an older version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreReport>,
}

/// The reply to a refused or failed call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeErrorReply {
    /// The error.
    pub error: EngineError,
}

/// A message of a child to the process that started it, a node or an endpoint: one line of JSON on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// The model is loaded, and the child accepts calls.
    Ready {
        /// The address, if it listens on TCP. The system may have chosen the port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<SocketAddr>,
    },
    /// It cannot start yet, and tries again.
    Waits {
        /// Why, for clients: contains no paths or addresses.
        summary: String,
    },
    /// It cannot start now, for the reason of another machine, and exits. The next start may succeed.
    Hindered {
        /// For the operator: may contain file names and addresses.
        message: String,
        /// For clients: contains neither.
        summary: String,
    },
    /// It cannot start and exits. An endpoint says why on standard error instead.
    Failed {
        /// For the operator: may contain file names.
        message: String,
        /// For clients: contains no paths or addresses.
        summary: String,
    },
}
