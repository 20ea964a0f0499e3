//! Reads one call as a JSON object, or several in an array.

use std::sync::Arc;

use baton_schemas::tools::Tool;

use super::ParsedPieces;
use super::json_call::{CallProgress, JsonCall};

#[derive(Debug, Clone)]
pub(super) struct JsonCalls {
    tools: Arc<[Tool]>,
    /// The calls stand between tags, so they cannot be answers in JSON.
    is_marked: bool,
    call: Option<JsonCall>,
    in_array: bool,
    n_calls: usize,
    /// Text before the first call, which is given back if there is none.
    seen: String,
}

impl JsonCalls {
    /// Calls after a tag that announces them.
    pub(super) fn marked(tools: &Arc<[Tool]>) -> Self {
        let tools = Arc::clone(tools);
        JsonCalls { tools, is_marked: true, call: None, in_array: false, n_calls: 0, seen: String::new() }
    }

    /// Calls that only their form tells from answers in JSON.
    pub(super) fn unmarked(tools: &Arc<[Tool]>) -> Self {
        JsonCalls { is_marked: false, ..JsonCalls::marked(tools) }
    }

    /// Returns true if no call has begun.
    pub(super) fn is_untouched(&self) -> bool {
        self.n_calls == 0 && !self.call.as_ref().is_some_and(JsonCall::has_begun)
    }

    /// Returns the text that is not a call.
    pub(super) fn give_back(&mut self) -> String {
        let call = self.call.take().map(|mut call| call.give_back()).unwrap_or_default();
        std::mem::take(&mut self.seen) + &call
    }

    /// Takes the next character.
    pub(super) fn feed(&mut self, c: char, out: &mut ParsedPieces) -> CallProgress {
        if let Some(call) = &mut self.call {
            return match call.feed(c, &self.tools, out) {
                CallProgress::Done => {
                    self.call = None;
                    self.seen.clear();
                    self.n_calls += 1;
                    if self.in_array { CallProgress::Reading } else { CallProgress::Done }
                }
                other => other,
            };
        }
        match c {
            '{' => {
                let mut call = JsonCall::new(self.is_marked);
                let progress = call.feed(c, &self.tools, out);
                self.call = Some(call);
                return progress;
            }
            ']' if self.in_array && self.n_calls > 0 => return CallProgress::Done,
            '[' if !self.in_array && self.n_calls == 0 => self.in_array = true,
            ',' if self.in_array && self.n_calls > 0 => {}
            c if c.is_whitespace() => {}
            _ => {
                self.seen.push(c);
                return CallProgress::NotACall;
            }
        }
        self.seen.push(c);
        CallProgress::Reading
    }

    /// Ends the text. Returns the text that is not a call.
    pub(super) fn finish(&mut self, out: &mut ParsedPieces) -> String {
        let begun = self.call.as_mut().is_some_and(|call| call.finish(out));
        if begun || self.n_calls > 0 && self.call.is_none() { String::new() } else { self.give_back() }
    }
}
