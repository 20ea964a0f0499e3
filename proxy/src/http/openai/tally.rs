//! Adds up what a reply reports at its end.

use baton_schemas::handoff::HandoffTimings;
use baton_schemas::openai::usage::{TimingsReport, Usage};
use baton_schemas::sequence::Timings;

use crate::generate::Event;
use crate::http::steps::Step;

/// Counts and times over all choices of a request.
#[derive(Debug, Default)]
pub(super) struct Tally {
    n_prompt: u32,
    n_cached: u32,
    n_completion: u32,
    timings: Timings,
    handoff: Option<HandoffTimings>,
}

impl Tally {
    /// Takes a step into account.
    pub(super) fn record(&mut self, step: &Step) {
        match step {
            Step::Accepted { n_prompt, .. } => self.n_prompt = *n_prompt,
            // The other choices find the prompt that choice 0 computed: theirs says nothing about the cache before.
            Step::Event(Event::Started { choice: 0, n_cached }) => self.n_cached = *n_cached,
            // Choices share the prompt, so only one of them has it fetched.
            Step::Event(Event::Handoff { timings, .. }) => self.handoff = Some(*timings),
            Step::Event(Event::Started { .. } | Event::Text { .. }) => {}
            Step::Event(Event::Finished { choice, n_completion, timings, .. }) => {
                self.n_completion = self.n_completion.saturating_add(*n_completion);
                self.add(*choice, timings);
            }
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage::new(self.n_prompt, self.n_cached, self.n_completion)
    }

    pub(super) fn timings(&self) -> TimingsReport {
        TimingsReport::new(self.n_cached, &self.timings, self.handoff)
    }

    /// The prompt is choice 0's. Choices decode side by side: their tokens add up, their time is the longest one's.
    fn add(&mut self, choice: u32, timings: &Timings) {
        if choice == 0 {
            self.timings.queue_ms = timings.queue_ms;
            self.timings.prompt_n = timings.prompt_n;
            self.timings.prompt_ms = timings.prompt_ms;
        }
        self.timings.predicted_n = self.timings.predicted_n.saturating_add(timings.predicted_n);
        self.timings.predicted_ms = self.timings.predicted_ms.max(timings.predicted_ms);
    }
}
