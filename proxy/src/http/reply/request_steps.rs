//! A request as one stream of events, from admission to its end. Dialects translate them to their own. The stream ends after
//! every choice has finished, or with one error: a stream that merely stopped would look like a success.
//!
//! The stream is lazy and owns the request: nothing runs before the first poll, and dropping it cancels the request at
//! any point.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use baton_schemas::{EngineError, GenerateRequest};
use futures::StreamExt;
use futures::stream::{FuturesUnordered, SelectAll};
use tokio_util::sync::CancellationToken;

use super::super::HttpBackend;
use crate::account::request_memory::HeldPart;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::caller::Caller;
use crate::request::generate::{EventStream, Generation};
use crate::request::warnings::Warning;

/// Cancelled when the server stops and its deadline for running requests has passed. An extension of each request.
#[derive(Debug, Clone, Default)]
pub struct DrainDeadline(pub CancellationToken);

/// The deadline as a route takes it.
pub(in crate::http) type Drain = Option<Extension<DrainDeadline>>;

/// Cancelled when the server begins to stop, which ends streams that never end by themselves. An extension of each
/// request.
#[derive(Debug, Clone, Default)]
pub struct Stopping(pub CancellationToken);

/// Starts a request on the first poll.
pub fn steps(
    backend: Arc<dyn HttpBackend>,
    request: GenerateRequest,
    caller: Caller,
    drain: DrainDeadline,
) -> EventStream {
    if !request.tools.skipped.is_empty() {
        caller.warnings.add(Warning::NotOffered(request.tools.skipped.clone()));
    }
    // Before the first poll: the prompts of one body wait in different steps.
    let mut memory = caller.memory.part();
    let steps = async_stream::try_stream! {
        let mut n_open = request.n;
        let n_kept = request.kept_bytes();
        let generation = or_drained(&drain, backend.generate(request, caller)).await??;
        memory.shrink_to(n_kept);
        let Generation { n_prompt, route, sampling, mut events } = generation;
        yield EventKind::Accepted { n_prompt, route, sampling: Box::new(sampling) }.of(0);
        // Polled only after it was woken: all requests share the lock of the token.
        let mut drained = FuturesUnordered::from_iter([drain.0.cancelled_owned()]);
        while n_open > 0 {
            let event = tokio::select! {
                biased;
                event = events.next() => event.unwrap_or_else(|| Err(cut_short())),
                _ = drained.next() => Err(is_stopping()),
            };
            let event = event?;
            if matches!(event.kind, EventKind::Finished { .. }) {
                n_open -= 1;
            }
            yield event;
        }
    };
    // The layer that catches panics in handlers does not cover bodies. An uncaught panic would close the connection
    // without an error event.
    Box::pin(AssertUnwindSafe(steps).catch_unwind().map(|step| step.unwrap_or_else(|panic| Err(panicked(&*panic)))))
}

/// Keeps the memory of a part of the request until the steps are dropped: what the reply repeats of it.
pub(in crate::http) fn keeping(part: HeldPart, steps: EventStream) -> EventStream {
    Box::pin(steps.inspect(move |_| _ = &part))
}

/// Merges several requests into one reply: choice `i` of request `k` becomes choice `k · n_each + i`. The first error
/// ends the stream and cancels the other requests.
pub fn side_by_side(mut requests: Vec<EventStream>, n_each: u32) -> EventStream {
    if requests.len() == 1
        && let Some(only) = requests.pop()
    {
        return only;
    }
    let renumbered = (0..).zip(requests).map(|(k, steps)| {
        let first = n_each.saturating_mul(k);
        let renumber = move |event: ReplyEvent| event.kind.of(event.choice.saturating_add(first));
        steps.map(move |event| event.map(renumber)).boxed()
    });
    let mut merged: SelectAll<_> = renumbered.collect();
    Box::pin(async_stream::try_stream! {
        while let Some(step) = merged.next().await {
            yield step?;
        }
    })
}

fn panicked(panic: &(dyn Any + Send)) -> RequestError {
    EngineError::internal(format_args!("panic: {}", panic_message(panic))).into()
}

/// Returns the message of a panic, for the log.
pub(in crate::http) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let formatted = panic.downcast_ref::<String>().map(String::as_str);
    formatted.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}

/// Runs a stage of a request until the drain deadline at most. Then the stage is dropped, which cancels it.
pub(in crate::http) async fn or_drained<T>(
    drain: &DrainDeadline,
    stage: impl Future<Output = T>,
) -> Result<T, RequestError> {
    drain.0.run_until_cancelled(stage).await.ok_or_else(is_stopping)
}

/// The error text while the server is stopping.
pub(in crate::http) const STOPPING: &str = "the server is stopping";

/// The error of requests that arrive while the server stops.
pub(in crate::http) fn is_stopping() -> RequestError {
    RequestError::Unavailable { reason: STOPPING.to_owned(), retry_after: Duration::from_secs(1) }
}

fn cut_short() -> RequestError {
    EngineError::lost("the event stream ended before every choice had finished").into()
}
