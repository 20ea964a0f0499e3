//! The breakers of nodes: one for each task of a node, and one for each pair of nodes.
//!
//! A node without room for the prompts of others may still generate well. A decode node that cannot take the KV of one
//! prefill node, or does not trust it, may still work with another, and so may the prefill node.

use baton_planner::reason::{BarReason, FailureReason};
use baton_schemas::handoff::HandoffFailure;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::breaker::{Breaker, BreakerView};

/// A task of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Generates.
    #[default]
    Decode,
    /// Computes prompts for decode nodes.
    Prefill,
}

impl Task {
    /// The word for metrics, headers and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The breakers of a node's tasks.
#[derive(Debug, Default)]
pub struct Breakers {
    decode: Breaker<FailureReason>,
    prefill: Breaker<FailureReason>,
}

impl Breakers {
    /// The breaker of a task.
    pub fn of(&self, task: Task) -> &Breaker<FailureReason> {
        match task {
            Task::Decode => &self.decode,
            Task::Prefill => &self.prefill,
        }
    }

    fn both(&self) -> [&Breaker<FailureReason>; 2] {
        [&self.decode, &self.prefill]
    }

    /// Notes that the node has answered a probe that was sent at `asked`. Returns true if a breaker closed.
    pub fn answered(&self, asked: Instant) -> bool {
        self.both().map(|breaker| {
            breaker.answered(asked);
            breaker.close_if_quiet()
        }) != [false; 2]
    }

    /// Returns true if any breaker is open.
    pub fn is_any_open(&self) -> bool {
        self.both().iter().any(|breaker| breaker.is_open())
    }
}

/// The breakers of the links from prefill nodes to decode nodes, by their indices in a model's lists.
#[derive(Debug)]
pub struct PairBreakers(Vec<Vec<Breaker<HandoffFailure>>>);

impl PairBreakers {
    /// Closed breakers for every pair.
    pub fn new(n_prefill: usize, n_decode: usize) -> PairBreakers {
        let row = || (0..n_decode).map(|_| Breaker::default()).collect();
        PairBreakers((0..n_prefill).map(|_| row()).collect())
    }

    fn of(&self, prefill: usize, decode: usize) -> Option<&Breaker<HandoffFailure>> {
        self.0.get(prefill)?.get(decode)
    }

    /// Returns true if a handoff between the two may be tried now. In the half-open state this takes the only place, so
    /// call it only to send.
    pub fn try_pass(&self, prefill: usize, decode: usize) -> bool {
        self.of(prefill, decode).is_none_or(Breaker::try_pass)
    }

    /// Why no handoff is tried, for each pair: `[prefill][decode]`.
    pub fn barred(&self) -> Vec<Vec<Option<BarReason>>> {
        let bars = |breaker: &Breaker<HandoffFailure>| Some(FailureReason::Handoff(breaker.bars()?).into());
        self.0.iter().map(|row| row.iter().map(bars).collect()).collect()
    }

    /// A handoff failed, and neither node alone is the cause.
    pub fn failed(&self, prefill: usize, decode: usize, reason: HandoffFailure) {
        if let Some(breaker) = self.of(prefill, decode) {
            breaker.failed(reason);
            // Count both nodes as answering; their own breakers keep track of that.
            breaker.answered(Instant::now());
        }
    }

    /// A handoff was let through, and shows nothing.
    pub fn untried(&self, prefill: usize, decode: usize) {
        if let Some(breaker) = self.of(prefill, decode) {
            breaker.untried();
        }
    }

    /// A handoff succeeded.
    pub fn succeeded(&self, prefill: usize, decode: usize) {
        if let Some(breaker) = self.of(prefill, decode) {
            breaker.succeeded(Instant::now());
        }
    }

    /// The state of a pair's breaker, for reports. Closes the breaker if no request has tried the pair for a while.
    pub fn view(&self, prefill: usize, decode: usize) -> Option<BreakerView<HandoffFailure>> {
        let breaker = self.of(prefill, decode)?;
        breaker.close_if_quiet();
        Some(breaker.view())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pair_is_tried_again_and_says_nothing_of_others() {
        let pairs = PairBreakers::new(1, 2);
        pairs.failed(0, 0, HandoffFailure::ImportFailed);
        assert!(!pairs.try_pass(0, 0) && pairs.try_pass(0, 1));
        assert_eq!(pairs.barred(), [[Some(FailureReason::Handoff(HandoffFailure::ImportFailed).into()), None]]);
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(4)).await;
            assert!(pairs.try_pass(0, 0) && !pairs.try_pass(0, 0), "one request tries it");
            pairs.failed(0, 0, HandoffFailure::ImportFailed);
        }
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(pairs.try_pass(0, 0));
        pairs.succeeded(0, 0);
        assert!(!pairs.view(0, 0).unwrap().is_open);
        pairs.failed(0, 0, HandoffFailure::ImportFailed);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert!(!pairs.view(0, 0).unwrap().is_open, "no request tries it, and both nodes answer");
        assert_eq!(pairs.view(0, 0).unwrap().counts[&HandoffFailure::ImportFailed], 102);
        assert!(pairs.try_pass(7, 7) && pairs.view(7, 7).is_none(), "there is no such pair");
    }
}
