//! From a GGUF path to a loaded model and a context, with every foreseeable failure in one clear line.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use baton_schemas::embed::Pooling;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;

use super::LlamaConfig;
use super::embed::{self, EmbedPlan};
use crate::gguf::{CELL_ALIGNMENT, COMPUTE_RESERVE, Gguf, GgufError, ModelSizes, SizeError, SizeWishes};

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is missing, not a GGUF, cut short or malformed.
    #[error(transparent)]
    File(#[from] GgufError),
    /// Weights and KV cache do not fit into memory.
    #[error(
        "too little memory: {path} with {n_cells} tokens of KV cache needs about {needed_mib} MiB, and {available_mib} MiB \
         are available. Use a smaller model, or a smaller --ctx-size or --kv-cells."
    )]
    TooLittleMemory {
        /// The model file.
        path: PathBuf,
        /// KV cells asked for.
        n_cells: u32,
        /// Weights plus KV, MiB.
        needed_mib: u64,
        /// What the machine has free, MiB.
        available_mib: u64,
    },
    /// llama.cpp refused a file that looks sound, e.g. an architecture it does not know.
    #[error(
        "llama.cpp cannot load {path} (architecture {architecture:?}). Run with RUST_LOG=info to see its own words."
    )]
    Refused {
        /// The model file.
        path: PathBuf,
        /// From the file's metadata.
        architecture: String,
    },
    /// llama.cpp could not create a context: memory, as a rule.
    #[error(
        "llama.cpp cannot set up a context of {n_cells} tokens for {path}; this is memory as a rule. Try a smaller --ctx-size."
    )]
    Context {
        /// The model file.
        path: PathBuf,
        /// KV cells asked for.
        n_cells: u32,
    },
    /// The embedded template does not parse. Serving without it would answer in a format the model does not know.
    #[error("the chat template of {path} cannot be used: {message}. Override it with --chat-template-file.")]
    Template {
        /// The model file.
        path: PathBuf,
        /// The template engine's words.
        message: String,
    },
    /// The projector cannot be used with this model.
    #[error("{} cannot be used as the model's projector: {why}. --mmproj names it.", path.display())]
    Projector {
        /// The projector's file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// llama.cpp's backend did not initialise.
    #[error("llama.cpp did not start: {0}")]
    Backend(String),
    /// An option is out of range.
    #[error("{0}")]
    Config(String),
}

impl LoadError {
    /// The same without paths, for clients.
    pub fn summary(&self) -> &'static str {
        match self {
            LoadError::File(GgufError::NotFound { .. }) => "the model file is missing",
            LoadError::File(GgufError::Truncated { .. }) => "the model file is cut short",
            LoadError::File(GgufError::NotProjector { .. }) => "the model's projector cannot be used",
            LoadError::File(_) => "the model file cannot be read",
            LoadError::TooLittleMemory { .. } | LoadError::Context { .. } => "there is too little memory for the model",
            LoadError::Refused { .. } => "the model is of a kind that cannot be loaded",
            LoadError::Template { .. } => "the model's chat template cannot be used",
            LoadError::Projector { .. } => "the model's projector cannot be used",
            LoadError::Backend(_) | LoadError::Config(_) => "the engine is not set up correctly",
        }
    }
}

/// Chooses context and cache sizes, and refuses what memory cannot hold. A default shrinks to fit; a size the operator
/// asked for does not.
pub(super) fn sizes(gguf: &Gguf, config: &LlamaConfig, available: u64) -> Result<ModelSizes, LoadError> {
    let projector_bytes = config.projector.as_deref().map(Gguf::projector_bytes).transpose()?.unwrap_or(0);
    let (n_ctx, n_cells, n_slots) = (config.n_ctx, config.n_cells, config.n_slots);
    let wishes = SizeWishes { n_ctx, n_cells, n_slots, projector_bytes };
    ModelSizes::choose(gguf, wishes, available).map_err(|error| match error {
        SizeError::OutOfRange(message) => LoadError::Config(message),
        SizeError::TooLarge { n_cells, needed_bytes, available_bytes } => LoadError::TooLittleMemory {
            path: config.model.clone(),
            n_cells,
            needed_mib: needed_bytes >> 20,
            available_mib: available_bytes >> 20,
        },
    })
}

/// Memory that can be taken without pushing others out, bytes; unlimited where the system does not say.
pub(super) fn available_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let available = system.available_memory();
    // Not the group's `free_memory`: that counts the page cache, a model file just read included, as taken.
    let in_cgroup = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory.saturating_sub(limits.rss));
    if available == 0 { u64::MAX } else { available.min(in_cgroup) }
}

/// llama.cpp's process-wide state. Initialised once and kept: the crate refuses a second time.
pub(super) fn backend() -> Result<&'static LlamaBackend, LoadError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    let backend = BACKEND.get_or_init(|| {
        llama_cpp_2::send_logs_to_tracing(llama_cpp_2::LogOptions::default());
        LlamaBackend::init().map_err(|e| e.to_string())
    });
    backend.as_ref().map_err(|e| LoadError::Backend(e.clone()))
}

/// Loads the weights.
pub(super) fn model(config: &LlamaConfig, gguf: &Gguf) -> Result<LlamaModel, LoadError> {
    let params = config.model_params()?;
    LlamaModel::load_from_file(backend()?, &config.model, &params).map_err(|_| LoadError::Refused {
        path: config.model.clone(),
        architecture: gguf.architecture().unwrap_or("unknown").to_owned(),
    })
}

/// Sequences beside those of the slots: KV enters and leaves through one that is otherwise empty
/// ([`super::transfer`]).
///
/// In a unified full cache a sequence costs nothing but bits. A sliding-window cache has `n_swa` cells for each (7.5 MiB
/// on Gemma 3 270M, 3 MiB on a 20B gpt-oss), which an import needs while its slot's older cells are still in place.
pub(super) const SCRATCH_SEQUENCES: u32 = 1;

/// Creates a context as the whole design needs it: unified KV, flash attention, f16 cache.
///
/// Flash attention is not a preference: without it V is stored transposed, which the KV handoff cannot slice. Slots
/// are the sequences `0..n_slots`, scratch sequences come behind them.
pub(super) fn context<'m>(
    model: &'m LlamaModel,
    config: &LlamaConfig,
    n_cells: u32,
) -> Result<LlamaContext<'m>, LoadError> {
    let params = params(config, n_cells)
        .with_n_batch(config.n_ubatch + config.n_slots)
        .with_n_ubatch(config.n_ubatch)
        .with_n_seq_max(config.n_slots + SCRATCH_SEQUENCES)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_ENABLED);
    create(model, config, n_cells, params)
}

/// Creates a context for vectors, beside that of generation. Refuses if memory is short: by then others live on it.
pub(super) fn embedding_context<'m>(
    model: &'m LlamaModel,
    config: &LlamaConfig,
    plan: &EmbedPlan,
    kv_bytes_per_token: u64,
) -> Result<LlamaContext<'m>, LoadError> {
    let n_cells = plan.facts.n_ctx.next_multiple_of(CELL_ALIGNMENT);
    let needed = COMPUTE_RESERVE.saturating_add(u64::from(n_cells).saturating_mul(kv_bytes_per_token));
    let available = available_memory();
    if needed > available {
        let (path, needed_mib, available_mib) = (config.model.clone(), needed >> 20, available >> 20);
        return Err(LoadError::TooLittleMemory { path, n_cells, needed_mib, available_mib });
    }
    let pooling = match plan.facts.pooling {
        Pooling::Mean => LlamaPoolingType::Mean,
        Pooling::Cls => LlamaPoolingType::Cls,
        Pooling::Last => LlamaPoolingType::Last,
    };
    let params = params(config, n_cells)
        .with_n_batch(plan.n_ubatch)
        .with_n_ubatch(plan.n_ubatch)
        .with_n_seq_max(embed::MAX_SEQUENCES)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_AUTO)
        .with_embeddings(true)
        .with_pooling_type(pooling);
    create(model, config, n_cells, params)
}

fn params(config: &LlamaConfig, n_cells: u32) -> LlamaContextParams {
    let n_threads = i32::try_from(config.threads()).unwrap_or(i32::MAX);
    LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(n_cells))
        .with_n_threads(n_threads)
        .with_n_threads_batch(n_threads)
        .with_kv_unified(true)
        .with_swa_full(false)
        .with_no_perf(true)
}

fn create<'m>(
    model: &'m LlamaModel,
    config: &LlamaConfig,
    n_cells: u32,
    params: LlamaContextParams,
) -> Result<LlamaContext<'m>, LoadError> {
    // Two contexts created from one model at once are unsound in llama.cpp (it writes to the model).
    static CREATING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = CREATING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    model.new_context(backend()?, params).map_err(|_| LoadError::Context { path: config.model.clone(), n_cells })
}
