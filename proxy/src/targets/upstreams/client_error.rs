//! Turns an upstream's failure into the client's error, without the upstream's own message, which may quote prompts and
//! keys.

use std::time::Duration;

use baton_schemas::EngineError;
use baton_upstream::{UpstreamError, UpstreamFailure};

use crate::error::RequestError;

/// When a client should retry after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The error of a request that no upstream has begun to answer.
pub(super) fn client_error(error: UpstreamError) -> RequestError {
    match error {
        UpstreamError::Unsupported { field } => RequestError::FieldUnsupported { field },
        UpstreamError::NoRoute { route } => RequestError::Engine(EngineError::Unsupported {
            feature: format!("{route}, since the upstream that serves this model has no such route"),
        }),
        UpstreamError::Refused(error) => RequestError::Engine(error),
        UpstreamError::TooLong { n_prompt, n_ctx } => {
            RequestError::Engine(EngineError::ContextOverflow { n_prompt, n_ctx })
        }
        UpstreamError::Busy { retry_after } => RequestError::Unavailable {
            reason: "the upstream that serves it is busy".to_owned(),
            retry_after: retry_after.unwrap_or(RETRY_AFTER),
        },
        UpstreamError::Failed { failure, .. } => {
            let reason = match failure {
                UpstreamFailure::Unauthorized => "the upstream that serves it refused this server",
                UpstreamFailure::ModelMissing => "the upstream that serves it does not have it",
                UpstreamFailure::TimedOut => "the upstream that serves it did not answer in time",
                UpstreamFailure::Unreachable => "the upstream that serves it does not answer",
                UpstreamFailure::NoResources => {
                    "this server cannot open another connection to the upstream that serves it"
                }
                UpstreamFailure::Malformed => "the upstream that serves it sent something that cannot be read",
                UpstreamFailure::CutShort | UpstreamFailure::Interrupted => {
                    "the upstream that serves it broke off its reply"
                }
                UpstreamFailure::Redirected | UpstreamFailure::ServerError | UpstreamFailure::GatewayError => {
                    "the upstream that serves it answered with an error"
                }
            };
            RequestError::Unavailable { reason: reason.to_owned(), retry_after: RETRY_AFTER }
        }
    }
}

/// The error of an interrupted reply. No other upstream can continue it.
pub(super) fn broken_reply(error: UpstreamError) -> RequestError {
    match error {
        UpstreamError::Failed { failure, .. } => RequestError::ReplyBrokeOff { failure },
        // It had accepted the request, so what computed it is gone.
        UpstreamError::Busy { .. } => RequestError::ReplyBrokeOff { failure: UpstreamFailure::Interrupted },
        error => client_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(failure: UpstreamFailure) -> UpstreamError {
        UpstreamError::Failed { failure, detail: "secret words".into() }
    }

    #[test]
    fn the_client_learns_whether_the_upstream_answered_at_all() {
        for (failure, expected) in [
            (UpstreamFailure::Unreachable, "does not answer"),
            (UpstreamFailure::NoResources, "cannot open another connection to the upstream that serves it"),
            (UpstreamFailure::TimedOut, "did not answer in time"),
            (UpstreamFailure::ServerError, "answered with an error"),
            (UpstreamFailure::GatewayError, "answered with an error"),
            (UpstreamFailure::Malformed, "sent something that cannot be read"),
            (UpstreamFailure::Redirected, "answered with an error"),
            (UpstreamFailure::CutShort, "broke off its reply"),
            (UpstreamFailure::Interrupted, "broke off its reply"),
            (UpstreamFailure::Unauthorized, "refused this server"),
            (UpstreamFailure::ModelMissing, "does not have it"),
        ] {
            let said = client_error(failed(failure)).to_string();
            assert!(said.ends_with(expected) && !said.contains("secret"), "{failure}: {said}");
        }
    }

    #[test]
    fn a_missing_route_is_named_and_not_the_clients_fault() {
        let error = client_error(UpstreamError::NoRoute { route: "embeddings" });
        assert!(matches!(error, RequestError::Engine(EngineError::Unsupported { .. })));
        assert!(error.to_string().contains("embeddings"), "{error}");
    }

    #[test]
    fn a_lost_worker_is_not_a_busy_one() {
        let error = broken_reply(UpstreamError::Busy { retry_after: None });
        assert_eq!(error.to_string(), "The upstream that serves this model lost what computed its reply.");
    }

    #[test]
    fn a_reply_that_breaks_off_is_reported_without_the_upstreams_words() {
        let check = |failure, expected: &str| assert_eq!(broken_reply(failed(failure)).to_string(), expected);
        check(UpstreamFailure::CutShort, "The upstream that serves this model broke off its reply.");
        check(
            UpstreamFailure::Malformed,
            "The upstream that serves this model sent something that cannot be read while it replied.",
        );
    }
}
