//! The trait that opens an engine's models, and its facts about a model: before it is loaded, and once its thread has
//! loaded it.

use std::sync::Arc;

use baton_link::handoff::{ChunkBuffers, PlaceRows};
use baton_model::gguf::{Gguf, ModelSizes};
use baton_model::template::SpecialTokens;
use baton_model::vocabulary::{FileTokenizer, FileVocabulary, TextTokenizer, Vocabulary, VocabularyError};
use baton_schemas::Token;
use baton_schemas::embed::{EmbeddingFacts, RerankFacts};
use baton_schemas::kv::{Contiguous, Fingerprint, KvLayout, Placement};
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::InfillTokens;
use baton_schemas::worker::WorkerShare;

use super::context::ModelContext;
use super::drafting::batch_drafter::BatchDrafter;
use super::images::ImageEncoder;
use super::jobs::EngineLoad;
use super::load_error::LoadError;
use super::pair::Joints;
use super::scheduler::SchedulerLimits;
use super::step_budget::PrefillBudget;
use super::vectors::Vectors;
use crate::engine_options::EngineOptions;

/// What computes models for an engine.
pub(crate) trait ModelLibrary {
    /// The engine's name, as nodes report it.
    const ENGINE: &'static str;

    /// What computes, with its version: another one may round differently, or keep other rows.
    const VERSION: &'static str;

    /// Its own name, for people.
    const NAME: &'static str;

    /// It has the options that change what a model computes.
    const CHANGES_MODELS: bool = false;

    /// A described model, for its thread.
    type Model: Send + 'static;
    type Context<'m>: ModelContext;
    type Vectors<'m>: Vectors;

    /// Reads what the files of a model say, and checks that it can be run with these options. Blocking: up to minutes.
    fn describe(&self, options: &EngineOptions) -> Result<DescribedModel<Self::Model>, LoadError>;

    /// Loads the model, in the thread that will own it. Blocking: up to minutes.
    fn load<'m>(
        model: &'m Self::Model,
        shared: &Arc<EngineLoad>,
    ) -> Result<LoadedModel<Self::Context<'m>, Self::Vectors<'m>>, LoadError>;
}

/// A model before its thread has loaded it.
pub(crate) struct DescribedModel<M> {
    pub(crate) header: Arc<Gguf>,
    pub(crate) tokens: Tokenization,
    /// The sizes of context and cache that were chosen.
    pub(crate) sizes: ModelSizes,
    pub(crate) fingerprint: Fingerprint,
    /// The type of the weights, for people.
    pub(crate) quantization: String,
    /// Memory of the weights.
    pub(crate) model_bytes: u64,
    /// `None`: it gives no vectors.
    pub(crate) embedding: Option<EmbeddingFacts>,
    /// `None`: it gives no scores.
    pub(crate) reranker: Option<Reranker>,
    /// The projector, if it sees images.
    pub(crate) images: Option<Arc<dyn ImageEncoder>>,
    /// Other machines that compute a part of it.
    pub(crate) workers: Vec<WorkerShare>,
    /// What its thread loads.
    pub(crate) model: M,
}

/// A model that scores documents.
pub(crate) struct Reranker {
    pub(crate) facts: RerankFacts,
    /// How a query and a document are joined where the file has no form for it.
    pub(crate) joints: Joints,
}

/// A model's tokens, and how text becomes tokens.
pub(crate) struct Tokenization {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) tokenizer: Arc<dyn TextTokenizer>,
    pub(crate) bos: Option<Token>,
    pub(crate) eos: Option<Token>,
    /// Prompts begin with BOS.
    pub(crate) adds_bos: bool,
    /// The spellings of control tokens.
    pub(crate) control: Vec<String>,
    pub(crate) infill: Option<InfillTokens>,
}

impl Tokenization {
    /// Those of a file or a folder. Blocking: up to a second.
    pub(crate) fn of_file(file: FileVocabulary) -> Result<Tokenization, VocabularyError> {
        let infill = match file.infill {
            [Some(prefix), Some(suffix), Some(middle)] => Some(InfillTokens { prefix, suffix, middle }),
            _ => None,
        };
        Ok(Tokenization {
            vocabulary: Arc::new(file.table()),
            bos: file.bos,
            eos: file.eos,
            adds_bos: file.add_bos,
            control: file.control_spellings(),
            infill,
            tokenizer: Arc::new(FileTokenizer::new(file)?),
        })
    }

    /// The tokens that templates name.
    pub(super) fn special(&self) -> SpecialTokens {
        let Tokenization { vocabulary, bos, eos, control, .. } = self;
        SpecialTokens { bos: vocabulary.text(*bos), eos: vocabulary.text(*eos), control: control.clone() }
    }
}

/// A model that its thread has loaded.
pub(crate) struct LoadedModel<C: ModelContext, V> {
    /// `None`: the model only gives vectors.
    pub(crate) generator: Option<Generator<C>>,
    pub(crate) vectors: V,
    /// As [`NodeInfo::devices`](baton_schemas::node::NodeInfo::devices) shows them.
    pub(crate) devices: Vec<String>,
}

/// The part of a model that generates.
pub(crate) struct Generator<C: ModelContext> {
    pub(crate) context: C,
    pub(crate) limits: SchedulerLimits,
    /// How its KV is handed over. Errors: why it cannot be.
    pub(crate) kv: Result<KvForm, NoKv>,
    pub(crate) idle: IdleKv,
    /// Guesses for it.
    pub(crate) guesser: Option<BatchDrafter<C>>,
}

/// What becomes of an idle conversation's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdleKv {
    /// It stays in its slot until others need that.
    Stays,
    /// The same, and a copy goes into the store.
    IsCopied,
    /// It moves into the store when others run: its cells would slow them.
    Moves,
}

/// Why the KV of a context is not handed over.
#[derive(Debug)]
pub(crate) struct NoKv {
    pub(crate) reason: NoHandoffReason,
    /// For the log.
    pub(crate) detail: String,
}

/// How the KV of a context is handed over.
pub(crate) struct KvForm {
    pub(crate) layout: Arc<KvLayout>,
    /// Lays out the buffer of a received chunk as the context imports it.
    pub(crate) placement: Arc<PlaceRows>,
    /// Buffers for chunks that arrive.
    pub(crate) buffers: ChunkBuffers,
}

impl KvForm {
    /// Whole rows in the order of the layout.
    pub(crate) fn rows(layout: KvLayout) -> KvForm {
        let placement = Arc::new(|span: &_, layout: &_| Contiguous.place(span, layout));
        KvForm { layout: Arc::new(layout), placement, buffers: ChunkBuffers::default() }
    }
}

impl SchedulerLimits {
    /// The limits of a model without a sliding window and states. `on_processor`: a processor computes it
    /// alone, so that steps are small unless the batch is configured.
    pub(crate) fn new(options: &EngineOptions, sizes: ModelSizes, on_processor: bool) -> Self {
        let small_steps = on_processor && options.n_ubatch.is_none();
        SchedulerLimits {
            n_slots: options.slots() as usize,
            n_ctx: sizes.n_ctx as usize,
            n_cells: sizes.n_cells as usize,
            budget: PrefillBudget::new(options.ubatch(), small_steps, options.prefill_budget),
            sliding_window: None,
            has_states: false,
        }
    }
}
