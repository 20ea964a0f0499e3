//! Discards a request body that no handler read, because the head decided the reply: an unknown path, a missing key, a
//! method that the path does not take.
//!
//! hyper closes such a connection silently, and a client that reuses it, or is still sending, meets a broken pipe. So the
//! rest of the body is read and discarded; where it is long or slow, the reply announces that the connection closes.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, Version, header};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;

/// How many bytes of an unread body are read to save the connection: enough for a long conversation, not for an upload.
const DISCARD_BYTES: u64 = 1 << 20;

/// Time for these bytes to arrive. The reply waits for them, because most clients read it only after they have sent
/// everything.
const DISCARD_FOR: Duration = Duration::from_secs(1);

/// A body that a handler may read, and what to do with the rest.
pub(in crate::http) struct UnreadBody {
    unread: oneshot::Receiver<Body>,
    /// HTTP/2 closes the stream, not its connection.
    closes: bool,
    /// The client waits for '100 Continue'. Reading would make it send the body.
    waits: bool,
}

impl UnreadBody {
    /// Lends the request's body to its handler. `None` if it has no body.
    pub(in crate::http) fn lend(request: &mut Request) -> Option<UnreadBody> {
        if request.body().is_end_stream() {
            return None;
        }
        let (back, unread) = oneshot::channel();
        let body = std::mem::take(request.body_mut());
        *request.body_mut() = Body::new(LentBody { body: Some(body), back: Some(back) });
        let closes = request.version() < Version::HTTP_2;
        Some(UnreadBody { unread, closes, waits: request.headers().contains_key(header::EXPECT) })
    }

    /// Reads what the handler left of the body, or announces that the connection closes.
    pub(in crate::http) async fn settle(mut self, response: &mut Response) {
        let is_read = match self.unread.try_recv() {
            Ok(mut body) => !self.waits && discard(&mut body, DISCARD_BYTES, DISCARD_FOR).await,
            // The body was read to its end, or a handler still reads it.
            Err(_) => true,
        };
        if !is_read && self.closes {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

/// Reads to the end. Returns false if the body is longer than `max_bytes` or takes longer than `max_time`.
pub(in crate::http) async fn discard(body: &mut Body, max_bytes: u64, max_time: Duration) -> bool {
    let mut n_left = max_bytes;
    let rest = async {
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            let n = frame.data_ref().map_or(0, |data| data.len() as u64);
            match n_left.checked_sub(n) {
                Some(left) => n_left = left,
                None => return false,
            }
        }
        true
    };
    tokio::time::timeout(max_time, rest).await.unwrap_or(false)
}

/// A body that is sent back to [`UnreadBody`] unless a handler reads it to the end.
struct LentBody {
    body: Option<Body>,
    back: Option<oneshot::Sender<Body>>,
}

impl HttpBody for LentBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for LentBody {
    fn drop(&mut self) {
        if let (Some(body), Some(back)) = (self.body.take().filter(|body| !body.is_end_stream()), self.back.take()) {
            // If the reply has begun, the receiver is gone and the rest stays unread.
            let _ = back.send(body);
        }
    }
}
