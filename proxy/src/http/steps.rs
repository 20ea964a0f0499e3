//! A request as one stream from 'asked' to 'finished', for dialects to turn into their events.
//!
//! It is lazy and owns everything: nothing runs before the first poll, and dropping it at any point cancels the
//! request, whether it still waits for admission or is generating.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_schemas::generate::Sampling;
use baton_schemas::{EngineError, GenerateRequest};
use futures::stream::SelectAll;
use futures::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;

use super::HttpBackend;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::caller::Caller;
use crate::request::generate::Generation;

/// When the server is told to stop and its deadline for running requests has passed. An extension of each request.
#[derive(Debug, Clone, Default)]
pub struct DrainDeadline(pub CancellationToken);

/// When the server is told to stop: streams that would never end by themselves end then. An extension of each request.
#[derive(Debug, Clone, Default)]
pub struct Stopping(pub CancellationToken);

/// What happens to a request, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// It was admitted. Always first.
    Accepted {
        /// Tokens in the rendered prompt.
        n_prompt: u32,
        /// For `x-baton-route`.
        route: String,
        /// How tokens are drawn.
        sampling: Sampling,
    },
    /// It goes on.
    Event(ReplyEvent),
}

impl Step {
    /// The route that the request is on, if this says it: the last one that was said is the one.
    pub fn route(&self) -> Option<&str> {
        match self {
            Step::Accepted { route, .. } | Step::Event(ReplyEvent { kind: EventKind::Rerouted { route }, .. }) => {
                Some(route)
            }
            Step::Event(_) => None,
        }
    }
}

/// Ends after every choice has finished, or with one error: a stream that just stops is not a success, and clients
/// could not tell.
pub type Steps = Pin<Box<dyn Stream<Item = Result<Step, RequestError>> + Send>>;

/// Starts a request, once polled.
pub fn steps(backend: Arc<dyn HttpBackend>, request: GenerateRequest, caller: Caller, drain: DrainDeadline) -> Steps {
    let steps = async_stream::try_stream! {
        let mut n_open = request.n;
        let generation = or_drained(&drain, backend.generate(request, caller)).await??;
        let Generation { n_prompt, route, sampling, mut events } = generation;
        yield Step::Accepted { n_prompt, route, sampling };
        while n_open > 0 {
            let event = or_drained(&drain, events.next()).await?.ok_or_else(cut_short)??;
            if matches!(event.kind, EventKind::Finished { .. }) {
                n_open -= 1;
            }
            yield Step::Event(event);
        }
    };
    // The layer that catches handlers' panics does not see a body's. Uncaught, one would close the connection under a
    // stream, and all a client could tell is that something is missing.
    Box::pin(AssertUnwindSafe(steps).catch_unwind().map(|step| step.unwrap_or_else(|panic| Err(panicked(&*panic)))))
}

/// Several requests as one reply: choice `i` of the k-th is choice `k · n_each + i`. The first error ends it, and drops
/// the others with it.
pub fn side_by_side(requests: Vec<Steps>, n_each: u32) -> Steps {
    let renumbered = (0..).zip(requests).map(|(k, steps)| {
        let first = n_each.saturating_mul(k);
        steps.map(move |step| step.map(|step| renumber(step, first))).boxed()
    });
    let mut merged: SelectAll<_> = renumbered.collect();
    Box::pin(async_stream::try_stream! {
        while let Some(step) = merged.next().await {
            yield step?;
        }
    })
}

fn renumber(mut step: Step, first: u32) -> Step {
    if let Step::Event(event) = &mut step {
        event.choice = event.choice.saturating_add(first);
    }
    step
}

fn panicked(panic: &(dyn Any + Send)) -> RequestError {
    EngineError::internal(format_args!("panic: {}", panic_message(panic))).into()
}

/// The words of a panic, for the log.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let formatted = panic.downcast_ref::<String>().map(String::as_str);
    formatted.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}

/// Runs a stage of a request, but not past the drain deadline. The stage is dropped then, which cancels it.
pub(super) async fn or_drained<T>(drain: &DrainDeadline, stage: impl Future<Output = T>) -> Result<T, RequestError> {
    drain.0.run_until_cancelled(stage).await.ok_or_else(is_stopping)
}

/// Why, from a server that was told to stop.
pub(super) const STOPPING: &str = "the server is stopping";

/// The error of what such a server does not answer.
pub(super) fn is_stopping() -> RequestError {
    RequestError::Unavailable { reason: STOPPING.to_owned(), retry_after: Duration::from_secs(1) }
}

fn cut_short() -> RequestError {
    EngineError::lost("the event stream ended before every choice had finished").into()
}
