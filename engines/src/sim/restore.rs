//! Brings KV back from a simulated store, while what follows it is pulled.

use std::time::Duration;

use baton_schemas::handoff::PULL_AHEAD;
use baton_schemas::sequence::CachedTokens;
use baton_schemas::{CacheScope, SequenceRequest, Token};
use tokio::sync::Notify;

use super::{SimState, lock, seconds};

impl SimState {
    /// What a request starts with, and how long it takes until that is in its slot. To report the prompt's log-probabilities, all of
    /// it is computed.
    pub(super) fn start(&self, request: &SequenceRequest, tokens: &[Token]) -> (CachedTokens, Duration) {
        match request.prompt_logprobs {
            None => self.restorable(request.cache_scope, &tokens[..tokens.len() - 1]),
            Some(_) => (CachedTokens::default(), Duration::ZERO),
        }
    }

    /// What slots have of a prompt, and of what the store has as much as comes back sooner than it is computed; with the time that it
    /// takes.
    pub(super) fn restorable(&self, scope: CacheScope, wanted: &[Token]) -> (CachedTokens, Duration) {
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
        (cached, restore)
    }
}

/// Waits until shortly before what is restored is there: then what follows it is pulled.
pub(super) async fn until_pull(restore: Duration) {
    wait(restore.saturating_sub(PULL_AHEAD)).await;
}

/// Waits until the store has given what it has.
pub(super) async fn wait(restore: Duration) {
    if restore > Duration::ZERO {
        tokio::time::sleep(restore).await;
    }
}

/// The same while a pull goes on.
pub(super) async fn beside(restore: Duration, pull: impl Future<Output = ()>) {
    let pulling = async {
        pull.await;
        std::future::pending().await
    };
    tokio::select! {
        biased;
        () = wait(restore) => {}
        () = pulling => {}
    }
}

/// Waits until a pull has begun where it is computed, or has ended.
pub(super) async fn begins(begun: &Notify, pull: impl Future<Output = ()>) {
    tokio::select! {
        () = begun.notified() => {}
        () = pull => {}
    }
}
