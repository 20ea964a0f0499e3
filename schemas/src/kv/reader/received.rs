//! The records that a reader yields.

use crate::error::EngineError;
use crate::kv::messages::{HandoffEnd, HandoffHead, Wait};
use crate::kv::state::VerifiedState;
use crate::kv::verified::VerifiedKv;

/// A verified record of a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum HandoffRecord {
    /// The stream answers the request. Always the first record.
    Head(HandoffHead),
    /// The node is alive.
    Wait(Wait),
    /// The KV of the next positions.
    Frame(VerifiedKv),
    /// All states of a position.
    State(VerifiedState),
    /// All positions have arrived. Nothing follows.
    End(HandoffEnd),
    /// The prefill failed. Nothing follows. The frames before it are valid.
    Error(EngineError),
}
