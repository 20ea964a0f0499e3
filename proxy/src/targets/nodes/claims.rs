//! The work that this endpoint has requested from a node, beside the load that the node reports. Measurements are requested
//! work, too, but no request waits for them, because they give way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_schemas::node::NodeLoad;

/// The work that this endpoint has requested from a node and not received yet.
#[derive(Debug, Default)]
pub(super) struct ClaimedWork {
    n_streams: AtomicU32,
    n_prompt_tokens: AtomicU32,
    /// The part of these tokens that the node has: their sequences have got slots.
    n_at_node: AtomicU32,
    /// The tokens of prompts that have left the node, since the start. It wraps.
    n_left_node: AtomicU32,
}

/// A node's load, and how much of it this endpoint had requested when it came, its measurements included. The rest is other
/// endpoints'. A load is up to half a second old, and what this endpoint has requested or received since is known exactly.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReportedLoad {
    pub(super) load: NodeLoad,
    n_own_streams: u32,
    n_own_prompt_tokens: u32,
    /// The tokens of this endpoint's prompts that the node had and did not report any more: it had computed them, or had them in its
    /// cache.
    n_own_computed: u32,
    /// [`ClaimedWork::n_left_node`] when it came.
    n_left_node: u32,
}

impl ReportedLoad {
    /// A load that has just come.
    pub(super) fn new(load: NodeLoad, claims: &ClaimedWork, measurements: &ClaimedWork) -> ReportedLoad {
        let own = |part: fn(&ClaimedWork) -> &AtomicU32| {
            part(claims).load(Ordering::Relaxed).saturating_add(part(measurements).load(Ordering::Relaxed))
        };
        ReportedLoad {
            load,
            n_own_streams: own(|work| &work.n_streams),
            n_own_prompt_tokens: own(|work| &work.n_prompt_tokens),
            // The rest of a measurement, which is not known, counts as if it were the claims': at most its length, until it has
            // given way.
            n_own_computed: claims.n_at_node.load(Ordering::Relaxed).saturating_sub(load.prefill_backlog),
            n_left_node: claims.n_left_node.load(Ordering::Relaxed),
        }
    }

    /// The node's sequences and the prompt tokens that it has not computed, with what requests of this endpoint claim by now.
    pub(super) fn with_claims(self, claims: &ClaimedWork) -> (u32, u32) {
        let n_streams = self.load.active_slots.saturating_add(self.load.queued).saturating_sub(self.n_own_streams);
        let of_others = self.load.prefill_backlog.saturating_sub(self.n_own_prompt_tokens);
        // Prompts that have left since then were computed whole, so what was computed of them counts no longer.
        let n_left = claims.n_left_node.load(Ordering::Relaxed).wrapping_sub(self.n_left_node);
        let computed = self.n_own_computed.saturating_sub(n_left);
        let own = claims.n_prompt_tokens.load(Ordering::Relaxed).saturating_sub(computed);
        (n_streams.saturating_add(claims.n_streams.load(Ordering::Relaxed)), of_others.saturating_add(own))
    }
}

/// Requested work. Dropping it returns the claim.
pub struct NodeClaim {
    of: Arc<ClaimedWork>,
    n_streams: u32,
    n_prompt_tokens: u32,
    /// The part of these tokens that the node has.
    n_at_node: u32,
    /// The claim is only for a prompt, and ends when the prompt is computed.
    is_prompt: bool,
}

impl NodeClaim {
    /// Claims a node for streams whose prompt has this many tokens to compute.
    pub(super) fn new(of: &Arc<ClaimedWork>, n_streams: u32, n_prompt_tokens: u32) -> NodeClaim {
        of.n_streams.fetch_add(n_streams, Ordering::Relaxed);
        of.n_prompt_tokens.fetch_add(n_prompt_tokens, Ordering::Relaxed);
        NodeClaim { of: Arc::clone(of), n_streams, n_prompt_tokens, n_at_node: 0, is_prompt: false }
    }

    /// The same only for the prompt's KV.
    pub fn of_prompt(mut self) -> NodeClaim {
        self.is_prompt = true;
        self
    }

    /// Returns true if it ends when the prompt is computed.
    pub fn is_of_prompt(&self) -> bool {
        self.is_prompt
    }

    /// The sequence has its slot: the node's loads tell from now on how much of the prompt it has not computed.
    pub fn has_slot(&mut self) {
        let n_new = self.n_prompt_tokens - self.n_at_node;
        self.n_at_node = self.n_prompt_tokens;
        self.of.n_at_node.fetch_add(n_new, Ordering::Relaxed);
    }

    /// The prompt is computed.
    pub fn prompt_done(&mut self) {
        let n_at_node = std::mem::take(&mut self.n_at_node);
        self.of.n_at_node.fetch_sub(n_at_node, Ordering::Relaxed);
        self.of.n_left_node.fetch_add(n_at_node, Ordering::Relaxed);
        let n_tokens = std::mem::take(&mut self.n_prompt_tokens);
        self.of.n_prompt_tokens.fetch_sub(n_tokens, Ordering::Relaxed);
        if self.is_prompt {
            self.stream_done();
        }
    }

    fn stream_done(&mut self) {
        self.of.n_streams.fetch_sub(std::mem::take(&mut self.n_streams), Ordering::Relaxed);
    }
}

impl Drop for NodeClaim {
    fn drop(&mut self) {
        self.prompt_done();
        self.stream_done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_since_a_load_came_counts_no_longer() {
        let claims = ClaimedWork { n_streams: 5.into(), n_prompt_tokens: 1_000.into(), ..ClaimedWork::default() };
        let load = NodeLoad { active_slots: 4, queued: 2, prefill_backlog: 900, ..NodeLoad::default() };
        let reported = ReportedLoad::new(load, &claims, &ClaimedWork::default());
        assert_eq!(reported.with_claims(&claims), (6, 1_000));
        assert_eq!(reported.with_claims(&ClaimedWork::default()), (1, 0), "one stream is another endpoint's");
        let more = ClaimedWork { n_streams: 7.into(), n_prompt_tokens: 3_000.into(), ..ClaimedWork::default() };
        assert_eq!(reported.with_claims(&more), (8, 3_000));
    }

    #[test]
    fn what_a_node_has_computed_of_a_prompt_is_no_queue() {
        let claims = Arc::<ClaimedWork>::default();
        let load = |prefill_backlog| {
            let load = NodeLoad { active_slots: 2, prefill_backlog, ..NodeLoad::default() };
            ReportedLoad::new(load, &claims, &ClaimedWork::default())
        };
        let backlog = |reported: ReportedLoad| reported.with_claims(&claims).1;
        let [mut first, mut second] = [100, 80].map(|n| NodeClaim::new(&claims, 1, n));
        assert_eq!(backlog(load(0)), 180, "both are on their way to the node");
        first.has_slot();
        assert_eq!((backlog(load(100)), backlog(load(30))), (180, 110));
        second.has_slot();
        let before = load(90);
        assert_eq!(backlog(before), 90);
        first.prompt_done();
        assert_eq!(backlog(before), 80, "the other one is whole at most");
        assert_eq!(backlog(load(20)), 20);
        let third = NodeClaim::new(&claims, 1, 50);
        assert_eq!(backlog(load(20)), 70);
        assert_eq!(backlog(load(500)), 500, "the rest is another endpoint's");
        drop((first, second, third));
        assert_eq!((backlog(load(0)), backlog(load(500))), (0, 500));
    }

    #[test]
    fn a_measurement_is_no_queue_because_it_gives_way() {
        let (claims, measurements) = (ClaimedWork::default(), Arc::default());
        let measurement = NodeClaim::new(&measurements, 1, 256);
        let load = NodeLoad { active_slots: 1, prefill_backlog: 256, ..NodeLoad::default() };
        let reported = ReportedLoad::new(load, &claims, &measurements);
        assert_eq!(reported.with_claims(&claims), (0, 0));
        drop(measurement);
        assert_eq!(reported.with_claims(&claims), (0, 0), "also once it has ended, until the next load comes");
        let others = ReportedLoad::new(load, &claims, &measurements);
        assert_eq!(others.with_claims(&claims), (1, 256), "another endpoint's");
    }

    #[test]
    fn a_measurement_shortens_no_prompt() {
        let (claims, measurements) = (Arc::default(), Arc::default());
        let _measurement = NodeClaim::new(&measurements, 1, 256);
        let mut prompt = NodeClaim::new(&claims, 1, 900);
        prompt.has_slot();
        // 56 tokens of the measurement are left, and the whole prompt.
        let load = NodeLoad { active_slots: 2, prefill_backlog: 956, ..NodeLoad::default() };
        assert_eq!(ReportedLoad::new(load, &claims, &measurements).with_claims(&claims), (1, 900));
    }
}
