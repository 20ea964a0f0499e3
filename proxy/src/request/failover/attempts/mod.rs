//! What has not begun to answer yet is asked again elsewhere when its node is lost.
//!
//! Of a request that no token has come of, nothing is lost with a node but time: prompts are rendered, sequences
//! accepted and vectors begun on another node, or on the restarted one.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::image::Image;
use baton_schemas::node::NodeInfo;
use tokio::time::Instant;

use super::engine_failure::is_engine_failure;
use crate::error::RequestError;
use crate::targets::nodes::{Node, ServedModel, Sight, Task};

/// How long a request that has lost an engine before its first answer looks for one that takes it.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// Between attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A request's attempts to begin.
#[derive(Debug, Default)]
pub struct Attempts {
    failed: Vec<usize>,
    /// One of these was asked once more, and failed or refused again.
    was_repeated: bool,
    deadline: Option<Instant>,
    /// An engine failed at this request. It is asked of one more, and if that is no better, this is what its client is
    /// told.
    engine_failure: Option<EngineError>,
    has_deputy: bool,
    sight: Sight<'static>,
}

impl Attempts {
    /// Of a request with these images.
    pub fn about(images: &[Image]) -> Attempts {
        Attempts { sight: Sight::of(images), ..Attempts::default() }
    }

    /// The same where somebody else can answer, once each node was asked: no lost node is waited for.
    #[must_use]
    pub fn with_deputy(self) -> Attempts {
        Attempts { has_deputy: true, ..self }
    }

    /// See [`with_deputy`](Self::with_deputy).
    pub fn has_deputy(&self) -> bool {
        self.has_deputy
    }

    /// Decode nodes that have failed or refused this request.
    pub fn failed(&self) -> &[usize] {
        &self.failed
    }

    /// What a node has to see for this request.
    pub fn sight(&self) -> Sight<'static> {
        self.sight
    }

    /// There was an answer: the next loss has as much time as the first.
    pub fn progressed(&mut self) {
        self.deadline = None;
    }

    /// Notes what came of asking a decode node. Full, gone or silent, it is not the first to be asked again.
    pub fn note<T>(&mut self, model: &ServedModel, node: &Arc<Node>, outcome: &Result<T, EngineError>) {
        let Err(error) = outcome else { return };
        if error.is_lost_engine() {
            node.failed(Task::Decode, "decode_lost");
        }
        if is_engine_failure(error) {
            node.failed(Task::Decode, "engine_failed");
        }
        if may_pass(error) || is_engine_failure(error) {
            let idx = model.decode.iter().position(|other| Arc::ptr_eq(other, node));
            match idx.filter(|idx| !self.failed.contains(idx)) {
                Some(idx) => self.failed.push(idx),
                None => self.was_repeated = true,
            }
        }
    }

    /// No node that sees what it needs to is left that has not failed or refused this request: one that had was chosen
    /// again, for want of a better.
    fn has_asked_all(&self, model: &ServedModel) -> bool {
        self.was_repeated || self.failed.len() >= model.n_seeing(self.sight)
    }

    /// Waits for a call to a decode node as long as the node shows that it lives, and notes what came of it.
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

    /// Returns if there is to be another attempt after this failure. Counts it, and waits where that helps. Errors:
    /// what the client is told, because there is none.
    pub async fn go_on(&mut self, model: &ServedModel, error: RequestError) -> Result<(), RequestError> {
        if self.may_go_on(model, &error).await {
            return Ok(());
        }
        Err(self.engine_failure.take().map_or(error, RequestError::Engine))
    }

    async fn may_go_on(&mut self, model: &ServedModel, error: &RequestError) -> bool {
        match error {
            // Another engine may have room.
            RequestError::Engine(error @ (EngineError::QueueFull { .. } | EngineError::Unavailable { .. })) => {
                let has_another = !self.has_asked_all(model);
                if has_another {
                    let is_full = matches!(error, EngineError::QueueFull { .. });
                    model.fallbacks.count(if is_full { "decode_busy" } else { "decode_unavailable" });
                }
                has_another
            }
            RequestError::Engine(error) if error.is_lost_engine() && self.has_deputy && self.has_asked_all(model) => {
                model.fallbacks.count("decode_lost");
                false
            }
            // The engine is gone or cut off, which may not have been noticed yet. Nothing was sent to the client.
            RequestError::Engine(error) if error.is_lost_engine() => {
                let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + START_DEADLINE);
                if Instant::now() >= deadline {
                    return false;
                }
                model.fallbacks.count("decode_lost");
                tracing::info!(%error, "the engine was lost: trying again");
                // Those that failed may be back.
                if self.has_asked_all(model) {
                    (self.failed, self.was_repeated) = (Vec::new(), false);
                }
                tokio::time::sleep(RETRY_PAUSE).await;
                true
            }
            // Its fault or the request's: one more engine will show. Two failures are the request's.
            RequestError::Engine(error) if is_engine_failure(error) && self.engine_failure.is_none() => {
                let is_other = |(i, node): (usize, &Arc<Node>)| {
                    !self.failed.contains(&i) && model.ready_seeing(node, self.sight).is_some()
                };
                let has_another = model.decode.iter().enumerate().any(is_other);
                if has_another {
                    model.fallbacks.count("engine_failed");
                    tracing::warn!(%error, "an engine failed: another one is asked");
                    self.engine_failure = Some(error.clone());
                }
                has_another
            }
            // No other is there, but the one that was lost may be back soon.
            RequestError::Unavailable { .. }
                if !self.has_deputy && self.deadline.is_some_and(|deadline| Instant::now() < deadline) =>
            {
                tokio::time::sleep(RETRY_PAUSE).await;
                true
            }
            _ => false,
        }
    }
}

/// Whether another engine, or the same one later, may take what this one refused.
pub(super) fn may_pass(error: &EngineError) -> bool {
    error.is_lost_engine() || matches!(error, EngineError::Unavailable { .. } | EngineError::QueueFull { .. })
}

/// Asks one of a model's nodes something short; another one if that node is lost or silent.
pub async fn ask<T, F>(
    model: &ServedModel,
    name: Option<&str>,
    call: impl Fn(Arc<Node>, Arc<NodeInfo>) -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    ask_about(model, name, &[], call).await
}

/// The same about these images, which a node without a projector is not asked about while another may have one.
pub async fn ask_about<T, F>(
    model: &ServedModel,
    name: Option<&str>,
    images: &[Image],
    call: impl Fn(Arc<Node>, Arc<NodeInfo>) -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    let mut attempts = Attempts::about(images);
    loop {
        let outcome = match model.ready_for(name, attempts.failed(), attempts.sight()).await {
            Ok((node, info)) => attempts.call(model, node, call(Arc::clone(node), info)).await,
            Err(error) => Err(error),
        };
        match outcome {
            Err(error) => attempts.go_on(model, error).await?,
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests;
