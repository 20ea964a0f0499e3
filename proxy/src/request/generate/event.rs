//! What happens in a reply, step by step, in no dialect.

use baton_reply::TokenLogprobs;
use baton_schemas::handoff::HandoffTimings;
use baton_schemas::sequence::Timings;
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, Token};

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
    /// A choice's prompt was computed on another node, or that was tried. Comes before its text.
    Handoff {
        /// Which choice, from 0.
        choice: u32,
        /// What came of it.
        timings: HandoffTimings,
    },
    /// The reply is on another route than was said, or was, for a part of its prompt. Comes before its text.
    Rerouted {
        /// For `x-baton-route`, if its head is not out yet.
        route: String,
    },
    /// An upstream has told how long the prompt was. Comes before the first choice's end.
    Usage {
        /// Which choice, from 0.
        choice: u32,
        /// What was thought until now.
        n_estimated: u32,
        /// Tokens of the prompt.
        n_prompt: u32,
        /// Those of them that were cached.
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
    /// More of what the model thinks before it answers.
    Reasoning {
        /// Which choice, from 0.
        choice: u32,
        /// Never empty.
        text: String,
    },
    /// A step of a tool's call.
    ToolCall {
        /// Which choice, from 0.
        choice: u32,
        /// What is new of which call.
        call: ToolCallDelta,
    },
    /// The tokens of a prompt and of what came of it, if they were asked for. Comes before the choice's end.
    Context {
        /// Which choice, from 0.
        choice: u32,
        /// All that were generated, those of a stop string included. The token that ends a turn is none of them.
        tokens: Vec<Token>,
    },
    /// A choice is complete. Always its last event.
    Finished {
        /// Which choice, from 0.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// The stop string that was reached, if one was.
        stop: Option<String>,
        /// Tokens generated, those of a stop string and a half-finished character included.
        n_completion: u32,
        /// Those of them that were reasoning, its tags included.
        n_reasoning: u32,
        /// Where the time went.
        timings: Timings,
    },
}

impl Event {
    /// Whether it is a part of the reply, or its end.
    pub fn is_result(&self) -> bool {
        match self {
            Event::Started { .. }
            | Event::Handoff { .. }
            | Event::Rerouted { .. }
            | Event::Usage { .. }
            | Event::Context { .. } => false,
            Event::Text { .. } | Event::Reasoning { .. } | Event::ToolCall { .. } | Event::Finished { .. } => true,
        }
    }
}
