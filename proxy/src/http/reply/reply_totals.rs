//! Adds up the counts and times of a reply's choices.

use baton_schemas::Token;
use baton_schemas::sequence::Timings;
use baton_upstream::LeftOut;
use http::HeaderMap;

use super::route_header::insert_route;
use super::warning::warn_left_out;
use crate::reply_counts::ReplyCounts;
use crate::reply_event::{EventKind, ReplyEvent};

/// Counts and times over all choices of a reply.
#[derive(Debug, Clone, Default)]
pub(in crate::http) struct ReplyTotals {
    /// Tokens of prompts and choices.
    pub(in crate::http) counts: ReplyCounts,
    /// Generated tokens that were reasoning.
    pub(in crate::http) n_reasoning: u32,
    /// The times of prefill and decode.
    pub(in crate::http) timings: Timings,
    /// The route, for `x-baton-route`.
    pub(in crate::http) route: String,
    /// The tokens of prompt and reply, if the client requested them.
    pub(in crate::http) context: Vec<Token>,
    /// What the upstream's reply has and no dialect shows.
    left_out: Vec<LeftOut>,
    choices_per_prompt: u32,
}

impl ReplyTotals {
    /// Creates the totals of a reply. Each of its prompts has `choices_per_prompt` choices.
    pub(in crate::http) fn new(choices_per_prompt: u32) -> Self {
        ReplyTotals { choices_per_prompt: choices_per_prompt.max(1), ..ReplyTotals::default() }
    }

    /// Adds the headers of a whole reply: its route, and a warning of what it leaves out.
    pub(in crate::http) fn insert_into(&self, headers: &mut HeaderMap) {
        insert_route(headers, &self.route);
        warn_left_out(headers, &self.left_out);
    }

    /// Prompt tokens that nobody computed for this reply.
    pub(in crate::http) fn n_cached(&self) -> u32 {
        self.counts.n_cached()
    }

    pub(in crate::http) fn record(&mut self, event: &ReplyEvent) {
        self.counts.record(event, self.choices_per_prompt);
        if let Some(route) = event.route() {
            route.clone_into(&mut self.route);
        }
        match &event.kind {
            EventKind::LeftOut(left_out) => {
                self.left_out.extend(Some(*left_out).filter(|it| !self.left_out.contains(it)))
            }
            EventKind::Context { tokens } => self.context.clone_from(tokens),
            EventKind::Finished { n_reasoning, timings, .. } => {
                self.n_reasoning = self.n_reasoning.saturating_add(*n_reasoning);
                self.add(event.choice, timings);
            }
            _ => {}
        }
    }

    /// Counts the prompt once, for its first choice. Choices and prompts run in parallel: tokens add up, and the time
    /// is that of the slowest.
    fn add(&mut self, choice: u32, timings: &Timings) {
        let total = &mut self.timings;
        if choice.is_multiple_of(self.choices_per_prompt) {
            total.queue_ms = total.queue_ms.max(timings.queue_ms);
            total.prompt_n = total.prompt_n.saturating_add(timings.prompt_n);
            total.prompt_ms = total.prompt_ms.max(timings.prompt_ms);
        }
        total.predicted_n = total.predicted_n.saturating_add(timings.predicted_n);
        total.predicted_ms = total.predicted_ms.max(timings.predicted_ms);
        total.drafts = total.drafts.plus(timings.drafts);
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::handoff::HandoffReport;
    use baton_schemas::sequence::CachedTokens;

    use super::*;

    #[test]
    fn what_another_node_had_cached_counts_as_cached() {
        let mut totals = ReplyTotals::new(1);
        let cached = CachedTokens { n_cached: 40, memory: 10, disk: 20 };
        totals.record(&EventKind::Started(cached).of(0));
        let report = HandoffReport { n_tokens: 100, n_computed: 30, ..HandoffReport::default() };
        totals.record(&EventKind::Handoff { report }.of(0));
        assert_eq!(totals.n_cached(), 40 + 70);
        let failure = Some(baton_schemas::handoff::HandoffFailure::PrefillLost);
        let report = HandoffReport { failure, n_computed: 0, ..report };
        totals.record(&EventKind::Handoff { report }.of(0));
        assert_eq!(totals.n_cached(), 40, "a node that failed did not say what it computed");
    }

    #[test]
    fn only_the_handoff_of_the_last_route_is_shown() {
        let mut totals = ReplyTotals::new(1);
        let rerouted = || EventKind::Rerouted { route: "route=direct".to_owned() };
        let handoff = |n_tokens| EventKind::Handoff { report: HandoffReport { n_tokens, ..HandoffReport::default() } };
        let mut shown = |kind: EventKind| {
            totals.record(&kind.of(0));
            totals.counts.handoff.map(|report| report.n_tokens)
        };
        assert_eq!(shown(handoff(1_280)), Some(1_280));
        assert_eq!(shown(rerouted()), None, "the engine was lost, and another one starts again");
        assert_eq!(shown(handoff(900)), Some(900));
    }
}
