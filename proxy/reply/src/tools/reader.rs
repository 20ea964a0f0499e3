//! One reply as its client may see it: text, reasoning, and numbered calls with ids.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;

use super::thought::Thought;
use super::{CallParser, Piece, Pieces};
use crate::part_filter::PartFilter;

/// A step of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text for the user.
    Text(String),
    /// What the model thinks.
    Reasoning(String),
    /// A step of a call.
    Call(ToolCallDelta),
}

/// What a reply may hold besides what it is read for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holds {
    /// It ends with its first call.
    pub(super) one_call: bool,
    /// It is held to calls: it has no text, so that what a limit leaves of it is the beginning of a call.
    pub(super) only_calls: bool,
}

/// Reads one reply. A function of the text alone, but for the ids of calls.
pub struct ReplyReader {
    thought: Option<Thought>,
    calls: Option<Box<dyn CallParser>>,
    filter: PartFilter,
    /// See [`Holds::only_calls`].
    only_calls: bool,
    is_in_call: bool,
    /// The call has arguments, as far as it was read.
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

    /// Whether what comes now is reasoning.
    pub fn is_thinking(&self) -> bool {
        let thinks = self.thought.as_ref().is_some_and(Thought::is_inside);
        thinks || self.calls.as_ref().is_some_and(|calls| calls.is_thinking())
    }

    /// The stop string that ended the reply, if one did.
    pub fn stop_string(&self) -> Option<String> {
        self.filter.stop_string()
    }

    /// Whether the reply is over, by a stop string or by the only call it may hold.
    pub fn is_stopped(&self) -> bool {
        self.filter.is_stopped()
    }

    /// Why the reply ended, given why its sequence ended.
    pub fn reason(&self, reason: FinishReason) -> FinishReason {
        self.filter.reason(reason)
    }

    /// Takes more text.
    pub fn feed(&mut self, text: &str) -> Vec<Part> {
        let mut pieces = Pieces::default();
        let answer = match &mut self.thought {
            Some(thought) => thought.feed(text, &mut pieces),
            None => text.to_owned(),
        };
        match &mut self.calls {
            Some(calls) => calls.feed(&answer, &mut pieces),
            None => pieces.text(&answer),
        }
        self.parts(pieces)
    }

    /// The text has ended; `is_cut` if by a limit, so that what is not complete stays so.
    ///
    /// A call that the model itself left open ends with the arguments it has: parts of it may have been sent, so it can
    /// become neither text nor an error any more, and a call without an end would be lost to who waits for it.
    pub fn finish(&mut self, is_cut: bool) -> Vec<Part> {
        let mut pieces = Pieces::default();
        let answer = self.thought.as_mut().map(|thought| thought.finish(&mut pieces)).unwrap_or_default();
        match &mut self.calls {
            Some(calls) => {
                calls.feed(&answer, &mut pieces);
                calls.finish(&mut pieces);
            }
            None => pieces.text(&answer),
        }
        if is_cut {
            pieces.0.retain(|piece| *piece != Piece::End);
        }
        if is_cut && self.only_calls {
            pieces.0.retain(|piece| !matches!(piece, Piece::Text(_)));
            self.space.clear();
        }
        let mut parts = self.parts(pieces);
        if self.is_in_call && !is_cut {
            let mut rest = Pieces::default();
            if !self.has_arguments {
                rest.arguments("{}");
            }
            rest.end();
            parts.extend(self.parts(rest));
        }
        if !self.filter.is_stopped() {
            let space = std::mem::take(&mut self.space);
            let is_text = self.filter.n_calls() == 0 && !self.is_in_call;
            let mut rest = if is_text { self.filter.text(&space) } else { String::new() };
            rest += &self.filter.finish();
            push_text(&mut parts, rest);
        }
        parts
    }

    fn parts(&mut self, pieces: Pieces) -> Vec<Part> {
        let mut parts = Vec::with_capacity(pieces.0.len());
        for piece in pieces.0 {
            if self.filter.is_stopped() {
                break;
            }
            match piece {
                Piece::Text(text) => self.text(&text, &mut parts),
                Piece::Thought(text) => parts.push(Part::Reasoning(text)),
                Piece::Begin(name) => {
                    self.space.clear();
                    (self.is_in_call, self.has_arguments) = (true, false);
                    self.call(ToolCallDelta::Begin { index: self.filter.n_calls(), id: new_id(), name }, &mut parts);
                }
                Piece::Arguments(fragment) => {
                    self.has_arguments = true;
                    self.call(ToolCallDelta::Arguments { index: self.filter.n_calls(), fragment }, &mut parts);
                }
                Piece::End => {
                    self.is_in_call = false;
                    self.call(ToolCallDelta::End { index: self.filter.n_calls() }, &mut parts);
                }
            }
        }
        parts
    }

    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        // Where calls may come, white space waits: what stands between text and a call is markup.
        let text = if self.calls.is_some() {
            self.space.push_str(text);
            let n_certain = self.space.trim_end().len();
            self.space.drain(..n_certain).collect()
        } else {
            text.to_owned()
        };
        push_text(parts, self.filter.text(&text));
    }

    fn call(&mut self, call: ToolCallDelta, parts: &mut Vec<Part>) {
        push_text(parts, self.filter.call(&call));
        parts.push(Part::Call(call));
    }
}

fn push_text(parts: &mut Vec<Part>, text: String) {
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
}

/// Random, so that the calls of a conversation have different ones even where its seeds are fixed.
fn new_id() -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("call_{}", &id[..24])
}
