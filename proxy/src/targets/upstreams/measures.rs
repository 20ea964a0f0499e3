//! Measurements of an upstream by its requests: times by model, and the conversations that it has.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_planner::cache_reach::PrefixRun;
use baton_planner::upstream_learning::{EndedReply, LearnedUpstream};
use baton_planner::upstream_rates::PromptBacklog;
use baton_planner::upstream_work::{FollowedRequest, GeneratedTime, UpstreamWork};

use crate::targets::text_prefixes::{PromptOutline, TextPrefixes};

/// The maximum number of measured models of one upstream. Only configured and listed models are requested.
const MAX_MODELS: usize = 1_000;

/// The most models of one upstream whose measurements are shown.
const MAX_SHOWN: usize = 16;

/// The measurements of one upstream. In memory only.
#[derive(Debug)]
pub(super) struct UpstreamMeasures {
    /// By the upstream's own names.
    models: Mutex<HashMap<String, ModelMeasures>>,
    /// The prompts that it has computed, of all models.
    prefixes: TextPrefixes,
    /// Times of requests are seconds since then.
    since: Instant,
    n_tickets: AtomicU64,
}

impl Default for UpstreamMeasures {
    fn default() -> UpstreamMeasures {
        UpstreamMeasures {
            models: Mutex::default(),
            prefixes: TextPrefixes::default(),
            since: Instant::now(),
            n_tickets: AtomicU64::default(),
        }
    }
}

/// The measurements of one model.
#[derive(Debug, Clone, Default)]
struct ModelMeasures {
    learned: LearnedUpstream,
    measured_at: Option<Instant>,
    n_passed_over: u64,
    n_untaught: u32,
    /// The requests that were sent there or wait for a place.
    work: UpstreamWork,
}

/// What is known of one model at one moment.
#[derive(Debug, Clone)]
pub(super) struct KnownModel {
    pub(super) learned: LearnedUpstream,
    /// Seconds since it was measured.
    pub(super) age: f64,
    /// Requests that went elsewhere since then, or since the last reply that its client left.
    pub(super) n_passed_over: u64,
    /// Replies in a row that began and did not end.
    pub(super) n_untaught: u32,
    /// Tokens of all prompts that are not computed.
    pub(super) n_backlog: f64,
    /// The prompts of these that were sent.
    pub(super) sent: PromptBacklog,
    /// Its requests, unless they are too many.
    pub(super) open: Vec<FollowedRequest>,
}

impl ModelMeasures {
    fn known(&self, now: f64) -> KnownModel {
        KnownModel {
            learned: self.learned,
            age: self.measured_at.map_or(f64::INFINITY, |at| at.elapsed().as_secs_f64()),
            n_passed_over: self.n_passed_over,
            n_untaught: self.n_untaught,
            n_backlog: self.work.n_backlog(),
            sent: self.learned.rates.backlog(self.work.sent_prompts()),
            open: self.work.open(now, self.learned.rates.constant_seconds()),
        }
    }

    fn measured(&mut self) {
        self.measured_at = Some(Instant::now());
        self.n_passed_over = 0;
        self.n_untaught = 0;
    }
}

impl UpstreamMeasures {
    /// What is known of a model now.
    pub(super) fn of(&self, model: &str) -> KnownModel {
        let now = self.now();
        self.lock().get(model).map_or_else(|| ModelMeasures::default().known(now), |measures| measures.known(now))
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

    /// A request is sent. Its prompt has so many tokens to compute, and its reply probably has `n_output`. Returns its ticket.
    pub(super) fn sent(&self, model: &str, n_missing: f64, n_output: f64) -> u64 {
        let (ticket, now) = (self.ticket(), self.now());
        self.change(model, |known| known.work.send(ticket, n_missing, n_output, now));
        ticket
    }

    /// The first piece of its reply has come.
    pub(super) fn begun(&self, model: &str, ticket: u64) {
        let now = self.now();
        self.change(model, |known| known.work.begin(ticket, now, known.learned.rates.constant_seconds()));
    }

    /// It has ended in some way. Returns how its reply was generated, if one began.
    pub(super) fn gone(&self, model: &str, ticket: u64) -> Option<GeneratedTime> {
        let now = self.now();
        let mut models = self.lock();
        let known = models.get_mut(model)?;
        known.work.end(ticket, now, known.learned.rates.constant_seconds())
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

    fn now(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }

    fn ticket(&self) -> u64 {
        self.n_tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, ModelMeasures>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that waits for a place at an upstream, until this is dropped.
pub(super) struct WaitingPrompt<'a> {
    measures: &'a UpstreamMeasures,
    model: &'a str,
    ticket: u64,
}

impl<'a> WaitingPrompt<'a> {
    /// Its prompt has so many tokens to compute, and its reply probably has `n_output`.
    pub(super) fn begin(
        measures: &'a UpstreamMeasures,
        model: &'a str,
        n_missing: u32,
        n_output: f64,
    ) -> WaitingPrompt<'a> {
        let ticket = measures.ticket();
        measures.change(model, |known| known.work.wait(ticket, n_missing.into(), n_output));
        WaitingPrompt { measures, model, ticket }
    }
}

impl Drop for WaitingPrompt<'_> {
    fn drop(&mut self) {
        self.measures.gone(self.model, self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_as_load_from_its_plan_to_its_end() {
        let measures = UpstreamMeasures::default();
        let counted = || {
            let known = measures.of("m");
            (known.sent.n_tokens, known.n_backlog, known.open.len())
        };
        let waiting = WaitingPrompt::begin(&measures, "m", 300, 50.0);
        assert_eq!(counted(), (0.0, 300.0, 1));
        drop(waiting);
        let ticket = measures.sent("m", 200.0, 50.0);
        assert_eq!(counted(), (200.0, 200.0, 1));
        measures.begun("m", ticket);
        assert_eq!(counted(), (0.0, 0.0, 1));
        assert!(measures.gone("m", ticket).is_some() && measures.gone("m", ticket).is_none());
        assert_eq!((counted(), measures.gone("other", ticket)), ((0.0, 0.0, 0), None));
    }
}
