//! Asks upstreams one after another until one answers: the least busy first, each once, and all once more after a broken
//! connection.

use std::sync::Arc;
use std::time::Duration;

use baton_link::trace::TARGET;
use baton_planner::reason::RouteReason;
use baton_schemas::EngineError;
use baton_upstream::{UpstreamError, UpstreamFailure};
use tokio::time::Instant;
use tracing::Instrument;

use super::client_error::client_error;
use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};
use crate::admission::{Place, RequestPlaces, SlotUse};
use crate::error::RequestError;

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

    /// The most places that it can use at once. It is asked with one, and with those that are free then.
    fn n_places(&self) -> usize {
        1
    }

    /// It has its places at this upstream, which is about to be asked.
    fn admitted(&self, _upstream: &ServingUpstream) {}

    /// Writes the call for this upstream. Sends nothing. Errors: the upstream does not support the question.
    fn prepare(&self, upstream: &ServingUpstream) -> Result<Self::Prepared, UpstreamError>;

    /// Asks the upstream, where it has these places, at least one.
    fn ask(
        &self,
        upstream: &ServingUpstream,
        prepared: Self::Prepared,
        held: Vec<Place>,
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
/// Errors: the request is wrong, no upstream has a place for it in time, or none answers; then the last upstream's error.
pub(super) async fn first_answer<Q: UpstreamQuestion>(
    serving: &ServedByUpstreams,
    places: &RequestPlaces,
    question: &Q,
) -> Result<FirstAnswer<Q::Answer>, RequestError> {
    let request_id = question.request_id();
    let mut tried = Vec::new();
    let mut is_second_round = false;
    let mut last = None;
    let mut unsupported = None;
    loop {
        let Some(ChosenUpstream { idx, reason, place }) = choose(serving, &tried, places).await? else {
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
        tried.push(idx);
        let upstream = &serving.upstreams[idx];
        let ServingUpstream { server, model } = upstream;
        let prepared = match question.prepare(upstream) {
            Ok(prepared) => prepared,
            // Nothing was sent yet, so an error does not affect the upstream's health.
            Err(error) => {
                unsupported = Some(error);
                continue;
            }
        };
        let more = std::iter::from_fn(|| places.try_next(&server.places));
        let held = std::iter::once(place).chain(more).take(question.n_places()).map(working).collect();
        question.admitted(upstream);
        let asked = Instant::now();
        let failure = match question.ask(upstream, prepared, held).await {
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

/// The place of a choice that is asked for. An upstream gets no more at once than it generates, so none waits there.
fn working(mut place: Place) -> Place {
    place.note(SlotUse::Working);
    place
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

/// The upstream that is tried next, and a place there.
struct ChosenUpstream {
    idx: usize,
    /// The reason for this upstream.
    reason: RouteReason,
    place: Place,
}

/// Waits for a place at one of the best upstreams that were not tried. `None`: there is none that can be asked now.
async fn choose(
    serving: &ServedByUpstreams,
    tried: &[usize],
    places: &RequestPlaces,
) -> Result<Option<ChosenUpstream>, RequestError> {
    loop {
        let best = best(serving, tried);
        if best.is_empty() {
            return Ok(None);
        }
        let targets: Vec<_> = best.iter().map(|idx| Arc::clone(&serving.upstreams[*idx].server.places)).collect();
        let span = tracing::info_span!(target: TARGET, "admission_wait");
        let place = places.next(&targets).instrument(span).await?;
        let is_chosen = |idx: &usize| place.is_at(&serving.upstreams[*idx].server.places);
        // It may be busy by now, or have failed.
        let Some(idx) = self::best(serving, tried).into_iter().find(is_chosen) else { continue };
        serving.upstreams[idx].server.breaker.try_pass();
        let reason = match serving.upstreams.len() {
            1 => RouteReason::OnlyUpstream,
            _ if tried.is_empty() => RouteReason::LeastRunning,
            _ => RouteReason::NextUpstream,
        };
        return Ok(Some(ChosenUpstream { idx, reason, place }));
    }
}

/// The upstreams that may be tried next; equals take turns to be the first. A failed or silent upstream is tried only if there
/// is no other. A silent one may be computing a reply and unable to answer anything else.
fn best(serving: &ServedByUpstreams, tried: &[usize]) -> Vec<usize> {
    let n = serving.upstreams.len();
    let rank = |idx: &usize| {
        let server = &serving.upstreams[*idx].server;
        (!server.breaker.would_pass(), server.is_silent())
    };
    let mut open: Vec<usize> = (0..n).map(|i| (i + serving.turn) % n).collect();
    open.retain(|idx| {
        let ServingUpstream { server, model } = &serving.upstreams[*idx];
        !tried.contains(idx) && server.busy_for(model).is_none()
    });
    let first = open.iter().map(rank).min();
    open.retain(|idx| Some(rank(idx)) == first);
    open
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
