//! One call as a JSON object, or several in an array.

use std::sync::Arc;

use baton_schemas::tools::Tool;

use super::Pieces;
use super::json_call::{JsonCall, Progress};

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct JsonCalls {
    tools: Arc<[Tool]>,
    call: Option<JsonCall>,
    in_array: bool,
    n_calls: usize,
    /// Text before the first call, as long as there may be none.
    seen: String,
}

impl JsonCalls {
    pub(super) fn new(tools: &Arc<[Tool]>) -> Self {
        JsonCalls { tools: Arc::clone(tools), call: None, in_array: false, n_calls: 0, seen: String::new() }
    }

    /// Whether no call has begun.
    pub(super) fn is_untouched(&self) -> bool {
        self.n_calls == 0 && !self.call.as_ref().is_some_and(JsonCall::has_begun)
    }

    /// What was read of what is no call.
    pub(super) fn give_back(&mut self) -> String {
        let call = self.call.take().map(|mut call| call.give_back()).unwrap_or_default();
        std::mem::take(&mut self.seen) + &call
    }

    /// Takes the next character.
    pub(super) fn feed(&mut self, c: char, out: &mut Pieces) -> Progress {
        if let Some(call) = &mut self.call {
            return match call.feed(c, &self.tools, out) {
                Progress::Done => {
                    self.call = None;
                    self.seen.clear();
                    self.n_calls += 1;
                    if self.in_array { Progress::Reading } else { Progress::Done }
                }
                other => other,
            };
        }
        match c {
            '{' => {
                let mut call = JsonCall::new();
                let progress = call.feed(c, &self.tools, out);
                self.call = Some(call);
                return progress;
            }
            ']' if self.in_array && self.n_calls > 0 => return Progress::Done,
            '[' if !self.in_array && self.n_calls == 0 => self.in_array = true,
            ',' if self.in_array && self.n_calls > 0 => {}
            c if c.is_whitespace() => {}
            _ => {
                self.seen.push(c);
                return Progress::NotACall;
            }
        }
        self.seen.push(c);
        Progress::Reading
    }

    /// The text has ended. What was no call comes back as text.
    pub(super) fn finish(&mut self, out: &mut Pieces) -> String {
        let begun = self.call.as_mut().is_some_and(|call| call.finish(out));
        if begun || self.n_calls > 0 && self.call.is_none() { String::new() } else { self.give_back() }
    }
}
