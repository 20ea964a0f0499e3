//! Applies stop strings and the limit of calls to the parts of a reply, whether they are read from an engine's tokens or
//! arrive as parts.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;

use crate::part_content::{PartContent, PartContents};
use crate::stop::StopScanner;

/// Finds stop strings in the text for the user, counts calls, and decides when the reply is over.
#[derive(Debug, Clone)]
pub(crate) struct PartFilter {
    scanner: StopScanner,
    /// The reply ends with its first call.
    one_call: bool,
    /// The beginning of a call without arguments so far. Clients read a call without arguments as a call with none, so a
    /// call that a limit cuts here must not reach them.
    begun: Option<ToolCallDelta>,
    n_calls: u32,
    stopped: bool,
}

impl PartFilter {
    /// A filter of a reply that ends before the earliest of `stops`, and after its first call if `one_call`.
    pub(crate) fn new(stops: Vec<String>, one_call: bool) -> Self {
        PartFilter { scanner: StopScanner::new(stops), one_call, begun: None, n_calls: 0, stopped: false }
    }

    /// Takes more text. Returns the text that can no longer become part of a stop string.
    pub(crate) fn text(&mut self, text: String) -> String {
        let scan = self.scanner.feed(text);
        self.stopped |= scan.stopped;
        scan.text
    }

    /// Takes a step of a call, and adds what it releases to `parts`: held back text, and steps of the call. Arguments are
    /// not searched for stop strings, because a cut would break their JSON.
    pub(crate) fn call(&mut self, call: ToolCallDelta, parts: &mut PartContents) {
        match &call {
            ToolCallDelta::Begin { .. } => {
                push_text(parts, self.release());
                self.begun = Some(call).filter(|_| !self.stopped);
                return;
            }
            ToolCallDelta::Arguments { fragment, .. } if fragment.is_empty() => return,
            ToolCallDelta::Arguments { .. } => {}
            ToolCallDelta::End { .. } => {
                self.n_calls += 1;
                self.stopped |= self.one_call;
            }
        }
        parts.extend(self.begun.take().map(PartContent::Call));
        parts.push(PartContent::Call(call));
    }

    /// Returns the held back text, because no text follows that could complete a stop string. A whole one in it ends the
    /// reply: then nothing may follow the text.
    pub(crate) fn release(&mut self) -> String {
        let scan = self.scanner.finish();
        self.stopped |= scan.stopped;
        scan.text
    }

    /// Ends the reply. Returns the held back text.
    pub(crate) fn finish(&mut self) -> String {
        if self.stopped { String::new() } else { self.release() }
    }

    /// Returns true once a stop string, or the only allowed call, has ended the reply.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The number of complete calls.
    pub(crate) fn n_calls(&self) -> u32 {
        self.n_calls
    }

    /// The stop string that ended the reply, if one did.
    pub(crate) fn stop_string(&self) -> Option<String> {
        self.scanner.reached().map(str::to_owned)
    }

    /// The reply's finish reason, from that of its generation.
    pub(crate) fn reason(&self, reason: FinishReason) -> FinishReason {
        match reason {
            FinishReason::Stop if self.n_calls > 0 => FinishReason::ToolCalls,
            reason => reason,
        }
    }
}

/// Adds text, unless it is empty.
pub(crate) fn push_text(parts: &mut PartContents, text: String) {
    if !text.is_empty() {
        parts.push(PartContent::Text(text));
    }
}
