//! The events of a reply, free of any dialect. Every target's output becomes these, and every dialect writes them.

use baton_reply::TokenLogprobs;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::Timings;
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, Token};

/// Something that happens in one choice of a reply.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplyEvent {
    /// Which choice, from 0.
    pub choice: u32,
    /// What happens.
    pub kind: EventKind,
}

/// What happens in a choice.
#[derive(Debug, Clone, PartialEq)]
pub enum EventKind {
    /// The choice has a slot in an engine, and its prefill begins. Always a choice's first event.
    Started {
        /// Prompt tokens that were cached.
        n_cached: u32,
    },
    /// Another node computed the prompt, or tried to. Comes before the choice's text.
    Handoff {
        /// How long the handoff took, and why it failed if it did.
        timings: HandoffReport,
    },
    /// The route changed after it was announced. Comes before any text. Concerns the whole reply.
    Rerouted {
        /// The new value of `x-baton-route`, for a reply whose head is not written yet.
        route: String,
    },
    /// An upstream has reported the prompt's length. Comes before the first choice finishes.
    Usage {
        /// The estimate until now.
        n_estimated: u32,
        /// Tokens of the prompt.
        n_prompt: u32,
        /// Those of them that were cached.
        n_cached: u32,
    },
    /// More text. Whole UTF-8 characters, never part of a stop string. May be empty if `tokens` is not.
    Text {
        /// The text.
        text: String,
        /// The tokens whose text became final with this event; filled only if log-probabilities were asked for.
        tokens: Vec<TokenLogprobs>,
    },
    /// More of the model's reasoning.
    Reasoning {
        /// Never empty.
        text: String,
    },
    /// A step of a tool call.
    ToolCall {
        /// What is new, and of which call.
        call: ToolCallDelta,
    },
    /// The tokens of the prompt and the reply, if the client asked for them. Comes before the choice finishes.
    Context {
        /// Includes the tokens of a stop string, but not the token that ends the turn.
        tokens: Vec<Token>,
    },
    /// The choice is complete. Always its last event.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// The stop string that was reached, if one was.
        stop: Option<String>,
        /// Tokens generated, including those of a stop string and of a half-finished character.
        n_completion: u32,
        /// Those of them that were reasoning, including its tags.
        n_reasoning: u32,
        /// Where the time went.
        timings: Timings,
    },
}

impl EventKind {
    /// This, as an event of a choice.
    pub fn of(self, choice: u32) -> ReplyEvent {
        ReplyEvent { choice, kind: self }
    }

    /// Returns true for a part of the reply and for its end.
    pub fn is_result(&self) -> bool {
        match self {
            EventKind::Started { .. }
            | EventKind::Handoff { .. }
            | EventKind::Rerouted { .. }
            | EventKind::Usage { .. }
            | EventKind::Context { .. } => false,
            EventKind::Text { .. }
            | EventKind::Reasoning { .. }
            | EventKind::ToolCall { .. }
            | EventKind::Finished { .. } => true,
        }
    }
}
