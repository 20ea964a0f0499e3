//! Imports and exports KV between steps.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_link::engine::KvEvent;
use baton_link::handoff::{ChunkBuffers, KvPuller, PlaceRows, PullOrder};
use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, MAX_RETURN_BYTES};
use baton_schemas::kv::{Chunk, KvLayout, MAX_STATE_POSITIONS, StatePart, VerifiedKv, all_finite, max_frame_positions};
use baton_schemas::sequence::{FinishReason, SequenceEvent};

use super::super::context::{ComputeError, ExportTo, ModelContext};
use super::super::kv_flow::{Exported, ExportedKv, Import, NextExport};
use super::super::sequence::Sequence;
use super::super::slots;
use super::super::vectors::Vectors;
use super::{BatchPart, Scheduler};

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
    /// Returns true if the engine pulls KV from prefill nodes.
    pub(super) fn pulls(&self) -> bool {
        self.handoffs.as_ref().is_some_and(|handoffs| handoffs.puller.is_some())
    }

    /// Starts to pull the KV that follows the first `n_kept` tokens of a sequence, if its request names a source. Until these have come
    /// from the store, what is pulled waits.
    pub(super) fn begin_import(&mut self, slot: usize, n_kept: usize) {
        let Some(sequence) = &mut self.running[slot] else { return };
        // A sequence pulls only once: after a preemption it computes the KV that it lost. But what is pulled while it is restored is
        // pulled again if the store gives less.
        let source = match &sequence.restoring {
            Some(_) => sequence.request.kv_source.clone(),
            None => sequence.request.kv_source.take(),
        };
        if let Some(import) = sequence.import.as_mut().filter(|import| import.start == n_kept) {
            return import.has_its_beginning();
        }
        if let Some(given_up) = sequence.import.take() {
            // It brought nothing: its chunks waited for rows that did not come.
            self.slots[slot].foreign_from.take_if(|from| *from == given_up.start);
        }
        let held_only = sequence.request.held_only;
        // The head of the reply is computed here: it takes one short step, and the states before it serve the next turn, too.
        let end = match self.limits.has_states && sequence.request.generated.is_empty() && !held_only {
            true => slots::whole_images(&sequence.tokens, sequence.n_before_reply),
            // As far as it may: what has come is there for the next return.
            false if held_only => {
                let layout = self.handoffs.as_ref().map(|handoffs| &*handoffs.layout);
                layout.map_or(n_kept, |layout| returnable_to(layout, n_kept, sequence.n_prefill()))
            }
            false => sequence.n_prefill(),
        };
        let wanted = &sequence.tokens[..end];
        let Some(source) = source.filter(|_| n_kept < wanted.len()) else { return };
        let Some(handoffs) = &self.handoffs else { return };
        let Some(puller) = &handoffs.puller else { return };
        let url = source.url.clone();
        // For the states of a checkpoint that it does not have, a node would compute.
        let marks = if held_only { &[][..] } else { &sequence.marks };
        let checkpoints = worth_pulling(marks, n_kept..end, &handoffs.layout);
        let order = PullOrder {
            source,
            buffers: handoffs.buffers.clone(),
            tokens: wanted.to_vec(),
            images: sequence.request.images.clone().filter(|_| !held_only),
            start: n_kept as u32,
            checkpoints,
            cache_scope: sequence.request.cache_scope,
            ephemeral: sequence.request.ephemeral,
            gives_way: sequence.request.gives_way,
            held_only,
            lossless: sequence.request.lossless_kv,
            placement: Arc::clone(&handoffs.placement),
        };
        if puller.takes_other_weights() {
            // Until the pull's end says that the weights are equal.
            self.slots[slot].mark_foreign(n_kept);
        }
        sequence.import = Some(Import::new(url, n_kept, puller.pull(order, Arc::clone(&handoffs.wake))));
    }

    /// The tokens that are computed while the states of a slot's prefill travel. `None`: that is not known. With it, chunks depend
    /// on measured rates, so KV is equal to the bit only on devices where the size of a batch changes no bit.
    pub(super) fn tokens_beside_states(&self, slot: usize) -> Option<usize> {
        self.running[slot].as_ref()?.export.as_ref()?.tokens_beside_states(self.prefill_tps)
    }

    /// Imports the chunks that have arrived: one for each sequence that waits for KV, and more within [`IMPORT_SHARE`].
    pub(super) fn import_chunks(&mut self) {
        let began = Instant::now();
        for slot in 0..self.slots.len() {
            while self.import_next(slot) && began.elapsed() < IMPORT_SHARE {}
        }
    }

    /// Handles the next event of a sequence's pull. Returns false if none has arrived, or what comes before it is not here.
    fn import_next(&mut self, slot: usize) -> bool {
        let sequence = self.running[slot].as_mut().filter(|sequence| sequence.restoring.is_none());
        let Some(sequence) = sequence else { return false };
        let Some(import) = &mut sequence.import else { return false };
        let Some(event) = import.poll() else { return false };
        // Whatever comes shows that the prompt waits in no queue any more.
        sequence.prefill_begins();
        match event {
            KvEvent::Begun => {}
            KvEvent::End(report) => self.end_import(slot, report),
            KvEvent::State(state) => {
                if let Some(import) = &mut sequence.import {
                    import.keep_state(state);
                }
            }
            KvEvent::Chunk(chunk) => {
                if let Err(error) = self.import_chunk(slot, chunk) {
                    tracing::warn!(slot, error, "a chunk cannot be imported; the rest of the prompt is computed here");
                    self.fail_import(slot);
                }
            }
        }
        if let Err(error) = self.import_state(slot) {
            tracing::warn!(slot, error, "states cannot be imported; the rest of the prompt is computed here");
            self.fail_import(slot);
        }
        true
    }

    /// Imports the states of a slot's end, if they have arrived.
    fn import_state(&mut self, slot: usize) -> Result<(), String> {
        let began = Instant::now();
        let n_kv = self.slots[slot].kv.len();
        let Some(import) = self.running[slot].as_mut().and_then(|s| s.import.as_mut()) else { return Ok(()) };
        let Some(state) = import.take_state(n_kv) else { return Ok(()) };
        self.context.import_state(slot, state)?;
        import.spent(began.elapsed());
        Ok(())
    }

    fn import_chunk(&mut self, slot: usize, chunk: VerifiedKv) -> Result<(), String> {
        let began = Instant::now();
        let n_kv = self.slots[slot].kv.len();
        let (span, is_lossy) = (chunk.span().clone(), chunk.is_lossy());
        while !self.make_room((span.p1 - span.p0) as usize) {
            // The youngest sequence went back to the queue. If it was this one, its import has ended.
            if self.running[slot].as_ref().is_none_or(|s| s.import.is_none()) {
                return Ok(());
            }
        }
        // The chunk takes the states away. If no later ones come, the sequence goes on from here.
        self.keep_states(slot);
        let handoffs = self.handoffs.as_ref().ok_or("this model's KV is not handed over")?;
        handoffs.buffers.put(self.context.import(slot, n_kv as u32, chunk)?);
        let Some(sequence) = &mut self.running[slot] else { return Ok(()) };
        self.slots[slot].kv.extend_from_slice(&sequence.tokens[n_kv..span.p1 as usize]);
        if let Some(import) = &mut sequence.import {
            if is_lossy {
                self.slots[slot].mark_lossy(n_kv);
            }
            import.is_lossy |= is_lossy;
            import.count(&span, began.elapsed());
        }
        Ok(())
    }

    /// Ends the sequences that compute nothing, once all has come that is held.
    pub(super) fn end_held_only(&mut self) {
        for slot in 0..self.slots.len() {
            let n_kv = self.slots[slot].kv.len();
            let is_over = |s: &Sequence| s.request.held_only && !s.in_transfer(n_kv) && s.tokens.len() > n_kv + 1;
            if !self.running[slot].as_ref().is_some_and(is_over) {
                continue;
            }
            if self.running[slot].as_ref().is_some_and(|sequence| sequence.export.is_none()) {
                self.finish(slot, FinishReason::Length);
            } else if let Some(mut sequence) = self.release(slot) {
                sequence.send(Err(EngineError::invalid("not all of this KV is held")));
            }
        }
    }

    fn fail_import(&mut self, slot: usize) {
        let import = self.running[slot].as_mut().and_then(|s| s.import.as_mut());
        if let Some(report) = import.map(|import| import.report(HandoffFailure::ImportFailed.into())) {
            self.end_import(slot, report);
        }
    }

    /// Ends an import. The sequence computes the KV that it still lacks.
    fn end_import(&mut self, slot: usize, report: HandoffReport) {
        let Some(import) = self.running[slot].as_mut().and_then(|s| s.import.take()) else { return };
        // After a failed pull, it is not always known whose weights they were.
        let is_own = report.failure.is_none() && report.kv_distance.is_none();
        if report.n_tokens == 0 || is_own {
            self.slots[slot].foreign_from.take_if(|from| *from == import.start);
        }
        self.go_on_continuable(slot);
        let n_usable = self.slots[slot].kv.len().saturating_sub(import.start) as u32;
        let report = HandoffReport { n_tokens: report.n_tokens.min(n_usable), ..report };
        let computes = self.running[slot].as_ref().is_some_and(|sequence| !sequence.request.held_only);
        if let Some(failure) = report.failure.filter(|_| computes) {
            tracing::warn!(
                slot,
                failure = failure.as_str(),
                n_tokens = report.n_tokens,
                "a handoff failed; the rest of the prompt is computed here"
            );
        }
        if let Some(sequence) = &mut self.running[slot] {
            sequence.send(Ok(SequenceEvent::Handoff(report)));
        }
    }

    /// Computes the batch of `parts`. The states that another node waits for leave while the last tokens before them are
    /// computed, if no other sequence is in the batch.
    pub(super) fn compute_batch(&mut self, parts: &[BatchPart]) -> Result<(), ComputeError> {
        let Scheduler { context, running, slots, batch, handoffs, .. } = self;
        let export = match parts {
            [part] => running[part.slot]
                .as_mut()
                .and_then(|sequence| sequence.export.as_mut())
                .filter(|export| export.owes_states_at(slots[part.slot].kv.len() + part.n_tokens)),
            _ => None,
        };
        let (Some(export), Some(Handoffs { layout, .. })) = (export, handoffs) else { return context.compute(batch) };
        // Nothing follows a fault: the export of what is left finds it again.
        let mut are_finite = true;
        context.compute_streaming_state(batch, &mut |part| {
            are_finite &= states_are_finite(&part, layout);
            if are_finite {
                export.send(Exported { kv: ExportedKv::State(part), took: Duration::ZERO, waited: Duration::ZERO });
            }
        })
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
            let Some((next, waited)) = export.next(n_kv, max) else { continue };
            // A GPU may still be computing the chunk. The export would wait for it, and that time is the prefill's.
            self.context.synchronize();
            let began = Instant::now();
            let exported = match next {
                NextExport::Rows(positions) => {
                    let chunk = self.context.export(slot, positions, export.end(), ExportTo::Node);
                    chunk.map(|chunk| (rows_are_finite(&chunk, &layout), ExportedKv::Chunk(chunk)))
                }
                NextExport::States(position, copy) => {
                    let part = match copy {
                        Some(checkpoint) => self.context.states_of(position, &checkpoint),
                        None => self.context.export_state(slot, position),
                    };
                    part.map(|part| (states_are_finite(&part, &layout), ExportedKv::State(part)))
                }
            };
            match exported {
                Ok((false, _)) => self.fail_not_finite(slot),
                Ok((true, kv)) => export.send(Exported { kv, took: began.elapsed(), waited }),
                Err(error) => {
                    tracing::error!(slot, error, "computed KV cannot be exported; the prefill fails");
                    sequence.send(Err(EngineError::internal(error)));
                    self.release(slot);
                }
            }
        }
    }
}

/// The last position up to `end` to which a return may bring what follows the first `n_kept` tokens. Of windowed layers, a pull
/// brings the last rows.
fn returnable_to(layout: &KvLayout, n_kept: usize, end: usize) -> usize {
    let n_bytes = |n: usize| {
        let rows = layout.sections.iter().map(|section| {
            let n = section.window.map_or(n, |window| n.min(window as usize));
            (n / section.tokens_per_row.max(1) as usize).saturating_mul(section.bytes())
        });
        rows.fold(layout.state_bytes(), usize::saturating_add) as u64
    };
    let (mut low, mut high) = (n_kept.min(end), end);
    while low < high {
        let middle = high - (high - low) / 2;
        if n_bytes(middle - n_kept) <= MAX_RETURN_BYTES {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// The checkpoints at `marks` that a pull of `positions` asks for: the rows that each saves the next pull weigh no less than the
/// states.
fn worth_pulling(marks: &[usize], positions: Range<usize>, layout: &KvLayout) -> Vec<u32> {
    // Without states, a pull brings all that other conversations need but windowed rows, of which the end's are enough. Chunks of
    // compressed rows bring only those windowed rows that the end of the pull needs.
    if layout.states.is_empty() || layout.sections.iter().any(|section| section.tokens_per_row > 1) {
        return Vec::new();
    }
    let mut before = positions.start;
    let mut is_worth = |mark: usize| {
        let saves = (mark - before).saturating_mul(layout.bytes_per_position()) >= layout.state_bytes();
        before = if saves { mark } else { before };
        saves
    };
    let marks = marks.iter().copied().filter(|mark| positions.start < *mark && *mark < positions.end);
    marks.filter(|mark| is_worth(*mark)).take(MAX_STATE_POSITIONS - 1).map(|mark| mark as u32).collect()
}

/// Returns true if no value is NaN or infinity. A prefill computes no logits that would show them, and the reader refuses
/// such KV.
pub(super) fn rows_are_finite(chunk: &Chunk, layout: &KvLayout) -> bool {
    let layers = layout.sections.iter().flat_map(|section| &section.layers);
    // A V that does not exist has no bytes.
    let shapes = layers.flat_map(|layer| [layer.k, layer.v.unwrap_or(layer.k)]);
    chunk.tensors().zip(shapes).all(|(rows, shape)| all_finite(shape.dtype, rows))
}

/// The same of states.
pub(super) fn states_are_finite(part: &StatePart, layout: &KvLayout) -> bool {
    let shapes = layout.states.iter().skip(part.first as usize);
    part.tensors.iter().zip(shapes).all(|(values, shape)| all_finite(shape.values.dtype, values))
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{Dtype, LayerShape, RopePairing, Rows, Section};

    use super::*;

    #[test]
    fn a_return_brings_as_much_of_what_a_node_lacks_as_it_may() {
        // 1 MiB a position.
        let rows = Rows { dtype: Dtype::F16, n_values: 1 << 18 };
        let layers = vec![LayerShape { k: rows, v: Some(rows) }];
        let layout = |windows: &[Option<u32>]| {
            let section = |window: &Option<u32>| Section {
                window: *window,
                n_rot: [0; 2],
                tokens_per_row: 1,
                layers: layers.clone(),
            };
            KvLayout { rope: RopePairing::None, sections: windows.iter().map(section).collect(), states: Vec::new() }
        };
        let plain = layout(&[None]);
        assert_eq!(returnable_to(&plain, 100, 1_124), 1_124);
        assert_eq!(returnable_to(&plain, 100, 100_000), 1_124, "a part of it");
        assert_eq!(returnable_to(&plain, 100, 100), 100);
        assert_eq!(returnable_to(&layout(&[Some(512), None]), 0, 100_000), 512, "a window counts with its rows");
        assert_eq!(returnable_to(&layout(&[Some(24), None]), 0, 100_000), 1_000);
        assert_eq!(returnable_to(&layout(&[Some(512)]), 0, 100_000), 100_000);
    }
}
