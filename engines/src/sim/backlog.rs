//! The prompt tokens that a simulated engine has accepted and not computed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_schemas::{CacheScope, SequenceRequest, Token};

use super::SimState;

/// Those of all prompts, whether they have a slot or wait for one.
#[derive(Debug, Default)]
pub(super) struct Backlog(AtomicUsize);

impl Backlog {
    pub(super) fn n_tokens(&self) -> u32 {
        u32::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }
}

/// Those of one prompt. Dropping it takes them from the backlog.
pub(super) struct Uncomputed {
    of: Arc<Backlog>,
    n: usize,
}

impl Uncomputed {
    pub(super) fn new(of: &Arc<Backlog>, n: usize) -> Uncomputed {
        of.0.fetch_add(n, Ordering::Relaxed);
        Uncomputed { of: Arc::clone(of), n }
    }

    /// So many are left.
    pub(super) fn set(&mut self, n: usize) {
        self.of.0.fetch_add(n, Ordering::Relaxed);
        self.of.0.fetch_sub(std::mem::replace(&mut self.n, n), Ordering::Relaxed);
    }

    /// So many of them are computed now.
    pub(super) fn computed(&mut self, n: usize) {
        self.set(self.n.saturating_sub(n));
    }
}

impl Drop for Uncomputed {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl SimState {
    /// Counts what a prompt lacks here, from its acceptance on.
    pub(super) fn accept(&self, scope: CacheScope, wanted: &[Token]) -> Uncomputed {
        let (cached, _) = self.restorable(scope, wanted);
        Uncomputed::new(&self.backlog, wanted.len().saturating_sub(cached.n_cached as usize))
    }

    /// The same of a sequence, whose tokens it returns. A prompt that is pulled counts where it is computed.
    pub(super) fn accept_sequence(&self, request: &SequenceRequest) -> (Vec<Token>, Uncomputed) {
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        let uncomputed = match request.kv_source {
            Some(_) => Uncomputed::new(&self.backlog, 0),
            None => self.accept(request.cache_scope, &tokens[..request.n_prefill()]),
        };
        (tokens, uncomputed)
    }

    /// Waits until `n` prompt tokens are computed, after all earlier ones. Returns the time of their computation.
    pub(super) async fn prefill(&self, n: usize, of: &mut Uncomputed) -> Duration {
        let compute = self.prefill_steps.compute(n, self.step_cost()).await;
        of.computed(n);
        compute
    }

    /// The same of a prompt's part, in steps that others can come between.
    pub(super) async fn prefill_in_chunks(&self, mut n: usize, of: &mut Uncomputed) -> Duration {
        let mut compute = Duration::ZERO;
        while n > 0 {
            let chunk = n.min(self.config.chunk_tokens.max(1) as usize);
            compute += self.prefill(chunk, of).await;
            n -= chunk;
        }
        compute
    }

    /// The same of all that is left.
    pub(super) async fn prefill_rest(&self, n: usize, of: &mut Uncomputed) -> Duration {
        of.set(n);
        self.prefill_in_chunks(n, of).await
    }
}

#[cfg(test)]
mod tests {
    use baton_link::engine::{Engine, KvEvent};
    use baton_schemas::SequenceRequest;
    use baton_schemas::handoff::PrefillRequest;
    use baton_schemas::kv::HandoffId;
    use futures::StreamExt;

    use super::super::{SimConfig, SimEngine, kv};

    #[tokio::test(start_paused = true)]
    async fn the_backlog_is_what_is_accepted_and_not_computed() {
        let config = SimConfig { n_slots: 1, prefill_tps: 100.0, ..SimConfig::default() };
        let fingerprint = kv::identity(&config).fingerprint;
        let sim = SimEngine::new(config);
        let backlog = async || sim.load().await.unwrap().prefill_backlog;
        let mut handoffs = Vec::new();
        for first in 0..3 {
            let request = PrefillRequest {
                images: None,
                handoff: HandoffId([0; 16]),
                tokens: [&[first][..], &[7; 899]].concat(),
                start: 0,
                codecs: Vec::new(),
                state_codecs: Vec::new(),
                state_bps: None,
                macs: Vec::new(),
                fingerprint,
                checkpoints: Vec::new(),
                cache_scope: Default::default(),
                ephemeral: false,
                gives_way: false,
                held_only: false,
            };
            handoffs.push(sim.prefill(request).await.unwrap());
        }
        assert_eq!(backlog().await, 2_700, "also what waits for the slot");
        let mut first = handoffs.remove(0);
        while let Some(event) = first.next().await {
            if let KvEvent::Chunk(chunk) = event.unwrap() {
                assert_eq!(backlog().await, 2_700 - chunk.p1);
            }
        }
        drop(first);
        handoffs.pop();
        assert_eq!(backlog().await, 900, "one is gone, and one has left");
        let prompt = [&[0][..], &[7; 899], &[8; 100]].concat();
        let request = SequenceRequest { prompt, max_tokens: Some(1), ..SequenceRequest::default() };
        let reply = sim.generate(request).await.unwrap();
        assert_eq!(backlog().await, 999, "the slot has the first 900 of these");
        drop(handoffs);
        assert_eq!(reply.count().await, 3);
        assert_eq!(backlog().await, 0);
    }
}
