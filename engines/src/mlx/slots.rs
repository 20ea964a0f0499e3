//! The scheduler's view of the worker: the KV of each slot is there, and which positions it has is known here.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, KvLayout, LayerRows, SectionRows, StatePart, VerifiedKv, VerifiedState};
use bytes::Bytes;

use super::worker::{PythonFailure, Request, SharedWorker, SlotTokens};
use crate::serving::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, NO_STATES, NoHead};
use crate::serving::extent::SlotExtent;
use crate::serving::images::NoImages;

/// The worker's slots, and the logits of the last batch.
pub(crate) struct MlxSlots {
    worker: SharedWorker,
    layout: Arc<KvLayout>,
    n_vocab: usize,
    /// The positions of each slot.
    extents: Vec<SlotExtent>,
    /// True for each slot that has the states of its last position, if the model has states.
    have_states: Vec<bool>,
    /// How many workers were lost when the slots were last known to be what `extents` says.
    n_lost: u64,
    logits: Vec<f32>,
    /// For each token of the last batch, the row of its logits.
    logit_rows: Vec<usize>,
}

impl MlxSlots {
    pub(super) fn new(worker: SharedWorker, layout: Arc<KvLayout>, n_vocab: usize, n_slots: usize) -> Self {
        let n_lost = worker.borrow().n_lost;
        let extents = vec![SlotExtent::default(); n_slots];
        let have_states = vec![false; n_slots];
        MlxSlots { worker, layout, n_vocab, extents, have_states, n_lost, logits: Vec::new(), logit_rows: Vec::new() }
    }

    fn call(&mut self, request: &Request, payload: &[&[u8]], n_reply: usize) -> Result<Vec<u8>, PythonFailure> {
        self.worker.borrow_mut().call(request, payload, n_reply)
    }

    /// Returns true if the worker was lost since the last batch, and with it the KV of all slots.
    fn has_lost(&self) -> bool {
        self.worker.borrow().n_lost != self.n_lost
    }

    /// The positions that a slot really has.
    fn extent(&self, slot: usize) -> SlotExtent {
        if self.has_lost() { SlotExtent::default() } else { self.extents[slot] }
    }

    /// Returns true if the model keeps states and a slot lacks those of its last position.
    fn lacks_states(&self, slot: usize) -> bool {
        !self.layout.states.is_empty() && self.extent(slot).n > 0 && !self.have_states[slot]
    }

    /// The values of all states of a slot that ends at `position`.
    fn states(&mut self, slot: usize, position: usize) -> Result<Bytes, String> {
        if self.layout.states.is_empty() {
            return Err(NO_STATES.into());
        }
        if self.extent(slot).n != position || self.lacks_states(slot) {
            return Err(format!("the slot has no states of position {position}"));
        }
        let n_bytes = self.layout.state_bytes();
        let states = self.call(&Request::ExportState { slot }, &[], n_bytes).map_err(|error| error.to_string())?;
        Ok(states.into())
    }

    /// Gives a slot the states of its last position.
    fn set_states(&mut self, slot: usize, position: usize, states: &[&[u8]]) -> Result<(), String> {
        if self.has_lost() {
            return Err("the mlx worker was lost".to_owned());
        }
        let n_bytes: usize = states.iter().map(|state| state.len()).sum();
        if self.extents[slot].n != position || n_bytes != self.layout.state_bytes() {
            return Err(format!("{n_bytes} bytes of states are not those of position {position}"));
        }
        self.call(&Request::ImportState { slot }, states, 0).map_err(|error| error.to_string())?;
        self.have_states[slot] = true;
        Ok(())
    }

    /// Keeps the first `n_keep` positions of a slot. Without all of them, it has no states.
    fn shorten(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        // After a refused batch, the worker may hold more positions than are known here.
        let known = self.extent(slot);
        let had_states = !self.lacks_states(slot);
        (self.extents[slot], self.have_states[slot]) = (SlotExtent::default(), false);
        let is_running = self.worker.borrow().process_id().is_some();
        if known.n < n_keep {
            return Err(CannotCut);
        }
        // A worker that was lost has no KV, and the next one begins without.
        if !is_running || self.has_lost() {
            return Ok(());
        }
        match self.call(&Request::Cut { slot, n: n_keep }, &[], 0) {
            Ok(_) => {
                (self.extents[slot], self.have_states[slot]) = (known.prefix(n_keep), had_states && known.n == n_keep);
                Ok(())
            }
            Err(PythonFailure::Lost(_)) if n_keep == 0 => Ok(()),
            Err(error) => {
                tracing::error!(%error, slot, n_keep, "a slot's KV cannot be cut");
                Err(CannotCut)
            }
        }
    }

    /// Takes note that all slots are empty, and says so to the scheduler.
    fn lose(&mut self, reason: String, by_batch: bool) -> ComputeError {
        self.extents.fill(SlotExtent::default());
        self.n_lost = self.worker.borrow().n_lost;
        ComputeError::Lost { reason, by_batch }
    }

    /// Adds the rows of `positions`, of which sections begin at `starts`, in canonical order.
    fn add(&mut self, slot: usize, positions: Range<u32>, starts: &[u32], rows: &[&[u8]]) -> Result<(), String> {
        if self.has_lost() {
            return Err("the mlx worker was lost".to_owned());
        }
        let extent = self.extent(slot).with(&self.layout, &positions, starts)?;
        let Range { start: p0, end: p1 } = positions;
        let n_bytes: usize = rows.iter().map(|rows| rows.len()).sum();
        let expected = self.n_bytes(p1, starts);
        if n_bytes != expected {
            return Err(format!("positions {p0}..{p1} have {n_bytes} bytes, not {expected}"));
        }
        self.have_states[slot] = false;
        if let Err(error) = self.call(&Request::Import { slot, p0, p1, starts }, rows, 0) {
            // Some layers may have the rows, and others not.
            if let (PythonFailure::Refused(_), Err(CannotCut)) = (&error, self.cut(slot, p0 as usize)) {
                return Err(format!("{error}; and the slot is lost"));
            }
            return Err(error.to_string());
        }
        self.extents[slot] = extent;
        Ok(())
    }

    /// Bytes of the rows from each section's start to `p1`.
    fn n_bytes(&self, p1: u32, starts: &[u32]) -> usize {
        let sections = self.layout.sections.iter().zip(starts);
        sections.map(|(section, start)| (p1 - start) as usize * section.bytes()).sum()
    }
}

/// The slots' parts of a batch, in the order of the batch.
fn parts(batch: &[BatchToken]) -> Vec<SlotTokens> {
    let mut parts: Vec<SlotTokens> = Vec::new();
    for token in batch {
        let slot = token.slot as usize;
        if parts.last().is_none_or(|part| part.slot != slot) {
            parts.push(SlotTokens { slot, from: token.position as usize, n: 0, wanted: Vec::new() });
        }
        if let Some(part) = parts.last_mut() {
            part.wanted.extend(token.wants_logits.then_some(part.n));
            part.n += 1;
        }
    }
    parts
}

impl ModelContext for MlxSlots {
    type Preparation = NoImages;
    type Head = NoHead;

    fn compute(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError> {
        if self.has_lost() {
            return Err(self.lose("the mlx worker was lost between two batches".into(), false));
        }
        let parts = parts(batch);
        let tokens: Vec<u8> = batch.iter().flat_map(|t| t.token.to_le_bytes()).collect();
        let n_rows = batch.iter().filter(|t| t.wants_logits).count();
        let n_reply = n_rows * self.n_vocab * size_of::<f32>();
        let logits = match self.call(&Request::Compute { parts: &parts }, &[&tokens], n_reply) {
            Ok(logits) => logits,
            Err(PythonFailure::Refused(why)) => return Err(ComputeError::Refused(why)),
            Err(PythonFailure::Lost(why)) => return Err(self.lose(why, true)),
        };
        for part in &parts {
            self.extents[part.slot].n = part.from + part.n;
            self.have_states[part.slot] = true;
        }
        self.logits.clear();
        self.logits.extend(logits.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        let mut n_before = 0;
        self.logit_rows.clear();
        self.logit_rows.extend(batch.iter().map(|t| {
            n_before += usize::from(t.wants_logits);
            n_before.saturating_sub(1)
        }));
        Ok(())
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        let row = self.logit_rows[index];
        &self.logits[row * self.n_vocab..(row + 1) * self.n_vocab]
    }

    /// The worker answers when it has computed.
    fn synchronize(&mut self) {}

    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        let is_divided = n_keep > 0 && n_keep < self.extent(slot).n;
        if is_divided && !self.layout.states.is_empty() {
            // The states of an earlier position are gone.
            let _ = self.shorten(slot, 0);
            return Err(CannotCut);
        }
        self.shorten(slot, n_keep)
    }

    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        let of_source = self.extent(source);
        let is_divided = of_source.n > n && !self.layout.states.is_empty();
        if of_source.n < n || is_divided || self.lacks_states(source) {
            return false;
        }
        let forked = self.call(&Request::Fork { source, slot, n }, &[], 0);
        match forked {
            Ok(_) => (self.extents[slot], self.have_states[slot]) = (of_source.prefix(n), true),
            Err(error) => tracing::warn!(%error, source, slot, "a prefix cannot be copied; it is computed again"),
        }
        self.extent(slot).n == n
    }

    fn forks_share_cells(&self) -> bool {
        false
    }

    fn oldest(&self, slot: usize) -> usize {
        self.extent(slot).window_from
    }

    fn overwrite(&mut self) {
        self.extents.fill(SlotExtent::default());
        if !self.has_lost()
            && let Err(error) = self.call(&Request::Overwrite, &[], 0)
        {
            tracing::error!(%error, "the KV cannot be overwritten");
        }
    }

    fn export(&mut self, slot: usize, positions: Range<u32>, end: u32, _: ExportTo) -> Result<Chunk, String> {
        let starts = self.extent(slot).starts(&self.layout, &positions, end)?;
        let Range { start: p0, end: p1 } = positions;
        let n_bytes = self.n_bytes(p1, &starts);
        let request = Request::Export { slot, p1, starts: &starts };
        let rows = self.call(&request, &[], n_bytes).map_err(|error| error.to_string())?;
        let mut rows = Bytes::from(rows);
        let layout = Arc::clone(&self.layout);
        let sections = layout.sections.iter().zip(starts).map(|(section, start)| {
            let n_rows = (p1 - start) as usize;
            let layers = section.layers.iter().map(|layer| LayerRows {
                k: rows.split_to(n_rows * layer.k.bytes()),
                v: rows.split_to(n_rows * layer.v.map_or(0, |v| v.bytes())),
            });
            SectionRows { start, layers: layers.collect() }
        });
        Ok(Chunk { p0, p1, sections: sections.collect() })
    }

    fn import(&mut self, slot: usize, n_present: u32, chunk: VerifiedKv) -> Result<Vec<u8>, String> {
        if *chunk.layout() != *self.layout || chunk.span().p0 != n_present {
            return Err("the chunk does not continue this slot".to_owned());
        }
        let rows: Vec<&[u8]> = chunk.tensors().iter().map(|range| &chunk.buffer()[range.clone()]).collect();
        let span = chunk.span();
        self.add(slot, span.p0..span.p1, &span.starts, &rows)?;
        Ok(chunk.into_buffer())
    }

    fn restore(&mut self, slot: usize, chunk: &Chunk) -> Result<(), String> {
        let rows: Vec<&[u8]> = chunk.tensors().map(|rows| &rows[..]).collect();
        let starts: Vec<u32> = chunk.sections.iter().map(|section| section.start).collect();
        self.add(slot, chunk.p0..chunk.p1, &starts, &rows)
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        self.extent(slot).can_continue(&self.layout, n_present) && !self.lacks_states(slot)
    }

    fn export_state(&mut self, slot: usize, position: u32) -> Result<StatePart, String> {
        let states = self.states(slot, position as usize)?;
        self.states_of(position, &states)
    }

    fn import_state(&mut self, slot: usize, state: VerifiedState) -> Result<(), String> {
        if *state.layout() != *self.layout {
            return Err("the states are those of another model".to_owned());
        }
        self.restore_state(slot, &state.into_part())
    }

    fn restore_state(&mut self, slot: usize, state: &StatePart) -> Result<(), String> {
        let states: Vec<&[u8]> = state.tensors.iter().map(|tensor| &tensor[..]).collect();
        self.set_states(slot, state.position as usize, &states)
    }

    fn checkpoint(&mut self, slot: usize) -> Result<Bytes, String> {
        let position = self.extent(slot).n;
        self.states(slot, position)
    }

    fn states_of(&self, position: u32, checkpoint: &Bytes) -> Result<StatePart, String> {
        if checkpoint.len() != self.layout.state_bytes() {
            return Err(format!("{} bytes of states", checkpoint.len()));
        }
        let mut rest = checkpoint.clone();
        let tensors = self.layout.states.iter().map(|state| rest.split_to(state.values.bytes()));
        Ok(StatePart { position, first: 0, tensors: tensors.collect() })
    }

    fn return_to(&mut self, slot: usize, n_keep: usize, checkpoint: &Bytes) -> Result<(), CannotCut> {
        self.shorten(slot, n_keep)?;
        self.set_states(slot, n_keep, &[checkpoint]).map_err(|error| {
            tracing::warn!(error, slot, n_keep, "a slot cannot return to a checkpoint");
            let _ = self.shorten(slot, 0);
            CannotCut
        })
    }
}
