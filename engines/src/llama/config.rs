//! The configuration of [`LlamaEngine`](super::LlamaEngine), and its valid ranges.

use std::path::PathBuf;

use baton_model::limits::{self, DEFAULT_MAX_QUEUED, DEFAULT_SLOTS, DEFAULT_UBATCH};
use baton_model::options::{CacheTypes, CpuTensors, LoraFile, RopeOptions, SplitMode, WorkerEndpoint};
use llama_cpp_2::model::params::{LlamaModelParams, LlamaSplitMode};

use super::devices;
use super::load_error::LoadError;
use super::placed::Placed;

/// How llama.cpp runs a model.
#[derive(Debug, Clone)]
pub struct LlamaConfig {
    /// The GGUF file.
    pub model: PathBuf,
    /// The model's name; by default the file's own.
    pub name: Option<String>,
    /// Sequences decoded together.
    pub n_slots: u32,
    /// Tokens one sequence may hold. By default the context that the model was trained for, as far as the memory allows;
    /// see [`ModelSizes::choose`](baton_model::gguf::ModelSizes::choose).
    pub n_ctx: Option<u32>,
    /// Tokens the KV cache holds for all slots together.
    pub n_cells: Option<u32>,
    /// Tokens of one physical compute batch.
    pub n_ubatch: u32,
    /// On a CPU, compute prompts in smaller steps than a physical batch even without streams, so that a new request does
    /// not wait long for a step.
    pub small_steps: bool,
    /// Compute threads; by default one per core.
    pub n_threads: Option<u32>,
    /// Layers on the GPU; by default all.
    pub n_gpu_layers: Option<u32>,
    /// The one device that computes, by llama.cpp's name, or `cpu`; by default all GPUs.
    pub device: Option<String>,
    /// Map the file into memory. False reads the whole file, which can be faster from a slow or a network disk.
    pub mmap: bool,
    /// Lock the weights in memory, so that the system does not swap them out.
    pub mlock: bool,
    /// The types of K and V in the cache of generation.
    pub cache_types: CacheTypes,
    /// Changes of the position embedding.
    pub rope: RopeOptions,
    /// The adapter that changes the weights.
    pub lora: Option<LoraFile>,
    /// How the model is split among GPUs; by default by layers.
    pub split_mode: Option<SplitMode>,
    /// Tensors that stay on the CPU.
    pub cpu_tensors: CpuTensors,
    /// Prompt tokens in a step while streams are running; by default as many as the measured rate allows in 100 ms.
    pub prefill_budget: Option<u32>,
    /// Sequences that may wait for a slot.
    pub max_queued: u32,
    /// The source text of a chat template that replaces the model's own.
    pub chat_template: Option<String>,
    /// The GGUF file of the model's projector (mmproj), for images.
    pub projector: Option<PathBuf>,
    /// Workers that compute layers, too. They are connected when the engine starts.
    pub workers: Vec<WorkerEndpoint>,
}

impl LlamaConfig {
    /// Defaults for a model file.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        LlamaConfig {
            model: model.into(),
            name: None,
            n_slots: DEFAULT_SLOTS,
            n_ctx: None,
            n_cells: None,
            n_ubatch: DEFAULT_UBATCH,
            small_steps: false,
            n_threads: None,
            n_gpu_layers: None,
            device: None,
            mmap: true,
            mlock: false,
            cache_types: CacheTypes::default(),
            rope: RopeOptions::default(),
            lora: None,
            split_mode: None,
            cpu_tensors: CpuTensors::default(),
            prefill_budget: None,
            max_queued: DEFAULT_MAX_QUEUED,
            chat_template: None,
            projector: None,
            workers: Vec::new(),
        }
    }

    /// llama.cpp's parameters for loading the weights. Errors: no device has the configured name.
    pub(super) fn model_params(&self, placed: &Placed) -> Result<LlamaModelParams, LoadError> {
        // All layers. llama.cpp ignores the number in a build without GPU support.
        let n_gpu_layers = self.n_gpu_layers.unwrap_or(999);
        let params = LlamaModelParams::default().with_n_gpu_layers(n_gpu_layers);
        let split_mode = match self.split_mode {
            None | Some(SplitMode::Layer) => LlamaSplitMode::Layer,
            Some(SplitMode::None) => LlamaSplitMode::None,
            Some(SplitMode::Row) => LlamaSplitMode::Row,
        };
        let params = params.with_use_mmap(self.mmap).with_use_mlock(self.mlock).with_split_mode(split_mode);
        let indices = match &self.device {
            _ if placed.has_workers() => placed.indices.clone(),
            Some(name) => devices::indices(name)?,
            None => return Ok(params),
        };
        params.with_devices(&indices).map_err(|e| LoadError::Backend(e.to_string()))
    }

    pub(super) fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.n_threads.map_or_else(cores, |n| n as usize)
    }

    /// Errors: an option is out of range, or there is no device for it.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        let within = |option: &str, value, range| limits::within(option, value, range).map_err(LoadError::Config);
        within("--slots", self.n_slots, limits::SLOTS)?;
        within("--ubatch", self.n_ubatch, limits::UBATCH)?;
        within("--threads", self.n_threads.unwrap_or(1), limits::THREADS)?;
        within("--prefill-budget", self.prefill_budget.unwrap_or(1), limits::UBATCH)?;
        within("--max-queued", self.max_queued, limits::QUEUED)?;
        match self.workers.is_empty() {
            true => devices::check(self.device.as_deref(), self.n_gpu_layers),
            // They have the devices.
            false => Ok(()),
        }
    }
}
