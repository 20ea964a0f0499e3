//! Reasoning between tags at the beginning of a reply.

use baton_schemas::thinking::ThinkTags;

use super::ParsedPieces;
use super::pending::{Front, Pending, without_end_space};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThoughtState {
    /// Before the opening tag, if there is one.
    Start,
    /// In reasoning; `begun` once some of it has been released.
    Inside { begun: bool },
    /// After the closing tag, before the answer.
    Closed,
    /// In the answer, to the end.
    Outside,
}

/// Splits reasoning from the answer.
#[derive(Debug, Clone)]
pub(super) struct Thought {
    tags: ThinkTags,
    state: ThoughtState,
    pending: Pending,
    /// White space at the end of the reasoning so far. It is dropped if nothing follows.
    space: String,
}

impl Thought {
    /// Creates a reader. `is_open` is true if the prompt ends with the opening tag.
    pub(super) fn new(tags: ThinkTags, is_open: bool) -> Self {
        let state = if is_open { ThoughtState::Inside { begun: false } } else { ThoughtState::Start };
        Thought { tags, state, pending: Pending::default(), space: String::new() }
    }

    /// Returns true if the next text is reasoning.
    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, ThoughtState::Inside { .. })
    }

    /// Takes more text. Returns the text of the answer.
    pub(super) fn feed(&mut self, text: String, out: &mut ParsedPieces) -> String {
        self.pending.push(text);
        while !self.pending.is_empty() {
            match self.state {
                ThoughtState::Start => {
                    let n_space = self.pending.0.len() - self.pending.0.trim_start().len();
                    let mut rest = Pending(self.pending.0[n_space..].to_owned());
                    match rest.take_front(&[self.tags.open]) {
                        Front::Unknown => break,
                        Front::Tag(_) => {
                            self.state = ThoughtState::Inside { begun: false };
                            self.pending = rest;
                        }
                        Front::Other => self.state = ThoughtState::Outside,
                    }
                }
                ThoughtState::Inside { .. } => {
                    let (text, close) = self.pending.take_until(&[self.tags.close]);
                    self.think(text, out);
                    if close.is_none() {
                        break;
                    }
                    self.state = ThoughtState::Closed;
                }
                ThoughtState::Closed => {
                    self.pending.skip_space();
                    if !self.pending.is_empty() {
                        self.state = ThoughtState::Outside;
                    }
                }
                ThoughtState::Outside => return self.pending.take(),
            }
        }
        String::new()
    }

    /// Ends the text. Returns the text of the answer.
    pub(super) fn finish(&mut self, out: &mut ParsedPieces) -> String {
        let rest = self.pending.take();
        if self.is_inside() {
            self.think(rest, out);
            return String::new();
        }
        rest
    }

    fn think(&mut self, mut text: String, out: &mut ParsedPieces) {
        let ThoughtState::Inside { begun } = &mut self.state else { return };
        if !*begun {
            text.drain(..text.len() - text.trim_start().len());
        }
        if text.is_empty() {
            return;
        }
        *begun = true;
        out.thought(without_end_space(&mut self.space, text));
    }
}
