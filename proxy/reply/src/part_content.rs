//! What a part of a reply holds.

use baton_schemas::tools::ToolCallDelta;
use smallvec::SmallVec;

/// Parts in order. A token releases one part as a rule, which needs no allocation.
pub(crate) type PartContents = SmallVec<[PartContent; 1]>;

/// The content of one part of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartContent {
    /// Text for the user.
    Text(String),
    Reasoning(String),
    /// The words with which the model refuses to answer. Only upstreams report them.
    Refusal(String),
    Call(ToolCallDelta),
}
