//! Runs GGUF models in Rust, on candle's tensors: no C++ compiler is needed.
//!
//! [`Candle`] describes and loads models for [`serving`](crate::serving), whose thread owns the weights and the slots' KV. `shape.rs` says which models are computed, `forward.rs` how. KV has llama.cpp's layout, so that it is
//! handed over to and from the llama engine; both have the same fingerprint of the same file.

mod cache;
mod device;
mod forward;
mod rotation;
mod shape;
mod slots;
mod vectors;
mod weights;

use std::sync::Arc;

use baton_model::gguf::{CompanionMemory, Gguf, ModelSizes, SizeOptions};
use baton_model::options::{CacheTypes, RopeOptions};
use baton_model::vocabulary::FileVocabulary;
use baton_schemas::embed::Pooling;
use baton_schemas::kv::KeyRotation;

use self::device::NamedDevice;
use self::shape::ModelShape;
use self::slots::CandleSlots;
use self::vectors::CandleTexts;
use self::weights::Weights;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::described::{DescribedModel, Generator, IdleKv, KvForm, LoadedModel, ModelLibrary, Tokenization};
use crate::serving::jobs::EngineLoad;
use crate::serving::memory::available_memory;
use crate::serving::scheduler::SchedulerLimits;
use crate::serving::text_vectors::{self, TextVectors};

/// candle.
#[derive(Default)]
pub struct Candle;

/// A model that is not loaded yet.
pub(crate) struct CandleModel {
    header: Arc<Gguf>,
    shape: ModelShape,
    rotation: KeyRotation,
    device: NamedDevice,
    pooling: Pooling,
    sizes: ModelSizes,
    options: EngineOptions,
}

impl ModelLibrary for Candle {
    const ENGINE: &'static str = "candle";
    const VERSION: &'static str = "candle-core 0.11.1";
    const NAME: &'static str = "candle";

    type Model = CandleModel;
    type Context<'m> = CandleSlots;
    type Vectors<'m> = TextVectors<CandleTexts>;

    fn describe(&self, options: &EngineOptions) -> Result<DescribedModel<CandleModel>, LoadError> {
        let path = options.path()?;
        let header = Arc::new(Gguf::open(path)?);
        if !header.generates() {
            return Err(LoadError::Unsupported("it generates no text".into()));
        }
        let shape = ModelShape::of(&header)?;
        let sizes = sizes(&header, options)?;
        let device = NamedDevice::choose(options.device.as_deref())?;
        let tokens = Tokenization::of_file(FileVocabulary::read(&header, path)?)?;
        if tokens.vocabulary.n_tokens() != shape.n_vocab {
            let why = format!("it has {} tokens and {} embeddings", tokens.vocabulary.n_tokens(), shape.n_vocab);
            return Err(LoadError::Unsupported(why));
        }
        let rotation = header.key_rotation(RopeOptions::default(), &shape.layout());
        let rotation = rotation.map_err(|error| LoadError::Unsupported(error.to_string()))?;
        let embedding = text_vectors::facts(&header, shape.n_embd, sizes.n_ctx);
        Ok(DescribedModel {
            header: Arc::clone(&header),
            tokens,
            sizes,
            fingerprint: header.fingerprint(&[])?,
            quantization: header.quantization().unwrap_or_default().to_owned(),
            model_bytes: header.files.n_bytes().saturating_add(weights::bytes_beyond_file(&header)),
            embedding: Some(embedding),
            reranker: None,
            images: None,
            workers: Vec::new(),
            model: CandleModel {
                header,
                shape,
                rotation,
                device,
                pooling: embedding.pooling,
                sizes,
                options: options.clone(),
            },
        })
    }

    fn load(
        described: &CandleModel,
        shared: &Arc<EngineLoad>,
    ) -> Result<LoadedModel<CandleSlots, TextVectors<CandleTexts>>, LoadError> {
        let CandleModel { header, shape, rotation, device, pooling, sizes, options } = described;
        let weights = Weights::open(header, &device.device)?;
        let model = Arc::new(forward::Transformer::load(shape.clone(), rotation.clone(), weights, &device.device)?);
        let limits = SchedulerLimits {
            sliding_window: shape.window.map(|window| window.n_positions),
            ..SchedulerLimits::new(options, *sizes, device.device.is_cpu())
        };
        let texts = CandleTexts::new(Arc::clone(&model), *pooling, sizes.kv_bytes_per_token);
        Ok(LoadedModel {
            vectors: TextVectors::new(texts, limits.budget.alone, Arc::clone(shared)),
            generator: Some(Generator {
                context: CandleSlots::new(model, limits.n_slots),
                limits,
                kv: Ok(KvForm::rows(shape.layout())),
                idle: IdleKv::IsCopied,
                guesser: None,
            }),
            devices: vec![device.name.clone()],
        })
    }
}

impl From<candle_core::Error> for LoadError {
    fn from(error: candle_core::Error) -> Self {
        LoadError::Refused { library: Candle::NAME, why: error.to_string() }
    }
}

/// Chooses the sizes of context and caches. Each slot's cache may have up to [`cache::GROWTH`] positions more than it holds.
fn sizes(gguf: &Gguf, options: &EngineOptions) -> Result<ModelSizes, LoadError> {
    let cache_types = CacheTypes::F32;
    let bytes_per_token = gguf.kv_bytes_per_token(cache_types);
    let undescribed = || LoadError::Unsupported("its file does not describe its KV".into());
    let growth = u64::from(options.slots()) * cache::GROWTH as u64;
    let wanted = SizeOptions {
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_slots: options.slots(),
        sequences: options.sequences(gguf),
        cache_types,
        companions: CompanionMemory::fixed(
            bytes_per_token
                .ok_or_else(undescribed)?
                .saturating_mul(growth)
                .saturating_add(weights::bytes_beyond_file(gguf)),
        ),
    };
    Ok(ModelSizes::choose(gguf, wanted, available_memory())?)
}
