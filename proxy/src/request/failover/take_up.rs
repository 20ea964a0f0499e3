//! Continuing a sequence on another engine, or on the same one once it is back.

use std::sync::Arc;
use std::time::Duration;

use baton_planner::reason::FailureReason;
use baton_schemas::{EngineError, SequenceRequest};
use tokio::time::Instant;
use tracing::Span;

use super::retryable::{is_engine_failure, is_transient};
use super::route_run::{RouteRun, accept, projector_of};
use crate::error::RequestError;
use crate::request::plan::{self, Plan, PlanRequest};
use crate::targets::models::ImageNeed;
use crate::targets::nodes::Task;

/// The pause between two attempts to find an engine.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How long to look for an engine. This outlasts the restart of a local engine, and of a node that its machine's service
/// manager starts again.
pub(super) const TAKE_UP_DEADLINE: Duration = Duration::from_secs(30);

/// A route whose engine has stopped.
pub(super) struct LostRoute {
    pub(super) plan: Plan,
    pub(super) error: EngineError,
}

/// The search for an engine that continues a sequence.
struct EngineSearch<'a> {
    lost: &'a LostRoute,
    /// The engine that failed at this sequence and does not get it again. A lost engine may get it again.
    barred: Option<usize>,
    /// Decode nodes that were lost, or refused to continue.
    failed: Vec<usize>,
    span: &'a Span,
}

/// Starts the rest of a sequence on an engine that accepts it. Errors: the sequence's own error, or the first loss if no
/// engine accepts within [`TAKE_UP_DEADLINE`].
pub(super) async fn take_up(
    lost: LostRoute,
    request: &mut SequenceRequest,
    span: &Span,
) -> Result<RouteRun, EngineError> {
    // The other choices of the group stay where they are.
    request.group = None;
    let deadline = Instant::now() + TAKE_UP_DEADLINE;
    let decode = lost.plan.route.decode;
    let barred = is_engine_failure(&lost.error).then_some(decode);
    let mut search = EngineSearch { lost: &lost, barred, failed: vec![decode], span };
    loop {
        match search.start_rest(request).await {
            Ok(run) => return Ok(run),
            Err(RequestError::Engine(error)) if !is_transient(&error) => return Err(error),
            Err(error) => tracing::info!(%error, "no engine continues the stream yet; trying again"),
        }
        if Instant::now() >= deadline {
            return Err(lost.error);
        }
        // Failed nodes may be back by now, or have room.
        if search.failed.len() >= lost.plan.model.n_supporting(ImageNeed::of_prompt(projector_of(request))) {
            search.failed = barred.into_iter().collect();
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

impl EngineSearch<'_> {
    /// Starts the rest of the sequence on the best node that has not failed yet. Errors: why there is none; a node that
    /// refuses counts as failed.
    async fn start_rest(&mut self, request: &mut SequenceRequest) -> Result<RouteRun, RequestError> {
        let plan = self.plan(request).await?;
        request.kv_source = plan.kv_source(self.span);
        let mut run = RouteRun { is_first_route: false, ..RouteRun::claim(plan) };
        let decode = run.plan.decode();
        run.events = accept(&run.plan, request.clone(), self.span).await.inspect_err(|error| {
            self.failed.push(run.plan.route.decode);
            if error.is_lost_engine() {
                decode.failed(Task::Decode, FailureReason::DecodeLost);
            }
        })?;
        run.began = Instant::now();
        tracing::info!(route = %run.plan, n_generated = request.generated.len(), "another engine continues the stream");
        Ok(run)
    }

    async fn plan(&self, request: &SequenceRequest) -> Result<Plan, RequestError> {
        let model = &self.lost.plan.model;
        let projector = projector_of(request);
        model.ready_node(None, &[], ImageNeed::of_prompt(projector)).await?;
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        let asked = PlanRequest {
            tokens: &tokens,
            n_replayed: u32::try_from(tokens.len() - 1 - request.n_prefill()).unwrap_or(u32::MAX),
            scope: request.cache_scope,
            max_tokens: request.max_tokens.map(|n| n.saturating_sub(request.generated.len() as u32)),
            policy: self.lost.plan.asked_policy,
            projector,
            exclude: &self.failed,
            exclude_prefill: &[],
        };
        let plan = plan::plan(&Arc::clone(model), &asked)?;
        if self.barred == Some(plan.route.decode) {
            return Err(EngineError::Unavailable { reason: "no other engine is ready".into() }.into());
        }
        Ok(plan)
    }
}
