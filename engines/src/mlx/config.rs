//! The configuration of [`MlxEngine`](super::MlxEngine), and its valid ranges.

use std::path::PathBuf;
use std::time::Duration;

use baton_model::limits::{self, DEFAULT_MAX_QUEUED, DEFAULT_SLOTS, DEFAULT_UBATCH};

use super::LoadError;

/// How mlx-lm runs a model.
#[derive(Debug, Clone)]
pub struct MlxConfig {
    /// The model's folder: `config.json`, `*.safetensors`, `tokenizer.json`.
    pub model: PathBuf,
    /// The Python that has mlx-lm.
    pub python: PathBuf,
    /// The model's name; by default the folder's.
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
    /// Threads of MLX's matrix products on the processor. By default its own choice.
    pub n_threads: Option<u32>,
    /// The device that computes: `cpu`; by default MLX's own choice, the GPU of a Mac.
    pub device: Option<String>,
    /// Prompt tokens in a step while streams are running; by default as many as the measured rate allows in 100 ms.
    pub prefill_budget: Option<u32>,
    /// Sequences that may wait for a slot.
    pub max_queued: u32,
    /// The source text of a chat template that replaces the model's own.
    pub chat_template: Option<String>,
    /// The worker counts as lost if it gives no sign of life for so long while it should compute.
    pub max_silence: Duration,
}

impl MlxConfig {
    /// Defaults for a model's folder, computed by this Python.
    pub fn new(model: impl Into<PathBuf>, python: impl Into<PathBuf>) -> Self {
        MlxConfig {
            model: model.into(),
            python: python.into(),
            name: None,
            n_slots: DEFAULT_SLOTS,
            n_ctx: None,
            n_cells: None,
            n_ubatch: DEFAULT_UBATCH,
            small_steps: false,
            n_threads: None,
            device: None,
            prefill_budget: None,
            max_queued: DEFAULT_MAX_QUEUED,
            chat_template: None,
            max_silence: MAX_SILENCE,
        }
    }

    /// Errors: an option is out of range.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        let within = |option: &str, value, range| limits::within(option, value, range).map_err(LoadError::Config);
        within("--slots", self.n_slots, limits::SLOTS)?;
        within("--ubatch", self.n_ubatch, limits::UBATCH)?;
        within("--threads", self.n_threads.unwrap_or(1), limits::THREADS)?;
        within("--prefill-budget", self.prefill_budget.unwrap_or(1), limits::UBATCH)?;
        within("--max-queued", self.max_queued, limits::QUEUED)?;
        match &self.device {
            Some(device) if !device.eq_ignore_ascii_case(CPU) => {
                let message =
                    format!("there is no device {device:?} for mlx; leave it out for MLX's own choice, or use cpu");
                Err(LoadError::Config(message))
            }
            _ => Ok(()),
        }
    }
}

/// The name of the processor in options.
pub(super) const CPU: &str = "cpu";
/// A worker sends a sign of life each second. On a machine that swaps, its thread may not run for some seconds.
const MAX_SILENCE: Duration = Duration::from_secs(15);
