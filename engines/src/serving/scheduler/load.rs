//! The load that the engine's handles, and through them the endpoint, see.

use baton_schemas::held::RestoreRates;
use baton_schemas::node::{NodeLoad, Phase};
use baton_schemas::{FinishReason, SequenceEvent};

use super::super::context::ModelContext;
use super::super::vectors::Vectors;
use super::{Scheduler, Storing};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// The number of prompt tokens that this engine itself still has to compute.
    fn backlog(&self) -> usize {
        let computes = |slot: &usize| self.running[*slot].as_ref().is_some_and(|s| s.import.is_none());
        let comes_back = |slot: usize| {
            let restoring = self.running[slot].as_ref().and_then(|s| s.restoring.as_ref());
            restoring.map_or(0, |restoring| restoring.prefix.n_tokens().saturating_sub(self.slots[slot].kv.len()))
        };
        let missing = |slot: usize| self.missing_prefill(slot).saturating_sub(comes_back(slot));
        let running: usize = (0..self.slots.len()).filter(computes).map(missing).sum();
        let waiting = self.waiting.iter().filter(|s| s.request.kv_source.is_none()).map(|s| s.tokens.len());
        running + waiting.sum::<usize>() + self.vectors.backlog()
    }

    pub(super) fn publish_load(&self) {
        let held: usize = self.slots.iter().filter(|s| s.busy).map(|s| s.kv.len().saturating_sub(s.n_shared)).sum();
        self.shared.load.send_replace(NodeLoad {
            phase: Phase::Serving,
            active_slots: self.running.iter().flatten().count() as u32,
            queued: self.waiting.len() as u32,
            prefill_backlog: self.backlog() as u32,
            free_cells: self.limits.n_cells.saturating_sub(held) as u32,
            n_cells: self.limits.n_cells as u32,
            prefill_tps: self.prefill_tps,
            decode_tps: self.decode_tps,
            held: self.held_version(),
            restore: self.storing.as_ref().map_or_else(RestoreRates::default, Storing::restore_rates),
            store: self.storing.as_ref().map(|storing| storing.store().report()),
        });
    }

    /// Ends a sequence. Its slot is free in every load that is taken after its reader has seen the end.
    pub(super) fn finish(&mut self, slot: usize, reason: FinishReason) {
        if let Some(mut sequence) = self.release(slot) {
            self.publish_load();
            sequence.send(Ok(SequenceEvent::Finished { reason, timings: sequence.timings() }));
        }
    }
}
