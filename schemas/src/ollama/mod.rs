//! Ollama's JSON: the requests and replies of `/api`.
//!
//! Shapes and names are those of Ollama's `docs/api.md` and its `api/types.go`. Everything here is a pure function of bytes;
//! the proxy's `http::ollama` serves it.

pub mod chat_request;
pub mod embed;
pub mod generate_request;
pub mod model;
pub mod model_request;
pub mod reply;
pub mod upstream_model;

mod capability;
mod common;
mod copy_request;
mod format;
mod messages;
mod options;
mod tools;

pub use capability::OllamaCapability;
pub use chat_request::{OllamaChatBody, OllamaChatRequest};
pub use common::LoadOnly;
pub use copy_request::{OllamaCopyBody, OllamaCopyRequest};
pub use embed::{OlderEmbedBody, OllamaEmbedBody};
pub use generate_request::{OllamaGenerateBody, OllamaGenerateRequest};
pub use model_request::{ModelBody, ModelRequest};
use std::borrow::Cow;

use schemars::JsonSchema;
use serde::Serialize;

pub use self::options::defaults as default_sampling;
use crate::error_code::ErrorCode;
use crate::openai::ErrorBody;

/// The version of Ollama whose API this is. Plain `x.y.z`, because clients parse each part as an integer, and recent,
/// because some clients require a minimum.
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

/// The reply to `POST /api/pull`, or one line of its stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "PullProgress")]
pub struct OllamaPullProgress {
    /// The step that was reached.
    pub status: Cow<'static, str>,
    /// Clients tell their progress bars apart by it. Ollama has the checksum of a layer here; this one is of the model's name, since
    /// a file's own is not always known before the file has come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Bytes of all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Bytes that have arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
}

impl OllamaPullProgress {
    /// A step without bytes.
    pub fn of(status: &'static str) -> Self {
        OllamaPullProgress { status: status.into(), digest: None, total: None, completed: None }
    }
}

/// `{"error": "…"}`: a whole reply, or the last line of a stream that failed after its head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaError")]
pub struct OllamaErrorReply {
    /// The message, for people.
    pub error: String,
    /// `context_length_exceeded` if the request does not fit the context. This field and the next two are not Ollama's:
    /// they are for programs, for example another endpoint that forwards to this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub code: Option<ErrorCode>,
    /// On context overflow: tokens in the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_prompt_tokens: Option<u32>,
    /// On context overflow: tokens that one sequence can hold.
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
