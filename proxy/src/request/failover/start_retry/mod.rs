//! Retries requests whose node is lost before every choice was accepted.
//!
//! Until then a lost node costs only time: another node, or the restarted one, renders the prompt, accepts the sequence
//! or starts the vectors.

use std::sync::Arc;
use std::time::Duration;

use baton_planner::reason::FailureReason;
use baton_schemas::EngineError;
use baton_schemas::image::Image;
use baton_schemas::node::NodeInfo;
use tokio::time::Instant;

use super::poison::{PoisonMark, Visit};
use super::retryable::{has_other_engine, is_engine_failure, is_transient};
use crate::error::RequestError;
use crate::request::poison_case::PoisonCase;
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{FallbackReason, Node, StateChange, Task};

/// How long a request that lost an engine before it was accepted looks for another one.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// The longest time of waits for those that the request keeps away from, such as the wait to be alone in quarantine, that is no
/// part of the search.
const MAX_WAIT_FOR_OTHERS: Duration = Duration::from_secs(30);

/// The pause between two retries.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How soon a node of another version may be used again, for clients that wait for it.
const VERSION_RETRY: Duration = Duration::from_secs(1);

/// A request's attempts to start.
#[derive(Default)]
pub struct StartRetry {
    failed: Vec<usize>,
    /// One of `failed` was asked again, and failed or refused again.
    was_repeated: bool,
    deadline: Option<Instant>,
    /// All waits so far that moved the deadline.
    wait_for_others: Duration,
    /// The first failure that an engine reported. One more engine is asked; if it fails too, the client gets this error.
    engine_failure: Option<EngineError>,
    has_upstream: bool,
    image_need: ImageNeed<'static>,
    mark: PoisonMark,
    /// The node in whose quarantine the request is, as an index of the model's list.
    quarantined: Option<usize>,
}

impl StartRetry {
    /// The attempts of a prompt with these images, or of one of its choices.
    pub fn about(images: &[Image], mark: PoisonMark) -> StartRetry {
        StartRetry { image_need: ImageNeed::of_images(images), mark, ..StartRetry::default() }
    }

    /// An upstream can answer instead. Each node is asked once, and no lost node is waited for.
    #[must_use]
    pub fn with_upstream(self) -> StartRetry {
        StartRetry { has_upstream: true, ..self }
    }

    /// The request's poison mark, which goes with its sequences.
    pub fn mark(&self) -> &PoisonMark {
        &self.mark
    }

    /// The request goes to this node. [`StartRetry::note`] takes the visit with its outcome.
    pub fn visit(&self, node: &Arc<Node>) -> Visit {
        self.mark.visit(node)
    }

    /// The decode nodes that a plan should leave out if it can, as indices of the model's list: those that failed or refused
    /// this request, and those that it keeps away from. A request in quarantine stays there.
    pub fn exclude(&self, model: &ServedModel) -> Vec<usize> {
        let n_ctx = |i: usize| model.decode[i].info().map_or(0, |info| info.n_ctx);
        let all = 0..model.decode.len();
        match self.quarantined {
            // On a node with a shorter context the reply might be cut.
            Some(own) if all.clone().all(|i| n_ctx(i) <= n_ctx(own)) => all.filter(|i| *i != own).collect(),
            _ => self.left_out(model).unwrap_or_else(|| self.failed.clone()),
        }
    }

    /// The nodes that the next attempt leaves out; `None` if it has to wait for a node that others have for themselves.
    pub fn left_out(&self, model: &ServedModel) -> Option<Vec<usize>> {
        self.mark.left_out(model, &self.failed, self.image_need)
    }

    /// A ready node for the next attempt. A request that needs quarantine waits for its turn, and then to be alone there; others
    /// wait a little for a node without such a request.
    pub async fn next_node<'m>(
        &mut self,
        model: &'m ServedModel,
        name: Option<&str>,
    ) -> Result<(&'m Arc<Node>, Arc<NodeInfo>), RequestError> {
        self.leave_node();
        self.await_turn(model).await?;
        let mut alone_until = None;
        loop {
            let left_out = self.left_out(model);
            let (node, info) =
                model.ready_node(name, left_out.as_ref().unwrap_or(&self.failed), self.image_need).await?;
            let alone_until = *alone_until.get_or_insert_with(|| Instant::now() + self.mark.patience());
            let began = Instant::now();
            let entered = self.mark.enter(node, alone_until).await;
            if let Ok(false) = entered {
                tokio::time::sleep(RETRY_PAUSE.mul_f64(rand::random_range(0.5..1.5))).await;
            }
            self.has_waited_for_others(began.elapsed());
            if entered.inspect_err(|_| self.note_failed(model, node))? {
                let is_own = |other: &Arc<Node>| self.mark.is_quarantined() && Arc::ptr_eq(other, node);
                self.quarantined = model.decode.iter().position(is_own);
                return Ok((node, info));
            }
        }
    }

    /// The next attempt chooses its node anew.
    fn leave_node(&mut self) {
        self.quarantined = None;
        self.mark.leave();
    }

    /// Waits for the turn of a request that needs quarantine. Errors: other choices have shown meanwhile that the request is
    /// the cause.
    async fn await_turn(&mut self, model: &ServedModel) -> Result<(), RequestError> {
        if self.mark.take_turn().await {
            self.deadline = self.deadline.map(|_| Instant::now() + START_DEADLINE);
            self.judge(model).await?;
        }
        Ok(())
    }

    /// A wait for those that the request keeps away from is no part of the search.
    fn has_waited_for_others(&mut self, waited: Duration) {
        let waited = waited.min(MAX_WAIT_FOR_OTHERS - self.wait_for_others);
        self.wait_for_others += waited;
        self.deadline = self.deadline.map(|deadline| deadline + waited);
    }

    /// Errors: the request is the cause of the ends of its engines.
    async fn judge(&mut self, model: &ServedModel) -> Result<(), RequestError> {
        let Some(poison) = self.mark.verdict().await else { return Ok(()) };
        model.fallbacks.count(FallbackReason::Poison);
        Err(poison.into())
    }

    /// A node gave a part of the result: the deadline starts again with the next loss, and the quarantine ends.
    pub fn progressed(&mut self) {
        self.deadline = None;
        self.quarantined = None;
        self.mark.clear();
    }

    /// Every queue was full a while ago: each node is asked again. What is known of lost and failed engines stays.
    pub fn ask_all_again(&mut self) {
        self.forget_failed();
        self.deadline = None;
    }

    /// Notes the outcome of asking a decode node. A node that was lost, failed or refused is asked again only after the
    /// others.
    pub fn note<T>(&mut self, model: &ServedModel, visit: &Visit, outcome: &Result<T, EngineError>) {
        let Err(error) = outcome else { return };
        let node = visit.node();
        if error.is_lost_engine() {
            self.mark.lost(visit);
            node.failed(Task::Decode, FailureReason::DecodeLost);
        }
        if matches!(error, EngineError::Unauthorized) {
            node.failed(Task::Decode, FailureReason::DecodeLost);
        }
        if let EngineError::VersionMismatch(_) = error {
            // It was replaced since it was asked for its description, and is asked again.
            node.health.note_failure(&StateChange::from(error), VERSION_RETRY);
        }
        if is_engine_failure(error) {
            node.failed(Task::Decode, FailureReason::EngineFailed);
        }
        if is_transient(error) || is_engine_failure(error) {
            self.note_failed(model, node);
        }
    }

    fn note_failed(&mut self, model: &ServedModel, node: &Arc<Node>) {
        let idx = model.decode.iter().position(|other| Arc::ptr_eq(other, node));
        match idx.filter(|idx| !self.failed.contains(idx)) {
            Some(idx) => self.failed.push(idx),
            None => self.was_repeated = true,
        }
    }

    /// Returns true if every node that supports the request's images has failed or refused it.
    fn has_asked_all(&self, model: &ServedModel) -> bool {
        self.was_repeated || self.failed.len() >= model.n_supporting(self.image_need)
    }

    /// Awaits a call to a decode node as long as the node shows that it is alive, and notes the outcome.
    pub async fn call<T>(
        &mut self,
        model: &ServedModel,
        node: &Arc<Node>,
        call: impl Future<Output = Result<T, RequestError>>,
    ) -> Result<T, RequestError> {
        let visit = self.visit(node);
        let outcome = node.call(call).await;
        if let Err(RequestError::Engine(error)) = &outcome {
            self.note::<()>(model, &visit, &Err(error.clone()));
        }
        outcome
    }

    /// Calls one of a model's nodes, and another one if that node is lost or silent.
    pub async fn ask<T, F>(
        &mut self,
        model: &ServedModel,
        name: Option<&str>,
        call: impl Fn(Arc<Node>, Arc<NodeInfo>) -> F,
    ) -> Result<T, RequestError>
    where
        F: Future<Output = Result<T, RequestError>>,
    {
        loop {
            let outcome = match self.next_node(model, name).await {
                Ok((node, info)) => self.call(model, node, call(Arc::clone(node), info)).await,
                Err(error) => Err(error),
            };
            match outcome {
                Err(error) => self.go_on(model, error).await?,
                answer => {
                    self.deadline = None;
                    return answer;
                }
            }
        }
    }

    /// Decides about a retry after this failure. Returns, after a pause if that helps, if the request should be retried.
    /// Errors: there is no further attempt, and the client gets this error.
    pub async fn go_on(&mut self, model: &ServedModel, error: RequestError) -> Result<(), RequestError> {
        self.leave_node();
        if let RequestError::Engine(EngineError::Lost { .. }) = &error {
            self.judge(model).await?;
        }
        let has_next = match &error {
            RequestError::Engine(error) => self.may_retry_after(model, error).await,
            RequestError::Unavailable { .. } => self.may_await_lost_node().await,
            _ => false,
        };
        if has_next {
            return Ok(());
        }
        Err(self.engine_failure.take().map_or(error, RequestError::Engine))
    }

    async fn may_retry_after(&mut self, model: &ServedModel, error: &EngineError) -> bool {
        match error {
            error if error.is_busy() => self.may_ask_another(model, FallbackReason::DecodeBusy).await,
            EngineError::Unavailable { .. }
            | EngineError::NoResources { .. }
            | EngineError::Unauthorized
            | EngineError::VersionMismatch(_) => self.may_ask_another(model, FallbackReason::DecodeUnavailable).await,
            error if error.is_lost_engine() => self.may_retry_lost(model, error).await,
            error if is_engine_failure(error) => self.may_retry_failed(model, error),
            _ => false,
        }
    }

    /// The engine refused; another one may have room. One that is lost may be back soon, and is waited for.
    async fn may_ask_another(&mut self, model: &ServedModel, reason: FallbackReason) -> bool {
        if !self.has_asked_all(model) {
            if self.deadline.is_none() {
                model.fallbacks.count(reason);
            }
            return true;
        }
        if self.has_upstream || !model.has_lost_node(self.image_need) {
            return false;
        }
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + START_DEADLINE);
        self.forget_failed();
        tokio::time::sleep(RETRY_PAUSE).await;
        Instant::now() < deadline
    }

    /// All of them may be asked again.
    fn forget_failed(&mut self) {
        self.failed.clear();
        self.was_repeated = false;
    }

    /// The engine is gone or unreachable, which its node's state may not show yet. Nothing was sent to the client.
    async fn may_retry_lost(&mut self, model: &ServedModel, error: &EngineError) -> bool {
        let has_asked_all = self.has_asked_all(model);
        if self.has_upstream && has_asked_all {
            model.fallbacks.count(FallbackReason::DecodeLost);
            return false;
        }
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + START_DEADLINE);
        if Instant::now() >= deadline {
            return false;
        }
        model.fallbacks.count(FallbackReason::DecodeLost);
        tracing::info!(%error, "an engine was lost before its first answer; trying again");
        if has_asked_all {
            // Failed nodes may be back by now.
            self.forget_failed();
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        true
    }

    /// The engine or the request is the cause; one more engine shows which. A second failure is the request's.
    fn may_retry_failed(&mut self, model: &ServedModel, error: &EngineError) -> bool {
        let may_retry = self.engine_failure.is_none() && has_other_engine(model, &self.failed, self.image_need);
        if may_retry {
            model.fallbacks.count(FallbackReason::EngineFailed);
            tracing::warn!(%error, "an engine failed; asking another one");
            self.engine_failure = Some(error.clone());
        }
        may_retry
    }

    /// No node is ready, but the lost one may be back soon.
    async fn may_await_lost_node(&self) -> bool {
        let may_wait = !self.has_upstream && self.deadline.is_some_and(|deadline| Instant::now() < deadline);
        if may_wait {
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        may_wait
    }
}

/// Calls one of a model's nodes, and another one if that node is lost or silent. If the request has `images`, nodes without
/// a projector are skipped while another one may have it.
pub async fn ask<T, F>(
    model: &ServedModel,
    name: Option<&str>,
    images: &[Image],
    case: &PoisonCase,
    call: impl Fn(Arc<Node>, Arc<NodeInfo>) -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    StartRetry::about(images, PoisonMark::of_prompt(case)).ask(model, name, call).await
}

#[cfg(test)]
mod tests;
