//! Continuing a sequence on another engine, or on the same one once it is back.

use std::sync::Arc;
use std::time::Duration;

use baton_link::awake;
use baton_planner::reason::FailureReason;
use baton_schemas::{EngineError, SequenceRequest};
use tokio::time::Instant;
use tracing::Span;

use super::poison::PoisonMark;
use super::retryable::{is_engine_failure, is_transient};
use super::route_run::{RouteRun, accept};
use crate::error::RequestError;
use crate::request::plan::{self, Plan, PlanRequest};
use crate::targets::models::ImageNeed;
use crate::targets::nodes::{FallbackReason, Task};

/// The pause between two attempts to find an engine.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How long to look for an engine. This outlasts the restart of a local engine, and of a node that its machine's service
/// manager starts again.
pub(super) const TAKE_UP_DEADLINE: Duration = Duration::from_secs(30);

/// The longest time for which a stream lets streams with less to compute go first, and the tokens of such a stream. Less
/// than the time to compute so many tokens.
const LONGEST_HEAD_START: Duration = Duration::from_millis(500);
const LONG_REPLAY: usize = 8 << 10;

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
    mark: &'a mut PoisonMark,
    /// Until then the choice waits for a node that it need not keep away from. Set when a node is ready.
    alone_until: Option<Instant>,
    span: &'a Span,
}

/// Starts the rest of a sequence on an engine that accepts it. Errors: the sequence's own error, or the first loss if no
/// engine accepts within [`TAKE_UP_DEADLINE`].
pub(super) async fn take_up(
    lost: LostRoute,
    request: &mut SequenceRequest,
    mark: &mut PoisonMark,
    span: &Span,
) -> Result<RouteRun, EngineError> {
    // The other choices of the group stay where they are.
    request.group = None;
    tokio::time::sleep(head_start(request.prompt.len() + request.generated.len())).await;
    let longest = lost.plan.model.deadlines.max;
    let mut began = Instant::now();
    let mut deadline = began + TAKE_UP_DEADLINE;
    let decode = lost.plan.route.decode;
    let barred = is_engine_failure(&lost.error).then_some(decode);
    let mut search = EngineSearch { lost: &lost, barred, failed: vec![decode], mark, alone_until: None, span };
    loop {
        if search.mark.take_turn().await {
            // The wait for the turn is no part of the search.
            began = Instant::now();
            deadline = began + TAKE_UP_DEADLINE;
        }
        if let Some(poison) = search.mark.verdict().await {
            lost.plan.model.fallbacks.count(FallbackReason::Poison);
            return Err(poison);
        }
        match search.start_rest(request).await {
            Ok(run) => return Ok(run),
            Err(RequestError::Engine(error)) if !is_transient(&error) => return Err(error),
            Err(error) => {
                if matches!(&error, RequestError::Engine(error) if error.is_busy()) {
                    // A full engine works, so a place will become free.
                    deadline = (Instant::now() + TAKE_UP_DEADLINE).min(began + longest);
                }
                tracing::debug!(%error, "no engine continues the stream yet; trying again");
            }
        }
        if Instant::now() >= deadline {
            return Err(lost.error);
        }
        // Failed nodes may be back by now, or have room.
        if search.failed.len() >= lost.plan.model.n_supporting(ImageNeed::of_prompt(request.projector())) {
            search.failed = barred.into_iter().collect();
        }
        // Many streams lose one engine at the same moment, and must not ask the others in step.
        let due = Instant::now() + RETRY_PAUSE.mul_f64(rand::random_range(0.5..1.5));
        tokio::time::sleep_until(due).await;
        if awake::has_overslept(due) {
            deadline = Instant::now() + TAKE_UP_DEADLINE;
        }
    }
}

/// The time before a stream looks for another engine: streams with less to compute go first, because they are done first.
fn head_start(n_tokens: usize) -> Duration {
    let share = (n_tokens as f64 / LONG_REPLAY as f64).min(1.0);
    LONGEST_HEAD_START.mul_f64(share * rand::random_range(0.5..1.5))
}

impl EngineSearch<'_> {
    /// Starts the rest of the sequence on the best node that has not failed yet. Errors: why there is none; a node that
    /// refuses counts as failed.
    async fn start_rest(&mut self, request: &mut SequenceRequest) -> Result<RouteRun, RequestError> {
        self.mark.leave();
        let model = &self.lost.plan.model;
        let need = ImageNeed::of_prompt(request.projector());
        model.ready_node(None, &[], need).await?;
        let alone_until = *self.alone_until.get_or_insert_with(|| Instant::now() + self.mark.patience());
        let exclude = match self.mark.left_out(model, &self.failed, need) {
            Some(left_out) => left_out,
            None if Instant::now() < alone_until => return Err(others_first()),
            None => self.failed.clone(),
        };
        let plan = self.plan(request, &exclude)?;
        let entered = self.mark.enter(plan.decode(), alone_until).await;
        if !entered.inspect_err(|_| self.failed.push(plan.route.decode))? {
            return Err(others_first());
        }
        plan.name_sources(request, self.span);
        let mut run = RouteRun { is_first_route: false, ..RouteRun::claim(plan, self.mark) };
        run.events = accept(&run.plan, request.clone(), self.span).await.inspect_err(|error| {
            self.failed.push(run.plan.route.decode);
            if error.is_lost_engine() {
                run.plan.decode().failed(Task::Decode, FailureReason::DecodeLost);
                self.mark.lost(&run.visit);
            }
        })?;
        run.began = Instant::now();
        tracing::info!(route = %run.plan, n_generated = request.generated.len(), "another engine continues the stream");
        Ok(run)
    }

    fn plan(&self, request: &SequenceRequest, exclude: &[usize]) -> Result<Plan, RequestError> {
        let model = &self.lost.plan.model;
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        let asked = PlanRequest {
            tokens: &tokens,
            n_replayed: u32::try_from(tokens.len() - 1 - request.n_prefill()).unwrap_or(u32::MAX),
            max_tokens: request.max_tokens.map(|n| n.saturating_sub(request.generated.len() as u32)),
            policy: self.lost.plan.asked_policy,
            exclude,
            exclude_prefill: &self.mark.avoided_prefill(model),
            ..PlanRequest::of_sequence(request)
        };
        let mut plan = plan::plan(&Arc::clone(model), &asked)?;
        if self.barred == Some(plan.route.decode) {
            return Err(EngineError::Unavailable { reason: "no other engine is ready".into() }.into());
        }
        plan.n_before = self.lost.plan.n_before;
        Ok(plan)
    }
}

/// Each node has another choice in its quarantine.
fn others_first() -> RequestError {
    EngineError::Unavailable { reason: "other streams that lost their engine are continued first".into() }.into()
}
