//! Measurements of an upstream by its requests: times by model, and the conversations that it has.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_planner::cache_reach::PrefixRun;
use baton_planner::upstream_learning::{EndedReply, LearnedUpstream};

use crate::targets::text_prefixes::{PromptOutline, TextPrefixes};

/// The maximum number of measured models of one upstream. Only configured and listed models are requested.
const MAX_MODELS: usize = 1_000;

/// The most models of one upstream whose measurements are shown.
const MAX_SHOWN: usize = 16;

/// The measurements of one upstream. In memory only.
#[derive(Debug, Default)]
pub(super) struct UpstreamMeasures {
    /// By the upstream's own names.
    models: Mutex<HashMap<String, ModelMeasures>>,
    /// The prompts that it has computed, of all models.
    prefixes: TextPrefixes,
}

/// The measurements of one model.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ModelMeasures {
    pub(super) learned: LearnedUpstream,
    measured_at: Option<Instant>,
    /// Requests that went elsewhere since then, or since the last reply that its client left.
    pub(super) n_passed_over: u64,
    /// Replies in a row that began and did not end.
    pub(super) n_untaught: u32,
    /// Tokens of prompts that were sent and whose replies have not begun.
    pub(super) n_sent: u64,
    /// Tokens of prompts that wait for a place.
    n_waiting: u64,
}

impl ModelMeasures {
    /// Seconds since it was measured.
    pub(super) fn age(&self) -> f64 {
        self.measured_at.map_or(f64::INFINITY, |at| at.elapsed().as_secs_f64())
    }

    /// Tokens of prompts that are not computed.
    pub(super) fn n_backlog(&self) -> u32 {
        u32::try_from(self.n_sent.saturating_add(self.n_waiting)).unwrap_or(u32::MAX)
    }

    fn measured(&mut self) {
        self.measured_at = Some(Instant::now());
        self.n_passed_over = 0;
        self.n_untaught = 0;
    }
}

impl UpstreamMeasures {
    /// The measurements of a model.
    pub(super) fn of(&self, model: &str) -> ModelMeasures {
        self.lock().get(model).copied().unwrap_or_default()
    }

    /// What replies have shown of the models that were measured last, by their names, in the order of these.
    pub(super) fn shown(&self) -> Vec<(String, LearnedUpstream)> {
        let models = self.lock();
        let mut measured: Vec<_> = models.iter().filter(|(_, known)| known.learned.rates.n_replies > 0).collect();
        measured.sort_unstable_by_key(|(_, known)| Reverse(known.measured_at));
        measured.truncate(MAX_SHOWN);
        measured.sort_unstable_by_key(|(name, _)| *name);
        measured.into_iter().map(|(name, known)| (name.clone(), known.learned)).collect()
    }

    /// The parts of a prompt's beginning that it has computed before.
    pub(super) fn runs(&self, prompt: &PromptOutline) -> Vec<PrefixRun> {
        self.prefixes.runs(prompt)
    }

    /// A request for this model went elsewhere.
    pub(super) fn passed_over(&self, model: &str) {
        self.change(model, |known| known.n_passed_over = known.n_passed_over.saturating_add(1));
    }

    /// A request for this model was refused, or failed before its first token, after this time.
    pub(super) fn refused(&self, model: &str, after: Duration) {
        self.change(model, |known| {
            known.learned.rates.learn_refusal(after.as_secs_f64());
            known.measured();
        });
    }

    /// A prompt with so many tokens to compute was sent.
    pub(super) fn sent(&self, model: &str, n_tokens: u64) {
        self.change(model, |known| known.n_sent = known.n_sent.saturating_add(n_tokens));
    }

    /// It was computed, or will not be.
    pub(super) fn begun(&self, model: &str, n_tokens: u64) {
        self.change(model, |known| known.n_sent = known.n_sent.saturating_sub(n_tokens));
    }

    /// A reply of this model began, and its client left before the end.
    pub(super) fn left(&self, model: &str) {
        self.change(model, |known| {
            known.n_untaught = known.n_untaught.saturating_add(1);
            known.n_passed_over = 0;
        });
    }

    /// The upstream has this prompt now.
    pub(super) fn computed(&self, prompt: &PromptOutline) {
        self.prefixes.remember(prompt);
    }

    /// A reply of this model has ended.
    pub(super) fn ended(&self, model: &str, ended: &EndedReply<'_>) {
        self.change(model, |known| {
            known.learned.ended(ended);
            known.measured();
        });
    }

    fn change(&self, model: &str, change: impl FnOnce(&mut ModelMeasures)) {
        let mut models = self.lock();
        if models.len() >= MAX_MODELS && !models.contains_key(model) {
            let oldest = models.iter().min_by_key(|(_, known)| known.measured_at).map(|(name, _)| name.clone());
            oldest.and_then(|name| models.remove(&name));
        }
        change(models.entry(model.to_owned()).or_default());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, ModelMeasures>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A prompt that waits for a place at an upstream, until this is dropped.
pub(super) struct WaitingPrompt<'a> {
    measures: &'a UpstreamMeasures,
    model: &'a str,
    n_tokens: u64,
}

impl<'a> WaitingPrompt<'a> {
    /// It has so many tokens to compute.
    pub(super) fn begin(measures: &'a UpstreamMeasures, model: &'a str, n_tokens: u32) -> WaitingPrompt<'a> {
        let n_tokens = n_tokens.into();
        measures.change(model, |known| known.n_waiting = known.n_waiting.saturating_add(n_tokens));
        WaitingPrompt { measures, model, n_tokens }
    }
}

impl Drop for WaitingPrompt<'_> {
    fn drop(&mut self) {
        self.measures.change(self.model, |known| known.n_waiting = known.n_waiting.saturating_sub(self.n_tokens));
    }
}
