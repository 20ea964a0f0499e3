//! What requests meet that come while the server stops: those that run may finish, and who asks is told.
//!
//! The listener stays open meanwhile. A load balancer learns from `/health` that it is to send nothing more, which a
//! closed port would not tell from a crash, and a client on a connection that it has kept gets an answer and no reset.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, Version, header};
use hyper::body::{Frame, SizeHint};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::dialect::Dialect;
use super::errors::Failure;
use super::steps::{Stopping, is_stopping};

/// What goes on being answered: whether this server is to be used, and what it does.
const STILL_ANSWERED: [&str; 4] = ["/health", "/v1/health", "/metrics", "/baton/state"];

/// Refuses what comes after the stop began. Every reply from then on ends its connection.
pub(super) async fn refuse(request: Request, next: Next) -> Response {
    if !request.extensions().get::<Stopping>().is_some_and(|stopping| stopping.0.is_cancelled()) {
        return next.run(request).await;
    }
    // HTTP/2 has other words for it, and hyper says them.
    let closes = request.version() < Version::HTTP_2;
    let path = request.uri().path();
    let mut response = match STILL_ANSWERED.contains(&path) {
        true => next.run(request).await,
        false => Failure::from(&is_stopping()).respond(Dialect::of(path)),
    };
    if closes {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The body of a reply that is waited for: it counts as running until it has been taken or dropped.
pub(super) struct Awaited {
    body: Body,
    _running: TaskTrackerToken,
}

impl Awaited {
    /// The body, and what counts it.
    pub(super) fn new(body: Body, running: TaskTrackerToken) -> Awaited {
        Awaited { body, _running: running }
    }
}

impl HttpBody for Awaited {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
