//! Wakes a machine of a model of which no node is ready.

use std::sync::Arc;
use std::time::Duration;

use super::served_model::ServedModel;
use crate::targets::nodes::{FallbackReason, Node};

impl ServedModel {
    /// Returns true if a machine that sleeps may generate for this model, and may be woken now.
    pub(super) fn can_wake(&self) -> bool {
        self.next_to_wake().is_some()
    }

    /// Wakes one machine that may generate for this model, and waits until its node is ready or it is given up.
    pub(super) async fn wake_one(&self) {
        let Some((node, _)) = self.next_to_wake() else { return };
        tracing::info!(node = node.name, "no node can answer, so a machine is woken");
        if !node.wake(node.longest_wake()).await {
            self.fallbacks.count(FallbackReason::NotWoken);
        }
    }

    /// The sleeping decode node that will be ready first. What runs on a node that has never answered shows once it is awake.
    fn next_to_wake(&self) -> Option<(&Arc<Node>, Duration)> {
        let asleep = self.decode.iter().filter_map(|node| Some((node, node.time_to_wake()?.ok()?)));
        let may_serve =
            |(node, _): &(&Arc<Node>, _)| node.last_info().is_none_or(|info| self.bars_decode(&info).is_none());
        asleep.filter(may_serve).min_by_key(|(_, time)| *time)
    }
}
