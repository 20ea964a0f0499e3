//! What a part of a reply holds.

use baton_schemas::tools::ToolCallDelta;

/// The content of one part of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartContent {
    /// Text for the user.
    Text(String),
    Reasoning(String),
    Call(ToolCallDelta),
}
