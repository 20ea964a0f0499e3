//! A request's steps as server-sent events.
//!
//! The head is held until there is something to say, so that an early failure keeps its status, but not for so long
//! that the client gives up. From then on silence is broken by comments, and a failure is an event.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use baton_schemas::openai::ErrorEnvelope;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::chunks::ChunkWriter;
use super::{ReplyShape, insert_route};
use crate::admission::QueuePlace;
use crate::error::RequestError;
use crate::generate::{Caller, Event};
use crate::http::HttpConfig;
use crate::http::errors::Failure;
use crate::http::event_stream::sse_headers;
use crate::http::steps::{Step, Steps};

/// A comment: every SSE parser skips it, and every proxy counts it as traffic.
const HEARTBEAT: Bytes = Bytes::from_static(b":\n\n");

/// Answers with a stream, or with an error if the request fails before its head is due.
pub(super) async fn respond(
    mut steps: Steps,
    shape: ReplyShape,
    config: &HttpConfig,
    caller: &Caller,
) -> Result<Response, RequestError> {
    let held = hold(&mut steps, config.head_hold).await?;
    let route = match held.first() {
        Some(Step::Accepted { route, .. }) => route.clone(),
        _ => String::new(),
    };
    let body = Body::from_stream(events(held, steps, ChunkWriter::new(shape), config.heartbeat, caller.clone()));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    sse_headers(headers);
    insert_route(headers, &route);
    Ok(response)
}

/// The steps up to the first result, or those that came in time. A failure among them is the whole answer.
async fn hold(steps: &mut Steps, patience: Duration) -> Result<Vec<Step>, RequestError> {
    let deadline = Instant::now() + patience;
    let mut held = Vec::new();
    // Elapsing loses nothing: the step that did not come in time stays in the stream.
    while let Ok(Some(step)) = timeout_at(deadline, steps.next()).await {
        held.push(step?);
        if matches!(held.last(), Some(Step::Event(Event::Text { .. } | Event::Finished { .. }))) {
            break;
        }
    }
    Ok(held)
}

/// The body. Dropping it drops the steps, which cancels the request.
fn events(
    held: Vec<Step>,
    mut steps: Steps,
    mut writer: ChunkWriter,
    heartbeat: Duration,
    caller: Caller,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    async_stream::stream! {
        let opening: String = held.iter().map(|step| writer.write(step)).collect();
        // A head without a first event is held back by some proxies; a comment gets it through.
        yield Ok(if opening.is_empty() { sign_of_life(&caller.place) } else { opening.into() });
        let mut last_sent = Instant::now();
        loop {
            let events = match timeout_at(last_sent + heartbeat, steps.next()).await {
                Err(_silent) => sign_of_life(&caller.place),
                Ok(Some(Ok(step))) => writer.write(&step).into(),
                Ok(Some(Err(error))) => {
                    // No [DONE]: whoever only looks for that must not take this for a success.
                    yield Ok(failed(&error, &caller.request_id));
                    break;
                }
                Ok(None) => {
                    yield Ok(writer.finish().into());
                    break;
                }
            };
            if !events.is_empty() {
                yield Ok(events);
                last_sent = Instant::now();
            }
        }
    }
}

/// A comment, with the place of a request that still waits to be admitted.
fn sign_of_life(place: &QueuePlace) -> Bytes {
    place.get().map_or(HEARTBEAT, |place| format!(": place {place} in the queue\n\n").into())
}

fn failed(error: &RequestError, request_id: &str) -> Bytes {
    super::chunks::event(&ErrorEnvelope { error: Failure::of_request(error, request_id).error }).into()
}
