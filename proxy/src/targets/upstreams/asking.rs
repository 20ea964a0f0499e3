//! Asks upstreams one after another until one answers: the least busy one first, each once, and once more if a connection
//! broke.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::upstream::UpstreamError;
use baton_planner::reason::RouteReason;
use baton_schemas::EngineError;
use tokio::time::timeout;

use super::member::Place;
use super::{Member, ServedByUpstreams};
use crate::error::RequestError;

/// How long a request waits for a place at an upstream. It was admitted already: this is the time of some replies.
const MAX_WAIT: Duration = Duration::from_secs(120);

/// Before upstreams whose connections broke are tried a second time: they may have closed idle ones just then.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// When to come back to upstreams that have failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What is asked of an upstream.
pub(super) trait Question: Sync {
    /// What comes of it.
    type Answer: Send;

    /// As in `x-request-id`.
    fn request_id(&self) -> &str;

    /// Places that it takes.
    fn n_places(&self) -> u32;

    /// Whether an upstream can be asked that at all. Sends nothing.
    fn fits(&self, member: &Member, model: &str) -> Result<(), UpstreamError>;

    /// Asks it. `model` is its own name for the model.
    fn ask(
        &self,
        member: &Arc<Member>,
        model: &str,
        places: Vec<Place>,
    ) -> impl Future<Output = Result<Self::Answer, UpstreamError>> + Send;
}

/// The upstream that answered, why it was asked, and what it said. Dropping the future cancels it.
///
/// Errors: the request is wrong; or no upstream answers, and then the last one's reason.
pub(super) async fn first_answer<Q: Question>(
    serving: &ServedByUpstreams,
    question: &Q,
) -> Result<(Arc<Member>, RouteReason, Q::Answer), RequestError> {
    let request_id = question.request_id();
    let (mut tried, mut is_second_round, mut last, mut unfit) = (Vec::new(), false, None, None);
    loop {
        let Some((i, reason)) = choose(serving, &tried) else {
            let Some(error) = last.take() else {
                // That some do not take it is the answer only if none does: another may have room soon.
                let unfit = unfit.filter(|_| tried.len() == serving.members.len());
                return Err(unfit.map_or_else(|| all_busy(serving), told));
            };
            if is_second_round || !is_broken_connection(&error) {
                return Err(told(error));
            }
            (is_second_round, last) = (true, Some(error));
            tried.clear();
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        };
        tried.push(i);
        let (member, model) = &serving.members[i];
        let outcome = match question.fits(member, model) {
            // Nothing was sent: this says nothing of the upstream.
            Err(error) => {
                unfit = Some(error);
                continue;
            }
            Ok(()) => match timeout(MAX_WAIT, member.places(question.n_places())).await {
                // Nothing was sent: this says nothing of the upstream.
                Err(_) => {
                    last = Some(UpstreamError::Busy { retry_after: None });
                    continue;
                }
                Ok(places) => question.ask(member, model, places).await,
            },
        };
        let failure = match outcome {
            Ok(answer) => {
                member.breaker.succeeded();
                return Ok((Arc::clone(member), reason, answer));
            }
            Err(error) => error,
        };
        // An upstream's own words may quote prompts and keys: they are for who asks for them.
        tracing::debug!(request_id, upstream = member.name(), error = %failure, "an upstream did not answer a request");
        match &failure {
            // Another one may have been started otherwise.
            UpstreamError::Unsupported { .. } | UpstreamError::Refused(EngineError::Unsupported { .. }) => {
                member.breaker.succeeded();
                unfit = Some(failure);
                continue;
            }
            // It would be refused everywhere.
            UpstreamError::Refused(_) => {
                member.breaker.succeeded();
                return Err(told(failure));
            }
            UpstreamError::Busy { retry_after } => {
                member.breaker.succeeded();
                member.is_busy(model, *retry_after);
            }
            // It answers, and others of its models may be there.
            UpstreamError::Failed { reason: "model_missing", .. } => {
                member.breaker.succeeded();
                tracing::warn!(request_id, upstream = member.name(), model, "an upstream lacks a model");
            }
            UpstreamError::Failed { reason, .. } => {
                member.failed(reason);
                tracing::warn!(request_id, upstream = member.name(), reason, "an upstream failed");
            }
        }
        last = Some(failure);
    }
}

/// The upstream to try next, and why: of those that are well the one with the most room for its size, taking turns among
/// equals; and one that has just failed, or is silent, only if there is no other. One that computes a reply and does
/// nothing beside it is silent, too: it is not left out.
fn choose(serving: &ServedByUpstreams, tried: &[usize]) -> Option<(usize, RouteReason)> {
    let n = serving.members.len();
    let load = |member: &Member| member.n_claimed() * 1_000 / member.client.settings().max_concurrent.max(1);
    let open = (0..n).map(|i| (i + serving.turn) % n).filter(|i| {
        let (member, model) = &serving.members[*i];
        !tried.contains(i) && member.busy_for(model).is_none()
    });
    let best = open.min_by_key(|i| {
        let (member, _) = &serving.members[*i];
        (!member.breaker.would_pass(), member.is_silent(), load(member))
    })?;
    serving.members[best].0.breaker.try_pass();
    let reason = match n {
        1 => RouteReason::OnlyUpstream,
        _ if tried.is_empty() => RouteReason::LeastRunning,
        _ => RouteReason::NextUpstream,
    };
    Some((best, reason))
}

fn is_broken_connection(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Failed { reason: "unreachable" | "cut_short", .. })
}

fn all_busy(serving: &ServedByUpstreams) -> RequestError {
    let soonest = serving.members.iter().filter_map(|(member, model)| member.busy_for(model)).min();
    told(UpstreamError::Busy { retry_after: soonest })
}

/// An upstream's failure as its client may see it.
pub(super) fn told(error: UpstreamError) -> RequestError {
    match error {
        UpstreamError::Unsupported { field, .. } => RequestError::InvalidField {
            field,
            problem: "the upstream that serves this model does not take it".to_owned(),
        },
        UpstreamError::Refused(error) => RequestError::Engine(error),
        UpstreamError::Busy { retry_after } => RequestError::Unavailable {
            reason: "the upstream that serves it is busy".to_owned(),
            retry_after: retry_after.unwrap_or(RETRY_AFTER),
        },
        UpstreamError::Failed { reason, .. } => {
            let reason = match reason {
                "unauthorized" => "the upstream that serves it refused this server",
                "model_missing" => "the upstream that serves it does not have it",
                "timed_out" => "the upstream that serves it did not answer in time",
                "unreachable" => "the upstream that serves it does not answer",
                _ => "the upstream that serves it answered with an error",
            };
            RequestError::Unavailable { reason: reason.to_owned(), retry_after: RETRY_AFTER }
        }
    }
}

/// A failure in the middle of a reply: nobody else can go on with it.
pub(super) fn broken(error: UpstreamError) -> RequestError {
    match error {
        // The detail, which may have the upstream's own words, is not for every log.
        UpstreamError::Failed { reason, .. } => EngineError::lost(format_args!("an upstream failed: {reason}")).into(),
        error => told(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &'static str) -> UpstreamError {
        UpstreamError::Failed { reason, detail: "secret words".into() }
    }

    #[test]
    fn a_client_is_told_whether_the_upstream_answered_at_all() {
        for (reason, expected) in [
            ("unreachable", "does not answer"),
            ("timed_out", "did not answer in time"),
            ("server_error", "answered with an error"),
            ("malformed", "answered with an error"),
            ("redirected", "answered with an error"),
            ("cut_short", "answered with an error"),
            ("unauthorized", "refused this server"),
            ("model_missing", "does not have it"),
        ] {
            let said = told(failed(reason)).to_string();
            assert!(said.ends_with(expected) && !said.contains("secret"), "{reason}: {said}");
        }
    }

    #[test]
    fn a_reply_that_breaks_off_is_reported_without_the_upstreams_words() {
        let RequestError::Engine(EngineError::Lost { detail }) = broken(failed("malformed")) else { panic!() };
        assert!(detail.contains("malformed") && !detail.contains("secret"), "{detail}");
    }
}
