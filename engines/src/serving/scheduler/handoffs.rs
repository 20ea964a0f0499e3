//! Imports and exports KV between steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_link::engine::KvEvent;
use baton_link::handoff::{ChunkBuffers, KvPuller, PlaceRows, PullOrder};
use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::kv::{Chunk, KvLayout, VerifiedKv, all_finite, max_frame_positions};
use baton_schemas::sequence::SequenceEvent;

use super::super::context::{ExportTo, ModelContext};
use super::super::kv_flow::{Exported, Import};
use super::super::vectors::Vectors;
use super::Scheduler;

/// The time for imports between two steps while others stream. A chunk that was begun within it is finished.
const IMPORT_SHARE: Duration = Duration::from_millis(2);

/// The size of chunks once all of the KV is computed, bytes. Export, hashing, transfer and import of consecutive chunks
/// overlap; in smaller chunks, waking threads costs more than that saves.
const CACHED_CHUNK: usize = 6 << 20;

/// The fewest positions of such a chunk: each costs two copies of sequences and a pass over the cells.
const MIN_CHUNK: usize = 32;

/// The parts for handing KV over. An engine whose model's KV cannot be handed over has none.
pub(crate) struct Handoffs {
    pub(crate) layout: Arc<KvLayout>,
    /// Lays out the buffer of a received chunk as the context imports it.
    pub(crate) placement: Arc<PlaceRows>,
    /// Buffers for chunks that arrive.
    pub(crate) buffers: ChunkBuffers,
    /// Fetches KV from prefill nodes. `None` for an engine that never pulls.
    pub(crate) puller: Option<Arc<dyn KvPuller>>,
    pub(crate) wake: Arc<dyn Fn() + Send + Sync>,
}

/// The positions of a chunk of computed KV.
pub(super) fn cached_chunk(layout: &KvLayout) -> usize {
    (CACHED_CHUNK / layout.bytes_per_position().max(1)).max(MIN_CHUNK)
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Starts to pull the KV that the sequence lacks, if its request names a source.
    pub(super) fn begin_import(&mut self, slot: usize) {
        let n_kept = self.slots[slot].kv.len();
        let Some(sequence) = &mut self.running[slot] else { return };
        let wanted = &sequence.tokens[..sequence.n_prefill()];
        // A sequence pulls only once: after a preemption it computes the KV that it lost.
        let Some(source) = sequence.request.kv_source.take().filter(|_| n_kept < wanted.len()) else { return };
        let Some(handoffs) = &self.handoffs else { return };
        let Some(puller) = &handoffs.puller else { return };
        let url = source.url.clone();
        let order = PullOrder {
            source,
            buffers: handoffs.buffers.clone(),
            tokens: wanted.to_vec(),
            start: n_kept as u32,
            cache_scope: sequence.request.cache_scope,
            ephemeral: sequence.request.ephemeral,
            gives_way: sequence.request.gives_way,
            placement: Arc::clone(&handoffs.placement),
        };
        sequence.import = Some(Import::new(url, puller.pull(order, Arc::clone(&handoffs.wake))));
    }

    /// Imports the chunks that have arrived: one for each sequence that waits for KV, and more within [`IMPORT_SHARE`].
    pub(super) fn import_chunks(&mut self) {
        let began = Instant::now();
        for slot in 0..self.slots.len() {
            while self.import_next(slot) && began.elapsed() < IMPORT_SHARE {}
        }
    }

    /// Handles the next event of a sequence's pull. Returns false if none has arrived.
    fn import_next(&mut self, slot: usize) -> bool {
        let Some(import) = self.running[slot].as_mut().and_then(|s| s.import.as_mut()) else { return false };
        match import.poll() {
            None => return false,
            Some(KvEvent::End(report)) => self.end_import(slot, report),
            Some(KvEvent::State(state)) => {
                if let Err(error) = self.context.import_state(slot, state) {
                    tracing::warn!(slot, error, "states cannot be imported; the prompt is computed here");
                    self.fail_import(slot);
                }
            }
            Some(KvEvent::Chunk(chunk)) => {
                if let Err(error) = self.import_chunk(slot, chunk) {
                    tracing::warn!(slot, error, "a chunk cannot be imported; the rest of the prompt is computed here");
                    self.fail_import(slot);
                }
            }
        }
        true
    }

    fn import_chunk(&mut self, slot: usize, chunk: VerifiedKv) -> Result<(), String> {
        let began = Instant::now();
        let n_kv = self.slots[slot].kv.len();
        let span = chunk.span().clone();
        while !self.make_room((span.p1 - span.p0) as usize) {
            // The youngest sequence went back to the queue. If it was this one, its import has ended.
            if self.running[slot].as_ref().is_none_or(|s| s.import.is_none()) {
                return Ok(());
            }
        }
        let handoffs = self.handoffs.as_ref().ok_or("this model's KV is not handed over")?;
        handoffs.buffers.put(self.context.import(slot, n_kv as u32, chunk)?);
        let Some(sequence) = &mut self.running[slot] else { return Ok(()) };
        self.slots[slot].kv.extend_from_slice(&sequence.tokens[n_kv..span.p1 as usize]);
        if let Some(import) = &mut sequence.import {
            import.count(&span, began.elapsed());
        }
        Ok(())
    }

    /// Returns true if a slot has all the KV that its next token attends to. An import leaves out windowed rows that
    /// are not needed at its end. So during an import, or after it broke off, a slot can lack a part of its sliding
    /// window, and the context would compute on without it.
    pub(super) fn window_is_whole(&self, slot: usize) -> bool {
        let has_window = |layout: &KvLayout| layout.sections.iter().any(|section| section.window.is_some());
        if !self.handoffs.as_ref().is_some_and(|handoffs| has_window(&handoffs.layout)) {
            return true;
        }
        let n_kv = self.slots[slot].kv.len();
        n_kv == 0 || self.context.can_continue(slot, n_kv)
    }

    fn fail_import(&mut self, slot: usize) {
        let import = self.running[slot].as_mut().and_then(|s| s.import.as_mut());
        if let Some(report) = import.map(|import| import.report(HandoffFailure::ImportFailed.into())) {
            self.end_import(slot, report);
        }
    }

    /// Ends an import. The sequence computes the KV that it still lacks.
    fn end_import(&mut self, slot: usize, report: HandoffReport) {
        let Some(sequence) = &mut self.running[slot] else { return };
        sequence.import = None;
        sequence.send(Ok(SequenceEvent::Handoff(report)));
        if let Some(failure) = report.failure {
            tracing::warn!(
                slot,
                failure = failure.as_str(),
                n_tokens = report.n_tokens,
                "a handoff failed; the rest of the prompt is computed here"
            );
        }
        // A pull that broke off may have left out rows of the sliding window.
        if !self.window_is_whole(slot) {
            self.cut(slot, 0);
        }
    }

    /// Sends computed KV to the nodes that requested it, as far as they keep up.
    pub(super) fn export_chunks(&mut self) {
        let Some(handoffs) = &self.handoffs else { return };
        let layout = Arc::clone(&handoffs.layout);
        let n_max = self.limits.budget.max_tokens().min(max_frame_positions(&layout) as usize);
        let cached_chunk = cached_chunk(&layout);
        for slot in 0..self.slots.len() {
            let n_kv = self.slots[slot].kv.len();
            let Some(sequence) = &mut self.running[slot] else { continue };
            let Some(export) = &mut sequence.export else { continue };
            let max = if export.is_computed(n_kv) { cached_chunk.min(n_max) } else { n_max };
            let Some((positions, waited)) = export.next_range(n_kv, max) else { continue };
            // A GPU may still be computing the chunk. The export would wait for it, and that time is the prefill's.
            self.context.synchronize();
            let began = Instant::now();
            match self.context.export(slot, positions, export.end(), ExportTo::Node) {
                Ok(chunk) if !is_finite(&chunk, &layout) => self.fail_not_finite(slot),
                Ok(chunk) => export.send(Exported { chunk, took: began.elapsed(), waited }),
                Err(error) => {
                    tracing::error!(slot, error, "computed KV cannot be exported; the prefill fails");
                    sequence.send(Err(EngineError::internal(error)));
                    self.release(slot);
                }
            }
        }
    }
}

/// Returns true if no value is NaN or infinity. A prefill computes no logits that would show them, and the reader refuses
/// such KV.
fn is_finite(chunk: &Chunk, layout: &KvLayout) -> bool {
    let layers = layout.sections.iter().flat_map(|section| &section.layers);
    // A V that does not exist has no bytes.
    let shapes = layers.flat_map(|layer| [layer.k, layer.v.unwrap_or(layer.k)]);
    chunk.tensors().zip(shapes).all(|(rows, shape)| all_finite(shape.dtype, rows))
}
