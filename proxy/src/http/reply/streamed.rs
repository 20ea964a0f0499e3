//! Streams a request's steps as a reply, in the form of a dialect.
//!
//! The head waits for the first result, so that an early failure keeps its status, but not so long that the client
//! gives up. After the head, heartbeats are sent during silence, and a failure becomes the last event.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use baton_upstream::LeftOut;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use http::{HeaderName, HeaderValue, header};
use hyper::body::Frame;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::super::HttpConfig;
use super::super::errors::HttpFailure;
use super::event_stream::write_remark;
use super::route_header::{X_BATON_ROUTE, insert_route, not_known_yet};
use super::warning::{left_out_warning, warn_left_out};
use super::when_woken::WhenWoken;
use crate::error::RequestError;
use crate::reply_event::ReplyEvent;
use crate::request::caller::Caller;
use crate::request::generate::EventStream;

/// The size at which a chunk leaves although more events are ready.
const MAX_CHUNK_BYTES: usize = 16 << 10;

/// Writes a dialect's stream, at the end of a buffer.
pub(in crate::http) trait StreamWriter: Send + Unpin + 'static {
    /// The reply's `Content-Type`.
    const CONTENT_TYPE: &'static str;

    /// Writes an event in the dialect's form: often as one, sometimes as nothing.
    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent);

    /// Writes the end of a successful stream.
    fn finish(&mut self, out: &mut BytesMut);

    /// Writes the end of a failed stream. It must not look like a success.
    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure);

    /// Writes text that clients skip and proxies count as traffic. `place` is the request's position in the queue while
    /// it waits for admission.
    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>);

    /// Names the route after the head, which left before the route was known.
    fn late_route(&mut self, out: &mut BytesMut, route: &str) {
        self.remark(out, &format!("{X_BATON_ROUTE}: {route}"));
    }

    /// Writes a remark that clients skip, if the format has such.
    fn remark(&self, out: &mut BytesMut, text: &str) {
        write_remark(out, text);
    }
}

/// Answers with a stream, or with an error if the request fails before its head is due.
pub(in crate::http) async fn respond<W: StreamWriter>(
    mut steps: EventStream,
    writer: W,
    config: &HttpConfig,
    caller: &Caller,
) -> Result<Response, RequestError> {
    let patience = config.head_hold.saturating_sub(caller.memory.waited());
    let held = await_first_result(&mut steps, patience).await?;
    let route = held.iter().rev().find_map(ReplyEvent::route).unwrap_or_default().to_owned();
    let announced = if route.is_empty() { not_known_yet(&caller.admission) } else { route.clone() };
    let left_out: Vec<LeftOut> = held.iter().filter_map(ReplyEvent::left_out).collect();
    let body = EventBody::new(&held, steps, writer, config.heartbeat, caller.clone()).told(route);
    let mut response = Body::new(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(W::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // By default, nginx buffers the replies that it proxies.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    insert_route(headers, &announced);
    warn_left_out(headers, &left_out);
    Ok(response)
}

/// Collects the steps up to the first result, or those that arrive in time. Errors: the request failed in this time.
async fn await_first_result(steps: &mut EventStream, patience: Duration) -> Result<Vec<ReplyEvent>, RequestError> {
    let deadline = Instant::now() + patience;
    let mut held = Vec::new();
    // A timeout loses nothing: the next step stays in the stream.
    while let Ok(Some(step)) = timeout_at(deadline, steps.next()).await {
        held.push(step?);
        if held.last().is_some_and(|event: &ReplyEvent| event.kind.is_result()) {
            break;
        }
    }
    Ok(held)
}

/// The body of a stream. Events that are ready at the same time leave as one chunk. Dropping the body drops the steps,
/// which cancels the request.
struct EventBody<W> {
    /// `None` after the last event.
    steps: Option<WhenWoken<EventStream>>,
    writer: W,
    /// The route that the client has been told. Empty until one is known.
    route: String,
    /// Events that have not left. The memory of a chunk is used again after the connection has taken the chunk.
    events: BytesMut,
    heartbeat: Duration,
    last_sent: Instant,
    /// Fires at the next heartbeat or earlier. Chunks do not move it, because a timer costs more than a look at the clock.
    timer: Pin<Box<Sleep>>,
    caller: Caller,
}

impl<W: StreamWriter> EventBody<W> {
    fn new(held: &[ReplyEvent], steps: EventStream, mut writer: W, heartbeat: Duration, caller: Caller) -> Self {
        let mut events = BytesMut::new();
        held.iter().for_each(|step| writer.write(&mut events, step));
        if events.is_empty() {
            // Some proxies hold back a head until the first event; a heartbeat gets it through.
            writer.heartbeat(&mut events, caller.admission.position());
        }
        let last_sent = Instant::now();
        let timer = Box::pin(sleep_until(last_sent + heartbeat));
        EventBody {
            steps: Some(WhenWoken::new(steps)),
            writer,
            route: String::new(),
            events,
            heartbeat,
            last_sent,
            timer,
            caller,
        }
    }

    /// Keeps the route that the head names.
    fn told(self, route: String) -> Self {
        EventBody { route, ..self }
    }

    /// Names a route that the head does not name.
    fn tell_route(&mut self, route: &str) {
        // A line break would end the remark.
        if self.route != route && HeaderValue::from_str(route).is_ok() {
            route.clone_into(&mut self.route);
            self.writer.late_route(&mut self.events, route);
        }
    }

    /// Writes the events that are ready.
    fn write_ready(&mut self, context: &mut Context<'_>) {
        while let Some(steps) = &mut self.steps
            && self.events.len() < MAX_CHUNK_BYTES
            && let Poll::Ready(step) = steps.poll_next_unpin(context)
        {
            match step {
                Some(Ok(step)) => {
                    if let Some(left_out) = step.left_out() {
                        self.writer.remark(&mut self.events, &left_out_warning(&[left_out]));
                    }
                    if let Some(route) = step.route() {
                        self.tell_route(route);
                    }
                    self.writer.write(&mut self.events, &step);
                }
                Some(Err(error)) => {
                    self.steps = None;
                    self.writer.fail(&mut self.events, HttpFailure::of_request(&error, &self.caller.request_id));
                }
                None => {
                    self.steps = None;
                    self.writer.finish(&mut self.events);
                }
            }
        }
    }

    /// Waits for the time of the next heartbeat.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let due = self.last_sent + self.heartbeat;
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
    }
}

impl<W: StreamWriter> HttpBody for EventBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.write_ready(context);
        if this.events.is_empty() {
            if this.steps.is_none() {
                return Poll::Ready(None);
            }
            ready!(this.poll_silence(context));
            this.writer.heartbeat(&mut this.events, this.caller.admission.position());
            if this.caller.admission.is_waking() {
                this.writer.remark(&mut this.events, "a machine is being woken");
            }
        }
        this.last_sent = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(this.events.split().freeze()))))
    }
}

#[cfg(test)]
mod tests {
    use futures::stream::{self, BoxStream};
    use tokio::time::sleep;

    use super::*;
    use crate::observe::tests::caller;
    use crate::reply_event::{EventKind, ReplyEvent};

    const HEARTBEAT: Duration = Duration::from_secs(10);

    /// Writes the texts as they are, `.` for the end and `!` for a heartbeat.
    struct Plain;

    impl StreamWriter for Plain {
        const CONTENT_TYPE: &'static str = "text/plain";

        fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
            if let EventKind::Text { text, .. } = &event.kind {
                out.extend_from_slice(text.as_bytes());
            }
        }

        fn finish(&mut self, out: &mut BytesMut) {
            out.extend_from_slice(b".");
        }

        fn fail(&mut self, out: &mut BytesMut, _: HttpFailure) {
            out.extend_from_slice(b"failed");
        }

        fn heartbeat(&self, out: &mut BytesMut, _: Option<usize>) {
            out.extend_from_slice(b"!");
        }

        fn remark(&self, out: &mut BytesMut, text: &str) {
            out.extend_from_slice(format!("({text})").as_bytes());
        }
    }

    fn text(text: &str) -> ReplyEvent {
        EventKind::Text { text: text.to_owned(), tokens: Vec::new() }.of(0)
    }

    fn body(steps: BoxStream<'static, Result<ReplyEvent, RequestError>>) -> EventBody<Plain> {
        EventBody::new(&[text("a")], steps, Plain, HEARTBEAT, caller())
    }

    async fn frame(body: &mut EventBody<Plain>) -> Option<Bytes> {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        Some(frame.unwrap().into_data().unwrap())
    }

    #[tokio::test]
    async fn events_that_are_ready_together_leave_as_one_chunk() {
        let steps = ["b", "c", ""].map(|step| Ok(text(step)));
        let mut ready = body(stream::iter(steps).boxed());
        assert_eq!(frame(&mut ready).await.unwrap(), "abc.");
        assert_eq!(frame(&mut ready).await, None);
        let failed =
            stream::iter([Ok(text("b")), Err(RequestError::unavailable("gone", Duration::ZERO)), Ok(text("c"))]);
        let mut failed = body(failed.boxed());
        assert_eq!(frame(&mut failed).await.unwrap(), "abfailed");
        assert_eq!(frame(&mut failed).await, None);
    }

    #[tokio::test]
    async fn a_route_that_the_head_does_not_name_is_named_once() {
        let accepted =
            |route: &str| Ok(EventKind::Accepted { n_prompt: 1, route: route.into(), sampling: Box::default() }.of(0));
        let rerouted = |route: &str| Ok(EventKind::Rerouted { route: route.into() }.of(0));
        let steps = || stream::iter([accepted("x"), accepted("x"), Ok(text("b")), rerouted("y")]).boxed();
        assert_eq!(frame(&mut body(steps())).await.unwrap(), "a(x-baton-route: x)b(x-baton-route: y).");
        let mut told = body(steps()).told("x".into());
        assert_eq!(frame(&mut told).await.unwrap(), "ab(x-baton-route: y).");
    }

    #[tokio::test]
    async fn a_chunk_is_bounded_however_much_is_ready() {
        let long = "x".repeat(1_000);
        let steps: Vec<_> = (0..100).map(|_| Ok(text(&long))).collect();
        let mut body = body(stream::iter(steps).boxed());
        let mut n_bytes = 0;
        while let Some(chunk) = frame(&mut body).await {
            assert!(chunk.len() < MAX_CHUNK_BYTES + long.len());
            n_bytes += chunk.len();
        }
        assert_eq!(n_bytes, 100 * long.len() + 2);
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeats_fill_silence_and_nothing_else() {
        let steps = async_stream::stream! {
            for _ in 0..3 {
                sleep(HEARTBEAT * 7 / 10).await;
                yield Ok(text("b"));
            }
            std::future::pending::<()>().await;
        };
        let mut body = body(steps.boxed());
        let began = Instant::now();
        let mut chunks = Vec::new();
        for _ in 0..6 {
            let chunk = frame(&mut body).await.unwrap();
            chunks.push((chunk, began.elapsed().as_secs()));
        }
        let expected = [("a", 0), ("b", 7), ("b", 14), ("b", 21), ("!", 31), ("!", 41)];
        assert_eq!(chunks, expected.map(|(chunk, at)| (Bytes::from_static(chunk.as_bytes()), at)));
    }
}
