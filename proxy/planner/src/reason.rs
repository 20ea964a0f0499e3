//! The reasons for leaving a node out of a plan and for choosing a route. Decisions are made on these enums; each has one
//! `as_str` that gives its word for metrics, logs, headers and JSON.

use std::fmt;

use baton_schemas::handoff::HandoffFailure;
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::no_handoff::NoHandoffReason;

/// How a node failed a request or a handoff. Breakers count these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FailureReason {
    /// The decode node was lost while it generated, or before it accepted the request.
    DecodeLost,
    /// The engine answered with an internal error.
    EngineFailed,
    /// Its machine was woken, and it did not answer in time.
    NotWoken,
    /// The KV did not come, or only a part of it.
    #[strum(transparent)]
    Handoff(HandoffFailure),
}

impl FailureReason {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Why a node, or a pair of nodes, cannot serve a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum BarReason {
    /// Its model is not in memory.
    Unloaded,
    /// It has not answered yet, or its model is loading.
    Starting,
    /// It is stopping and takes no new requests.
    Draining,
    /// It cannot be reached or used.
    Down,
    /// Its machine sleeps, and is not woken for this request.
    Asleep,
    /// It and the endpoint speak no common version of the stream protocol.
    VersionMismatch,
    /// It did not answer its last probe.
    Suspect,
    /// It runs with a role that excludes this task.
    WrongRole,
    /// It would compute prompts, but no node generates with its model.
    NoDecodeNode,
    /// It runs another model, or the same one in another way.
    #[strum(transparent)]
    Differs(ModelDifference),
    /// The prompt has images, and one of the two nodes hands none over: its engine, or its version, does not.
    Images,
    /// It lacks the projector that the prompt's images need.
    NoProjector,
    /// The prompt does not fit, or another node has room for a longer reply.
    ContextTooSmall,
    /// It has just failed or refused this request.
    JustFailed,
    /// An upstream that has said that it is busy.
    Busy,
    /// Its model cannot call tools.
    NoTools,
    /// Its model cannot think.
    NoThinking,
    /// The model's KV is not handed over, for this reason.
    #[strum(transparent)]
    NoHandoff(NoHandoffReason),
    /// Prefill node and decode node are the same: its KV is there already.
    SameNode,
    /// Its breaker is open after such a failure, or the failure is certain in advance.
    #[strum(transparent)]
    Failure(FailureReason),
}

impl BarReason {
    /// The prefill node cannot be reached. Has the same word as a handoff that fails for this reason.
    pub const PREFILL_DOWN: BarReason = BarReason::Failure(FailureReason::Handoff(HandoffFailure::PrefillDown));

    /// It refuses the cluster key. Has the same word as a handoff that fails for this reason.
    pub const KEY_REFUSED: BarReason = BarReason::Failure(FailureReason::Handoff(HandoffFailure::KeyRefused));

    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl From<FailureReason> for BarReason {
    fn from(reason: FailureReason) -> BarReason {
        BarReason::Failure(reason)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RouteKind {
    /// One node computes the prompt and generates.
    Direct,
    /// One node computes the prompt, another generates.
    Handoff,
    /// An upstream generates.
    Upstream,
}

impl RouteKind {
    /// The word for metrics, logs, headers and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Why a route was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RouteReason {
    /// A handoff is predicted to complete earlier than direct generation.
    Faster,
    /// A handoff is possible, and direct generation is predicted to complete as early or earlier.
    NotWorthIt,
    /// There is one route.
    OnlyRoute,
    /// No route can be predicted yet.
    RatesUnknown,
    /// This direct route, or this upstream, is predicted to complete first.
    LeastTime,
    /// The policy chooses it without comparing predictions.
    Policy,
    /// The decode node already has the whole prompt in its cache, so that a planned handoff was dropped.
    Cached,
    /// A handoff is barred for this reason.
    #[strum(transparent)]
    Barred(BarReason),
    /// An upstream serves the request, because no engine could take it.
    NoEngine,
    /// One upstream serves the model.
    OnlyUpstream,
    /// This upstream has the least load for its capacity.
    LeastRunning,
    /// The upstreams that were tried first did not answer.
    NextUpstream,
    /// This upstream has the beginning of the prompt in its cache, and is predicted to complete first for that.
    PrefixHeld,
    /// This upstream was slower than another one long ago, and is measured again.
    Remeasured,
}

impl RouteReason {
    /// The word for metrics, logs, headers and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl fmt::Display for RouteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
