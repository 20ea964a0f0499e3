//! The scheduler's view of a llama.cpp context. A slot's index is its llama.cpp sequence id.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, Contiguous, KvLayout, Placement, Span, StatePart, VerifiedKv, VerifiedState};
use bytes::Bytes;
use llama_cpp_2::DecodeError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;

use super::blob::form::BlobForm;
use super::checkpoint;
use super::compressed::transfer::CompressedTransfer;
use super::import_state::ImportState;
use super::placement::{BlobPlacement, ImportBlob};
use super::probe::ProbedKv;
use super::projector::{ImagePreparation, Projector};
use super::state_stream::StateStream;
use super::transfer::{self, KvTransfer};
use super::vocabulary::token;
use crate::serving::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, NO_STATES};
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
    /// The model keeps more than rows.
    has_states: bool,
    /// A step ends when the last device has computed it.
    whole_steps: bool,
}

enum Transfers {
    /// All slots share one cache.
    Shared {
        to_node: KvTransfer,
        /// With buffers of its own, since copies in this process keep theirs, and not in pinned memory, which is scarce.
        to_host: KvTransfer,
    },
    /// Each slot has a cache of its own.
    Separate(CompressedTransfer),
}

impl Transfers {
    fn layout(&self) -> &Arc<KvLayout> {
        match self {
            Transfers::Shared { to_node, .. } => to_node.layout(),
            Transfers::Separate(transfer) => transfer.layout(),
        }
    }
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
            has_states: false,
            whole_steps: false,
        }
    }

    /// The same for a model that may keep more of a sequence than rows of positions. `states` is the context's.
    pub(crate) fn with_states(self, has_states: bool, states: Option<StateStream>) -> Self {
        LlamaSlots { has_states, states, ..self }
    }

    /// The same, whose KV can be handed over. Of `n_slots` slots.
    pub(crate) fn with_transfer(self, transfer: Option<ProbedKv>, n_slots: u32) -> Self {
        let transfers = transfer.map(|probed| match probed {
            ProbedKv::Shared(to_node) => {
                let to_host = KvTransfer::new(BlobForm::clone(to_node.form()), n_slots, None);
                Transfers::Shared { to_node, to_host }
            }
            ProbedKv::Separate(transfer) => Transfers::Separate(transfer),
        });
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
            let added = self.batch.add(token(t.token), t.position as i32, &[t.slot.cast_signed()], wants_logits);
            added.map_err(|e| ComputeError::Refused(e.to_string()))?;
        }
        Ok(())
    }

    /// The first token of a batch whose slot lacks the states before it. llama.cpp would compute on without them.
    fn without_states<'b>(&self, batch: &'b [BatchToken]) -> Option<&'b BatchToken> {
        let continues = |(i, t): &(usize, &BatchToken)| *i == 0 || batch[i - 1].slot != t.slot;
        let mut starts = batch.iter().enumerate().filter(|_| self.has_states).filter(continues).map(|(_, t)| t);
        starts.find(|t| transfer::end_with_states(&self.context, t.slot).unwrap_or(0) != t.position)
    }

    #[cfg(test)]
    pub(crate) fn form(&self) -> Option<KvForm> {
        self.transfers.as_ref().map(|transfers| match transfers {
            Transfers::Shared { to_node, .. } => shared_form(to_node),
            Transfers::Separate(transfer) => KvForm::rows(KvLayout::clone(transfer.layout())),
        })
    }

    #[cfg(test)]
    pub(crate) fn projector(&self) -> Option<&Arc<Projector>> {
        self.projector.as_ref()
    }
}

/// How the KV of a context is handed over.
pub(crate) fn kv_form(probed: &ProbedKv) -> KvForm {
    match probed {
        ProbedKv::Shared(transfer) => shared_form(transfer),
        ProbedKv::Separate(transfer) => KvForm::rows(KvLayout::clone(transfer.layout())),
    }
}

/// A chunk's rows are placed where llama.cpp's state format has them, so that the import copies nothing.
fn shared_form(transfer: &KvTransfer) -> KvForm {
    let form = Arc::clone(transfer.form());
    let placement = Arc::new(move |span: &Span, layout: &KvLayout| {
        let placed = BlobPlacement::new(&form, span.p0..span.p1, &span.starts);
        placed.map_or_else(|_| Contiguous.place(span, layout), |placement| placement.places())
    });
    KvForm { layout: Arc::clone(transfer.layout()), placement, buffers: transfer.imports().clone() }
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

impl ModelContext for LlamaSlots<'_> {
    type Preparation = ImagePreparation;

    fn compute(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError> {
        self.fill(batch)?;
        let (context, batch) = (&mut self.context, &mut self.batch);
        match &mut self.states {
            Some(states) => states.learn(|| decode(context, batch))?,
            None => decode(context, batch)?,
        }
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
            Some(Transfers::Shared { to_node, .. }) => to_node.clone(),
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

    fn synchronize(&mut self) {
        self.context.synchronize();
    }

    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        // Without a first position, everything is removed, which never fails.
        let from = u32::try_from(n_keep).ok().filter(|n| *n > 0);
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            if from.is_some() && transfer.has_waiting(slot as u32) {
                return Err(CannotCut);
            }
            transfer.changes(slot as u32);
        }
        self.context.kv_cache_seq_rm(seq_id(slot), from, None).map_err(|_| CannotCut)
    }

    fn takes_back(&self) -> bool {
        !self.has_states && !matches!(self.transfers, Some(Transfers::Separate(_)))
    }

    /// A fork has the source's newest states. One of fewer positions than the source's needs [`ModelContext::return_to`].
    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            return transfer.copy(&mut self.context, source as u32, slot as u32).is_ok();
        }
        let (source, slot) = (seq_id(source), seq_id(slot));
        // Without positions, everything is copied. Some caches allow nothing else, and end the process.
        let is_whole = usize::try_from(self.context.kv_cache_seq_pos_max(source) + 1) == Ok(n);
        let (from, to) = if is_whole { (None, None) } else { (Some(0), u32::try_from(n).ok()) };
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
        self.context.clear_kv_cache();
    }

    fn export(&mut self, slot: usize, positions: Range<u32>, end: u32, to: ExportTo) -> Result<Chunk, String> {
        let (context, slot) = (&mut self.context, slot as u32);
        let exported = match (self.transfers.as_mut().ok_or(NO_HANDOFF)?, to) {
            (Transfers::Shared { to_node, .. }, ExportTo::Node) => to_node.export(context, slot, positions, end),
            (Transfers::Shared { to_host, .. }, ExportTo::Host) => to_host.export(context, slot, positions, end),
            (Transfers::Separate(transfer), _) => transfer.export(context, slot, positions, end),
        };
        exported.map_err(|e| e.to_string())
    }

    fn import(&mut self, slot: usize, n_present: u32, chunk: VerifiedKv) -> Result<Vec<u8>, String> {
        let transfer = match self.transfers.as_mut().ok_or(NO_HANDOFF)? {
            Transfers::Shared { to_node, .. } => to_node,
            Transfers::Separate(transfer) => {
                let received = transfer.receive(&self.context, slot as u32, n_present, chunk);
                // The chunk keeps its buffer until its states come.
                return received.map(|()| Vec::new()).map_err(|e| e.to_string());
            }
        };
        // The chunk's buffer becomes the blob: no row is copied.
        let span = chunk.span();
        let placement = BlobPlacement::new(transfer.form(), span.p0..span.p1, &span.starts);
        let blob = placement.and_then(|p| p.seal(chunk)).map_err(|e| e.to_string())?;
        transfer.import(&mut self.context, slot as u32, n_present, &blob).map_err(|e| e.to_string())?;
        Ok(blob.into_buffer())
    }

    fn restore(&mut self, slot: usize, chunk: &Chunk) -> Result<(), String> {
        let transfer = match self.transfers.as_mut().ok_or(NO_HANDOFF)? {
            Transfers::Shared { to_host, .. } => to_host,
            Transfers::Separate(transfer) => {
                return transfer.restore(&self.context, slot as u32, chunk).map_err(|e| e.to_string());
            }
        };
        let blob = ImportBlob::build(chunk, transfer.form()).map_err(|e| e.to_string())?;
        transfer.import(&mut self.context, slot as u32, chunk.p0, &blob).map_err(|e| e.to_string())
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        let (context, slot, n_present) = (&self.context, slot as u32, n_present as u32);
        match &self.transfers {
            Some(Transfers::Shared { to_node, .. }) => to_node.can_continue(context, slot, n_present),
            Some(Transfers::Separate(transfer)) => transfer.can_continue(context, slot, n_present),
            None => true,
        }
    }

    fn export_state(&mut self, slot: usize, position: u32) -> Result<StatePart, String> {
        let exported = match self.transfers.as_ref().ok_or(NO_HANDOFF)? {
            Transfers::Shared { to_node, .. } => to_node.export_state(&self.context, slot as u32, position),
            Transfers::Separate(transfer) => transfer.export_state(&self.context, slot as u32, position),
        };
        exported.map_err(|e| e.to_string())
    }

    fn import_state(&mut self, slot: usize, state: VerifiedState) -> Result<(), String> {
        let states = ImportState::verified(&state).map_err(|e| e.to_string())?;
        let imported = match self.transfers.as_mut().ok_or(NO_HANDOFF)? {
            Transfers::Shared { to_node, .. } => to_node.import_state(&mut self.context, slot as u32, &states),
            Transfers::Separate(transfer) => transfer.import_state(&mut self.context, slot as u32, &states),
        };
        imported.map_err(|e| e.to_string())
    }

    fn restore_state(&mut self, slot: usize, state: &StatePart) -> Result<(), String> {
        let transfers = self.transfers.as_mut().ok_or(NO_HANDOFF)?;
        let states = ImportState::build(state, transfers.layout()).map_err(|e| e.to_string())?;
        let imported = match transfers {
            Transfers::Shared { to_host, .. } => to_host.import_state(&mut self.context, slot as u32, &states),
            Transfers::Separate(transfer) => transfer.import_state(&mut self.context, slot as u32, &states),
        };
        imported.map_err(|e| e.to_string())
    }

    fn checkpoint(&mut self, slot: usize) -> Result<Bytes, String> {
        if !self.has_states {
            return Err(NO_STATES.into());
        }
        checkpoint::take(&self.context, slot as u32).map_err(|e| e.to_string())
    }

    fn states_of(&self, position: u32, checkpoint: &Bytes) -> Result<StatePart, String> {
        let states = match self.transfers.as_ref().ok_or(NO_HANDOFF)? {
            Transfers::Shared { to_node, .. } => to_node.states_of(checkpoint).map_err(|e| e.to_string())?,
            Transfers::Separate(transfer) => Some(transfer.states_of(position, checkpoint).map_err(|e| e.to_string())?),
        };
        states.ok_or_else(|| NO_STATES.into())
    }

    fn return_to(&mut self, slot: usize, n_keep: usize, checkpoint: &Bytes) -> Result<(), CannotCut> {
        if let Some(Transfers::Separate(transfer)) = &mut self.transfers {
            let returned = transfer.return_to(&mut self.context, slot as u32, n_keep as u32, checkpoint);
            return returned.map_err(|_| CannotCut);
        }
        checkpoint::return_to(&mut self.context, slot as u32, n_keep as u32, checkpoint).map_err(|_| CannotCut)
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
        match (self.projector.clone(), image.prepared()) {
            (Some(projector), Some(Ok(prepared))) => {
                projector.decode_image(run, prepared, &mut self.context, seq_id(slot))
            }
            (_, Some(Err(error))) => Err(ImageFailure::Failed(error.clone())),
            _ => Err(ImageFailure::Busy),
        }
    }
}
