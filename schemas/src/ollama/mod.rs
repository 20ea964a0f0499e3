//! Ollama's JSON: what its clients send to `/api`, and what they expect back.
//!
//! Shapes and names are those of Ollama's `docs/api.md` and its `api/types.go`. Unknown fields and options are ignored,
//! as Ollama does; what would change the answer and cannot be honoured is refused where it is read. Everything here
//! is a pure function of bytes; the proxy's `http::ollama` gives it sockets.

pub mod chat_request;
pub mod embed;
pub mod generate_request;
pub mod model;
pub mod model_request;
pub mod reply;
pub mod upstream_model;

mod common;
mod format;
mod messages;
mod options;

pub use chat_request::{OllamaChatBody, OllamaChatRequest};
pub use common::LoadOnly;
pub use embed::{OlderEmbedBody, OllamaEmbedBody};
pub use generate_request::{OllamaGenerateBody, OllamaGenerateRequest};
pub use model_request::{ModelBody, ModelRequest};
use schemars::JsonSchema;
use serde::Serialize;

pub use self::options::defaults as default_sampling;
use crate::error_code::ErrorCode;
use crate::openai::ErrorBody;

/// The version of Ollama whose API this is: plain `x.y.z`, since clients parse each part as an integer, and new enough
/// for those that insist on one.
pub const VERSION: &str = "0.14.2";

/// The reply to `GET /api/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaVersion")]
pub struct Version {
    /// [`VERSION`].
    pub version: &'static str,
}

impl Default for Version {
    fn default() -> Self {
        Version { version: VERSION }
    }
}

/// The reply to `POST /api/pull`, or a line of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "PullProgress")]
pub struct OllamaPullProgress {
    /// How far it is.
    pub status: &'static str,
}

/// `{"error": "…"}`: a whole reply, or the last line of a stream that failed after its head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaError")]
pub struct OllamaErrorReply {
    /// What happened.
    pub error: String,
    /// Of a request that does not fit the context: `context_length_exceeded`. This and what follows is not Ollama's; it
    /// is for programs, another endpoint in front of this one among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub code: Option<ErrorCode>,
    /// With it: tokens in the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_prompt_tokens: Option<u32>,
    /// With it: tokens a sequence may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_ctx: Option<u32>,
}

impl From<ErrorBody> for OllamaErrorReply {
    fn from(error: ErrorBody) -> OllamaErrorReply {
        let ErrorBody { message, code, n_prompt_tokens, n_ctx, .. } = error;
        let code = code.filter(|code| *code == ErrorCode::ContextLengthExceeded);
        OllamaErrorReply { error: message, code, n_prompt_tokens, n_ctx }
    }
}
