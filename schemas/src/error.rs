//! What can go wrong in an engine, in words that cross process borders unchanged.
//!
//! Inner layers know no HTTP. The proxy maps each variant to a status and a dialect's envelope in one exhaustive match.

use serde::{Deserialize, Serialize};

/// A failure of an engine or of the way to it.
///
/// Messages in variants marked *client-safe* may be shown to a client as they are; they carry no paths or addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EngineError {
    /// The prompt leaves no room for one new token. Client-safe.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but the request has {n_prompt} tokens: \
         it exceeds the available context size. Shorten the messages."
    )]
    ContextOverflow {
        /// Tokens in the rendered prompt.
        n_prompt: u32,
        /// Tokens one sequence may hold.
        n_ctx: u32,
    },
    /// The same, from a server that does not report the numbers. Client-safe.
    #[error("The request exceeds the available context size: {message}")]
    ContextExceeded {
        /// The server's own words.
        message: String,
    },
    /// The engine's bounded queue is full; trying again later can work. Client-safe.
    #[error("the engine's queue is full ({limit} requests are waiting)")]
    QueueFull {
        /// The bound that was reached.
        limit: u32,
    },
    /// The request is wrong and will be wrong again. Client-safe.
    #[error("{message}")]
    InvalidRequest {
        /// What is wrong with it.
        message: String,
        /// The field at fault, as the client's dialect calls it, if it is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        field: Option<String>,
    },
    /// The model's chat template refused the messages or failed on them. Client-safe.
    #[error("the model's chat template rejected the messages: {message}")]
    Template {
        /// The template's own words, or the template engine's.
        message: String,
    },
    /// The engine does not do this at all (embeddings on a chat model, say). Client-safe.
    #[error("not supported here: {feature}")]
    Unsupported {
        /// The feature asked for.
        feature: String,
    },
    /// No engine answers at the moment: loading, restarting, unreachable. Client-safe.
    #[error("{reason}")]
    Unavailable {
        /// Why, without paths or addresses.
        reason: String,
    },
    /// The node refused our cluster key.
    #[error("the node refused the cluster key")]
    Unauthorized,
    /// The connection to the node broke, or its stream ended without a last delta.
    #[error("the connection to the engine was lost: {detail}")]
    Lost {
        /// For the log: may name an address.
        detail: String,
    },
    /// The engine itself failed, e.g. llama.cpp refused a batch.
    #[error("the engine failed: {detail}")]
    Internal {
        /// For the log.
        detail: String,
    },
}

impl EngineError {
    /// Shorthand for [`EngineError::InvalidRequest`].
    pub fn invalid(message: impl Into<String>) -> Self {
        EngineError::InvalidRequest { message: message.into(), field: None }
    }

    /// A field whose value is wrong.
    pub fn invalid_field(field: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let field = field.into();
        EngineError::InvalidRequest { message: format!("Invalid '{field}': {problem}."), field: Some(field) }
    }

    /// Returns true if the engine's process is gone or stopping, so that its replacement may answer.
    pub fn is_lost_engine(&self) -> bool {
        matches!(self, EngineError::Lost { .. })
    }

    /// Shorthand for [`EngineError::Internal`].
    pub fn internal(detail: impl ToString) -> Self {
        EngineError::Internal { detail: detail.to_string() }
    }

    /// Shorthand for [`EngineError::Lost`].
    pub fn lost(detail: impl ToString) -> Self {
        EngineError::Lost { detail: detail.to_string() }
    }
}
