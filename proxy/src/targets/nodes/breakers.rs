//! Whose failures keep requests away from what: a breaker for each task of a node, and one for each pair.
//!
//! A node that has no room for prompts of others may generate as well as ever, and a decode node that cannot take the
//! KV of one prefill node, or does not trust it, says nothing of the two with others.

use baton_planner::reason::{BarReason, FailureReason};
use baton_schemas::handoff::HandoffFailure;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{Breaker, BreakerView};

/// What a node does for this endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Generates.
    #[default]
    Decode,
    /// Computes prompts for decode nodes.
    Prefill,
}

impl Task {
    /// As it is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Task::Decode => "decode",
            Task::Prefill => "prefill",
        }
    }
}

/// The breakers of a node's tasks.
#[derive(Debug, Default)]
pub struct Breakers {
    decode: Breaker<FailureReason>,
    prefill: Breaker<FailureReason>,
}

impl Breakers {
    /// The one of a task.
    pub fn of(&self, task: Task) -> &Breaker<FailureReason> {
        match task {
            Task::Decode => &self.decode,
            Task::Prefill => &self.prefill,
        }
    }

    fn both(&self) -> [&Breaker<FailureReason>; 2] {
        [&self.decode, &self.prefill]
    }

    /// The node has answered a question that was asked after `since`. Says whether a breaker closed for that.
    pub fn answered(&self, since: Instant) -> bool {
        self.both().map(|breaker| {
            breaker.answered(since);
            breaker.close_if_quiet()
        }) != [false; 2]
    }

    /// Whether one of them keeps requests away.
    pub fn is_any_open(&self) -> bool {
        self.both().iter().any(|breaker| breaker.is_open())
    }
}

/// The breakers of the ways from prefill nodes to decode nodes, by their places in a model's lists.
#[derive(Debug)]
pub struct Pairs(Vec<Vec<Breaker<HandoffFailure>>>);

impl Pairs {
    /// Of so many nodes.
    pub fn new(n_prefill: usize, n_decode: usize) -> Pairs {
        let row = || (0..n_decode).map(|_| Breaker::default()).collect();
        Pairs((0..n_prefill).map(|_| row()).collect())
    }

    fn of(&self, prefill: usize, decode: usize) -> Option<&Breaker<HandoffFailure>> {
        self.0.get(prefill)?.get(decode)
    }

    /// Whether a handoff between the two may be tried now. Asking takes the half-open state's one place: ask only to
    /// send.
    pub fn try_pass(&self, prefill: usize, decode: usize) -> bool {
        self.of(prefill, decode).is_none_or(Breaker::try_pass)
    }

    /// Why no handoff between the two is tried, for each: `[prefill][decode]`.
    pub fn barred(&self) -> Vec<Vec<Option<BarReason>>> {
        let bars = |breaker: &Breaker<HandoffFailure>| Some(FailureReason::Handoff(breaker.bars()?).into());
        self.0.iter().map(|row| row.iter().map(bars).collect()).collect()
    }

    /// A handoff failed for a reason that is neither node's alone.
    pub fn failed(&self, prefill: usize, decode: usize, reason: HandoffFailure) {
        if let Some(breaker) = self.of(prefill, decode) {
            breaker.failed(reason);
            // Both nodes have answered. Whether they still do, their own breakers know.
            breaker.answered(Instant::now());
        }
    }

    /// A handoff went well.
    pub fn succeeded(&self, prefill: usize, decode: usize) {
        if let Some(breaker) = self.of(prefill, decode) {
            breaker.succeeded();
        }
    }

    /// What an operator is shown of the two. Closes the breaker if no request has come to try them for a while.
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
        let pairs = Pairs::new(1, 2);
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
        assert!(!pairs.view(0, 0).unwrap().is_open, "nobody tries it, and nothing is known against it");
        assert_eq!(pairs.view(0, 0).unwrap().counts[&HandoffFailure::ImportFailed], 102);
        assert!(pairs.try_pass(7, 7) && pairs.view(7, 7).is_none(), "there is no such pair");
    }
}
