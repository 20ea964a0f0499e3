//! Stop strings and the limit of calls, applied to the parts of a reply. Both replies use it: those whose text is read
//! from an engine's tokens, and those that arrive in parts.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;

use crate::stop::StopScanner;

/// Finds stop strings in the text for the user, counts calls, and knows when the reply is over.
#[derive(Debug, Clone)]
pub(crate) struct PartFilter {
    scanner: StopScanner,
    stops: Vec<String>,
    /// The reply ends with its first call.
    one_call: bool,
    n_calls: u32,
    stopped: bool,
}

impl PartFilter {
    /// A filter of a reply that ends before the earliest of `stops`, and after its first call if `one_call`.
    pub(crate) fn new(stops: Vec<String>, one_call: bool) -> Self {
        PartFilter { scanner: StopScanner::new(stops.clone()), stops, one_call, n_calls: 0, stopped: false }
    }

    /// Takes more text. Returns what can no longer become part of a stop string.
    pub(crate) fn text(&mut self, text: &str) -> String {
        let scan = self.scanner.feed(text);
        self.stopped |= scan.stopped;
        scan.text
    }

    /// Takes a step of a call. Returns the text before it that was held back. Stop strings are not looked for in
    /// arguments: they would cut JSON.
    pub(crate) fn call(&mut self, call: &ToolCallDelta) -> String {
        match call {
            ToolCallDelta::Begin { .. } => {
                std::mem::replace(&mut self.scanner, StopScanner::new(self.stops.clone())).finish().text
            }
            ToolCallDelta::Arguments { .. } => String::new(),
            ToolCallDelta::End { .. } => {
                self.n_calls += 1;
                self.stopped |= self.one_call;
                String::new()
            }
        }
    }

    /// Ends the reply. Returns the text that was held back.
    pub(crate) fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let scan = self.scanner.finish();
        self.stopped = scan.stopped;
        scan.text
    }

    /// Returns true once the reply is over, by a stop string or by the only call that it may hold.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Calls that came to their end.
    pub(crate) fn n_calls(&self) -> u32 {
        self.n_calls
    }

    /// The stop string that ended the reply, if one did.
    pub(crate) fn stop_string(&self) -> Option<String> {
        self.scanner.reached().map(str::to_owned)
    }

    /// Why the reply ended, given why its generation ended.
    pub(crate) fn reason(&self, reason: FinishReason) -> FinishReason {
        match reason {
            FinishReason::Stop if self.n_calls > 0 => FinishReason::ToolCalls,
            reason => reason,
        }
    }
}
