//! Anthropic's JSON: the requests and replies of its Messages API.
//!
//! Everything here is a pure function of bytes; the proxy's `http::anthropic` serves it.

pub mod error;
pub mod events;
pub mod models;
pub mod reply;
pub mod request;

mod context_management;
mod messages;
mod tools;

pub use error::AnthropicErrorReply;
pub use events::MessageEventWriter;
pub use request::{CountBody, CountRequest, MessagesBody, MessagesRequest};
