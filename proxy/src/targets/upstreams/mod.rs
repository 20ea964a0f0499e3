//! Servers that speak text, behind this endpoint: which one serves a request, what its failures mean for the next, and
//! its reply as events.
//!
//! A request goes to an upstream if its model is served by upstreams alone, or if no engine of its own can take it
//! ([`generate`](crate::request::generate)). Until the first piece of a reply has come, another upstream is tried; after that a
//! failure ends the stream with an error, because no other server could go on where this one stopped.

mod about;
mod asking;
mod busy;
mod events;
mod member;
mod pool;
mod short;
mod sight;
mod start;

pub use self::about::{info, told};
pub(crate) use self::events::{estimated_tokens, text_events};
pub use self::member::{Life, Member};
pub use self::pool::{ServedByUpstreams, UpstreamPool};
pub use self::short::{embed, load, tokens, unload};
pub use self::start::{Started, TextChoice, start};
