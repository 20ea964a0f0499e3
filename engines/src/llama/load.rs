//! Loads a model and creates its contexts, with a clear one-line error for every foreseeable failure.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Mutex;

use baton_model::gguf::{
    COMPUTE_RESERVE, CompanionFiles, CompanionMemory, FoundHead, Gguf, ModelSizes, SizeError, SizeOptions, UnusedHead,
    has_compressed_rows,
};
use baton_model::options::{CacheType, RopeOptions, RopeScaling, Speculation, SplitMode};
use baton_schemas::embed::Pooling;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{
    KvCacheType, LlamaContextParams, LlamaContextType, LlamaPoolingType, RopeScalingType,
};
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::{LlamaModelParams, LlamaSplitMode};

use super::adapter::Adapter;
use super::backend::{NAME, backend};
use super::embed::plan::{EmbedOutput, EmbedPlan, MAX_SEQUENCES};
use super::placed::Placed;
use super::state_stream::StateStream;
use super::state_tap::StateTap;
use super::{cpu_tensors, devices};
use crate::engine_options::{EngineOptions, scratch_sequences};
use crate::serving::LoadError;
use crate::serving::memory::available_memory;

/// Chooses the sizes of context and cache. A default shrinks to fit into memory; for a configured size that does not
/// fit, this is an error.
pub(crate) fn sizes(gguf: &Gguf, options: &EngineOptions, available: u64) -> Result<ModelSizes, LoadError> {
    let files = CompanionFiles {
        projector: options.projector.as_deref(),
        adapter: options.lora.as_ref().map(|lora| &*lora.path),
        draft: options.draft.as_deref(),
    };
    let head = head(options, gguf).map_or(CompanionMemory::NONE, FoundHead::memory);
    let wanted = SizeOptions {
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_slots: options.slots(),
        sequences: options.sequences(gguf),
        cache_types: options.cache_types,
        companions: Gguf::companions(files)?.and(head),
    };
    Ok(ModelSizes::choose(gguf, wanted, available)?)
}

pub(crate) fn model(options: &EngineOptions, gguf: &Gguf, placed: &Placed) -> Result<LlamaModel, LoadError> {
    let mut params = model_params(options, placed)?.with_load_mtp(head(options, gguf).is_some());
    // llama.cpp reads them while it loads.
    let cpu_tensors = cpu_tensors::patterns(&options.cpu_tensors, gguf)?;
    for pattern in &cpu_tensors {
        Pin::new(&mut params).add_cpu_buft_override(pattern);
    }
    LlamaModel::load_from_file(backend()?, options.path()?, &params).map_err(|_| LoadError::Refused {
        library: NAME,
        why: format!(
            "its architecture is {:?}. RUST_LOG=info shows llama.cpp's own messages",
            gguf.architecture().unwrap_or("unknown")
        ),
    })
}

/// The model's own head, if it is loaded to guess.
pub(crate) fn head(options: &EngineOptions, gguf: &Gguf) -> Option<FoundHead> {
    options.may_use_head().then(|| options.head(gguf))?.ok()
}

/// Why the model's own head guesses nothing, if it has one and guesses are not refused.
pub(super) fn unused_head(options: &EngineOptions, gguf: &Gguf) -> Option<UnusedHead> {
    if options.speculation == Some(Speculation::Off) {
        return None;
    }
    let asked = EngineOptions { speculation: Some(Speculation::Auto), ..options.clone() };
    match asked.may_use_head().then(|| asked.head(gguf))? {
        Err(why) => Some(why).filter(|why| *why != UnusedHead::Absent),
        Ok(_) => options.speculation.is_none().then_some(UnusedHead::NotAskedFor),
    }
}

/// llama.cpp's parameters for loading the weights. Errors: no device has the configured name.
fn model_params(options: &EngineOptions, placed: &Placed) -> Result<LlamaModelParams, LoadError> {
    // All layers. llama.cpp ignores the number in a build without GPU support.
    let n_gpu_layers = options.n_gpu_layers.unwrap_or(999);
    let params = LlamaModelParams::default().with_n_gpu_layers(n_gpu_layers);
    let split_mode = match options.split_mode {
        None | Some(SplitMode::Layer) => LlamaSplitMode::Layer,
        Some(SplitMode::None) => LlamaSplitMode::None,
        Some(SplitMode::Row) => LlamaSplitMode::Row,
    };
    let params = params
        .with_use_mmap(options.mmap.unwrap_or(true))
        .with_use_mlock(options.mlock.unwrap_or(false))
        .with_split_mode(split_mode);
    let indices = match &options.device {
        _ if placed.has_workers() => placed.indices.clone(),
        Some(name) => devices::indices(name)?,
        None => return Ok(params),
    };
    params.with_devices(&indices).map_err(|e| LoadError::Backend(e.to_string()))
}

/// Threads that compute: by default one for each core.
pub(super) fn threads(options: &EngineOptions) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    options.n_threads.map_or_else(cores, |n| n as usize)
}

/// Returns true if a model keeps more of a sequence than rows of positions, which can be removed one by one.
pub(super) fn has_states(model: &LlamaModel) -> bool {
    model.is_hybrid() || model.is_recurrent()
}

/// Returns true if each sequence of a model has a cache of its own, with compressed rows.
pub(super) fn has_separate_caches(model: &LlamaModel) -> bool {
    model.meta_val_str("general.architecture").is_ok_and(|name| has_compressed_rows(&name))
}

/// The sizes of a context for generation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContextSizes {
    /// Cells of the cache.
    pub(crate) n_cells: u32,
    /// The most tokens of a call, which are computed in physical batches.
    pub(crate) n_batch: u32,
    /// Tokens that can be taken back of each sequence's states.
    pub(crate) n_rollback: u32,
}

/// Creates a context for generation: unified KV and flash attention.
///
/// Handoffs need flash attention: without it V is stored transposed and cannot be sliced by position. A quantized V
/// needs it, too. Slots are the sequences `0..n_slots`; scratch sequences follow.
pub(crate) fn context<'m>(
    model: &'m LlamaModel,
    options: &EngineOptions,
    adapter: Option<&Adapter>,
    sizes: ContextSizes,
) -> Result<LlamaContext<'m>, LoadError> {
    create(model, adapter, sizes.n_cells, generation(model, options, sizes))
}

/// The same, which shows the states of a model that has any, when they are computed.
pub(crate) fn watched_context<'m>(
    model: &'m LlamaModel,
    options: &EngineOptions,
    adapter: Option<&Adapter>,
    sizes: ContextSizes,
) -> Result<(LlamaContext<'m>, Option<StateStream>), LoadError> {
    let mut params = generation(model, options, sizes);
    let tap = has_states(model).then(|| StateTap::new(sizes.n_rollback));
    if let Some(tap) = &tap {
        tap.attach(&mut params);
    }
    Ok((create(model, adapter, sizes.n_cells, params)?, tap.map(StateStream::new)))
}

/// Creates a context of a draft model. Windowed layers keep all positions, so that any of them can be taken back.
pub(super) fn draft_context<'m>(
    model: &'m LlamaModel,
    options: &EngineOptions,
    n_cells: u32,
) -> Result<LlamaContext<'m>, LoadError> {
    let sizes = ContextSizes { n_cells, n_batch: options.ubatch(), n_rollback: 0 };
    create(model, None, n_cells, generation(model, options, sizes).with_swa_full(true))
}

/// Creates a context that computes only the model's own head. Windowed layers keep all positions, as a draft model's do.
pub(super) fn head_context<'m>(
    model: &'m LlamaModel,
    options: &EngineOptions,
    n_cells: u32,
) -> Result<LlamaContext<'m>, LoadError> {
    let sizes = ContextSizes { n_cells, n_batch: options.ubatch(), n_rollback: 0 };
    create(
        model,
        None,
        n_cells,
        generation(model, options, sizes).with_swa_full(true).with_context_type(LlamaContextType::Mtp),
    )
}

fn generation(model: &LlamaModel, options: &EngineOptions, sizes: ContextSizes) -> LlamaContextParams {
    params(options, sizes.n_cells)
        .with_n_batch(sizes.n_batch)
        .with_n_ubatch(options.ubatch())
        .with_n_rs_seq(sizes.n_rollback)
        .with_n_seq_max(options.slots() + scratch_sequences(has_states(model), has_separate_caches(model)))
        .with_type_k(cache_type(options.cache_types.k))
        .with_type_v(cache_type(options.cache_types.v))
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_ENABLED)
}

/// Creates a context for vectors. Errors: memory is short, which the context for generation may already use.
pub(crate) fn embedding_context<'m>(
    model: &'m LlamaModel,
    options: &EngineOptions,
    adapter: Option<&Adapter>,
    plan: &EmbedPlan,
    kv_bytes: u64,
) -> Result<LlamaContext<'m>, LoadError> {
    let n_cells = plan.n_cells();
    let needed_bytes = COMPUTE_RESERVE.saturating_add(kv_bytes);
    let available_bytes = available_memory();
    if needed_bytes > available_bytes {
        return Err(SizeError::TooLarge { n_cells, needed_bytes, available_bytes }.into());
    }
    let pooling = match plan.output {
        EmbedOutput::Vector { pooling: Pooling::Mean, .. } => LlamaPoolingType::Mean,
        EmbedOutput::Vector { pooling: Pooling::Cls, .. } => LlamaPoolingType::Cls,
        EmbedOutput::Vector { pooling: Pooling::Last, .. } => LlamaPoolingType::Last,
        EmbedOutput::Score => LlamaPoolingType::Rank,
    };
    let params = params(options, n_cells)
        .with_n_batch(plan.n_ubatch)
        .with_n_ubatch(plan.n_ubatch)
        .with_n_seq_max(MAX_SEQUENCES)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_AUTO)
        .with_embeddings(true)
        .with_pooling_type(pooling);
    create(model, adapter, n_cells, params)
}

fn cache_type(cache_type: CacheType) -> KvCacheType {
    match cache_type {
        CacheType::F32 => KvCacheType::F32,
        CacheType::F16 => KvCacheType::F16,
        CacheType::Bf16 => KvCacheType::BF16,
        CacheType::Q8_0 => KvCacheType::Q8_0,
        CacheType::Q5_1 => KvCacheType::Q5_1,
        CacheType::Q5_0 => KvCacheType::Q5_0,
        CacheType::Q4_1 => KvCacheType::Q4_1,
        CacheType::Q4_0 => KvCacheType::Q4_0,
        CacheType::Iq4Nl => KvCacheType::IQ4_NL,
    }
}

fn params(options: &EngineOptions, n_cells: u32) -> LlamaContextParams {
    let n_threads = i32::try_from(threads(options)).unwrap_or(i32::MAX);
    with_rope(LlamaContextParams::default(), options.rope)
        .with_n_ctx(NonZeroU32::new(n_cells))
        .with_n_threads(n_threads)
        .with_n_threads_batch(n_threads)
        .with_kv_unified(true)
        .with_swa_full(false)
        .with_no_perf(true)
}

/// Sets what the operator changes; the defaults stand for the model's own settings.
fn with_rope(params: LlamaContextParams, rope: RopeOptions) -> LlamaContextParams {
    let RopeOptions {
        scaling,
        freq_base,
        freq_scale,
        yarn_orig_ctx,
        yarn_ext_factor,
        yarn_attn_factor,
        yarn_beta_slow,
        yarn_beta_fast,
    } = rope;
    let scaling = match scaling {
        None => RopeScalingType::Unspecified,
        Some(RopeScaling::None) => RopeScalingType::None,
        Some(RopeScaling::Linear) => RopeScalingType::Linear,
        Some(RopeScaling::Yarn) => RopeScalingType::Yarn,
    };
    // llama.cpp's values for "not set".
    params
        .with_rope_scaling_type(scaling)
        .with_rope_freq_base(freq_base.unwrap_or(0.0))
        .with_rope_freq_scale(freq_scale.unwrap_or(0.0))
        .with_yarn_orig_ctx(yarn_orig_ctx.unwrap_or(0))
        .with_yarn_ext_factor(yarn_ext_factor.unwrap_or(-1.0))
        .with_yarn_attn_factor(yarn_attn_factor.unwrap_or(-1.0))
        .with_yarn_beta_slow(yarn_beta_slow.unwrap_or(-1.0))
        .with_yarn_beta_fast(yarn_beta_fast.unwrap_or(-1.0))
}

fn create<'m>(
    model: &'m LlamaModel,
    adapter: Option<&Adapter>,
    n_cells: u32,
    params: LlamaContextParams,
) -> Result<LlamaContext<'m>, LoadError> {
    // llama.cpp writes to the model, so creating two contexts from one model at the same time is unsound.
    static CREATING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = CREATING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let context = model.new_context(backend()?, params);
    let mut context = context.map_err(|_| LoadError::Context { n_cells })?;
    if let Some(adapter) = adapter {
        adapter.apply(&mut context)?;
    }
    Ok(context)
}
