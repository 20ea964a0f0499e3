//! Waits for a node: until it is ready, and until its machine is awake.

use std::sync::Arc;
use std::time::Duration;

use baton_planner::reason::BarReason;
use baton_schemas::node::NodeInfo;

use super::machine_waker::{MachineWaker, WakeSettings};
use super::node::Node;
use super::node_state::NodeState;
use super::wake_times::WakeTimes;
use crate::error::RequestError;

/// How long a request waits for a node that is starting. A restart of the default model takes much less; clients of a
/// slower node get an error that asks for a retry.
pub const READY_WAIT: Duration = Duration::from_secs(10);

impl Node {
    /// The node's description, once it is ready. Errors: it cannot be used, or is not ready within [`READY_WAIT`].
    pub async fn ready(&self) -> Result<Arc<NodeInfo>, RequestError> {
        let mut health = self.health.subscribe();
        let settled = health.wait_for(|status| status.state() != NodeState::Starting);
        match tokio::time::timeout(READY_WAIT, settled).await {
            Ok(Ok(status)) => {
                let usable = status.usable().map(Arc::clone);
                let waker = self.waker.load_full().filter(|_| status.state().sleeps());
                // It is asked every second, and woken less often.
                let retry_in = waker.map_or(status.retry_in, |waker| waker.breaker.pause_left().max(status.retry_in));
                usable.ok_or_else(|| RequestError::unavailable(&status.words, retry_in))
            }
            Ok(Err(_)) => Err(RequestError::unavailable("the engine has been stopped", READY_WAIT)),
            Err(_) => Err(RequestError::unavailable("the model is loading", READY_WAIT)),
        }
    }

    /// Sets how its machine is woken. The same settings change nothing.
    pub fn set_waker(&self, settings: Option<WakeSettings>, times: &Arc<WakeTimes>) {
        let known = self.waker.load().as_ref().map(|waker| waker.settings);
        if known != settings {
            self.waker.store(settings.map(|settings| MachineWaker::new(settings, Arc::clone(times))));
            self.health.note_wakeable(settings.is_some());
        }
    }

    /// Returns true if its machine can be woken when it sleeps.
    pub fn can_be_woken(&self) -> bool {
        self.waker.load().is_some()
    }

    /// Returns true if its machine sleeps, or is being woken.
    pub fn is_asleep(&self) -> bool {
        self.health.state().sleeps()
    }

    /// The time until it will probably be ready if its machine is woken now. `None`: it does not sleep. Errors: why it is not woken.
    pub fn time_to_wake(&self) -> Option<Result<Duration, BarReason>> {
        let state = self.health.state();
        let waker = self.waker.load_full().filter(|_| state.sleeps())?;
        let barred = waker.breaker.bars().filter(|_| state == NodeState::Asleep);
        Some(barred.map_or_else(|| Ok(waker.expected()), |reason| Err(reason.into())))
    }

    /// Its description as a plan uses it: also that of one whose machine sleeps.
    pub fn planned_info(&self) -> Option<Arc<NodeInfo>> {
        self.info().or_else(|| self.last_info().filter(|_| self.is_asleep()))
    }

    /// How long a request waits for its machine at most.
    pub fn longest_wake(&self) -> Duration {
        self.waker.load().as_ref().map_or(Duration::ZERO, |waker| waker.settings.longest)
    }

    /// Wakes its machine, and waits for at most `patience` until the node is ready. Returns false if it is not. Dropping the future
    /// ends the wait and not the waking.
    pub async fn wake(&self, patience: Duration) -> bool {
        let Some(waker) = self.waker.load_full() else { return false };
        if !self.is_asleep() || !waker.begin(&self.name, &self.health) {
            return self.info().is_some();
        }
        let mut health = self.health.subscribe();
        let settled = health.wait_for(|status| !matches!(status.state(), NodeState::Waking | NodeState::Starting));
        let status = tokio::time::timeout(patience, settled).await;
        status.is_ok_and(|status| status.is_ok_and(|status| status.usable().is_some()))
    }
}

#[cfg(test)]
mod tests;
