//! Streams a request's steps as a reply, in the form of a dialect.
//!
//! The head waits for the first result, so that an early failure keeps its status, but not so long that the client
//! gives up. After the head, heartbeats are sent during silence, and a failure becomes the last event.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderName, HeaderValue, header};
use tokio::time::{Instant, timeout_at};

use super::HttpConfig;
use super::errors::HttpFailure;
use super::request_steps::{RequestStep, RequestSteps};
use super::route_header::insert_route;
use crate::error::RequestError;
use crate::request::caller::Caller;

/// Writes a dialect's stream.
pub(super) trait StreamWriter: Send + 'static {
    /// The reply's `Content-Type`.
    const CONTENT_TYPE: &'static str;

    /// Writes a step: often one event, sometimes nothing.
    fn write(&mut self, step: &RequestStep) -> String;

    /// Writes the end of a successful stream.
    fn finish(&mut self) -> String;

    /// Writes the end of a failed stream. It must not look like a success.
    fn fail(&mut self, failure: HttpFailure) -> String;

    /// Writes text that clients skip and proxies count as traffic. `place` is the request's position in the queue while
    /// it waits for admission.
    fn heartbeat(&self, place: Option<usize>) -> String;
}

/// Answers with a stream, or with an error if the request fails before its head is due.
pub(super) async fn respond<W: StreamWriter>(
    mut steps: RequestSteps,
    writer: W,
    config: &HttpConfig,
    caller: &Caller,
) -> Result<Response, RequestError> {
    let patience = config.head_hold.saturating_sub(caller.body.waited());
    let held = await_first_result(&mut steps, patience).await?;
    let route = held.iter().rev().find_map(RequestStep::route).unwrap_or_default().to_owned();
    let body = Body::from_stream(events(held, steps, writer, config.heartbeat, caller.clone()));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(W::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // By default, nginx buffers the replies that it proxies.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    insert_route(headers, &route);
    Ok(response)
}

/// Collects the steps up to the first result, or those that arrive in time. Errors: the request failed in this time.
async fn await_first_result(steps: &mut RequestSteps, patience: Duration) -> Result<Vec<RequestStep>, RequestError> {
    let deadline = Instant::now() + patience;
    let mut held = Vec::new();
    // A timeout loses nothing: the next step stays in the stream.
    while let Ok(Some(step)) = timeout_at(deadline, steps.next()).await {
        held.push(step?);
        if matches!(held.last(), Some(RequestStep::Event(event)) if event.kind.is_result()) {
            break;
        }
    }
    Ok(held)
}

/// Writes the body. Dropping it drops the steps, which cancels the request.
fn events(
    held: Vec<RequestStep>,
    mut steps: RequestSteps,
    mut writer: impl StreamWriter,
    heartbeat: Duration,
    caller: Caller,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    async_stream::stream! {
        let opening: String = held.iter().map(|step| writer.write(step)).collect();
        // Some proxies hold back a head until the first event; a heartbeat gets it through.
        yield Ok(if opening.is_empty() { writer.heartbeat(caller.admission.position()) } else { opening }.into());
        let mut last_sent = Instant::now();
        loop {
            let events = match timeout_at(last_sent + heartbeat, steps.next()).await {
                Err(_silent) => writer.heartbeat(caller.admission.position()),
                Ok(Some(Ok(step))) => writer.write(&step),
                Ok(Some(Err(error))) => {
                    yield Ok(writer.fail(HttpFailure::of_request(&error, &caller.request_id)).into());
                    break;
                }
                Ok(None) => {
                    yield Ok(writer.finish().into());
                    break;
                }
            };
            if !events.is_empty() {
                yield Ok(events.into());
                last_sent = Instant::now();
            }
        }
    }
}
