//! What a reader yields.

use crate::error::EngineError;
use crate::kv::messages::{HandoffEnd, HandoffHead, Wait};
use crate::kv::verified::VerifiedKv;

/// A verified record of a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum HandoffRecord {
    /// The stream is the one that was asked for. Always first.
    Head(HandoffHead),
    /// The node is alive.
    Wait(Wait),
    /// The KV of the next positions.
    Frame(VerifiedKv),
    /// All positions have come. Nothing follows.
    End(HandoffEnd),
    /// The prefill failed. Nothing follows; the frames before it are good.
    Error(EngineError),
}
