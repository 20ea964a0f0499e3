//! One engine's run of a sequence on one route: its stream, claims, deadlines and measured times.

use std::sync::Arc;

use baton_link::SequenceStream;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use super::poison::{PoisonMark, Visit};
use super::token_deadline::{Overdue, TokenDeadline};
use super::well_formed::AllowedEvents;
use crate::admission::SlotUse;
use crate::request::plan::{Plan, is_whole};
use crate::targets::nodes::NodeClaim;

/// A sequence on one route. Dropping it cancels the sequence there and returns its claims.
pub(super) struct RouteRun {
    pub(super) plan: Plan,
    pub(super) events: SequenceStream,
    pub(super) claims: Vec<NodeClaim>,
    /// When the plan was made; after a lost engine, when this engine accepted the rest.
    pub(super) began: Instant,
    /// Tokens that a sequence may hold on the decode node. Known even after that node is gone.
    pub(super) n_ctx: usize,
    pub(super) deadline: TokenDeadline,
    /// False if another engine was lost before, or if this is the second of two routes. The run's times then say nothing
    /// about the plan's prediction.
    pub(super) is_first_route: bool,
    pub(super) has_token: bool,
    /// The use of its slot, as its events say.
    pub(super) slot_use: SlotUse,
    /// The request on its decode node, and on the node that computes its prompt, if that is another one.
    pub(super) visit: Visit,
    pub(super) prefill_visit: Option<Visit>,
    pub(super) times: RunTimes,
}

/// Measured times of a run, kept until they correct a prediction.
#[derive(Default)]
pub(super) struct RunTimes {
    pub(super) handoff: Option<HandoffReport>,
    /// From the plan to the slot on the decode node.
    pub(super) slot_ms: f64,
    /// From the plan to the first token of a direct route.
    pub(super) first_token_ms: Option<f64>,
}

/// The next event of a run.
pub(super) enum RunEvent {
    Sequence(Result<SequenceEvent, EngineError>),
    Overdue(Overdue),
}

impl RouteRun {
    /// Claims the plan's nodes. Asks no engine: `events` is empty until the caller sets it.
    pub(super) fn claim(plan: Plan, mark: &PoisonMark) -> RouteRun {
        RouteRun {
            visit: mark.visit(plan.decode()),
            prefill_visit: plan.prefill().map(|node| mark.visit(node)),
            events: futures::stream::empty().boxed(),
            claims: plan.claim(),
            began: Instant::now(),
            n_ctx: n_ctx_of(&plan),
            deadline: TokenDeadline::first_token(&plan),
            is_first_route: true,
            has_token: false,
            slot_use: SlotUse::NoSlot,
            times: RunTimes::default(),
            plan,
        }
    }

    /// Waits for the next event, or for the next deadline if that is earlier.
    pub(super) async fn next(&mut self) -> RunEvent {
        tokio::select! {
            biased;
            event = next_of(&mut self.events) => RunEvent::Sequence(event),
            overdue = self.deadline.overdue() => RunEvent::Overdue(overdue),
        }
    }

    /// The sequence has a slot that holds the KV of `n_cached` of its tokens. Returns true if the plan changed because
    /// nothing is left to hand over.
    pub(super) fn has_slot(&mut self, n_cached: u32, request: &SequenceRequest) -> bool {
        self.deadline.restart();
        self.times.slot_ms = self.elapsed_ms();
        self.claims.iter_mut().filter(|claim| !claim.is_of_prompt()).for_each(NodeClaim::has_slot);
        self.plan.decode().note_held(self.plan.promised.decode, n_cached);
        let needs_no_prefill = self.plan.prefill().is_some() && is_whole(n_cached, request.n_prefill());
        if needs_no_prefill {
            self.plan.model.handoff_untried(self.plan.route);
            self.plan = self.plan.cached();
            self.claims = self.plan.claim();
            self.prefill_visit = None;
        }
        needs_no_prefill
    }

    /// The node that computes the prompt has begun, or another one has computed it.
    pub(super) fn prefill_begun(&mut self) {
        self.claims.iter_mut().for_each(NodeClaim::has_slot);
    }

    /// Notes what an event says of the slot's use. A prompt that another node computes may wait in that node's queue, until its
    /// decode node says that it has begun; those of older versions do not.
    pub(super) fn note_use(&mut self, event: &SequenceEvent, request: &SequenceRequest) {
        let says_later =
            self.plan.prefill().is_some() && self.plan.decode().info().is_some_and(|info| info.reports_begin);
        self.slot_use = match event {
            SequenceEvent::Started(cached) if says_later && !is_whole(cached.n_cached, request.n_prefill()) => {
                SlotUse::PromptWaits
            }
            // Whatever follows the start shows that the prompt waits no longer.
            _ => SlotUse::Working,
        };
    }

    /// Counts a late token. The wait goes on.
    pub(super) fn count_late(&mut self) {
        self.deadline.set_late();
        let node = &self.plan.decode().name;
        let reason = self.deadline.reason;
        self.plan.model.fallbacks.count(reason);
        let waited_ms = self.began.elapsed().as_millis();
        tracing::warn!(node, reason = reason.as_str(), waited_ms, "a token is late; the wait goes on");
    }

    pub(super) fn elapsed_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e3
    }
}

/// The next event. A stream that ends without a last event has lost its engine.
pub(super) async fn next_of(events: &mut SequenceStream) -> Result<SequenceEvent, EngineError> {
    events.next().await.unwrap_or_else(|| Err(EngineError::lost("no last event")))
}

/// Asks a plan's decode node to accept a sequence. What it computes for a key that was removed does not stay. Errors: the node's
/// refusal, or that it is lost.
pub(super) fn accept(
    plan: &Plan,
    mut request: SequenceRequest,
    span: &Span,
) -> BoxFuture<'static, Result<SequenceStream, EngineError>> {
    let node = Arc::clone(plan.decode());
    request.ephemeral |= plan.model.removed_keys.contains(request.cache_scope);
    let allowed = AllowedEvents::of(&request, n_ctx_of(plan));
    let accepted = async move { Ok(allowed.checked(node.call(node.engine.generate(request)).await?)) };
    accepted.instrument(span.clone()).boxed()
}

/// Tokens that a sequence may hold on the plan's decode node.
fn n_ctx_of(plan: &Plan) -> usize {
    plan.decode().info().map_or(usize::MAX, |info| info.n_ctx as usize)
}
