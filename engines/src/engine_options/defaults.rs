//! What an engine does without an option, and the ranges that keep it from aborting.

use std::path::PathBuf;

use baton_model::gguf::{FoundHead, Gguf, Sequences, UnusedHead};
use baton_model::limits::{self, DEFAULT_MAX_QUEUED, DEFAULT_SLOTS, DEFAULT_UBATCH, PROCESSORS_UBATCH, WORKERS_UBATCH};
use baton_model::options::{CacheTypes, RopeOptions, Speculation};

use super::EngineOptions;

impl EngineOptions {
    /// The default options for a model's file or folder.
    pub fn of(model: impl Into<PathBuf>) -> EngineOptions {
        EngineOptions { model: Some(model.into()), ..EngineOptions::default() }
    }

    /// Sequences decoded together.
    pub fn slots(&self) -> u32 {
        self.n_slots.unwrap_or(DEFAULT_SLOTS)
    }

    /// Tokens of one physical compute batch.
    pub fn ubatch(&self) -> u32 {
        self.n_ubatch.unwrap_or(if self.workers.is_empty() {
            DEFAULT_UBATCH
        } else if self.workers.iter().any(|worker| worker.has_processor) {
            PROCESSORS_UBATCH
        } else {
            WORKERS_UBATCH
        })
    }

    /// Returns true if this model's states could be taken back by a token if guesses were asked for.
    pub(crate) fn could_take_back(&self, model: &Gguf) -> bool {
        self.kind.sequences(self.slots(), self.ubatch(), Speculation::Auto, model).n_rollback > 0
    }

    /// When tokens are guessed for a model with states.
    pub(crate) fn speculation_with_states(&self) -> Speculation {
        Speculation::of_states(self.speculation, self.draft.is_some())
    }

    /// Returns true if a model's own head may guess. A configured draft model guesses in its place, and workers show no hidden rows.
    pub(crate) fn may_use_head(&self) -> bool {
        self.speculation_with_states() == Speculation::Auto && self.draft.is_none() && self.workers.is_empty()
    }

    /// The sequences of an engine for this model.
    pub(crate) fn sequences(&self, model: &Gguf) -> Sequences {
        self.kind.sequences(self.slots(), self.ubatch(), self.speculation_with_states(), model)
    }

    /// The head with which an engine can guess for this model. Errors: why it has none.
    pub(crate) fn head(&self, model: &Gguf) -> Result<FoundHead, UnusedHead> {
        self.kind.head(self.sequences(model), self.cache_types, model)
    }

    /// Sequences that may wait for a slot.
    pub fn queued(&self) -> u32 {
        self.max_queued.unwrap_or(DEFAULT_MAX_QUEUED)
    }

    /// Errors, in words: an option is out of its range. Configuration and flags are checked before; this is for other callers.
    pub(crate) fn check_ranges(&self) -> Result<(), String> {
        limits::within("--slots", self.slots(), limits::SLOTS)?;
        limits::within("--ubatch", self.ubatch(), limits::UBATCH)?;
        limits::within("--threads", self.n_threads.unwrap_or(1), limits::THREADS)?;
        limits::within("--prefill-budget", self.prefill_budget.unwrap_or(1), limits::UBATCH)?;
        limits::within("--max-queued", self.queued(), limits::QUEUED)
    }

    /// An option that is set and changes what the model computes. An engine that lacks it must not ignore it.
    pub(crate) fn changes_the_model(&self) -> Option<&'static str> {
        [
            (self.cache_types != CacheTypes::default(), "--cache-type-k or --cache-type-v"),
            (self.rope != RopeOptions::default(), "options of RoPE"),
            (self.lora.is_some(), "--lora"),
            (self.projector.is_some(), "--mmproj"),
        ]
        .into_iter()
        .find_map(|(is_set, option)| is_set.then_some(option))
    }
}
