//! The ways in which an upstream fails to answer.

use std::fmt;
use std::time::Duration;

use baton_schemas::EngineError;

/// Why an upstream does not answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UpstreamError {
    /// The upstream, as it is configured, does not take a field of the request. Most of the time nothing was sent; some
    /// servers show it only in their reply.
    #[error("the upstream does not take {field}")]
    Unsupported {
        /// The field, by its name in OpenAI's dialect.
        field: &'static str,
    },
    /// The upstream's API has no such route.
    #[error("the upstream has no route {route}")]
    NoRoute {
        /// The route below its API's address or the server's root.
        route: &'static str,
    },
    /// The request is wrong: sending it again, here or to another upstream, fails the same way.
    #[error(transparent)]
    Refused(EngineError),
    /// The prompt does not fit the model's context, as counting it has shown. It was not sent to be computed.
    #[error("the prompt has {n_prompt} tokens, and the model's context {n_ctx}")]
    TooLong {
        /// The prompt's tokens.
        n_prompt: u32,
        /// The tokens that the context has room for.
        n_ctx: u32,
    },
    /// The upstream has no capacity now.
    #[error("the upstream is busy")]
    Busy {
        /// How long to wait before the next request, if the upstream says so.
        retry_after: Option<Duration>,
    },
    /// The upstream is at fault.
    #[error("{failure}: {detail}")]
    Failed {
        /// What went wrong.
        failure: UpstreamFailure,
        /// For debug logs only: it may name addresses and quote the upstream's own words.
        detail: String,
    },
}

impl UpstreamError {
    /// The error's kind as a word for logs. It is safe to log, while the whole error may quote prompts and keys.
    pub fn as_str(&self) -> &'static str {
        match self {
            UpstreamError::Unsupported { .. } => "unsupported",
            UpstreamError::NoRoute { .. } => "no_route",
            UpstreamError::Refused(_) => "refused",
            UpstreamError::TooLong { .. } => "too_long",
            UpstreamError::Busy { .. } => "busy",
            UpstreamError::Failed { failure, .. } => failure.as_str(),
        }
    }

    pub(super) fn failed(failure: UpstreamFailure, detail: impl ToString) -> Self {
        UpstreamError::Failed { failure, detail: detail.to_string() }
    }

    pub(super) fn malformed(detail: impl ToString) -> Self {
        UpstreamError::failed(UpstreamFailure::Malformed, detail)
    }

    /// The error of a request that missed its deadline.
    pub(super) fn late() -> Self {
        UpstreamError::failed(UpstreamFailure::TimedOut, "there was no reply in time")
    }
}

/// What went wrong at an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum UpstreamFailure {
    /// No connection could be made, or it broke before the reply began.
    Unreachable,
    /// This process had no descriptor, port or memory for a connection, which says nothing about the upstream.
    NoResources,
    /// A deadline passed.
    TimedOut,
    /// The reply ended before it was complete.
    CutShort,
    /// The upstream ended a reply that it had begun, because it lost what computed it.
    Interrupted,
    /// The reply cannot be read.
    Malformed,
    /// The upstream answered with a redirect, which is not followed.
    Redirected,
    /// The upstream refused its configured key.
    Unauthorized,
    /// The upstream does not have the model.
    ModelMissing,
    /// The upstream reported an error of its own.
    ServerError,
    /// A gateway in front of the upstream got no answer from it.
    GatewayError,
}

impl UpstreamFailure {
    /// The word for metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns true if the connection broke. The upstream may have closed an idle connection just then, so one retry on
    /// a new connection is worthwhile.
    pub fn is_broken_connection(self) -> bool {
        matches!(self, UpstreamFailure::Unreachable | UpstreamFailure::CutShort)
    }
}

impl fmt::Display for UpstreamFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why the KV of a prefill server could not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrefillFailure {
    /// The prefill server failed.
    Failed,
    /// The prefill server reported an error of its own, perhaps because of this prompt.
    ServerError,
    /// The prefill server did not answer in time.
    TimedOut,
    /// The prefill server has no capacity now.
    Busy,
    /// The prefill server refused the prompt, as the decode server probably does, too.
    Refused,
    /// The prefill server's reply does not say where the KV cache lies.
    NoKvTransferParams,
    /// The decode server could not use the KV cache.
    KvLost,
    /// The decode server said nothing for as long as it had for fetching the KV cache.
    KvTimedOut,
    /// A gateway in front of the decode server failed. That says nothing of the KV cache.
    GatewayError,
}

impl PrefillFailure {
    /// The word for metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            PrefillFailure::Failed => "prefill_failed",
            PrefillFailure::ServerError => "prefill_server_error",
            PrefillFailure::TimedOut => "prefill_timed_out",
            PrefillFailure::Busy => "prefill_busy",
            PrefillFailure::Refused => "prompt_refused",
            PrefillFailure::NoKvTransferParams => "no_kv_transfer_params",
            PrefillFailure::KvLost => "kv_lost",
            PrefillFailure::KvTimedOut => "kv_timed_out",
            PrefillFailure::GatewayError => "gateway_error",
        }
    }
}
