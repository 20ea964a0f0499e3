//! Runs GGUF models with llama.cpp.
//!
//! [`Llama`] describes and loads models for [`serving`](crate::serving), whose thread owns the contexts. `baton node` uses it.
//! The proxy never does, since a crash in C++ must cost a node and not the endpoint.

mod adapter;
pub(crate) mod backend;
pub mod blob;
mod cell_order;
pub mod checkpoint;
pub mod compressed;
pub(crate) mod context;
#[cfg(test)]
mod context_tests;
mod cpu_tensors;
pub mod devices;
pub(crate) mod draft;
pub(crate) mod embed;
mod export_buffer;
pub(crate) mod head;
#[cfg(feature = "measure")]
pub mod head_cost;
pub mod import_state;
#[cfg(feature = "measure")]
pub mod key_energy;
pub(crate) mod load;
mod locked_memory;
mod no_kv;
mod pixels;
pub(crate) mod placed;
pub mod placement;
pub mod positions;
pub mod probe;
pub(crate) mod projector;
#[cfg(feature = "measure")]
mod queries;
#[cfg(feature = "measure")]
pub mod reference;
mod rollback;
pub(crate) mod rpc;
mod shapes;
#[cfg(test)]
mod shared_position_tests;
pub mod shares;
mod state;
pub(crate) mod state_stream;
mod state_tap;
mod tokenizer;
mod tokens;
pub mod transfer;
mod transfers;
#[cfg(feature = "measure")]
pub mod trial;
pub(crate) mod vocabulary;

use std::sync::Arc;

use baton_model::gguf::{Gguf, ModelSizes};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;

use self::adapter::Adapter;
use self::context::LlamaSlots;
use self::draft::LoadedDraft;
use self::embed::Embedder;
use self::embed::plan::EmbedPlan;
use self::head::{HiddenRows, LlamaHead};
use self::load::ContextSizes;
use self::placed::Placed;
use self::projector::Projector;
pub use self::state::StateError;
use self::state_stream::StateStream;
use self::transfers::kv_form;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::context::ModelContext;
use crate::serving::described::{DescribedModel, Generator, IdleKv, LoadedModel, ModelLibrary, NoKv, Reranker};
use crate::serving::drafting::batch_drafter::BatchDrafter;
use crate::serving::images::ImageEncoder;
use crate::serving::jobs::EngineLoad;
use crate::serving::scheduler::SchedulerLimits;

/// Bytes of weights up to which steps on a CPU may be longer. Those of larger models would take too long.
const SMALL_MODEL: u64 = 1 << 30;

/// llama.cpp.
#[derive(Default)]
pub struct Llama;

/// The weights, and what the thread's contexts need.
pub(crate) struct PlacedModel {
    model: Arc<LlamaModel>,
    gguf: Arc<Gguf>,
    options: EngineOptions,
    sizes: ModelSizes,
    adapter: Option<Arc<Adapter>>,
    /// Guesses tokens.
    draft: Option<LoadedDraft>,
    /// Encodes images.
    projector: Option<Arc<Projector>>,
    /// The plan for vectors, if the model gives any.
    embedding: Option<EmbedPlan>,
    placed: Placed,
    /// ggml's index of the first GPU that computes, at least a part of the layers.
    gpu: Option<usize>,
    devices: Vec<String>,
}

impl ModelLibrary for Llama {
    const ENGINE: &'static str = "llama";
    const VERSION: &'static str = "llama-cpp-sys-2 0.1.161";
    const NAME: &'static str = backend::NAME;
    const CHANGES_MODELS: bool = true;

    type Model = PlacedModel;
    type Context<'m> = LlamaSlots<'m>;
    type Vectors<'m> = Embedder<'m>;

    /// Loads the weights, too: llama.cpp reads the vocabulary with them.
    fn describe(&self, options: &EngineOptions) -> Result<DescribedModel<PlacedModel>, LoadError> {
        let (device, n_gpu_layers) = (options.device.as_deref(), options.n_gpu_layers);
        if options.workers.is_empty() {
            // Workers have the devices.
            devices::check(device, n_gpu_layers)?;
        }
        let gguf = Arc::new(Gguf::open(options.path()?)?);
        let placed = Placed::new(&options.workers)?;
        let sizes = load::sizes(&gguf, options, placed.memory)?;
        let mut model = load::model(options, &gguf, &placed)?;
        let adapter = Adapter::load(options, &gguf, &mut model)?.map(Arc::new);
        let model = Arc::new(model);
        let tokens = tokens::tokens(&model, &gguf, options.path()?)?;
        let projector = Projector::load(options, &model)?;
        let draft = LoadedDraft::load(options, &gguf, sizes.n_rollback)?;
        let gpu = devices::first_gpu(device, n_gpu_layers)?;
        if options.mlock == Some(true) && gpu.is_none() {
            locked_memory::warn_unless_locked(model.size());
        }
        // llama.cpp also divides a head that predicts further tokens, which the model's own number leaves out.
        let n_blocks = gguf.n_layer().and_then(|n| u32::try_from(n).ok()).unwrap_or_else(|| model.n_layer());
        let embedding = embed::plan::plan(&gguf, &model, options.ubatch(), sizes.n_ctx);
        let reranking = embedding.and_then(|plan| plan.reranking());
        let devices = match placed.has_workers() {
            true => placed.names.clone(),
            false => devices::in_use(device, n_gpu_layers)?,
        };
        let of_adapter = adapter.iter().map(|adapter| adapter.changes());
        let changes = options.rope.changes().into_iter().chain(of_adapter);
        Ok(DescribedModel {
            header: Arc::clone(&gguf),
            tokens,
            sizes,
            fingerprint: gguf.fingerprint(&changes.collect::<Vec<_>>())?,
            quantization: gguf.quantization().unwrap_or_default().to_owned(),
            model_bytes: model.size().saturating_add(draft.as_ref().map_or(0, LoadedDraft::bytes)),
            embedding: embedding.and_then(|plan| plan.embedding()),
            reranker: reranking.map(|facts| Reranker { facts, joints: tokens::joints(&model) }),
            images: projector.clone().map(|projector| projector as Arc<dyn ImageEncoder>),
            workers: placed.shares(n_blocks),
            model: PlacedModel {
                model,
                gguf,
                options: options.clone(),
                sizes,
                adapter,
                draft,
                projector,
                embedding,
                placed,
                gpu,
                devices,
            },
        })
    }

    /// Creates the context for generation, or that for vectors of a model that only gives these.
    fn load<'m>(
        loaded: &'m PlacedModel,
        shared: &Arc<EngineLoad>,
    ) -> Result<LoadedModel<LlamaSlots<'m>, Embedder<'m>>, LoadError> {
        let PlacedModel { model, gguf, options, adapter, projector, devices, gpu, .. } = loaded;
        let kv_bytes = loaded.embedding.map_or(0, |plan| plan.kv_bytes(gguf));
        let vectors = Embedder::new(model, options.clone(), loaded.embedding, kv_bytes, Arc::clone(shared));
        let mut vectors = vectors.with_adapter(adapter.clone());
        if !gguf.generates() {
            vectors.prepare()?;
            return Ok(LoadedModel { generator: None, vectors, devices: devices.clone() });
        }
        let limits = loaded.limits();
        let n_batch = limits.budget.max_tokens() + limits.n_slots;
        let (has_workers, is_separate) = (loaded.placed.has_workers(), load::has_separate_caches(model));
        let NewContext { mut context, states, n_rollback } =
            loaded.context(u32::try_from(n_batch).unwrap_or(u32::MAX))?;
        let transfer = probe::probe(&mut context, model, gguf, options.slots(), *gpu).map_err(NoKv::from);
        let (transfer, kv) = match transfer {
            Ok(transfer) => {
                let form = kv_form(&transfer);
                (Some(transfer), Ok(form))
            }
            Err(reason) => (None, Err(reason)),
        };
        let context = LlamaSlots::new(context, n_batch)
            .with_whole_steps(has_workers)
            .with_states(load::has_states(model), states)
            .with_rollback(n_rollback)
            .with_transfer(transfer, options.slots())
            .with_projector(projector.clone());
        // A GPU reads cells so fast that idle ones cost less than moving them.
        let idle = match (is_separate, gpu.is_some() || has_workers) {
            (true, _) => IdleKv::Stays,
            (false, true) => IdleKv::IsCopied,
            (false, false) => IdleKv::Moves,
        };
        let (context, guesser) = loaded.with_guesser(context, &limits)?;
        let generator = Generator { context, limits, kv, idle, guesser };
        Ok(LoadedModel { generator: Some(generator), vectors, devices: devices.clone() })
    }
}

/// A context for generation.
struct NewContext<'m> {
    context: LlamaContext<'m>,
    states: Option<StateStream>,
    /// Tokens that can be taken back of each sequence's states.
    n_rollback: u32,
}

impl PlacedModel {
    /// Creates the context for generation. If its states can be taken back, that was tried.
    fn context(&self, n_batch: u32) -> Result<NewContext<'_>, LoadError> {
        let (n_cells, most) = (self.sizes.n_cells, n_batch.min(self.options.ubatch()).saturating_sub(2));
        let n_rollback = self.sizes.n_rollback.min(most);
        let mut sizes = ContextSizes { n_cells, n_batch, n_rollback };
        let (mut context, mut states) = self.context_of(sizes)?;
        if n_rollback > 0 {
            let works = rollback::works(&mut context, self.model.n_vocab().max(0).cast_unsigned(), n_rollback);
            let works = works.inspect_err(|error| tracing::warn!(%error, "taking back tokens cannot be tried"));
            if !works.unwrap_or(false) {
                tracing::debug!("the states of tokens that were taken back differ from those without them");
                sizes.n_rollback = 0;
                drop(context);
                (context, states) = self.context_of(sizes)?;
            }
        }
        Ok(NewContext { context, states, n_rollback: sizes.n_rollback })
    }

    /// Adds what guesses for a context: the configured draft model, or the model's own head.
    fn with_guesser<'m>(
        &'m self,
        context: LlamaSlots<'m>,
        limits: &SchedulerLimits,
    ) -> Result<(LlamaSlots<'m>, Option<BatchDrafter<LlamaSlots<'m>>>), LoadError> {
        let PlacedModel { model, gguf, options, draft, .. } = self;
        if let Some(draft) = draft {
            let draft = draft.guesses(limits, model.size())?;
            return Ok((context, Some(BatchDrafter::Model(draft))));
        }
        let Some(head) = load::head(options, gguf).filter(|_| context.max_rollback() > 0) else {
            if let Some(why) = load::unused_head(options, gguf) {
                let words = "the model's own head guesses nothing; the model is served without it";
                match options.speculation {
                    Some(_) => tracing::warn!(%why, "{words}"),
                    None => tracing::info!(%why, "{words}"),
                }
            }
            return Ok((context, None));
        };
        let head = LlamaHead::create(model, options, self.sizes.n_cells, head)?;
        let Some((head, rows)) = head.zip(HiddenRows::of_all(&context.context)) else { return Ok((context, None)) };
        let drafts = head.drafts(limits, model.n_layer(), options.ubatch() as usize);
        Ok((context.with_hidden_rows(rows), Some(BatchDrafter::Head(drafts))))
    }

    fn context_of(&self, sizes: ContextSizes) -> Result<(LlamaContext<'_>, Option<StateStream>), LoadError> {
        let PlacedModel { model, options, adapter, placed, .. } = self;
        let adapter = adapter.as_deref();
        match placed.has_workers() || load::has_separate_caches(model) {
            // Each look at a graph would cost a round trip to each worker. Compressors write no states that can be seen.
            true => Ok((load::context(model, options, adapter, sizes)?, None)),
            false => load::watched_context(model, options, adapter, sizes),
        }
    }

    fn limits(&self) -> SchedulerLimits {
        let on_processor = self.gpu.is_none() && !self.placed.has_workers();
        let limits = SchedulerLimits::new(&self.options, self.sizes, on_processor);
        let sliding_window = self.gguf.sliding_window().and_then(|w| usize::try_from(w).ok());
        // A window's cells of a long step would be overwritten before they are exported.
        let budget = match self.placed.is_pipeline() && sliding_window.is_none() {
            true => limits.budget.of_pipeline(),
            false if self.model.size() <= SMALL_MODEL => limits.budget.of_small_model(),
            false => limits.budget,
        };
        let has_states = load::has_states(&self.model);
        let n_caches = if load::has_separate_caches(&self.model) { limits.n_slots } else { 1 };
        let n_cells = limits.n_cells.saturating_mul(n_caches);
        SchedulerLimits { budget, sliding_window, has_states, n_cells, ..limits }
    }
}
