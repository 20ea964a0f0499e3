//! Vectors of texts, and scores of documents: a client's request, the request to an engine, and the engine's events.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::keep_alive::KeepAlive;
use crate::token::Token;

/// The most texts in one request: OpenAI's limit.
pub const MAX_INPUTS: usize = 2_048;

/// The most tokens in all texts of one request: OpenAI's limit.
pub const MAX_TOTAL_TOKENS: usize = 300_000;

/// A client's request for embeddings or scores, independent of the dialect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbedRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// What to compute for each input.
    pub task: EmbedTask,
    /// The inputs, at most [`MAX_INPUTS`]. Those of a reranking are texts.
    pub inputs: Vec<EmbedInput>,
    /// The field of the body that has the inputs, for errors.
    pub field: &'static str,
    /// Cut inputs that are too long instead of refusing them.
    pub truncate: bool,
    /// The length of the vectors that the client expects, if it says so.
    pub dimensions: Option<u32>,
    /// How long the model stays in memory after the request, if the client says so.
    pub keep_alive: Option<KeepAlive>,
}

/// The kind of result for each input.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum EmbedTask {
    /// Its vector.
    #[default]
    Embed,
    /// Its score as a document for this query, which stands in place of a vector.
    Rerank {
        /// The query, which is compared with each document.
        query: Arc<str>,
    },
}

/// An input, which becomes one vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmbedInput {
    /// Plain text. The spelling of a control token in it is plain text, too.
    Text(String),
    /// Exact tokens, including those that begin and end a text.
    Tokens(Vec<Token>),
}

/// A request to an engine: one vector for each input, in this order. A reranker's inputs are pairs, as
/// [`PairRequest`](crate::node::PairRequest) makes them, and its vectors are scores.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbedSequences {
    /// The tokens of each input: at most [`MAX_INPUTS`] inputs, none of them empty.
    pub inputs: Vec<Vec<Token>>,
    /// The reader wants [`EmbedEvent::Begun`]. Nodes of earlier versions do not send it, and endpoints of earlier versions
    /// cannot read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_begin: bool,
}

/// One step of an engine's answer: `Begun` if the request asks for it, one `Vector` for each input, in their order, then one
/// `Finished`. A stream that ends without `Finished` has failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmbedEvent {
    /// The inputs wait in no queue any more: the first one is computed.
    Begun,
    /// The vector of the next input, with norm 1 and finite values. A reranker's has one value, the score. Vectors travel
    /// in frames of their own ([`streams`](crate::streams)), and have no JSON.
    #[serde(skip)]
    Vector(Vec<f32>),
    /// The end of the answer.
    Finished {
        /// Where the time went.
        timings: EmbedTimings,
    },
}

/// Where an engine's time for a request went, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EmbedTimings {
    /// Time before the first input was computed.
    pub queue_ms: f64,
    /// Time from then to the last vector.
    pub compute_ms: f64,
}

/// How a model computes vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingFacts {
    /// The length of a vector.
    pub n_embd: u32,
    /// The most tokens in one input.
    pub n_ctx: u32,
    /// How the tokens' states become one vector.
    pub pooling: Pooling,
    /// The model's file names the pooling, so the model was trained for embeddings. The quality of other models'
    /// vectors is unknown.
    pub is_trained: bool,
}

/// How a model scores documents for a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RerankFacts {
    /// The most tokens of a query and a document together.
    pub n_ctx: u32,
}

/// How one state per token becomes one vector per input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all tokens' states.
    Mean,
    /// The first token's state.
    Cls,
    /// The last token's state.
    Last,
}

/// Returns the values as little-endian 32-bit floats. OpenAI's base64 form encodes the same bytes.
pub fn le_bytes(vector: &[f32]) -> Vec<u8> {
    vector.iter().flat_map(|value| value.to_le_bytes()).collect()
}
