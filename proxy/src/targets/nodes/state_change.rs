//! Why a node's state changes, in one word and in sentences.

use baton_planner::reason::{BarReason, FailureReason};
use baton_schemas::EngineError;

/// The reason for a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum StateReason {
    /// It has not answered or failed yet.
    New,
    /// Its process is being started.
    Starts,
    /// It reports that its model is loading.
    Loading,
    /// Its process has ended and is started again.
    Ended,
    /// Its process could not be started, or keeps ending.
    StartFailed,
    /// Its model is no longer wanted, and its process is ending.
    Unloads,
    /// Its model is no longer wanted, and its process has ended.
    Unloaded,
    /// It answers.
    Answers,
    /// It reports that it is stopping.
    #[strum(serialize = "told_to_stop")]
    Stopping,
    /// Its load stream has ended after it was stopping.
    Stopped,
    /// It serves again after it was stopping, so it is another process.
    Restarted,
    /// Its load stream has ended.
    StreamEnded,
    /// Its load stream broke.
    StreamLost,
    /// It did not answer in time.
    Silent,
    /// It cannot be reached.
    Unreachable,
    /// It refused the cluster key.
    KeyRefused,
    /// The server at its address does not speak the node protocol.
    NoNode,
    /// It and this endpoint speak no common version of the stream protocol.
    VersionMismatch,
    /// Its breaker opened.
    #[strum(transparent)]
    Failure(FailureReason),
    /// Its breakers have closed.
    BreakerClosed,
    /// Its machine can be woken from now on.
    Wakeable,
    /// Its machine can no longer be woken.
    NotWakeable,
    /// Its machine is being woken.
    Woken,
}

impl StateReason {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Why a node that answers does not work for this endpoint.
    pub fn refusal(self) -> Option<NodeRefusal> {
        match self {
            StateReason::KeyRefused => Some(NodeRefusal::OtherKey),
            StateReason::VersionMismatch => Some(NodeRefusal::OtherVersion),
            _ => None,
        }
    }
}

/// Why a node that answers does not work for this endpoint, whatever its model. Somebody has to do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRefusal {
    /// It has another cluster key.
    OtherKey,
    /// It and this endpoint speak no common version of the stream protocol.
    OtherVersion,
}

impl From<NodeRefusal> for BarReason {
    fn from(refusal: NodeRefusal) -> BarReason {
        match refusal {
            NodeRefusal::OtherKey => BarReason::KEY_REFUSED,
            NodeRefusal::OtherVersion => BarReason::VersionMismatch,
        }
    }
}

/// The reason for a change of a node's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateChange {
    /// The reason.
    pub reason: StateReason,
    /// A sentence that clients may see, without addresses.
    pub words: String,
    /// The cause, for the operator's log.
    pub cause: String,
}

impl StateChange {
    /// A change with the same words for clients and operators.
    pub fn new(reason: StateReason, words: &str) -> StateChange {
        StateChange { reason, words: words.to_owned(), cause: words.to_owned() }
    }
}

impl From<&EngineError> for StateChange {
    fn from(error: &EngineError) -> StateChange {
        let (reason, words) = match error {
            EngineError::VersionMismatch(mismatch) => {
                return StateChange::new(StateReason::VersionMismatch, &mismatch.to_string());
            }
            EngineError::Unauthorized => (StateReason::KeyRefused, "the node has another cluster key"),
            EngineError::Unavailable { .. } => (StateReason::Silent, "the node cannot be reached"),
            EngineError::Lost { .. } => (StateReason::Unreachable, "the node cannot be reached"),
            EngineError::NoResources { .. } => (StateReason::Unreachable, "this server cannot open another connection"),
            _ => (StateReason::NoNode, "the node does not answer as it should"),
        };
        // Only the detail, because the log line already names the node.
        let cause = match error {
            EngineError::Lost { detail } | EngineError::Internal { detail } => detail.clone(),
            other => other.to_string(),
        };
        StateChange { reason, words: words.to_owned(), cause }
    }
}
