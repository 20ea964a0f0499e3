//! The configuration of [`CandleEngine`](super::CandleEngine), and its valid ranges.

use std::path::PathBuf;

use baton_model::limits::{self, DEFAULT_MAX_QUEUED, DEFAULT_SLOTS, DEFAULT_UBATCH};

use super::LoadError;

/// How candle runs a model.
#[derive(Debug, Clone)]
pub struct CandleConfig {
    /// The GGUF file.
    pub model: PathBuf,
    /// The model's name; by default the file's own.
    pub name: Option<String>,
    /// Sequences decoded together.
    pub n_slots: u32,
    /// Tokens one sequence may hold. By default the context that the model was trained for, as far as the memory allows;
    /// see [`ModelSizes::choose`](baton_model::gguf::ModelSizes::choose).
    pub n_ctx: Option<u32>,
    /// Tokens the KV caches hold for all slots together.
    pub n_cells: Option<u32>,
    /// Tokens of one step.
    pub n_ubatch: u32,
    /// On a CPU, compute prompts in smaller steps even without streams, so that a new request does not wait long for a
    /// step.
    pub small_steps: bool,
    /// The device that computes: `cpu`, `CUDA0`, `Metal0`, …; by default the first GPU of this build.
    pub device: Option<String>,
    /// Prompt tokens in a step while streams are running; by default as many as the measured rate allows in 100 ms.
    pub prefill_budget: Option<u32>,
    /// Sequences that may wait for a slot.
    pub max_queued: u32,
    /// The source text of a chat template that replaces the model's own.
    pub chat_template: Option<String>,
}

impl CandleConfig {
    /// Defaults for a model file.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        CandleConfig {
            model: model.into(),
            name: None,
            n_slots: DEFAULT_SLOTS,
            n_ctx: None,
            n_cells: None,
            n_ubatch: DEFAULT_UBATCH,
            small_steps: false,
            device: None,
            prefill_budget: None,
            max_queued: DEFAULT_MAX_QUEUED,
            chat_template: None,
        }
    }

    /// Errors: an option is out of range.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        let within = |option: &str, value, range| limits::within(option, value, range).map_err(LoadError::Config);
        within("--slots", self.n_slots, limits::SLOTS)?;
        within("--ubatch", self.n_ubatch, limits::UBATCH)?;
        within("--prefill-budget", self.prefill_budget.unwrap_or(1), limits::UBATCH)?;
        within("--max-queued", self.max_queued, limits::QUEUED)
    }
}
