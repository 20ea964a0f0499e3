//! Anthropic's JSON: what clients of its Messages API send, and what they expect back.
//!
//! Unknown fields are ignored; what would change the answer and cannot be honoured is refused by name. Everything here
//! is a pure function of bytes; the proxy's `http::anthropic` gives it sockets.

pub mod error;
pub mod events;
pub mod reply;
pub mod request;

mod messages;
mod tools;

pub use error::AnthropicErrorReply;
pub use events::MessageEventWriter;
pub use request::{CountBody, CountRequest, MessagesBody, MessagesRequest};
