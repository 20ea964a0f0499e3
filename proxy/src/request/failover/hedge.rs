//! Hedging: starts a second route if the first token is late.
//!
//! Off by default. A sequence is a function of its prompt, its sampling and its seed, so both routes give the same
//! tokens. The route that gives the first token continues; the other one is dropped.

use baton_link::trace::TARGET;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest};
use futures::{StreamExt, TryStreamExt};
use tracing::Span;

use super::poison::PoisonMark;
use super::route_run::{RouteRun, accept, next_of};
use crate::error::RequestError;
use crate::request::plan::{self, Plan, PlanRequest};

/// Two routes that race for the first token. The loser is dropped, which cancels its sequence.
pub(super) struct Race {
    pub(super) first: Box<RouteRun>,
    pub(super) second: Box<RouteRun>,
    /// Events of the second route before its first token. The reader gets them if the second route wins.
    pub(super) held_back: Vec<SequenceEvent>,
}

/// The next event of a race.
pub(super) enum RaceEvent {
    First(Result<SequenceEvent, EngineError>),
    Second(Result<SequenceEvent, EngineError>),
    /// The first route counts as stuck.
    FirstIsStuck,
}

impl Race {
    pub(super) async fn next(&mut self) -> RaceEvent {
        tokio::select! {
            biased;
            event = next_of(&mut self.first.events) => RaceEvent::First(event),
            event = next_of(&mut self.second.events) => RaceEvent::Second(event),
            // The deadline of a late token has passed.
            _ = self.first.deadline.overdue() => RaceEvent::FirstIsStuck,
        }
    }

    /// The route that is further, which the sequence's place is for.
    pub(super) fn ahead(&self) -> &RouteRun {
        if self.second.slot_use > self.first.slot_use { &self.second } else { &self.first }
    }

    /// Cancels the first route. The second route then gives all its events from the start.
    pub(super) fn into_second(self) -> Box<RouteRun> {
        let mut run = self.second;
        run.events = futures::stream::iter(self.held_back).map(Ok).chain(run.events).boxed();
        run
    }
}

/// Starts `request` a second time, on another decode node than `late`'s. Errors: no other node is ready.
pub(super) fn start(
    late: &Plan,
    request: &SequenceRequest,
    mark: &PoisonMark,
    span: &Span,
) -> Result<RouteRun, RequestError> {
    let mut request = request.clone();
    // The other choices of the group stay on the first node.
    request.group = None;
    let exclude = [&[late.route.decode][..], &mark.avoided(&late.model)].concat();
    // The first route may be waiting for its prefill node.
    let exclude_prefill = [late.route.prefill.as_slice(), &mark.avoided_prefill(&late.model)].concat();
    let asked = PlanRequest {
        policy: late.asked_policy,
        exclude: &exclude,
        exclude_prefill: &exclude_prefill,
        ..PlanRequest::of_sequence(&request)
    };
    let mut plan = plan::plan(&late.model, &asked)?;
    if exclude.contains(&plan.route.decode) {
        return Err(EngineError::Unavailable { reason: "no other node is ready".into() }.into());
    }
    plan.n_before = late.n_before;
    let node = &plan.decode().name;
    let span = tracing::info_span!(target: TARGET, parent: span, "decode", node, hedged = true);
    plan.name_sources(&mut request, &span);
    let mut run = RouteRun { is_first_route: false, ..RouteRun::claim(plan, mark) };
    // The node is asked when the stream is first polled, so that the first route runs while its answer is awaited.
    let mut events = futures::stream::once(accept(&run.plan, request, &span)).try_flatten();
    let events = async_stream::stream! {
        // The stream owns the span, so that both end together.
        let _span = span;
        while let Some(event) = events.next().await {
            yield event;
        }
    };
    run.events = events.boxed();
    Ok(run)
}
