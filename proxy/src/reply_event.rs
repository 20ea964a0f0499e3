//! The events of a reply, independent of any dialect. Every target's output is translated to these events, and every
//! dialect writes them.

use std::sync::Arc;

use baton_reply::tools::PartContent;
use baton_reply::{ReplyPart, TokenLogprobs};
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::{CachedTokens, GeneratedToken, Timings};
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, Token};
use baton_upstream::LeftOut;

/// An event in one choice of a reply.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplyEvent {
    pub choice: u32,
    pub kind: EventKind,
}

/// The kind of an event, with its data.
#[derive(Debug, Clone, PartialEq)]
pub enum EventKind {
    /// The request was accepted. Always the first event that a dialect gets, with the first choice of the prompt.
    Accepted {
        /// Tokens in the rendered prompt.
        n_prompt: u32,
        /// The value of `x-baton-route`.
        route: String,
        sampling: Box<Sampling>,
    },
    /// The prompt's tokens, each after the first with its log-probabilities, if the client asks for them. Comes once, before
    /// all others of choice 0 but [`EventKind::Accepted`], and concerns the whole reply.
    Prompt { tokens: Arc<[GeneratedToken]> },
    /// The choice has a slot in an engine, and its prefill begins. Only [`EventKind::Accepted`] and
    /// [`EventKind::Prompt`] come before it in a choice.
    Started(CachedTokens),
    /// Another node computed the prompt, or tried to. Comes before the choice's text.
    Handoff {
        /// The duration of the handoff, and the reason if it failed.
        report: HandoffReport,
    },
    /// The route changed after it was announced. Comes before any text. Concerns the whole reply.
    Rerouted {
        /// The new value of `x-baton-route`, for a reply whose head is not sent yet.
        route: String,
    },
    /// An upstream has reported the prompt's length. Comes before the first choice finishes.
    Usage {
        /// The earlier estimate of the prompt's tokens.
        n_estimated: u32,
        /// Tokens in the prompt.
        n_prompt: u32,
        /// Prompt tokens that were cached.
        n_cached: u32,
    },
    /// A prefill server of the upstream computed the choice's prompt. Comes as the choice starts, and once more before it
    /// finishes, when its tokens are known.
    Prefilled {
        /// The server's name.
        server: String,
        /// From the request to the server's answer, milliseconds.
        prefill_ms: f64,
        /// The most tokens of the prompt that can have come by transfer; 0 as the choice starts.
        n_transferred: u32,
    },
    /// More text. Whole UTF-8 characters, never part of a stop string. May be empty if `tokens` is not.
    Text {
        text: String,
        /// The tokens whose text became final with this event; empty unless log-probabilities were requested.
        tokens: Vec<TokenLogprobs>,
    },
    /// More of the model's reasoning.
    Reasoning {
        /// Never empty.
        text: String,
    },
    /// More of the words with which the model refuses to answer.
    Refusal {
        /// Never empty.
        text: String,
    },
    /// The upstream's reply has something that no dialect shows. Comes once for each kind.
    LeftOut(LeftOut),
    /// A step of a tool call.
    ToolCall {
        /// The new part, and the index of its call.
        call: ToolCallDelta,
    },
    /// The tokens of the prompt and the reply, if the client requested them. Comes before the choice finishes.
    Context {
        /// Includes the tokens of a stop string, but not the token that ends the turn.
        tokens: Vec<Token>,
    },
    /// The choice is complete. Always its last event.
    Finished {
        reason: FinishReason,
        /// The stop string that ended the choice, if any.
        stop: Option<String>,
        /// Tokens generated, including those of a stop string and of a half-finished character.
        n_completion: u32,
        /// Generated tokens that were reasoning, including its tags.
        n_reasoning: u32,
        /// The times of prefill and decode.
        timings: Timings,
    },
}

impl ReplyEvent {
    /// Returns the route that this event announces, if any. The last announced route counts.
    pub fn route(&self) -> Option<&str> {
        match &self.kind {
            EventKind::Accepted { route, .. } | EventKind::Rerouted { route } => Some(route),
            _ => None,
        }
    }

    /// Returns what this event says to be left out, if anything.
    pub fn left_out(&self) -> Option<LeftOut> {
        match self.kind {
            EventKind::LeftOut(left_out) => Some(left_out),
            _ => None,
        }
    }
}

impl EventKind {
    /// Makes an event of this choice.
    pub fn of(self, choice: u32) -> ReplyEvent {
        ReplyEvent { choice, kind: self }
    }

    /// Returns true for text, reasoning, refusals, tool calls, and the end of the choice.
    pub fn is_result(&self) -> bool {
        match self {
            EventKind::Accepted { .. }
            | EventKind::Prompt { .. }
            | EventKind::Started(_)
            | EventKind::Handoff { .. }
            | EventKind::Rerouted { .. }
            | EventKind::Usage { .. }
            | EventKind::Prefilled { .. }
            | EventKind::LeftOut(_)
            | EventKind::Context { .. } => false,
            EventKind::Text { .. }
            | EventKind::Reasoning { .. }
            | EventKind::Refusal { .. }
            | EventKind::ToolCall { .. }
            | EventKind::Finished { .. } => true,
        }
    }
}

impl From<ReplyPart> for EventKind {
    fn from(ReplyPart { content, tokens }: ReplyPart) -> EventKind {
        match content {
            PartContent::Text(text) => EventKind::Text { text, tokens },
            PartContent::Reasoning(text) => EventKind::Reasoning { text },
            PartContent::Refusal(text) => EventKind::Refusal { text },
            PartContent::Call(call) => EventKind::ToolCall { call },
        }
    }
}
