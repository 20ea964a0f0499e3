//! Asks upstreams one after another until one answers: the planned one first, each once, and all once more after a broken
//! connection.

use std::sync::Arc;
use std::time::Duration;

use baton_link::trace::TARGET;
use baton_planner::cost::Prediction;
use baton_planner::reason::RouteReason;
use baton_planner::upstreams::{self, PlannedTarget};
use baton_schemas::EngineError;
use baton_upstream::{UpstreamError, UpstreamFailure};
use tokio::time::Instant;
use tracing::Instrument;

use super::client_error::client_error;
use super::measures::WaitingPrompt;
use super::planning::{note_sent, snapshot, usable};
use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};
use crate::admission::{Place, RequestPlaces, SlotUse};
use crate::error::RequestError;
use crate::targets::text_prefixes::PromptOutline;

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

    /// The prompt by which the upstreams are planned. `None`: the least busy one is asked.
    fn prompt(&self) -> Option<&PromptOutline> {
        None
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
    /// The predicted times, if they were known.
    pub(super) prediction: Option<Prediction>,
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
        let Some(chosen) = choose(serving, &tried, places, question.prompt()).await? else {
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
        let ChosenUpstream { idx, reason, prediction, place } = chosen;
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
                return Ok(FirstAnswer { server: Arc::clone(server), reason, prediction, answer });
            }
            Err(error) => error,
        };
        // The upstream's own message may quote prompts and keys: for debug logs only.
        tracing::debug!(request_id, upstream = server.name(), error = %failure, "an upstream did not answer a request");
        learn_from(upstream, &failure, asked);
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

/// Notes what an answer shows of the upstream's health, and the time that a busy or failing one cost the request.
fn learn_from(ServingUpstream { server, model }: &ServingUpstream, failure: &UpstreamError, asked: Instant) {
    if shows_health(failure) {
        server.breaker.succeeded(asked);
    }
    if matches!(failure, UpstreamError::Busy { .. } | UpstreamError::Failed { .. }) {
        server.measures.refused(model, asked.elapsed());
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

/// The upstream that is tried next, and a place there.
struct ChosenUpstream {
    idx: usize,
    /// The reason for this upstream.
    reason: RouteReason,
    prediction: Option<Prediction>,
    place: Place,
}

/// The multiple of the predicted wait for which a request waits for a place at the planned upstream.
const LATE: f64 = 2.0;

/// The shortest such wait: predictions err by that much.
const LEAST_PATIENCE: Duration = Duration::from_millis(100);

/// The longest such wait.
const MOST_PATIENCE: Duration = Duration::from_secs(600);

/// Waits for a place at the planned upstream, or at one of the best that were not tried. `None`: there is none that can be asked
/// now.
async fn choose(
    serving: &ServedByUpstreams,
    tried: &[usize],
    places: &RequestPlaces,
    prompt: Option<&PromptOutline>,
) -> Result<Option<ChosenUpstream>, RequestError> {
    let mut prompt = prompt;
    loop {
        let best = usable(serving, tried);
        if best.is_empty() {
            return Ok(None);
        }
        let now = prompt.map(|prompt| snapshot(serving, tried, prompt, None));
        let choice = now.as_ref().and_then(upstreams::choose);
        let planned = choice.and_then(|choice| match choice.target {
            // The queue knows best which of them has a place first.
            PlannedTarget::Upstream(_) if choice.reason == RouteReason::LeastRunning => None,
            PlannedTarget::Upstream(idx) => Some((idx, choice)),
            PlannedTarget::Own => None,
        });
        let has_others = best.len() > 1;
        let at: Vec<usize> = planned.map_or(best, |(idx, _)| vec![idx]);
        let targets: Vec<_> = at.iter().map(|idx| Arc::clone(&serving.upstreams[*idx].server.places)).collect();
        let span = tracing::info_span!(target: TARGET, "admission_wait");
        // Others are planned behind it meanwhile.
        let _waiting = planned.zip(now.as_ref()).map(|((idx, _), now)| {
            let ServingUpstream { server, model } = &serving.upstreams[idx];
            let n_missing = now.request.n_prompt - now.upstreams[idx].n_cached(&now.request);
            WaitingPrompt::begin(&server.measures, model, n_missing, now.request.n_output)
        });
        let patience = planned.filter(|_| has_others).map(|(_, choice)| patience(choice.prediction.as_ref()));
        let place = tokio::select! {
            biased;
            place = places.next(&targets).instrument(span) => place?,
            // It is slower than predicted, or hangs: any place is welcome.
            () = tokio::time::sleep(patience.unwrap_or_default()), if patience.is_some() => {
                prompt = None;
                continue;
            }
        };
        let is_chosen = |idx: &usize| place.is_at(&serving.upstreams[*idx].server.places);
        // It may be busy by now, or have failed.
        let Some(idx) = usable(serving, tried).into_iter().find(is_chosen) else { continue };
        serving.upstreams[idx].server.breaker.try_pass();
        note_sent(serving, idx);
        let reason = match serving.upstreams.len() {
            1 => RouteReason::OnlyUpstream,
            _ if !tried.is_empty() => RouteReason::NextUpstream,
            _ => planned.map_or(RouteReason::LeastRunning, |(_, choice)| choice.reason),
        };
        let prediction = planned.and_then(|(_, choice)| choice.prediction);
        return Ok(Some(ChosenUpstream { idx, reason, prediction, place }));
    }
}

fn patience(prediction: Option<&Prediction>) -> Duration {
    let seconds = prediction.map_or(0.0, |predicted| predicted.queue_ms * LATE / 1e3);
    Duration::try_from_secs_f64(seconds).unwrap_or(MOST_PATIENCE).clamp(LEAST_PATIENCE, MOST_PATIENCE)
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
