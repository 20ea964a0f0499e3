//! A choice that starts after the others of its request, once there is a place for it.

use std::sync::Arc;
use std::time::Duration;

use baton_link::SequenceStream;
use baton_link::trace::TARGET;
use baton_planner::policy::Policy;
use baton_schemas::{EngineError, SequenceRequest};
use futures::{StreamExt, TryStreamExt};
use tokio::time::Instant;
use tracing::Span;

use crate::admission::{DEFAULT_MAX_WAIT, RequestPlaces};
use crate::error::RequestError;
use crate::request::failover::{PoisonMark, Resilient, StartRetry};
use crate::request::plan::{Plan, PlanRequest};
use crate::request::seats::{Seats, planned};
use crate::targets::models::NodeWait;

/// The pause before an engine whose queue is full is asked again. The reply has begun, so it waits instead of failing.
const BUSY_PAUSE: Duration = Duration::from_millis(500);

/// A choice that no engine has started.
pub(super) struct LateChoice {
    pub(super) choice: u32,
    /// The plan of the request's first choices. Its decode node has the prompt in its cache.
    pub(super) plan: Plan,
    /// The request, without the choice's own seed. The late choices of a request share it.
    pub(super) sequence: Arc<SequenceRequest>,
    pub(super) policy: Option<&'static dyn Policy>,
    /// Made from the mark of the first choices.
    pub(super) mark: PoisonMark,
    pub(super) request_span: Span,
}

impl LateChoice {
    /// The events of the choice. Waits for its place first.
    pub(super) fn events(self, places: RequestPlaces) -> SequenceStream {
        let started = async move {
            let mut seats = Seats::none(places, 1, NodeWait::ForNodes);
            let mut accepted = self.start(&mut seats).await?;
            accepted.keep_place(seats.held.pop());
            Ok(accepted.into_events())
        };
        futures::stream::once(started).try_flatten().boxed()
    }

    /// Starts the choice by the request's plan, or on another node if that node is lost or refuses.
    async fn start(self, seats: &mut Seats) -> Result<Resilient, EngineError> {
        let model = &self.plan.model;
        let images = self.sequence.images.as_ref().map_or(&[][..], |images| &images.images);
        let mut retry = StartRetry::about(images, self.mark.clone());
        seats.move_to(model, self.plan.decode(), DEFAULT_MAX_WAIT).await.map_err(unavailable)?;
        let give_up_at = Instant::now() + DEFAULT_MAX_WAIT;
        // A choice in quarantine does not follow the others.
        let mut plan = (!retry.mark().is_quarantined()).then(|| self.plan.for_choice(self.choice));
        loop {
            let error = match self.try_start(plan.take(), seats, &mut retry).await {
                Ok(accepted) => return Ok(accepted),
                Err(error) => error,
            };
            match retry.go_on(model, error).await {
                Ok(()) => {}
                Err(RequestError::Engine(error)) if error.is_busy() && Instant::now() < give_up_at => {
                    tokio::time::sleep(BUSY_PAUSE).await;
                    retry.ask_all_again();
                }
                Err(error) => return Err(unavailable(error)),
            }
        }
    }

    /// Starts the choice by this plan if it has a place there, or by a new one.
    async fn try_start(
        &self,
        plan: Option<Plan>,
        seats: &mut Seats,
        retry: &mut StartRetry,
    ) -> Result<Resilient, RequestError> {
        let model = &self.plan.model;
        let left_out = retry.left_out(model);
        let is_open = |plan: &Plan| {
            let decode = plan.route.decode;
            seats.node(model) == Some(decode) && left_out.as_ref().is_some_and(|left_out| !left_out.contains(&decode))
        };
        let plan = match plan.filter(is_open) {
            Some(plan) => plan,
            None => {
                retry.next_node(model, None).await?;
                planned(&self.plan_request(), seats, model, retry).await?.for_choice(self.choice)
            }
        };
        let node = Arc::clone(plan.decode());
        let span = tracing::info_span!(
            target: TARGET,
            parent: &self.request_span,
            "decode",
            choice = self.choice,
            node = node.name
        );
        let visit = retry.visit(&node);
        let sequence = of_choice(&self.sequence, self.choice);
        let accepted = Resilient::begin(plan, sequence, retry.mark().clone(), span).await;
        retry.note(model, &visit, &accepted);
        Ok(accepted?)
    }

    fn plan_request(&self) -> PlanRequest<'_> {
        let SequenceRequest { prompt, cache_scope, max_tokens, images, .. } = &*self.sequence;
        PlanRequest {
            tokens: prompt,
            n_replayed: 0,
            scope: *cache_scope,
            lossless_kv: self.sequence.lossless_kv,
            max_tokens: *max_tokens,
            policy: self.policy,
            projector: images.as_ref().map(|images| images.projector.as_str()),
            seat: None,
            exclude: &[],
            exclude_prefill: &[],
            may_wake: true,
        }
    }
}

/// The request for one choice, which has its own seed.
pub(super) fn of_choice(sequence: &SequenceRequest, choice: u32) -> SequenceRequest {
    let mut sequence = sequence.clone();
    sequence.sampling.seed = sequence.sampling.seed.wrapping_add(u64::from(choice));
    sequence
}

/// The error of a choice whose reply has begun.
fn unavailable(error: RequestError) -> EngineError {
    match error {
        RequestError::Engine(error) => error,
        error => EngineError::Unavailable { reason: error.to_string() },
    }
}
