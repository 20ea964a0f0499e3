//! From tokens to text that a client may see, one choice at a time.
//!
//! [`utf8`] holds back half a character, [`stop`] holds back what may become a stop string, and [`text`] joins the two
//! and tells which tokens' log-probabilities became final. [`reply`] adds what the model's format makes of the text. All of it is plain state without a clock or a task, and a
//! function of the tokens fed alone: after a failover the same state is rebuilt by feeding the same tokens again.

pub mod utf8;

pub mod stop;

pub mod text;

pub mod reply;

pub use reply::ChoiceReply;
pub use text::{ChoiceText, Step};
