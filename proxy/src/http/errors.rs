//! Maps every error to a status, headers and a body. This is the only place that does so; the [`Dialect`] writes the
//! body's envelope.
//!
//! The client gets a short safe message. The cause goes to the log with the request's id.

use std::any::Any;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use baton_schemas::openai::{ErrorBody, ErrorKind, InvalidRequest};
use baton_schemas::{EngineError, ErrorCode};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};

use super::dialect::Dialect;
use super::edge::nearest_route::nearest_route;
use super::reply::request_steps::panic_message;
use crate::error::RequestError;

/// The message of failures whose cause is for the log only.
const INTERNAL: &str = "The server failed on this request.";

/// A full queue has room again when one request ends; a lost engine restarts in about this time.
const SOON: Duration = Duration::from_secs(1);

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

#[derive(Debug, Clone, PartialEq)]
pub struct HttpFailure {
    /// The HTTP status. It has no effect once a stream's head was sent.
    pub status: StatusCode,
    /// The error that the client reads.
    pub error: ErrorBody,
    /// What the client's SDK should do.
    pub retry: Retry,
}

/// What an SDK should do about a failure. By default, OpenAI's SDKs retry every 408, 409, 429 and 5xx twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// No advice: the SDK applies its default.
    Unsaid,
    /// Retry after this time.
    After(Duration),
    /// The same, but after hours or days: the SDK itself should give up.
    NotBefore(Duration),
    /// Do not retry: the request would fail again.
    Never,
}

impl HttpFailure {
    /// Creates a failure without retry advice.
    pub fn new(status: StatusCode, error: ErrorBody) -> Self {
        HttpFailure { status, error, retry: Retry::Unsaid }
    }

    /// Creates the error of what works again in a moment.
    pub fn not_now(message: String) -> Self {
        let failure =
            HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, ErrorBody::new(ErrorKind::Unavailable, message));
        HttpFailure { retry: Retry::After(SOON), ..failure }
    }

    /// Maps a failed request to what its client may see, and logs the cause.
    pub fn of_request(error: &RequestError, request_id: &str) -> Self {
        let failure = map(error);
        if failure.status == StatusCode::INTERNAL_SERVER_ERROR
            || matches!(error, RequestError::Engine(EngineError::Lost { .. }) | RequestError::ReplyBrokeOff { .. })
        {
            tracing::error!(request_id, status = failure.status.as_u16(), %error, "request failed");
        } else {
            // The error may quote the prompt, so its text is logged only at debug level.
            tracing::info!(
                request_id,
                status = failure.status.as_u16(),
                reason = error.kind().as_str(),
                "request refused"
            );
            tracing::debug!(request_id, %error, "cause of the refusal");
        }
        failure
    }

    /// Creates the error for an unknown path. The message suggests the nearest route, and lists all.
    pub fn unknown_route(method: &Method, path: &str, routes: &[String]) -> Self {
        let path = shortened(path);
        let mut message = format!("There is no route {method} {path}.");
        if let Some(nearest) = nearest_route(method, &path, routes) {
            message += &format!(" Did you mean {nearest}?");
        }
        message += &format!(" The routes are: {}.", routes.join(", "));
        HttpFailure::new(StatusCode::NOT_FOUND, ErrorBody::new(ErrorKind::NotFound, message))
    }

    /// Creates the error for a method that the path does not support. The message lists the methods that are `allowed`.
    pub fn wrong_method(method: &Method, path: &str, allowed: &[&str]) -> Self {
        let mut message = format!("{method} is not allowed on {}.", shortened(path));
        if !allowed.is_empty() {
            message += &format!(" Use {}.", allowed.join(" or "));
        }
        HttpFailure::new(StatusCode::METHOD_NOT_ALLOWED, ErrorBody::new(ErrorKind::InvalidRequest, message))
    }

    fn invalid(error: impl ToString) -> Self {
        HttpFailure::new(StatusCode::BAD_REQUEST, ErrorBody::new(ErrorKind::InvalidRequest, error.to_string()))
    }

    fn unavailable(message: impl ToString, after: Duration) -> Self {
        let error = ErrorBody::new(ErrorKind::Unavailable, message.to_string());
        HttpFailure { retry: Retry::After(after), ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) }
    }

    /// Creates the error for an internal failure that a retry would repeat.
    fn internal(reason: impl ToString) -> Self {
        let error = ErrorBody::new(ErrorKind::Server, reason.to_string());
        HttpFailure {
            retry: Retry::Never,
            ..HttpFailure::new(StatusCode::INTERNAL_SERVER_ERROR, error.code(ErrorCode::InternalError))
        }
    }
}

impl From<&RequestError> for HttpFailure {
    fn from(error: &RequestError) -> HttpFailure {
        map(error)
    }
}

fn map(error: &RequestError) -> HttpFailure {
    match error {
        RequestError::ModelNotFound { .. } => {
            let body =
                ErrorBody::new(ErrorKind::NotFound, error.to_string()).code(ErrorCode::ModelNotFound).param("model");
            HttpFailure::new(StatusCode::NOT_FOUND, body)
        }
        RequestError::Incapable { .. } => HttpFailure::invalid(error),
        RequestError::OperatorOnly { .. } => {
            HttpFailure::new(StatusCode::FORBIDDEN, ErrorBody::new(ErrorKind::Permission, error.to_string()))
        }
        RequestError::InvalidField { field, .. } => {
            let failure = HttpFailure::invalid(error);
            HttpFailure { error: failure.error.param(*field), ..failure }
        }
        RequestError::FieldUnsupported { field } => {
            let failure = coded(HttpFailure::invalid(error), ErrorCode::UnsupportedParameter);
            HttpFailure { error: failure.error.param(*field), ..failure }
        }
        RequestError::ImagesUnsupported { field, .. } => {
            let failure = coded(HttpFailure::invalid(error), ErrorCode::UnsupportedParameter);
            HttpFailure { error: failure.error.param(field.clone()), ..failure }
        }
        RequestError::ModelNotAllowed { .. } => {
            let body = ErrorBody::new(ErrorKind::Permission, error.to_string()).code(ErrorCode::ModelNotAllowed);
            HttpFailure::new(StatusCode::FORBIDDEN, body.param("model"))
        }
        RequestError::RateLimited { retry_after, .. } => limited(error, ErrorCode::RateLimitExceeded, *retry_after),
        RequestError::BudgetSpent { retry_after, .. } => HttpFailure {
            retry: Retry::NotBefore(*retry_after),
            ..limited(error, ErrorCode::InsufficientQuota, *retry_after)
        },
        RequestError::TooManyAtOnce { retry_after, .. } => {
            limited(error, ErrorCode::ConcurrencyLimitExceeded, *retry_after)
        }
        RequestError::ChosenContextExceeded { n_prompt, num_ctx, .. } => {
            overflow(HttpFailure::invalid(error), *n_prompt, *num_ctx, "options.num_ctx")
        }
        RequestError::InputTooLong { field, n_tokens, n_ctx, .. } => {
            overflow(HttpFailure::invalid(error), *n_tokens, *n_ctx, field)
        }
        RequestError::DocumentTooLong { idx, n_tokens, n_ctx } => {
            overflow(HttpFailure::invalid(error), *n_tokens, *n_ctx, &format!("documents[{idx}]"))
        }
        RequestError::TextTooLong { field, n_tokens, n_ctx } => {
            overflow(HttpFailure::invalid(error), *n_tokens, *n_ctx, field)
        }
        // 503, not 429: the server is full, and the caller did nothing wrong. 429 is for limits per key.
        RequestError::Overloaded { retry_after, .. } => {
            coded(HttpFailure::unavailable(error, *retry_after), ErrorCode::QueueFull)
        }
        RequestError::Unavailable { retry_after, .. } => HttpFailure::unavailable(error, *retry_after),
        RequestError::ReplyBrokeOff { .. } => HttpFailure::unavailable(error, SOON),
        RequestError::Engine(engine) => map_engine(engine),
    }
}

fn map_engine(error: &EngineError) -> HttpFailure {
    match error {
        EngineError::ContextOverflow { n_prompt, n_ctx } => {
            overflow(HttpFailure::invalid(error), *n_prompt, *n_ctx, "messages")
        }
        EngineError::ContextExceeded { .. } => {
            let failure = coded(HttpFailure::invalid(error), ErrorCode::ContextLengthExceeded);
            HttpFailure { error: failure.error.param("messages"), ..failure }
        }
        EngineError::QueueFull { .. } | EngineError::NoTurn { .. } => {
            coded(HttpFailure::unavailable(error, SOON), ErrorCode::QueueFull)
        }
        EngineError::InvalidRequest { field, .. } => {
            let failure = HttpFailure::invalid(error);
            HttpFailure { error: ErrorBody { param: field.clone(), ..failure.error }, ..failure }
        }
        EngineError::Template { .. } => {
            let failure = HttpFailure::invalid(error);
            HttpFailure { error: failure.error.param("messages"), ..failure }
        }
        EngineError::Unsupported { .. } => HttpFailure {
            retry: Retry::Never,
            ..HttpFailure::new(StatusCode::NOT_IMPLEMENTED, ErrorBody::new(ErrorKind::NotSupported, error.to_string()))
        },
        EngineError::Unavailable { .. } | EngineError::NoResources { .. } | EngineError::GaveWay => {
            HttpFailure::unavailable(error, SOON)
        }
        EngineError::Lost { .. } => {
            HttpFailure::unavailable("The engine stopped while it worked on this request.", SOON)
        }
        EngineError::Poison { .. } => {
            let failure = HttpFailure::internal(error);
            HttpFailure { error: failure.error.code(ErrorCode::PoisonRequest), ..failure }
        }
        EngineError::NotFinite => HttpFailure::internal(error),
        EngineError::Unauthorized => HttpFailure::unavailable("The engine refuses this server.", SOON),
        EngineError::VersionMismatch(_) => HttpFailure::unavailable(error, SOON),
        EngineError::Internal { .. } => HttpFailure::internal(INTERNAL),
    }
}

/// Creates a 429: the caller exceeded its own limit, not the server's.
fn limited(error: &RequestError, code: ErrorCode, after: Duration) -> HttpFailure {
    let body = ErrorBody::new(ErrorKind::RateLimit, error.to_string()).code(code);
    HttpFailure { retry: Retry::After(after), ..HttpFailure::new(StatusCode::TOO_MANY_REQUESTS, body) }
}

/// Adds the token counts from which agents decide how much of a conversation to compact.
fn overflow(failure: HttpFailure, n_prompt: u32, n_ctx: u32, param: &str) -> HttpFailure {
    let error = failure.error.code(ErrorCode::ContextLengthExceeded).param(param);
    HttpFailure { error: ErrorBody { n_prompt_tokens: Some(n_prompt), n_ctx: Some(n_ctx), ..error }, ..failure }
}

fn coded(failure: HttpFailure, code: ErrorCode) -> HttpFailure {
    HttpFailure { error: failure.error.code(code), ..failure }
}

/// Shortens client input, so that an error can quote it.
fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

impl From<InvalidRequest> for HttpFailure {
    fn from(invalid: InvalidRequest) -> Self {
        HttpFailure::new(StatusCode::BAD_REQUEST, invalid.into())
    }
}

/// Answers a request whose handler panicked.
pub fn panicked(panic: Box<dyn Any + Send>, dialect: Dialect) -> Response {
    tracing::error!(message = panic_message(&*panic), "a request handler panicked; answering 500");
    HttpFailure::internal(INTERNAL).respond(dialect)
}

impl IntoResponse for HttpFailure {
    fn into_response(self) -> Response {
        self.respond(Dialect::OpenAi)
    }
}

impl HttpFailure {
    /// Writes the failure in the envelope of a dialect.
    pub fn respond(self, dialect: Dialect) -> Response {
        let mut response = (self.status, dialect.envelope(self.status, self.error)).into_response();
        let headers = response.headers_mut();
        match self.retry {
            Retry::Unsaid => {}
            Retry::After(after) | Retry::NotBefore(after) => {
                // The header has whole seconds. 0 would mean an immediate retry.
                let seconds = after.as_millis().div_ceil(1000).max(1) as u64;
                headers.insert(header::RETRY_AFTER, seconds.into());
                headers.insert(RETRY_AFTER_MS, (after.as_millis() as u64).into());
            }
            Retry::Never => {}
        }
        if matches!(self.retry, Retry::Never | Retry::NotBefore(_)) {
            headers.insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The rest of the body was not read, so this connection cannot carry another request.
            StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use baton_upstream::UpstreamFailure;

    use super::*;
    use crate::error::{BudgetPeriod, RateUnit};
    use crate::utc_day::UtcDay;

    fn check(error: impl Into<RequestError>, expected: (u16, ErrorKind, Option<ErrorCode>, Retry)) {
        let error = error.into();
        let failure = HttpFailure::of_request(&error, "r");
        let got = (failure.status.as_u16(), failure.error.kind, failure.error.code, failure.retry);
        assert_eq!(got, expected, "{error}");
        for secret in ["10.0.0.7", "/srv"] {
            assert!(!failure.error.message.contains(secret), "{}", failure.error.message);
        }
    }

    #[test]
    fn each_error_has_its_status_and_advice() {
        let after = Retry::After;
        let ms = Duration::from_millis;
        check(
            RequestError::ModelNotFound { model: "x".into() },
            (404, ErrorKind::NotFound, Some(ErrorCode::ModelNotFound), Retry::Unsaid),
        );
        check(
            RequestError::Overloaded { n_running: 4, n_waiting: 1, retry_after: ms(300) },
            (503, ErrorKind::Unavailable, Some(ErrorCode::QueueFull), after(ms(300))),
        );
        check(
            RequestError::RateLimited { unit: RateUnit::Tokens, limit: 4, retry_after: ms(700) },
            (429, ErrorKind::RateLimit, Some(ErrorCode::RateLimitExceeded), after(ms(700))),
        );
        check(
            RequestError::TooManyAtOnce { limit: 4, retry_after: ms(700) },
            (429, ErrorKind::RateLimit, Some(ErrorCode::ConcurrencyLimitExceeded), after(ms(700))),
        );
        check(
            RequestError::BudgetSpent {
                period: BudgetPeriod::Day,
                budget: 100,
                n_left: 3,
                n_tokens: 4,
                resets: UtcDay::today().next(),
                retry_after: ms(5_000_000),
            },
            (429, ErrorKind::RateLimit, Some(ErrorCode::InsufficientQuota), Retry::NotBefore(ms(5_000_000))),
        );
        check(
            RequestError::ModelNotAllowed { model: "x".into() },
            (403, ErrorKind::Permission, Some(ErrorCode::ModelNotAllowed), Retry::Unsaid),
        );
        check(RequestError::OperatorOnly { what: "unload models" }, (403, ErrorKind::Permission, None, Retry::Unsaid));
        check(
            RequestError::FieldUnsupported { field: "logprobs" },
            (400, ErrorKind::InvalidRequest, Some(ErrorCode::UnsupportedParameter), Retry::Unsaid),
        );
        check(
            RequestError::ReplyBrokeOff { failure: UpstreamFailure::CutShort },
            (503, ErrorKind::Unavailable, None, after(SOON)),
        );
        check(
            RequestError::Unavailable { reason: "loading".into(), retry_after: ms(2000) },
            (503, ErrorKind::Unavailable, None, after(ms(2000))),
        );
        check(
            EngineError::ContextOverflow { n_prompt: 9, n_ctx: 8 },
            (400, ErrorKind::InvalidRequest, Some(ErrorCode::ContextLengthExceeded), Retry::Unsaid),
        );
        check(
            EngineError::ContextExceeded { message: "too long".into() },
            (400, ErrorKind::InvalidRequest, Some(ErrorCode::ContextLengthExceeded), Retry::Unsaid),
        );
        check(
            EngineError::QueueFull { limit: 2 },
            (503, ErrorKind::Unavailable, Some(ErrorCode::QueueFull), after(SOON)),
        );
        check(EngineError::invalid("no"), (400, ErrorKind::InvalidRequest, None, Retry::Unsaid));
        check(EngineError::Template { message: "no".into() }, (400, ErrorKind::InvalidRequest, None, Retry::Unsaid));
        check(EngineError::Unsupported { feature: "this".into() }, (501, ErrorKind::NotSupported, None, Retry::Never));
        check(
            EngineError::Unavailable { reason: "restarting".into() },
            (503, ErrorKind::Unavailable, None, after(SOON)),
        );
        let poison = EngineError::Poison { n_processes: 2 };
        check(poison, (500, ErrorKind::Server, Some(ErrorCode::PoisonRequest), Retry::Never));
        check(EngineError::Unauthorized, (503, ErrorKind::Unavailable, None, after(SOON)));
        check(EngineError::lost("10.0.0.7:9000 reset"), (503, ErrorKind::Unavailable, None, after(SOON)));
        check(
            EngineError::internal("/srv/m.gguf"),
            (500, ErrorKind::Server, Some(ErrorCode::InternalError), Retry::Never),
        );
    }

    #[test]
    fn retry_after_rounds_up_and_its_milliseconds_are_exact() {
        let full = RequestError::Overloaded { n_running: 1, n_waiting: 0, retry_after: Duration::from_millis(1200) };
        let response = HttpFailure::of_request(&full, "r").into_response();
        assert_eq!(response.headers()["retry-after"], "2");
        assert_eq!(response.headers()["retry-after-ms"], "1200");
    }
}
