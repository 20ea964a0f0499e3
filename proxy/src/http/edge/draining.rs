//! Refuses new requests while the server stops. Running requests may finish.
//!
//! The listener stays open meanwhile. A load balancer learns from `/health` to send no more requests; a closed port
//! would look like a crash. A client on a keep-alive connection gets an answer instead of a reset.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, Version, header};
use hyper::body::{Frame, SizeHint};

use super::super::dialect::Dialect;
use super::super::errors::HttpFailure;
use super::super::reply::request_steps::{Stopping, is_stopping};

/// Refuses requests that arrive after the shutdown began, except those for the paths in `answered`. From then on every
/// reply closes its connection.
pub(in crate::http) async fn refuse(answered: &[&'static str], request: Request, next: Next) -> Response {
    if !request.extensions().get::<Stopping>().is_some_and(|stopping| stopping.0.is_cancelled()) {
        return next.run(request).await;
    }
    // On HTTP/2, hyper sends GOAWAY instead.
    let closes = request.version() < Version::HTTP_2;
    let path = request.uri().path();
    let mut response = match answered.contains(&path) {
        true => next.run(request).await,
        false => HttpFailure::from(&is_stopping()).respond(Dialect::of(path)),
    };
    if closes {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The body of a reply. It keeps a value until the body is sent or dropped, such as the token that counts the request as
/// running.
pub(in crate::http) struct DrainedBody<T> {
    body: Body,
    _kept: T,
}

impl<T> DrainedBody<T> {
    pub(in crate::http) fn new(body: Body, kept: T) -> Self {
        DrainedBody { body, _kept: kept }
    }
}

impl<T: Unpin> HttpBody for DrainedBody<T> {
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
