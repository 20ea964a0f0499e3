//! A node's health: its state and the reason for it, a subscription to changes, and a count of each transition.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use baton_planner::reason::FailureReason;
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;

use super::node_state::{NodeObservation, NodeState, StateMachine};
use super::state_change::{NodeRefusal, StateChange, StateReason};

/// A node's health at one moment.
#[derive(Debug, Clone)]
pub struct HealthStatus {
    machine: StateMachine,
    info: Option<Arc<NodeInfo>>,
    /// Why it is in this state.
    pub reason: StateReason,
    /// The same in a sentence that clients may see.
    pub words: String,
    /// The time until it is asked or started again, if it is down.
    pub retry_in: Duration,
    /// When it entered this state.
    pub since: SystemTime,
}

impl HealthStatus {
    /// Its state.
    pub fn state(&self) -> NodeState {
        self.machine.state()
    }

    /// The node's description, if the node takes requests.
    pub fn usable(&self) -> Option<&Arc<NodeInfo>> {
        self.info.as_ref().filter(|_| matches!(self.state(), NodeState::Ready | NodeState::Suspect))
    }

    /// The node's description, if its process is up.
    pub fn running(&self) -> Option<&Arc<NodeInfo>> {
        self.info
            .as_ref()
            .filter(|_| !matches!(self.state(), NodeState::Unloaded | NodeState::Starting) && !self.state().is_gone())
    }

    /// Returns true if it did not answer its last probe.
    pub fn is_silent(&self) -> bool {
        self.machine.is_silent()
    }

    /// Why it does not work for this endpoint although it answers.
    pub fn refusal(&self) -> Option<NodeRefusal> {
        self.reason.refusal().filter(|_| self.state() == NodeState::Down)
    }
}

/// A change of a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StateTransition {
    /// The state before.
    pub from: NodeState,
    /// The state after.
    pub to: NodeState,
    /// Why it changed.
    pub reason: StateReason,
}

/// A node's health. All observations of the node are noted here.
#[derive(Debug)]
pub struct Health {
    /// Its name in the log.
    name: String,
    /// A supervisor restarts it when it is frozen and notes that, so silence alone never makes it down.
    is_supervised: bool,
    status: watch::Sender<HealthStatus>,
    transitions: Mutex<BTreeMap<StateTransition, u64>>,
    /// The log's last line says that it cannot be used, or perhaps not.
    is_outage_logged: AtomicBool,
}

impl Health {
    /// The health of a node that has not answered yet.
    pub fn new(name: impl Into<String>) -> Arc<Health> {
        Health::with(name.into(), false)
    }

    /// The health of a node whose supervisor notes each failure and restart. A silent node is suspect, and requests wait
    /// for it.
    pub fn supervised(name: impl Into<String>) -> Arc<Health> {
        Health::with(name.into(), true)
    }

    fn with(name: String, is_supervised: bool) -> Arc<Health> {
        let status = HealthStatus {
            machine: StateMachine::default(),
            info: None,
            reason: StateReason::New,
            words: "the model is loading".to_owned(),
            retry_in: Duration::ZERO,
            since: SystemTime::now(),
        };
        Arc::new(Health {
            name,
            is_supervised,
            status: watch::Sender::new(status),
            transitions: Mutex::default(),
            is_outage_logged: AtomicBool::new(false),
        })
    }

    /// It has answered with its description.
    pub fn note_answer(&self, info: Arc<NodeInfo>) {
        self.apply(NodeObservation::Answered, &StateChange::new(StateReason::Answers, "it answers"), |status| {
            let is_new = status.info.as_ref().is_none_or(|known| **known != *info);
            if is_new {
                status.info = Some(info);
            }
            is_new
        });
    }

    /// The known process has shown that it is alive. A node that is down must first answer with its description.
    pub fn note_alive(&self) {
        // Most signs of life change nothing, so this check saves work. `apply` decides by the state at that moment.
        if self.status.borrow().is_silent() {
            self.apply(NodeObservation::Alive, &StateChange::new(StateReason::Answers, "it answers"), |_| false);
        }
    }

    /// Its process is starting, or its model is loading.
    pub fn note_loading(&self, reason: StateReason) {
        self.apply(NodeObservation::Loading, &StateChange::new(reason, "the model is loading"), |_| false);
    }

    /// It starts once another machine can be used.
    pub fn note_waiting(&self, why: &str) {
        self.apply(NodeObservation::Loading, &StateChange::new(StateReason::Loading, why), |status| {
            why.clone_into(&mut status.words);
            true
        });
    }

    /// Its model is no longer wanted, and its process is ending.
    pub fn note_unloading(&self) {
        let why = StateChange::new(StateReason::Unloads, "the model is being unloaded");
        self.apply(NodeObservation::Loading, &why, |_| false);
    }

    /// Its model is no longer wanted, and its process has ended.
    pub fn note_unloaded(&self) {
        self.apply(
            NodeObservation::Unloaded,
            &StateChange::new(StateReason::Unloaded, "the model is not loaded"),
            |status| {
                status.retry_in = Duration::ZERO;
                false
            },
        );
    }

    /// It reports that it is stopping.
    pub fn note_draining(&self) {
        self.apply(NodeObservation::Draining, &StateChange::new(StateReason::Stopping, "the node is stopping"), |_| {
            false
        });
    }

    /// Its load stream has ended, or it did not report its load.
    pub fn note_silence(&self, why: &StateChange) {
        self.apply(NodeObservation::FellSilent, why, |_| false);
    }

    /// It did not answer a probe. It is asked again after `retry_in`.
    pub fn note_missed_answer(&self, why: &StateChange, retry_in: Duration) {
        self.apply(NodeObservation::MissedAnswer, why, |status| {
            status.retry_in = retry_in;
            false
        });
    }

    /// It cannot be used before `retry_in`.
    pub fn note_failure(&self, why: &StateChange, retry_in: Duration) {
        self.apply(NodeObservation::Failed, why, |status| {
            let is_new = status.retry_in != retry_in;
            status.retry_in = retry_in;
            is_new
        });
    }

    /// Its machine can be woken from now on, or no longer.
    pub fn note_wakeable(&self, can_be_woken: bool) {
        let (event, reason, words) = match can_be_woken {
            true => (NodeObservation::Wakeable, StateReason::Wakeable, "its machine can be woken"),
            false => (NodeObservation::NotWakeable, StateReason::NotWakeable, "its machine can no longer be woken"),
        };
        self.apply(event, &StateChange::new(reason, words), |_| false);
    }

    /// Its machine is being woken.
    pub fn note_waking(&self) {
        let why = StateChange::new(StateReason::Woken, "its machine is being woken");
        self.apply(NodeObservation::Woken, &why, |_| false);
    }

    /// It was woken and did not answer in time. It is not woken again before `retry_in`.
    pub fn note_not_woken(&self, retry_in: Duration) {
        let why = StateChange::new(StateReason::Failure(FailureReason::NotWoken), "its machine was woken in vain");
        self.apply(NodeObservation::NotWoken, &why, |status| {
            status.retry_in = retry_in;
            false
        });
    }

    /// One of its breakers has opened.
    pub fn note_breaker_open(&self, reason: FailureReason) {
        let words = reason.as_str();
        let cause = format!("requests to it failed ({words})");
        let why = StateChange { cause, ..StateChange::new(StateReason::Failure(reason), words) };
        self.apply(NodeObservation::BreakerOpened, &why, |_| false);
    }

    /// All its breakers are closed.
    pub fn note_breaker_closed(&self) {
        self.apply(NodeObservation::BreakerClosed, &StateChange::new(StateReason::BreakerClosed, "it answers"), |_| {
            false
        });
    }

    /// The health now.
    pub fn status(&self) -> HealthStatus {
        self.status.borrow().clone()
    }

    /// Its state.
    pub fn state(&self) -> NodeState {
        self.status.borrow().state()
    }

    /// The node's description, if the node takes requests.
    pub fn usable(&self) -> Option<Arc<NodeInfo>> {
        self.status.borrow().usable().map(Arc::clone)
    }

    /// The node's latest description.
    pub fn last_info(&self) -> Option<Arc<NodeInfo>> {
        self.status.borrow().info.clone()
    }

    /// Returns true if it has neither answered nor failed since the endpoint started.
    pub fn is_new(&self) -> bool {
        self.transitions.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns true if its process is probably up.
    pub fn is_running(&self) -> bool {
        self.status.borrow().running().is_some()
    }

    /// Returns true if it did not answer its last probe.
    pub fn is_silent(&self) -> bool {
        self.status.borrow().is_silent()
    }

    /// A receiver that sees every change.
    pub fn subscribe(&self) -> watch::Receiver<HealthStatus> {
        self.status.subscribe()
    }

    /// How often each transition took place.
    pub fn transitions(&self) -> BTreeMap<StateTransition, u64> {
        self.transitions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Applies an event. `note` updates the rest of the status, and returns true if subscribers must see that.
    fn apply(&self, event: NodeObservation, why: &StateChange, note: impl FnOnce(&mut HealthStatus) -> bool) {
        let mut transition = None;
        self.status.send_if_modified(|status| {
            let is_new = note(status);
            let from = status.state();
            let was_silent = status.is_silent();
            let is_silence = matches!(event, NodeObservation::MissedAnswer | NodeObservation::FellSilent);
            if !(self.is_supervised && was_silent && is_silence) {
                status.machine = status.machine.after(event);
            }
            let to = status.state();
            if from != to {
                transition = Some(StateTransition { from, to, reason: why.reason });
                status.since = SystemTime::now();
            }
            // A node that stays down has its latest reason. One that was stopped, or sleeps, cannot be reached, which says less.
            let is_known = (status.reason == StateReason::Stopped || to.sleeps())
                && matches!(why.reason, StateReason::Unreachable | StateReason::Silent);
            let stays_down = (to == NodeState::Unloaded || to.is_gone()) && !is_known;
            if from != to || stays_down {
                status.reason = why.reason;
                status.words.clone_from(&why.words);
            }
            is_new || from != to || was_silent != status.is_silent()
        });
        if let Some(transition) = transition {
            *self.transitions.lock().unwrap_or_else(PoisonError::into_inner).entry(transition).or_default() += 1;
            self.log(transition, &why.cause);
        }
    }

    fn log(&self, transition: StateTransition, cause: &str) {
        let name = &self.name;
        let from = transition.from.as_str();
        let to = transition.to.as_str();
        let reason = transition.reason.as_str();
        let is_outage = matches!(transition.to, NodeState::Draining | NodeState::Suspect) || transition.to.is_gone();
        let was_outage = match transition.to {
            // Loading may be a part of the recovery.
            NodeState::Starting => false,
            _ => self.is_outage_logged.swap(is_outage, Ordering::Relaxed),
        };
        match transition.to {
            NodeState::Ready if was_outage => tracing::warn!(from, to, reason, "{name} answers"),
            NodeState::Ready => tracing::info!(from, to, reason, "{name} answers"),
            NodeState::Unloaded => tracing::debug!(from, to, reason, "{name} has unloaded its model"),
            NodeState::Starting if transition.reason == StateReason::Unloads => {
                tracing::debug!(from, to, reason, "{name} unloads its model")
            }
            NodeState::Starting => tracing::info!(from, to, reason, "{name} is loading its model"),
            NodeState::Draining => {
                tracing::warn!(from, to, reason, "{name} is stopping: it finishes its requests and takes no new ones")
            }
            // It answers, but the breaker of one of its tasks is still open.
            NodeState::Suspect if transition.from.is_gone() || transition.from == NodeState::Starting => {
                tracing::warn!(from, to, reason, "{name} answers again; the next request tries it");
            }
            NodeState::Suspect => tracing::warn!(from, to, reason, "{name} may be lost: {cause}"),
            // The supervisor reports this failure itself, so it is no warning here.
            NodeState::Down if transition.reason == StateReason::StartFailed => {
                tracing::info!(from, to, reason, "{name} cannot be used: {cause}")
            }
            NodeState::Down => tracing::warn!(from, to, reason, "{name} cannot be used: {cause}"),
            NodeState::Asleep => tracing::info!(from, to, reason, "{name} sleeps: {cause}"),
            NodeState::Waking => tracing::info!(from, to, reason, "{name} is being woken"),
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::Engine;
    use baton_schemas::handoff::HandoffFailure;

    use super::*;

    #[tokio::test]
    async fn each_change_is_counted_once_with_its_reason_and_seen_by_subscribers() {
        let info = Arc::new(SimEngine::new(SimConfig::default()).info().await.unwrap());
        let health = Health::new("it");
        let silent = StateChange::new(StateReason::Silent, "no answer");
        let mut changes = health.subscribe();
        health.note_loading(StateReason::Starts);
        assert!(health.is_new());
        for _ in 0..2 {
            health.note_answer(Arc::clone(&info));
        }
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        health.note_answer(Arc::clone(&info));
        assert!(!changes.has_changed().unwrap(), "nothing has changed");
        health.note_missed_answer(&silent, Duration::ZERO);
        assert!(health.status().usable().is_some(), "better than none");
        health.note_alive();
        health.note_alive();
        health.note_breaker_open(FailureReason::DecodeLost);
        health.note_breaker_open(FailureReason::Handoff(HandoffFailure::PrefillLost));
        health.note_breaker_closed();
        health.note_draining();
        assert!(health.status().usable().is_none() && health.status().running().is_some());
        health.note_missed_answer(&StateChange::new(StateReason::Stopped, "it was stopped"), Duration::ZERO);
        health.note_alive();
        health.note_missed_answer(&StateChange::new(StateReason::Unreachable, "unreachable"), Duration::ZERO);
        assert_eq!((health.state(), health.status().words.as_str()), (NodeState::Down, "it was stopped"));
        health.note_missed_answer(&StateChange::new(StateReason::KeyRefused, "another key"), Duration::ZERO);
        assert_eq!(health.status().refusal(), Some(NodeRefusal::OtherKey));
        let supervised = Health::supervised("it");
        supervised.note_answer(info);
        for _ in 0..3 {
            supervised.note_silence(&silent);
        }
        assert_eq!(supervised.state(), NodeState::Suspect);
        supervised.note_loading(StateReason::Ended);
        assert_eq!((supervised.state(), supervised.is_new()), (NodeState::Starting, false));
        let counted: Vec<_> = health
            .transitions()
            .into_iter()
            .map(|(t, n)| (t.from.as_str(), t.to.as_str(), t.reason.as_str(), n))
            .collect();
        let expected = [
            ("starting", "ready", "answers", 1),
            ("ready", "draining", "told_to_stop", 1),
            ("ready", "suspect", "silent", 1),
            ("ready", "suspect", "decode_lost", 1),
            ("draining", "down", "stopped", 1),
            ("suspect", "ready", "answers", 1),
            ("suspect", "ready", "breaker_closed", 1),
        ];
        assert_eq!(counted, expected);
    }
}
