//! OpenAI's JSON: what its clients send, and what they expect back, to the byte.
//!
//! Requests are read leniently where clients differ (unknown fields, nulls, aliases) and strictly where a wrong guess
//! would be answered wrongly (types, ranges, features that are not built yet). Everything here is a pure function of
//! bytes; the proxy's `http::openai` gives it sockets.

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
mod messages;
mod not_yet;
mod response_format;
mod template_args;

pub use chat_request::ChatRequest;
pub(crate) use chat_request::{N_CHOICES, TOP_LOGPROBS, conversation};
pub use completion_request::CompletionRequest;
pub(crate) use completion_request::MAX_CHOICES as MAX_PROMPT_CHOICES;
pub use error::{ErrorBody, ErrorEnvelope, ErrorKind, OVERFLOW};
pub use responses::ResponsesRequest;
pub(crate) use responses::request::MAX_METADATA;
pub(crate) use template_args::RESERVED as RESERVED_TEMPLATE_ARGS;

pub use crate::request::InvalidRequest;
