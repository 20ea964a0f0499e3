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

use super::retryable::{has_other_engine, is_engine_failure, is_transient};
use crate::error::RequestError;
use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::{FallbackReason, Node, Task};

/// How long a request that lost an engine before it was accepted looks for another one.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// The pause between two retries.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A request's attempts to start.
#[derive(Debug, Default)]
pub struct StartRetry {
    failed: Vec<usize>,
    /// One of `failed` was asked again, and failed or refused again.
    was_repeated: bool,
    deadline: Option<Instant>,
    /// The first failure that an engine reported. One more engine is asked; if it fails too, the client gets this error.
    engine_failure: Option<EngineError>,
    has_upstream: bool,
    image_need: ImageNeed<'static>,
}

impl StartRetry {
    /// The attempts of a request with these images.
    pub fn about(images: &[Image]) -> StartRetry {
        StartRetry { image_need: ImageNeed::of_images(images), ..StartRetry::default() }
    }

    /// An upstream can answer instead. Each node is asked once, and no lost node is waited for.
    #[must_use]
    pub fn with_upstream(self) -> StartRetry {
        StartRetry { has_upstream: true, ..self }
    }

    /// Decode nodes that failed or refused this request, as indices of the model's list.
    pub fn failed(&self) -> &[usize] {
        &self.failed
    }

    /// The projector that the request's images need.
    pub fn image_need(&self) -> ImageNeed<'static> {
        self.image_need
    }

    /// A node answered: the deadline starts again with the next loss.
    pub fn progressed(&mut self) {
        self.deadline = None;
    }

    /// Notes the outcome of asking a decode node. A node that was lost, failed or refused is asked again only after the
    /// others.
    pub fn note<T>(&mut self, model: &ServedModel, node: &Arc<Node>, outcome: &Result<T, EngineError>) {
        let Err(error) = outcome else { return };
        if error.is_lost_engine() {
            node.failed(Task::Decode, FailureReason::DecodeLost);
        }
        if is_engine_failure(error) {
            node.failed(Task::Decode, FailureReason::EngineFailed);
        }
        if is_transient(error) || is_engine_failure(error) {
            let idx = model.decode.iter().position(|other| Arc::ptr_eq(other, node));
            match idx.filter(|idx| !self.failed.contains(idx)) {
                Some(idx) => self.failed.push(idx),
                None => self.was_repeated = true,
            }
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
        let outcome = node.call(call).await;
        if let Err(RequestError::Engine(error)) = &outcome {
            self.note::<()>(model, node, &Err(error.clone()));
        }
        outcome
    }

    /// Decides about a retry after this failure. Returns, after a pause if that helps, if the request should be retried.
    /// Errors: there is no further attempt, and the client gets this error.
    pub async fn go_on(&mut self, model: &ServedModel, error: RequestError) -> Result<(), RequestError> {
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
            EngineError::QueueFull { .. } => self.may_ask_another(model, FallbackReason::DecodeBusy),
            EngineError::Unavailable { .. } => self.may_ask_another(model, FallbackReason::DecodeUnavailable),
            error if error.is_lost_engine() => self.may_retry_lost(model, error).await,
            error if is_engine_failure(error) => self.may_retry_failed(model, error),
            _ => false,
        }
    }

    /// The engine refused; another one may have room.
    fn may_ask_another(&self, model: &ServedModel, reason: FallbackReason) -> bool {
        let has_another = !self.has_asked_all(model);
        if has_another {
            model.fallbacks.count(reason);
        }
        has_another
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
            self.failed.clear();
            self.was_repeated = false;
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
    call: impl Fn(Arc<Node>, Arc<NodeInfo>) -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    let mut retry = StartRetry::about(images);
    loop {
        let outcome = match model.ready_node(name, retry.failed(), retry.image_need()).await {
            Ok((node, info)) => retry.call(model, node, call(Arc::clone(node), info)).await,
            Err(error) => Err(error),
        };
        match outcome {
            Err(error) => retry.go_on(model, error).await?,
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests;
