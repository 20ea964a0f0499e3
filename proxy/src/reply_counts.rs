//! The tokens of a reply, counted from its events. The client and its key's usage get the same numbers.

use baton_schemas::handoff::HandoffReport;

use crate::reply_event::{EventKind, ReplyEvent};

/// Tokens of a reply, over all its choices.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReplyCounts {
    /// Tokens in the prompts.
    pub n_prompt: u32,
    /// Prompt tokens that the engine that generates had.
    n_started_with: u32,
    /// Tokens generated, of choices that have finished.
    pub n_completion: u32,
    /// The handoff's report, if another node computed the prompt.
    pub handoff: Option<HandoffReport>,
}

impl ReplyCounts {
    /// The counts of a prompt with so many tokens, as it was accepted.
    pub fn of_prompt(n_prompt: u32) -> ReplyCounts {
        ReplyCounts { n_prompt, ..ReplyCounts::default() }
    }

    /// Prompt tokens that nobody computed for this reply.
    pub fn n_cached(&self) -> u32 {
        self.n_started_with.saturating_add(self.handoff.map_or(0, |handoff| handoff.n_reused()))
    }

    /// Counts an event. Each prompt of the reply has `choices_per_prompt` choices.
    pub fn record(&mut self, event: &ReplyEvent, choices_per_prompt: u32) {
        match &event.kind {
            EventKind::Accepted { n_prompt, .. } => self.n_prompt = self.n_prompt.saturating_add(*n_prompt),
            // The other choices find the prompt that the first one computed, so their counts do not show what was
            // cached before.
            EventKind::Started(cached) if event.choice.is_multiple_of(choices_per_prompt) => {
                self.n_started_with = self.n_started_with.saturating_add(cached.n_cached);
            }
            EventKind::Usage { n_estimated, n_prompt, n_cached } => {
                self.n_prompt = self.n_prompt.saturating_sub(*n_estimated).saturating_add(*n_prompt);
                self.n_started_with = self.n_started_with.saturating_add(*n_cached);
            }
            // Choices share the prompt, so only one of them fetches it.
            EventKind::Handoff { report } => self.handoff = Some(*report),
            EventKind::Rerouted { .. } => self.rerouted(),
            EventKind::Finished { n_completion, .. } => {
                self.n_completion = self.n_completion.saturating_add(*n_completion);
            }
            EventKind::Prompt { .. }
            | EventKind::Started(_)
            | EventKind::Prefilled { .. }
            | EventKind::Text { .. }
            | EventKind::Reasoning { .. }
            | EventKind::Refusal { .. }
            | EventKind::LeftOut(_)
            | EventKind::ToolCall { .. }
            | EventKind::Context { .. } => {}
        }
    }

    /// An engine that starts again reports a handoff of its own, or makes none.
    pub fn rerouted(&mut self) {
        self.handoff = None;
    }
}
