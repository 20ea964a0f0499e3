//! The state of a node, and how events change it.
//!
//! ```text
//!           Answered          MissedAnswer      MissedAnswer
//! Starting ───────────► Ready ───────────► Suspect ────────► Down
//!     ▲                  │  ▲  Answered       │               │
//!     │ Loading          │  └─────────────────┘◄──────────────┘ Answered
//!     │                  │ Draining
//!  (from any state)      └──────► Draining ── MissedAnswer ──► Down
//! ```
//!
//! A node that answers while one of its breakers is open is suspect until the breaker closes. From any state, a node
//! becomes unloaded when its model is no longer wanted, and starting when it is loaded again.
//!
//! A node whose machine can be woken is asleep or waking instead of down, unless it answers and refuses this endpoint.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of a node.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
// The name in /openapi.json, where `NodeState` is the report of a node.
#[schemars(rename = "Life")]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Its model is not wanted now, so it has no process.
    Unloaded,
    /// It has not answered yet, its process is starting, or its model is loading.
    #[default]
    Starting,
    /// It takes requests.
    Ready,
    /// It is stopping: it finishes its requests and takes no new ones.
    Draining,
    /// It did not answer a probe, or requests to it fail. It gets a request only if no ready node can take it.
    Suspect,
    /// It cannot be used.
    Down,
    /// It does not answer, and its machine can be woken.
    Asleep,
    /// Its machine is being woken.
    Waking,
}

impl NodeState {
    /// All states.
    pub const ALL: [NodeState; 8] = [
        NodeState::Unloaded,
        NodeState::Starting,
        NodeState::Ready,
        NodeState::Draining,
        NodeState::Suspect,
        NodeState::Down,
        NodeState::Asleep,
        NodeState::Waking,
    ];

    /// Returns true if it cannot be reached, whether or not it can be woken.
    pub fn is_gone(self) -> bool {
        matches!(self, NodeState::Down | NodeState::Asleep | NodeState::Waking)
    }

    /// Returns true if it cannot be reached, and its machine is being woken or can be.
    pub fn sleeps(self) -> bool {
        matches!(self, NodeState::Asleep | NodeState::Waking)
    }

    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An observation of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeObservation {
    /// Its process is starting, or its model is loading.
    Loading,
    /// Its process has ended because its model is not wanted.
    Unloaded,
    /// It has answered, and serves.
    Answered,
    /// It reports that it is stopping.
    Draining,
    /// It did not answer a probe. After the second time in a row it is down; after the first, if it never answered.
    MissedAnswer,
    /// The load stream of a running node ended, or the node did not report its load. Has no effect on a starting node.
    FellSilent,
    /// It cannot be used, and waiting does not help: it refuses the cluster key, or cannot start.
    Failed,
    /// The known process has shown that it is alive. Only a silent node changes its state.
    Alive,
    /// One of its breakers has opened.
    BreakerOpened,
    /// Its breakers have closed.
    BreakerClosed,
    /// Its machine can be woken from now on.
    Wakeable,
    /// Its machine can no longer be woken.
    NotWakeable,
    /// Its machine is being woken.
    Woken,
    /// It was woken and did not answer in time.
    NotWoken,
}

/// The inputs of the state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StateMachine {
    reach: Reachability,
    breaker_is_open: bool,
    wake: WakePhase,
}

/// Whether a node that is gone can be woken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum WakePhase {
    #[default]
    NotWakeable,
    Wakeable,
    Waking,
}

/// How the node responds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Reachability {
    Unloaded,
    #[default]
    Starting,
    Answering,
    Stopping,
    Silent,
    Gone,
    /// It answers, and refuses this endpoint; or it cannot start.
    Refusing,
}

impl StateMachine {
    pub(super) fn state(self) -> NodeState {
        match self.reach {
            Reachability::Unloaded => NodeState::Unloaded,
            Reachability::Starting => NodeState::Starting,
            Reachability::Answering if self.breaker_is_open => NodeState::Suspect,
            Reachability::Answering => NodeState::Ready,
            Reachability::Stopping => NodeState::Draining,
            Reachability::Silent => NodeState::Suspect,
            Reachability::Gone => match self.wake {
                WakePhase::NotWakeable => NodeState::Down,
                WakePhase::Wakeable => NodeState::Asleep,
                WakePhase::Waking => NodeState::Waking,
            },
            Reachability::Refusing => NodeState::Down,
        }
    }

    /// Returns true if it did not answer its last probe and is not known to be gone.
    pub(super) fn is_silent(self) -> bool {
        self.reach == Reachability::Silent
    }

    /// The machine after an event.
    #[must_use]
    pub(super) fn after(self, event: NodeObservation) -> StateMachine {
        let reach = match (self.reach, event) {
            (_, NodeObservation::Loading) => Reachability::Starting,
            (_, NodeObservation::Unloaded) => Reachability::Unloaded,
            (_, NodeObservation::Answered) | (Reachability::Silent, NodeObservation::Alive) => Reachability::Answering,
            // Late events of a process that has ended change nothing.
            (Reachability::Unloaded, _) => Reachability::Unloaded,
            (_, NodeObservation::Draining) => Reachability::Stopping,
            (_, NodeObservation::Failed) => Reachability::Refusing,
            (Reachability::Answering, NodeObservation::MissedAnswer | NodeObservation::FellSilent) => {
                Reachability::Silent
            }
            (Reachability::Starting, NodeObservation::FellSilent) => Reachability::Starting,
            (_, NodeObservation::MissedAnswer | NodeObservation::FellSilent) => Reachability::Gone,
            (reach, _) => reach,
        };
        let breaker_is_open = match event {
            NodeObservation::BreakerOpened => true,
            NodeObservation::BreakerClosed => false,
            _ => self.breaker_is_open,
        };
        let wake = match (event, self.wake) {
            (NodeObservation::NotWakeable, _) | (_, WakePhase::NotWakeable) if event != NodeObservation::Wakeable => {
                WakePhase::NotWakeable
            }
            (NodeObservation::Woken, _) => WakePhase::Waking,
            (NodeObservation::NotWoken | NodeObservation::Answered, _) | (_, WakePhase::NotWakeable) => {
                WakePhase::Wakeable
            }
            (_, wake) => wake,
        };
        StateMachine { reach, breaker_is_open, wake }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The states that follow from `from` by each event, in the order of [`ALL_EVENTS`].
    fn check(path: &[NodeObservation], from: NodeState, expected: [NodeState; 9]) {
        let machine = path.iter().fold(StateMachine::default(), |machine, event| machine.after(*event));
        assert_eq!(machine.state(), from, "{path:?}");
        for (event, expected) in ALL_EVENTS.into_iter().zip(expected) {
            assert_eq!(machine.after(event).state(), expected, "{path:?}, then {event:?}");
        }
    }

    const ALL_EVENTS: [NodeObservation; 9] = [
        NodeObservation::Unloaded,
        NodeObservation::Loading,
        NodeObservation::Answered,
        NodeObservation::Draining,
        NodeObservation::MissedAnswer,
        NodeObservation::FellSilent,
        NodeObservation::Failed,
        NodeObservation::BreakerOpened,
        NodeObservation::BreakerClosed,
    ];

    #[test]
    fn every_state_and_everything_that_can_be_learned_in_it() {
        use NodeObservation::{
            Answered, BreakerOpened, Draining as Drained, Failed, Loading, MissedAnswer, Unloaded as EventUnloaded,
        };
        use NodeState::{Down, Draining, Ready, Starting, Suspect, Unloaded};
        let after = |rest: [NodeState; 8]| {
            let mut all = [Unloaded; 9];
            all[1..].copy_from_slice(&rest);
            all
        };
        check(&[], Starting, after([Starting, Ready, Draining, Down, Starting, Down, Starting, Starting]));
        check(&[Answered], Ready, after([Starting, Ready, Draining, Suspect, Suspect, Down, Suspect, Ready]));
        check(&[Answered, Drained], Draining, after([Starting, Ready, Draining, Down, Down, Down, Draining, Draining]));
        check(
            &[Answered, MissedAnswer],
            Suspect,
            after([Starting, Ready, Draining, Down, Down, Down, Suspect, Suspect]),
        );
        check(
            &[Answered, BreakerOpened],
            Suspect,
            after([Starting, Suspect, Draining, Suspect, Suspect, Down, Suspect, Ready]),
        );
        check(
            &[Answered, BreakerOpened, MissedAnswer],
            Suspect,
            after([Starting, Suspect, Draining, Down, Down, Down, Suspect, Suspect]),
        );
        check(
            &[Answered, MissedAnswer, MissedAnswer],
            Down,
            after([Starting, Ready, Draining, Down, Down, Down, Down, Down]),
        );
        check(&[Failed], Down, after([Starting, Ready, Draining, Down, Down, Down, Down, Down]));
        check(
            &[Answered, Loading],
            Starting,
            after([Starting, Ready, Draining, Down, Starting, Down, Starting, Starting]),
        );
        // A node that was lost during a request and is back is suspect until a request succeeds.
        let lost = [Answered, BreakerOpened, MissedAnswer, MissedAnswer];
        check(&lost, Down, after([Starting, Suspect, Draining, Down, Down, Down, Down, Down]));
        // Late events of a process that has ended change nothing.
        let nothing = [Starting, Ready, Unloaded, Unloaded, Unloaded, Unloaded, Unloaded, Unloaded];
        check(&[Answered, Drained, EventUnloaded], Unloaded, after(nothing));
    }

    #[test]
    fn a_lost_node_whose_machine_can_be_woken_is_asleep_until_it_answers() {
        use NodeObservation::{Answered, Failed, Loading, MissedAnswer, NotWakeable, NotWoken, Wakeable, Woken};
        let check = |path: &[NodeObservation], expected: NodeState| {
            let machine = path.iter().fold(StateMachine::default(), |machine, event| machine.after(*event));
            assert_eq!(machine.state(), expected, "{path:?}");
        };
        check(&[Wakeable], NodeState::Starting);
        check(&[Wakeable, MissedAnswer], NodeState::Asleep);
        check(&[MissedAnswer, Wakeable], NodeState::Asleep);
        check(&[Wakeable, Answered, MissedAnswer], NodeState::Suspect);
        check(&[Wakeable, Answered, MissedAnswer, MissedAnswer], NodeState::Asleep);
        check(&[Wakeable, MissedAnswer, NotWakeable], NodeState::Down);
        check(&[Wakeable, MissedAnswer, Woken, MissedAnswer, Wakeable], NodeState::Waking);
        check(&[Wakeable, MissedAnswer, Woken, NotWoken], NodeState::Asleep);
        check(&[Wakeable, MissedAnswer, Woken, Loading], NodeState::Starting);
        check(&[Wakeable, MissedAnswer, Woken, Loading, Answered], NodeState::Ready);
        check(&[Wakeable, MissedAnswer, Woken, Answered, MissedAnswer, MissedAnswer], NodeState::Asleep);
        // Waking helps nobody if it answers with another key.
        check(&[Wakeable, Failed], NodeState::Down);
        check(&[Wakeable, Failed, MissedAnswer], NodeState::Asleep);
        check(&[MissedAnswer, Woken], NodeState::Down);
    }

    #[test]
    fn a_sign_of_life_changes_only_a_silent_node() {
        use NodeObservation::{Alive, Answered, Draining, Failed, Loading, MissedAnswer, Unloaded};
        let alive = |path: &[NodeObservation]| {
            let machine = path.iter().fold(StateMachine::default(), |machine, event| machine.after(*event));
            (machine.state(), machine.after(Alive).state())
        };
        assert_eq!(alive(&[Answered, MissedAnswer]), (NodeState::Suspect, NodeState::Ready));
        for path in [
            &[][..],
            &[Answered],
            &[Answered, Draining],
            &[Answered, MissedAnswer, MissedAnswer],
            &[Failed],
            &[Loading],
            &[Unloaded],
        ] {
            let (before, after) = alive(path);
            assert_eq!(before, after, "{path:?}");
        }
    }
}
