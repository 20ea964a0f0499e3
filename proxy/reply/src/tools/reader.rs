//! Splits one reply's text into text, reasoning, and numbered calls with ids.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;

use super::pending::without_end_space;
use super::thought::Thought;
use super::{CallParser, ParsedPiece, ParsedPieces};
use crate::part_content::{PartContent, PartContents};
use crate::part_filter::{PartFilter, push_text};

/// Limits on the content of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holds {
    /// The reply ends with its first call.
    pub(super) one_call: bool,
    /// The reply must be a call and has no text. If a limit cuts it off, the rest is an unfinished call.
    pub(super) only_calls: bool,
}

/// Reads one reply. Its output depends on the text alone, except for the ids of calls.
pub struct ReplyReader {
    thought: Option<Thought>,
    calls: Option<Box<dyn CallParser>>,
    filter: PartFilter,
    /// See [`Holds::only_calls`].
    only_calls: bool,
    is_in_call: bool,
    /// The call has arguments so far.
    has_arguments: bool,
    /// White space that is dropped if a call follows.
    space: String,
}

impl ReplyReader {
    /// A reader of a reply that ends before the earliest of `stops`.
    pub(super) fn new(
        thought: Option<Thought>,
        calls: Option<Box<dyn CallParser>>,
        stops: Vec<String>,
        holds: Holds,
    ) -> Self {
        ReplyReader {
            thought,
            calls,
            filter: PartFilter::new(stops, holds.one_call),
            only_calls: holds.only_calls,
            is_in_call: false,
            has_arguments: false,
            space: String::new(),
        }
    }

    /// Returns true if the next text is reasoning.
    pub fn is_thinking(&self) -> bool {
        let thinks = self.thought.as_ref().is_some_and(Thought::is_inside);
        thinks || self.calls.as_ref().is_some_and(|calls| calls.is_thinking())
    }

    /// The stop string that ended the reply, if one did.
    pub fn stop_string(&self) -> Option<String> {
        self.filter.stop_string()
    }

    /// Returns true once a stop string, or the only allowed call, has ended the reply.
    pub fn is_stopped(&self) -> bool {
        self.filter.is_stopped()
    }

    /// The reply's finish reason, from that of its sequence.
    pub fn reason(&self, reason: FinishReason) -> FinishReason {
        self.filter.reason(reason)
    }

    /// Takes more text.
    pub(crate) fn feed(&mut self, text: String) -> PartContents {
        let mut pieces = ParsedPieces::default();
        let answer = match &mut self.thought {
            Some(thought) => thought.feed(text, &mut pieces),
            None => text,
        };
        match &mut self.calls {
            Some(calls) => calls.feed(answer, &mut pieces),
            None => pieces.text(answer),
        }
        self.parts(pieces)
    }

    /// Ends the text. If `is_cut`, a limit ended it, and an unfinished call stays unfinished. Before its first argument it
    /// is left out.
    ///
    /// A call that the model itself left open ends with the arguments so far. Parts of it may have been sent, so it
    /// cannot become text or an error, and without its end the client would wait.
    pub(crate) fn finish(&mut self, is_cut: bool) -> PartContents {
        let mut pieces = ParsedPieces::default();
        let answer = self.thought.as_mut().map(|thought| thought.finish(&mut pieces)).unwrap_or_default();
        match &mut self.calls {
            Some(calls) => {
                calls.feed(answer, &mut pieces);
                calls.finish(&mut pieces);
            }
            None => pieces.text(answer),
        }
        if is_cut {
            pieces.0.retain(|piece| *piece != ParsedPiece::End);
        }
        if is_cut && self.only_calls {
            pieces.0.retain(|piece| !matches!(piece, ParsedPiece::Text(_)));
            self.space.clear();
        }
        let mut parts = self.parts(pieces);
        if self.is_in_call && !is_cut {
            let mut rest = ParsedPieces::default();
            if !self.has_arguments {
                rest.arguments("{}");
            }
            rest.end();
            parts.extend(self.parts(rest));
        }
        if !self.filter.is_stopped() {
            let space = std::mem::take(&mut self.space);
            let is_text = self.filter.n_calls() == 0 && !self.is_in_call;
            let mut rest = if is_text { self.filter.text(space) } else { String::new() };
            rest += &self.filter.finish();
            push_text(&mut parts, rest);
        }
        parts
    }

    fn parts(&mut self, pieces: ParsedPieces) -> PartContents {
        let mut parts = PartContents::new();
        for piece in pieces.0 {
            if self.filter.is_stopped() {
                break;
            }
            match piece {
                ParsedPiece::Text(text) => self.text(text, &mut parts),
                ParsedPiece::Thought(text) => parts.push(PartContent::Reasoning(text)),
                ParsedPiece::Begin(name) => {
                    self.space.clear();
                    self.is_in_call = true;
                    self.has_arguments = false;
                    let begin = ToolCallDelta::Begin { index: self.filter.n_calls(), id: new_id(), name };
                    self.filter.call(begin, &mut parts);
                }
                ParsedPiece::Arguments(fragment) => {
                    self.has_arguments = true;
                    let arguments = ToolCallDelta::Arguments { index: self.filter.n_calls(), fragment };
                    self.filter.call(arguments, &mut parts);
                }
                ParsedPiece::End => {
                    self.is_in_call = false;
                    self.filter.call(ToolCallDelta::End { index: self.filter.n_calls() }, &mut parts);
                }
            }
        }
        parts
    }

    fn text(&mut self, text: String, parts: &mut PartContents) {
        // Hold back white space if a call may follow, because between text and a call it is markup.
        let text = if self.calls.is_some() { without_end_space(&mut self.space, text) } else { text };
        push_text(parts, self.filter.text(text));
    }
}

/// A random id, so that the calls of a conversation differ even if its seeds are fixed.
fn new_id() -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("call_{}", &id[..24])
}
