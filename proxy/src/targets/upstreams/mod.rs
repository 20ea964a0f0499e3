//! Upstreams: chooses one for a request, tracks their speed and their failures, and turns a reply into events.
//!
//! A request goes to an upstream if only upstreams serve its model, or if no engine can take it. If an upstream fails
//! before the first piece of the reply, another one is tried. A later failure ends the stream with an error, because no
//! other server can continue the reply.

mod busy_models;
mod choice_reader;
mod client_error;
mod described_sight;
mod image_support;
mod measures;
mod model_info;
mod planning;
mod pool;
mod prefill_servers;
mod prompt_estimate;
mod reply_reports;
mod retry;
mod sent_choice;
mod server;
mod start;
mod text_events;
mod token_limit;
mod unary;

pub use self::image_support::seeing;
pub use self::model_info::{model_info, node_info};
pub use self::planning::snapshot;
pub use self::pool::{ServedByUpstreams, ServingUpstream, UpstreamPool};
pub use self::prefill_servers::{PrefillFallback, PrefillServer, PrefillServers, PrefillTotals, Transfer};
pub(crate) use self::prompt_estimate::estimated_tokens;
pub use self::server::{UpstreamHealth, UpstreamServer};
pub use self::start::{FirstChoices, StartedChoice, StartedReply, start};
pub(crate) use self::text_events::{ReplyMeter, text_events};
pub(crate) use self::unary::estimated_input_tokens;
pub use self::unary::{EmbedQuestion, embed, load, tokens, unload};
