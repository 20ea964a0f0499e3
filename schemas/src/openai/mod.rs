//! OpenAI's JSON: the requests and replies of `/v1`, exact to the byte.
//!
//! Requests are read leniently where clients differ (unknown fields, nulls, aliases), and strictly where a guess could
//! give a wrong answer (types, ranges, missing features). Everything here is a pure function of bytes; the proxy's
//! `http::openai` serves it.

pub mod chat_request;
pub mod chat_response;
pub mod completion_request;
pub mod completion_response;
pub mod embeddings;
pub mod error;
pub mod logprobs;
pub mod models;
pub mod responses;
pub mod usage;

mod functions;
mod modalities;
mod prediction;
mod reply_length;
mod response_format;
mod structured;
mod template_args;

pub(crate) mod messages;

pub use chat_request::{ChatBody, ChatRequest};
pub(crate) use chat_request::{TopLogprobs, conversation};
pub use completion_request::{CompletionBody, CompletionRequest};
pub(crate) use completion_request::{MAX_CHOICES, PlainPromptFields, nth_prompt};
pub use embeddings::{EmbeddingsBody, EmbeddingsRequest};
pub use error::{ErrorBody, ErrorEnvelope, ErrorKind};
pub(crate) use reply_length::{MaxTokens, ReplyLengthBody};
pub use responses::{ResponsesBody, ResponsesRequest};
pub(crate) use structured::StructuredBody;
pub(crate) use template_args::TemplateBody;

pub use crate::request::InvalidRequest;
