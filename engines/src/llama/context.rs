//! The scheduler's view of a llama.cpp context. A slot's index is its llama.cpp sequence id.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::Token;
use baton_schemas::kv::{Chunk, StatePart, VerifiedKv, VerifiedState};
use bytes::Bytes;
use llama_cpp_2::DecodeError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;

use super::checkpoint;
use super::head::{HiddenRows, LlamaHead};
use super::import_state::ImportState;
use super::positions::TokenPositions;
use super::probe::ProbedKv;
use super::projector::{ImagePlace, ImagePreparation, Projector};
use super::rollback::Rollbacks;
use super::state_stream::StateStream;
use super::transfer;
use super::transfers::{MovedSlot, Transfers};
use super::vocabulary::token;
use crate::serving::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, NO_STATES};
#[cfg(test)]
use crate::serving::described::KvForm;
use crate::serving::images::{ImageFailure, ImageRun};

/// A context with its batch, and what moves KV into it and out of it.
pub(crate) struct LlamaSlots<'m> {
    pub(crate) context: LlamaContext<'m>,
    /// Shows states when they are computed.
    states: Option<StateStream>,
    batch: LlamaBatch<'static>,
    transfers: Option<Transfers>,
    projector: Option<Arc<Projector>>,
    /// The positions of each slot's tokens, if tokens of images share positions. A slot without an entry has text alone.
    positions: Vec<TokenPositions>,
    /// The model keeps more than rows.
    has_states: bool,
    /// The tokens that can be taken back from its states.
    rollbacks: Rollbacks,
    /// Shows hidden rows, if the model's own head guesses.
    hidden: Option<HiddenRows>,
    /// A step ends when the last device has computed it.
    whole_steps: bool,
}

impl<'m> LlamaSlots<'m> {
    /// A context whose batches have at most `n_batch` tokens.
    pub(crate) fn new(context: LlamaContext<'m>, n_batch: usize) -> Self {
        let batch = LlamaBatch::new(n_batch, 1);
        LlamaSlots {
            context,
            states: None,
            batch,
            transfers: None,
            projector: None,
            positions: Vec::new(),
            has_states: false,
            rollbacks: Rollbacks::default(),
            hidden: None,
            whole_steps: false,
        }
    }

    /// The same for a model that may keep more of a sequence than rows of positions. `states` is the context's.
    pub(crate) fn with_states(self, has_states: bool, states: Option<StateStream>) -> Self {
        LlamaSlots { has_states, states, ..self }
    }

    /// The same for a context that keeps the states before the last `n_max` tokens of each sequence.
    pub(crate) fn with_rollback(self, n_max: u32) -> Self {
        LlamaSlots { rollbacks: Rollbacks::new(n_max, self.context.n_ubatch()), ..self }
    }

    /// The same, which shows hidden rows.
    pub(crate) fn with_hidden_rows(self, rows: HiddenRows) -> Self {
        LlamaSlots { hidden: Some(rows), ..self }
    }

    /// The same, whose KV can be handed over. Of `n_slots` slots.
    pub(crate) fn with_transfer(self, transfer: Option<ProbedKv>, n_slots: u32) -> Self {
        let transfers = transfer.map(|probed| Transfers::of(probed, n_slots));
        let of_layout = transfers.as_ref().is_some_and(|transfers| !transfers.layout().states.is_empty());
        LlamaSlots { transfers, has_states: self.has_states || of_layout, ..self }
    }

    /// The same, whose steps end when the last device has computed them. Workers' devices take work into a queue, and
    /// the time to fill that queue is no measure of a step.
    pub(crate) fn with_whole_steps(self, whole_steps: bool) -> Self {
        LlamaSlots { whole_steps, ..self }
    }

    /// The same with a projector for images.
    pub(crate) fn with_projector(self, projector: Option<Arc<Projector>>) -> Self {
        LlamaSlots { projector, ..self }
    }

    /// Makes the tokens llama.cpp's next batch.
    fn fill(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError> {
        self.batch.clear();
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            transfer.forget_exported();
        }
        if let Some(t) = self.without_states(batch) {
            return Err(ComputeError::Refused(format!("slot {} has no states for position {}", t.slot, t.position)));
        }
        // ggml's RPC client waits for answers alone, and only values have one.
        let last_answers = self.whole_steps && !batch.iter().any(|t| t.wants_logits);
        for (i, t) in batch.iter().enumerate() {
            let wants_logits = t.wants_logits || (last_answers && i + 1 == batch.len());
            let position = self.at(t.slot as usize).of(t.position);
            let added = self.batch.add(token(t.token), position.cast_signed(), &[t.slot.cast_signed()], wants_logits);
            added.map_err(|e| ComputeError::Refused(e.to_string()))?;
        }
        Ok(())
    }

    /// The first token of a batch whose slot lacks the states before it. llama.cpp would compute on without them.
    fn without_states<'b>(&self, batch: &'b [BatchToken]) -> Option<&'b BatchToken> {
        let continues = |(i, t): &(usize, &BatchToken)| *i == 0 || batch[i - 1].slot != t.slot;
        let mut starts = batch.iter().enumerate().filter(|_| self.has_states).filter(continues).map(|(_, t)| t);
        let end = |t: &BatchToken| self.at(t.slot as usize).after(t.position);
        starts.find(|t| transfer::end_with_states(&self.context, t.slot).unwrap_or(0) != end(t))
    }

    /// A slot whose KV is moved, and what moves it.
    fn transferred(&mut self, slot: usize) -> Result<(MovedSlot, &mut Transfers, &mut LlamaContext<'m>), String> {
        let of = MovedSlot { slot: slot as u32, at: self.at(slot).clone() };
        Ok((of, self.transfers.as_mut().ok_or(NO_HANDOFF)?, &mut self.context))
    }

    /// The same for a slot that gets other states.
    fn replaced(&mut self, slot: usize) -> Result<(MovedSlot, &mut Transfers, &mut LlamaContext<'m>), String> {
        self.rollbacks.replaced(slot);
        self.transferred(slot)
    }

    /// The positions of a slot's tokens.
    fn at(&self, slot: usize) -> &TokenPositions {
        const TEXT: &TokenPositions = &TokenPositions::TEXT;
        self.positions.get(slot).unwrap_or(TEXT)
    }

    #[cfg(test)]
    pub(crate) fn form(&self) -> Option<KvForm> {
        self.transfers.as_ref().map(Transfers::form)
    }

    #[cfg(test)]
    pub(crate) fn projector(&self) -> Option<&Arc<Projector>> {
        self.projector.as_ref()
    }
}

/// A slot's llama.cpp sequence id.
pub(crate) fn seq_id(slot: usize) -> i32 {
    i32::try_from(slot).unwrap_or(i32::MAX)
}

fn decode(context: &mut LlamaContext<'_>, batch: &mut LlamaBatch<'_>) -> Result<(), ComputeError> {
    context.decode(batch).map_err(|error| match error {
        DecodeError::NoKvCacheSlot => ComputeError::NoCells,
        error => ComputeError::Refused(error.to_string()),
    })
}

const NO_HANDOFF: &str = "this model's KV is not handed over";

impl<'m> ModelContext for LlamaSlots<'m> {
    type Preparation = ImagePreparation;
    type Head = LlamaHead<'m>;

    fn set_tokens(&mut self, slot: usize, tokens: &[Token]) {
        if self.projector.as_ref().is_some_and(|projector| projector.shares_positions()) {
            let n = self.positions.len().max(slot + 1);
            self.positions.resize(n, TokenPositions::TEXT);
            self.positions[slot] = TokenPositions::of_tokens(tokens);
        }
    }

    fn compute(&mut self, tokens: &[BatchToken]) -> Result<(), ComputeError> {
        self.fill(tokens)?;
        let (context, batch) = (&mut self.context, &mut self.batch);
        match &mut self.states {
            Some(states) => states.learn(|| decode(context, batch))?,
            None => decode(context, batch)?,
        }
        self.rollbacks.computed(tokens);
        if self.whole_steps {
            self.context.synchronize();
        }
        Ok(())
    }

    fn compute_streaming_state(
        &mut self,
        batch: &[BatchToken],
        sink: &mut dyn FnMut(StatePart),
    ) -> Result<(), ComputeError> {
        let Some(last) = batch.last() else { return Ok(()) };
        let transfer = match &self.transfers {
            Some(Transfers::Shared { to_node, .. }) => to_node.among(self.at(last.slot as usize)),
            Some(Transfers::Separate(_)) => {
                self.compute(batch)?;
                self.context.synchronize();
                let part = self.export_state(last.slot as usize, last.position + 1);
                return part.map(sink).map_err(ComputeError::Refused);
            }
            None => return Err(ComputeError::Refused(NO_HANDOFF.into())),
        };
        let (slot, position) = (last.slot, last.position + 1);
        let is_alone = batch.len() <= self.context.n_ubatch() as usize && batch.iter().all(|t| t.slot == slot);
        self.fill(batch)?;
        let LlamaSlots { context, batch: tokens, states, .. } = self;
        let (computed, n_sent) = match (states, transfer.form().states()) {
            (Some(states), Some(form)) if is_alone => states.during(form, position, sink, || decode(context, tokens)),
            _ => (decode(context, tokens), 0),
        };
        computed?;
        self.rollbacks.computed(batch);
        self.context.synchronize();
        if n_sent < transfer.layout().states.len() {
            let part = transfer.export_state(&self.context, slot, position);
            let mut part = part.map_err(|e| ComputeError::Refused(e.to_string()))?;
            part.tensors.drain(..n_sent);
            sink(StatePart { first: n_sent as u32, ..part });
        }
        Ok(())
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        self.context.get_logits_ith(i32::try_from(index).unwrap_or(i32::MAX))
    }

    fn hidden(&mut self, index: usize) -> &[f32] {
        self.hidden.as_ref().map_or(&[], |rows| rows.row(&mut self.context, index))
    }

    fn synchronize(&mut self) {
        self.context.synchronize();
    }

    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        if self.has_states && n_keep > 0 {
            // llama.cpp may accept it, and go on with wrong states.
            return Err(CannotCut);
        }
        self.rollbacks.replaced(slot);
        // Without a first position, everything is removed, which never fails.
        let from = u32::try_from(n_keep).ok().filter(|n| *n > 0).map(|n| self.at(slot).of(n));
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            if from.is_some() && transfer.has_waiting(slot as u32) {
                return Err(CannotCut);
            }
            transfer.changes(slot as u32);
        }
        self.context.kv_cache_seq_rm(seq_id(slot), from, None).map_err(|_| CannotCut)
    }

    fn max_rollback(&self) -> usize {
        match (&self.transfers, self.has_states) {
            (Some(Transfers::Separate(_)), _) => 0,
            (_, true) => self.rollbacks.n_max() as usize,
            (_, false) => usize::MAX,
        }
    }

    fn take_back(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        match self.has_states && n_keep > 0 {
            true => {
                let end = self.at(slot).after(n_keep as u32);
                self.rollbacks.take_back(&mut self.context, slot, end)
            }
            false => self.cut(slot, n_keep),
        }
    }

    /// A fork has the source's newest states. One of fewer positions than the source's needs [`ModelContext::return_to`].
    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            return transfer.copy(&mut self.context, source as u32, slot as u32).is_ok();
        }
        if !self.rollbacks.settle(&mut self.context, source) {
            return false;
        }
        self.rollbacks.replaced(slot);
        let end = u32::try_from(n).ok().map(|n| self.at(source).after(n));
        let (source, slot) = (seq_id(source), seq_id(slot));
        // Without positions, everything is copied. Some caches allow nothing else, and end the process.
        let is_whole = u32::try_from(self.context.kv_cache_seq_pos_max(source) + 1).ok() == end;
        let (from, to) = if is_whole { (None, None) } else { (Some(0), end) };
        let can_fork = is_whole || self.transfers.is_some() || !self.has_states;
        can_fork && self.context.kv_cache_seq_cp(source, slot, from, to).is_ok()
    }

    fn forks_share_cells(&self) -> bool {
        !matches!(self.transfers, Some(Transfers::Separate(_)))
    }

    fn oldest(&self, slot: usize) -> usize {
        match &self.transfers {
            Some(Transfers::Shared { to_node, .. }) => to_node.oldest(&self.context, slot as u32).unwrap_or(0) as usize,
            Some(Transfers::Separate(transfer)) => transfer.oldest(&self.context, slot as u32) as usize,
            None => usize::try_from(self.context.kv_cache_seq_pos_min(seq_id(slot))).unwrap_or(0),
        }
    }

    fn overwrite(&mut self) {
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            transfer.empty();
        }
        self.rollbacks.clear();
        self.context.clear_kv_cache();
    }

    fn export(&mut self, slot: usize, positions: Range<u32>, end: u32, to: ExportTo) -> Result<Chunk, String> {
        let (of, transfers, context) = self.transferred(slot)?;
        transfers.export(context, &of, (positions, end), to)
    }

    fn import(&mut self, slot: usize, n_present: u32, chunk: VerifiedKv) -> Result<Vec<u8>, String> {
        let (of, transfers, context) = self.replaced(slot)?;
        transfers.import(context, &of, n_present, chunk)
    }

    fn restore(&mut self, slot: usize, chunk: &Chunk) -> Result<(), String> {
        let (of, transfers, context) = self.replaced(slot)?;
        transfers.restore(context, &of, chunk)
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        let at = self.at(slot);
        let (context, slot, n_present) = (&self.context, slot as u32, n_present as u32);
        match &self.transfers {
            Some(Transfers::Shared { to_node, .. }) => to_node.among(at).can_continue(context, slot, n_present),
            Some(Transfers::Separate(transfer)) => transfer.can_continue(context, slot, n_present),
            None => true,
        }
    }

    fn export_state(&mut self, slot: usize, position: u32) -> Result<StatePart, String> {
        let (of, transfers, context) = self.transferred(slot)?;
        transfers.export_state(context, &of, position)
    }

    fn import_state(&mut self, slot: usize, state: VerifiedState) -> Result<(), String> {
        let states = ImportState::verified(&state).map_err(|e| e.to_string())?;
        let (of, transfers, context) = self.replaced(slot)?;
        transfers.import_state(context, &of, &states, ExportTo::Node)
    }

    fn restore_state(&mut self, slot: usize, state: &StatePart) -> Result<(), String> {
        let (of, transfers, context) = self.replaced(slot)?;
        let states = ImportState::build(state, transfers.layout()).map_err(|e| e.to_string())?;
        transfers.import_state(context, &of, &states, ExportTo::Host)
    }

    fn checkpoint(&mut self, slot: usize) -> Result<Bytes, String> {
        if !self.has_states {
            return Err(NO_STATES.into());
        }
        checkpoint::take(&self.context, slot as u32).map_err(|e| e.to_string())
    }

    fn states_of(&self, position: u32, checkpoint: &Bytes) -> Result<StatePart, String> {
        self.transfers.as_ref().ok_or(NO_HANDOFF)?.states_of(position, checkpoint)
    }

    fn return_to(&mut self, slot: usize, n_keep: usize, checkpoint: &Bytes) -> Result<(), CannotCut> {
        self.rollbacks.replaced(slot);
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            let returned = transfer.return_to(&mut self.context, slot as u32, n_keep as u32, checkpoint);
            return returned.map_err(|_| CannotCut);
        }
        let end = self.at(slot).after(n_keep as u32);
        checkpoint::return_to(&mut self.context, slot as u32, end, checkpoint).map_err(|_| CannotCut)
    }

    fn sees_images(&self) -> bool {
        self.projector.is_some()
    }

    fn image_is_busy(&self) -> bool {
        self.projector.as_ref().is_some_and(|projector| projector.is_busy())
    }

    fn prepare_image(&self, run: &ImageRun) -> Option<Arc<ImagePreparation>> {
        self.projector.as_ref()?.prepare(run)
    }

    fn decode_image(&mut self, slot: usize, run: &ImageRun, image: &ImagePreparation) -> Result<(), ImageFailure> {
        self.rollbacks.replaced(slot);
        match (self.projector.clone(), image.prepared()) {
            (Some(projector), Some(Ok(prepared))) => {
                let place = ImagePlace { seq: seq_id(slot), position: self.at(slot).of(run.at.start as u32) };
                projector.decode_image(run, prepared, &mut self.context, place)
            }
            (_, Some(Err(error))) => Err(ImageFailure::Failed(error.clone())),
            _ => Err(ImageFailure::Busy),
        }
    }
}
