//! Other servers of models, which speak text and not tokens: Ollama, llama-server, vLLM, and whatever speaks OpenAI's
//! dialect.
//!
//! An upstream takes the parsed request as it is, messages and tools, and answers with pieces of text, reasoning and
//! calls. What it cannot do is refused before anything is sent, and nothing is dropped in silence: a field goes out if
//! its kind takes it, is left out if it stands at its default, and is an error otherwise.
//!
//! This is one attempt at one server. Which server, how often, and what its failures mean for the next request is decided
//! in the proxy. Redirects are not followed; every wait has a deadline, every line and reply a bound.

mod about;
mod client;
mod fields;
mod llama_server;
mod memory;
mod ollama;
mod openai;
mod refusal;
mod request_id;
mod settings;
mod stream;
mod tokens;
mod vectors;
mod vllm;

use std::fmt::Debug;
use std::time::Duration;

use baton_schemas::sequence::Logprobs;
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{EngineError, FinishReason, GenerateRequest};
use futures::stream::BoxStream;
use serde_json::{Map, Value};

pub use self::client::{Asked, Reply, Upstream};
pub use self::settings::{Deadlines, KINDS, Kind, UpstreamSettings};
pub use self::tokens::{TokenAnswer, TokenQuestion};
pub use self::vectors::TextVectors;

/// One choice's reply. Ends after [`TextDelta::Finished`]; one that ends without it has failed.
pub type TextStream = BoxStream<'static, Result<TextDelta, UpstreamError>>;

/// A step of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum TextDelta {
    /// More text for the user, and its tokens if log-probabilities were asked for and given.
    Text {
        /// Whole characters.
        text: String,
        /// May be empty.
        tokens: Vec<TextToken>,
    },
    /// More of what the model thinks.
    Reasoning(String),
    /// A step of a tool's call.
    Call(ToolCallDelta),
    /// The end.
    Finished(TextEnd),
}

/// A token as an upstream tells it: its text, without a place in a vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct TextToken {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability and the alternatives, whose ids are 0.
    pub logprobs: Logprobs,
}

/// How a reply ended. Counts are missing where the upstream does not tell them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextEnd {
    /// Why.
    pub reason: FinishReason,
    /// What it says of tokens.
    pub usage: TextUsage,
}

/// Tokens, as an upstream counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextUsage {
    /// Of the prompt.
    pub n_prompt: Option<u32>,
    /// Those of them that were cached.
    pub n_cached: Option<u32>,
    /// Generated.
    pub n_completion: Option<u32>,
    /// Those of them that were reasoning.
    pub n_reasoning: Option<u32>,
}

/// Why an upstream does not answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UpstreamError {
    /// This kind of upstream, as it is configured, cannot do that. Nothing was sent, or the reply showed it.
    #[error("an upstream of kind {kind} does not take {field}")]
    Unsupported {
        /// The field at fault, as OpenAI's dialect calls it.
        field: &'static str,
        /// The upstream's kind.
        kind: &'static str,
    },
    /// The request is wrong, and would be wrong again.
    #[error(transparent)]
    Refused(EngineError),
    /// It has no room now.
    #[error("the upstream is busy")]
    Busy {
        /// When to come back, if it says so.
        retry_after: Option<Duration>,
    },
    /// The upstream is at fault.
    #[error("{reason}: {detail}")]
    Failed {
        /// In one word, for counting.
        reason: &'static str,
        /// For the log: may name addresses.
        detail: String,
    },
}

impl UpstreamError {
    /// Why, in one word of this program. The whole error may have the upstream's own words, which may quote prompts and
    /// keys.
    pub fn reason(&self) -> &'static str {
        match self {
            UpstreamError::Unsupported { .. } => "unsupported",
            UpstreamError::Refused(_) => "refused",
            UpstreamError::Busy { .. } => "busy",
            UpstreamError::Failed { reason, .. } => reason,
        }
    }

    fn failed(reason: &'static str, detail: impl ToString) -> Self {
        UpstreamError::Failed { reason, detail: detail.to_string() }
    }

    fn malformed(detail: impl ToString) -> Self {
        UpstreamError::failed("malformed", detail)
    }
}

/// One choice of a request, on its way to an upstream.
#[derive(Debug, Clone, Copy)]
struct Wish<'a> {
    request: &'a GenerateRequest,
    /// Which choice: each draws with its own seed.
    choice: u32,
    /// The upstream's own name for the model.
    model: &'a str,
    settings: &'a UpstreamSettings,
}

impl Wish<'_> {
    /// New tokens at most. No server computes a prompt and nothing else: who wants no token asks for one, which is thrown
    /// away where the reply is read. Some take 0 for no limit, and others refuse it.
    fn max_tokens(&self) -> Option<u32> {
        self.request.max_tokens.or(self.settings.default_max_tokens).map(|n| n.max(1))
    }
}

/// The id of a call whose upstream has given it none. Random, so that a conversation's calls have different ones.
fn new_id() -> String {
    format!("call_{:016x}", rand::random::<u64>())
}

/// What is posted where.
#[derive(Debug, Clone)]
struct Call {
    /// Behind the upstream's address.
    path: &'static str,
    body: Map<String, Value>,
}

/// How a kind of server is spoken to.
trait Protocol: Send + Sync + Debug {
    /// Whether a reply is server-sent events, or JSON line by line.
    fn is_sse(&self) -> bool;

    /// Where its models are listed.
    fn models_path(&self) -> &'static str;

    /// The names in that list.
    fn model_names(&self, list: &Value) -> Vec<String>;

    /// The request in its words. Errors: it cannot be said.
    fn call(&self, wish: &Wish<'_>) -> Result<Call, UpstreamError>;

    /// A reader of one reply to this.
    fn reader(&self, call: &Call) -> Box<dyn ReplyReader>;
}

/// Reads one reply, event by event.
trait ReplyReader: Send {
    /// Takes an event's JSON; adds what it says.
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError>;

    /// The stream has ended, after this reader's last event. `None`: it has not said that the reply is complete.
    fn end(&mut self, out: &mut Vec<TextDelta>) -> Option<TextEnd>;
}
