//! Why a request is refused or fails, before any dialect turns it into a status and JSON.

use std::time::Duration;

use baton_schemas::EngineError;

/// A request that cannot be answered, or can no longer be.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RequestError {
    /// No engine serves a model of this name.
    #[error("The model '{model}' does not exist. See /v1/models for those that do.")]
    ModelNotFound {
        /// As the client wrote it.
        model: String,
    },
    /// A field that only the model, or the engine's setting, shows to be wrong.
    #[error("Invalid '{field}': {problem}.")]
    InvalidField {
        /// The field at fault, as all dialects call it.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Nothing that serves the model sees images.
    #[error("Invalid '{field}': images are not supported here: {why}.")]
    Blind {
        /// The image's place in the request.
        field: String,
        /// Why not.
        why: &'static str,
    },
    /// The model cannot do what the request insists on. The words are Ollama's, whose clients look for them.
    #[error("\"{}\" does not support {capability}", model.escape_debug())]
    Incapable {
        /// As the client wrote it.
        model: String,
        /// In a word.
        capability: &'static str,
    },
    /// A text to embed is longer than the model takes.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but input {idx} has {n_tokens} tokens: it exceeds the \
         available context size."
    )]
    InputTooLong {
        /// Which, from 0.
        idx: usize,
        /// Its tokens, at least.
        n_tokens: u32,
        /// Tokens that the model takes.
        n_ctx: u32,
    },
    /// Too many requests are admitted already.
    #[error("The server is at its limit of {limit} requests. Try again shortly.")]
    Overloaded {
        /// The bound that was reached.
        limit: usize,
        /// When to come back.
        retry_after: Duration,
    },
    /// The key may not name this model.
    #[error("This API key may not use the model '{model}'.")]
    ModelNotAllowed {
        /// As the client wrote it.
        model: String,
    },
    /// A rate of the key is exhausted.
    #[error("This API key has used its {limit} {unit} per minute. Try again later.")]
    RateLimited {
        /// `requests` or `tokens`.
        unit: &'static str,
        /// A minute.
        limit: u32,
        /// When there is something again.
        retry_after: Duration,
    },
    /// The key has as many requests running as it may.
    #[error("This API key may have {limit} requests running at once. Try again when one has ended.")]
    TooManyAtOnce {
        /// The bound that was reached.
        limit: usize,
        /// When to come back.
        retry_after: Duration,
    },
    /// No engine answers now. The reason is safe to show.
    #[error("The model is not available right now: {reason}")]
    Unavailable {
        /// Why, without paths or addresses.
        reason: String,
        /// When to come back.
        retry_after: Duration,
    },
    /// The engine refused the request or failed on it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl RequestError {
    /// Returns true if the request itself is wrong, whatever answers it.
    pub fn is_the_clients(&self) -> bool {
        match self {
            RequestError::ModelNotFound { .. }
            | RequestError::InvalidField { .. }
            | RequestError::Blind { .. }
            | RequestError::ModelNotAllowed { .. }
            | RequestError::Incapable { .. }
            | RequestError::InputTooLong { .. } => true,
            RequestError::Engine(error) => matches!(
                error,
                EngineError::ContextOverflow { .. }
                    | EngineError::ContextExceeded { .. }
                    | EngineError::InvalidRequest { .. }
                    | EngineError::Template { .. }
                    | EngineError::Unsupported { .. }
            ),
            RequestError::RateLimited { .. }
            | RequestError::TooManyAtOnce { .. }
            | RequestError::Overloaded { .. }
            | RequestError::Unavailable { .. } => false,
        }
    }

    /// Its kind, for counting.
    pub fn kind(&self) -> RequestErrorKind {
        match self {
            RequestError::ModelNotFound { .. } => RequestErrorKind::ModelNotFound,
            RequestError::InvalidField { .. } | RequestError::Blind { .. } | RequestError::Incapable { .. } => {
                RequestErrorKind::InvalidRequest
            }
            RequestError::ModelNotAllowed { .. } => RequestErrorKind::ModelNotAllowed,
            RequestError::RateLimited { .. } => RequestErrorKind::RateLimited,
            RequestError::TooManyAtOnce { .. } => RequestErrorKind::TooManyAtOnce,
            RequestError::InputTooLong { .. } => RequestErrorKind::ContextOverflow,
            RequestError::Overloaded { .. } => RequestErrorKind::Overloaded,
            RequestError::Unavailable { .. } => RequestErrorKind::Unavailable,
            RequestError::Engine(error) => match error {
                EngineError::ContextOverflow { .. } | EngineError::ContextExceeded { .. } => {
                    RequestErrorKind::ContextOverflow
                }
                EngineError::QueueFull { .. } => RequestErrorKind::QueueFull,
                EngineError::InvalidRequest { .. } | EngineError::Template { .. } => RequestErrorKind::InvalidRequest,
                EngineError::Unsupported { .. } => RequestErrorKind::Unsupported,
                EngineError::Unavailable { .. } => RequestErrorKind::Unavailable,
                EngineError::Unauthorized => RequestErrorKind::Unauthorized,
                EngineError::Lost { .. } => RequestErrorKind::EngineLost,
                EngineError::Internal { .. } => RequestErrorKind::Internal,
            },
        }
    }
}

/// The kind of a [`RequestError`], for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestErrorKind {
    /// No such model is served.
    ModelNotFound,
    /// The request is wrong.
    InvalidRequest,
    /// The key may not use the model.
    ModelNotAllowed,
    /// The key's rate is exhausted.
    RateLimited,
    /// The key has too many requests running.
    TooManyAtOnce,
    /// The prompt exceeds the model's context.
    ContextOverflow,
    /// The endpoint is at its limit of requests.
    Overloaded,
    /// No engine or upstream answers now.
    Unavailable,
    /// The engine's queue is full.
    QueueFull,
    /// The engine lacks a feature that the request needs.
    Unsupported,
    /// The node refused the cluster key.
    Unauthorized,
    /// The engine was lost.
    EngineLost,
    /// The engine failed.
    Internal,
}

impl RequestErrorKind {
    /// The word for metrics, logs and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            RequestErrorKind::ModelNotFound => "model_not_found",
            RequestErrorKind::InvalidRequest => "invalid_request",
            RequestErrorKind::ModelNotAllowed => "model_not_allowed",
            RequestErrorKind::RateLimited => "rate_limited",
            RequestErrorKind::TooManyAtOnce => "too_many_at_once",
            RequestErrorKind::ContextOverflow => "context_overflow",
            RequestErrorKind::Overloaded => "overloaded",
            RequestErrorKind::Unavailable => "unavailable",
            RequestErrorKind::QueueFull => "queue_full",
            RequestErrorKind::Unsupported => "unsupported",
            RequestErrorKind::Unauthorized => "unauthorized",
            RequestErrorKind::EngineLost => "engine_lost",
            RequestErrorKind::Internal => "internal",
        }
    }
}
