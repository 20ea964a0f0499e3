//! Asks upstreams one after another until one answers: the least busy first, each once, and all once more after a broken
//! connection.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use baton_engines::upstream::{UpstreamError, UpstreamFailure};
use baton_planner::reason::RouteReason;
use baton_schemas::EngineError;
use tokio::time::{Instant, timeout};

use super::client_error::client_error;
use super::server::UpstreamPermit;
use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};
use crate::error::RequestError;

/// How long an admitted request waits for an upstream's capacity: the duration of some replies.
const MAX_WAIT: Duration = Duration::from_secs(120);

/// The pause before the second round. An upstream may have closed idle connections just before the first one.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A question that any upstream of a model may answer.
pub(super) trait UpstreamQuestion: Sync {
    /// The answer.
    type Answer: Send;

    /// The question in the upstream's own form, if checking it makes one.
    type Prepared: Send;

    /// The client's request id.
    fn request_id(&self) -> &str;

    /// The number of permits that it needs.
    fn n_permits(&self) -> u32 {
        1
    }

    /// Writes the call for this upstream. Sends nothing. Errors: the upstream does not support the question.
    fn prepare(&self, upstream: &ServingUpstream) -> Result<Self::Prepared, UpstreamError>;

    /// Asks the upstream.
    fn ask(
        &self,
        upstream: &ServingUpstream,
        prepared: Self::Prepared,
        permits: Vec<UpstreamPermit>,
    ) -> impl Future<Output = Result<Self::Answer, UpstreamError>> + Send;
}

/// The answer to a question, with the upstream that gave it.
pub(super) struct FirstAnswer<T> {
    pub(super) server: Arc<UpstreamServer>,
    /// The reason for this upstream.
    pub(super) reason: RouteReason,
    pub(super) answer: T,
}

/// Asks until an upstream answers. Dropping the future cancels the question.
///
/// Errors: the request is wrong, or no upstream answers; then the last upstream's error.
pub(super) async fn first_answer<Q: UpstreamQuestion>(
    serving: &ServedByUpstreams,
    question: &Q,
) -> Result<FirstAnswer<Q::Answer>, RequestError> {
    let request_id = question.request_id();
    let mut tried = Vec::new();
    let mut is_second_round = false;
    let mut last = None;
    let mut unsupported = None;
    loop {
        let Some((i, reason)) = choose(serving, &tried) else {
            let Some(error) = last.take() else {
                // Only if no upstream supports the request: a busy upstream may support it.
                let unsupported = unsupported.filter(|_| tried.len() == serving.upstreams.len());
                return Err(unsupported.map_or_else(|| all_busy(serving), client_error));
            };
            if is_second_round || !is_broken_connection(&error) {
                return Err(client_error(error));
            }
            is_second_round = true;
            last = Some(error);
            tried.clear();
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        };
        tried.push(i);
        let upstream = &serving.upstreams[i];
        let ServingUpstream { server, model } = upstream;
        let ready = match make_ready(upstream, question).await {
            Ok(Some(ready)) => ready,
            Ok(None) => {
                last = Some(UpstreamError::Busy { retry_after: None });
                continue;
            }
            // Nothing was sent yet, so an error does not affect the upstream's health.
            Err(error) => {
                unsupported = Some(error);
                continue;
            }
        };
        let asked = Instant::now();
        let failure = match question.ask(upstream, ready.question, ready.permits).await {
            Ok(answer) => {
                server.breaker.succeeded(asked);
                return Ok(FirstAnswer { server: Arc::clone(server), reason, answer });
            }
            Err(error) => error,
        };
        // The upstream's own message may quote prompts and keys: for debug logs only.
        tracing::debug!(request_id, upstream = server.name(), error = %failure, "an upstream did not answer a request");
        if shows_health(&failure) {
            server.breaker.succeeded(asked);
        }
        match &failure {
            // Another upstream may have it.
            UpstreamError::NoRoute { route } => {
                tracing::warn!(request_id, upstream = server.name(), route, "an upstream has no such route");
                unsupported = Some(failure);
                continue;
            }
            UpstreamError::TooLong { n_ctx, .. } => {
                let may_fit = |(i, other): (usize, &ServingUpstream)| {
                    !tried.contains(&i) && other.server.n_ctx(&other.model).is_none_or(|larger| larger > *n_ctx)
                };
                if !serving.upstreams.iter().enumerate().any(may_fit) {
                    return Err(client_error(failure));
                }
                unsupported = Some(failure);
                continue;
            }
            // Another upstream may be configured differently.
            UpstreamError::Unsupported { .. } | UpstreamError::Refused(EngineError::Unsupported { .. }) => {
                unsupported = Some(failure);
                continue;
            }
            // Every upstream would refuse it.
            UpstreamError::Refused(_) => return Err(client_error(failure)),
            UpstreamError::Busy { retry_after } => server.report_busy(model, *retry_after),
            // The upstream may serve its other models.
            UpstreamError::Failed { failure: UpstreamFailure::ModelMissing, .. } => {
                let next = next_step(serving, &tried, is_second_round, &failure).as_str();
                tracing::warn!(request_id, upstream = server.name(), model, "an upstream lacks a model; {next}");
            }
            UpstreamError::Failed { failure: reason, .. } => {
                server.failed(*reason);
                let next = next_step(serving, &tried, is_second_round, &failure).as_str();
                let reason = reason.as_str();
                tracing::warn!(request_id, upstream = server.name(), reason, "an upstream failed; {next}");
            }
        }
        last = Some(failure);
    }
}

/// Returns true if an upstream that answers so is healthy.
fn shows_health(error: &UpstreamError) -> bool {
    match error {
        UpstreamError::NoRoute { .. }
        | UpstreamError::Unsupported { .. }
        | UpstreamError::Refused(_)
        | UpstreamError::Busy { .. } => true,
        // Only the tokenizer was asked.
        UpstreamError::TooLong { .. } => false,
        UpstreamError::Failed { failure, .. } => *failure == UpstreamFailure::ModelMissing,
    }
}

/// A question that can be asked now.
struct ReadyQuestion<T> {
    question: T,
    permits: Vec<UpstreamPermit>,
}

/// Prepares a question, and waits for the upstream's capacity. `None`: it stayed full. Errors: the upstream does not
/// support the question.
async fn make_ready<Q: UpstreamQuestion>(
    upstream: &ServingUpstream,
    question: &Q,
) -> Result<Option<ReadyQuestion<Q::Prepared>>, UpstreamError> {
    let prepared = question.prepare(upstream)?;
    let mut permits = pin!(upstream.server.permits(question.n_permits()));
    if let Poll::Ready(permits) = futures::poll!(&mut permits) {
        return Ok(Some(ReadyQuestion { question: prepared, permits }));
    }
    // A request must not hold a second copy of its texts while it waits.
    drop(prepared);
    let Ok(permits) = timeout(MAX_WAIT, permits).await else { return Ok(None) };
    Ok(Some(ReadyQuestion { question: question.prepare(upstream)?, permits }))
}

/// Chooses the upstream to try next: the healthy one with the lowest load for its capacity; equals take turns. A failed or
/// silent upstream is tried only if there is no other. A silent one may be computing a reply and unable to answer anything
/// else.
fn choose(serving: &ServedByUpstreams, tried: &[usize]) -> Option<(usize, RouteReason)> {
    let n = serving.upstreams.len();
    let load = |server: &UpstreamServer| server.n_claimed() * 1_000 / server.client.settings().max_concurrent.max(1);
    let open = (0..n).map(|i| (i + serving.turn) % n).filter(|i| {
        let ServingUpstream { server, model } = &serving.upstreams[*i];
        !tried.contains(i) && server.busy_for(model).is_none()
    });
    let best = open.min_by_key(|i| {
        let server = &serving.upstreams[*i].server;
        (!server.breaker.would_pass(), server.is_silent(), load(server))
    })?;
    serving.upstreams[best].server.breaker.try_pass();
    let reason = match n {
        1 => RouteReason::OnlyUpstream,
        _ if tried.is_empty() => RouteReason::LeastRunning,
        _ => RouteReason::NextUpstream,
    };
    Some((best, reason))
}

/// What follows a failure, for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NextStep {
    NextUpstream,
    /// All upstreams are asked once more.
    SecondRound,
    GiveUp,
}

impl NextStep {
    fn as_str(self) -> &'static str {
        match self {
            NextStep::NextUpstream => "trying the next",
            NextStep::SecondRound => "trying once more",
            NextStep::GiveUp => "no other is left for this request",
        }
    }
}

fn next_step(serving: &ServedByUpstreams, tried: &[usize], is_second_round: bool, failure: &UpstreamError) -> NextStep {
    let is_left = |(i, upstream): (usize, &ServingUpstream)| {
        !tried.contains(&i) && upstream.server.busy_for(&upstream.model).is_none()
    };
    match serving.upstreams.iter().enumerate().any(is_left) {
        true => NextStep::NextUpstream,
        false if !is_second_round && is_broken_connection(failure) => NextStep::SecondRound,
        false => NextStep::GiveUp,
    }
}

fn is_broken_connection(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Failed { failure, .. } if failure.is_broken_connection())
}

fn all_busy(serving: &ServedByUpstreams) -> RequestError {
    let left = serving.upstreams.iter().filter_map(|upstream| upstream.server.busy_for(&upstream.model));
    client_error(UpstreamError::Busy { retry_after: left.min() })
}
