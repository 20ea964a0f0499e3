//! Upstreams behind this endpoint: which one serves a request, what its failures mean for the next one, and its reply as
//! events.
//!
//! A request goes to an upstream if only upstreams serve its model, or if no engine can take it. Until the first piece of
//! the reply has come, another upstream is tried. After that a failure ends the stream with an error, because no other
//! server could continue the reply.

mod busy_models;
mod client_error;
mod image_support;
mod model_info;
mod pool;
mod prompt_estimate;
mod retry;
mod server;
mod start;
mod text_events;
mod unary;

pub use self::model_info::{model_info, node_info};
pub use self::pool::{ServedByUpstreams, ServingUpstream, UpstreamPool};
pub(crate) use self::prompt_estimate::estimated_tokens;
pub use self::server::{UpstreamServer, UpstreamState};
pub use self::start::{StartedChoice, StartedReply, start};
pub(crate) use self::text_events::{ReplyMeter, text_events};
pub use self::unary::{embed, load, tokens, unload};
