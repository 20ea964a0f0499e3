//! Why a node did not start.

use baton_engines::registry::EngineStartError;
use baton_proxy::serve::CommandFailure;

/// Why a node did not start.
pub(crate) enum NodeFailure {
    /// It will not start with these options, files and devices.
    Mistake {
        /// For the operator.
        message: String,
        /// For clients: no paths.
        summary: String,
    },
    /// Another machine is the cause. The next start may succeed.
    #[cfg_attr(not(feature = "llama"), allow(dead_code, reason = "only llama.cpp has workers"))]
    Elsewhere {
        /// For the operator.
        message: String,
        /// For clients: no addresses.
        summary: &'static str,
    },
}

impl NodeFailure {
    pub(crate) fn setup(message: impl ToString) -> Self {
        NodeFailure::Mistake { message: message.to_string(), summary: "the engine is not set up correctly".into() }
    }
}

impl From<NodeFailure> for CommandFailure {
    fn from(failure: NodeFailure) -> Self {
        match failure {
            NodeFailure::Mistake { message, .. } | NodeFailure::Elsewhere { message, .. } => CommandFailure(message),
        }
    }
}

impl From<EngineStartError> for NodeFailure {
    fn from(error: EngineStartError) -> Self {
        NodeFailure::Mistake { message: error.to_string(), summary: error.summary().into() }
    }
}
