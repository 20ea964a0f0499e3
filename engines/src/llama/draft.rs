//! A draft model: a smaller one with the same vocabulary, which guesses tokens for the model that is served.

use baton_model::gguf::{Gguf, UnfitDraft};
use llama_cpp_2::model::LlamaModel;

use super::context::LlamaSlots;
use super::load;
use super::placed::Placed;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::drafting::draft_model::{DraftLimits, DraftModel};
use crate::serving::scheduler::SchedulerLimits;

/// The weights of a draft model.
pub(crate) struct LoadedDraft {
    model: LlamaModel,
    /// Those of the model that is served, as far as they concern this one.
    options: EngineOptions,
    n_ctx: usize,
}

impl LoadedDraft {
    /// Loads the configured draft model of the model `target`, if there is one, onto this machine's devices. `n_rollback`: tokens
    /// that can be taken back of the target's states. Errors: it cannot guess for that model.
    pub(crate) fn load(
        options: &EngineOptions,
        target: &Gguf,
        n_rollback: u32,
    ) -> Result<Option<LoadedDraft>, LoadError> {
        let Some(path) = options.draft.clone() else { return Ok(None) };
        let header = Gguf::open(&path)?;
        let unfit = |why| LoadError::Draft { path: path.clone(), why };
        target.check_draft(&header).map_err(unfit)?;
        if target.has_states() && n_rollback == 0 {
            return Err(unfit(UnfitDraft::StatesTooLarge));
        }
        let own = EngineOptions {
            n_slots: options.n_slots,
            n_ubatch: options.n_ubatch,
            n_threads: options.n_threads,
            n_gpu_layers: options.n_gpu_layers,
            device: options.device.clone(),
            mmap: options.mmap,
            mlock: options.mlock,
            ..EngineOptions::of(path.clone())
        };
        let model = load::model(&own, &header, &Placed::alone())?;
        if load::has_states(&model) {
            return Err(unfit(UnfitDraft::HasStates));
        }
        let n_ctx = header.context_length().and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        Ok(Some(LoadedDraft { model, options: own, n_ctx }))
    }

    /// Bytes of its weights.
    pub(super) fn bytes(&self) -> u64 {
        self.model.size()
    }

    /// The drafter for a model with these limits, whose weights have `target_bytes`.
    pub(crate) fn guesses<'m>(
        &'m self,
        limits: &SchedulerLimits,
        target_bytes: u64,
    ) -> Result<DraftModel<LlamaSlots<'m>>, LoadError> {
        let n_batch = self.options.ubatch();
        let n_cells = u32::try_from(limits.n_cells).unwrap_or(u32::MAX);
        let context = load::draft_context(&self.model, &self.options, n_cells)?;
        let limits = DraftLimits {
            n_slots: limits.n_slots,
            n_ctx: self.n_ctx.min(limits.n_ctx),
            n_cells: limits.n_cells,
            n_batch: n_batch as usize,
            share_of_target: self.bytes() as f64 / target_bytes.max(1) as f64,
        };
        Ok(DraftModel::new(LlamaSlots::new(context, n_batch as usize), limits))
    }
}
