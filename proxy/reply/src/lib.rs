//! Turns an engine's tokens into what a client sees, one choice at a time: text, reasoning, tool calls, stop strings.
//!
//! [`utf8`] holds back unfinished characters, [`stop`] holds back possible stop strings, and [`text`] combines the two and
//! reports the log-probabilities of tokens whose text is final. [`tools`] holds the formats in which families of models
//! write reasoning and tool calls. [`ChoiceReply`] combines all of this for one choice.
//!
//! Everything here is plain state without a clock, a task or I/O, and depends only on the tokens fed, so a failover
//! rebuilds the same state from the same tokens. This crate knows neither engines nor API dialects.
//!
//! ```
//! use baton_reply::ChoiceText;
//! use baton_schemas::sequence::GeneratedToken;
//!
//! let token = |text: &str| GeneratedToken { id: 1, bytes: text.into(), special: false, logprobs: None, drafts: None };
//! let mut reply = ChoiceText::new(vec!["END".to_owned()]);
//! assert_eq!(reply.feed(token("So EN")).text, "So ");
//! let last = reply.feed(token("D of it"));
//! assert!(last.text.is_empty() && last.stopped);
//! ```

pub mod choice;
mod part_content;
mod part_filter;
pub mod part_reply;
pub mod stop;
pub mod text;
pub mod tools;
pub mod utf8;

pub use self::choice::{ChoiceReply, FedStep, ReplyPart, ReplyParts};
pub use self::part_reply::PartReply;
pub use self::text::{ChoiceText, TextStep, TokenLogprobs};
