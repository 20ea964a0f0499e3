//! A reply whose head has come.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderMap, Response, StatusCode};
use hyper::body::Incoming;

use super::idle::IdleConnections;
use super::local::{LocalConnection, poll_data};
use super::shared::SharedConnection;

/// How long to wait for the end of a complete reply's body, so that the connection can be used again: several round trips
/// of a wide network. A new connection costs two or three.
const TAIL_TIME: Duration = Duration::from_millis(200);

/// The head of a reply, and its body.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: ReplyBody,
}

/// The pieces of a reply's body. Dropping it before its end closes the connection, or on a shared one cancels the call.
pub(crate) struct ReplyBody(Option<OpenBody>);

/// A body that has not ended.
enum OpenBody {
    Local { incoming: Incoming, connection: Box<LocalConnection>, home: Arc<IdleConnections> },
    Shared { incoming: Incoming, _connection: SharedConnection },
}

impl Reply {
    /// A reply on a connection that returns to `home` at the end of its body.
    pub(super) fn local(
        response: Response<Incoming>,
        connection: Box<LocalConnection>,
        home: Arc<IdleConnections>,
    ) -> Reply {
        Reply::new(response, |incoming| OpenBody::Local { incoming, connection, home })
    }

    pub(super) fn shared(response: Response<Incoming>, connection: SharedConnection) -> Reply {
        Reply::new(response, |incoming| OpenBody::Shared { incoming, _connection: connection })
    }

    fn new(response: Response<Incoming>, open: impl FnOnce(Incoming) -> OpenBody) -> Reply {
        let (head, incoming) = response.into_parts();
        Reply { status: head.status, headers: head.headers, body: ReplyBody(Some(open(incoming))) }
    }
}

impl ReplyBody {
    /// Reads a body to its end whose reply is complete, in a task unless the end has come. Then the connection can be
    /// used again.
    pub(crate) fn finish(mut self) {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        if matches!(self.poll_next_unpin(&mut cx), Poll::Ready(None | Some(Err(_)))) {
            return;
        }
        tokio::spawn(tokio::time::timeout(TAIL_TIME, async move { while let Some(Ok(_)) = self.next().await {} }));
    }
}

impl Stream for ReplyBody {
    type Item = Result<Bytes, hyper::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = match &mut self.0 {
            None => return Poll::Ready(None),
            Some(OpenBody::Local { incoming, connection, .. }) => connection.poll_body(cx, incoming),
            Some(OpenBody::Shared { incoming, .. }) => poll_data(incoming, cx),
        };
        if let Poll::Ready(None) = polled
            && let Some(OpenBody::Local { connection, home, .. }) = self.0.take()
        {
            home.put(connection);
        }
        polled
    }
}
