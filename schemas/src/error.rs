//! Errors of engines. They travel between processes unchanged.
//!
//! They do not depend on HTTP. The proxy maps each variant to a status and an envelope in one exhaustive match.

use serde::{Deserialize, Serialize};

use crate::counted::counted;
use crate::image::{LinkedImage, NOT_FETCHED};
use crate::stream_versions::VersionMismatch;

/// A failure of an engine, or of the connection to it.
///
/// The messages of variants marked *client-safe* contain no paths or addresses and may be shown to clients.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EngineError {
    /// The prompt leaves no room for one new token. Client-safe.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but the request has {n_prompt} tokens: \
         it exceeds the available context size. Shorten the prompt, or serve the model with a larger context \
         (--ctx-size, or ctx_size in the configuration)."
    )]
    ContextOverflow {
        /// Tokens in the rendered prompt; an estimate if it is far too long.
        n_prompt: u32,
        /// Tokens that one sequence can hold.
        n_ctx: u32,
    },
    /// The prompt is too long for a server that does not report the numbers. Client-safe.
    #[error("The request exceeds the available context size: {message}")]
    ContextExceeded {
        /// The server's message.
        message: String,
    },
    /// The engine's bounded queue is full. A later retry may succeed. Client-safe.
    #[error("The engine is full: {} waiting. Try again shortly.", counted(*limit, "request"))]
    QueueFull {
        /// The length of the queue.
        limit: u32,
    },
    /// The engine's threads for this work did not come to it in time. A later retry may succeed. Client-safe.
    #[error(
        "The engine did not come to this request within {waited_s} s, since it works on others. Try again shortly."
    )]
    NoTurn {
        /// How long the work waited, seconds.
        waited_s: u32,
    },
    /// The request is wrong. A retry would fail, too. Client-safe.
    #[error("{message}")]
    InvalidRequest {
        /// The problem.
        message: String,
        /// The path of the wrong field in the client's dialect, if the problem is one field.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        field: Option<String>,
    },
    /// The model's chat template refused the messages or failed on them. Client-safe.
    #[error("the model's chat template rejected the messages: {message}")]
    Template {
        /// The message of the template or of the template engine.
        message: String,
    },
    /// The engine does not support a feature, e.g. embeddings. Client-safe.
    #[error("not supported here: {feature}")]
    Unsupported {
        /// The requested feature.
        feature: String,
    },
    /// No engine answers right now: it is loading, restarting or unreachable. Client-safe.
    #[error("{reason}")]
    Unavailable {
        /// The reason, without paths or addresses.
        reason: String,
    },
    /// The node refused our cluster key.
    #[error("the node refused the cluster key")]
    Unauthorized,
    /// The node and the endpoint speak no common version of the stream protocol. Client-safe.
    #[error("{0}")]
    VersionMismatch(VersionMismatch),
    /// The caller has no descriptor, port or memory for a connection, which says nothing about the node. Only a caller says this.
    /// Client-safe.
    #[error("This server cannot open another connection now. Try again shortly.")]
    NoResources {
        /// For the log only: may contain an address.
        detail: String,
    },
    /// The connection to the node broke, or its stream ended without a last event.
    #[error("the connection to the engine was lost: {detail}")]
    Lost {
        /// For the log only: may contain an address.
        detail: String,
    },
    /// Engine processes ended while they worked on this request, so it is not given to another one. Only an endpoint says
    /// this. Client-safe.
    #[error("{n_processes} engine processes ended while they worked on this request, so it is not tried again")]
    Poison {
        /// The number of processes.
        n_processes: u32,
    },
    /// The model computed logits or a vector that contain NaN or infinity: its weights or its arithmetic are at fault.
    /// A retry would fail, too, wherever these weights run. Client-safe.
    #[error("the model computed values that are not numbers for this request (NaN or infinity)")]
    NotFinite,
    /// A measurement ended because the engine got a request. Only calibration sends such sequences.
    #[error("the measurement gave way to a request")]
    GaveWay,
    /// The engine itself failed, e.g. llama.cpp refused a batch.
    #[error("the engine failed: {detail}")]
    Internal {
        /// For the log only.
        detail: String,
    },
}

impl EngineError {
    /// Creates an [`EngineError::InvalidRequest`] without a field.
    pub fn invalid(message: impl Into<String>) -> Self {
        EngineError::InvalidRequest { message: message.into(), field: None }
    }

    /// Creates an [`EngineError::InvalidRequest`] for a field.
    pub fn invalid_field(field: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let field = field.into();
        EngineError::InvalidRequest { message: format!("Invalid '{field}': {problem}."), field: Some(field) }
    }

    /// Creates an [`EngineError::InvalidRequest`] for a linked image where it cannot be passed on.
    pub fn not_fetched(link: &LinkedImage) -> Self {
        EngineError::invalid_field(link.field(), NOT_FETCHED)
    }

    /// Returns true if the connection to the engine was lost, so that another engine may answer.
    pub fn is_lost_engine(&self) -> bool {
        matches!(self, EngineError::Lost { .. })
    }

    /// Returns true if the engine has more work than it takes now, so that it, or another engine, may take this later.
    pub fn is_busy(&self) -> bool {
        matches!(self, EngineError::QueueFull { .. } | EngineError::NoTurn { .. })
    }

    /// The same error with at most `max_bytes` of each text, and `…` where one was cut.
    #[must_use]
    pub fn shortened(mut self, max_bytes: usize) -> Self {
        let texts = match &mut self {
            EngineError::InvalidRequest { message, field } => [Some(message), field.as_mut()],
            EngineError::ContextExceeded { message: text }
            | EngineError::Template { message: text }
            | EngineError::Unsupported { feature: text }
            | EngineError::Unavailable { reason: text }
            | EngineError::NoResources { detail: text }
            | EngineError::Lost { detail: text }
            | EngineError::Internal { detail: text } => [Some(text), None],
            EngineError::ContextOverflow { .. }
            | EngineError::QueueFull { .. }
            | EngineError::NoTurn { .. }
            | EngineError::Unauthorized
            | EngineError::VersionMismatch(_)
            | EngineError::Poison { .. }
            | EngineError::NotFinite
            | EngineError::GaveWay => [None, None],
        };
        for text in texts.into_iter().flatten().filter(|text| text.len() > max_bytes) {
            let end = (0..=max_bytes).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or(0));
            text.push('…');
        }
        self
    }

    /// Creates an [`EngineError::Internal`].
    pub fn internal(detail: impl ToString) -> Self {
        EngineError::Internal { detail: detail.to_string() }
    }

    /// Creates an [`EngineError::Lost`].
    pub fn lost(detail: impl ToString) -> Self {
        EngineError::Lost { detail: detail.to_string() }
    }
}
