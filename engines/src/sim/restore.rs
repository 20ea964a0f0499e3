//! Brings KV back from a simulated store.

use std::time::Duration;

use baton_schemas::sequence::CachedTokens;
use baton_schemas::{CacheScope, SequenceRequest, Token};

use super::{SimState, lock, seconds};

impl SimState {
    /// What a request starts with, and how long that took. To report the prompt's log-probabilities, all of it is computed.
    pub(super) async fn start(&self, request: &SequenceRequest, tokens: &[Token]) -> (CachedTokens, Duration) {
        match request.prompt_logprobs {
            None => self.restore(request.cache_scope, &tokens[..tokens.len() - 1]).await,
            Some(_) => (CachedTokens::default(), Duration::ZERO),
        }
    }

    /// Restores what the store has of a prompt, as far as that is faster than computing it.
    pub(super) async fn restore(&self, scope: CacheScope, wanted: &[Token]) -> (CachedTokens, Duration) {
        let [in_slot, in_memory, on_disk] = lock(&self.cache).common(scope, wanted).map(|n| n as u32);
        let [memory, disk] = self.config.store;
        let n_memory = in_memory.saturating_sub(in_slot);
        let n_disk = on_disk.saturating_sub(in_slot + n_memory);
        let from_memory = seconds(f64::from(n_memory), memory.restore_tps);
        let from_disk = from_memory + seconds(f64::from(n_disk), disk.restore_tps);
        let start = |memory: u32, disk: u32, restore: Duration| {
            let n_cached = in_slot + memory + disk;
            let compute = seconds(wanted.len() as f64 - f64::from(n_cached), self.config.prefill_tps * self.speed());
            (restore + compute, restore, CachedTokens { n_cached, memory, disk })
        };
        let starts = [start(0, 0, Duration::ZERO), start(n_memory, 0, from_memory), start(n_memory, n_disk, from_disk)];
        let first = starts.into_iter().min_by_key(|(until_computed, ..)| *until_computed);
        let (_, restore, cached) = first.unwrap_or_default();
        if restore > Duration::ZERO {
            tokio::time::sleep(restore).await;
        }
        (cached, restore)
    }
}
