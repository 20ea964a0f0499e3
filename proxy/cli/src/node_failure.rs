//! Why a node could not start.

pub(super) struct NodeFailure {
    /// For the operator.
    pub(super) message: String,
    /// For clients: no paths.
    pub(super) summary: String,
}

impl NodeFailure {
    pub(super) fn setup(message: impl ToString) -> Self {
        NodeFailure { message: message.to_string(), summary: "the engine is not set up correctly".into() }
    }
}
