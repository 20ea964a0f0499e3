//! Errors of requests, before a dialect turns them into a status and JSON.

use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::counted::counted;
use baton_upstream::UpstreamFailure;

use crate::utc_day::UtcDay;

/// The reason why a request is refused or fails.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RequestError {
    /// No engine serves a model of this name.
    #[error("The model '{model}' does not exist. See /v1/models for those that do.")]
    ModelNotFound {
        /// The name as the client wrote it.
        model: String,
    },
    /// A field is wrong for this model or for the engine's settings, though its syntax is valid.
    #[error("Invalid '{field}': {problem}.")]
    InvalidField {
        /// The invalid field, by the name that all dialects use.
        field: &'static str,
        /// The problem, as the end of the sentence `Invalid 'field': …`.
        problem: String,
    },
    /// The upstream that serves the model does not take a field.
    #[error("Invalid '{field}': the upstream that serves this model does not take it.")]
    FieldUnsupported {
        /// The field, by its name in OpenAI's dialect.
        field: &'static str,
    },
    /// No engine that serves the model supports images.
    #[error("Invalid '{field}': images are not supported here: {why}.")]
    ImagesUnsupported {
        /// The position of the image in the request.
        field: String,
        /// Why images are not supported.
        why: &'static str,
    },
    /// Only an operator's key may do this.
    #[error("Only an operator's API key may {what}.")]
    OperatorOnly {
        /// The refused action, as it follows "may".
        what: &'static str,
    },
    /// The model lacks a capability that the request requires. The message is Ollama's; its clients match on it.
    #[error("\"{}\" does not support {capability}", model.escape_debug())]
    Incapable {
        /// The name as the client wrote it.
        model: String,
        /// The capability, in one word.
        capability: &'static str,
    },
    /// A prompt exceeds the context that the client chose.
    #[error(
        "This request's maximum context length is {num_ctx} tokens ('num_ctx'), but it has {n_prompt} tokens: it exceeds \
         the available context size. Shorten the prompt, or raise num_ctx; this model's context has {n_ctx} tokens."
    )]
    ChosenContextExceeded {
        /// Tokens in the rendered prompt.
        n_prompt: u32,
        /// The client's limit.
        num_ctx: u32,
        /// Tokens that one sequence can hold.
        n_ctx: u32,
    },
    /// A text to embed exceeds the model's context.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but input {idx} has {n_tokens} tokens: it exceeds the \
         available context size."
    )]
    InputTooLong {
        /// The field of the texts.
        field: &'static str,
        /// The index of the text.
        idx: usize,
        /// Tokens of the text; an estimate if it is far too long.
        n_tokens: u32,
        /// Tokens that the model accepts.
        n_ctx: u32,
    },
    /// A document and its query exceed the model's context.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but 'documents[{idx}]' and the query have {n_tokens} \
         tokens: they exceed the available context size."
    )]
    DocumentTooLong {
        /// The index of the document.
        idx: usize,
        /// Tokens of both; an estimate if they are far too long.
        n_tokens: u32,
        /// Tokens that the model accepts.
        n_ctx: u32,
    },
    /// A text, not a conversation, exceeds the model's context.
    #[error(
        "This model's maximum context length is {n_ctx} tokens, but '{field}' has {n_tokens} tokens: it exceeds the \
         available context size. Shorten it, or serve the model with a larger context (--ctx-size, or ctx_size in the \
         configuration)."
    )]
    TextTooLong {
        /// The field of the request.
        field: &'static str,
        /// Tokens of the text; an estimate if it is far too long.
        n_tokens: u32,
        /// Tokens that the model accepts.
        n_ctx: u32,
    },
    /// All places are taken, and no more requests may wait.
    #[error("The server is full: {n_running} running and {n_waiting} waiting. Try again shortly.")]
    Overloaded {
        /// Replies that are generated, each of which has a place.
        n_running: usize,
        /// Requests that wait for a place.
        n_waiting: usize,
        /// How long the client should wait before it retries.
        retry_after: Duration,
    },
    /// The key may not use this model.
    #[error("This API key may not use the model '{model}'.")]
    ModelNotAllowed {
        /// The name as the client wrote it.
        model: String,
    },
    /// A rate of the key is exhausted.
    #[error("This API key has used its {} per minute. Try again later.", counted(*limit, unit.singular()))]
    RateLimited {
        /// The unit of the rate.
        unit: RateUnit,
        /// Units per minute.
        limit: u32,
        /// Time until the rate allows another request.
        retry_after: Duration,
    },
    /// A budget of the key has not enough tokens left.
    #[error(
        "This API key has {n_left} of its {} a {} left, and this request may need {n_tokens}. The budget is whole \
         again on {resets} at 00:00 UTC; a request with a smaller 'max_tokens' may fit before.",
        counted(*budget, "token"), period.as_str()
    )]
    BudgetSpent {
        /// The period of the budget.
        period: BudgetPeriod,
        /// Tokens in the period.
        budget: u64,
        /// Tokens that are neither used nor reserved.
        n_left: u64,
        /// Tokens that the request may need.
        n_tokens: u64,
        /// The day on which the budget is whole again.
        resets: UtcDay,
        /// Until then.
        retry_after: Duration,
    },
    /// The key has reached its limit of running requests.
    #[error("This API key may have {} running at once. Try again when one has ended.", counted(*limit, "request"))]
    TooManyAtOnce {
        /// The limit that was reached.
        limit: usize,
        /// How long the client should wait before it retries.
        retry_after: Duration,
    },
    /// No engine is available now. The reason is safe to show to clients.
    #[error("The model is not available right now: {reason}")]
    Unavailable {
        /// The reason, without paths or addresses.
        reason: String,
        /// How long the client should wait before it retries.
        retry_after: Duration,
    },
    /// An upstream's reply broke off. No other upstream can continue it.
    #[error("The upstream that serves this model {}.", broken_off(*failure))]
    ReplyBrokeOff {
        /// What went wrong.
        failure: UpstreamFailure,
    },
    /// The engine refused the request or failed on it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// The unit of a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RateUnit {
    Requests,
    /// Tokens of prompts and replies.
    Tokens,
}

impl RateUnit {
    fn singular(self) -> &'static str {
        match self {
            RateUnit::Requests => "request",
            RateUnit::Tokens => "token",
        }
    }

    /// The word for messages and headers.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The period of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum BudgetPeriod {
    Day,
    Month,
}

impl BudgetPeriod {
    /// The word for messages.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The day on which the budget is whole again.
    pub(crate) fn next_after(self, today: UtcDay) -> UtcDay {
        match self {
            BudgetPeriod::Day => today.next(),
            BudgetPeriod::Month => today.first_of_next_month(),
        }
    }
}

/// The way in which an upstream failed a reply, as the end of a sentence.
fn broken_off(failure: UpstreamFailure) -> &'static str {
    match failure {
        UpstreamFailure::TimedOut => "sent nothing for too long while it replied",
        UpstreamFailure::Malformed => "sent something that cannot be read while it replied",
        UpstreamFailure::ServerError | UpstreamFailure::GatewayError => "reported an error while it replied",
        UpstreamFailure::Interrupted => "lost what computed its reply",
        UpstreamFailure::Unreachable
        | UpstreamFailure::NoResources
        | UpstreamFailure::CutShort
        | UpstreamFailure::Redirected
        | UpstreamFailure::Unauthorized
        | UpstreamFailure::ModelMissing => "broke off its reply",
    }
}

impl RequestError {
    /// [`RequestError::Unavailable`] with at least a second until the client comes back.
    pub fn unavailable(reason: &str, retry_after: Duration) -> RequestError {
        RequestError::Unavailable { reason: reason.to_owned(), retry_after: retry_after.max(Duration::from_secs(1)) }
    }

    /// Names the field whose text exceeds the context. Engines assume that it is the messages.
    pub fn about_text(self, field: &'static str) -> RequestError {
        match self {
            RequestError::Engine(EngineError::ContextOverflow { n_prompt, n_ctx }) => {
                RequestError::TextTooLong { field, n_tokens: n_prompt, n_ctx }
            }
            other => other,
        }
    }

    /// Names another field as the wrong one, for a route whose field has another name.
    pub fn in_field(self, field: &'static str) -> RequestError {
        match self {
            RequestError::InvalidField { problem, .. } => RequestError::InvalidField { field, problem },
            other => other,
        }
    }

    /// Returns true if the request itself is wrong, so that no other engine would accept it either.
    pub fn is_the_clients(&self) -> bool {
        match self {
            RequestError::ModelNotFound { .. }
            | RequestError::InvalidField { .. }
            | RequestError::FieldUnsupported { .. }
            | RequestError::ImagesUnsupported { .. }
            | RequestError::ModelNotAllowed { .. }
            | RequestError::OperatorOnly { .. }
            | RequestError::Incapable { .. }
            | RequestError::ChosenContextExceeded { .. }
            | RequestError::InputTooLong { .. }
            | RequestError::DocumentTooLong { .. }
            | RequestError::TextTooLong { .. } => true,
            RequestError::Engine(error) => matches!(
                error,
                EngineError::ContextOverflow { .. }
                    | EngineError::ContextExceeded { .. }
                    | EngineError::InvalidRequest { .. }
                    | EngineError::Template { .. }
                    | EngineError::Unsupported { .. }
            ),
            RequestError::RateLimited { .. }
            | RequestError::BudgetSpent { .. }
            | RequestError::TooManyAtOnce { .. }
            | RequestError::Overloaded { .. }
            | RequestError::ReplyBrokeOff { .. }
            | RequestError::Unavailable { .. } => false,
        }
    }

    /// The kind of the error, for metrics.
    pub fn kind(&self) -> RequestErrorKind {
        match self {
            RequestError::ModelNotFound { .. } => RequestErrorKind::ModelNotFound,
            RequestError::InvalidField { .. }
            | RequestError::FieldUnsupported { .. }
            | RequestError::ImagesUnsupported { .. }
            | RequestError::OperatorOnly { .. }
            | RequestError::Incapable { .. } => RequestErrorKind::InvalidRequest,
            RequestError::ModelNotAllowed { .. } => RequestErrorKind::ModelNotAllowed,
            RequestError::RateLimited { .. } => RequestErrorKind::RateLimited,
            RequestError::BudgetSpent { .. } => RequestErrorKind::BudgetSpent,
            RequestError::TooManyAtOnce { .. } => RequestErrorKind::TooManyAtOnce,
            RequestError::ChosenContextExceeded { .. }
            | RequestError::InputTooLong { .. }
            | RequestError::DocumentTooLong { .. }
            | RequestError::TextTooLong { .. } => RequestErrorKind::ContextOverflow,
            RequestError::Overloaded { .. } => RequestErrorKind::Overloaded,
            RequestError::Unavailable { .. } => RequestErrorKind::Unavailable,
            RequestError::ReplyBrokeOff { .. } => RequestErrorKind::EngineLost,
            RequestError::Engine(error) => match error {
                EngineError::ContextOverflow { .. } | EngineError::ContextExceeded { .. } => {
                    RequestErrorKind::ContextOverflow
                }
                EngineError::QueueFull { .. } | EngineError::NoTurn { .. } => RequestErrorKind::QueueFull,
                EngineError::InvalidRequest { .. } | EngineError::Template { .. } => RequestErrorKind::InvalidRequest,
                EngineError::Unsupported { .. } => RequestErrorKind::Unsupported,
                EngineError::Unavailable { .. }
                | EngineError::NoResources { .. }
                | EngineError::GaveWay
                | EngineError::VersionMismatch(_) => RequestErrorKind::Unavailable,
                EngineError::Unauthorized => RequestErrorKind::Unauthorized,
                EngineError::Lost { .. } => RequestErrorKind::EngineLost,
                EngineError::Poison { .. } => RequestErrorKind::Poison,
                EngineError::Internal { .. } | EngineError::NotFinite => RequestErrorKind::Internal,
            },
        }
    }
}

/// The kind of a [`RequestError`], for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RequestErrorKind {
    /// No engine serves a model of this name.
    ModelNotFound,
    InvalidRequest,
    /// The key may not use the model.
    ModelNotAllowed,
    /// The key's rate is exhausted.
    RateLimited,
    /// A budget of the key is spent.
    BudgetSpent,
    /// The key has too many requests running.
    TooManyAtOnce,
    /// The prompt exceeds the model's context.
    ContextOverflow,
    /// The endpoint is at its limit of requests.
    Overloaded,
    /// No engine or upstream is available.
    Unavailable,
    /// The engine's queue is full.
    QueueFull,
    /// The engine lacks a feature that the request needs.
    Unsupported,
    /// The node refused the cluster key.
    Unauthorized,
    /// The engine was lost.
    EngineLost,
    /// Engine processes ended while they worked on the request.
    Poison,
    /// The engine failed.
    Internal,
}

impl RequestErrorKind {
    /// The word for metrics, logs and traces.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
