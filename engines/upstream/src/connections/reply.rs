//! A reply whose head has come.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderMap, Response, StatusCode, header};
use hyper::body::Incoming;

use super::idle::IdleConnections;
use super::local::{LocalConnection, poll_data};
use super::shared::SharedConnection;
use super::unpack::{UnknownPacking, Unpacker};
use crate::{UpstreamError, UpstreamFailure};

/// How long to wait for the end of a complete reply's body, so that the connection can be used again: several round trips
/// of a wide network. A new connection costs two or three.
const TAIL_TIME: Duration = Duration::from_millis(200);

/// The head of a reply, and its body.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: ReplyBody,
}

/// The pieces of a reply's body, unpacked. Dropping it before its end closes the connection, or on a shared one cancels the
/// call.
pub(crate) struct ReplyBody {
    /// `None` once it has ended.
    open: Option<OpenBody>,
    unpacker: Option<Unpacker>,
    /// Bytes that have come and are not unpacked.
    packed: Bytes,
}

/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error(transparent)]
    Connection(#[from] hyper::Error),
    /// It cannot be unpacked.
    #[error("the body cannot be unpacked: {0}")]
    Packing(#[from] io::Error),
}

impl BodyError {
    /// The failure of a call whose body broke off.
    pub(crate) fn failure(self) -> UpstreamError {
        match self {
            BodyError::Connection(error) => UpstreamError::failed(UpstreamFailure::Unreachable, error),
            BodyError::Packing(_) => UpstreamError::malformed(self),
        }
    }
}

/// A body that has not ended.
enum OpenBody {
    Local {
        incoming: Incoming,
        connection: Box<LocalConnection>,
        /// `None` if the connection must not be used again.
        home: Option<Arc<IdleConnections>>,
    },
    Shared {
        incoming: Incoming,
        _connection: SharedConnection,
    },
}

impl Reply {
    /// A reply on a connection that returns to `home` at the end of its body. Errors: its body is packed in an unknown way.
    pub(super) fn local(
        response: Response<Incoming>,
        connection: Box<LocalConnection>,
        home: Arc<IdleConnections>,
    ) -> Result<Reply, UnknownPacking> {
        // A server that states the body's length in both ways may mean one that is not read here (RFC 9112, section 6.3):
        // what follows would be taken for the next reply.
        let headers = response.headers();
        let has_both = headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH);
        let home = Some(home).filter(|_| !has_both);
        Reply::new(response, |incoming| OpenBody::Local { incoming, connection, home })
    }

    /// Errors: the body is packed in an unknown way.
    pub(super) fn shared(response: Response<Incoming>, connection: SharedConnection) -> Result<Reply, UnknownPacking> {
        Reply::new(response, |incoming| OpenBody::Shared { incoming, _connection: connection })
    }

    fn new(response: Response<Incoming>, open: impl FnOnce(Incoming) -> OpenBody) -> Result<Reply, UnknownPacking> {
        let (head, incoming) = response.into_parts();
        let unpacker = Unpacker::of(&head.headers)?;
        let body = ReplyBody { open: Some(open(incoming)), unpacker, packed: Bytes::new() };
        Ok(Reply { status: head.status, headers: head.headers, body })
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

impl ReplyBody {
    /// The next piece as it comes.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, hyper::Error>>> {
        let polled = match &mut self.open {
            None => return Poll::Ready(None),
            Some(OpenBody::Local { incoming, connection, .. }) => connection.poll_body(cx, incoming),
            Some(OpenBody::Shared { incoming, .. }) => poll_data(incoming, cx),
        };
        if let Poll::Ready(None) = polled
            && let Some(OpenBody::Local { connection, home: Some(home), .. }) = self.open.take()
        {
            home.put(connection);
        }
        polled
    }
}

impl Stream for ReplyBody {
    type Item = Result<Bytes, BodyError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let (Some(unpacker), false) = (&mut this.unpacker, this.packed.is_empty()) {
                match unpacker.unpack(&mut this.packed) {
                    Ok(unpacked) if unpacked.is_empty() => continue,
                    Ok(unpacked) => return Poll::Ready(Some(Ok(unpacked))),
                    Err(error) => {
                        this.open = None;
                        this.packed = Bytes::new();
                        return Poll::Ready(Some(Err(error.into())));
                    }
                }
            }
            match (ready!(this.poll_piece(cx)), &this.unpacker) {
                (Some(Ok(piece)), Some(_)) => this.packed = piece,
                (None, Some(_)) => {
                    let rest = this.unpacker.take().map_or_else(|| Ok(Bytes::new()), Unpacker::end);
                    return match rest {
                        Ok(rest) if rest.is_empty() => Poll::Ready(None),
                        rest => Poll::Ready(Some(rest.map_err(BodyError::from))),
                    };
                }
                (piece, _) => return Poll::Ready(piece.map(|piece| piece.map_err(BodyError::from))),
            }
        }
    }
}
