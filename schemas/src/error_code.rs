//! The `code` of an error reply.

use serde::Serialize;

/// Why a request was refused, for programs: the `code` of OpenAI's error envelope. docs/errors.md lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: a field asks for something that this server does not do.
    UnsupportedParameter,
    /// 400: the request does not fit the model's context.
    ContextLengthExceeded,
    /// 401: the API key is missing or wrong.
    InvalidApiKey,
    /// 403: the key does not allow this model.
    ModelNotAllowed,
    /// 403: only an operator may choose a routing policy.
    PolicyNotAllowed,
    /// 403: the route needs an operator's key.
    OperatorKeyRequired,
    /// 403: the `Host` header is not one of the allowed hosts.
    HostNotAllowed,
    /// 403: the `Origin` header is not one of the allowed origins.
    OriginNotAllowed,
    /// 404: no model has this name.
    ModelNotFound,
    /// 429: the key's rate limit is reached.
    RateLimitExceeded,
    /// 429: the key's budget of tokens is spent. OpenAI's name for it.
    InsufficientQuota,
    /// 429: the key has too many requests running.
    ConcurrencyLimitExceeded,
    /// 500: the server failed.
    InternalError,
    /// 500: engine processes ended while they worked on the request.
    PoisonRequest,
    /// 503: the queue is full.
    QueueFull,
    /// 503: too many clients stream `/baton/state`.
    TooManyWatchers,
}
