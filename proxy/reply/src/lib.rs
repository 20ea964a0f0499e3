//! From an engine's tokens to what a client may see, one choice at a time: text, reasoning, tool calls, stop strings.
//!
//! [`utf8`] holds back half a character, [`stop`] holds back what may become a stop string, and [`text`] joins the two
//! and reports which tokens' log-probabilities became final. [`tools`] knows how families of models write reasoning and
//! tool calls. [`ChoiceReply`] is all of that for one choice.
//!
//! Everything here is plain state without a clock, a task or I/O, and a function of the tokens fed alone: after a
//! failover the same state is rebuilt by feeding the same tokens again. Which engine the tokens come from, and which API
//! shape the client speaks, is known above.

pub mod choice;
mod part_filter;
pub mod part_reply;
pub mod stop;
pub mod text;
pub mod tools;
pub mod utf8;

pub use self::choice::{ChoiceReply, ReplyPart, ReplyStep};
pub use self::part_reply::PartReply;
pub use self::text::{ChoiceText, TextStep, TokenLogprobs};
