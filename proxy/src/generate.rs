//! The life of a request, from an admitted `GenerateRequest` to a stream of text.

use std::pin::Pin;

use baton_schemas::FinishReason;
use baton_schemas::sequence::{CacheScope, Logprobs, Timings};
use futures::Stream;

use crate::error::RequestError;

/// Who asks, as far as the layers below HTTP need to know.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Separates callers in the prefix cache; derived from the API key that was presented.
    pub cache_scope: CacheScope,
    /// The id in `x-request-id`, for the log.
    pub request_id: String,
}

/// An accepted request: what is known before its first token, and the events that follow.
///
/// Dropping it cancels all its sequences and gives its permit back.
pub struct Generation {
    /// Tokens in the rendered prompt.
    pub n_prompt: u32,
    /// One line on where this request runs and why, for `x-baton-route`.
    pub route: String,
    /// Events of all choices, interleaved. Ends after every choice has finished, or with an error.
    pub events: EventStream,
}

/// See [`Generation::events`].
pub type EventStream = Pin<Box<dyn Stream<Item = Result<Event, RequestError>> + Send>>;

/// A step of a reply, free of any dialect.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A choice has a slot in an engine; its prefill begins. Always a choice's first event.
    Started {
        /// Which choice, from 0.
        choice: u32,
        /// Prompt tokens that were cached.
        n_cached: u32,
    },
    /// More text of a choice. Whole UTF-8 characters, never part of a stop string. May be empty if `tokens` is not.
    Text {
        /// Which choice, from 0.
        choice: u32,
        /// The text.
        text: String,
        /// The tokens whose text became final with this event; filled only if log-probabilities were asked for.
        tokens: Vec<TokenLogprobs>,
    },
    /// A choice is complete. Always its last event.
    Finished {
        /// Which choice, from 0.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Tokens generated, those of a stop string and a half-finished character included.
        n_completion: u32,
        /// Where the time went.
        timings: Timings,
    },
}

/// A token with its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability and the alternatives.
    pub logprobs: Logprobs,
}
